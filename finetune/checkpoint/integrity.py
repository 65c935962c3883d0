"""Checkpoint folders on disk: named by step, whole or absent, verified by digests. No torch here.

checkpoints/step-00000120/manifest.json      sizes and digests of all the others; written last
                         /state.json         a few whole numbers, what was trained, where each tensor is
                         /model/             opens with `from_pretrained`, or as a PEFT adapter
                         /optimizer*.safetensors
"""

import fcntl
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.utils import json_files
from finetune.utils.atomic_files import NO_LOCKS, digest, digest_of, remove, sync, write_json
from finetune.utils.errors import CheckpointError

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
STAGING = ".staging"
DOOMED = ".doomed"
_NAME = re.compile(r"step-(\d{8,})")
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link"}
# What a resume reads of `state.json`.
_STATE_KEYS: dict[str, type] = {
    "step": int,
    "position": int,
    "tokens": int,
    "looked_at": bool,
    "results": dict,
    "identity": dict,
    "backend": str,
    "processes": int,
    "precision": str,
}


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint folder is named after; None for any other folder."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(root: Path) -> list[Path]:
    """Folders named as checkpoints are, newest first, whole or not."""
    try:
        found = [path for path in root.iterdir() if step_of(path) is not None]
    except OSError:
        return []
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def list_unnamed(root: Path) -> list[Path]:
    """Staging folders that are complete: whoever wrote them ended before they got their names."""
    found = []
    for path in root.glob(f"step-*{STAGING}"):
        with suppress(CheckpointError):
            complete(path)
            found.append(path)
    return found


