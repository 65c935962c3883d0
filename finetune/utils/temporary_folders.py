"""Temporary folders that are removed even if their process is killed, by the next one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = f"finetune-tmp-{os.getuid()}-"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Creates a folder, and removes it at the end; first removes those of processes that were killed.

    A process holds a lock (`flock`) on its folder, which the system releases when it ends.
    """
    for left_over in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process has removed it, it is no folder, or its process is at work
            held = os.open(left_over, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left_over, ignore_errors=True)
            finally:
                os.close(held)
    made = tempfile.mkdtemp(prefix="finetune-new-")
    held = os.open(made, os.O_RDONLY)
    with suppress(OSError):  # where there are no locks, nothing is removed either
        fcntl.flock(held, fcntl.LOCK_EX)
    # Nobody may take it for left over before it is locked.
    folder = Path(made).rename(Path(made).with_name(_PREFIX + made[-8:]))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
