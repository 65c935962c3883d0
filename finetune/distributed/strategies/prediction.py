"""Predictions of a strategy for a run that is not launched yet: memory of its fullest rank, and traffic of a step.

A ring of N ranks moves, on each of them, 2 (N - 1) / N of the bytes for an all-reduce, and (N - 1) / N for an
all-gather or a reduce-scatter. Source: Patarasuk and Yuan 2009; Rajbhandari et al. 2020 (ZeRO), section 7.
"""

from dataclasses import dataclass, field
from typing import Literal

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.param_specs import ParamSpecs, bytes_of, elements_of

Window = Literal["all", "backward", "last backward", "none"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

COLLECTIVES = ("c10d::", "gloo:", "nccl", "deepspeed_shm_comm")
"""Prefixes of operations that send, in a profile: torch's, gloo's, NCCL's kernels, DeepSpeed's in shared memory."""


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
        return f"{self.collective.replace('_', '-')} {self.of}"


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
