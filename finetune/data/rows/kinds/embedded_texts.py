"""Texts whose embeddings are compared, a row each: an anchor, its positive, and in all rows or in none a negative."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from finetune.config.recipe import EMBEDDED
from finetune.config.recipe_schema import DataSection, Recipe
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, RowKind, Shown, TokenRows
from finetune.data.rows.packed_rows import PackedRows
from finetune.data.sources.conversation_formats import (
    ABSENT,
    InvalidConversation,
    RecordForm,
    Tolerance,
    find_value,
    kind_of,
)
from finetune.data.tokenization.encoded import Encoded
from finetune.data.tokenization.special_tokens import wrapping_of
from finetune.utils.errors import DataError

FIGURES = ("accuracy", "recall_at_5")
"""Shares of anchors whose own positive is the nearest of all candidates, or among the five nearest."""
_NAMES = (EMBEDDED, ("query", *EMBEDDED[1:]), ("sentence1", "sentence2", EMBEDDED[2]))


@dataclass
class EmbeddingForm:
    """The way to read the records of one source: their texts, as a list in JSON."""

    tolerance: Tolerance
    strip: bool
    lowercase: bool
    fields: Mapping[str, str] = field(default_factory=dict)
    """Paths of the texts that are not where they are looked for, such as {anchor: question, positive: answers.0}."""
    unread: set[str] = field(default_factory=set)
    """Fields of records that are not read."""

    format = detected = "embedding"

    def fingerprint(self) -> list[Any]:
        """Lists all that decides how a record is read."""
        return ["embedding", self.strip, self.lowercase, dict(self.fields)]

    def read(self, record: Any, where: str) -> str:
        """Returns the texts of a record as JSON; an empty text if it is broken and left out.

        Raises:
            DataError: If it is broken.
        """
        try:
            return json.dumps([*self._texts(record, where)], ensure_ascii=False)
        except InvalidConversation as problem:
            self.tolerance.meet(problem)
            return ""

    def _texts(self, record: Any, where: str) -> Iterator[str]:
        if not isinstance(record, Mapping):
            raise InvalidConversation(
                "no object", f"{where}: a record is an object with fields, got {kind_of(record)}."
            )
        known = next((names for names in _NAMES if {*names[:2]} <= record.keys()), EMBEDDED)
        paths = {**dict(zip(EMBEDDED, known, strict=True)), **self.fields}
        self.unread |= record.keys() - {path.partition(".")[0] for path in paths.values()}
        for name, path in paths.items():
            value = find_value(record, path)
            if isinstance(value, str) and value.strip():
                text = value.strip() if self.strip else value
                yield text.lower() if self.lowercase else text
            elif name != "negative" or value not in (ABSENT, None) or name in self.fields:
                got = "empty" if value is None or isinstance(value, str) else f"no text, but {kind_of(value)}"
                got = f"missing; the fields are {', '.join(record) or 'none'}" if value is ABSENT else got
                text = (
                    f"{where}: the {name}, in the field '{path}', is {got}. Mend the record, or name its texts in the "
                )
                text += "source's `fields`, such as {anchor: question, positive: answer}."
                raise InvalidConversation("no text", text)


def _form(form: RecordForm, recipe: Recipe) -> EmbeddingForm:
    return EmbeddingForm(form.tolerance, recipe.data.strip, recipe.data.lowercase, form.fields)


def _encode(encoder: Any, texts: Sequence[str]) -> Encoded:
    lists = [json.loads(text) for text in texts]
    encoded = encoder.encode_texts([text for texts in lists for text in (*texts, "")[:3]])
    sizes = encoded.lengths.reshape(-1, 3)
    return Encoded(sizes.sum(1, dtype=np.uint32), encoded.numbers, {"firsts": sizes[:, 0], "seconds": sizes[:, 1]})


def _pack(columns: Mapping[str, Any], data: DataSection, room: Sequence[int]) -> PackedRows:
    first, second = columns["firsts"], columns["seconds"]
    sizes = np.stack([first, second, np.diff(columns["offsets"]) - first - second], axis=1)
    with_negative = int((sizes[:, 2] > 0).sum())
    if 0 < with_negative < len(sizes):
        raise DataError(
            f"{with_negative:,} of {len(sizes):,} records have a negative. Give all records one, or none of them."
        )
    return packed_rows.pad_texts(columns["offsets"], sizes[:, : 3 if with_negative else 2], room, drop=False)


def _texts(rows: TokenRows, numbers: Numbers) -> list[list[int]]:
    """Returns the tokens of some rows: those of all anchors, then of all positives, then of all negatives."""
    (around,), count = rows.around, int(rows.packed.row_starts[1])  # texts of a row
    segments = np.concatenate([count * numbers + text for text in range(count)])
    spans = zip(rows.packed.starts[segments].tolist(), rows.packed.lengths[segments].tolist(), strict=True)
    return [[*around.before, *rows.tokens[at : at + size].tolist(), *around.behind] for at, size in spans]


def _examples(rows: TokenRows, row: int, names: Sequence[str]) -> Iterator[Shown]:
    for name, ids in zip(EMBEDDED, _texts(rows, np.array([row])), strict=False):
        yield Shown(np.array(ids), np.full(len(ids), False), ("text", name))


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    # As of records without a negative.
    return dict.fromkeys(("input_ids", "attention_mask"), (2 * recipe.batch.rows, recipe.data.sequence_length))


def _batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows.

    Returns:
        `input_ids` and `attention_mask`, (2 B or 3 B, L) int64: all anchors, then all positives, then all negatives.
    """
    return rows.pad(_texts(rows, numbers))


KIND = RowKind(
    embeds=True,
    takes_pairs=False,
    metrics=(),
    figures=FIGURES,
    form=_form,
    key=("embedded texts",),
    of_documents={"firsts": "int64", "seconds": "int64"},
    encode=_encode,
    around=lambda tokenizer, paired: (wrapping_of(tokenizer),),
    pack=_pack,
    targets=lambda rows: np.ones(len(rows), np.int64),
    batch=_batch,
    shapes=_shapes,
    shown_as="what a text is in its record is",
    examples=_examples,
)
