"""The number of steps of a run, and of rows in an epoch."""

from dataclasses import dataclass

from finetune.config.recipe_schema import Recipe
from finetune.tasks.task import Rows
from finetune.utils.errors import DataError, RecipeError
from finetune.utils.exact import exact_product


@dataclass(frozen=True)
class Length:
    """The number of steps of a run, and of rows in an epoch."""

    num_steps: int
    epoch_rows: int
    """Rows of an epoch that are used: all, or those that fill whole global batches."""
    left_out: int
    """Rows of an epoch that are not used."""


def measure_length(recipe: Recipe, rows: Rows | None) -> Length:
    """Settles the number of steps.

    Raises:
        DataError: If the training rows do not fill one global batch.
        RecipeError: If there is nothing to train on.
    """
    length, size = recipe.length, recipe.batch.global_size
    if length.steps == 0:
        return Length(num_steps=0, epoch_rows=0, left_out=0)
    if rows is None:
        raise RecipeError("There are no training rows, but the length of the run is not 0 steps. Name data.train.")
    if len(rows) < size:
        raise DataError(
            f"The training data fills {len(rows)} rows, fewer than one global batch of {size}. Lower "
            f"batch.global_size to at most {len(rows)}, lower data.sequence_length, or add data."
        )
    left_out = len(rows) % size if recipe.data.last_batch == "drop" else 0
    epoch_rows = len(rows) - left_out
    if length.steps is not None:
        steps = length.steps
    elif length.epochs is not None:
        steps = int(exact_product(length.epochs, epoch_rows) / size)
        if steps == 0:
            raise RecipeError(f"length.epochs {length.epochs} is less than one step of {size} rows. Raise it.")
    else:
        assert length.tokens is not None
        steps = -(-length.tokens // (size * recipe.data.sequence_length))
    return Length(num_steps=steps, epoch_rows=epoch_rows, left_out=left_out)
