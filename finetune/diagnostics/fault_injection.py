"""Faults on purpose, to show that `finetune parity` catches them.

Nothing imports this. `parity --inject` has each worker run it in place of `scripts/train.py`:
`python -m finetune.diagnostics.fault_injection FAULT RECIPE`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finetune.config.recipe_schema import Recipe
from finetune.diagnostics.parity.launch_runs import FAULTS
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.optim import lr_schedule
from finetune.training import entry_point, loop
from finetune.training.build_run import Run
from finetune.utils import exit_codes
from finetune.utils.errors import RecipeError


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Breaks what this process runs meanwhile.

    Raises:
        RecipeError: If the fault needs more processes than there are.
    """
    if fault in ("lost-rank", "scheduler") and os.environ.get("WORLD_SIZE", "1") == "1":
        raise RecipeError(f"--inject {fault} breaks what ranks do together, and a single process has no other.")
    whole = loop._all_reduce_sync, ForwardWrapper.forward, lr_schedule.lr_at
    {"mean-of-means": _average_means, "lost-rank": _lose_rank, "scheduler": _hurry, "bf16-loss": _round}[fault]()
    try:
        yield
    finally:
        loop._all_reduce_sync, ForwardWrapper.forward, lr_schedule.lr_at = whole  # type: ignore[method-assign]


def _average_means() -> None:
    def factors(run: Run, micro_batches: list[Any], sync: torch.Tensor) -> list[float]:
        assert run.data.train is not None
        means = run.backend.world * len(micro_batches)
        return [sync[0].item() / (means * run.data.train.num_targets(rows)) for rows in micro_batches]

    _scale_losses(loop._all_reduce_sync, factors)


def _lose_rank() -> None:
    def lost(run: Run) -> bool:
        return run.backend.rank == run.backend.world - 1

    exchange = loop._all_reduce_sync
    _scale_losses(
        lambda run, micro_batches: exchange(run, [] if lost(run) else micro_batches),
        lambda run, micro_batches, sync: [0.0 if lost(run) else 1.0] * len(micro_batches),
    )


def _scale_losses(exchange: Any, factors: Any) -> None:
    """Has the loss of each micro-batch multiplied.

    Args:
        exchange: Stands in for `loop._all_reduce_sync`.
        factors: What to multiply this rank's losses by, of the run, its micro_batches and what was exchanged.
    """
    waiting: list[float] = []
    forward = ForwardWrapper.forward

    def exchanged(run: Run, micro_batches: list[Any]) -> torch.Tensor:
        sync: torch.Tensor = exchange(run, micro_batches)
        waiting[:] = factors(run, micro_batches, sync)
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
