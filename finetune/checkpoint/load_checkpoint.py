"""Finds the checkpoint to resume from, verified by all ranks together, and restores it on any backend."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import integrity
from finetune.checkpoint.checkpoint_store import CheckpointStore
from finetune.checkpoint.tensor_files import TensorReader
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import warn
from finetune.utils.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    store: CheckpointStore
    name: str
    state: dict[str, Any]
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)
    """Keeps others from deleting it, until it is restored."""

    @property
    def address(self) -> str:
        """Path or URL, for people."""
        return self.store.address(self.name)


def find_newest(store: CheckpointStore, backend: Backend, *, unsealed: bool = False) -> Checkpoint | None:
    """Returns the newest whole checkpoint of a store, the same on every rank; None if there is none, whole or not.

    Every rank must call it. What is wrong with newer ones is reported on the rank that found it.

    Args:
        unsealed: Also take one that is whole, whose writer ended before it was sealed.

    Raises:
        CheckpointError: If there are checkpoints, but none is whole.
    """
    # Rank 0's list counts: another machine's view of a shared folder may lag behind.
    names: list[str] = backend.broadcast_object(
        integrity.list_resumable(store, unsealed=unsealed) if backend.is_main else []
    )
    if not names:
        return None
    for name in names:
        try:
            return verify_on_all_ranks(store, name, backend)
        except CheckpointError as error:
            if not getattr(error, "elsewhere", False):
                warn(f"Checkpoint refused: {error}. Trying an older one.")
    raise CheckpointError(
        f"No checkpoint below {store.address()} is whole, as said above. Restore one from a copy, or choose another "
        "output.dir; output.overwrite=true starts from the beginning."
    )


def verify_on_all_ranks(store: CheckpointStore, name: str, backend: Backend) -> Checkpoint:
    """Returns a checkpoint whose files all ranks have read and compared with its manifest, each a part of them.

    Raises:
        CheckpointError: On every rank if it is not whole; on those that saw nothing wrong it has `elsewhere` set.
    """
    problem: CheckpointError | None = None
    state: dict[str, Any] = {}
    held = ExitStack()
    try:
        held.enter_context(store.hold(name))
        integrity.verify_checkpoint(store, name, share=backend.rank, shares=backend.world_size)
        state = integrity.read_state(store, name)
    except CheckpointError as error:
        problem = error
    failed = backend.all_reduce_sum(torch.tensor([float(problem is not None)], device=backend.device)).item()
    if failed:
        held.close()
    if problem is not None:
        raise problem
    if failed:
        other = CheckpointError(f"{store.address(name)} is not whole, as another process found")
        other.elsewhere = True  # type: ignore[attr-defined]
        raise other
    return Checkpoint(store, name, state, held)


def restore_checkpoint(
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
        load = _open_tensors(checkpoint)
        state = [key for key in places if not key.startswith(("frozen/", "buffer/"))]
        wanted = [key for key in state if with_optimizer or key.startswith("parameter/")]
        backend.write_state(network, optimizer, wanted, load)
        buffers = dict(network.named_buffers())
        for key in places:
            kind, _, name = key.partition("/")
            if kind == "buffer" and name in buffers:
                buffers[name].copy_(load(key))
    if checkpoint.state.get("scaler") is not None:
        backend.set_scaler_state(checkpoint.state["scaler"])


def _open_tensors(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """Returns a function that reads a tensor by its key; files are opened as they are needed."""
    places: dict[str, dict[str, Any]] = checkpoint.state["tensors"]
    files: dict[str, TensorReader] = {}

    def load(key: str) -> torch.Tensor:
        place = places[key]
        file = place["file"]
        try:
            if file not in files:
                files[file] = TensorReader(checkpoint.store.open_file(checkpoint.name, file))
            tensor = files[file].read(place["name"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            address = checkpoint.store.address(checkpoint.name, file)
            raise CheckpointError(f"{address}: the tensor {place['name']} cannot be read: {error}") from error
        if list(tensor.shape) != place["shape"]:
            raise CheckpointError(f"{checkpoint.address}: {key} has shape {list(tensor.shape)}, not {place['shape']}")
        return tensor

    return load
