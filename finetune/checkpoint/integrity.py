"""Checkpoints in a store: named by step, whole or absent, verified by digests. No torch here.

checkpoints/step-00000120/manifest.json      sizes and digests of all the others; written last
                         /state.json         a few whole numbers, what was trained, where each tensor is
                         /model/             opens with `from_pretrained`, or as a PEFT adapter
                         /optimizer*.safetensors

What is missing, cut short or changed raises a `CheckpointError`; what cannot be written, an `OSError`.
"""

import hashlib
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import PurePosixPath
from typing import Any

import xxhash

from finetune.checkpoint.checkpoint_store import FOLDER, MANIFEST, CheckpointStore, file_errors, sealed_name, step_of
from finetune.utils import json_files
from finetune.utils.atomic_files import digest_of, json_text
from finetune.utils.errors import CheckpointError

FORMAT = 1
STATE = "state.json"
_MANIFEST_SHAPE: dict[str, json_files.Shape] = {"format": int, "step": int, "files": dict}
_FILE_SHAPE: dict[str, json_files.Shape] = {"bytes": int, "xxh3_128": str}
# What a resume reads of `state.json`.
_STATE_SHAPE: dict[str, json_files.Shape] = {
    **dict.fromkeys(("step", "position", "tokens", "processes"), int),
    **dict.fromkeys(("results", "identity", "tensors"), dict),
    **dict.fromkeys(("backend", "precision"), str),
    "looked_at": bool,
}
_TENSOR_SHAPE: dict[str, json_files.Shape] = {"file": str, "name": str, "shape": [int]}

Files = dict[str, dict[str, Any]]
"""Size and digest of each file, by its path in the checkpoint, as manifests have them."""


class NewFile:
    """A new file of an unsealed checkpoint, whose digest is taken while it is written."""

    def __init__(self, store: CheckpointStore, name: str, file: str) -> None:
        self.name, self.file = name, file
        self._opened = store.create_file(name, file)
        self._size, self._hash = 0, xxhash.xxh3_128()

    def write(self, content: bytes | memoryview) -> None:
        """Appends bytes."""
        self._opened.write(content)
        self._size += len(content)
        self._hash.update(content)

    def close(self) -> Files:
        """Puts the file on the disk, and returns its line of the manifest; a second time it only returns that."""
        self._opened.close()
        return {self.file: {"bytes": self._size, "xxh3_128": self._hash.hexdigest()}}


def put_file(store: CheckpointStore, name: str, file: str, content: bytes) -> Files:
    """Writes a file of an unsealed checkpoint, and returns its line of the manifest."""
    with closing(NewFile(store, name, file)) as new:
        new.write(content)
    return new.close()


