"""`BuiltRun`: everything that the loop touches; the length of a run."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from finetune.checkpoint.best_evaluation import BestEvaluation
from finetune.checkpoint.resume_point import ResumePoint
from finetune.checkpoint.run_directory import RunDirectory
from finetune.checkpoint.save_checkpoint import CheckpointManager
from finetune.config.recipe_schema import DataSection, LengthSection, Recipe
from finetune.data.rows.feed import Feed
from finetune.distributed.backend import Backend
from finetune.distributed.state.weight_average import WeightAverage
from finetune.monitoring.metrics import PhaseTimer, Reporter
from finetune.monitoring.nonfinite import NonFiniteGuard
from finetune.monitoring.rank_watch import RankWatch
from finetune.monitoring.shutdown import ShutdownHandler
from finetune.tasks.metrics import Metric
from finetune.tasks.prompt_set import Prompt
from finetune.tasks.task import Batch, Task, TaskData
from finetune.training.profiler import Profiler
from finetune.utils.errors import DataError, RecipeError
from finetune.utils.exact import exact_product

RECENT = 5
"""Lines of metrics whose losses are compared with the first."""


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
        # Packed documents fill more rows of fewer tokens; where each has a row of its own, their number stays.
        shorter = ", lower data.sequence_length" if data.packing != "padded" else ""
        raise DataError(
            f"The training data fills {num_rows} rows, fewer than one global batch of {size}. Lower "
            f"batch.global_size to at most {num_rows}{shorter}, or add data."
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


@dataclass(frozen=True)
class LastLog:
    """Where the last line of metrics was written; the next one's rates count from here."""

    step: int
    tokens: float
    computed: float = 0.0


@dataclass
class TrainState:
    """Values that change from step to step, beside weights and optimiser state."""

    step: int
    """Optimiser steps taken."""
    tokens: torch.Tensor
    """Targets trained on over all ranks; (1,), float64, on the device."""
    last_log: LastLog
    best: BestEvaluation
    epoch_sums: torch.Tensor
    """This rank's sums of the K terms in the epoch so far, and all ranks' counts, without steps that were skipped;
    (2 K,), float64, on the device. A float64 holds sums of losses exactly, in whatever order."""
    computed: float = 0.0
    """Tokens that all ranks have computed since this process began, learned or not, without padding."""
    recent_losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Steps and losses of the last lines of metrics of this process."""
    compiled_graphs: int = 0
    """Graphs that were compiled in this process."""
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    """`step` of the last evaluation of this process, and its values as `metrics.jsonl` has them; empty before the first
    one."""

    @classmethod
    def resumed(cls, recipe: Recipe, resume: ResumePoint, backend: Backend, num_terms: int) -> "TrainState":
        """Returns the state that a run begins with."""
        counted = torch.full((1,), float(resume.tokens), dtype=torch.float64, device=backend.device)
        best = BestEvaluation.resumed(recipe, resume.state.get("best"))
        none = [0.0] * 2 * num_terms
        saved = resume.state.get("epoch_sums", none)
        sums = torch.tensor(saved if len(saved) == len(none) else none, dtype=torch.float64, device=backend.device)
        if not backend.is_main:
            sums[:num_terms] = 0.0  # what rank 0 has is of all ranks
        return cls(resume.step, counted, LastLog(resume.step, float(resume.tokens)), best, sums)

    def log_here(self) -> None:
        """Has the next rates count from this step; waits for the device."""
        self.last_log = LastLog(self.step, self.tokens.item(), self.computed)

    @property
    def evaluation(self) -> dict[str, Any]:
        """The evaluation at this step, as `last_evaluation`; empty if there was none."""
        return self.last_evaluation if self.last_evaluation.get("step") == self.step else {}

    def to_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint stores; waits for the device."""
        return {
            "step": self.step,
            "tokens": int(self.tokens.item()),
            "best": asdict(self.best),
            # By one of which the best checkpoint is kept.
            "validation_loss": None,
            **self.evaluation,
        }


@dataclass
class BuiltRun:
    """Everything that the loop touches."""

    recipe: Recipe
    """`auto` is settled in it."""
    backend: Backend
    task: Task
    data: TaskData
    length: Length
    prompts: tuple[Prompt, ...]
    """Evaluation generates texts for these."""
    metrics: dict[str, Metric]
    """Evaluation computes these, by their names in `eval.metrics`."""

    model: nn.Module
    """The prepared model: a `ForwardWrapper` inside what the backend wraps around it."""
    optimizer: Any
    average: WeightAverage | None
    """Averages the weights after each step, if the recipe asks for it."""
    feed: Feed
    state: TrainState
    resume: ResumePoint
    identity: dict[str, Any]
    """Everything that the mathematics depend on."""

    directory: RunDirectory
    reporter: Reporter
    checkpoints: CheckpointManager
    results: dict[str, Any]

    shutdown: ShutdownHandler
    nonfinite: NonFiniteGuard
    timer: PhaseTimer
    watch: RankWatch
    profiler: Profiler | None
    flops_per_target: float
    """FLOPs of training a token."""
    weight_bytes: int
    """Bytes of weights on this rank before the first step."""
    beside: Mapping[str, bytes]
    """Files beside the base that go along with its weights, on rank 0."""
    join: Callable[[Batch], Batch] = lambda batch: batch
    """Adds to a batch on the device what a network that is not trained gives it in each step; see
    `evaluate_rows.join_scores`."""

    def parts_read(self, step: int, per_epoch: float = 1.0) -> int:
        """Returns how many parts of epochs all ranks have read before a step, of `per_epoch` equal ones in each."""
        # 0.333 stands for a third.
        return int((self.feed.epoch(step) or 0) * Fraction(per_epoch).limit_denominator(100))

    def is_due(self, every_steps: int | None, per_epoch: float | None) -> bool:
        """Returns whether something is due after this step: every so many steps, or so many times an epoch."""
        step = self.state.step
        if per_epoch is not None:
            return self.parts_read(step, per_epoch) > self.parts_read(step - 1, per_epoch)
        return every_steps is not None and step % every_steps == 0

    def epoch_totals(self) -> list[float]:
        """Returns the epoch's sums so far over all ranks, and their counts, (2 K,); every rank must call it."""
        sums, counts = self.state.epoch_sums.chunk(2)
        return [*self.backend.all_reduce_sum(sums * self.backend.mesh.counts_loss).tolist(), *counts.tolist()]
