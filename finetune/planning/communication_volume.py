"""Predicts what a launch moves between ranks in a step, from the ring algorithms.

A ring of N ranks moves, on each of them, 2 (N - 1) / N of the bytes for an all-reduce, and (N - 1) / N for an
all-gather or a reduce-scatter. Source: Patarasuk and Yuan 2009; Rajbhandari et al. 2020 (ZeRO), section 7.
"""

import math
from dataclasses import dataclass
from typing import Literal

from finetune.distributed.launch.launch_config import Launch
from finetune.planning.activation_memory import shape_of
from finetune.planning.model_shapes import Variant, is_half
from finetune.planning.rank_memory import Outline, fitted

Window = Literal["all", "backward", "last backward", "none"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

COLLECTIVES = ("c10d::", "gloo:", "nccl", "deepspeed_shm_comm")
"""How operations that send begin in a profile: torch's, gloo's, NCCL's kernels, DeepSpeed's in shared memory."""

# DDP's default of bucket_cap_mb, in bytes.
_DDP_BUCKET = 25 * 2**20

# DeepSpeed's default of allgather_bucket_size, in elements. Source: https://www.deepspeed.ai/docs/config-json/
_ALLGATHER_BUCKET = 500_000_000


@dataclass(frozen=True)
class Flow:
    """Bytes that each rank sends, and receives, in an optimiser step."""

    collective: Collective
    of: str
    """What is moved."""
    nbytes: int
    ranks: int
    window: Window
    """What it can run beside: all of the step's arithmetic, its backward passes, the last of these, or nothing."""
    calls: int
    """Collectives that it is split into: each has its latency."""
    apart: int = 1
    """How far apart, in ranks, neighbours in the ring are: 1 if they follow each other."""

    @property
    def what(self) -> str:
        return f"{self.collective.replace('_', '-')} {self.of}"


def flows(launch: Launch, outline: Outline, accumulation: int) -> list[Flow]:
    """What a rank moves in a step, other than losses and norms.

    Frozen weights are gathered where they are cut, and never reduced.
    """
    ranks, apart = launch.averaged_ranks, launch.tensor
    if ranks == 1:
        return []
    weights = sum(w.nbytes for w in outline.weights)
    gradients = sum(4 * w.elements for w in outline.trained)
    ring = (ranks - 1) / ranks
    if launch.kind == "ddp":
        buckets = math.ceil(gradients / _DDP_BUCKET)
        return [Flow("all_reduce", "gradients", round(2 * ring * gradients), ranks, "last backward", buckets, apart)]
    if launch.uses_deepspeed:
        return _of_stages(launch, outline, accumulation, weights, gradients)
    units = outline.by_unit().values()
    trained = sum(any(w.group is not None for w in unit) for unit in units)
    cut = ranks // launch.replicate
    times = accumulation if launch.sync_each_batch else 1
    window: Window = "backward" if launch.sync_each_batch else "last backward"
    ring, gathers = (cut - 1) / cut, 2 if launch.reshard else 1
    gathered = round(gathers * accumulation * ring * weights)
    found = [
        Flow("all_gather", "weights", gathered, cut, "all", gathers * accumulation * len(units), apart),
        Flow("reduce_scatter", "gradients", round(times * ring * gradients), cut, window, times * trained, apart),
    ]
    if launch.replicate > 1:
        copies = launch.replicate
        moved = round(2 * (copies - 1) / copies * gradients / cut)
        found.append(Flow("all_reduce", "gradients", moved, copies, "last backward", trained, apart=cut))
    return found


def _of_stages(launch: Launch, outline: Outline, accumulation: int, weights: int, gradients: int) -> list[Flow]:
    """DeepSpeed's, whose buckets are counted in elements."""
    ranks = launch.averaged_ranks
    ring, section = (ranks - 1) / ranks, fitted(launch, outline)["zero_optimization"]
    reduced = math.ceil(gradients / 4 / int(section["reduce_bucket_size"]))
    if launch.kind == "zero3":
        gathered = round(2 * accumulation * ring * weights)
        reduced *= accumulation
        return [
            Flow("all_gather", "weights", gathered, ranks, "all", 2 * accumulation * len(outline.by_unit().values())),
            Flow("reduce_scatter", "gradients", round(accumulation * ring * gradients), ranks, "backward", reduced),
        ]
    # Stage 2 keeps shards of gradients only, so it reduces after each micro-batch.
    times: int = 1 if launch.kind == "zero1" else accumulation
    window: Window = "none" if launch.kind == "zero1" else "backward"
    back = math.ceil(gradients / 4 / int(section.get("allgather_bucket_size", _ALLGATHER_BUCKET)))
    return [
        Flow("reduce_scatter", "gradients", round(times * ring * gradients), ranks, window, times * reduced),
        Flow("all_gather", "weights", round(ring * gradients), ranks, "none", back),
    ]


def flows_of_rows(launch: Launch, variant: Variant, *, micro: int, checkpointed: bool, accumulation: int) -> list[Flow]:
    """What the ranks that share rows exchange around attention; a step waits for all of it.

    Queries, keys, values and what comes out, each there and back; where layers are recomputed, there once more. Keys
    and values have as many heads as there are ranks, at least.

    Args:
        micro: Rows of a micro-batch.
        checkpointed: Whether layers are recomputed in the backward pass.
    """
    parts, shape = launch.sequence, shape_of(variant)
    if parts == 1 or shape is None:
        return []
    heads = 2 * (shape.a + math.lcm(shape.k, parts))
    tokens = micro * variant.recipe.data.sequence_length // parts
    times = (3 if checkpointed else 2) * accumulation * shape.layers
    moved = times * tokens * heads * shape.d * (2 if is_half(variant.recipe) else 4) * (parts - 1) // parts
    return [Flow("all_to_all", "parts of rows", moved, parts, "none", 4 * times, apart=launch.tensor)]


def flows_of_layers(
    launch: Launch, variant: Variant, *, micro: int, checkpointed: bool, accumulation: int
) -> list[Flow]:
    """What the ranks that share layers sum, in fp32; a step waits for all of it.

    Outputs of attention and MLP, and gradients of their inputs; where layers are recomputed, attention's outputs once
    more (recomputing ends before an MLP's are summed). Where the head computes the loss, gradients of what it is given,
    of which each rank finds those of its tokens. At the end, gradients of what each rank has all of, but uses in a part
    of the layer, or for some tokens.

    Args:
        micro: Rows of a micro-batch.
        checkpointed: Whether layers are recomputed in the backward pass.
    """
    parts, shape = launch.tensor, shape_of(variant)
    if parts == 1 or shape is None:
        return []
    ring = 2 * (parts - 1) / parts
    tokens = micro * variant.recipe.data.sequence_length // launch.sequence
    calls = (5 if checkpointed else 4) * accumulation * shape.layers
    found = [Flow("all_reduce", "parts of layers", round(ring * calls * 4 * tokens * shape.h), parts, "none", calls)]
    if variant.loss_by_head:
        joined = round(ring / 2 * accumulation * 4 * tokens * shape.h)
        found.append(Flow("all_gather", "gradients of tokens", joined, parts, "none", accumulation))
    if partial := sum(4 * w.elements for w in variant.outline.trained if w.partial):
        held = partial / (launch.averaged_ranks if launch.uses_fsdp else 1)
        found.append(Flow("all_reduce", "gradients of parts", round(ring * held), parts, "none", 1))
    return found
