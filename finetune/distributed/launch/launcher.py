"""Runs `accelerate launch`, and ends with the workers' exit code instead of the launcher's traceback.

`python -m finetune.distributed.launch.launcher …` is `accelerate launch …`: the same code starts the same processes.
Without GPUs they are forks of this one, which has imported what they need: a start imports once, however many they are
(`forked_workers`). Workers keep the terminal, so what they print is live. They find the launch file by reading this
command line.
"""

import errno
import fcntl
import gc
import importlib
import importlib.util
import logging
import math
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from finetune.distributed.launch.elastic import elastic_agents, why_ended
from finetune.distributed.launch.launch_config import (
    check_installed,
    given_options,
    name_deepspeed_device,
    parse_launch,
)
from finetune.distributed.launch.launch_file import read_launch_file
from finetune.distributed.launch.launch_schema import LaunchFile
from finetune.distributed.launch.predicted_environment import PredictedEnvironment, predict_environment
from finetune.utils import orphan_watch, signals
from finetune.utils.errors import BackendError
from finetune.utils.exit_codes import (
    ALERTED,
    REQUEUE,
    USER_ERROR,
    exit_with,
    how_ended,
    print_error,
    run_guarded,
    shell_code,
)
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import quick_imports
from finetune.utils.quoting import to_stderr
from finetune.utils.temporary_folders import temporary_folder

if TYPE_CHECKING:
    from finetune.distributed.launch.heartbeat import Heartbeat

SEVERAL = "FINETUNE_MACHINES"
"""Variable by which `launch_workers` tells the launcher that it turns into of a launch on several machines."""

# Files that a launcher has open, and for each worker. Of 2 workers, 28 are the fewest with which a launch has worked.
_OPEN_FILES, _OPEN_FILES_EACH = 20, 4

# After a failure torchrun asks the other workers to end, and kills those that hang: after 30 s, if left to itself.
_HUNG_S = 25