def list_complete(root: Path, broken: Collection[str] = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Checkpoints whose files are all there, newest first, each with its manifest; see `complete`.

    Args:
        broken: Names of folders whose content was found damaged; they are left out.
    """
    for folder in list_checkpoints(root):
        try:
            if folder.name not in broken:
                yield folder, complete(folder)
        except CheckpointError:
            continue


def newest(root: Path, broken: Collection[str] = ()) -> Path | None:
    """The newest complete checkpoint, before what is in its files is verified."""
    return next((folder for folder, _ in list_complete(root, broken)), None)


def final_name(folder: Path) -> Path:
    """What a checkpoint's folder is called, or will be once it has its name."""
    return folder.with_name(folder.name.removesuffix(STAGING))


def seal(staging: Path, target: Path, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Turns a filled staging folder, whose files are on the disk, into a checkpoint.

    Args:
        target: What it will be called. A folder of that name was found broken before, and is moved aside.
        files: Size and digest of each file, by its path inside the folder.
        facts: What else the manifest says, such as the step.

    Raises:
        OSError: If it cannot be written.
    """
    content = {"format": FORMAT, **facts, "files": files}
    write_json(staging / MANIFEST, {**content, "digest": digest_of(content)})
    sync(staging)
    _check_listing(staging, files)
    give_name(staging, target)


def give_name(staging: Path, target: Path) -> None:
    """Renames a whole staging folder; what has its name already was found broken, and is moved aside.

    Raises:
        OSError: If it cannot be renamed.
    """
    if os.path.lexists(target):  # a link that leads nowhere is there, too
        aside = target.with_name(target.name + ".broken")
        remove(aside)
        target.rename(aside)
    staging.rename(target)
    sync(target.parent)


def describe_file(root: Path, file: Path) -> dict[str, dict[str, Any]]:
    """Puts a file on the disk and returns its line of the manifest.

    Raises:
        OSError: If it cannot be written or read.
    """
    sync(file)
    return {file.relative_to(root).as_posix(): {"bytes": file.stat().st_size, "xxh3_128": digest(file)}}


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's manifest.

    Raises:
        CheckpointError: If it is missing, damaged, or contradicts itself or the folder's name.
    """
    file = folder / MANIFEST
    with os.fdopen(open_manifest(folder), "rb") as opened:
        try:
            manifest = json_files.parse(opened.read())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{file} is not the manifest of a checkpoint")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {manifest.get('format')!r}; this version reads format {FORMAT}")
    claimed = manifest.pop("digest", None)
    if claimed != digest_of(manifest):
        raise CheckpointError(f"{file} was changed after it was written: its own digest does not match")
    if manifest.get("step") != step_of(final_name(folder)) and step_of(final_name(folder)) is not None:
        raise CheckpointError(f"{file} speaks of step {manifest.get('step')}, not of the step in the folder's name")
    return manifest


def open_manifest(folder: Path, how: int = os.O_RDONLY) -> int:
    file = folder / MANIFEST
    with _named(file, missing=f"{folder} has no {MANIFEST}, so it was never finished"):
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a symbolic link, not a folder")
        _size(file)
        return os.open(file, how)


@contextmanager
def _named(file: Path, *, missing: str) -> Iterator[None]:
    """Turns the system's errors about a file into ours."""
    try:
        yield
    except CheckpointError:
        raise  # an OSError too
    except FileNotFoundError as error:
        raise CheckpointError(missing) from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file system has
        raise CheckpointError(f"{file!s} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _size(file: Path) -> int:
    """A plain file's bytes. Anything else is refused: what a link points to may change, a pipe never ends.

    Raises:
        CheckpointError: If it is no plain file.
        OSError: If it is missing or cannot be looked at.
    """
    facts = file.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise CheckpointError(f"{file} is {_KINDS.get(stat.S_IFMT(facts.st_mode), 'a device')}, not a file")
    return facts.st_size


def _check_listing(folder: Path, files: dict[str, Any]) -> None:
    """Compares names, kinds and sizes with a manifest's, without reading the files.

    Raises:
        CheckpointError: With the first that differs.
    """
    for name, facts in files.items():
        file = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{folder / MANIFEST} lists {name}, which is not inside the checkpoint")
        known = isinstance(facts, dict) and isinstance(facts.get("bytes"), int)
        if not known or not isinstance(facts.get("xxh3_128"), str):
            raise CheckpointError(f"{folder / MANIFEST} has no size and digest for {name}")
        with _named(file, missing=f"{file} is missing"):
            for parent in [folder / parent for parent in PurePosixPath(name).parents][:-1]:
                if parent.is_symlink():
                    raise CheckpointError(f"{parent} is a symbolic link, not a folder")
            size = _size(file)
        if size != facts["bytes"]:
            raise CheckpointError(f"{file} has {size:,} bytes instead of {facts['bytes']:,}")
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            # Hidden names are a file system's own, such as .nfs0001. A folder is as good as what it holds.
            expected = path.relative_to(folder).as_posix() in files or path == folder / MANIFEST
            if not (expected or path.name.startswith(".") or (path.is_dir() and not path.is_symlink())):
                raise CheckpointError(f"{path} is in the checkpoint's folder, but not in its manifest")


def verify(folder: Path, *, share: int = 0, shares: int = 1) -> None:
    """Reads a checkpoint's files and compares them with its manifest.

    Args:
        share: Of the files, this process reads every `shares`-th from here, so that ranks divide the work.
        shares: How many processes divide it.

    Raises:
        CheckpointError: With the first file that is missing, cut short, changed, or nobody's.
    """
    files = read_manifest(folder)["files"]
    if STATE not in files:
        raise CheckpointError(f"{folder / MANIFEST} does not list {STATE}")
    _check_listing(folder, files)
    for name, facts in sorted(files.items())[share::shares]:
        file = folder / name
        with _named(file, missing=f"{file} is missing"):
            found = digest(file)
        if found != facts["xxh3_128"]:
            raise CheckpointError(f"{file} was changed after it was written: its digest does not match")


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: If it cannot be read, or contradicts the manifest.
    """
    file, manifest = folder / STATE, read_manifest(folder)
    try:
        state: dict[str, Any] = json_files.parse(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("tensors"), dict):
        raise CheckpointError(f"{file} is not the state of a checkpoint")
    missing = [key for key in _STATE_KEYS if key not in state]
    if missing:
        raise CheckpointError(f"{file} does not say {', '.join(missing)}")
    wrong = [key for key, kind in _STATE_KEYS.items() if type(state[key]) is not kind]
    if wrong:
        raise CheckpointError(f"{file} has values of another kind for {', '.join(wrong)}")
    if state["step"] != manifest["step"]:
        raise CheckpointError(f"{file} speaks of step {state['step']}, the manifest of step {manifest['step']}")
    for key, place in state["tensors"].items():
        if not isinstance(place, dict) or [type(place.get(k)) for k in ("file", "name", "shape")] != [str, str, list]:
            raise CheckpointError(f"{file} does not say where {key} is")
        if place["file"] not in manifest["files"]:
            raise CheckpointError(f"{file} needs {place['file']} for {key}, which the manifest does not list")
    return state


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keeps `prune`, in whatever process, from deleting a checkpoint while it is read.

    Raises:
        CheckpointError: If it is gone, or cannot be locked.
    """
    handle = open_manifest(folder)
    try:
        with _named(folder / MANIFEST, missing=f"{folder} is gone"):
            lock(handle, fcntl.LOCK_SH)
        # Whoever held it meanwhile may have deleted it.
        if not os.path.exists(folder / MANIFEST) or not os.path.samestat(os.fstat(handle), os.stat(folder / MANIFEST)):
            raise CheckpointError(f"{folder} was deleted meanwhile")
        yield
    finally:
        os.close(handle)


def lock(handle: int, how: int) -> None:
    """Locks a file where its file system can; a run says at its start where that cannot (`run_directory`)."""
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def complete(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there, in their sizes; what is in them is not read.

    Raises:
        CheckpointError: If one is not.
    """
    manifest = read_manifest(folder)
    _check_listing(folder, manifest["files"])
    return manifest
