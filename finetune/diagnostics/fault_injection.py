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
from finetune.distributed.strategies import sequence, tensor
from finetune.models.chunked_loss import IGNORED
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.optim import lr_schedule
from finetune.training import entry_point, loop
from finetune.training.build_run import Run
from finetune.utils import exit_codes

_Patch = AbstractContextManager[Any]


def _average_means() -> _Patch:
    def factors(run: Run, window: Window, sync: torch.Tensor) -> list[float]:
        assert run.data.train is not None
        means = run.backend.world_size * len(window.rows)
        return [sync[0].item() / (means * run.data.train.num_targets(rows)) for rows in window.rows]

    return _scale_losses(loop._all_reduce_sync, factors)


def _lose_rank() -> _Patch:
    exchange = loop._all_reduce_sync

    def is_lost(run: Run) -> bool:
        return 0 < run.backend.rank == run.backend.world_size - 1

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


def _step_schedule_by_rank() -> _Patch:
    """Steps the schedule once a rank, as a scheduler does that went through Accelerate's `prepare`."""
    lr_at, world = lr_schedule.lr_at, int(os.environ.get("WORLD_SIZE", "1"))

    def hurried(step: int, num_steps: int, recipe: Recipe) -> float:
        return lr_at(min(step * world, num_steps - 1), num_steps, recipe)

    return patch.object(lr_schedule, "lr_at", hurried)


def _round_losses() -> _Patch:
    forward = ForwardWrapper.forward

    def rounded(self: ForwardWrapper, function: Any, *args: Any) -> Any:
        value = forward(self, function, *args)
        return value.bfloat16().float() if value.requires_grad else value

    return patch.object(ForwardWrapper, "forward", rounded)


def _leak_documents() -> _Patch:
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


def _lose_targets() -> _Patch:
    split = sequence.split

    def split_without_last(batch: Any, rows: Any) -> Any:
        part = split(batch, rows)
        if torch.is_grad_enabled():
            targets = part["targets"].clone()
            targets[:, -1] = IGNORED
            part = {**part, "targets": targets}
        return part

    return patch.object(sequence, "split", split_without_last)


FAULTS: dict[str, tuple[str, Callable[[], _Patch]]] = {
    "mean-of-means": (
        "each micro-batch's loss is divided by its own targets, and the means are averaged",
        _average_means,
    ),
    "lost-rank": ("the last rank's rows are dropped", _lose_rank),
    "scheduler": ("the learning rate's schedule advances by one step a rank", _step_schedule_by_rank),
    "bf16-loss": ("the loss of each micro-batch is rounded to bf16", _round_losses),
    "leaking-documents": ("documents that share a row see each other", _leak_documents),
    "lost-targets": (
        "targets are shifted after rows are split, so that the last token of each part has none",
        _lose_targets,
    ),
    "lost-sum": (
        "gradients of what goes into split layers are not summed over the ranks that share them",
        lambda: patch.object(tensor, "sum_gradients", lambda values, group: values.view_as(values)),
    ),
    "wrong-norm": (
        "the gradient norm counts what ranks that share layers have in common once for each of them",
        lambda: patch.object(tensor, "counts_in_norm", lambda splits, name: True),
    ),
}
"""Faults that can be planted, and what plants them."""


def main(arguments: list[str]) -> int:
    """Plants the fault that is named first, and trains on what follows; returns the exit code."""
    fault, *rest = arguments
    text, plant = FAULTS[fault]
    print(f"planted on purpose: {fault}, {text}", file=sys.stderr)
    with plant():
        return entry_point.train_main(rest)


if __name__ == "__main__":
    exit_codes.exit_with(main(sys.argv[1:]))
