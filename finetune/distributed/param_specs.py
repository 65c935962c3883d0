"""Parameters of a network that is not built yet, as far as they decide what a strategy holds and sends."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from finetune.distributed.split_parameters import Split


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as it is held."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes an element: quantized weights lie in fp32."""
    group: int | None
    """The optimiser's group that it is in; None if it is not trained."""
    unit: str
    """What it is gathered with: a layer, the embedding or the head, or "" for the rest."""
    multiplied: bool
    """True if autocast makes a copy of it in 16 bit."""
    packed: int = 0
    """How many weights it stands for, if they are packed: they are read back for each product."""
    split: Split | None = None
    """How it is split over the ranks of a tensor-parallel group, if it is where there are such groups."""
    partial: bool = False
    """True if these ranks each hold all of it, and its gradients are to be summed over them."""

    def part(self, size: int) -> "ParamSpec":
        """Returns what each of `size` ranks that split its layer holds of it."""
        if self.split is None:
            return self
        shape = (self.shape[0] // size, *self.shape[1:]) if self.packed else self.split.part_shape(size)
        return replace(self, shape=shape, packed=self.packed // size, split=None)

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class ParamSpecs:
    """The parameters of a network, in its order."""

    params: tuple[ParamSpec, ...]
    rest: int
    """Bytes that every rank holds whole: buffers, and the scales of quantized weights."""
    width: int
    embedding: str = ""
    """The unit of the embedding; "" if it is in no unit of its own."""
    head: str = ""
    """The unit of the head, likewise."""

    @cached_property
    def trained(self) -> list[ParamSpec]:
        return [p for p in self.params if p.group is not None]

    @cached_property
    def frozen(self) -> list[ParamSpec]:
        return [p for p in self.params if p.group is None]

    @cached_property
    def units(self) -> dict[str, list[ParamSpec]]:
        """Parameters by what is gathered at a time."""
        found: dict[str, list[ParamSpec]] = {}
        for param in self.params:
            found.setdefault(param.unit, []).append(param)
        return found

    @property
    def head_alone(self) -> int:
        """Bytes of the unit of a head that is not the embedding too."""
        return bytes_of(self.units[self.head]) if self.head not in ("", self.embedding) else 0

    @property
    def largest_gradient(self) -> int:
        """Bytes of the largest parameter's gradient, whole."""
        return max((4 * p.elements for p in self.trained), default=0)


def elements_of(params: Iterable[ParamSpec]) -> int:
    """Elements of some parameters."""
    return sum(p.elements for p in params)


def bytes_of(params: Iterable[ParamSpec]) -> int:
    """Bytes of some parameters."""
    return sum(p.nbytes for p in params)
