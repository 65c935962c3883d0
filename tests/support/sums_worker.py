"""Takes steps with gradients summed over ranks once a step, and after each micro-batch; notes what is sent and held.

Launched with a recipe and the file to write into. With `broken` behind them, what sums gradients is disabled, which the
run must notice.
"""

import gc
import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.recipe import load_recipe
from finetune.models.forward_wrapper import unwrap
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun
from finetune.training.loop import train_step
from finetune.utils.errors import BackendError
from finetune.utils.library_imports import silence_libraries

STEPS = 4


class Sent(TorchDispatchMode):
    """Collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.by_name[function.name()] += function.name().startswith("c10d::")
        return function(*args, **(kwargs or {}))


def steps(run: BuiltRun) -> dict[str, Any]:
    """Losses and norms; of the last step what each backward pass sent, and the elements of gradients it left."""
    taken = [train_step(run, step) for step in range(STEPS - 1)]
    strategy, sent, held = run.backend.strategy, [], []

    def watched(runtime: Any, loss: torch.Tensor) -> None:
        with Sent() as seen:
            strategy.backward(runtime, loss)
        sent.append([seen.by_name["c10d::_reduce_scatter_base_"], seen.by_name["c10d::allreduce_"]])
        grads: list[Any] = [p.grad for p in run.model.parameters() if p.grad is not None]
        held.append(sum((g.to_local() if hasattr(g, "to_local") else g).numel() for g in grads))

    run.backend.strategy = replace(strategy, backward=watched)
    taken.append(train_step(run, STEPS - 1))
    run.backend.strategy = strategy
    weights = {
        name: tensor.tolist() for name, tensor in run.backend.full_parameters(unwrap(run.model)) if tensor is not None
    }
    return {
        "loss": [run.backend.all_reduce_sum(one.losses.double().sum()).item() / one.sync.read()[0] for one in taken],
        "norm": [one.norm.read()[0] for one in taken],
        "sent": sent,
        "held": held,
        "weights": weights,
        "launch": run.backend.facts()["launch"]["sync_each_batch"],
        "memory": run.backend.memory(run.model, 8.0).gradients,
    }


def broken(run: BuiltRun, each: str) -> str:
    """What a run says whose gradients are not summed when they should be."""
    if each == "true":
        FSDPModule.set_requires_all_reduce = FSDPModule.set_requires_gradient_sync
    else:
        Accelerator.no_sync = lambda self, model: nullcontext()
    before = [p.to_local().clone() for p in run.model.parameters()]
    try:
        train_step(run, 0)
    except BackendError as error:
        same = all(torch.equal(a, b.to_local()) for a, b in zip(before, run.model.parameters(), strict=True))
        return str(error) if same else "weights have changed"
    return ""


def main(recipe: str, result: str, *words: str) -> None:
    silence_libraries()
    found = {}
    for each in ("false", "true"):
        os.environ["FSDP_SYNC_EACH_BATCH"] = each
        run = build_run(load_recipe(recipe, ("output.overwrite=true",)), quiet=True)
        found[each] = broken(run, each) if words else steps(run)
        main_rank, close = run.backend.is_main, run.backend.close
        run.backend.barrier()
        if each == "false":
            del run, close
            gc.collect()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    if main_rank:
        Path(result).write_text(json.dumps(found))
    close()


if __name__ == "__main__":
    main(*sys.argv[1:])
