"""The norm of all gradients over all ranks."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from finetune.distributed.split_parameters import Splits
from finetune.distributed.strategies import tensor
from finetune.distributed.tensor_facts import inner_name


def total_norm(model: nn.Module, splits: Splits, device: torch.device) -> torch.Tensor:
    """Returns the norm of a model's gradients over all ranks, a scalar in fp32; every rank must call it."""
    gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if splits.group is None:
        return _total_square((gradient for _, gradient in gradients), device).sqrt().float()
    counted = (gradient for name, gradient in gradients if tensor.counts_in_norm(splits, inner_name(name)))
    square = _total_square(counted, device)
    torch.distributed.all_reduce(square, group=splits.group.handle)
    return square.sqrt().float()


@torch.no_grad()
def _total_square(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the sum of all gradients' squares over the ranks that shard them, a scalar in fp64."""
    here: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            summed = tuple(Partial() if place.is_shard() else place for place in gradient.placements)
            here[gradient.device_mesh, summed].append(gradient.to_local())
        else:
            here[()].append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for where, tensors in here.items():
        square = _square(tensors)
        total += (DTensor.from_local(square, *where).full_tensor() if where else square).to(device)
    return total


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of all squares, in fp64.

    On CPUs torch 2.13 adds squares one after the other in fp32: of nine million values the norm is 3e-4 too small, and
    that of each rank's shards by another share. So it adds those of a row only.
    """
    if tensors[0].device.type != "cpu":
        return nn.utils.get_total_norm(tensors).double().square()
    rows = (torch.linalg.vector_norm(tensor, dim=-1) if tensor.ndim > 1 else tensor for tensor in tensors)
    return torch.stack([torch.linalg.vector_norm(row, dtype=torch.float64) for row in rows]).square().sum()
