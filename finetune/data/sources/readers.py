"""One file, as a stream of documents. Every error names the file and the line or row."""

import csv
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config.recipe_paths import check_format
from finetune.data.sources.column_names import as_overrides, guess_chat_fields, guess_field, unread_kind
from finetune.data.sources.conversation_formats import MOST_WEIGHT, InvalidConversation, RecordForm, kind_of
from finetune.data.sources.streams import MAX_DOCUMENT_BYTES, MAX_RECORD_BYTES, JsonReader, Meter, json_items, lines
from finetune.utils import json_files
from finetune.utils.errors import DataError

END_OF_TEXT = "<|endoftext|>"
DUPLICATE_KEY, SWALLOWED = "duplicate_key", "swallowed"
"""Kinds of issues that only a reader sees."""

BATCH_ROWS = 1024
"""Rows of a table that are in memory at once."""
_DELIMITERS = (",", ";", "\t", "|")
_SNIFFED_ROWS = 20
_SHORT = 40
_QUOTED = re.compile('"(?:[^"]|"")*"')
_CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_CONLL_COMMENT = re.compile(r"#\s+\w+( id)? = ")


class Document(NamedTuple):
    """A text as it was found."""

    text: str
    """The text, or the JSON of a conversation or of words; empty where a broken one is left out."""
    where: str
    """File and line, for error messages."""
    labels: tuple[int | str | float, ...] = ()
    """Its class or number, or the tag of each of its words; empty where none was asked for."""
    pair: str | None = None
    """The second of two texts."""
    issue: tuple[str, str] | None = None
    """An issue that its reader has seen: its kind, and an example."""
    record: Mapping[str, Any] | None = None
    """All fields of the record, where these were asked for."""
    weight: float = 1.0
    """Factor of its losses."""


def read_text(
    record: Mapping[str, Any],
    fields: "Fields",
    where: str,
    *,
    label_of: "Callable[[Any, Fields, str], int | str | float] | None" = None,
    needed: bool = False,
) -> Document:
    """Takes a text or two out of a record, and its class where that is wanted.

    Args:
        label_of: Reads the label; left out, it is a class.
        needed: Refuses a pair of which a text is empty.

    Raises:
        DataError: If a text is no text, or the label is none.
    """
    names = {"text_field": fields.text} | ({} if fields.pair is None else {"pair_field": fields.pair})
    # A missing value is an empty text, which is all that CSV can write for it.
    texts = ["" if value is None or value != value else value for value in map(record.__getitem__, names.values())]
    for (key, name), value in zip(names.items(), texts, strict=True):
        if not isinstance(value, str):
            problem = f"holds {kind_of(value)}, and only text can be read. Remove or mend"
        elif needed and fields.pair is not None and not value.strip():
            problem = "is empty, and both source and target need a text. Mend or remove"
        else:
            continue
        raise DataError(f"{where}: the field '{name}' {problem} the record, or name another field as `{key}`.")
    labels = () if fields.label is None else ((label_of or class_of)(record[fields.label], fields, where),)
    return Document(texts[0], where, labels, pair=texts[1] if len(texts) > 1 else None)


class Fields(NamedTuple):
    """Fields to take from each record, and how."""

    text: str
    label: str | None = None
    """None where labels are not wanted."""
    form: RecordForm | None = None
    """The way that records become conversations; None where they are documents."""
    classes: tuple[str, ...] = ()
    """Names that the file itself gives to the numbers in `label`, if it does."""
    pair: str | None = None
    """Field of a second text; None where documents have one."""
    read: Callable[[Mapping[str, Any], "Fields", str], Document] = read_text
    """Takes a document out of a record, given its file and line."""
    by_word: bool = False
    """True if `text` holds words, and `label` a tag for each."""
    key: tuple[str, ...] = ()
    """What `read` adds to the cache's key."""
    source: str = ""
    """Key of the recipe's source, such as `data.train.0`, for error messages; empty where it is not known."""
    keep: bool = False
    """True if documents keep their records."""
    weight: str | None = None
    """Field of the factor of a document's losses; None where all have 1."""
    takes_chat: bool = True
    """True if a `chat` section could make conversations of the records."""

    @property
    def as_json(self) -> bool:
        """True if texts are kept as JSON: conversations, pairs and words."""
        return self.by_word or self.form is not None or self.pair is not None

    @property
    def columns(self) -> list[str] | None:
        """The fields that are read; None for all."""
        names = (self.text, self.pair, self.label, self.weight)
        return None if self.form or self.keep else list(dict.fromkeys(name for name in names if name is not None))


