"""Finds the checkpoint to resume from, verified by all ranks together, and restores it on any backend."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from finetune.checkpoint import integrity
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import warn
from finetune.utils.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    state: dict[str, Any]
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)
    """Keeps others from deleting it, until it is restored."""


def find(root: Path, backend: Backend, *, unnamed: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint below `root`, the same on every rank; None if there is no folder of one.

    Every rank must call it. What is wrong with newer ones is reported on the rank that found it.

    Args:
        unnamed: Also take a complete staging folder, whose writer ended before it had its name.

    Raises:
        CheckpointError: If there are checkpoints, but none is whole.
    """
    # Rank 0's list counts: another machine's view of a shared folder may lag behind.
    there = integrity.list_checkpoints(root) if backend.is_main else []
    if unnamed and backend.is_main:
        there += integrity.list_unnamed(root)
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
    places: dict[str, dict[str, Any]] = checkpoint.state["tensors"]
    with checkpoint.held:
        load = _opened(checkpoint.folder, places)
        wanted = [
            key
            for key in places
            if not key.startswith(("frozen/", "buffer/")) and (with_optimizer or key.startswith("parameter/"))
        ]
        backend.write_state(network, optimizer, wanted, load)
        buffers = dict(network.named_buffers())
        for key in places:
            kind, _, name = key.partition("/")
            if kind == "buffer" and name in buffers:
                buffers[name].copy_(load(key))
    if checkpoint.state.get("scaler") is not None:
        backend.set_scaler_state(checkpoint.state["scaler"])


def _opened(folder: Path, places: dict[str, dict[str, Any]]) -> Callable[[str], torch.Tensor]:
    """Reads a tensor by its key, mapped from its file: what is not touched is not read."""
    files: dict[str, Any] = {}
    for name in sorted({place["file"] for place in places.values()}):
        try:
            files[name] = safe_open(folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name} cannot be opened: {error}") from error

    def load(key: str) -> torch.Tensor:
        place = places[key]
        try:
            tensor: torch.Tensor = files[place["file"]].get_tensor(place["name"])
        except SafetensorError as error:
            raise CheckpointError(f"{folder / place['file']} has no tensor {place['name']}") from error
        if list(tensor.shape) != place["shape"]:
            raise CheckpointError(f"{folder}: {key} has shape {list(tensor.shape)}, not {place['shape']}")
        return tensor

    return load
