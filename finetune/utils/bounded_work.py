"""Limits of time, and of memory, for work that may not end: the loops of a chat template, calls to other machines."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from finetune.utils.errors import DataError
from finetune.utils.platforms import peak_bytes

MAX_SECONDS = 10.0
"""Limit of computing time, not of waiting, so that load on the machine does not count. Real work takes milliseconds."""
MAX_BYTES = 4 << 30
"""Limit of memory that the work takes in addition to what the process had."""

_LOOK_S = 0.1


class _Exceeded(BaseException):
    """Limit exceeded; not an `Exception`, which the work itself might catch."""


@contextmanager
def bounded_work(what: str, instead: str) -> Iterator[None]:
    """Ends the work inside once it has computed for `MAX_SECONDS`, or has taken `MAX_BYTES` of memory.

    Only Python's main thread can be interrupted; in others nothing is bounded. One operation, such as a power of two
    large numbers, is not interrupted. The `DataError` names `what` was ended, and says what to do `instead`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    looks, before, ended = 0, peak_bytes(), False

    def look(_: int, __: FrameType | None) -> None:
        nonlocal looks, ended
        looks += 1
        slow, large = looks * _LOOK_S >= MAX_SECONDS, peak_bytes() - before >= MAX_BYTES
        if not ended and (slow or large):
            ended = True  # once: an exception raised during its handling would not be caught
            too_much = f"has taken more than {MAX_BYTES >> 30} GiB of memory"
            raise _Exceeded(f"has not ended after {MAX_SECONDS:g} s of computing" if slow else too_much)

    previous = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _LOOK_S, _LOOK_S)
    try:
        try:
            yield
        finally:
            ended = True
    except _Exceeded as exceeded:
        raise DataError(f"{what} {exceeded}, and was ended. {instead}") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous or signal.SIG_DFL)


def ends_within(limit_s: float, call: Callable[[], object]) -> bool:
    """Calls a function in a thread; returns whether it has ended in time, and by no `OSError` or `RuntimeError`.

    For calls that no limit of their own ends: resolvers, stores on a link that is cut, writes that nobody reads.
    """
    ended = []

    def attempt() -> None:
        with suppress(OSError, RuntimeError):
            call()
            ended.append(True)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(limit_s)
    return bool(ended)
