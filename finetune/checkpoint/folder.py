"""Checkpoint folders on disk: named by step, whole or absent, verified, and pruned. No torch here.

checkpoints/step-00000120/manifest.json      sizes and digests of all the others; written last
                         /state.json         a few whole numbers, what was trained, where each tensor is
                         /model/             opens with `from_pretrained`, or as a PEFT adapter
                         /optimizer*.safetensors
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.files import digest, digest_of, sync, write_json

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
STAGING = ".staging"
_DOOMED = ".doomed"
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint folder is named after; None for any other folder."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def listed(root: Path) -> list[Path]:
    """Folders named as checkpoints are, newest first, whole or not."""
    try:
        found = [path for path in root.iterdir() if step_of(path) is not None]
    except OSError:
        return []
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


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
    if target.exists():
        aside = target.with_name(target.name + ".broken")
        if aside.exists():
            shutil.rmtree(aside)
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
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it was never finished") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or ("it is empty" if not file.stat().st_size else "it is no JSON")
        raise CheckpointError(f"{file} cannot be read: {reason}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{file} is not the manifest of a checkpoint")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {manifest.get('format')!r}; this version reads format {FORMAT}")
    claimed = manifest.pop("digest", None)
    if claimed != digest_of(manifest):
        raise CheckpointError(f"{file} was changed after it was written: its own digest does not match")
    if manifest.get("step") != step_of(folder) and step_of(folder) is not None:
        raise CheckpointError(f"{file} speaks of step {manifest.get('step')}, not of the step in the folder's name")
    return manifest


def verify(folder: Path, *, share: int = 0, shares: int = 1) -> None:
    """Reads a checkpoint's files and compares them with its manifest.

    Args:
        share: Of the files, this process reads every `shares`-th from here, so that ranks divide the work.
        shares: How many processes divide it.

    Raises:
        CheckpointError: With the first file that is missing, cut short or changed.
    """
    files = sorted(read_manifest(folder)["files"].items())
    if STATE not in dict(files):
        raise CheckpointError(f"{folder / MANIFEST} does not list {STATE}")
    for name, facts in files[share::shares]:
        file = folder / name
        try:
            size, expected = file.stat().st_size, facts["bytes"]
            if size != expected:
                raise CheckpointError(f"{file} has {size:,} bytes instead of {expected:,}")
            if digest(file) != facts["xxh3_128"]:
                raise CheckpointError(f"{file} was changed after it was written: its digest does not match")
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing") from error
        except (LookupError, TypeError) as error:
            raise CheckpointError(f"{folder / MANIFEST} has no size and digest for {name}") from error
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE} cannot be read: {error}") from error
    return state


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keeps `prune`, in whatever process, from deleting a checkpoint while it is read.

    Raises:
        CheckpointError: If it is gone.
    """
    try:
        handle = os.open(folder / MANIFEST, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def prune(root: Path, *, keep: int, keep_best: bool) -> None:
    """Deletes all checkpoints but the newest `keep` and, if asked, the one with the lowest validation loss.

    Only whole ones count and only whole ones are deleted; one that is being read stays until the next time. Call
    it from one process, after a checkpoint was sealed.

    Raises:
        OSError: If a folder cannot be deleted.
    """
    whole: list[tuple[Path, dict[str, Any]]] = []
    for folder in listed(root):
        try:
            whole.append((folder, read_manifest(folder)))
        except CheckpointError:
            continue
    staying = {folder for folder, _ in whole[:keep]}
    scored = [(m["validation_loss"], folder) for folder, m in whole if m.get("validation_loss") is not None]
    if keep_best and scored:
        staying.add(min(scored, key=lambda pair: pair[0])[1])
    for folder, _ in whole:
        if folder not in staying:
            _delete(folder)


def _delete(folder: Path) -> None:
    handle = os.open(folder / MANIFEST, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally_gone = folder.with_name(folder.name + _DOOMED)
    try:
        # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
        folder.rename(finally_gone)
    finally:
        os.close(handle)
    shutil.rmtree(finally_gone)


def clean(root: Path) -> None:
    """Removes what a run that was cut short left half written or half deleted."""
    for path in root.glob("step-*"):
        if path.suffix in (STAGING, _DOOMED):
            shutil.rmtree(path, ignore_errors=True)
