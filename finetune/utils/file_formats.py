"""Formats of files, told from their first bytes, whatever their names say.

A file that cannot be read raises an `OSError`.
"""

import re
from pathlib import Path
from typing import NamedTuple

_START = 1024
# Of a text in UTF-16 without its mark, nearly every second byte is zero.
_UTF_16_SHARE = 0.4


class Format(NamedTuple):
    """Format that the first bytes of a file show."""

    name: str
    advice: str


def _packed(name: str, command: str) -> Format:
    return Format(name, f"Unpack it, for example with `{command}`, and name what was in it.")


_TEXT = "Write what it holds to a text file."
_UTF_8 = "Convert it, for example with `iconv -f {} -t UTF-8`."
PARQUET = Format("a Parquet file", "Give it a name that ends in .parquet.")
LFS = Format("a Git LFS pointer", "The file itself has not been downloaded: get it with `git lfs pull`.")
GGUF = Format("a GGUF file", "It holds a model in the format of llama.cpp, which is not read here.")
HTML = Format("an HTML page", "It may be what a server answered instead of the file: download it again.")
_ARROW = Format("an Arrow file", "Name the directory that `save_to_disk` has written, or convert it to Parquet.")
_OFFICE = Format("a document of Excel or another office program", "Save its table as CSV in UTF-8, and name that file.")

# The longer of two that begin alike comes first.
_SIGNATURES = {
    b"\x1f\x8b": _packed("gzip-compressed", "gunzip < FILE > UNPACKED"),
    b"\x28\xb5\x2f\xfd": _packed("zstd-compressed", "zstd -d < FILE > UNPACKED"),
    b"BZh": _packed("bzip2-compressed", "bunzip2 < FILE > UNPACKED"),
    b"\xfd7zXZ\x00": _packed("xz-compressed", "unxz < FILE > UNPACKED"),
    b"\x04\x22\x4d\x18": _packed("lz4-compressed", "lz4 -d < FILE > UNPACKED"),
    b"PK\x03\x04": _packed("a zip archive", "unzip FILE"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": _OFFICE,
    b"PK\x05\x06": _packed("an empty zip archive", "unzip FILE"),
    b"7z\xbc\xaf\x27\x1c": _packed("a 7z archive", "7z x FILE"),
    b"Rar!\x1a\x07": _packed("a RAR archive", "unrar x FILE"),
    b"PAR1": PARQUET,
    b"ARROW1": _ARROW,
    b"\xff\xff\xff\xff": _ARROW,
    b"SQLite format 3\x00": Format("an SQLite database", _TEXT),
    b"\x89HDF\r\n\x1a\n": Format("an HDF5 file", _TEXT),
    b"Obj\x01": Format("an Avro file", _TEXT),
    b"ORC": Format("an ORC file", _TEXT),
    b"\x93NUMPY": Format("a NumPy array", _TEXT),
    b"%PDF-": Format("a PDF document", _TEXT),
    b"GGUF": GGUF,
    b"version https://git-lfs.github.com/spec/": LFS,
    b"\xff\xfe\x00\x00": Format("text in UTF-32", _UTF_8.format("UTF-32")),
    b"\x00\x00\xfe\xff": Format("text in UTF-32", _UTF_8.format("UTF-32")),
    b"\xff\xfe": Format("text in UTF-16", _UTF_8.format("UTF-16")),
    b"\xfe\xff": Format("text in UTF-16", _UTF_8.format("UTF-16")),
}


def format_of(path: Path) -> Format | None:
    """Returns the format of a file, if its first bytes show one other than text in UTF-8."""
    start = _start_of(path)
    if start[:2] == b"PK" and re.search(rb"\[Content_Types\]|docProps/|_rels/|xl/|opendocument", start):
        return _OFFICE
    for signature, file_format in _SIGNATURES.items():
        # A text may begin with letters that are a signature.
        if start.startswith(signature) and not (signature.isalnum() and _is_text(start)):
            return file_format
    if start[257:262] == b"ustar":
        return _packed("a tar archive", "tar -xf FILE")
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and len(start) > 1:
        return Format("a Python pickle", f"Pickles can run code, so none is read. {_TEXT}")
    for offset, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        every_second = start[offset::2]
        if every_second.count(0) > _UTF_16_SHARE * len(start) > 0 and start[1 - offset :: 2].count(0) == 0:
            return Format("text in UTF-16", _UTF_8.format(name))
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return HTML
    return None


def read_text(path: Path) -> str:
    """Returns the content of a text file of the user; of another one, a `ValueError` has the format and advice."""
    if file_format := format_of(path):
        raise ValueError(f"it is {file_format.name}. {file_format.advice.rstrip('.')}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error})") from error


def holds_text(path: Path) -> bool:
    """Tells if a file begins with text in UTF-8; an empty one does not."""
    start = _start_of(path)
    return bool(start) and _is_text(start)


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_START)


def _is_text(start: bytes) -> bool:
    """Tells if the first bytes of a file are text, which may end within a character."""
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.end < len(start) or error.start < len(start) - 3:
            return False
        text = start[: error.start].decode("utf-8")
    return all(character >= " " or character in "\t\r\n\f" for character in text)
