"""Requests to stop: signals, and the end of the launcher."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from finetune.utils import orphan_watch, signals


class ShutdownHandler:
    """Turns signals, and the end of the launcher, into a request to stop at a step's boundary."""

    def __init__(
        self, grace_s: float, newest: Callable[[], str | None], stands_still: Callable[[], str | None]
    ) -> None:
        """`grace_s` seconds after a request the process ends, saved or not, and names the `newest` checkpoint.

        After Ctrl-C it ends as soon as `stands_still` says where it is stuck.
        """
        self.reason: str | None = None
        """Why this rank wants to stop, or None."""
        self._grace_s, self._newest, self._stands_still = grace_s, newest, stands_still
        self._since = 0.0
        self._listens = self._ignoring = False
        self._numbers: tuple[int, ...] = ()

    @property
    def requested(self) -> bool:
        """True if this rank wants to stop."""
        self._look_for_parent()
        return self.reason is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles the signals meanwhile. Python allows that in the main thread only; elsewhere it does nothing."""
        if self._listens:
            yield
            return
        self._numbers = signals.stop_signals()
        self._listens = True
        over = threading.Event()
        # Not at a step's boundary alone: the main thread may wait in a collective for ever.
        threading.Thread(target=self._watch_parent, args=(over,), name="parent", daemon=True).start()
        try:
            with signals.handle_signals(self._numbers, lambda *_: None), signals.heard_at_once(self._handle):
                yield
        finally:
            self._listens = False
            over.set()

    def _watch_parent(self, over: threading.Event) -> None:
        while not over.wait(orphan_watch.EVERY_S):
            self._look_for_parent()
            if self.reason == signal.SIGINT.name and (where := self._stands_still()) is not None:
                self._end(128 + signal.SIGINT, f"this process comes no further ({where}), so that nothing is saved")

    def _look_for_parent(self) -> None:
        if self.reason is not None or self._ignoring or not orphan_watch.parent_is_gone():
            return
        code = 128 + signal.SIGTERM
        if orphan_watch.on_several_machines():
            # A checkpoint needs all ranks, and the launchers of other machines end theirs.
            with suppress(OSError):
                os.write(sys.stderr.fileno(), b"\nError: the launcher is gone. Ended; the last checkpoint stays.\n")
            os._exit(code)
        # An orphan would continue with nobody to see it, and hold the run directory.
        self._request("the launcher is gone", code)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Drops requests meanwhile: all is saved, and there is nothing to end early."""
        self._ignoring = True
        try:
            yield
        finally:
            self._ignoring = False

    def ignore(self) -> None:
        """From here on signals change nothing: all is saved, and the process is about to end with its own code."""
        self._ignoring = True
        for number in signals.stop_signals():
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int) -> None:
        if number not in self._numbers or self._ignoring:
            return
        if self.reason is None:
            self._request(signal.Signals(number).name, 128 + number)
        elif time.monotonic() - self._since > signals.SAME_REQUEST_S:
            os._exit(128 + number)

    def _request(self, reason: str, code: int) -> None:
        self.reason, self._since = reason, time.monotonic()
        timer = threading.Timer(self._grace_s, self._end, (code,))
        timer.daemon = True
        timer.start()

    def _end(self, code: int, why: str = "") -> None:
        if self._ignoring:
            return
        why = why or f"no checkpoint was complete within guard.grace_s = {self._grace_s:g} s"
        # The disk or the terminal may be gone.
        with suppress(OSError):
            newest = self._newest()
            kept = f"{newest} stays" if newest else "there is no checkpoint, so the same command starts anew"
            # Not print: the main thread may be in the middle of one.
            os.write(
                sys.stderr.fileno(), f"\nError: asked to stop ({self.reason}), but {why}. Ended; {kept}.\n".encode()
            )
        os._exit(code)
