"""Row length, global batch and epochs of a new recipe, sized to its data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.source_survey import row_length_for

_STEPS, _STEPS_AN_EPOCH, _FEW_STEPS = 100, 20, 50
_MOST_EPOCHS = 5
_ROWS, _LENGTH = 16, 1024
# Processes that a batch should be shared by as it is, so that another launch file is all that changes.
_SHARED_BY = 8
# Below this many documents, a smaller share would hold out next to none.
_FEW_DOCUMENTS = 2000
_MOST_TOO_LONG = 0.03
# Places of packed rows that are filled.
_FILLED = 0.95


@dataclass(frozen=True)
class RecipeSizes:
    """Numbers of a recipe."""

    row_length: int
    rows: int
    """Rows of a global batch."""
    micro_rows: int
    epochs: int = 1
    held_out: float = 0.02
    every_steps: int = 50
    """Steps between evaluations."""
    warnings: tuple[str, ...] = ()


def default_sizes(row_length: int, ranks: int) -> RecipeSizes:
    """Returns the sizes for data that is large: sixteen rows a step, or twice the processes where these do not share
    sixteen evenly."""
    rows = _ROWS if _ROWS % ranks == 0 else 2 * ranks
    return RecipeSizes(row_length, rows, min(4, rows // ranks))


def size_recipe(
    documents: int,
    lengths: Sequence[int],
    longest: int,
    ranks: int,
    *,
    packing: str,
    most: int | None = None,
    given: Mapping[str, Any] | None = None,
) -> RecipeSizes:
    """Sizes a recipe so that an epoch has some 20 steps and the run about 100, as far as the data gives them.

    Args:
        documents: How many there are.
        lengths: Tokens of some of them.
        longest: Tokens that a row may have.
        ranks: Processes of the run.
        packing: `documents`, packed, where longer ones are left out; `split`, where these go on in another row; or
            `padded`: one a row; or `pairs`: one a row, and longer ones are left out.
        most: Tokens that a row may have at all, if these are more.
        given: Sections of the recipe with the keys that the user has set.
    """
    data, chat = ((given or {}).get(name) or {} for name in ("data", "chat"))
    held_out = 0.05 if documents < _FEW_DOCUMENTS else 0.02
    trained = documents * (1 - held_out)
    tokens = trained * sum(lengths) / len(lengths)
    one_a_row = packing in ("padded", "pairs")
    usual, chosen = min(_LENGTH, longest), data.get("sequence_length")
    row_length = row_length_for(lengths, longest, split=packing == "split")
    if isinstance(chosen, int) and chosen > 0:
        row_length = chosen
    elif not one_a_row and row_length < usual and tokens / usual >= _ROWS * _STEPS:
        row_length = usual
    num_rows = int(trained if one_a_row else max(1, tokens / row_length / _FILLED))
    if packing == "documents":
        num_rows = min(num_rows, int(trained))
    usual_sizes = default_sizes(row_length, ranks)
    smaller = [ranks * 2**n for n in range(10, -1, -1) if ranks * 2**n < usual_sizes.rows]
    # Steps an epoch with which the run is not called too short; larger batches give more of them.
    least = {_SHARED_BY: math.ceil(_FEW_STEPS / _MOST_EPOCHS)}
    fits = (rows for rows in (usual_sizes.rows, *smaller) if num_rows >= rows * least.get(rows, _STEPS_AN_EPOCH))
    rows = next(fits, ranks if num_rows >= ranks else 1)
    an_epoch = max(1, num_rows // rows)
    epochs = min(_MOST_EPOCHS, max(1, math.ceil(_STEPS / an_epoch)))
    steps = an_epoch * epochs
    warnings = []
    if steps < _FEW_STEPS and not (given or {}).get("length"):
        warnings.append(f"The data gives about {steps} steps only. Add data, or raise length.epochs (now {epochs}).")
    too_long = sum(length > row_length + 1 for length in lengths) / len(lengths)
    if packing != "split" and too_long > _MOST_TOO_LONG:
        rule = chat.get("too_long", "drop")
        done = "cut" if packing == "padded" or rule != "drop" else "left out"
        advice = ["raise data.sequence_length as far as memory allows"] if row_length < (most or longest) else []
        advice += ["set chat.too_long=cut_left"] if done == "left out" else []
        warnings.append(
            f"{too_long:.0%} of the data is longer than a row (data.sequence_length {row_length}) and will be {done}: "
            f"{' or '.join(advice) or 'the model takes no longer rows'}."
        )
    every = 50 if steps >= 200 else max(5, steps // 4)
    micro = min(4, max(1, rows // ranks))
    return RecipeSizes(row_length, rows, micro, epochs, held_out, every, tuple(warnings))
