"""Faults on purpose, to show that `finetune parity` catches them.

`parity --inject` has each worker run this file in place of `scripts/train.py`:
`python -m finetune.diagnostics.fault_injection FAULT RECIPE`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.feed import Window, counts_of
from finetune.distributed.strategies import sequence, tensor
from finetune.models.chunked_loss import IGNORED
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.optim import lr_schedule
from finetune.training import entry_point, loop
from finetune.training.built_run import BuiltRun
from finetune.utils import exit_codes

# Factors of the losses that this rank has still to compute in this step: of each term, or of all.
_factors: list[torch.Tensor] = []


def _average_means(exchange: Any, run: BuiltRun, window: Window) -> torch.Tensor:
    assert run.data.train is not None
    sync: torch.Tensor = exchange(run, window)
    means, counts = run.backend.world_size * len(window.rows), sync[-len(run.task.terms) :]
    held = [counts_of(run.data.train, rows) for rows in window.rows]
    own = counts.new_tensor([[one[term.counts] for term in run.task.terms] for one in held])
    _factors[:] = (counts / (means * own)).float().unbind()
    return sync


def _lose_rank(exchange: Any, run: BuiltRun, window: Window) -> torch.Tensor:
    lost = 0 < run.backend.rank == run.backend.world_size - 1
    _factors[:] = [torch.tensor(0.0 if lost else 1.0)] * len(window.rows)
    nothing = dict.fromkeys(window.counts, 0.0)
    empty = replace(window, counts=nothing, num_targets=0, num_computed=0, checksum=0)
    sync: torch.Tensor = exchange(run, empty if lost else window)
    return sync


def _scale_loss(forward: Any, wrapper: ForwardWrapper, function: Any, *args: Any) -> Any:
    value = forward(wrapper, function, *args)
    return (value * _factors.pop(0)).reshape(value.shape) if _factors and value.requires_grad else value


def _step_schedule_by_rank(lr_at: Any, step: int, num_steps: int, recipe: Recipe) -> Any:
    """Steps the schedule once a rank, as a scheduler does that went through Accelerate's `prepare`."""
    return lr_at(min(step * int(os.environ.get("WORLD_SIZE", "1")), num_steps - 1), num_steps, recipe)


def _round_loss(forward: Any, wrapper: ForwardWrapper, function: Any, *args: Any) -> Any:
    value = forward(wrapper, function, *args)
    return value.bfloat16().float() if value.requires_grad else value


def _leak_documents(split: Any, batch: Any, rows: Any) -> Any:
    # What is verified before the first step has no gradients.
    if torch.is_grad_enabled():
        count, length = batch["input_ids"].shape
        cu_seqlens = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=batch["input_ids"].device)
        batch = {**batch, "cu_seqlens": cu_seqlens}
    return split(batch, rows)


def _lose_targets(split: Any, batch: Any, rows: Any) -> Any:
    micro_batch = split(batch, rows)
    if torch.is_grad_enabled():
        targets = micro_batch["targets"].clone()
        targets[:, -1] = IGNORED
        micro_batch = {**micro_batch, "targets": targets}
    return micro_batch


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted."""

    text: str
    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...]
    """Owners and names of functions, and what is called in place of each, with the function before its arguments."""


_EXCHANGE, _FORWARD = (loop, "_all_reduce_sync"), (ForwardWrapper, "forward")
FAULTS = {
    "mean-of-means": Fault(
        "each micro-batch's loss is divided by its own targets, and the means are averaged",
        ((*_EXCHANGE, _average_means), (*_FORWARD, _scale_loss)),
    ),
    "lost-rank": Fault("the last rank's rows are dropped", ((*_EXCHANGE, _lose_rank), (*_FORWARD, _scale_loss))),
    "scheduler": Fault(
        "the learning rate's schedule advances by one step a rank", ((lr_schedule, "lr_at", _step_schedule_by_rank),)
    ),
    "bf16-loss": Fault("the loss of each micro-batch is rounded to bf16", ((*_FORWARD, _round_loss),)),
    "leaking-documents": Fault("documents that share a row see each other", ((sequence, "split", _leak_documents),)),
    "lost-targets": Fault(
        "targets are shifted after rows are split, so that the last token of each part has none",
        ((sequence, "split", _lose_targets),),
    ),
    "lost-sum": Fault(
        "gradients of what goes into split layers are not summed over the ranks that share them",
        ((tensor, "sum_gradients", lambda whole, values, group: values.view_as(values)),),
    ),
    "wrong-norm": Fault(
        "the gradient norm counts what ranks that share layers have in common once for each of them",
        ((tensor, "counts_in_norm", lambda whole, splits, name: True),),
    ),
}


@contextmanager
def plant_fault(fault: str) -> Iterator[None]:
    """Breaks what this process runs meanwhile."""
    with ExitStack() as patches:
        for owner, name, broken in FAULTS[fault].replaced:
            patches.enter_context(patch.object(owner, name, _with_whole(broken, getattr(owner, name))))
        yield


def _with_whole(broken: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: broken(whole, *args)


def main(arguments: list[str]) -> int:
    """Plants the fault that is named first, and trains on what follows; returns the exit code."""
    fault, *rest = arguments
    print(f"planted on purpose: {fault}, {FAULTS[fault].text}", file=sys.stderr)
    with plant_fault(fault):
        return entry_point.train_main(rest)


if __name__ == "__main__":
    exit_codes.exit_with(main(sys.argv[1:]))
