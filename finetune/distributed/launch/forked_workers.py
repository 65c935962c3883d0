"""Workers as forks of their launcher, which has imported what they need: a start imports once, however many they are.

torchrun and Accelerate start `python -m MODULE …` by `subprocess.Popen`. What stands in for it here gives a worker the
same environment, session, files and exit code, and does what that Python does once it has imported.
"""

import fcntl
import gc
import importlib.util
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest.mock import patch

import psutil

from finetune.utils import orphan_watch


class ForkedWorker:
    """Methods of `subprocess.Popen` that torchrun and Accelerate use."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: None = None,
        stderr: None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args = args
        self.returncode: int | None = None
        """The exit code, negative for a signal; None while it runs."""
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
        try:
            self.returncode = int(self._process.wait(timeout))
        except psutil.TimeoutExpired as error:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0) from error
        return self.returncode


def import_ahead(module: str) -> None:
    """Imports what workers that run a module will, where its package has a module `worker_imports`."""
    found = importlib.util.find_spec(module)
    # To import a module that is no package would be to run it.
    if found is not None and found.submodule_search_locations:
        # Workers fail over the same import, and report it as they would alone.
        with suppress(ImportError):
            importlib.import_module(f"{module}.worker_imports")


@contextmanager
def forked_workers() -> Iterator[None]:
    """Has torchrun and Accelerate fork their workers.

    Not for machines with GPUs: a process that has asked CUDA for them cannot be forked.
    Source: torch, `SubprocessHandler._popen`; accelerate, `simple_launcher`. Each looks the name up in its module.
    """
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    # The module `subprocess`, as Accelerate's launcher uses it.
    forking = SimpleNamespace(Popen=ForkedWorker, CalledProcessError=subprocess.CalledProcessError)
    with patch.object(launch, "subprocess", forking), patch.object(subprocess_handler, "Popen", ForkedWorker):
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
        _close_on_exec()
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


def _close_on_exec() -> None:
    """Closes what a new program would not have: the connections of the launcher's store, on whose end others wait."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(int(name))
