"""Two answers to a prompt, a row each: two documents, each the prompt and an answer, of which the answer is learned."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.config.recipe import TEXT_METRICS
from finetune.config.recipe_schema import DataSection, Recipe
from finetune.data.data_report import PairReport
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds import documents
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, RowKind, Shown, TokenRows
from finetune.data.rows.packed_rows import PackedRows, round_up
from finetune.data.sources.conversation_formats import RecordForm, Tolerance
from finetune.data.sources.preference_formats import PreferenceForm
from finetune.data.tokenization.memmap import Int64s

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
LOGPS = ("logps/chosen", "logps/rejected", "logps/accuracies")
"""Figures of pairs, by TRL's names; and the share of pairs whose chosen answer is the likelier one."""


def preference_form(form: RecordForm, recipe: Recipe) -> PreferenceForm:
    """Returns what reads pairs, given the form for conversations."""
    ranking = recipe.preference.ranking if recipe.preference is not None else "extremes"
    of_answers = replace(form, format="auto", fields={}, tolerance=Tolerance(lenient=False))
    return PreferenceForm(of_answers, form.tolerance, recipe.chat is not None, form.fields, ranking, single=False)


_ANY = np.iinfo(np.int64).max


def pack_tokens(columns: Mapping[str, Any], data: DataSection, room: Sequence[int]) -> PackedRows:
    """Puts each document into a row, whose lengths are tokens."""
    # What is too long was left out, or cut, when it became tokens.
    return packed_rows.pad_pairs(columns["offsets"], columns["firsts"], (_ANY, _ANY), drop=False)


def _pack(columns: Mapping[str, Any], data: DataSection, room: Sequence[int]) -> PackedRows:
    packed = pack_tokens(columns, data, room)
    return replace(packed, lengths=packed.lengths - 1)  # pairs of an input and its target


def _count(columns: Mapping[str, Any], packed: PackedRows) -> tuple[Int64s | None, int]:
    return columns["mask"].counts(packed.starts, packed.lengths), 0


def _values(columns: Mapping[str, Any], labels: Sequence[Any], classes: Any) -> Int64s:
    """Returns the targets of both answers, (rows, 2)."""
    packed = _pack(columns, DataSection(), ())
    targets: Int64s = columns["mask"].counts(packed.starts, packed.lengths)
    return targets.reshape(-1, 2)


def _batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows.

    Returns:
        What language models read of packed rows, as wide as the longest pair: see `documents.read_segments`. Of both
        answers `learned`, the number of their targets, (B, 2) int64; `rejected_from`, (B,) int64: where in a row the
        second one begins; and `reference`, (B, J) fp32: the `scores` of a reference, 0 until these are computed.
    """
    width = round_up(int(rows.widths[numbers].max(initial=1)))
    batch = documents.read_segments(rows, numbers, width, restarts=True)
    batch["rejected_from"] = rows.packed.lengths[2 * numbers]
    batch["learned"] = rows.values[numbers]
    none = np.zeros((len(numbers), 2), np.float32)
    batch["reference"] = none if rows.scores is None else rows.scores[numbers]
    return batch


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    rows = recipe.batch.rows
    tokens = dict.fromkeys(("input_ids", "targets", "position_ids"), (rows, 2 * recipe.data.sequence_length))
    return {**tokens, "rejected_from": (rows,), "learned": (rows, 2), "reference": (rows, 2)}


def _report(rows: TokenRows, names: Sequence[str]) -> dict[str, Any]:
    chosen, rejected = rows.values.T
    sums, longer, shorter = rows.values.sum(0), int((chosen > rejected).sum()), int((chosen < rejected).sum())
    means = (sums / max(1, len(rows))).tolist()
    return {"pairs": PairReport(len(rows), means[0], means[1], longer, shorter)}


def _examples(rows: TokenRows, row: int, names: Sequence[str]) -> Iterator[Shown]:
    for half, example in zip(("chosen", "rejected"), documents.examples_of(rows, row, _batch), strict=True):
        yield example._replace(label=("answer", half))


KIND = RowKind(
    writes_text=True,
    judged=True,
    takes_pairs=False,
    metrics=TEXT_METRICS,
    figures=(*REWARDS, *LOGPS),
    form=preference_form,
    key=("pairs of answers",),
    of_documents={"firsts": "int64"},
    of_tokens={"mask": "bool"},
    pack=_pack,
    count=_count,
    values=_values,
    counts=lambda rows, numbers: {"pairs": len(numbers), "chosen_tokens": int(rows.values[numbers, 0].sum())},
    batch=_batch,
    shapes=_shapes,
    report=_report,
    examples=_examples,
)
