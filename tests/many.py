"""Runs several recipes in one process, one after the other; what `harness.Launcher.many` launches."""

import gc
import sys

from accelerate.state import AcceleratorState, GradientState

from finetune import cli, train
from finetune.errors import FinetuneError
from finetune.quiet import silence_libraries
from finetune.recipe import load


def main(paths: list[str]) -> None:
    silence_libraries()
    run = None
    for path in paths:
        try:
            run = train.build(load(path))
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
