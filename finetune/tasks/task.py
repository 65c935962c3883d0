"""What a model is trained to do. The loop knows only a module and a `loss_sum`.

A task is four functions. A custom one is named in the recipe as `package.module:object`, a `Task` or a function of
`task.args` that returns one.

Letters: `B` rows, `T` tokens, `V` vocabulary, `C` classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.feed import Rows

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TaskData:
    """What a task learns from and is evaluated on."""

    train: Rows | None
    validation: Rows | None = None
    tokenizer: Any | None = None
    report: dict[str, Any] = field(default_factory=dict)
    """What is written into `run.json`."""
    report_lines: tuple[str, ...] = ()
    """What people read at the start."""
    num_labels: int | None = None
    label_names: tuple[str, ...] = ()
    digest: str = ""
    """Changes whenever the training rows do."""
    ends: tuple[int, ...] = ()
    """The tokens that learned answers end in, if they are conversations."""


@dataclass(frozen=True)
class Task:
    """What the loop needs to know of a job."""

    build_data: Callable[[Recipe, bool], TaskData]
    """`(recipe, quiet)` to data. Runs before any process group exists, on every process."""
    build_model: Callable[[Recipe, TaskData], nn.Module]
    """To a network with the same weights on every process; it may be on the meta device."""
    loss_sum: Callable[[nn.Module, Batch], torch.Tensor]
    """The loss summed over the batch's targets, a scalar in fp32."""
    loss_and_correct: Callable[[nn.Module, Batch], torch.Tensor] | None = None
    """What `loss_sum` returns and how many targets were predicted right, (2,) in fp32, by one forward pass: evaluation
    then reports `accuracy`. Where a row has one class, its number for each row may follow, (2 + B,): `eval.metrics` are
    of these, and of the batch's `targets`."""
    build_skeleton: Callable[[Recipe, TaskData | None], nn.Module] | None = None
    """The network on the meta device, for dry runs and for writing it."""
    text: bool = False
    """Whether the network writes text, token by token."""
