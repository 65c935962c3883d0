"""Which part of a tensor lies on this rank, and how parts get to the rank that writes the whole."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from finetune.utils.errors import BackendError


@dataclass(frozen=True)
class Shard:
    """This rank's piece of a tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    local: torch.Tensor
    """The piece, as one dimension, on its device. It is live: to be copied before the next one is asked for."""
    begin: int
    """Where the piece begins in the whole tensor, as one dimension."""
    ranks: tuple[int, ...]
    """The ranks that have the whole tensor among them; empty if each rank has all of it."""
    gather: Callable[[], torch.Tensor]
    """The whole tensor, on the device; all of these ranks must call it."""


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, in place."""
    here: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here


def undivided(tensor: torch.Tensor) -> Shard:
    """A tensor that each rank has all of."""
    whole = tensor.detach()
    return Shard(tuple(whole.shape), whole.reshape(-1), 0, (), lambda: whole)


def of(tensor: Any) -> Shard:
    """The piece of a tensor of torch's own backends, which is sharded along its first dimension or not at all."""
    if not hasattr(tensor, "device_mesh"):
        return undivided(tensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    sharded = [index for index, placement in enumerate(placements) if placement.is_shard()]
    if len(sharded) != 1 or placements[sharded[0]].dim != 0:
        raise BackendError(f"A tensor of {tuple(tensor.shape)} is sharded as {placements}, not along its rows.")
    _, offset = _place(tensor)
    row = tensor.numel() // max(1, tensor.shape[0])
    ranks = tuple(distributed.get_process_group_ranks(mesh.get_group(sharded[0])))
    piece = local(tensor.detach()).reshape(-1)

    def gather() -> torch.Tensor:
        # Shards that rest in host memory are gathered where the process group is.
        whole: torch.Tensor = tensor.detach().to(mesh.device_type).full_tensor()
        return whole

    return Shard(tuple(tensor.shape), piece, offset[0] * row, ranks, gather)


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """What of a whole tensor belongs to this rank if it is sharded as another is; a view."""
    if not hasattr(like, "device_mesh"):
        return whole
    shape, offset = _place(like)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from finetune.utils.compat.torch_sharding_private import local_shape_and_offset

    return local_shape_and_offset(tensor)


class Exchange:
    """Sends pieces from rank to rank, in host memory and in a process group of its own: training does not wait.

    All ranks make one at the same time.
    """

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo")

    def send(self, piece: torch.Tensor, rank: int) -> None:
        """Sends a contiguous piece; returns once it has been taken."""
        distributed.send(_bytes(piece), rank, group=self._group)

    def receive(self, into: torch.Tensor, rank: int) -> None:
        """Takes the next piece that a rank sends."""
        distributed.recv(_bytes(into), rank, group=self._group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
