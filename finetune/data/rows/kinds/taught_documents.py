"""Documents as `documents` reads them, and what a teacher gives of each learned token: its likeliest outcomes."""

from dataclasses import replace

import numpy as np

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.kinds import documents
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, TokenRows
from finetune.data.rows.packed_rows import IGNORED, ranges

FIGURES = ("distillation", "sft")


def _batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows.

    Returns:
        What `documents` reads; `teacher`, (B, L, K) fp32: the K largest log-probabilities that the teacher gives of
        each target, and `teacher_tokens`, (B, L, K) int64, whose they are. One of 0 until these are computed.
    """
    batch = documents.KIND.batch(rows, numbers)
    starts, targets = rows.target_starts, batch["targets"]
    stored = np.zeros((1, 1), [("token", np.int64), ("log", np.float32)])
    if rows.scores is not None:
        stored = rows.scores[ranges(starts[numbers], starts[numbers + 1] - starts[numbers])]
    # Tokens that are not learned get those of a neighbour, which nothing reads.
    place = np.clip(np.cumsum(targets.ravel() != IGNORED) - 1, 0, len(stored) - 1)
    dense = stored[place].reshape(*targets.shape, -1)
    return {**batch, "teacher": dense["log"].astype(np.float32), "teacher_tokens": dense["token"].astype(np.int64)}


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    outcomes = recipe.distillation.top_k if recipe.distillation is not None else None
    shape = (recipe.batch.rows, recipe.data.sequence_length, outcomes or 1)
    assert documents.KIND.shapes is not None
    return {**documents.KIND.shapes(recipe), "teacher": shape, "teacher_tokens": shape}


KIND = replace(documents.KIND, taught=True, figures=FIGURES, batch=_batch, shapes=_shapes)
