"""Errors that a user can cause, each one paragraph: what was found, what is allowed, what to change.

Each is also an error of the standard library, so that callers can catch what they know.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self


class FinetuneError(Exception):
    """Base of all errors that `finetune` raises on purpose; printed without a traceback."""

    lines: tuple[str, ...] = ()
    """Lines to print; empty if the text is one paragraph."""

    @classmethod
    def of(cls, place: str, problems: Sequence[str], advice: str = "") -> Self:
        """Returns an error with one problem or several of a `place`, such as a file, and what to do about any of them.

        Each problem has its own place.
        """
        sentences = [problem if problem.endswith((".", "?")) else f"{problem}." for problem in problems]
        if len(sentences) == 1:
            return cls(f"{sentences[0]} {advice}".rstrip())
        lines = (f"{place} has {len(sentences)} problems:", *(f"  {problem}" for problem in sentences), advice)
        error = cls("\n".join(filter(None, lines)))
        error.lines = tuple(filter(None, lines))
        return error

    @classmethod
    @contextmanager
    def explaining(cls, what: str, advice: str, *causes: type[Exception]) -> Iterator[None]:
        """Raises an error of this class in place of others: `WHAT: REASON. ADVICE`; what was raised on purpose stays.

        The others are of the classes `causes`, OSError and ValueError if left out.
        """
        caught = causes or (OSError, ValueError)
        try:
            yield
        except FinetuneError:
            raise
        except caught as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()).rstrip(".")
            raise cls(f"{what}: {reason[:300]}. {advice}".rstrip()) from error


class RecipeError(FinetuneError, ValueError):
    """The recipe, or what it names (a model, an output folder), cannot be used as written."""


class DataError(FinetuneError, ValueError):
    """A data source cannot be read, or does not hold what the recipe says."""


class BackendError(FinetuneError, RuntimeError):
    """The run is not, or would not be, the one that the launch file asks for."""


class LibraryVersionError(FinetuneError, ImportError):
    """An installed library lacks private names that are used of it; see `finetune.utils.compat`."""


class CheckpointError(FinetuneError, OSError):
    """A checkpoint or model cannot be written or read."""


class LaunchError(FinetuneError, RuntimeError):
    """The processes of a launch failed; the text has their last output, if it was captured."""


class DivergedError(FinetuneError, ArithmeticError):
    """Training cannot continue: step after step, a loss or gradient is not finite."""


class MemoryFullError(FinetuneError, MemoryError):
    """The device, or the machine, has no memory left."""
