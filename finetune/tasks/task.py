"""The objective that a model is trained for. The loop knows only a module and a `loss_sum`.

A task is a few functions and some facts about itself, so that nothing else asks for its name. A custom one is named in
the recipe as `package.module:object`, a `Task` or a function of `task.args` that returns one. This module imports no
torch.

Letters: `B` rows, `T` tokens, `L` tokens of the longest row of a batch, `V` vocabulary, `C` classes, `K` terms of the
loss, `R` rows of an evaluation, `G` rows of the global batch.
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


class Term(NamedTuple):
    """One of the sums that a loss is made of, or a figure beside it."""

    name: str
    """Metrics of a step and, behind `validation_`, of an evaluation have it by this name where there are several."""
    counts: str = "targets"
    """What its sum is divided by: how many of these the global batch has, by the names of `Rows.counts`."""
    weight: float = 1.0
    """Its factor in the loss; 0 for a figure that is only logged. These come last."""
    less: str = ""
    """Of a figure: the name of a term whose mean is subtracted from its own."""


def mean_figures(terms: Sequence[Term], sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    """Returns the `loss`, and the mean of each of several terms by its name."""
    means = [total / (count or 1.0) for total, count in zip(sums, counts, strict=True)]
    plain = {term.name: mean for term, mean in zip(terms, means, strict=True)}
    named = [(term.name, plain[term.name] - (plain[term.less] if term.less else 0.0)) for term in terms]
    loss = sum(term.weight * mean for term, mean in zip(terms, means, strict=True) if term.weight)
    return {"loss": loss, **dict(named if len(named) > 1 else ())}


@dataclass(frozen=True)
class Figures:
    """Figures of an evaluation."""

    whole: dict[str, float]
    """Figures of all rows, by name."""
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each class: `precision`, `recall`, `f1` (None where there is nothing to divide by) and its number, `rows`."""
    confusions: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rows by true and predicted class, where each row has one."""


class Evaluation(NamedTuple):
    """What evaluations compute in place of `loss_sum`, by one forward pass, and what follows from it."""

    compute: Callable[["nn.Module", Batch], "tuple[torch.Tensor, torch.Tensor | None]"]
    """Returns sums over a batch in fp32: those of the task's terms, of `terms`, and any others; and values of each row,
    (B, J), or None. The predicted and the true class of each row come first among these for `eval.metrics`."""
    terms: tuple[Term, ...] = ()
    """Terms that evaluations have beside those of the task, all of weight 0."""
    figures: tuple[str, ...] = ()
    """Names of the figures that `figures_of` returns."""
    figures_of: Callable[[Sequence[float], "torch.Tensor | None", Sequence[str]], Figures] = lambda *_: Figures({})
    """Returns figures, given the other sums, the values of all rows, (R, J) in fp64, and the names of the classes."""


def _own_rows() -> "RowKind":
    from finetune.data.rows.kinds.row_kind import RowKind

    return RowKind()


class Reference(NamedTuple):
    """What a reference or a teacher gives each row, or each of its targets."""

    compute: Callable[["nn.Module", Batch], "torch.Tensor"]
    """Returns the values of each row, (B, J) in fp32, or those of each target, (targets, J), row by row."""
    key: Any = None
    """What they depend on beside the name of the task, JSON-able."""
    of_targets: int = 0
    """Values of each target, J; 0 where they are those of rows."""
    stored: Callable[[Any], Any] = lambda values: values
    """Returns values, an array of fp32, as they are kept."""


@dataclass(frozen=True)
class Task:
    """An objective: data, network and loss."""

    build_data: Callable[[Recipe, bool], TaskData]
    """Prepares data, given `(recipe, quiet)`. Runs before any process group exists, on every process."""
    build_model: Callable[[Recipe, TaskData], "nn.Module"]
    """Returns a network with the same weights on every process; it may be on the meta device."""
    loss_sum: Callable[["nn.Module", Batch], "torch.Tensor"]
    """The loss summed over the batch's targets, a scalar in fp32; of several terms the sum of each, (K,)."""
    terms: tuple[Term, ...] = (Term("loss"),)
    """What `loss_sum` sums. The loss is the sum, over terms, of weight x sum / count, each over the global batch."""
    evaluation: Evaluation | None = None
    """What evaluations compute; left out, the terms alone."""
    window: Callable[["nn.Module", Batch], "torch.Tensor"] | None = None
    """Values of each row, (B, J) in fp32, computed without gradients for the whole global batch before the first
    backward pass. In `loss_sum` a batch then has them all as `window`, (G, J), and the numbers of its own rows among
    them as `window_rows`, (B,). Where rows are split over ranks, values of their parts are summed."""
    reference: Reference | None = None
    """What is computed of each row once, by the network as training begins, and kept beside the data: a batch then has
    it as `reference`. Of rows that are read by a kind, and have a column for it."""
    scores: Callable[["nn.Module", Batch], "torch.Tensor"] | None = None
    """Scores of the classes of each row, (B, C), or of each token, (B, L, C), or the row's number, (B, 1), or its
    embedding, (B, D), in fp32, for `finetune predict`."""
    files: Callable[[Recipe, Any], Mapping[str, bytes]] | None = None
    """Files beside the weights by which other libraries open the network, by name, given its configuration."""
    build_skeleton: Callable[[Recipe, TaskData | None], "nn.Module"] | None = None
    """The network on the meta device, for dry runs and for writing it."""
    rows: "RowKind" = field(default_factory=_own_rows)
    """The kind of its rows: what is read, stored and learned of documents, and whether networks write text; left out,
    those that `build_data` makes itself."""
    next_token: Callable[..., "torch.Tensor"] | None = None
    """Scores of the token behind one row, (1, V), in fp32, of a network that writes text, given `(network, batch, *,
    kept)`: the batch has `input_ids`, if its rows have a source those of it, and in `written` what follows the begin of
    its target; `kept` is a dict for what it needs again. Left out: as language models do it."""
    weighs: bool = False
    """True if `loss_sum` multiplies the loss of each target by the batch's `weights`, where rows have such."""
    splits_rows: bool = False
    """True if `loss_sum` takes rows that are split over ranks, by `sequence_parallel.split`."""
    head: "Head | None" = None
    """The head of its networks, which are transformers' by `model`, `tokenizer` and `data` of the recipe: such a task
    takes quantized weights, is planned without its data, and is exported. None: only the task can open its network."""
    build_config: Callable[[Recipe, TaskData | None], Any] | None = None
    """The configuration of the network; every task with a `head` has it."""

    @property
    def evaluated(self) -> Evaluation:
        """What evaluations compute."""
        return self.evaluation or Evaluation(lambda network, batch: (self.loss_sum(network, batch).reshape(-1), None))

    @property
    def num_weighted(self) -> int:
        """Terms that are learned: the first of them."""
        return sum(term.weight != 0 for term in self.terms)
