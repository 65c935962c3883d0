"""The number of steps of a run, and of rows in an epoch."""

from dataclasses import dataclass

from finetune.config.recipe_schema import DataSection, LengthSection
from finetune.utils.errors import DataError, RecipeError
from finetune.utils.exact import exact_product


@dataclass(frozen=True)
class Length:
    """Length of a run, and of an epoch."""

    num_steps: int
    epoch_rows: int
    """Rows of an epoch that are used: all, or those that fill whole global batches."""
    left_out: int
    """Rows of an epoch that are not used."""


def measure_length(length: LengthSection, size: int, data: DataSection, num_rows: int | None) -> Length:
    """Settles the number of steps.

    Args:
        size: Of the global batch.
        num_rows: Training rows that there are; None without any.

    Raises:
        DataError: If the training rows do not fill one global batch.
        RecipeError: If there is nothing to train on.
    """
    if length.steps == 0:
        return Length(num_steps=0, epoch_rows=0, left_out=0)
    if num_rows is None:
        raise RecipeError("There are no training rows, but the length of the run is not 0 steps. Name data.train.")
    if num_rows < size:
        raise DataError(
            f"The training data fills {num_rows} rows, fewer than one global batch of {size}. Lower "
            f"batch.global_size to at most {num_rows}, lower data.sequence_length, or add data."
        )
    left_out = num_rows % size if data.last_batch == "drop" else 0
    epoch_rows = num_rows - left_out
    if length.steps is not None:
        steps = length.steps
    elif length.epochs is not None:
        steps = int(exact_product(length.epochs, epoch_rows) / size)
        if steps == 0:
            raise RecipeError(f"length.epochs {length.epochs} is less than one step of {size} rows. Raise it.")
    else:
        assert length.tokens is not None
        steps = -(-length.tokens // (size * data.sequence_length))
    return Length(num_steps=steps, epoch_rows=epoch_rows, left_out=left_out)
