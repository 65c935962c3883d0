"""The part of a tensor that lies on this rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed

from finetune.distributed.mesh import Group, gather_parts
from finetune.distributed.parameter_info import local
from finetune.distributed.split_parameters import Split
from finetune.utils.errors import BackendError

Range = tuple[int, int]
"""First and last + 1."""


class Block(NamedTuple):
    """A contiguous part of a whole tensor: a range of each dimension, or one of the flattened tensor."""

    whole: tuple[Range, ...]
    """Its ranges in the whole tensor."""
    local: tuple[Range, ...]
    """Its ranges in the rank's piece."""

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns its view of a whole tensor."""
        return (whole.reshape(-1) if len(self.whole) == 1 else whole)[_slices(self.whole)]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Returns its view of the rank's piece."""
        return local[_slices(self.local)]


@dataclass(frozen=True)
class Shard:
    """This rank's piece of a tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    local: torch.Tensor
    """The piece, on its device. It is live: to be copied before the next one is asked for."""
    blocks: tuple[Block, ...]
    """Blocks that it is made of; none if it is empty."""
    ranks: tuple[int, ...]
    """The ranks that have the whole tensor among them; empty if each rank has all of it."""
    gather: Callable[[], torch.Tensor]
    """Returns the whole tensor, on the device; all of these ranks must call it."""


def flat_block(begin: int, size: int) -> tuple[Block, ...]:
    """Returns a part of a flattened tensor."""
    return (Block(((begin, begin + size),), ((0, size),)),) if size else ()


def whole_shard(tensor: torch.Tensor) -> Shard:
    """Returns a tensor that each rank has all of."""
    whole = tensor.detach()
    return Shard(tuple(whole.shape), whole.reshape(-1), flat_block(0, whole.numel()), (), lambda: whole)


def shard_of(tensor: Any, split: Split | None, group: Group | None) -> Shard:
    """Returns the piece of a tensor of torch's own backends, which is sharded along its first dimension or not at all.

    If it is split over the ranks of a tensor-parallel group, `split` says how and `group` over which.
    """
    ranks: tuple[int, ...] = ()
    rows = (0, tensor.shape[0] if tensor.ndim else 1)
    if hasattr(tensor, "device_mesh"):
        from finetune.utils.compat.torch_sharding_private import local_shape_and_offset

        mesh, placements = tensor.device_mesh, tensor.placements
        sharded = [index for index, placement in enumerate(placements) if placement.is_shard()]
        if len(sharded) != 1 or placements[sharded[0]].dim != 0:
            raise BackendError(f"A tensor of {tuple(tensor.shape)} is sharded as {placements}, not along its rows.")
        shape, offset = local_shape_and_offset(tensor)
        rows = (offset[0], offset[0] + shape[0])
        ranks = tuple(distributed.get_process_group_ranks(mesh.get_group(sharded[0])))
    elif split is None:
        return whole_shard(tensor)
    here = local(tensor.detach())

    def part() -> torch.Tensor:
        # Shards that rest in host memory are gathered where the process group is.
        if not ranks:
            return here
        whole: torch.Tensor = tensor.detach().to(tensor.device_mesh.device_type).full_tensor()
        return whole

    if split is None:
        row = tensor.numel() // max(1, tensor.shape[0])
        begin, size = rows[0] * row, here.numel()
        return Shard(tuple(tensor.shape), here.reshape(-1), flat_block(begin, size), ranks, part)
    assert group is not None

    def gather() -> torch.Tensor:
        parts = [shard.view(split.part_shape(group.size)) for shard in gather_parts(part(), group)]
        whole = torch.empty(split.shape, dtype=here.dtype, device=parts[0].device)
        for rank, shard in enumerate(parts):
            for block in _blocks(split, (0, shard.shape[0]), group.size, rank):
                block.within(whole).copy_(block.of(shard))
        return whole if split.packed is None else whole.view(-1, *here.shape[1:])

    # The ranks of a group follow each other, and each has the same rows of its part.
    mates = ranks or (distributed.get_rank(),)
    holders = tuple(rank - group.rank + mate for rank in mates for mate in range(group.size))
    # What is packed is frozen under adapters, and saved nowhere.
    blocks = () if split.packed is not None else tuple(_blocks(split, rows, group.size, group.rank))
    return Shard(split.shape, here, blocks, holders, gather)


def _blocks(split: Split, rows: Range, size: int, rank: int) -> Iterator[Block]:
    """Yields the blocks of some rows of a part that a rank of a tensor-parallel group has of a tensor."""
    at = 0
    for first, last in split.indices(size, rank):
        begin, end = (max(at, rows[0]), min(at + last - first, rows[1])) if split.dim == 0 else rows
        if begin < end:
            whole, here = [(0, n) for n in split.shape], [(0, n) for n in split.shape]
            whole[0], here[0] = (begin, end), (begin - rows[0], end - rows[0])
            if split.dim == 0:
                whole[0] = (first + begin - at, first + end - at)
            else:
                whole[split.dim], here[split.dim] = (first, last), (at, at + last - first)
            yield Block(tuple(whole), tuple(here))
        at += last - first


def part_of(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Returns this rank's part of a whole tensor, divided as a shard is."""
    if len(shard.blocks) == 1:
        return shard.blocks[0].within(whole).reshape(shard.local.shape)
    piece = torch.empty(shard.local.shape, dtype=whole.dtype)
    for block in shard.blocks:
        block.of(piece).copy_(block.within(whole))
    return piece


def to_numbers(blocks: tuple[Block, ...]) -> list[int]:
    """Returns blocks as whole numbers, for a table that ranks share: dimensions, blocks, and the ranges of each."""
    dims = len(blocks[0].whole) if blocks else 0
    return [dims, len(blocks), *(n for block in blocks for side in block for ends in side for n in ends)]


def from_numbers(numbers: list[int]) -> tuple[Block, ...]:
    """Returns the blocks of `to_numbers`; numbers without a meaning may follow."""
    dims, count, *ends = numbers
    ranges = list(zip(ends[::2], ends[1::2], strict=False))
    sides = [tuple(ranges[i * dims : (i + 1) * dims]) for i in range(2 * count)]
    return tuple(Block(whole, here) for whole, here in zip(sides[::2], sides[1::2], strict=True))


def _slices(ranges: tuple[Range, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in ranges)
