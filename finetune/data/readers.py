"""One file, as a stream of documents. Every error names the file and the line or row."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from finetune.data.conversations import RecordForm
from finetune.errors import DataError

END_OF_TEXT = "<|endoftext|>"

_JSON_CHUNK = 1 << 20
_BATCH_ROWS = 1024


class Document(NamedTuple):
    """A text as it was found."""

    text: str
    """Of a conversation its JSON; empty where a broken one is left out."""
    label: int | str | None
    """None where no label was asked for."""
    where: str
    """File and line, for error messages."""


class Fields(NamedTuple):
    """What to take from each record."""

    text: str
    label: str | None
    """None where labels are not wanted."""
    form: RecordForm | None = None
    """How records become conversations; None where they are documents."""

    @property
    def columns(self) -> list[str] | None:
        """The fields that are read; None for all."""
        return None if self.form else list(dict.fromkeys(name for name in (self.text, self.label) if name is not None))


def read_file(path: Path, fields: Fields) -> Iterator[Document]:
    """Reads a .txt, .jsonl, .json, .parquet or .csv file, never more than a part of it at once.

    Raises:
        DataError: If the file cannot be opened, is malformed, or lacks a field.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} ends in '{path.suffix}', which is no format that can be read. Allowed are "
            f"{', '.join(_READERS)}, or a directory written by `datasets`' save_to_disk; convert the file."
        )
    try:
        yield from reader(path, fields)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check data.train and data.validation."
        ) from error


def document_of(record: Any, fields: Fields, where: str) -> Document:
    """Takes text and label out of one record.

    Raises:
        DataError: If a field is missing, the text is no text, or the label is no class.
    """
    if fields.form is not None:
        return Document(fields.form.read(record, where), None, where)
    if isinstance(record, str) and fields.label is None:
        return Document(record, None, where)
    if not isinstance(record, Mapping):
        raise DataError(
            f"{where}: got {_kind(record)} where an object with a field '{fields.text}' is needed. "
            "Write each document as an object."
        )
    require_fields(record, fields, where)
    text = record[fields.text]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: the field '{fields.text}' holds {_kind(text)}, and only text can be read. Remove or "
            "mend "
            "the record, or name another field as `text_field`."
        )
    if fields.label is None:
        return Document(text, None, where)
    label = record[fields.label]
    if not isinstance(label, int | str):
        raise DataError(
            f"{where}: the label in '{fields.label}' is {_kind(label)}; a class is an integer or a text. "
            "Mend "
            "the record, or name another field as `label_field`."
        )
    return Document(text, int(label) if isinstance(label, bool) else label, where)


def require_fields(present: Iterable[str], fields: Fields, where: str) -> None:
    """Checks that the wanted fields are there.

    Raises:
        DataError: Naming the fields that are there instead.
    """
    if fields.form is not None:
        return
    names = list(present)
    for key, field in (("text_field", fields.text), ("label_field", fields.label)):
        if field is not None and field not in names:
            raise DataError(
                f"{where}: there is no field '{field}'; the fields are "
                f"{', '.join(map(str, names)) or 'none'}. "
                f"Name one of them as the source's `{key}`{_or_chat(names)}."
            )


def _or_chat(names: Iterable[str]) -> str:
    spoken = {"messages", "conversations", "instruction", "completion"} & set(names)
    return ", or give the recipe a `chat` section if these are conversations" if spoken else ""


def _read_txt(path: Path, fields: Fields) -> Iterator[Document]:
    if fields.label is not None:
        raise DataError(
            f"{path} is plain text and has no labels, which sequence classification needs. Give a .jsonl, "
            ".json, "
            ".parquet or .csv file with a label field."
        )
    lines: list[str] = []
    first = 1
    for number, line in _lines(path):
        if line.strip() != END_OF_TEXT:
            lines.append(line.replace("\r\n", "\n"))
            continue
        yield document_of("".join(lines), fields, f"{path}, line {first}")
        lines.clear()
        first = number + 1
    rest = "".join(lines)
    if rest.strip():
        yield document_of(rest, fields, f"{path}, line {first}")


