"""Objectives that models are trained for. A custom task imports `Task`, `TaskData`, `Rows` and `Batch` from here."""

from finetune.data.rows.feed import Rows
from finetune.tasks.task import Batch, Task, TaskData

__all__ = ["Batch", "Rows", "Task", "TaskData"]