def read_file(path: Path, fields: Fields, meter: Meter | None = None) -> Iterator[Document]:
    """Reads a .txt, .jsonl, .json, .parquet, .csv, .tsv or .conll file, never more than a part of it at once.

    Args:
        meter: Goes forward by the file's size.

    Raises:
        DataError: If the file cannot be opened, is malformed, or lacks a field.
    """
    check_format(path)
    with refuse_unreadable(path):
        yield from _READERS[path.suffix.lower()](path, fields, meter or Meter())


def refuse_unreadable(path: Path) -> AbstractContextManager[None]:
    """Makes an error of the file system one of the data."""
    return DataError.explaining(f"{path} cannot be read", "Check data.train and data.validation.", OSError)


def document_of(record: Any, fields: Fields, where: str) -> Document:
    """Takes a document out of one record.

    Raises:
        DataError: If a field is missing, the text is no text, or the label is no class.
    """
    if fields.keep:
        kept = record if isinstance(record, Mapping) else {fields.text: record}
        return document_of(record, fields._replace(keep=False), where)._replace(record=kept)
    if fields.form is not None:
        return Document(fields.form.read(record, where), where)
    if isinstance(record, str) and fields.label is fields.pair is fields.weight is None:
        record = {fields.text: record}
    if not isinstance(record, Mapping):
        raise DataError(
            f"{where}: got {kind_of(record)}. Write each document as an object with a field '{fields.text}'."
        )
    require_fields(record, fields, where)
    document = fields.read(record, fields, where)
    return document if fields.weight is None else document._replace(weight=_weight_of(record[fields.weight], where))


def _weight_of(value: Any, where: str) -> float:
    with suppress(TypeError, ValueError):  # a number of a CSV is a text
        if 0 <= (weight := float(value)) < MOST_WEIGHT:
            return weight
    raise DataError(
        f"{where}: the weight is {value!r}, and what a document counts is a number from 0 to a million. Mend or remove "
        "the record, or name another field as `weight_field`."
    )


def class_of(label: Any, fields: Fields, where: str) -> int | str:
    """The class that a record says, whatever format it comes from."""
    problem, classes = "", fields.classes
    # As CSV, JSON, pandas and `ClassLabel` write that there is none.
    blank = isinstance(label, str) and not label.strip()
    if label is None or blank or label != label or (classes and label == -1):
        problem = (
            f"missing ({'blank' if blank else label}). Write its class there, or remove the record: no label is no "
            "class of its own"
        )
    elif not isinstance(label, int | str):
        problem = f"{kind_of(label)}; a class is an integer or a text. Mend the record, or name another `label_field`"
    elif classes and isinstance(label, int) and not 0 <= label < len(classes):
        problem = f"{label}, but the data set names {len(classes)} classes, numbered from 0. Mend the record"
    if problem:
        raise DataError(f"{where}: the label in '{fields.label}' is {problem}.")
    if isinstance(label, str):
        return label
    return classes[label] if classes else int(label)


def integer_of(label: int | str | float) -> int | None:
    """Returns the integer that a label is, also as the text that `str` writes; None for any other, such as `01`."""
    if isinstance(label, str) and re.fullmatch("0|-?[1-9][0-9]{0,17}", label, re.ASCII):
        return int(label)
    return label if isinstance(label, int) else None


def label_order(label: int | str | float) -> tuple[bool, int | str]:
    """Returns the key by which labels are sorted: integers by size, however they are written, and then texts."""
    integer = integer_of(label)
    return (True, str(label)) if integer is None else (False, integer)


def class_names(features: Any, fields: Fields) -> tuple[str, ...]:
    """The names of the label's classes, in order of their numbers, if `datasets`' features hold any.

    Args:
        features: As JSON; whatever else a file holds there has no names.
    """
    feature = features.get(fields.label) if isinstance(features, Mapping) else None
    if fields.by_word:
        # A list of classes, which earlier versions write as a list of one feature.
        feature = feature.get("feature") if isinstance(feature, Mapping) else next(iter(feature or ()), None)
    names = feature.get("names") if isinstance(feature, Mapping) else None
    # A feature of several fields, one of which is called so, has another feature there.
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def file_classes(path: Path, fields: Fields) -> tuple[str, ...]:
    """Reads the `class_names` of a file: `datasets` writes its features into Parquet files.

    Raises:
        DataError: If it cannot be read.
    """
    if path.suffix.lower() != ".parquet" or fields.label is None:
        return ()
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}. Write it again.") from error
    try:
        features = json_files.parse(metadata.get(b"huggingface", b"null"))["info"]["features"]
    except (ValueError, LookupError, TypeError):
        return ()  # another program's
    return class_names(features, fields)


