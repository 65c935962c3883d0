"""What differs between operating systems. The tests run on Linux; see docs/versions.md."""

import os
import sys

from finetune.utils.errors import FinetuneError

_SYSTEM: str = sys.platform
"""As `sys.platform`, whose value type checkers take for that of the machine they run on."""

REFUSED = "finetune does not run on Windows, which lacks signals and file locks that it needs. Use WSL 2."


def check() -> None:
    """Refuses a system that nothing runs on. Imports no module that a system may lack.

    Raises:
        FinetuneError: With what to use.
    """
    if _SYSTEM == "win32":
        raise FinetuneError(REFUSED)


def check_or_exit() -> None:
    """The same for a command: one line, and exit code 2."""
    try:
        check()
    except FinetuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


def untried() -> str | None:
    """The name of a system that the tests do not run on."""
    return {"linux": None, "darwin": "macOS"}.get(_SYSTEM, _SYSTEM)


def cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_bytes() -> int:
    """The most memory that this process has held so far.

    Source: getrusage(2), which counts in KiB on Linux and in bytes on macOS.
    """
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if _SYSTEM == "darwin" else 1024)
