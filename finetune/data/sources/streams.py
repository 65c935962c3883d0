"""A text file as lines, and a JSON list as items, of which never more than one and a chunk are in memory."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.utils.errors import DataError

MAX_DOCUMENT_BYTES = 1 << 24
"""Of one text. A tokenizer takes a hundred times as much memory."""
MAX_RECORD_BYTES = 1 << 26
"""Of one line or item of a file, which may hold more than the text, and that in escapes."""

_CHUNK = 1 << 20
# Errors of the JSON parser that near the end of what it has can mean that there is more to come.
_NEAR = 16
_CUT_SHORT = "the file ends before the list does, and may have been cut short"


@dataclass
class Meter:
    """How much of some files has been read."""

    done: int = 0
    """Bytes."""


class JsonReader:
    """Parses JSON, and notes where only the last of several values is kept."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)
        self.duplicate_key: str | None = None
        """Of the last text: a key that one of its objects has more than once."""

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
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            self.duplicate_key = next(key for key in keys if keys.count(key) > 1)
        return found


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
            data = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            try:
                yield number, data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _no_utf8(path, number, data[error.start]) from error


def json_items(path: Path, meter: Meter, reader: JsonReader) -> Iterator[Any]:
    """The items of a JSON list, parsed one by one so that the file is never in memory as a whole.

    Raises:
        DataError: If the file is no such list, or an item is longer than `MAX_RECORD_BYTES`.
        OSError: If the file cannot be read.
    """
    chunks = _chunks(path, meter)
    buffer, position, passed, ended = "", 0, 0, False
    opened = closed = False
    comma = False
    number = 0
    while True:
        position = _skip_space(buffer, position)
        if position == len(buffer) and not ended:
            passed += buffer.count("\n")
            buffer, position, ended = _more(chunks, "", _CHUNK)
            continue
        rest = buffer[position : position + 1]
        problem = ""
        if closed:
            if not rest:
                return
            problem = "there is something behind the end of the list"
        elif not opened:
            opened = rest == "["
            problem = "" if opened else "it must be a list of objects or of texts"
            position += 1
        elif rest == "]":
            closed = True
            position += 1
        elif not rest:
            problem = _CUT_SHORT
        elif comma:
            comma = rest != ","
            problem = "a comma or the end of the list is missing" if comma else ""
            position += 1
        else:
            item, end, problem, cut = _parse(reader, buffer, position)
            if cut and not ended and len(buffer) - position <= MAX_RECORD_BYTES:
                passed += buffer.count("\n", 0, position)
                buffer, position, ended = _more(chunks, buffer[position:], len(buffer) - position)
                continue
            if cut and not ended:
                problem = f"the item that begins here is longer than {MAX_RECORD_BYTES >> 20} MiB, or does not end"
                end = position
            if problem and ended and not buffer.rstrip().endswith("]"):
                problem = f"{_CUT_SHORT} in item {number + 1}: {problem}"
            position = end
            if not problem:
                comma = True
                number += 1
                yield item
        if problem:
            line = passed + buffer.count("\n", 0, position) + 1
            raise DataError(f"{path}, line {line} is not valid JSON: {problem}. Mend the file.")


def _parse(reader: JsonReader, buffer: str, position: int) -> tuple[Any, int, str, bool]:
    """The item at a position, where it ends, what is wrong with it, and whether more text could change that."""
    try:
        item, end = reader.raw_decode(buffer, position)
    except json.JSONDecodeError as error:
        near = error.pos + _NEAR >= len(buffer) or error.msg.startswith("Unterminated string")
        return None, error.pos, error.msg, near
    except ValueError as error:
        return None, position, str(error), False
    return item, end, "", end == len(buffer)  # a number may go on


def _more(chunks: Iterator[str], kept: str, size: int) -> tuple[str, int, bool]:
    """`kept` and at least `size` more characters; also the position 0, and whether the file ended."""
    parts, got = [kept], 0
    for chunk in chunks:
        parts.append(chunk)
        got += len(chunk)
        if got >= size:
            return "".join(parts), 0, False
    return "".join(parts), 0, True


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _chunks(path: Path, meter: Meter) -> Iterator[str]:
    """The text in parts, which may end anywhere but within a character."""
    line = 1
    with path.open("rb") as file:
        rest = b""
        first = True
        while raw := file.read(_CHUNK):
            meter.done += len(raw)
            data = rest + (raw.removeprefix(codecs.BOM_UTF8) if first else raw)
            first = False
            try:
                text, used = codecs.utf_8_decode(data, "strict", False)
            except UnicodeDecodeError as error:
                raise _no_utf8(path, line + data.count(b"\n", 0, error.start), data[error.start]) from error
            line += text.count("\n")
            rest = data[used:]
            yield text
        if rest:
            raise _no_utf8(path, line, rest[0])


def _no_utf8(path: Path, line: int, byte: int) -> DataError:
    return DataError(
        f"{path}, line {line} holds byte 0x{byte:02x}, which is not UTF-8. Convert the file to UTF-8, for example with "
        "iconv."
    )
