"""Runs `accelerate launch`, and ends with the workers' exit code instead of the launcher's traceback.

`python -m finetune.distributed.launch.launcher …` is `accelerate launch …`: the same code starts the same processes,
which without GPUs are forks of this one (`forked_workers`).
Workers keep the terminal, so what they print is live. They find the launch file by reading this command line.
"""

import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from finetune.distributed.launch.forked_workers import forked_workers, import_ahead
from finetune.distributed.launch.launch_config import check_installed, name_deepspeed_device
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.utils import signals
from finetune.utils.exit_codes import REQUEUE, run_guarded
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import quick_imports
from finetune.utils.output_streams import outlive_readers
from finetune.utils.temporary_folders import temporary_folder

# After a failure torchrun asks the other workers to end, and kills those that hang: after 30 s, if left to itself.
_HUNG_S = 25

# How long workers may take to end once they are asked to: torchrun's variable, for which it has 30 s.
_PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass
class _Requests:
    """The signals that this launcher was sent, and passes on.

    torchrun handles them by an exception: it does not learn how its workers end then, and a second signal has it leave
    them alone.
    """

    numbers: list[int] = field(default_factory=list)

    def handle(self, number: int, _: Any) -> None:
        """Passes a signal on to the workers, who save and end."""
        if not _signal_workers(number) and not self.numbers:
            raise signals.Interrupted(number)
        if not self.numbers:
            timer = threading.Timer(float(os.environ.get(_PATIENCE, 30)), _signal_workers, (signal.SIGKILL,))
            timer.daemon = True
            timer.start()
        self.numbers.append(number)


def _signal_workers(number: int) -> bool:
    """Sends a signal to the workers; returns False if there are none."""
    import psutil

    workers = psutil.Process().children()
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(number)
    return bool(workers)


class _Stopped(Exception):
    """Workers were asked to stop, and have ended: none is started again."""

    def __init__(self, codes: Sequence[int | None]) -> None:
        """Takes their exit codes."""
        super().__init__(codes)
        self.codes = codes


def launch_workers(
    config_file: str,
    options: Sequence[str],
    arguments: Sequence[str],
    *,
    module: str = "finetune.training",
    grace_s: float = 0.0,
) -> None:
    """Turns this process into the launcher of `launcher_command`, so it returns only by an error.

    Args:
        config_file: The launch file.
        options: More of `accelerate launch`'s options, each with its value, such as `--num_processes 4`.
        arguments: What the workers are given.
        module: What they run; that of `scripts/train.py` if left out.
        grace_s: How long workers may take to save once the launcher is told to stop.

    Raises:
        BackendError: As a run would: the launch file cannot be used, or contradicts itself or the environment.
    """
    words = launcher_command(config_file, options, arguments, module=module)
    os.environ.setdefault(_PATIENCE, str(math.ceil(grace_s) + 10))
    sys.stdout.flush()
    sys.stderr.flush()
    with signals.held_back():
        os.execv(sys.executable, words)


def launcher_command(
    config_file: str, options: Sequence[str], arguments: Sequence[str], *, module: str = "finetune.training"
) -> list[str]:
    """The command that launches workers; see `launch_workers` for its arguments.

    Raises:
        BackendError: As a run would: the launch file cannot be used, or contradicts itself or the environment.
    """
    given = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    foreseen = predict_environment(config_file, given, os.environ)
    check_installed(foreseen.launch)
    alone = foreseen.asked.num_machines == 1 and "main_process_port" not in {*foreseen.written, *given}
    # Any free port, so that two runs fit on one machine.
    port = ["--main_process_port", "0"] if alone else []
    words = [sys.executable, "-m", "finetune.distributed.launch.launcher", "--config_file", config_file]
    return [*words, *port, *options, "--module", module, *arguments]


def main(arguments: Sequence[str]) -> int:
    """Launches as `accelerate launch` does; returns the exit code of the worker that failed first, or 0."""
    outlive_readers()
    # Before anything imports the hub's client, here or in a fork.
    go_offline_if_unreachable()
    # A library that starts threads where it is imported would not have them in a fork. Workers choose their own number.
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with quick_imports():
        import torch
        from accelerate.commands.launch import launch_command, launch_command_parser

        parsed = launch_command_parser().parse_args(list(arguments))
        # A fork closes what it inherits by what Linux says of its open files.
        forks = parsed.module and sys.platform == "linux" and not torch.cuda.is_available()
        if forks:
            name_deepspeed_device()  # which workers inherit
            import_ahead(parsed.training_script)
    if unset:
        del os.environ["OMP_NUM_THREADS"]
    # It reports every worker that ends, whose own last words are on the terminal already.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    # It warns that it sets one thread a process; workers set their own (`launch_config.threads_each`).
    logging.getLogger("torch.distributed.run").addFilter(lambda record: "OMP_NUM_THREADS" not in record.getMessage())
    requests = _Requests()
    # What torchrun itself handles: Accelerate passes it on.
    parsed.signals_to_handle = signal.SIGQUIT.name
    _end_workers_sooner(requests)
    with (
        temporary_folder() as folder,
        signals.handle_signals(signals.stop_signals(), requests.handle),
        forked_workers() if forks else nullcontext(),
    ):
        # torchrun would leave a folder of its own behind.
        parsed.log_dir = parsed.log_dir or str(folder)
        return _run(launch_command, parsed, requests)


def _run(launch_command: Callable[[Any], None], parsed: Any, requests: _Requests) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _account(f"The worker of rank {rank}", failure.exitcode)
    except subprocess.CalledProcessError as error:
        return _account("The worker", error.returncode)
    except _Stopped as error:
        failed = [code for code in error.codes if code not in (0, REQUEUE)]
        if not failed:
            return REQUEUE if REQUEUE in error.codes else 0
        # One that failed says more than those that were ended with it.
        return next((code for code in failed if code is not None and code > 0), 128 + requests.numbers[0])
    except SignalException as error:
        return 128 + int(error.sigval)
    except (ValueError, OSError) as error:
        print(f"\nError: accelerate launch cannot start this: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _end_workers_sooner(requests: _Requests) -> None:
    """Has torchrun kill hung workers sooner, and end with those that were asked to."""
    from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

    close = PContext.close

    def sooner(self: PContext, death_sig: signal.Signals | None = None, timeout: int = _HUNG_S) -> None:
        close(self, death_sig, timeout)
        if requests.numbers:
            assert isinstance(self, SubprocessContext)
            raise _Stopped([handler.proc.returncode for handler in self.subprocess_handlers.values()])

    PContext.close = sooner  # type: ignore[method-assign]


def _account(who: str, code: int) -> int:
    """Says how a worker ended, unless it has said so itself; returns the exit code as a shell would."""
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    hint = ", which is what the kernel does when memory runs out" if name == "SIGKILL" else ""
    print(f"\n{who} was ended by {name}{hint}.", file=sys.stderr, flush=True)
    return 128 - code


if __name__ == "__main__":
    sys.exit(run_guarded(partial(main, sys.argv[1:])))
