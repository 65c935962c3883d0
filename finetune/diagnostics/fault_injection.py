"""Faults on purpose, to show that `finetune parity` catches them.

Nothing imports this. `parity --inject` has each worker run it in place of `scripts/train.py`:
`python -m finetune.diagnostics.fault_injection FAULT RECIPE`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.feed import Window
from finetune.diagnostics.parity.launch_runs import FAULTS
from finetune.distributed.launch.launch_config import read_launch
from finetune.distributed.strategies import sequence, tensor
from finetune.models.chunked_loss import IGNORED
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.optim import lr_schedule
from finetune.training import entry_point, loop
from finetune.training.run import Run
from finetune.utils import exit_codes
from finetune.utils.errors import RecipeError


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Breaks what this process runs meanwhile.

    Raises:
        RecipeError: If the fault needs more processes than there are.
    """
    launch = read_launch()
    if fault in ("lost-rank", "scheduler") and launch.num_processes == 1:
        raise RecipeError(f"--inject {fault} breaks what ranks do together, and a single process has no other.")
    for among, ranks, what in ((("lost-targets",), launch.sequence, "rows"), (_OF_LAYERS, launch.tensor, "layers")):
        if fault in among and ranks == 1:
            raise RecipeError(f"--inject {fault} breaks {what} that are split over ranks, and none are here.")
    whole = [(owner, name, getattr(owner, name)) for owner, name in _BROKEN]
    _FAULTS[fault]()
    try:
        yield
    finally:
        for owner, name, before in whole:
            setattr(owner, name, before)


def _average_means() -> None:
    def factors(run: Run, window: Window, sync: torch.Tensor) -> list[float]:
        assert run.data.train is not None
        means = run.backend.world_size * len(window.rows)
        return [sync[0].item() / (means * run.data.train.num_targets(rows)) for rows in window.rows]

    _scale_losses(loop._all_reduce_sync, factors)


def _lose_rank() -> None:
    def lost(run: Run) -> bool:
        return run.backend.rank == run.backend.world_size - 1

    exchange = loop._all_reduce_sync
    _scale_losses(
        lambda run, window: exchange(
            run, replace(window, num_targets=0, num_computed=0, checksum=0) if lost(run) else window
        ),
        lambda run, window, sync: [0.0 if lost(run) else 1.0] * len(window.rows),
    )


def _scale_losses(exchange: Any, factors: Any) -> None:
    """Has the loss of each micro-batch multiplied.

    Args:
        exchange: Stands in for `loop._all_reduce_sync`.
        factors: What to multiply this rank's losses by, of the run, its window and what was exchanged.
    """
    waiting: list[float] = []
    forward = ForwardWrapper.forward

    def exchanged(run: Run, window: Window) -> torch.Tensor:
        sync: torch.Tensor = exchange(run, window)
        waiting[:] = factors(run, window, sync)
        return sync

    def scaled(self: ForwardWrapper, function: Any, *args: Any) -> Any:
        value = forward(self, function, *args)
        return value * waiting.pop(0) if waiting else value

    loop._all_reduce_sync = exchanged
    ForwardWrapper.forward = scaled  # type: ignore[method-assign]


def _hurry() -> None:
    """Steps the schedule once a rank, as a scheduler does that went through Accelerate's `prepare`."""
    lr_at, world = lr_schedule.lr_at, int(os.environ["WORLD_SIZE"])

    def hurried(step: int, num_steps: int, recipe: Recipe) -> float:
        return lr_at(min(step * world, num_steps - 1), num_steps, recipe)

    lr_schedule.lr_at = hurried


def _round() -> None:
    forward = ForwardWrapper.forward

    def rounded(self: ForwardWrapper, function: Any, *args: Any) -> Any:
        value = forward(self, function, *args)
        return value.bfloat16().float() if value.requires_grad else value

    ForwardWrapper.forward = rounded  # type: ignore[method-assign]


def _leak() -> None:
    def cu_seqlens_of_rows(batch: Any) -> dict[str, Any]:
        rows, length = batch["input_ids"].shape
        cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=batch["input_ids"].device)
        return {**batch, "cu_seqlens": cu_seqlens}

    split = sequence.split
    # What is verified before the first step has no gradients.
    sequence.split = lambda batch, rows: split(cu_seqlens_of_rows(batch) if torch.is_grad_enabled() else batch, rows)


def _lose_targets() -> None:
    split = sequence.split

    def without_last(batch: Any, rows: Any) -> Any:
        part = split(batch, rows)
        if not torch.is_grad_enabled():
            return part
        targets = part["targets"].clone()
        targets[:, -1] = IGNORED
        return {**part, "targets": targets}

    sequence.split = without_last


def _lose_sum() -> None:
    tensor.sum_gradients = lambda values, group: values.view_as(values)


def _count_twice() -> None:
    tensor.counts_in_norm = lambda splits, name: True


_OF_LAYERS = ("lost-sum", "wrong-norm")
_FAULTS: dict[str, Callable[[], None]] = {
    "mean-of-means": _average_means,
    "lost-rank": _lose_rank,
    "scheduler": _hurry,
    "bf16-loss": _round,
    "leaking-documents": _leak,
    "lost-targets": _lose_targets,
    "lost-sum": _lose_sum,
    "wrong-norm": _count_twice,
}
# What they replace.
_BROKEN: tuple[tuple[Any, str], ...] = (
    (loop, "_all_reduce_sync"),
    (ForwardWrapper, "forward"),
    (lr_schedule, "lr_at"),
    (sequence, "split"),
    (tensor, "sum_gradients"),
    (tensor, "counts_in_norm"),
)


def main(arguments: list[str]) -> int:
    """Plants the fault that is named first, and trains on what follows; returns the exit code."""
    fault, *rest = arguments
    try:
        with planted(fault):
            print(f"planted on purpose: {fault}, {FAULTS[fault]}", file=sys.stderr)
            return entry_point.train_main(rest)
    except RecipeError as error:
        exit_codes.report(error)
        return exit_codes.USER_ERROR


if __name__ == "__main__":
    exit_codes.exit_with(main(sys.argv[1:]))
