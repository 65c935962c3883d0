"""Faults on purpose, to show that `finetune parity` catches them.

`parity --inject` has each worker run this file in place of `scripts/train.py`:
`python -m finetune.diagnostics.fault_injection FAULT RECIPE`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

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
from finetune.training.build_run import Run
from finetune.utils import exit_codes
from finetune.utils.errors import RecipeError


@contextmanager
def plant_fault(fault: str) -> Iterator[None]:
    """Breaks what this process runs meanwhile.

    Raises:
        RecipeError: If the fault needs ranks that the launch does not have.
    """
    launch = read_launch()
    ranks_together = {
        "lost-rank": launch.num_processes,
        "scheduler": launch.num_processes,
        "lost-targets": launch.sequence,
        "lost-sum": launch.tensor,
        "wrong-norm": launch.tensor,
    }
    if ranks_together.get(fault) == 1:
        raise RecipeError(f"--inject {fault} breaks what ranks do together, and under this launch config none do that.")
    with _FAULTS[fault]():
        yield


def _average_means() -> AbstractContextManager[None]:
    def factors(run: Run, window: Window, sync: torch.Tensor) -> list[float]:
        assert run.data.train is not None
        means = run.backend.world_size * len(window.rows)
        return [sync[0].item() / (means * run.data.train.num_targets(rows)) for rows in window.rows]

    return _scale_losses(loop._all_reduce_sync, factors)


def _lose_rank() -> AbstractContextManager[None]:
    exchange = loop._all_reduce_sync

    def is_lost(run: Run) -> bool:
        return run.backend.rank == run.backend.world_size - 1

    def exchange_without_last(run: Run, window: Window) -> torch.Tensor:
        return exchange(run, replace(window, num_targets=0, num_computed=0, checksum=0) if is_lost(run) else window)

    return _scale_losses(
        exchange_without_last, lambda run, window, sync: [0.0 if is_lost(run) else 1.0] * len(window.rows)
    )


@contextmanager
def _scale_losses(exchange: Any, factors: Any) -> Iterator[None]:
    """Multiplies the loss of each micro-batch.

    Args:
        exchange: Stands in for `loop._all_reduce_sync`.
        factors: Returns this rank's factors for a run, its window and what was exchanged.
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

    with patch.object(loop, "_all_reduce_sync", exchanged), patch.object(ForwardWrapper, "forward", scaled):
        yield


def _step_schedule_by_rank() -> Any:
    """Steps the schedule once a rank, as a scheduler does that went through Accelerate's `prepare`."""
    lr_at, world = lr_schedule.lr_at, int(os.environ["WORLD_SIZE"])

    def hurried(step: int, num_steps: int, recipe: Recipe) -> float:
        return lr_at(min(step * world, num_steps - 1), num_steps, recipe)

    return patch.object(lr_schedule, "lr_at", hurried)


def _round_losses() -> Any:
    forward = ForwardWrapper.forward

    def rounded(self: ForwardWrapper, function: Any, *args: Any) -> Any:
        value = forward(self, function, *args)
        return value.bfloat16().float() if value.requires_grad else value

    return patch.object(ForwardWrapper, "forward", rounded)


def _leak_documents() -> Any:
    split = sequence.split

    def split_without_documents(batch: Any, rows: Any) -> Any:
        # What is verified before the first step has no gradients.
        if torch.is_grad_enabled():
            count, length = batch["input_ids"].shape
            cu_seqlens = torch.arange(
                0, count * length + 1, length, dtype=torch.int32, device=batch["input_ids"].device
            )
            batch = {**batch, "cu_seqlens": cu_seqlens}
        return split(batch, rows)

    return patch.object(sequence, "split", split_without_documents)


def _lose_targets() -> Any:
    split = sequence.split

    def split_without_last(batch: Any, rows: Any) -> Any:
        part = split(batch, rows)
        if torch.is_grad_enabled():
            targets = part["targets"].clone()
            targets[:, -1] = IGNORED
            part = {**part, "targets": targets}
        return part

    return patch.object(sequence, "split", split_without_last)


_FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "mean-of-means": _average_means,
    "lost-rank": _lose_rank,
    "scheduler": _step_schedule_by_rank,
    "bf16-loss": _round_losses,
    "leaking-documents": _leak_documents,
    "lost-targets": _lose_targets,
    "lost-sum": lambda: patch.object(tensor, "sum_gradients", lambda values, group: values.view_as(values)),
    "wrong-norm": lambda: patch.object(tensor, "counts_in_norm", lambda splits, name: True),
}


def main(arguments: list[str]) -> int:
    """Plants the fault that is named first, and trains on what follows; returns the exit code."""
    fault, *rest = arguments
    try:
        with plant_fault(fault):
            print(f"planted on purpose: {fault}, {FAULTS[fault]}", file=sys.stderr)
            return entry_point.train_main(rest)
    except RecipeError as error:
        exit_codes.report(error)
        return exit_codes.USER_ERROR


if __name__ == "__main__":
    exit_codes.exit_with(main(sys.argv[1:]))
