"""A text file as lines, and a JSON list as items, of which never more than one and a chunk are in memory."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.utils.errors import DataError

MAX_DOCUMENT_BYTES = 1 << 24
"""Longest text. A tokenizer takes a hundred times as much memory."""
MAX_RECORD_BYTES = 1 << 26
"""Longest line or item of a file, which may hold more than the text, and that in escapes."""

_CHUNK = 1 << 20
# Errors of the JSON parser that near the end of what it has can mean that there is more to come.
_NEAR = 16


@dataclass
class Meter:
    """Progress of reading some files."""

    done: int = 0
    """Bytes."""


class JsonReader:
    """Parses JSON, and notes where only the last of several values is kept."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)
        self.duplicate_key: str | None = None
        """A key that an object of the last text has more than once."""

    def decode(self, text: str) -> Any:
        """A whole text.

        Raises:
            ValueError: If it is not JSON, or its lists and objects are nested too deeply.
        """
        item, end = self.raw_decode(text, _skip_space(text, 0))
        if _skip_space(text, end) < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return item

    def raw_decode(self, text: str, position: int) -> tuple[Any, int]:
        """The item at a position and where it ends; raises like `decode`."""
        self.duplicate_key = None
        try:
            return self._decoder.raw_decode(text, position)
        except RecursionError as error:
            raise ValueError("its lists or objects are nested too deeply") from error

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            keys = [key for key, _ in pairs]
            self.duplicate_key = next(key for key in keys if keys.count(key) > 1)
        return members


def require_encodable(value: Any, where: str, what: str) -> None:
    """Raises a `DataError` if a value is a text that holds a lone surrogate, which cannot be tokenised or written."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: the {what} holds half a character ({value[error.start]!r}, a lone surrogate), which no "
                "encoding can represent. Mend or remove it."
            ) from error


def lines(path: Path, meter: Meter) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded one by one so that a bad byte is reported with its line.

    Raises:
        DataError: If a line is no UTF-8, or longer than `MAX_RECORD_BYTES`.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            meter.done += len(raw)
            if len(raw) > MAX_RECORD_BYTES:
                raise DataError(
                    f"{path}, line {number} is longer than {MAX_RECORD_BYTES >> 20} MiB. Put line ends into the file; "
                    "a list in one line is read part by part if the file's name ends in .json."
                )
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _no_utf8(path, number, error) from error


def json_items(path: Path, meter: Meter, reader: JsonReader) -> Iterator[Any]:
    """The items of a JSON list, parsed one by one so that the file is never in memory as a whole.

    Raises:
        DataError: If the file is no such list, or an item is longer than `MAX_RECORD_BYTES`.
        OSError: If the file cannot be read.
    """
    text = _JsonText(path, meter)
    if text.next_character() != "[":
        raise text.malformed("it must be a list of objects or of texts")
    text.position += 1
    number = 0
    while text.next_character() not in ("]", ""):
        number += 1
        yield text.item(reader, number)
        if text.next_character() == ",":
            text.position += 1
        elif text.next_character() not in ("]", ""):
            raise text.malformed("a comma or the end of the list is missing")
    if not text.next_character():
        raise text.malformed("the file ends before the list does, and may have been cut short")
    text.position += 1
    if text.next_character():
        raise text.malformed("there is something behind the end of the list")


class _JsonText:
    """A part of a file that is read on as it is needed."""

    def __init__(self, path: Path, meter: Meter) -> None:
        self._path, self._chunks = path, _chunks(path, meter)
        self._text, self._ended = "", False
        self._passed = 0  # lines before the part
        self.position = 0

    def next_character(self) -> str:
        """The next one that is not white space, at which `position` is then; empty at the end of the file."""
        self.position = _skip_space(self._text, self.position)
        while self.position == len(self._text) and not self._ended:
            self._read_on(_CHUNK)
            self.position = _skip_space(self._text, self.position)
        return self._text[self.position : self.position + 1]

    def item(self, reader: JsonReader, number: int) -> Any:
        """The item at `position`, which then is behind it."""
        while True:
            size = len(self._text) - self.position
            try:
                item, end = reader.raw_decode(self._text, self.position)
                problem, cut = "", end == len(self._text)  # a number may go on
            except json.JSONDecodeError as error:
                end, problem = error.pos, error.msg
                cut = error.pos + _NEAR >= len(self._text) or error.msg.startswith("Unterminated string")
            except ValueError as error:
                end, problem, cut = self.position, str(error), False
            if not cut or self._ended:
                break
            if size > MAX_RECORD_BYTES:
                raise self.malformed(
                    f"the item that begins here is longer than {MAX_RECORD_BYTES >> 20} MiB, or does not end"
                )
            self._read_on(size)
        self.position = end
        if problem and self._ended and not self._text.rstrip().endswith("]"):
            raise self.malformed(f"the file may have been cut short in item {number}: {problem}")
        if problem:
            raise self.malformed(problem)
        return item

    def malformed(self, problem: str) -> DataError:
        """The error for what is at `position`."""
        line = self._passed + self._text.count("\n", 0, self.position) + 1
        return DataError(f"{self._path}, line {line} is not valid JSON: {problem}. Mend the file.")

    def _read_on(self, size: int) -> None:
        """Leaves what is before `position`, and reads at least `size` more characters if there are as many."""
        self._passed += self._text.count("\n", 0, self.position)
        parts, read = [self._text[self.position :]], 0
        while read < size and not self._ended:
            chunk = next(self._chunks, "")
            self._ended = not chunk
            parts.append(chunk)
            read += len(chunk)
        self._text, self.position = "".join(parts), 0


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _chunks(path: Path, meter: Meter) -> Iterator[str]:
    """The text in parts, none of them empty, which may end anywhere but within a character."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    with path.open("rb") as file:
        try:
            while raw := file.read(_CHUNK):
                meter.done += len(raw)
                if text := decoder.decode(raw):
                    line += text.count("\n")
                    yield text
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise _no_utf8(path, line + error.object.count(b"\n", 0, error.start), error) from error


def _no_utf8(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{path}, line {line} holds byte 0x{error.object[error.start]:02x}, which is not UTF-8. Convert the file to "
        "UTF-8, for example with iconv."
    )
