"""Folders that are whole or absent, each built by exactly one of the processes that want it.

No process group exists yet when data is prepared, so processes agree through a file lock.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from finetune.utils import json_files
from finetune.utils.atomic_files import digest_of, file_digest, remove_path, sync_to_disk, why_unlockable
from finetune.utils.errors import DataError
from finetune.utils.quoting import to_stderr

_INDEX = "index.json"
STATE = "state.json"
"""A build that leaves this file in its folder can continue with what is there."""
STATE_VERSION = 7
"""Version of that file, which has it as `version`, and of those that it is about."""
# A check of less than this takes about a second, and a wait for one is not worth a word; nor is one for small data,
# which ranks meet at each first start.
_SAID_FROM = 10_000_000_000
_SILENT_WAIT_S = 5.0


@dataclass(frozen=True)
class Entry:
    """A finished folder."""

    folder: Path
    facts: dict[str, Any]
    """Facts that its builder returned."""
    reused: bool
    """True if it was there before, or another process has built it."""


_BUILDS = ContextVar("builds", default=True)


class NotPreparedError(Exception):
    """A folder is not there, and none is to be built."""

    rows: int | None = None
    """An estimate of the training rows."""


@contextmanager
def nothing_built() -> Iterator[None]:
    """Has folders that are not there raise `NotPreparedError`."""
    token = _BUILDS.set(False)
    try:
        yield
    finally:
        _BUILDS.reset(token)


class Cache:
    """The folders under one directory. It is always safe to delete any of them while no run starts."""

    def __init__(self, root: Path, *, quiet: bool) -> None:
        """Creates the directory, or raises a `DataError` if it cannot be written."""
        self._root = root
        self._quiet = quiet
        self.reused = True
        """False once a folder was built."""
        with self._usable():
            root.mkdir(parents=True, exist_ok=True)

    def entry(self, name: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
        """Returns a folder, building it if it is missing or damaged.

        Every byte of a folder that is there is read once a start and compared with the digests that its build wrote:
        of the processes that want it at the same time one reads, and the others take its word.

        Args:
            name: Names everything that shapes the content.
            build: Fills a folder and returns JSON-able facts. The folder is empty, or what an earlier build left that
                was killed and had kept its state there (`STATE`).

        Raises:
            DataError: If the directory cannot be written, or `build` raises it.
        """
        folder = self._root / name
        before = _checked_at(folder)
        try:
            with self._usable(), self._lock(name, there=before is not None):
                # Another process has built or checked it since this one came.
                known = _checked_at(folder) != before
                return self._open(folder, known=known) or self._build(folder, build)
        except _NoLockError:
            # A cache that is only read, as another user's may be, is checked by each process.
            if existing := self._open(folder, known=False):
                return existing
            raise

    def _open(self, folder: Path, *, known: bool) -> Entry | None:
        """The folder, if it is what was built; if `known` to be, only its list of files and their sizes are checked."""
        if not os.path.lexists(folder):
            return None
        try:
            files, facts = _read_index(folder)
            total = sum(size for size, _ in files.values())
            if not known and total >= _SAID_FROM:
                self._say(f"Checking {total / 1e9:,.0f} GB of prepared data in {folder}.")
            for name, (size, written) in files.items():
                file = folder / name
                if file.is_symlink() or not file.is_file():
                    raise _DamageError(f"is damaged ({name} is missing)")
                if file.stat().st_size != size or (not known and file_digest(file) != written):
                    raise _DamageError(f"is damaged ({name} is not what was written)")
        except (_DamageError, OSError) as error:
            problem = error if isinstance(error, _DamageError) else f"is damaged ({error})"
            # One process comes here, whichever it is.
            to_stderr(f"The prepared data in {folder} {problem}: it is made again.")
            return None
        if not known:
            with suppress(OSError):
                os.utime(folder / _INDEX)
        return Entry(folder, facts, reused=True)

    def _build(self, folder: Path, build: Callable[[Path], dict[str, Any]]) -> Entry:
        if not _BUILDS.get():
            raise NotPreparedError(str(folder))
        self.reused = False
        staging = folder.with_name(folder.name + ".part")
        remove_path(folder)
        if not self._can_go_on(staging):
            remove_path(staging)
        staging.mkdir(exist_ok=True)
        try:
            facts = build(staging)
            files = sorted(path for path in staging.iterdir() if path.is_file())
            for path in files:
                sync_to_disk(path)
            # The index comes last: a folder with an index is a folder with everything.
            index = staging / _INDEX
            content = {"files": {p.name: {"bytes": p.stat().st_size, "xxh3_128": file_digest(p)} for p in files}}
            content["facts"] = facts
            index.write_text(json.dumps({**content, "digest": digest_of(content)}))
            sync_to_disk(index)
            sync_to_disk(staging)
            os.rename(staging, folder)
            sync_to_disk(self._root)
        except BaseException as error:
            # What is wrong with the data stays wrong; a build that was stopped, or had no room left, can continue.
            kept = not isinstance(error, DataError) and (staging / STATE).exists()
            if not kept:
                shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, KeyboardInterrupt):
                self._note_kept(error, ", and what it had tokenised of the rest" if kept else "")
            raise
        # Read back, so that the process that built sees what the others see.
        entry = self._open(folder, known=True)
        assert entry is not None
        return Entry(entry.folder, entry.facts, reused=False)

    def _can_go_on(self, staging: Path) -> bool:
        """True if a build can use what another has left."""
        # Links would be written through.
        if not (staging / STATE).exists() or any(path.is_symlink() for path in (staging, *staging.iterdir())):
            return False
        try:
            version = json_files.read(staging / STATE).get("version")
        except ValueError:
            return False
        if version != STATE_VERSION:
            self._say(f"{staging} is of version {version or 0}, and this one reads {STATE_VERSION}: it is made anew.")
        return bool(version == STATE_VERSION)

    def _say(self, text: str) -> None:
        if not self._quiet:
            to_stderr(text)

    @contextmanager
    def _lock(self, name: str, *, there: bool) -> Iterator[None]:
        """Keeps other processes from a folder; `there` says that it has only to be checked."""
        lock = filelock.FileLock(self._root / f"{name}.lock")
        try:
            with self._usable(_NoLockError):
                if (reason := why_unlockable(self._root)) is not None:
                    # A lock of this machine would not do: processes of several machines may prepare the same data.
                    raise _NoLockError(
                        f"The cache directory {self._root} cannot be used: its file system has no locks (flock: "
                        f"{reason}), and processes that prepare the same data need one. Set data.cache_dir to a "
                        "directory on another file system, such as a local disk."
                    )
                try:
                    lock.acquire(timeout=_SILENT_WAIT_S)
                except filelock.Timeout:
                    if os.environ.get("RANK", "0") == "0":  # of the ranks of a launch one is enough
                        what = "checking" if there else "preparing"
                        self._say(f"Waiting for another process that is {what} the same data.")
                    self._quiet = True
                    lock.acquire()
        except KeyboardInterrupt as error:  # which the one that prepares it gets as well
            self._note_kept(error)
            raise
        try:
            yield
        finally:
            lock.release()

    def _note_kept(self, error: KeyboardInterrupt, more: str = "") -> None:
        error.add_note(f"The parts of the data that were finished are kept in {self._root}{more}.")

    def _usable(self, kind: type[DataError] = DataError) -> AbstractContextManager[None]:
        """Makes an error of the file system one of the data."""
        advice = "Set data.cache_dir to a directory that can be written and has room."
        return kind.explaining(f"The cache directory {self._root} cannot be used", advice, OSError)


class _NoLockError(DataError):
    """Nothing can be locked in the cache directory."""


class _DamageError(Exception):
    """A folder is not what was built; says what of it."""


def _checked_at(folder: Path) -> tuple[int, int] | None:
    """Changes whenever the folder was built or checked; None if there is none."""
    try:
        facts = (folder / _INDEX).stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def _read_index(folder: Path) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
    """The files that a folder must hold, with their sizes and digests, and the facts about it."""
    if folder.is_symlink():
        raise _DamageError("is a link to somewhere else")
    try:
        index = json_files.read(folder / _INDEX)
        if index.keys() == {"files", "facts"}:
            raise _DamageError("was written by an earlier version, without digests")
        if index.pop("digest") != digest_of(index):
            raise _DamageError(f"is damaged ({_INDEX} is not what was written)")
        files = {name: (int(file["bytes"]), str(file["xxh3_128"])) for name, file in index["files"].items()}
        written, facts = files.keys() | {_INDEX}, index["facts"]
        there = {path.name for path in folder.iterdir()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _DamageError(f"is damaged ({_INDEX} cannot be read)") from error
    if lost := written - there:
        raise _DamageError(f"is damaged ({min(lost)} is missing)")
    # A tokenizer is made of all files that lie there. Those with a dot in front are the file system's own.
    if more := {name for name in there - written if not name.startswith(".")}:
        raise _DamageError(f"is damaged ({min(more)} was not written there)")
    return files, facts
