"""Signals that ask a process to end, the line that it prints then, and output that nobody reads any more."""

import io
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
"""Seconds within which all signals are one request: launchers pass on signals that their workers received already."""


class Interrupted(KeyboardInterrupt):
    """A signal that asks to end, raised in the main thread as Ctrl-C is, so that open files are closed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask this process to end. A closing terminal sends SIGHUP, which `nohup` ignores."""
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return asked if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*asked, signal.SIGHUP)


def interrupter() -> Callable[[int, Any], None]:
    """Returns a handler that raises `Interrupted` once for each request, so that its clean-up is not interrupted.

    During an import it ends the process at once: libraries may catch what is raised there, and go on with half a
    module.
    """
    asked: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not asked or time.monotonic() - asked[-1] > SAME_REQUEST_S:
            asked.append(time.monotonic())
            while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
                frame = frame.f_back
            if frame is not None:
                _end(Interrupted(number))
            raise Interrupted(number)

    return interrupt


@contextmanager
def handle_signals(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handles signals inside. Python allows that in the main thread only; elsewhere this does nothing."""
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
            # A signal that is ignored by now stays so, because the process is about to end.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler_before)


@contextmanager
def held_back() -> Iterator[None]:
    """Blocks stop signals inside, also in programs that are started, until `handle_signals` unblocks them there.

    Before it handles signals, a program could not report how it ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def heard_at_once(heard: Callable[[int], None]) -> Iterator[None]:
    """Reports handled signals at once, from a thread of its own; works in the main thread only.

    Python runs handlers between two instructions of the main thread, and so not while that waits for another rank. The
    system writes to a pipe at once, which a thread reads.
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
    """Ends this process some seconds after a stop signal, since its main thread may wait for others in native code."""
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


def say_interrupted(error: KeyboardInterrupt, *, quiet: bool = False) -> int:
    """Prints in one line, unless `quiet`, which signal has ended this process, and the error's notes; once a launch.

    Returns the exit code that a shell has for a process that such a signal has ended.
    """
    number: int = getattr(error, "number", signal.SIGINT)
    name = "Ctrl-C" if number == signal.SIGINT else str(error)
    # Whoever closed the terminal does not read it, and who asks twice does not want to.
    with suppress(OSError, KeyboardInterrupt):
        if os.environ.get("LOCAL_RANK", "0") == "0" and not quiet:
            message = " ".join([f"Stopped by {name}.", *getattr(error, "__notes__", [])])
            print(f"\n{message}", file=sys.stderr, flush=True)
    return 128 + number


def say_interrupts_in_one_line() -> None:
    """Makes Ctrl-C end this process with one line and exit code 130 if nothing else handles it, as during imports."""
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


class _Lenient(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def outlive_readers() -> None:
    """Drops output that nobody can read any more, instead of ending the process.

    A print fails when the terminal is closed (EIO), when the reader of a pipe has ended (EPIPE), and on a full disk.
    Streams that a program or a notebook has put in place of Python's own stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        if isinstance(getattr(stream.buffer, "raw", stream.buffer), _Lenient):
            continue
        with suppress(OSError):
            stream.flush()
        file: Any = _Lenient(stream.fileno(), "w", closefd=False)
        lenient = io.TextIOWrapper(
            file if stream.write_through else io.BufferedWriter(file),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lenient)
        setattr(sys, f"__{name}__", lenient)
