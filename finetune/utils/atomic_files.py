"""Files that survive a crash: synchronised to the disk, and replaced whole or not at all. Links are not followed.

What cannot be read or written raises an `OSError`.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from finetune.utils import json_files
from finetune.utils.errors import RecipeError

# What `flock` says on a file system without locks: Lustre mounted without `flock`, NFS without a lock daemon.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def sync_to_disk(path: Path) -> None:
    """Returns once a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replaces a file's content by a text in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file's content; a crash or a full disk leaves the old one or the new."""
    staging = path.with_name(path.name + ".staging")
    try:
        staging.unlink(missing_ok=True)
        # A new file in any case: one that is there may be a link to somewhere else.
        with open(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content)
        sync_to_disk(staging)
        os.replace(staging, path)
    except OSError:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise
    sync_to_disk(path.parent)


def explain_unwritable(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turns an `OSError` of what is written to a folder that a user has named into a `RecipeError`."""
    advice = "Free space and remove what was written there, or name another folder."
    return RecipeError.explaining(f"Cannot write to {folder}", advice, OSError)


def write_json(path: Path, value: Any) -> None:
    """Replaces a file by a JSON value, as `write_text` does."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Returns a JSON value as `write_json` writes it."""
    return json.dumps(value, indent=2, default=str) + "\n"


def why_unlockable(folder: Path) -> str | None:
    """Returns why files in a folder cannot be locked; None if they can."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return os.strerror(error.errno)
    return None


def lock_file(folder: Path, name: str) -> tuple[Path, str | None]:
    """Returns the file to lock so that one process at a time writes something, by `name`, into a folder.

    Where the folder's file system has no locks, it is a file of this machine, beside which the reason is returned.
    """
    if (reason := why_unlockable(folder)) is None:
        return folder / name, None
    key = digest_of(str(folder.resolve() / name))[:16]
    return Path(tempfile.gettempdir()) / f"finetune-{os.getuid()}-{key}.lock", reason


def remove_path(path: Path) -> None:
    """Deletes a file, a link, or a folder with all that is in it, if there is one; never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_files(folder: Path) -> None:
    """Returns once all files below a folder are on the disk, with the mode that the umask asks for.

    Some libraries write theirs as 0600. The folder is one that this process has made, so that its own mode tells the
    umask.
    """
    mode = folder.stat().st_mode & 0o666
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)
            sync_to_disk(path)


def file_digest(path: Path) -> str:
    """Returns 32 hexadecimal digits of a file's content, which show damage, not forgery.

    Source: xxHash's XXH3 with 128 bits, which reads as fast as memory does.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def file_state(path: Path) -> list[int]:
    """Returns what tells a file from any other, and from itself once it has changed.

    Size and time of change can be as they were though the content is not (`rsync --times`, `touch -r`). The time of
    the last change to the inode cannot be set, so it counts as well.
    """
    with path.open("rb") as file:  # network file systems look anew when a file is opened
        facts = os.fstat(file.fileno())
    return [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


def digest_of(facts: Any) -> str:
    """Returns 32 hexadecimal digits that identify a JSON-able value."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode("ascii"))