def list_whole(store: CheckpointStore, broken: Collection[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the checkpoints, but for `broken` ones, that pass `check_sizes`, newest first, each with its manifest."""
    for name in store.list_names():
        with suppress(CheckpointError):
            if name not in broken:
                yield name, check_sizes(store, name)


def newest_address(store: CheckpointStore, broken: Collection[str] = ()) -> str | None:
    """Returns where the newest checkpoint is whose files are all there, before what is in them is verified."""
    return next((store.address(name) for name, _ in list_whole(store, broken)), None)


def list_resumable(store: CheckpointStore, *, unsealed: bool = True) -> list[str]:
    """Returns the checkpoints to try, newest first; `unsealed`: also whole ones whose writer ended before it sealed."""
    candidates = store.list_names()
    for name in store.list_unsealed() if unsealed else ():
        with suppress(CheckpointError):
            check_sizes(store, name)
            candidates.append(name)
    return sorted(candidates, key=lambda name: (-(step_of(sealed_name(name)) or 0), len(name)))


def seal_checkpoint(store: CheckpointStore, name: str, files: Files, facts: dict[str, Any]) -> None:
    """Turns what was written, and is on the disk, into a checkpoint, whose manifest says `facts` such as the step."""
    _check_files(store, name, files)
    content = {"format": FORMAT, **facts, "files": files}
    put_file(store, name, MANIFEST, json_text({**content, "digest": digest_of(content)}).encode())
    store.seal(name)


def read_manifest(store: CheckpointStore, name: str) -> dict[str, Any]:
    """Returns a checkpoint's manifest, which must not contradict itself or the checkpoint's name."""
    file = store.address(name, MANIFEST)
    unfinished = f"{store.address(name)} has no {MANIFEST}, so it was never finished"
    manifest = _read_json(store, name, MANIFEST, _MANIFEST_SHAPE, missing=unfinished)
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{file} has format {manifest['format']}; this version reads format {FORMAT}")
    claimed = manifest.pop("digest", None)
    if claimed != digest_of(manifest):
        raise CheckpointError(f"{file} was changed after it was written: its own digest does not match")
    if step_of(sealed_name(name)) not in (None, manifest["step"]):
        raise CheckpointError(f"{file} speaks of step {manifest['step']}, not of the step in the folder's name")
    return manifest


def _read_json(
    store: CheckpointStore, name: str, file: str, shape: dict[str, json_files.Shape], *, missing: str
) -> dict[str, Any]:
    """Returns the object in a file, which has all keys of a shape."""
    with file_errors(store.address(name, file), missing=missing), store.open_file(name, file) as opened:
        value: dict[str, Any] = json_files.parse(opened.read())
        if (problem := json_files.shape_mismatch(value, shape, needed=shape)) is not None:
            raise ValueError(problem)
    return value


def _check_files(store: CheckpointStore, name: str, files: dict[str, Any]) -> None:
    """Compares names, kinds and sizes with a manifest's, without reading the files."""
    manifest = store.address(name, MANIFEST)
    with file_errors(store.address(name), missing=f"{store.address(name)} is gone"):
        there = store.list_files(name)
    for file, facts in files.items():
        path, address, actual = PurePosixPath(file), store.address(name, file), there.get(file)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{manifest} lists {file}, which is not inside the checkpoint")
        if json_files.shape_mismatch(facts, _FILE_SHAPE, needed=_FILE_SHAPE) is not None:
            raise CheckpointError(f"{manifest} has no size and digest for {file}")
        for parent in map(str, path.parents):
            kind = there.get(parent, FOLDER)
            if isinstance(kind, str) and kind != FOLDER:
                raise CheckpointError(f"{store.address(name, parent)} is {kind}, not a folder")
        with file_errors(address, missing=f"{address} is missing"):
            if actual is None:
                store.open_file(name, file).close()  # says why, where it is a name that no store has
                raise FileNotFoundError
        if isinstance(actual, str):
            raise CheckpointError(f"{address} is {actual}, not a file")
        if actual != facts["bytes"]:
            raise CheckpointError(f"{address} has {actual:,} bytes instead of {facts['bytes']:,}")
    for file, kind in there.items():
        # Hidden names are a file system's own, such as .nfs0001. A folder is as good as what it holds.
        if not (file in files or file == MANIFEST or kind == FOLDER or PurePosixPath(file).name.startswith(".")):
            raise CheckpointError(f"{store.address(name, file)} is in the checkpoint's folder, but not in its manifest")


def check_sizes(store: CheckpointStore, name: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose files are all there, in their sizes; what is in them is not read."""
    manifest = read_manifest(store, name)
    _check_files(store, name, manifest["files"])
    return manifest


def verify_checkpoint(store: CheckpointStore, name: str, *, share: int = 0, shares: int = 1) -> None:
    """Reads every `shares`-th file of a checkpoint, from `share` on, and compares it with the manifest."""
    files = read_manifest(store, name)["files"]
    if STATE not in files:
        raise CheckpointError(f"{store.address(name, MANIFEST)} does not list {STATE}")
    _check_files(store, name, files)
    for file, facts in sorted(files.items())[share::shares]:
        address = store.address(name, file)
        with file_errors(address, missing=f"{address} is missing"), store.open_file(name, file) as opened:
            digest = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
        if digest != facts["xxh3_128"]:
            raise CheckpointError(f"{address} was changed after it was written: its digest does not match")


def read_state(store: CheckpointStore, name: str) -> dict[str, Any]:
    """Returns what a checkpoint says of itself, which must not contradict its manifest."""
    file, manifest = store.address(name, STATE), read_manifest(store, name)
    state = _read_json(store, name, STATE, _STATE_SHAPE, missing=f"{file} is missing")
    if state["step"] != manifest["step"]:
        raise CheckpointError(f"{file} speaks of step {state['step']}, the manifest of step {manifest['step']}")
    for key, location in state["tensors"].items():
        if json_files.shape_mismatch(location, _TENSOR_SHAPE, needed=_TENSOR_SHAPE) is not None:
            raise CheckpointError(f"{file} does not say where {key} is")
        if location["file"] not in manifest["files"]:
            raise CheckpointError(f"{file} needs {location['file']} for {key}, which the manifest does not list")
    return state
