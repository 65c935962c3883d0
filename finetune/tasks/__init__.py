"""Objectives that models are trained for. A custom task imports `Task`, `TaskData`, `Rows` and `Batch` from here."""

from finetune.tasks.task import Batch, Rows, Task, TaskData

__all__ = ["Batch", "Rows", "Task", "TaskData"]
