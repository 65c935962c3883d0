"""Imports without the garbage collector, which would look a few hundred times through what stays for good."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports in the block are not interrupted by collections, and no later one looks through what they made.

    Source: Python, `gc.freeze`: also what keeps the pages that a fork shares with its parent as they are.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
