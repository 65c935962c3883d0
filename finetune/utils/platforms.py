"""Differences between operating systems. The tests run on Linux; see docs/versions.md."""

import os
import sys

from finetune.utils.errors import FinetuneError

_SYSTEM: str = sys.platform
"""Value of `sys.platform`, which type checkers would take for that of the machine they run on."""

REFUSED = "finetune does not run on Windows, which lacks signals and file locks that it needs. Use WSL 2."


def check() -> None:
    """Raises a `FinetuneError` on an unsupported system. Imports no module that a system may lack."""
    if _SYSTEM == "win32":
        raise FinetuneError(REFUSED)


def check_or_exit() -> None:
    """Does the same for a command: one line, and exit code 2."""
    try:
        check()
    except FinetuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


def untested_system() -> str | None:
    """Returns the name of a system that the tests do not run on; None on Linux."""
    return {"linux": None, "darwin": "macOS"}.get(_SYSTEM, _SYSTEM)


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_bytes() -> int:
    """Returns the peak of the memory that this process has held.

    Source: getrusage(2), which counts in KiB on Linux and in bytes on macOS.
    """
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if _SYSTEM == "darwin" else 1024)