def too_long(where: str, why: str) -> DataError:
    """The error for a document that cannot be tokenised in bounded memory."""
    return DataError(
        f"{where}: the document is longer than {MAX_DOCUMENT_BYTES >> 20} MiB ({why}), and tokenising takes a hundred "
        "times a document's size in memory. Cut it into several documents; in a .txt file put a line `<|endoftext|>` "
        "between them."
    )


def require_fields(present: Iterable[str], fields: Fields, where: str) -> None:
    """Raises a `DataError` unless the wanted fields are there; it names those that are there instead."""
    if fields.form is not None:
        return
    names = list(present)
    chat, or_chat = guess_chat_fields(names), ""
    if chat or {"instruction", "completion"} & {*names}:
        mapping = as_overrides(fields.source, {f"fields.{key}": name for key, name in chat.items() if name != key})
        or_chat = f", or give the recipe a `chat` section if these are conversations: 'chat={{}}' {mapping}".rstrip()
        if not fields.takes_chat:
            or_chat = "; if these are conversations, write each as one text: this task reads texts only"
    wanted = {"text_field": fields.text, "pair_field": fields.pair, "label_field": fields.label}
    for key, field in {**wanted, "weight_field": fields.weight}.items():
        if field is not None and field not in names:
            advice = f"Name one of them as the source's `{key}`"
            guess = guess_field(names, key, words=fields.by_word)
            if guess is not None:
                advice += f", such as {as_overrides(fields.source, {key: guess})}"
            raise DataError(
                f"{where}: there is no field '{field}'; the fields are {', '.join(map(str, names)) or 'none'}. "
                f"{advice}{or_chat}. {unread_kind(names)}".rstrip()
            )


def _read_txt(path: Path, fields: Fields, meter: Meter) -> Iterator[Document]:
    if fields.label is not None:
        raise DataError(
            f"{path} is plain text and has no labels, which sequence classification needs. Give a .jsonl, .json, "
            ".parquet or .csv file with a label field."
        )
    if fields.pair is not None:
        raise DataError(
            f"{path} is plain text and has no pairs (`pair_field`). Give a .jsonl, .json, .parquet or .csv file with "
            "both fields."
        )
    buffer: list[str] = []
    first, size = 1, 0
    for number, line in lines(path, meter):
        if line.strip() != END_OF_TEXT:
            buffer.append(line.replace("\r\n", "\n"))
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise too_long(f"{path}, line {first}", "there is no line `<|endoftext|>` behind so much")
            continue
        yield document_of("".join(buffer), fields, f"{path}, line {first}")
        buffer.clear()
        first, size = number + 1, 0
    rest = "".join(buffer)
    if rest.strip():
        yield document_of(rest, fields, f"{path}, line {first}")


def _read_jsonl(path: Path, fields: Fields, meter: Meter) -> Iterator[Document]:
    reader = JsonReader()
    for number, line in lines(path, meter):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = reader.decode(line)
        except ValueError as error:
            # The last line, in the midst of a record.
            inside = isinstance(error, json.JSONDecodeError) and (
                error.msg.startswith("Unterminated") or error.pos >= len(line.rstrip())
            )
            cut = inside and not line.endswith("\n")
            raise DataError(
                f"{where} is not valid JSON ({error}). A JSON-lines file holds one object a line; mend or remove the "
                f"line.{' The file ends here, and may have been cut short.' if cut else ''}"
            ) from error
        yield document_of(record, fields, where)._replace(issue=_duplicate(reader))


def _read_json(path: Path, fields: Fields, meter: Meter) -> Iterator[Document]:
    with path.open("rb") as file:
        start = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"{":
        # Many published `.json` files are JSON lines.
        documents = _read_jsonl(path, fields, meter)
        try:
            first = next(documents, None)
        except InvalidConversation:
            raise
        except DataError as error:
            raise DataError(
                f"{error} A .json file is a list of records, or has each record in a line of its own: of an object "
                "that holds a list, write that list alone into a file."
            ) from error
        if first is not None:
            yield first
            yield from documents
        return
    reader = JsonReader()
    for number, record in enumerate(json_items(path, meter, reader), start=1):
        yield document_of(record, fields, f"{path}, item {number}")._replace(issue=_duplicate(reader))


