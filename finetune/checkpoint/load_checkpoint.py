"""Finds the checkpoint to resume from, verified by all ranks together, and restores it on any backend."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from finetune.checkpoint import integrity
from finetune.distributed.backend import Backend
from finetune.utils.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    state: dict[str, Any]
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)
    """Keeps others from deleting it, until it is restored."""


def newest(root: Path, broken: Collection[str] = ()) -> Path | None:
    """The newest folder that is complete, before what is in its files is verified.

    Args:
        broken: Names of folders that are known to be damaged.
    """
    for folder in integrity.list_checkpoints(root):
        if folder.name in broken:
            continue
        try:
            integrity.complete(folder)
        except CheckpointError:
            continue
        return folder
    return None


def find(root: Path, backend: Backend, warn: Callable[[str], None], *, unnamed: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint below `root`, the same on every rank; None if there is no folder of one.

    Every rank must call it.

    Args:
        warn: Is told what is wrong with newer ones, on the rank that found it.
        unnamed: Also take a complete staging folder, whose writer ended before it had its name; see `adopt`.

    Raises:
        CheckpointError: If there are checkpoints, but none is whole.
    """
    # Rank 0's list counts: another machine's view of a shared folder may lag behind.
    there = (
        [*integrity.list_checkpoints(root), *(integrity.list_unnamed(root) if unnamed else ())]
        if backend.is_main
        else []
    )
    there.sort(key=lambda folder: (-(integrity.step_of(integrity.final_name(folder)) or 0), len(folder.name)))
    names: list[str] = backend.tell([folder.name for folder in there])
    if not names:
        return None
    for folder in (root / name for name in names):
        try:
            return verified(folder, backend)
        except CheckpointError as error:
            if not getattr(error, "elsewhere", False):
                warn(f"Checkpoint refused: {error}. Trying an older one.")
    raise CheckpointError(
        f"No checkpoint below {root} is whole, as said above. Restore one from a copy, or choose another output.dir; "
        "output.overwrite=true starts from the beginning."
    )


def adopt(found: Checkpoint, backend: Backend, say: Callable[[str], None]) -> Checkpoint:
    """Gives a staging folder that was found whole its name; any other checkpoint stays as it is.

    Every rank must call it.

    Args:
        say: Is told, on rank 0.

    Raises:
        CheckpointError: On every rank, if it cannot be renamed.
    """
    target = integrity.final_name(found.folder)
    if target == found.folder:
        return found
    problem: str | None = None
    if backend.is_main:
        try:
            integrity.give_name(found.folder, target)
            say(f"{found.folder} is whole, though the run ended before it got its name. It is {target.name} now.")
        except OSError as error:
            problem = f"{found.folder} is whole, but cannot be renamed to {target.name}: {error.strerror or error}."
    problem = backend.tell(problem)
    if problem is not None:
        raise CheckpointError(f"{problem} Make room or mend the file system, and start the same command again.")
    return replace(found, folder=target)


def verified(folder: Path, backend: Backend) -> Checkpoint:
    """A checkpoint whose files all ranks have read and compared with its manifest, each a part of them.

    Raises:
        CheckpointError: On every rank if it is not whole; on those that saw nothing wrong it has `elsewhere` set.
    """
    problem: CheckpointError | None = None
    state: dict[str, Any] = {}
    held = ExitStack()
    try:
        held.enter_context(integrity.reading(folder))
        integrity.verify(folder, share=backend.rank, shares=backend.world)
        state = integrity.read_state(folder)
    except CheckpointError as error:
        problem = error
    failed = backend.sum(torch.tensor([float(problem is not None)], device=backend.device)).item()
    if failed:
        held.close()
    if problem is not None:
        raise problem
    if failed:
        other = CheckpointError(f"{folder} is not whole, as another process found")
        other.elsewhere = True  # type: ignore[attr-defined]
        raise other
    return Checkpoint(folder, state, held)


def restore(
    checkpoint: Checkpoint, backend: Backend, network: nn.Module, optimizer: Any, *, with_optimizer: bool = True
) -> None:
    """Fills a prepared model and its optimiser. Every rank reads what it needs; nothing is gathered.

    Args:
        network: The network inside the prepared model.
        with_optimizer: False leaves the optimiser as it is.

    Raises:
        CheckpointError: Naming the tensor that is missing, unexpected, or of another shape.
    """
    with checkpoint.held, _opened(checkpoint) as tensors:
        wanted = [
            key
            for key in tensors.places
            if not key.startswith(("frozen/", "buffer/")) and (with_optimizer or key.startswith("parameter/"))
        ]
        backend.write_state(network, optimizer, wanted, tensors.load)
        buffers = dict(network.named_buffers())
        for key in tensors.places:
            kind, _, name = key.partition("/")
            if kind == "buffer" and name in buffers:
                buffers[name].copy_(tensors.load(key))
    if checkpoint.state.get("scaler") is not None:
        backend.set_scaler_state(checkpoint.state["scaler"])


@dataclass(frozen=True)
class _Tensors:
    places: dict[str, dict[str, Any]]
    files: dict[str, Any]
    folder: Path

    def load(self, key: str) -> torch.Tensor:
        """A tensor, mapped from its file: what is not touched is not read."""
        place = self.places[key]
        try:
            tensor: torch.Tensor = self.files[place["file"]].get_tensor(place["name"])
        except (KeyError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / place['file']} has no tensor {place['name']}") from error
        if list(tensor.shape) != place["shape"]:
            raise CheckpointError(f"{self.folder}: {key} has shape {list(tensor.shape)}, not {place['shape']}")
        return tensor


@contextmanager
def _opened(checkpoint: Checkpoint) -> Iterator[_Tensors]:
    places: dict[str, dict[str, Any]] = checkpoint.state["tensors"]
    files = {}
    for name in sorted({place["file"] for place in places.values()}):
        try:
            files[name] = safe_open(checkpoint.folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{checkpoint.folder / name} cannot be opened: {error}") from error
    yield _Tensors(places, files, checkpoint.folder)
