"""Detects that the process that started this one has ended."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

EVERY_S = 0.5
"""Seconds between two looks."""

# How a command line names Accelerate's command, installed or as a module.
_ACCELERATE = ("accelerate", "accelerate_cli.py", "accelerate.commands.accelerate_cli")

# The module of this toolkit's own launcher.
_OWN = "finetune.distributed.launch.launcher"

# The launchers of others, by the name of the command or of the module.
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "mpirun", "mpiexec", "deepspeed")

FORK = "FINETUNE_FORK"
"""Variable by which a worker that is a fork of its launcher tells its own children its process id."""

_parent = os.getppid()
_line: list[str] = []


def record_parent() -> None:
    """Records the current parent as the process that started this one; for processes that were forked."""
    global _parent, _line
    _parent, _line = os.getppid(), _command_line()


def _command_line() -> list[str]:
    """Returns the command line of the parent; empty if it cannot be read, or is only that of a launcher's fork."""
    if os.environ.get(FORK) == str(os.getppid()):
        return []
    try:
        parent = psutil.Process().parent()
        return [] if parent is None else parent.cmdline()
    except psutil.Error:
        return []


record_parent()


def accelerate_arguments() -> list[str] | None:
    """Returns the arguments of `accelerate launch` or `finetune launch`, if that is the parent of this process."""
    return _launch(_command_line())[1]


def is_own_launcher() -> bool:
    """Tells if `finetune launch` started this process."""
    return _launch(_line)[0] == _OWN


def _launch(line: list[str]) -> tuple[str, list[str] | None]:
    """Returns the word of a command line that shows a launch by Accelerate, and the arguments after it, if any does."""
    for index, word in enumerate(line):
        name, rest = Path(word).name, line[index + 1 :]
        if name == "accelerate-launch" or word.endswith("accelerate/commands/launch.py") or word == _OWN:
            return word, rest
        if name in _ACCELERATE and rest[:1] == ["launch"]:
            return word, rest[1:]
    return "", None


def is_launcher() -> bool:
    """Tells if a launcher started this process, which is of no use without it.

    A shell is no launcher: a user who starts a process by hand and logs out wants it to continue.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or _launch(_line)[0]:
        return True
    return any(Path(word).name in _LAUNCHERS or word.startswith("deepspeed.launcher.") for word in _line[:4])


def parent_is_gone() -> bool:
    """Tells if a launcher started this process and has ended, so that it has another parent now."""
    return os.getppid() != _parent and is_launcher()


def on_several_machines() -> bool:
    """Tells if launchers on several machines have started the ranks of this launch. torchrun sets the variable."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


@contextmanager
def end_with_parent(code: int, *, always: bool = False) -> Iterator[None]:
    """Ends this process if its launcher ends; for use while there is nothing to save.

    Without its launcher a process may wait half an hour for other ranks that never connect, and hold the run directory.
    With `always`, any parent counts as a launcher.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            if os.getppid() != _parent:
                with suppress(OSError):
                    os.write(sys.stderr.fileno(), b"\nError: the launcher is gone. Ended before the first step.\n")
                os._exit(code)

    if always or is_launcher():
        threading.Thread(target=watch, name="parent", daemon=True).start()
    try:
        yield
    finally:
        over.set()
