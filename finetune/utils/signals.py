"""Signals that ask a process to end, and what it says when one has ended it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

SAME_REQUEST_S = 3.0
"""Launchers pass on the signal that their workers have received already, and ranks are told one after the other. Within
this time all of it is one request."""


class Interrupted(KeyboardInterrupt):
    """A signal that asks to end, raised in the main thread as Ctrl-C is: what is open is closed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to end. A terminal that closes sends SIGHUP, which `nohup` has ignored."""
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return asked if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*asked, signal.SIGHUP)


def interrupter() -> Callable[[int, Any], None]:
    """A handler that raises `Interrupted`, once a request: another signal must not cut off what the first has begun.

    In the midst of an import it ends the process at once: libraries take what is raised there for something else, and
    go on with half a module.
    """
    asked: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not asked or time.monotonic() - asked[-1] > SAME_REQUEST_S:
            asked.append(time.monotonic())
            if _is_importing(frame):
                _end(Interrupted(number))
            raise Interrupted(number)

    return interrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handles signals meanwhile. Python allows that in the main thread only; elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    # See `held_back`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            # Ignored meanwhile for good, because the process is about to end.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler_before)


@contextmanager
def held_back() -> Iterator[None]:
    """Lets no stop signal through meanwhile, nor in a program that is started: until `handled` lets it through there.

    Before it handles signals, a program could not say how it ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def heard_at_once(heard: Callable[[int], None]) -> Iterator[None]:
    """Tells of signals that are handled as soon as they come, in a thread of its own; in the main thread only.

    Python runs handlers between two of the main thread's instructions, which never comes while that waits for another
    rank. What the system writes to this pipe at once is read by a thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def listen() -> None:
        with os.fdopen(reads, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for number in numbers:
                    heard(number)

    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    threading.Thread(target=listen, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writes)


@contextmanager
def ended_within(patience_s: float) -> Iterator[None]:
    """Ends this process some seconds after a signal that should: its main thread may wait in native code for others."""
    over = threading.Event()

    def end(number: int) -> None:
        if not over.is_set():
            os._exit(128 + number)

    def heard(number: int) -> None:
        if number in stop_signals():
            timer = threading.Timer(patience_s, end, (number,))
            timer.daemon = True
            timer.start()

    with heard_at_once(heard):
        try:
            yield
        finally:
            over.set()


def exit_code(error: KeyboardInterrupt) -> int:
    """What a shell has for a process that such a signal has ended."""
    return 128 + getattr(error, "number", signal.SIGINT)


def say_interrupted(error: KeyboardInterrupt) -> int:
    """Says in one line what has ended this process, with what the notes of the error add; once a launch.

    Returns:
        What the process ends with.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return exit_code(error)
    name = "Ctrl-C" if exit_code(error) == 128 + signal.SIGINT else str(error)
    # Whoever closed the terminal does not read it, and who asks twice does not want to.
    with suppress(OSError, KeyboardInterrupt):
        print("\n" + " ".join([f"Stopped by {name}.", *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
    return exit_code(error)


def say_interrupts_in_one_line() -> None:
    """Has Ctrl-C end this process with one line and exit code 130 where nothing else handles it, as in its imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupter())

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            _end(error)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def _end(error: KeyboardInterrupt) -> NoReturn:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(say_interrupted(error))
