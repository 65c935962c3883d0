"""A number for the bits of each weight that a rank holds, computed on the device and compared over ranks.

Sums of bits read as whole numbers: equal bits give equal numbers, and others almost surely give others.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.state import state_transfer
from finetune.distributed.state.tensor_shards import local
from finetune.distributed.strategies.tensor import Splits

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Held:
    """A tensor of which this rank holds a part."""

    name: str
    trained: bool
    place: int
    """Which part of the whole tensor, as a number: ranks with the same one hold the same part."""


def held_weights(
    launch: Launch, network: nn.Module, optimizer: Any, splits: Splits, rank: int
) -> Iterator[tuple[Held, torch.Tensor]]:
    """What this rank holds of each weight, one at a time, in the same order on every rank: trained ones as masters in
    fp32, and where ZeRO-1 and 2 compute with copies of them, these too.

    Frozen weights that rest on the disk are left out.

    Args:
        network: The network inside the prepared model, its weights sharded (`state_transfer.reshard`).
    """
    for key, shard in state_transfer.read(launch, network, optimizer, splits, parameters_only=True):
        name = key.removeprefix(f"{state_transfer.PARAMETER}/")
        yield Held(name, True, _number([block.whole for block in shard.blocks])), shard.local
    copies = launch.uses_deepspeed and launch.kind != "zero3"
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and not copies:
            continue
        here = getattr(parameter, "ds_tensor", None)
        if here is None:
            part = rank % launch.tensor if name in splits.parameters else 0
            yield Held(name, parameter.requires_grad, _number([part, *_sharded_at(parameter)])), local(parameter)
        elif here.status.name == "AVAILABLE":
            yield Held(name, False, _number([rank])), here


def _sharded_at(parameter: Any) -> list[int]:
    """This rank's position in each dimension of the mesh along which a parameter is sharded."""
    if not hasattr(parameter, "device_mesh"):
        return []
    position = parameter.device_mesh.get_coordinate() or ()
    return [at for at, placement in zip(position, parameter.placements, strict=True) if placement.is_shard()]


def _number(parts: Any) -> int:
    return zlib.crc32(repr(parts).encode())


@torch.no_grad()
def digest_weight(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A number for the bits of a tensor, a scalar in int64 on the device."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64).to(device)