def _duplicate(reader: JsonReader) -> tuple[str, str] | None:
    return None if reader.duplicate_key is None else (DUPLICATE_KEY, repr(reader.duplicate_key))


def _read_csv(path: Path, fields: Fields, meter: Meter) -> Iterator[Document]:
    # Documents are longer than the module's own limit of 128 KiB a field; a quote that never closes must end.
    csv.field_size_limit(MAX_RECORD_BYTES)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _find_delimiter(path)
    quote = None if delimiter == "\t" and _quotes_are_text(path) else '"'
    rows = csv.reader((line for _, line in lines(path, meter)), delimiter=delimiter, strict=True, quotechar=quote)
    begins = 1  # the line of a record that may go on over several, which is where a quote opens that never closes
    outer: tuple[set[str], set[str]] = set(), set()  # values of the first and the last column, unless they are texts
    try:
        header = next(rows, None)
        if header is None:
            return
        _require_header(header, fields, path)
        while True:
            begins = rows.line_num + 1
            row = next(rows, None)
            if row is None:
                return
            where = f"{path}, line {begins}"
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{where} has {len(row)} columns and the header has {len(header)} (divided by {delimiter!r}). Mend "
                    f"the line, or put quotes around texts that contain {delimiter!r}."
                )
            document = document_of(dict(zip(header, row, strict=True)), fields, where)
            for seen, at in zip(outer, (0, -1), strict=True):
                prose = header[at] in (fields.text, fields.pair) or len(row[at]) > _SHORT
                if row[at].strip() and not prose and len(seen) < BATCH_ROWS:
                    seen.add(_kind(row[at]))
            swallowed = [cell for cell in row if "\n" in cell and _swallows(cell, delimiter, *outer)]
            yield document._replace(issue=(SWALLOWED, repr(swallowed[0][:80]))) if swallowed else document
    except csv.Error as error:
        reason = "its lines end in carriage returns alone" if "new-line character" in str(error) else str(error)
        advice, further = "Mend the line", f", in a record that goes on to line {rows.line_num}"
        if "unexpected end of data" in reason:
            reason = "a quote opens in the record that begins there, and never closes"
            advice, further = "Close it; a quote inside a quoted text is written twice", ""
        further = further if rows.line_num > begins else ""
        raise DataError(f"{path}, line {begins} is not valid CSV: {reason}{further}. {advice}.") from error


def _swallows(cell: str, delimiter: str, firsts: Collection[str], lasts: Collection[str]) -> bool:
    """Tells if a cell of several lines may hold other rows.

    In prose there are commas and semicolons: then a line in it must begin or end with a cell as the table's rows do.
    """
    rows = cell.splitlines()
    return (
        (delimiter in "\t|" and delimiter in cell)
        or any(delimiter in row and _kind(row.partition(delimiter)[0]) in firsts for row in rows[1:])
        or any(delimiter in row and _kind(row.rpartition(delimiter)[2]) in lasts for row in rows[:-1])
    )


def _kind(cell: str) -> str:
    """Returns a short cell as it is compared with others: numbers are alike."""
    return "0" if cell.strip().isdecimal() else cell.strip()


def _quotes_are_text(path: Path) -> bool:
    """Tells if quotes in a file that tabs divide are characters like others, as in most corpora of this kind.

    They are if each line has all columns, and some column begins with a quote without being quoted as CSV quotes.
    """
    columns, stray = 0, False
    for _, line in lines(path, Meter()):
        if cells := line.rstrip("\r\n").split("\t") if line.strip("\r\n") else []:
            columns = columns or len(cells)
            if not 1 < columns == len(cells):
                return False
            stray = stray or any(cell.startswith('"') and not _QUOTED.fullmatch(cell) for cell in cells)
    return stray


