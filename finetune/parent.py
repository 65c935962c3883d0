"""The process that started this one. It is noted before anything slow is imported: it may end at any time."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_parent = os.getppid()

# Seconds between two looks.
_EVERY_S = 0.5


def note() -> None:
    """Takes whoever is this process's parent now for the one that started it; for processes that were forked."""
    global _parent
    _parent = os.getppid()


def gone() -> bool:
    """Whether it has ended: this process has another parent now."""
    return os.getppid() != _parent


@contextmanager
def needed(code: int) -> Iterator[None]:
    """Ends this process if its parent ends meanwhile; for as long as there is nothing to save.

    Without its launcher a process may wait half an hour for others that it cannot meet, and hold the run directory.

    Args:
        code: What to exit with.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY_S):
            if gone():
                os.write(sys.stderr.fileno(), b"\nError: the launcher is gone. Ended before the first step.\n")
                os._exit(code)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    try:
        yield
    finally:
        over.set()
