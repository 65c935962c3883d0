"""Splits of a network's parameters over the ranks of a tensor-parallel group."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from finetune.distributed.mesh import Group


@dataclass(frozen=True)
class Split:
    """The way a parameter is split over the ranks of a group."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int
    blocks: int = 1
    """Parts of it, one behind the other, of which each is split: an MLP's gate and up projection may be one tensor."""
    packed: int | None = None
    """Weights that the whole parameter stands for, if it is packed; `shape` is that in which it can be split then."""

    def part_shape(self, size: int) -> tuple[int, ...]:
        """Returns the shape of a rank's part."""
        return tuple(n // size if dim == self.dim else n for dim, n in enumerate(self.shape))

    def indices(self, size: int, rank: int) -> list[tuple[int, int]]:
        """Returns where a rank's parts, stored one behind the other, lie in the whole dimension: first, last + 1."""
        whole = self.shape[self.dim] // self.blocks
        length = whole // size
        return [(block * whole + rank * length, block * whole + (rank + 1) * length) for block in range(self.blocks)]

    def part_of(self, whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        """Returns a rank's part of a whole tensor, in memory of its own."""
        parts = [whole.narrow(self.dim, first, last - first) for first, last in self.indices(size, rank)]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Splits:
    """Split parameters of a network; empty where nothing is split."""

    parameters: Mapping[str, Split] = field(default_factory=dict)
    """Split parameters by name."""
    partial: frozenset[str] = frozenset()
    """Parameters that each rank has all of, but uses in a part of the layer, or for some tokens: gradients are to be
    summed."""
    group: Group | None = None
    """The ranks that share the layers; None where nothing is split, or only planned to be."""

    def size(self, name: str, parameter: Any) -> int:
        """Returns the elements of a whole parameter; weights that a packed one stands for are counted elsewhere."""
        split = self.parameters.get(name)
        return math.prod(split.shape) if split is not None else int(getattr(parameter, "ds_numel", parameter.numel()))


UNSPLIT = Splits()
