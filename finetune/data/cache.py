"""Folders that are whole or absent, each built by exactly one of the processes that want it.

No process group exists yet when data is prepared, so processes agree through a file lock.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from finetune.utils import json_files
from finetune.utils.atomic_files import sync, unlockable
from finetune.utils.errors import DataError

_INDEX = "index.json"
STATE = "state.json"
"""A build that leaves this file in its folder can continue with what is there."""
STATE_VERSION = 2
"""Of that file, which says it as `version`, and of those that it is about."""


@dataclass(frozen=True)
class Entry:
    """A finished folder."""

    folder: Path
    facts: dict[str, Any]
    """What its builder returned."""
    reused: bool
    """Whether it was there before, or another process has built it."""


class Cache:
    """The folders under one directory. It is always safe to delete any of them while no run starts."""

    def __init__(self, root: Path, *, quiet: bool) -> None:
        """Creates the directory.

        Raises:
            DataError: If it cannot be written.
        """
        self._root = root
        self._quiet = quiet
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def entry(self, name: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
        """Returns a folder, building it if it is missing or damaged.

        Args:
            name: Names everything that shapes the content.
            build: Fills a folder and returns JSON-able facts. The folder is empty, or what an earlier build left that
                was killed and had kept its state there (`STATE`).

        Raises:
            DataError: If the directory cannot be written, or `build` raises it.
        """
        folder = self._root / name
        found = _open(folder)
        if found is not None:
            return found
        try:
            with self._lock(name):
                return _open(folder) or self._build(folder, build)
        except OSError as error:
            raise self._unusable(error) from error

    def _build(self, folder: Path, build: Callable[[Path], dict[str, Any]]) -> Entry:
        staging = folder.with_name(folder.name + ".part")
        for leftover in (staging, folder):
            if leftover.is_symlink():
                leftover.unlink()
            elif leftover.exists() and not (leftover == staging and self._can_go_on(staging)):
                shutil.rmtree(leftover)
        staging.mkdir(exist_ok=True)
        try:
            facts = build(staging)
            files = sorted(path for path in staging.iterdir() if path.is_file())
            for path in files:
                sync(path)
            # The index comes last: a folder with an index is a folder with everything.
            index = staging / _INDEX
            index.write_text(json.dumps({"files": {p.name: p.stat().st_size for p in files}, "facts": facts}))
            sync(index)
            sync(staging)
            os.rename(staging, folder)
            sync(self._root)
        except BaseException as error:
            # What is wrong with the data stays wrong; a build that was stopped, or had no room left, can continue.
            if isinstance(error, DataError) or not (staging / STATE).exists():
                shutil.rmtree(staging, ignore_errors=True)
            raise
        # Read back, so that the process that built sees what the others see.
        entry = _open(folder)
        assert entry is not None
        return Entry(entry.folder, entry.facts, reused=False)

    def _can_go_on(self, staging: Path) -> bool:
        """Whether a build can use what another has left."""
        if not (staging / STATE).exists():
            return False
        if any(path.is_symlink() for path in staging.iterdir()):
            return False  # they would be written through
        try:
            version = json_files.read(staging / STATE).get("version")
        except ValueError:
            return False
        if version != STATE_VERSION:
            self._say(f"{staging} is of version {version or 0}, and this one reads {STATE_VERSION}: it is made anew.")
        return bool(version == STATE_VERSION)

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        reason = unlockable(self._root)
        if reason is not None:
            # A lock of this machine would not do: processes of several machines may prepare the same data.
            raise DataError(
                f"The cache directory {self._root} cannot be used: its file system has no locks (flock: {reason}), and "
                "processes that prepare the same data need one. Set data.cache_dir to a directory on another file "
                "system, such as a local disk."
            )
        lock = filelock.FileLock(self._root / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            # Of the ranks of a launch one is enough.
            if os.environ.get("RANK", "0") == "0":
                self._say("Waiting for another process that is preparing the same data.")
            self._quiet = True
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _unusable(self, error: OSError) -> DataError:
        return DataError(
            f"The cache directory {self._root} cannot be used: {error.strerror or error}. Set data.cache_dir to a "
            "directory that can be written and has room."
        )


def _open(folder: Path) -> Entry | None:
    """The folder, if everything that its index lists is there in full."""
    try:
        index = json_files.read(folder / _INDEX)
        whole = not folder.is_symlink() and all(_is_whole(folder, *file) for file in index["files"].items())
        return Entry(folder, index["facts"], reused=True) if whole else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _is_whole(folder: Path, name: str, size: int) -> bool:
    """Whether a file that an index lists is there in full, in that folder and not elsewhere by a path or a link."""
    file = folder / name
    return Path(name).name == name and not file.is_symlink() and file.is_file() and file.stat().st_size == size