def _read_jsonl(path: Path, fields: Fields) -> Iterator[Document]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{where} is not valid JSON ({error}). A JSON-lines file holds one object a line; mend or "
                "remove the line."
            ) from error
        yield document_of(record, fields, where)


def _read_json(path: Path, fields: Fields) -> Iterator[Document]:
    with path.open("rb") as file:
        start = file.read(_JSON_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start == b"{":
        # Many published `.json` files are JSON lines.
        yield from _read_jsonl(path, fields)
        return
    for number, record in enumerate(_json_list(path), start=1):
        yield document_of(record, fields, f"{path}, item {number}")


def _json_list(path: Path) -> Iterator[Any]:
    """The items of a JSON list, parsed one by one so that the file is never in memory as a whole."""
    decoder = json.JSONDecoder()
    lines = (line for _, line in _lines(path))
    buffer, position, passed, ended = "", 0, 0, False
    opened = closed = False
    comma = False
    while True:
        position = _skip_space(buffer, position)
        if position == len(buffer) and not ended:
            passed += buffer.count("\n")
            buffer, position, ended = _more(lines, "", _JSON_CHUNK)
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
        elif comma:
            comma = rest != ","
            problem = "a comma or the end of the list is missing" if comma else ""
            position += 1
        else:
            try:
                item, position = decoder.raw_decode(buffer, position)
            except json.JSONDecodeError as error:
                if not ended:
                    passed += buffer.count("\n", 0, position)
                    buffer, position, ended = _more(lines, buffer[position:], 2 * (len(buffer) - position))
                    continue
                problem = error.msg
                position = error.pos
            else:
                comma = True
                yield item
        if problem:
            line = passed + buffer.count("\n", 0, position) + 1
            raise DataError(f"{path}, line {line} is not valid JSON: {problem}. Mend the file.")


def _more(lines: Iterator[str], kept: str, size: int) -> tuple[str, int, bool]:
    """`kept` and at least `size` more characters; also the position 0, and whether the file ended."""
    parts, got = [kept], 0
    for line in lines:
        parts.append(line)
        got += len(line)
        if got >= max(size, _JSON_CHUNK):
            return "".join(parts), 0, False
    return "".join(parts), 0, True


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _read_csv(path: Path, fields: Fields) -> Iterator[Document]:
    # Documents are longer than the module's own limit of 128 KiB a field.
    csv.field_size_limit(2**31 - 1)
    rows = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        require_fields(header, fields, str(path))
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{where} has {len(row)} columns and the header has {len(header)}. Mend the line, or put "
                    "quotes around texts that contain commas."
                )
            record: dict[str, Any] = dict(zip(header, row, strict=True))
            if fields.label is not None:
                record[fields.label] = _csv_label(record[fields.label])
            yield document_of(record, fields, where)
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num} is not valid CSV: {error}. Mend the line.") from error


def _csv_label(label: str) -> int | str:
    """CSV knows only text, so a class that is written as a number is one."""
    return int(label) if label.isascii() and label.isdigit() else label


def _read_parquet(path: Path, fields: Fields) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        require_fields(file.schema_arrow.names, fields, str(path))
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=fields.columns):
            for record in batch.to_pylist():
                number += 1
                yield document_of(record, fields, f"{path}, row {number}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}. Write it again.") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded one by one so that a bad byte is reported with its line."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            data = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            try:
                yield number, data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number} holds byte 0x{data[error.start]:02x}, which is not UTF-8. "
                    "Convert the "
                    "file to UTF-8, for example with iconv."
                ) from error


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else f"a {type(value).__name__}")


_READERS: dict[str, Callable[[Path, Fields], Iterator[Document]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
