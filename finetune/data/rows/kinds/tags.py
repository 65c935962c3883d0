"""Documents of words, a row each, of which a tag of each word is learned at the word's first token."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.config.recipe import TAG_FIGURES
from finetune.data.class_labels import ClassList
from finetune.data.rows.kinds import classes
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, Shown, TokenRows, pad
from finetune.data.rows.packed_rows import IGNORED, PackedRows, ranges
from finetune.data.sources.column_names import SPANS
from finetune.data.sources.conversation_formats import kind_of
from finetune.data.sources.readers import Document, Fields, class_of
from finetune.data.tokenization.memmap import Int64s
from finetune.utils.errors import DataError


def _read(record: Mapping[str, Any], fields: Fields, where: str) -> Document:
    words, tags = _listed(record[fields.text], "text_field", fields.text, where), tuple[int | str, ...]()
    for number, word in enumerate(words, start=1):
        if not isinstance(word, str) or not word.strip():
            what = "blank" if isinstance(word, str) else kind_of(word)
            raise DataError(
                f"{where}: word {number} in '{fields.text}' is {what}, and each tag needs a word that can be read. "
                "Take the word and its tag out, or mend the record."
            )
    if fields.label is not None:
        listed = _listed(record[fields.label], "label_field", fields.label, where)
        # The words of a text whose tags are a list may be none.
        spans = isinstance(record[fields.text], str) and not isinstance(record[fields.label], str)
        if len(listed) != len(words) or (spans and not all(isinstance(tag, int | str) for tag in listed)):
            raise DataError(
                f"{where}: '{fields.text}' has {len(words):,} words and '{fields.label}' has {len(listed):,} tags. "
                f"Give each word one tag, or remove the record. {SPANS if spans else ''}".rstrip()
            )
        tags = tuple(class_of(tag, fields, where) for tag in listed)
    return Document(json.dumps(words, ensure_ascii=False) if words else "", where, tags)


def _listed(value: Any, key: str, name: str, where: str) -> list[Any]:
    """The words or tags that a field holds: as a list, or as a text in which white space divides them."""
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str) or (key == "label_field" and value.lstrip().startswith("[")):
        what = "a list that was written as text" if isinstance(value, str) else kind_of(value)
        raise DataError(
            f"{where}: the field '{name}' holds {what}, and words and their tags are read from lists, or from texts "
            f"in which spaces divide them. Write it so, as JSON lines do, or name another field as `{key}`."
        )
    return value.split()


def _count(columns: Mapping[str, Any], packed: PackedRows) -> tuple[Int64s, int]:
    before = np.append(np.int64(0), np.cumsum(columns["token_labels"] >= 0, dtype=np.int64))
    return before[packed.starts + packed.lengths] - before[packed.starts], int(before[-1])


def _values(columns: Mapping[str, Any], labels: Sequence[Any], classes: ClassList | None) -> Int64s:
    assert classes is not None
    # At the end what -1 stands for.
    return np.append(classes.renumber(np.arange(len(labels)), labels), IGNORED)


def _batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows: texts as `classes` has them, `targets` and `weights` are (B, L): -100 and 0 where no word begins."""
    lists = []
    for row in numbers.tolist():
        start, length = int(rows.packed.starts[row]), int(rows.packed.lengths[row])
        targets = rows.values[rows.columns["token_labels"][start : start + length]].tolist()
        lists.append([IGNORED] * len(rows.around[0].before) + targets + [IGNORED] * len(rows.around[0].behind))
    return {**classes.read_texts(rows, numbers), **classes.weigh(rows, pad(lists, IGNORED, rows.row_length))}


def _report(rows: TokenRows, names: Sequence[str]) -> dict[str, Any]:
    tags = rows.values[rows.columns["token_labels"][ranges(rows.packed.starts, rows.packed.lengths)]]
    return classes.count_classes(tags[tags != IGNORED], names)


def _examples(rows: TokenRows, row: int, names: Sequence[str]) -> Iterator[Shown]:
    batch = _batch(rows, np.array([row]))
    ids = batch["input_ids"][batch["attention_mask"] == 1]
    tags = batch["targets"][0, : ids.size].tolist()
    yield Shown(ids, np.array(["" if tag == IGNORED else names[tag] for tag in tags]))


KIND = replace(
    classes.KIND,
    labels="tag",
    takes_pairs=False,
    metrics=(),
    figures=TAG_FIGURES,
    read=_read,
    key=("tagged",),
    of_documents={},
    of_tokens={"token_labels": "int32"},
    encode=lambda encoder, texts: encoder.encode_words(texts),
    count=_count,
    values=_values,
    batch=_batch,
    shapes=classes.shapes_of_tokens,
    report=_report,
    shown_as="tokens that begin a word have its tag behind them, which is learned, and are",
    examples=_examples,
)
