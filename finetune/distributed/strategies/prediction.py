"""Predictions of a strategy for a network that is not built yet: memory of its fullest rank, and traffic of a step.

A ring of N ranks moves, on each of them, 2 (N - 1) / N of the bytes for an all-reduce, and (N - 1) / N for an
all-gather or a reduce-scatter. Source: Patarasuk and Yuan 2009; Rajbhandari et al. 2020 (ZeRO), section 7.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.split_parameters import Split

Window = Literal["all", "backward", "last backward", "none"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "host_copy", "host_step", "disk"]
"""What moves bytes: ranks, by a collective; a rank to and from its host; its optimiser on the host; a disk."""

COLLECTIVES = ("c10d::", "gloo:", "nccl", "deepspeed_shm_comm")
"""Prefixes of operations that send, in a profile: torch's, gloo's, NCCL's kernels, DeepSpeed's in shared memory."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as it is held."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes an element: quantized weights lie in fp32."""
    group: int | None
    """The optimiser's group that it is in; None if it is not trained."""
    unit: str
    """Unit that it is gathered with: a layer, the embedding or the head, or "" for the rest."""
    multiplied: bool
    """True if autocast makes a copy of it in 16 bit."""
    whole: bool = False
    """True if FSDP2 cannot cut it (`parameter_info.held_whole`)."""
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
        by_unit: dict[str, list[ParamSpec]] = {}
        for param in self.params:
            by_unit.setdefault(param.unit, []).append(param)
        return by_unit

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


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Bytes of other ranks' weights on the device, at the fullest moment of each part of a step."""

    forward: int = 0
    loss: int = 0
    loss_gradient: int = 0
    backward: int = 0


@dataclass(frozen=True, kw_only=True)
class Share:
    """The fullest rank's share of a network; bytes, unless said otherwise."""

    frozen: int
    """Frozen weights, buffers and scales."""
    trained: int
    """Trained weights, and their fp32 master weights where these are apart."""
    masters: int = 0
    """Of those, fp32 master weights apart, which rest where the optimiser's state does."""
    stepped: int
    """Elements that its optimiser steps."""
    summed: int
    """Elements of gradients, at their most."""
    gradients_from: Literal["step", "backward", "layers"] = "layers"
    """Time from which gradients take memory: always, from the backward pass on, or as layers have run backwards."""
    gradients_rest: str = "none"
    """Place where gradients rest: none, cpu or nvme, as of `Launch`."""
    gathered: Gathered = field(default_factory=Gathered)
    in_flight: int = 0
    """Whole gradients, and buckets, while layers run backwards."""
    buckets: int = 0
    """Buckets that stay from step to step."""
    keeps_inputs: bool = False
    """True if linear modules keep their inputs as they are given, and no 16-bit copies of these or of weights."""


@dataclass(frozen=True)
class Flow:
    """Bytes that each rank sends, and receives, in an optimiser step."""

    collective: Collective
    of: str
    """The tensors that are moved."""
    nbytes: int
    ranks: int
    window: Window
    """Part of the step beside which it can run: all arithmetic, backward passes, the last of these, or none."""
    calls: int
    """Collectives that it is split into: each has its latency."""
    apart: int = 1
    """Distance of neighbours in the ring, in ranks: 1 if they follow each other."""

    @property
    def what(self) -> str:
        return f"{self.collective.replace('_', '-')} {self.of}" if self.ranks > 1 else self.of


def predict_whole_share(launch: Launch, specs: ParamSpecs, accumulation: int) -> Share:
    """Returns the share of a rank that holds all of a network."""
    elements = elements_of(specs.trained)
    return Share(
        frozen=bytes_of(specs.frozen) + specs.rest,
        trained=bytes_of(specs.trained),
        stepped=elements,
        summed=elements,
        # A gradient is made whole before it is added to the one that is there.
        in_flight=specs.largest_gradient if accumulation > 1 else 0,
    )