class Journal:
    """A file of JSON lines that only grows, and that no crash or full disk tears.

    Lines that cannot be written wait in memory, in order; the first failure is returned, to be reported. A file that
    is deleted is written again, with all of its lines; if another one lies in its place, they go to a file beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._disk = device_of(path)
        self._written: BinaryIO | None = None  # keeps what was written, be it deleted
        self._end: int | None = None  # where the last whole line ends
        self._waiting: list[bytes] = []
        self._closing = False
        self.failing = False
        """True if the last write failed."""

    def add(self, value: dict[str, Any]) -> None:
        """Adds a line, which the next flush writes."""
        self._waiting.append(json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def write(self, value: dict[str, Any]) -> str | None:
        """Adds a line and writes it; returns why it has to wait, the first time."""
        self.add(value)
        return self.flush()

    def flush(self, *, to_disk: bool = False) -> str | None:
        """Writes the lines that wait; returns why it cannot, the first time, or that they lie elsewhere now.

        With `to_disk`, it returns only once they are on the disk.
        """
        moved, last = "", " Its last lines are lost." if self._closing else " It is kept in memory, and tried again."
        try:
            if (swapped := self._swapped()) or self._deleted():
                assert self._written is not None
                self._waiting.insert(0, os.pread(self._written.fileno(), self._end or 0, 0))
                self._written, self._end = None, None
            if swapped:
                beside = (self._path.with_name(f"{self._path.name}.{n}") for n in itertools.count(1))
                before, self._path = self._path, next(path for path in beside if not os.path.lexists(path))
                moved = (
                    f"Another file lies in the place of {before}: all lines of this run go to {self._path} from now on."
                )
            self._end = self._write(b"".join(self._waiting), to_disk)
        except OSError as error:
            first, self.failing = not self.failing, True
            return f"Cannot write {self._path}: {error.strerror or error}.{last}" if first else None
        self._waiting, self.failing = [], False
        return moved or None

    def close(self) -> str | None:
        """Writes the lines that wait, for the last time; returns why some of them are lost."""
        self.failing, self._closing = False, True
        return self.flush(to_disk=True) if self._waiting or self._deleted() or self._swapped() else None

    def _swapped(self) -> bool:
        """Tells if another file, a link or a folder lies in the place of what was written."""
        if self._written is None or not os.path.lexists(self._path) or device_of(self._path) != self._disk:
            return False
        return not os.path.samestat(os.lstat(self._path), os.fstat(self._written.fileno()))

    def _deleted(self) -> bool:
        """Tells if the file was deleted, but not its folder."""
        there = self._path.parent.is_dir() and device_of(self._path) == self._disk
        return self._written is not None and there and not os.path.lexists(self._path)

    def _write(self, text: bytes, to_disk: bool) -> int:
        # Where a mount has vanished, a new file would lie on the wrong disk.
        if self._end is None and device_of(self._path) != self._disk:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        handle = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if self._end is None else 0), 0o666)
        try:
            size = os.lseek(handle, 0, os.SEEK_END)
            if self._end is None:
                with open(handle, "rb", closefd=False) as lines:
                    lines.seek(0)
                    self._end = sum(len(line) for line in lines if line.endswith(b"\n"))
            end = min(size, self._end)
            if size > end:
                os.ftruncate(handle, end)  # what a crash, or a write that failed, left of a line
            self._end = end
            if os.pwrite(handle, text, end) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if to_disk:
                os.fsync(handle)
            if self._written is None or not os.path.samestat(os.fstat(handle), os.fstat(self._written.fileno())):
                self._written = self._path.open("rb", buffering=0)
                weakref.finalize(self, self._written.close)
            return end + len(text)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, self._end or 0)  # no half lines, and none twice
            raise
        finally:
            os.close(handle)


def device_of(path: Path) -> int:
    """Returns the file system that holds a path, or would hold it; it changes where a mount has vanished."""
    folder = path.absolute()
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    return folder.stat().st_dev


class Lines(NamedTuple):
    """Lines of a journal that something other than its run may have changed."""

    whole: list[dict[str, Any]]
    damaged: dict[int, bytes]
    """Damaged lines by number, counted from 1."""
    before: list[int]
    """Number of whole lines before each damaged one."""


def read_whole_lines(path: Path, is_whole: Callable[[dict[str, Any]], bool] = lambda line: True) -> Lines:
    """Returns the lines of a journal that can be read, and those that cannot; a last line that a crash tore is neither.

    `is_whole` tells if an object is one that such a journal holds.
    """
    lines = path.read_bytes().split(b"\n")
    journal = Lines([], {}, [])
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            value = json_files.parse(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and is_whole(value):
            journal.whole.append(value)
        elif number < len(lines):
            journal.damaged[number] = line
            journal.before.append(len(journal.whole))
    return journal


def set_damaged_lines_aside(path: Path, lines: Lines) -> str | None:
    """Copies the damaged lines of a journal to a file beside it; returns a report, None if there are none.

    The journal itself has to be rewritten without them (`rewrite_lines`).
    """
    if not lines.damaged:
        return None
    aside = path.with_name(f"{path.name}.damaged")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "ab") as file:
        file.write(b"".join(line + b"\n" for line in lines.damaged.values()))
    sync_to_disk(aside)
    first, count = min(lines.damaged), len(lines.damaged)
    return f"{path}: damaged lines, {count:,} in all and the first of them line {first}, were moved to {aside.name}"


def rewrite_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """Replaces a journal's lines, whole or not at all."""
    write_text(path, "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values))
