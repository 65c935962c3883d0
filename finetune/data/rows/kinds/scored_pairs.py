"""Two answers to a prompt, whose scores are compared: a row is two padded texts, each the prompt and an answer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.kinds import answer_pairs
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, Shown, TokenRows

FIGURES = ("accuracy", "margin", "mean_reward")
"""Figures of scores, by TRL's names."""


def _batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows.

    Returns:
        `input_ids` and `attention_mask`, (2 B, L) int64: all chosen answers, then all rejected ones, each behind the
        prompt; and `margin`, (B,) fp32, by which their scores are to differ.
    """
    segments = np.concatenate([2 * numbers, 2 * numbers + 1])
    starts, lengths = rows.packed.starts[segments].tolist(), rows.packed.lengths[segments].tolist()
    texts = [rows.tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]
    return {**rows.pad(texts), "margin": rows.columns["margins"][numbers]}  # each document is a row


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    rows = recipe.batch.rows
    tokens = dict.fromkeys(("input_ids", "attention_mask"), (2 * rows, recipe.data.sequence_length))
    return {**tokens, "margin": (rows,)}


def _examples(rows: TokenRows, row: int, names: Sequence[str]) -> Iterator[Shown]:
    for half, segment in zip(("chosen", "rejected"), (2 * row, 2 * row + 1), strict=True):
        start, length = int(rows.packed.starts[segment]), int(rows.packed.lengths[segment])
        yield Shown(rows.tokens[start : start + length], np.full(length, False), ("answer", half))


KIND = replace(
    answer_pairs.KIND,
    writes_text=False,
    metrics=(),
    figures=FIGURES,
    key=("scored pairs",),
    of_documents={"firsts": "int64", "margins": "float32"},
    pack=answer_pairs.pack_tokens,
    count=lambda columns, packed: (None, 0),
    targets=lambda rows: np.ones(len(rows), np.int64),
    counts=lambda rows, numbers: {"pairs": len(numbers)},
    batch=_batch,
    shapes=_shapes,
    shown_as="of two answers that which is to get the higher score is",
    examples=_examples,
)
