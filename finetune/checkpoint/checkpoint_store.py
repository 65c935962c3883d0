"""The store of a run's checkpoints: where they are listed, read, written and deleted.

A checkpoint is files by their paths, under a name. It is whole once its manifest is put and it is sealed, else absent.
Whoever uses the store needs no path, no rename and no lock of files, so that object storage can be another one: a key
for each file, and the manifest's key put last. No torch here.
"""

import fcntl
import io
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from finetune.utils.atomic_files import NO_LOCKS, remove_path, sync_to_disk
from finetune.utils.errors import CheckpointError

MANIFEST = "manifest.json"
FOLDER = "a folder"
UNSEALED = ".staging"
_DOOMED = ".doomed"
_NAME = re.compile(r"step-(\d{8,})")
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: FOLDER, stat.S_IFLNK: "a symbolic link"}


def name_of(step: int) -> str:
    """Returns the name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step that a sealed checkpoint is named after; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def sealed_name(name: str) -> str:
    """Returns the name that a checkpoint has, or will have once it is sealed."""
    return name.removesuffix(UNSEALED)


@contextmanager
def file_errors(address: str, *, missing: str) -> Iterator[None]:
    """Turns the system's errors about a file into `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise  # an OSError too
    except FileNotFoundError as error:
        raise CheckpointError(missing) from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file system has
        raise CheckpointError(f"{address} cannot be read: {getattr(error, 'strerror', None) or error}") from error


class CheckpointStore:
    """Checkpoints of one run, a folder for each. Unsealed ones are staging folders, which `seal` renames.

    What it cannot do raises an `OSError`; of a missing file, `FileNotFoundError`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def address(self, name: str = "", file: str = "", *, absolute: bool = False) -> str:
        """Returns the path or URL of the store, a checkpoint or a file, for people."""
        return str((self._root.resolve() if absolute else self._root) / name / file)

    def list_names(self) -> list[str]:
        """Returns the names of sealed checkpoints, newest first; what is in them may be damaged. Empty without any."""
        try:
            names = [path.name for path in self._root.iterdir() if step_of(path.name) is not None]
        except OSError:
            return []
        return sorted(names, key=lambda name: step_of(name) or 0, reverse=True)

    def list_unsealed(self) -> list[str]:
        """Returns the names, which end in `UNSEALED`, of what is being written, or was when its writer ended."""
        return [path.name for path in self._root.glob(f"step-*{UNSEALED}")]

    def list_files(self, name: str) -> dict[str, int | str]:
        """Returns the size in bytes of each file, by its path in the checkpoint; in words what is no plain file."""
        kinds: dict[str, int | str] = {}
        for parent, folders, files in os.walk(self._root / name):
            for path in (Path(parent, entry) for entry in (*folders, *files)):
                with suppress(FileNotFoundError):  # gone since it was listed
                    facts = path.lstat()
                    plain = stat.S_ISREG(facts.st_mode)
                    kind = facts.st_size if plain else _KINDS.get(stat.S_IFMT(facts.st_mode), "a device")
                    kinds[path.relative_to(self._root / name).as_posix()] = kind
        return kinds

    def open_file(self, name: str, file: str) -> io.BufferedIOBase:
        """Opens a file to read ranges of it."""
        return os.fdopen(self._open_plain(name, file, os.O_RDONLY), "rb")

    def _open_plain(self, name: str, file: str, how: int) -> int:
        """Opens a plain file. Anything else is refused: what a link points to may change, a pipe never ends."""
        folder, path = self._root / name, self._root / name / file
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a symbolic link, not a folder")
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a file")
        return os.open(path, how)

    def create_file(self, name: str, file: str) -> io.BufferedIOBase:
        """Begins a file of an unsealed checkpoint, written from its begin to its end; once closed, it is durable."""
        path = self._root / name / file
        # Not its parents: below a mount that has vanished, that would fill the wrong disk.
        (self._root / name).mkdir(exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _SyncedFile(io.FileIO(path, "w"))

    def delete_file(self, name: str, file: str) -> None:
        """Deletes a file of an unsealed checkpoint."""
        (self._root / name / file).unlink()

    def seal(self, name: str) -> None:
        """Makes an unsealed checkpoint, whose manifest was written last, appear under its `sealed_name`.

        A damaged one of that name gives way.
        """
        folder, target = self._root / name, self._root / sealed_name(name)
        for parent, _, _ in os.walk(folder):
            sync_to_disk(Path(parent))
        if os.path.lexists(target):  # a link that leads nowhere is there, too
            aside = target.with_name(f"{target.name}.broken")
            remove_path(aside)
            target.rename(aside)
        folder.rename(target)
        sync_to_disk(self._root)

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Keeps `delete`, in whatever process, from deleting a checkpoint while it is read, if the store can.

        Raises:
            CheckpointError: If it is gone.
        """
        folder = self._root / name
        with file_errors(self.address(name, MANIFEST), missing=f"{folder} has no {MANIFEST}, so it was never finished"):
            handle = self._open_plain(name, MANIFEST, os.O_RDONLY)
        try:
            with file_errors(self.address(name, MANIFEST), missing=f"{folder} is gone"):
                _lock(handle, fcntl.LOCK_SH)
            # Whoever held it meanwhile may have deleted it.
            file = folder / MANIFEST
            if not file.exists() or not os.path.samestat(os.fstat(handle), file.stat()):
                raise CheckpointError(f"{folder} was deleted meanwhile")
            yield
        finally:
            os.close(handle)

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, unless somebody holds it: then it stays."""
        folder = self._root / name
        doomed = folder.with_name(name + _DOOMED)
        # Open for writing: over NFS, only such files can be locked against others.
        handle = self._open_plain(name, MANIFEST, os.O_RDWR)
        try:
            _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
            folder.rename(doomed)
        except BlockingIOError:
            return
        finally:
            os.close(handle)
        shutil.rmtree(doomed)

    def delete_remains(self) -> None:
        """Deletes what is half written or half deleted; nobody may be at work."""
        for path in self._root.glob("step-*"):
            if path.suffix in (UNSEALED, _DOOMED):
                with suppress(OSError):
                    remove_path(path)

    def written_at(self, name: str) -> float:
        """Returns when a checkpoint's manifest was written, in seconds since 1970."""
        return (self._root / name / MANIFEST).stat().st_mtime

    def local_folder(self, name: str) -> Path:
        """Returns a folder of this machine that holds the checkpoint's files."""
        return self._root / name


class _SyncedFile(io.BufferedWriter):
    """A new file, whose content is on the disk once it is closed."""

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


def _lock(handle: int, how: int) -> None:
    """Locks a file where its file system can; a run says at its start where that cannot (`run_directory`)."""
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def open_store(run: Path) -> CheckpointStore:
    """Returns the store of a run's checkpoints."""
    return CheckpointStore(run / "checkpoints")


def find_checkpoint(path: Path) -> tuple[CheckpointStore, str | None]:
    """Returns a checkpoint's store and name; of any other place the store that it has as a run, and None."""
    if (path / MANIFEST).is_file():
        return CheckpointStore(path.parent), path.name
    return open_store(path), None
