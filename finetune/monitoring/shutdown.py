"""Requests to stop: signals, and the end of the launcher."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from finetune.utils import orphan_watch

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# Launchers pass on the signal that their workers have received already, and ranks are told one after the other.
# Within this time all of it is one request.
_SAME_REQUEST_S = 3.0


class ShutdownHandler:
    """Turns signals, and the end of the launcher, into a request to stop at a step's boundary."""

    def __init__(self, grace_s: float) -> None:
        """
        Args:
            grace_s: Seconds after a request until the process ends, saved or not.
        """
        self.reason: str | None = None
        """Why this rank wants to stop, or None."""
        self._grace_s = grace_s
        self._since = 0.0
        self._listens = self._ignoring = False

    @property
    def requested(self) -> bool:
        """Whether this rank wants to stop."""
        if self.reason is None and orphan_watch.parent_is_gone():
            # An orphan would continue with nobody to see it, and hold the run directory.
            self._request("the launcher is gone", 128 + signal.SIGTERM)
        return self.reason is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles the signals meanwhile. Python allows that in the main thread only; elsewhere it does nothing."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            yield
            return
        # Python runs handlers between two of the main thread's instructions, which never comes while that waits for
        # another rank. What the system writes to this pipe at once is read by a thread.
        heard, told = os.pipe()
        os.set_blocking(told, False)
        threading.Thread(target=self._listen, args=(heard,), name="signals", daemon=True).start()
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        pipe_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        self._listens = True
        try:
            yield
        finally:
            self._listens = False
            for number, handler in before.items():
                if not self._ignoring:
                    signal.signal(number, handler)
            signal.set_wakeup_fd(pipe_before)
            os.close(told)

    def ignore(self) -> None:
        """From here on signals change nothing: all is saved, and the process is about to end with its own code."""
        self._ignoring = True
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, heard: int) -> None:
        with os.fdopen(heard, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for number in numbers:
                    if number in SIGNALS and not self._ignoring:
                        self._handle(number)

    def _handle(self, number: int) -> None:
        if self.reason is None:
            self._request(signal.Signals(number).name, 128 + number)
        elif time.monotonic() - self._since > _SAME_REQUEST_S:
            os._exit(128 + number)

    def _request(self, reason: str, code: int) -> None:
        self.reason, self._since = reason, time.monotonic()
        timer = threading.Timer(self._grace_s, self._end, (code,))
        timer.daemon = True
        timer.start()

    def _end(self, code: int) -> None:
        if self._ignoring:
            return
        # Not print: the main thread may be in the middle of one.
        text = (
            f"\nError: asked to stop ({self.reason}), but no checkpoint was complete within guard.grace_s = "
            f"{self._grace_s:g} s. Ended; the last whole checkpoint stays.\n"
        )
        os.write(sys.stderr.fileno(), text.encode())
        os._exit(code)
