"""Runs `accelerate launch`, and ends with the workers' exit code instead of the launcher's traceback.

`python -m finetune.distributed.launch.launcher …` is `accelerate launch …`: the same code starts the same processes,
which without GPUs are forks of this one (`forked_workers`).
Workers keep the terminal, so what they print is live. They find the launch file by reading this command line.
"""

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from finetune.distributed.launch.forked_workers import forked_workers, import_ahead, single_threaded
from finetune.distributed.launch.launch_environment import read_launch_environment
from finetune.utils.exit_codes import REQUEUE, guarded
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import quick_imports

# After a failure torchrun asks the other workers to end, and kills those that hang: after 30 s, if left to itself.
_HUNG_S = 25


def launch(
    config_file: str,
    options: Sequence[str],
    arguments: Sequence[str],
    *,
    module: str = "finetune.training",
    grace_s: float = 0.0,
) -> None:
    """Turns this process into the launcher of `command`, so it returns only by an error.

    Args:
        config_file: The launch file.
        options: More of `accelerate launch`'s options, each with its value, such as `--num_processes 4`.
        arguments: What the workers are given.
        module: What they run; that of `scripts/train.py` if left out.
        grace_s: How long workers may take to save once the launcher is told to stop.

    Raises:
        BackendError: As a run would: the launch file cannot be used, or contradicts itself or the environment.
    """
    words = command(config_file, options, arguments, module=module)
    # torchrun kills workers 30 seconds after it has passed a signal on; ours end by themselves.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_s) + 10))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, words)


def command(
    config_file: str, options: Sequence[str], arguments: Sequence[str], *, module: str = "finetune.training"
) -> list[str]:
    """The command that launches workers; see `launch` for what it takes.

    Raises:
        BackendError: As a run would: the launch file cannot be used, or contradicts itself or the environment.
    """
    given = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    foreseen = read_launch_environment(config_file, given, os.environ)
    alone = foreseen.get("num_machines") == 1 and {"main_process_port"}.isdisjoint([*foreseen.written, *given])
    # Any free port, so that two runs fit on one machine.
    port = ["--main_process_port", "0"] if alone else []
    words = [sys.executable, "-m", "finetune.distributed.launch.launcher", "--config_file", config_file]
    return [*words, *port, *options, "--module", module, *arguments]


def main(arguments: Sequence[str]) -> int:
    """Launches as `accelerate launch` does; returns the exit code of the worker that failed first, or 0."""
    # Before anything imports the hub's client, here or in a fork.
    go_offline_if_unreachable()
    with quick_imports(), single_threaded():
        import torch
        from accelerate.commands.launch import launch_command, launch_command_parser

        parsed = launch_command_parser().parse_args(list(arguments))
        forks = parsed.module and not torch.cuda.is_available()
        if forks:
            # Else a library of accelerate's tells at length that it looked for a GPU; workers inherit the answer.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            import_ahead(parsed.training_script)
    # It reports every worker that ends, whose own last words are on the terminal already.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    # It warns that it sets one thread a process; workers set their own (`launch_config.threads_each`).
    logging.getLogger("torch.distributed.run").addFilter(lambda record: "OMP_NUM_THREADS" not in record.getMessage())
    # Ended by a signal, it does not learn its workers' exit codes: they leave a mark here when all is saved.
    marker = Path(tempfile.mkdtemp(prefix="finetune-")) / "stopped"
    os.environ["FINETUNE_STOPPED_FILE"] = str(marker)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # torchrun puts its own in place of the first two; Accelerate alone would end and leave its worker behind.
        signal.signal(number, _pass_on)
    _kill_hung_workers_sooner()
    try:
        with forked_workers() if forks else nullcontext():
            return _run(launch_command, parsed, marker)
    finally:
        shutil.rmtree(marker.parent, ignore_errors=True)


def _run(launch_command: Callable[[Any], None], parsed: Any, marker: Path) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _account(f"The worker of rank {rank}", failure.exitcode)
    except subprocess.CalledProcessError as error:
        return _account("The worker", error.returncode)
    except SignalException as error:
        return REQUEUE if marker.exists() else 128 + int(error.sigval)
    except KeyboardInterrupt:
        return REQUEUE if marker.exists() else 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        print(f"\nError: accelerate launch cannot start this: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _kill_hung_workers_sooner() -> None:
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def sooner(self: PContext, death_sig: signal.Signals | None = None, timeout: int = _HUNG_S) -> None:
        close(self, death_sig, timeout)

    PContext.close = sooner  # type: ignore[method-assign]


def _pass_on(number: int, _: Any) -> None:
    import psutil

    for child in psutil.Process().children():
        child.send_signal(number)


def _account(who: str, code: int) -> int:
    """Says how a worker ended, unless it has said so itself; returns the exit code as a shell would."""
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    hint = ", which is what the kernel does when memory runs out" if name == "SIGKILL" else ""
    print(f"\n{who} was ended by {name}{hint}.", file=sys.stderr, flush=True)
    return 128 - code


if __name__ == "__main__":
    sys.exit(guarded(partial(main, sys.argv[1:])))
