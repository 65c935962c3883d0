"""An answer to a prompt that is desirable or not, a row each, and the answer of another row behind the same prompt.

That other answer is the mismatched one, by which a baseline is estimated. Which row it comes from depends on the
number of rows alone: neither their order in training nor a batch changes it, and the scores of a reference can be kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.config.recipe import TEXT_METRICS
from finetune.config.recipe_schema import DataSection, Recipe
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds import answer_pairs, documents
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, RowKind, Shown, TokenRows
from finetune.data.rows.packed_rows import PackedRows, round_up
from finetune.data.rows.row_order import rows_at
from finetune.data.sources.conversation_formats import RecordForm
from finetune.data.sources.preference_formats import PreferenceForm
from finetune.data.tokenization.memmap import Int64s
from finetune.utils.errors import DataError

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
# Segments of a row: the prompt with its answer, the same prompt, and the mismatched answer.
_SEGMENTS = 3
# Of the permutation of rows: another one is another set of data.
_SEED = 1


def _form(form: RecordForm, recipe: Recipe) -> PreferenceForm:
    return replace(answer_pairs.preference_form(form, recipe), single=True)


def _kept(columns: Mapping[str, Any]) -> Int64s:
    """Numbers of the documents that are rows: those with a pair of an input and its target."""
    return np.flatnonzero(np.diff(columns["offsets"]) > 1)


def _pack(columns: Mapping[str, Any], data: DataSection, room: Sequence[int]) -> PackedRows:
    kept, offsets = _kept(columns), columns["offsets"]
    if kept.size == 1:
        raise DataError("Data of one answer are too few: the baseline takes the answer of another row. Add answers.")
    # A permutation of one cycle: no row has its own answer.
    cycle = kept[rows_at(np.arange(kept.size), num_rows=max(1, kept.size), seed=_SEED)]
    other = np.empty(offsets.size, np.int64)
    other[cycle] = np.roll(cycle, 1)
    starts, prompts, others = offsets[kept], columns["firsts"][kept], other[kept]
    begins = offsets[others] + columns["firsts"][others]
    # The last token of an answer is no input. What is too long behind this prompt loses its end.
    behind = np.minimum(offsets[others + 1] - begins - 1, data.sequence_length - prompts)
    lengths = np.stack([offsets[kept + 1] - starts - 1, prompts, behind], axis=1)
    row_starts = np.arange(0, lengths.size + 1, _SEGMENTS, dtype=np.int64)
    counts = packed_rows.NOTHING_LEFT_OUT | {"empty": offsets.size - 1 - kept.size}
    return PackedRows(np.stack([starts, starts, begins], axis=1).ravel(), lengths.ravel(), row_starts, counts)


def _count(columns: Mapping[str, Any], packed: PackedRows) -> tuple[Int64s | None, int]:
    learned = columns["mask"].counts(packed.starts, packed.lengths)
    learned.reshape(-1, _SEGMENTS)[:, 1:] = 0  # nothing is learned of mismatched answers
    return learned, 0


def _read(rows: TokenRows, segments: Int64s) -> Arrays:
    """Reads rows of some segments each, (B, segments), as one document."""
    lengths, starts = rows.packed.lengths[segments], rows.packed.starts[segments]
    row_starts = np.arange(0, segments.size + 1, segments.shape[1], dtype=np.int64)
    alone = replace(rows, packed=PackedRows(starts.ravel(), lengths.ravel(), row_starts))
    width = round_up(int(lengths.sum(1).max(initial=1)))
    return documents.read_segments(alone, np.arange(len(segments)), width, restarts=False)


def _batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows.

    Returns:
        `input_ids` and `targets`, both (B, L) int64, as of padded documents, and the same of the mismatched answers
        behind the same prompts as `mismatched_ids` and `mismatched_targets`, as wide as the longest of these;
        `desirable`, (B,) bool; and `reference`, (B, 2) fp32: the `scores` of a reference for both, 0 until these are
        computed.
    """
    segments = _SEGMENTS * np.asarray(numbers, np.int64)[:, None]
    batch, other = _read(rows, segments), _read(rows, segments + np.arange(1, _SEGMENTS))
    prompts = rows.packed.lengths[segments[:, 0] + 1]
    # Behind a prompt comes the first token of the mismatched answer, which is learned in its own row.
    joined = np.flatnonzero(prompts)
    other["targets"][joined, prompts[joined] - 1] = rows.tokens[rows.packed.starts[segments[joined, 0] + 2]]
    none = np.zeros((len(numbers), 2), np.float32)
    return {
        **batch,
        "mismatched_ids": other["input_ids"],
        "mismatched_targets": other["targets"],
        "desirable": rows.values[numbers],
        "reference": none if rows.scores is None else rows.scores[numbers],
    }


def _counts(rows: TokenRows, numbers: Numbers) -> dict[str, int]:
    desirable = int(rows.values[numbers].sum())
    return {"answers": len(numbers), "desirable": desirable, "undesirable": len(numbers) - desirable}


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    tokens, rows = (recipe.batch.rows, recipe.data.sequence_length), recipe.batch.rows
    return {"input_ids": tokens, "targets": tokens, "desirable": (rows,), "reference": (rows, 2)}


def _report(rows: TokenRows, names: Sequence[str]) -> dict[str, Any]:
    counts = _counts(rows, np.arange(len(rows)))
    return {"classes": {name: counts[name] for name in ("desirable", "undesirable")}}


def _examples(rows: TokenRows, row: int, names: Sequence[str]) -> Iterator[Shown]:
    label = ("answer", "desirable" if rows.values[row] else "undesirable")
    yield next(documents.examples_of(rows, row, _batch))._replace(label=label)


KIND = RowKind(
    writes_text=True,
    judged=True,
    takes_pairs=False,
    metrics=TEXT_METRICS,
    figures=(*REWARDS, *answer_pairs.LOGPS),
    form=_form,
    key=("answers with labels",),
    of_documents={"firsts": "int64", "desirable": "uint8"},
    of_tokens={"mask": "bool"},
    pack=_pack,
    count=_count,
    values=lambda columns, labels, classes: columns["desirable"][_kept(columns)].astype(bool),
    counts=_counts,
    batch=_batch,
    shapes=_shapes,
    report=_report,
    examples=_examples,
)
