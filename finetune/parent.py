"""The process that started this one. It is noted before anything slow is imported: it may end at any time."""

import os

_parent = os.getppid()


def note() -> None:
    """Takes whoever is this process's parent now for the one that started it; for processes that were forked."""
    global _parent
    _parent = os.getppid()


def gone() -> bool:
    """Whether it has ended: this process has another parent now."""
    return os.getppid() != _parent
