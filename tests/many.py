"""Runs several recipes in one process, one after the other; what `harness.Launcher.many` launches.

The variable FAULT breaks the loop on purpose, so that tests can see the suite fail.
"""

import gc
import os
import sys
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from finetune import cli, train
from finetune.backend import Backend
from finetune.errors import FinetuneError
from finetune.quiet import silence_libraries
from finetune.recipe import load
from finetune.run import build


def plant(fault: str) -> None:
    backward, total = Accelerator.backward, Backend.sum
    if fault == "rank_factor":
        Accelerator.backward = lambda self, loss, **k: backward(self, loss / self.num_processes, **k)
    elif fault == "accumulation_factor":
        Accelerator.backward = lambda self, loss, **k: backward(self, loss / self.gradient_accumulation_steps, **k)
    elif fault == "mean_of_means":
        # Every rank divides by its own targets, as if all had equally many.
        def own(self: Backend, values: Any) -> Any:
            return values * self.world if values.numel() == 1 else total(self, values)

        Backend.sum = own


def main(paths: list[str]) -> None:
    silence_libraries()
    plant(os.environ.get("FAULT", ""))
    run = None
    for path in paths:
        try:
            run = build(load(path))
            train.train(run)
        except FinetuneError as error:
            cli.report(error)
            cli.exit_with(cli.USER_ERROR)
        run.backend.wait()
        # Accelerate keeps its state for the life of a process; the process group can stay.
        if path != paths[-1]:
            del run
            gc.collect()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    run.backend.close()
    cli.exit_with(0)


if __name__ == "__main__":
    main(sys.argv[1:])
