"""A number for the bits of each weight that a rank holds, computed on the device and compared over ranks.

Sums of bits read as whole numbers: equal bits give equal numbers, and others almost surely give others.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.distributed.parameter_info import local
from finetune.distributed.split_parameters import Splits
from finetune.distributed.state import state_transfer
from finetune.distributed.state.tensor_shards import Shard

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Held:
    """A tensor of which this rank holds a part."""

    name: str
    trained: bool
    place: int
    """A number for the part of the whole tensor: ranks with the same one hold the same part."""


def held_weights(
    trained: Iterable[tuple[str, Shard]], network: nn.Module, splits: Splits, rank: int, *, copies: bool
) -> Iterator[tuple[Held, torch.Tensor]]:
    """Yields what this rank holds of each weight, in the same order on every rank.

    Trained ones come as fp32 masters, and where the network computes with copies of them, as these too. Frozen weights
    that rest on the disk are left out.

    Args:
        trained: Shards of the trained parameters, as strategies read them.
        network: The network inside the prepared model, its weights sharded.
        copies: True if the network computes with copies of the masters.
    """
    for key, shard in trained:
        name = key.removeprefix(f"{state_transfer.PARAMETER}/")
        yield Held(name, True, _number([block.whole for block in shard.blocks])), shard.local
    parameter: Any
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and not copies:
            continue
        here: Any = getattr(parameter, "ds_tensor", None)
        if here is None:
            # This rank's positions among those that split the layer, and in each mesh dimension that shards it.
            at = [splits.group.rank if splits.group is not None and name in splits.parameters else 0]
            if hasattr(parameter, "device_mesh"):
                position = parameter.device_mesh.get_coordinate() or ()
                at += [n for n, placement in zip(position, parameter.placements, strict=True) if placement.is_shard()]
            yield Held(name, parameter.requires_grad, _number(at)), local(parameter)
        elif here.status.name == "AVAILABLE":
            yield Held(name, False, _number([rank])), here


def _number(parts: Any) -> int:
    return zlib.crc32(repr(parts).encode())


@torch.no_grad()
def digest_weight(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a number for the bits of a tensor, a scalar in int64 on the device."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64).to(device)
