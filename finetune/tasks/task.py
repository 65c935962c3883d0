"""The objective that a model is trained for. The loop knows only a module and a `loss_sum`.

A task is a few functions and some facts about itself, so that nothing else asks for its name. A custom one is named in
the recipe as `package.module:object`, a `Task` or a function of `task.args` that returns one. This module imports no
torch.

Letters: `B` rows, `T` tokens, `L` tokens of the longest row of a batch, `V` vocabulary, `C` classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.recipe_schema import Recipe

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.data.rows.feed import Rows
    from finetune.data.rows.kinds.row_kind import RowKind
    from finetune.models.heads import Head

Batch = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class TaskData:
    """The rows that a task learns from and is evaluated on, with what is known of them."""

    train: "Rows | None"
    validation: "Rows | None" = None
    tokenizer: Any | None = None
    report: dict[str, Any] = field(default_factory=dict)
    """Facts for `run.json`."""
    report_lines: tuple[str, ...] = ()
    """Lines that a run prints at the start."""
    full_report: tuple[str, ...] = ()
    """Lines that `finetune data` prints; without any, `report_lines`."""
    num_labels: int | None = None
    label_names: tuple[str, ...] = ()
    digest: str = ""
    """Changes whenever the training rows do."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Digests of what the rows are made of, by names for messages."""
    ends: tuple[int, ...] = ()
    """The tokens that learned answers end in, if they are conversations."""


class Figures(NamedTuple):
    """Figures of an evaluation."""

    whole: dict[str, float]
    """Figures of all rows, by name."""
    classes: dict[str, dict[str, Any]]
    """Of each class: `precision`, `recall`, `f1` (None where there is nothing to divide by) and its number, `rows`."""


def _own_rows() -> "RowKind":
    from finetune.data.rows.kinds.row_kind import RowKind

    return RowKind()


@dataclass(frozen=True)
class Task:
    """An objective: data, network and loss."""

    build_data: Callable[[Recipe, bool], TaskData]
    """Prepares data, given `(recipe, quiet)`. Runs before any process group exists, on every process."""
    build_model: Callable[[Recipe, TaskData], "nn.Module"]
    """Returns a network with the same weights on every process; it may be on the meta device."""
    loss_sum: Callable[["nn.Module", Batch], "torch.Tensor"]
    """The loss summed over the batch's targets, a scalar in fp32."""
    loss_and_correct: Callable[["nn.Module", Batch], "torch.Tensor"] | None = None
    """Returns `loss_sum` and the number of targets predicted right, (2,) in fp32, by one forward pass: evaluation
    then reports `accuracy`. Where a row has one class, its number for each row may follow, (2 + B,): `eval.metrics` are
    of these, and of the batch's `targets`. Where there is `figures_of_counts`, further counts follow, (2 + K,), in
    place of it."""
    figures_of_counts: Callable[[Sequence[float], Sequence[str]], "Figures"] | None = None
    """Returns figures of an evaluation, given the K counts, summed over all rows, and the names of the classes."""
    loss_and_numbers: Callable[["nn.Module", Batch], "torch.Tensor"] | None = None
    """Returns `loss_sum` and the number that is predicted for each row, (1 + B,) in fp32, by one forward pass:
    evaluation then compares the numbers with the batch's `targets`."""
    scores: Callable[["nn.Module", Batch], "torch.Tensor"] | None = None
    """Scores of the classes of each row, (B, C), or of each token, (B, L, C), or the row's number, (B, 1), in fp32, for
    `finetune predict`."""
    build_skeleton: Callable[[Recipe, TaskData | None], "nn.Module"] | None = None
    """The network on the meta device, for dry runs and for writing it."""
    rows: "RowKind" = field(default_factory=_own_rows)
    """The kind of its rows: what is read, stored and learned of documents, and whether networks write text; left out,
    those that `build_data` makes itself."""
    next_token: Callable[..., "torch.Tensor"] | None = None
    """Scores of the token behind one row, (1, V), in fp32, of a network that writes text, given `(network, batch, *,
    kept)`: the batch has `input_ids`, if its rows have a source those of it, and in `written` what follows the begin of
    its target; `kept` is a dict for what it needs again. Left out: as language models do it."""
    splits_rows: bool = False
    """True if `loss_sum` takes rows that are split over ranks, by `sequence_parallel.split`."""
    head: "Head | None" = None
    """The head of its networks, which are transformers' by `model`, `tokenizer` and `data` of the recipe: such a task
    takes quantized weights, is planned without its data, and is exported. None: only the task can open its network."""
    build_config: Callable[[Recipe, TaskData | None], Any] | None = None
    """The configuration of the network; every task with a `head` has it."""
