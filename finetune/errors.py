"""The errors that a user can cause, each one paragraph: what was found, what is allowed, what to change.

Every one is also an error of the standard library, so that callers can catch what they know.
"""


class FinetuneError(Exception):
    """Base of all errors that `finetune` raises on purpose; printed without a traceback."""


class RecipeError(FinetuneError, ValueError):
    """The recipe, or what it names (a model, an output folder), cannot be used as written."""


class DataError(FinetuneError, ValueError):
    """A data source cannot be read, or does not hold what the recipe says."""


class BackendError(FinetuneError, RuntimeError):
    """What would run, or runs, is not what the launch config asks for."""


class CheckpointError(FinetuneError, OSError):
    """A checkpoint or model cannot be written or read."""


class DivergedError(FinetuneError, ArithmeticError):
    """Training cannot go on: step after step, a loss or gradient is not finite."""


class MemoryFullError(FinetuneError, MemoryError):
    """The device, or the machine, has no memory left."""
