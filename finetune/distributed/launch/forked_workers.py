"""Workers as forks of their launcher, which has imported what they need: a start imports once, however many they are.

torchrun and Accelerate start `python -m MODULE …` by `subprocess.Popen`. What stands in for it here has the same
environment, session and exit codes, and does what that Python does once it has imported.
"""

import importlib.util
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from finetune.utils import orphan_watch


class ForkedWorker:
    """What torchrun and Accelerate use of `subprocess.Popen`."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: None = None,
        stderr: None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args = args
        # It is `python [-u] -m MODULE …`.
        words = list(args[args.index("-m") + 1 :])
        _import_ahead(words[0])
        self._process = multiprocessing.get_context("fork").Process(
            target=_become, args=(words, dict(env), start_new_session, "-u" in args[:2])
        )
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: If that takes longer than `timeout` seconds.
        """
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return code


@contextmanager
def forked_workers() -> Iterator[None]:
    """Has torchrun and Accelerate fork their workers.

    Not for machines with GPUs: a process that has asked CUDA for them cannot be forked.
    Source: torch, `SubprocessHandler._popen`; accelerate, `simple_launcher`. Each looks the name up in its module.
    """
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    class Forking:
        """The module `subprocess`, as Accelerate's launcher uses it."""

        Popen = ForkedWorker
        CalledProcessError = subprocess.CalledProcessError

    before = launch.subprocess, subprocess_handler.Popen
    launch.subprocess, subprocess_handler.Popen = Forking, ForkedWorker  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        launch.subprocess, subprocess_handler.Popen = before  # type: ignore[misc]


def _import_ahead(module: str) -> None:
    """Imports what a worker will, where its package says so in a module `preload`."""
    found = importlib.util.find_spec(module)
    if found is not None and found.submodule_search_locations and importlib.util.find_spec(f"{module}.preload"):
        # The worker fails over the same import, and says so as it would alone.
        with suppress(Exception):
            importlib.import_module(f"{module}.preload")


def _become(words: list[str], env: dict[str, str], new_session: bool, unbuffered: bool) -> None:
    """Does what `python -m WORDS` does."""
    # As a new process has them: the launcher's own handlers are not for its workers.
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
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