# How long workers may take to end once they are asked to: torchrun's variable, for which it has 30 s.
_PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def _pass_on(sent: list[int], number: int, _: Any) -> None:
    """Passes a signal on to the workers, who save and end, and adds it to those that were sent before.

    torchrun handles signals by an exception: it does not learn how its workers end then, and a second signal has it
    leave them alone.
    """
    first = not sent
    sent.append(number)
    if not _signal_workers(number) and first:
        raise signals.Interrupted(number)
    if first:
        timer = threading.Timer(float(os.environ.get(_PATIENCE, 30)), _signal_workers, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()


def _signal_workers(number: int) -> bool:
    """Sends a signal to the workers; returns False if there are none."""
    import psutil

    workers = psutil.Process().children()
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(number)
    return bool(workers)


class FailureAlert:
    """Tells how a launch has failed if rank 0 could not: it was killed, or hung for a rank that was."""

    def __init__(self, module: str | None, arguments: Sequence[str], folder: Path) -> None:
        """
        Args:
            module: The package that the workers run, if it is one. Its module `launch_failed`, if there is one, sends
                alerts.
            arguments: What the workers are given.
            folder: For a file by which rank 0 says that it has sent one.
        """
        self._module, self._arguments, self._file = module, list(arguments), folder / "alerted"
        self._sent = False
        os.environ[ALERTED] = str(self._file)

    def workers_ended(self) -> None:
        """Notes if rank 0 has sent an alert. Workers that are started again may fail again."""
        self._sent = self._file.exists()
        self._file.unlink(missing_ok=True)

    def send(self, text: str) -> None:
        """Sends an alert, within 9 s, unless rank 0 has or the recipe asks for none."""
        if self._module is None or self._sent or self._file.exists():
            return
        spec = importlib.util.find_spec(self._module)
        name = f"{self._module}.launch_failed"
        if spec is not None and spec.submodule_search_locations and importlib.util.find_spec(name) is not None:
            importlib.import_module(name).send_alert_of_failure(self._arguments, text)


class _Stopped(Exception):
    """Workers have ended, since they were asked to or a user has to change something: none is started again.

    `args` are their exit codes.
    """


def launch_workers(
    config_file: str,
    options: Sequence[str],
    arguments: Sequence[str],
    *,
    module: str = "finetune.training",
    grace_s: float = 0.0,
    recipe: Mapping[str, Any] | None = None,
    timeouts: Mapping[str, float] | None = None,
) -> None:
    """Turns this process into the launcher of `launcher_command`, which see; it returns only by an error.

    Args:
        grace_s: How long workers may take to save once the launcher is told to stop.
        recipe: What is run, which launchers of several machines compare.
        timeouts: How long these wait for each other; see `rendezvous.MachinePlan`.
    """
    foreseen, words = _prepare(config_file, options, arguments, module)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _OPEN_FILES + _OPEN_FILES_EACH * foreseen.local:
        # torch's store waits for ever, or ends in C++, where it can have no socket.
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    # Machines of an elastic launch come and go; its agents watch them.
    if foreseen.asked.num_machines > 1 and foreseen.asked.nnodes is None:
        from finetune.distributed.launch import rendezvous

        given = {"command": list(arguments)} if recipe is None else recipe
        verb = "launch" if recipe is not None else arguments[0]
        rendezvous.hand_over(rendezvous.plan_machine(foreseen, verb, given, **(timeouts or {})), SEVERAL)
    os.environ.setdefault(_PATIENCE, str(math.ceil(grace_s) + 10))
    sys.stdout.flush()
    sys.stderr.flush()
    with signals.held_back():
        os.execv(sys.executable, words)


def launcher_command(
    config_file: str, options: Sequence[str], arguments: Sequence[str], *, module: str = "finetune.training"
) -> list[str]:
    """Returns the command that launches workers.

    Args:
        config_file: The launch file.
        options: More of `accelerate launch`'s options, each with its value, such as `--num_processes 4`.
        arguments: What the workers are given.
        module: What they run; that of `scripts/train.py` if left out.

    Raises:
        BackendError: As a run would: the launch file cannot be used, or contradicts itself or the environment.
    """
    return _prepare(config_file, options, arguments, module)[1]


def _prepare(
    config_file: str, options: Sequence[str], arguments: Sequence[str], module: str
) -> tuple[PredictedEnvironment, list[str]]:
    """Returns the launch that is to be made, and `launcher_command`."""
    given = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    foreseen = predict_environment(config_file, given, os.environ)
    check_installed(foreseen.launch)
    several = foreseen.asked.num_machines > 1 or foreseen.asked.nnodes is not None
    alone = not several and "main_process_port" not in {*foreseen.written, *given}
    # Any free port, so that two runs fit on one machine.
    port = ["--main_process_port", "0"] if alone else []
    words = [sys.executable, "-m", "finetune.distributed.launch.launcher", "--config_file", config_file]
    return foreseen, [*words, *port, *options, "--module", module, *arguments]


def main(arguments: Sequence[str]) -> int:
    """Launches as `accelerate launch` does; returns the exit code of the worker that failed first, or 0."""
    signals.outlive_readers()
    # Before anything imports the hub's client, here or in a fork.
    go_offline_if_unreachable()
    # A library that starts threads where it is imported would not have them in a fork. Workers choose their own number.
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    several, heartbeat = SEVERAL in os.environ, None
    if several or "--nnodes" in arguments:
        # What becomes of connections is said here in a paragraph, not in torch's notes on its sockets. Workers, too,
        # need none: they are forks, or inherit it.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    with quick_imports():
        import torch
        from accelerate.commands.launch import launch_command

        if several and (heartbeat := _meet()) is None:
            return USER_ERROR
        parsed = parse_launch(arguments)
        # A fork closes what it inherits by what Linux says of its open files.
        forks = parsed.module and sys.platform == "linux" and not torch.cuda.is_available()
        if forks:
            name_deepspeed_device()  # which workers inherit
            _import_ahead(parsed.training_script)
    if unset:
        del os.environ["OMP_NUM_THREADS"]
    # It reports every worker that ends, whose own last words are on the terminal already.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    # It warns that it sets one thread a process; workers set their own.
    logging.getLogger("torch.distributed.run").addFilter(lambda record: "OMP_NUM_THREADS" not in record.getMessage())
    sent: list[int] = []
    # What torchrun itself handles: Accelerate passes it on.
    parsed.signals_to_handle = signal.SIGQUIT.name
    asked = read_launch_file(parsed.config_file).model_copy(update=given_options(parsed)) if parsed.nnodes else None
    # Accelerate would hand it to torchrun, whose own default it is not.
    del parsed.nnodes
    if asked is not None:
        # Accelerate would look for whoever listens there, and refuse it.
        parsed.main_process_port = 0
    with (
        temporary_folder() as folder,
        signals.handle_signals(signals.stop_signals(), partial(_pass_on, sent)),
        forked_workers() if forks else nullcontext(),
        elastic_agents(asked, partial(bool, sent), partial(_signal_workers, signal.SIGKILL))
        if asked is not None
        else nullcontext(),
    ):
        # torchrun would leave a folder of its own behind.
        parsed.log_dir = parsed.log_dir or str(folder)
        alert = FailureAlert(parsed.training_script if parsed.module else None, parsed.training_script_args, folder)
        _end_workers_sooner(sent, alert, heartbeat)
        if heartbeat is None:
            return _run(launch_command, parsed, sent, alert, asked)
        code = 1
        try:
            # Accelerate refuses a port that is in use: here it is, by the store that torchrun goes on with.
            with patch("accelerate.utils.launch.is_port_in_use", lambda port: False):
                code = _run(launch_command, parsed, sent, alert, asked, heartbeat)
        except signals.Interrupted as error:
            code = 128 + error.number
            raise
        finally:
            code = heartbeat.finish(code)
            if heartbeat.alert is not None and code != USER_ERROR:
                alert.send(heartbeat.alert)
        return code


def _meet() -> "Heartbeat | None":
    """Meets the launchers of other machines; returns None where they cannot start, which has been said."""
    from finetune.distributed.launch import network_interface, rendezvous
    from finetune.distributed.launch.heartbeat import Heartbeat

    meeting = rendezvous.Meeting(rendezvous.take_over(SEVERAL), to_stderr)
    try:
        met = meeting.hold()
    except BackendError as error:
        print_error(error)
        meeting.tell_late_ones()
        return None
    for warning in met.warnings:
        to_stderr(f"Warning: {warning}")
    os.environ.update(network_interface.interface_variables(met.interface, os.environ))
    heartbeat = Heartbeat(met)
    heartbeat.start()
    return heartbeat


def _run(
    launch_command: Callable[[Any], None],
    parsed: Any,
    sent: Sequence[int],
    alert: FailureAlert,
    asked: LaunchFile | None = None,
    heartbeat: "Heartbeat | None" = None,
) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        launch_command(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # Of machines that come and go, the one of rank 0 tells.
        own_alert = None if heartbeat is not None or (asked is not None and rank != 0) else alert
        return _account(f"The worker of rank {rank}", failure.exitcode, own_alert, heartbeat)
    except subprocess.CalledProcessError as error:
        return _account("The worker", error.returncode, alert)
    except _Stopped as error:
        failed = [code for code in error.args if code not in (0, REQUEUE)]
        if not failed:
            return REQUEUE if REQUEUE in error.args else 0
        if USER_ERROR in failed:
            return USER_ERROR
        if any(code is None or code < 0 for code in failed):
            alert.send("Workers were asked to stop, and were killed before all had saved.")
        # One that failed says more than those that were ended with it.
        return next((code for code in failed if code is not None and code > 0), 128 + sent[0])
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        if asked is None:
            raise
        to_stderr(f"\nError: {why_ended(error, asked)}")
        return USER_ERROR
    except (ValueError, OSError) as error:
        to_stderr(f"\nError: accelerate launch cannot start this: {error}")
        return 2
    return 0


def _end_workers_sooner(sent: Sequence[int], alert: FailureAlert, heartbeat: "Heartbeat | None") -> None:
    """Has torchrun kill hung workers sooner, end with those that were asked to, and tell other machines of them."""
    from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

    close, closed = PContext.close, set[PContext]()

    def sooner(self: PContext, death_sig: signal.Signals | None = None, timeout: int = _HUNG_S) -> None:
        assert isinstance(self, SubprocessContext)
        if heartbeat is not None:
            heartbeat.workers_ended([handler.proc.poll() for handler in self.subprocess_handlers.values()])
        close(self, death_sig, timeout)
        codes = [handler.proc.returncode for handler in self.subprocess_handlers.values()]
        again = self in closed
        if not again:
            alert.workers_ended()
        closed.add(self)
        # What a user has to change is the same after a restart.
        if not again and (sent or USER_ERROR in codes):
            raise _Stopped(*codes)

    PContext.close = sooner  # type: ignore[method-assign]


def _account(who: str, code: int, alert: FailureAlert | None, heartbeat: "Heartbeat | None" = None) -> int:
    """Says how a worker ended, unless that is said already, and alerts; returns the exit code as a shell would."""
    text = f"{who} {how_ended(code)}; its output says more."
    if code < 0 and (heartbeat is None or not heartbeat.has_ended_workers):
        to_stderr(f"\n{text}")
    if alert is not None and code not in (USER_ERROR, REQUEUE):
        alert.send(text)
    return shell_code(code)


class _ForkedWorker:
    """Methods of `subprocess.Popen` that torchrun and Accelerate use, for a worker that is a fork of its launcher.

    Gives `python -m MODULE …` the same environment, session, files and exit code, and does what that Python does once
    it has imported.
    """

    def __init__(self, args: Sequence[str], env: Mapping[str, str], start_new_session: bool = False, **_: None) -> None:
        self.args = args
        self.returncode: int | None = None
        """The exit code, negative for a signal; None while it runs."""
        import psutil

        # It is `python [-u] -m MODULE …`.
        flags = [word for word in args[1:3] if word in ("-u", "-m")]
        words = list(args[1 + len(flags) :])
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that comes before the worker has its own handlers must not go to the launcher's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, env, start_new_session, "-u" in flags, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._process = psutil.Process(self.pid)

    def poll(self) -> int | None:
        """Returns the exit code, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: If that takes longer than `timeout` seconds.
        """
        import psutil

        try:
            self.returncode = int(self._process.wait(timeout))
        except psutil.TimeoutExpired as error:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0) from error
        return self.returncode


def _import_ahead(module: str) -> None:
    """Imports what workers that run a module will, where its package has a module `worker_imports`."""
    spec = importlib.util.find_spec(module)
    # To import a module that is no package would be to run it.
    if spec is not None and spec.submodule_search_locations:
        # Workers fail over the same import, and report it as they would alone.
        with suppress(ImportError):
            importlib.import_module(f"{module}.worker_imports")


@contextmanager
def forked_workers() -> Iterator[None]:
    """Has torchrun and Accelerate fork their workers; not with GPUs: a process that uses CUDA cannot be forked.

    Source: torch, `SubprocessHandler._popen`; accelerate, `simple_launcher`. Each looks the name up in its module.
    """
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    # The module `subprocess`, as Accelerate's launcher uses it.
    forking = SimpleNamespace(Popen=_ForkedWorker, CalledProcessError=subprocess.CalledProcessError)
    with patch.object(launch, "subprocess", forking), patch.object(subprocess_handler, "Popen", _ForkedWorker):
        yield


def _become(words: list[str], env: Mapping[str, str], new_session: bool, unbuffered: bool, mask: Iterable[int]) -> None:
    """Does what `python -m WORDS` does, and ends."""
    code = 1
    # What the launcher holds is never freed here: files of that number may be a worker's own by then.
    gc.freeze()
    try:
        # As a new process has them: the launcher's own handlers are not for its workers.
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if new_session:
            os.setsid()
        # What a new program would not have: the connections of the launcher's store, on whose end others wait.
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.close(int(name))
        os.environ.clear()
        os.environ.update(env)
        os.environ[orphan_watch.FORK] = str(os.getpid())
        # Accelerate's launcher has given the root logger a handler.
        logging.getLogger().handlers.clear()
        if unbuffered:
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        import numpy as np

        np.random.seed()
        orphan_watch.record_parent()
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT  # its launcher was told as well
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The launcher's own code is further up on this stack.
        os._exit(code)


if __name__ == "__main__":
    # Threads of a launch on several machines may hang in calls to others, on which an orderly end would wait.
    several = SEVERAL in os.environ
    code = run_guarded(partial(main, sys.argv[1:]))
    if several:
        exit_with(code)
    sys.exit(code)
