"""Objectives that models are trained for. A custom task imports what it is made of from here."""

from typing import TYPE_CHECKING, Any

from finetune.tasks.task import Batch, Evaluation, Figures, Task, TaskData, Term
from finetune.utils.recorded_figures import record

if TYPE_CHECKING:
    from finetune.data.rows.feed import Rows

__all__ = ["Batch", "Evaluation", "Figures", "Rows", "Task", "TaskData", "Term", "record"]


def __getattr__(name: str) -> Any:
    """Imports `Rows`, and torch with it, when it is asked for: commands look up tasks before they need either."""
    if name != "Rows":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from finetune.data.rows.feed import Rows

    return Rows
