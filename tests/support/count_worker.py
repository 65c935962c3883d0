"""Counts what a step asks of the host and of other ranks outside its backward passes. Launched with a recipe."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.recipe import load_recipe
from finetune.training.build_run import build_run
from finetune.training.loop import train_step
from finetune.utils import exit_codes
from finetune.utils.library_imports import silence_libraries


class Calls(TorchDispatchMode):
    """Reads of a tensor's value by the host, and collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.sent: Counter[str] = Counter()
        self.backwards = False
        self.gathers: list[int] = []
        """In each backward pass."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name == "aten::_local_scalar_dense":
            self.reads += 1
        elif self.backwards:
            self.gathers[-1] += "allgather" in name
        elif name.startswith("c10d::"):
            self.sent[name.removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))


def main(words: list[str]) -> None:
    silence_libraries()
    run = build_run(load_recipe(words[0]), quiet=True)
    calls, strategy = Calls(), run.backend.strategy

    def marked(runtime: Any, loss: torch.Tensor) -> None:
        calls.backwards = True
        calls.gathers.append(0)
        strategy.backward(runtime, loss)
        calls.backwards = False

    run.backend.strategy = replace(strategy, backward=marked)
    for step in (0, 1):
        train_step(run, step)
    with calls:
        train_step(run, 2)
    with Calls() as sees:
        torch.ones(1).item()
        run.backend.all_reduce_sum(torch.ones(1))
    found = {"reads": calls.reads, "sent": calls.sent, "gathers": calls.gathers[-4:]}
    found["sees"] = [sees.reads, sum(sees.sent.values())]
    if run.backend.is_main:
        Path(run.recipe.output.dir, "counted.json").write_text(json.dumps(found))
    run.backend.close()


if __name__ == "__main__":
    exit_codes.exit_with(exit_codes.run_guarded(lambda: main(sys.argv[1:])))