def _find_delimiter(path: Path) -> str:
    """Finds what divides the columns: the first sign by which the first rows have as many as the header, and several.

    `csv.Sniffer` counts signs of single lines, and so takes those of prose.
    """
    for delimiter in _DELIMITERS:
        rows = csv.reader((line for _, line in lines(path, Meter())), delimiter=delimiter, strict=True)
        try:
            first, *more = filter(None, itertools.islice(rows, _SNIFFED_ROWS))
        except (csv.Error, ValueError):  # other quotes, or no line at all
            continue
        if len(first) > 1 and all(len(row) == len(first) for row in more):
            return delimiter
    # Whoever reads it says which line does not fit.
    _, header = next(lines(path, Meter()), (0, ""))
    return next((delimiter for delimiter in _DELIMITERS if delimiter in header), ",")


def _require_header(header: list[str], fields: Fields, path: Path) -> None:
    """Checks the first line of a CSV file."""
    if header and header[0].lower().startswith("sep="):
        raise DataError(f"{path}, line 1 is `{header[0]}`, a word to Excel and no header. Remove that line.")
    for name in fields.columns or header:
        if header.count(name) > 1:
            raise DataError(f"{path}: the header has the column '{name}' more than once. Name each column differently.")
    try:
        require_fields(header, fields, str(path))
    except DataError as error:
        raise DataError(
            f"{error} The first line of a CSV file must name its columns: if this file has no such line, put one "
            f"there, such as `{','.join(fields.columns or [])}`."
        ) from error


def _read_conll(path: Path, fields: Fields, meter: Meter) -> Iterator[Document]:
    """Sentences that blank lines end: a word in each line, and its tag, the last of the columns.

    In CoNLL-U, which has its own ten columns, the tag is the one that `label_field` names, or `upos`.
    """
    if not fields.by_word:
        raise DataError(
            f"{path} holds a word in each line, which is for tasks that tag words. Give a .txt, .jsonl, .json, "
            ".parquet or .csv file."
        )
    # Files are divided by tabs, so that words may have spaces, or by white space.
    token_lines = (
        line for _, line in lines(path, Meter()) if line.strip() and not line.startswith(("#", "-DOCSTART-"))
    )
    head = next(token_lines, "")
    by_tabs = "\t" in head.strip()

    def columns_of(line: str) -> list[str]:
        if by_tabs:
            return [column.strip(" ") for column in line.strip("\r\n").split("\t")]
        return re.split("[ \t]+", line.strip(" \t\r\n"))

    columns = columns_of(head)
    word, tag, universal = 0, -1, len(columns) == len(_CONLLU) and re.match("[0-9]+([-.][0-9]+)?$", columns[0])
    if universal:
        word, tag = 1, _CONLLU.index(fields.label if fields.label in _CONLLU else "upos")
    first, words, tags = 1, list[str](), list[str | None]()

    def sentence() -> Document:
        labels = {} if fields.label is None else {fields.label: tags}
        return document_of({**labels, fields.text: words}, fields, f"{path}, line {first}")

    for number, line in lines(path, meter):
        cells = columns_of(line)
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                yield sentence()
                words, tags = [], []
        elif (
            line.startswith("#")
            and not words
            and (("\t" in line.strip()) > by_tabs or len(cells) != len(columns) or _CONLL_COMMENT.match(line))
        ):
            continue  # a comment
        elif (universal or fields.label is not None) and not 1 < len(cells) == len(columns):
            has = f"{len(cells)} columns, and the first {len(columns)}" if len(cells) > 1 else "a word and no tag"
            raise DataError(
                f"{path}, line {number} has {has}. A line holds a word and, behind a space or tab, its tag in the last "
                "column, and each as many columns; a blank line ends a sentence. Mend the line."
            )
        elif not universal or cells[0].isdecimal():  # else words that are one in writing, or that are not written
            first = first if words else number
            words.append(cells[word])
            tags.append(None if universal and cells[tag] == "_" else cells[tag])
    if words:
        yield sentence()


def _read_parquet(path: Path, fields: Fields, meter: Meter) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    fields = fields._replace(classes=file_classes(path, fields))
    try:
        file = pyarrow.parquet.ParquetFile(path)
        require_fields(file.schema_arrow.names, fields, str(path))
        number, before, size = 0, meter.done, path.stat().st_size
        # Asked for all groups at once, it keeps in memory what it has passed.
        batches = (
            batch
            for group in range(file.num_row_groups)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=fields.columns)
        )
        for batch in batches:
            for record in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                meter.done = before + size * number // file.metadata.num_rows
                yield document_of(record, fields, f"{path}, row {number}")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}. Write it again.") from error


_READERS: dict[str, Callable[[Path, Fields, Meter], Iterator[Document]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".conll": _read_conll,
    ".conllu": _read_conll,
}
