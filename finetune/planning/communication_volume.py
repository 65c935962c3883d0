"""Predicts what ranks that share rows or layers exchange in a step; for the rest see `strategies/prediction.py`."""

import math

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.param_specs import elements_of
from finetune.distributed.strategies.prediction import Flow
from finetune.planning.activation_memory import StepSetting, shape_of
from finetune.planning.model_shapes import Variant, is_half

COLLECTIVES = ("c10d::", "gloo:", "nccl", "deepspeed_shm_comm")
"""Prefixes of operations that send, in a profile: torch's, gloo's, NCCL's kernels, DeepSpeed's in shared memory."""


def flows_of_rows(launch: Launch, variant: Variant, setting: StepSetting, accumulation: int) -> list[Flow]:
    """Returns what the ranks that share rows exchange around attention; a step waits for all of it.

    Queries, keys, values and what comes out, each there and back; where layers are recomputed, there once more. Keys
    and values have as many heads as there are ranks, at least.
    """
    parts, shape = launch.sequence, shape_of(variant)
    if parts == 1 or shape is None:
        return []
    heads = 2 * (shape.a + math.lcm(shape.k, parts))
    tokens = setting.micro * variant.recipe.data.sequence_length // parts
    times = (3 if setting.checkpointed else 2) * accumulation * shape.layers
    moved = times * tokens * heads * shape.d * (2 if is_half(variant.recipe) else 4) * (parts - 1) // parts
    return [Flow("all_to_all", "parts of rows", moved, parts, "none", 4 * times, apart=launch.tensor)]


def flows_of_layers(launch: Launch, variant: Variant, setting: StepSetting, accumulation: int) -> list[Flow]:
    """Returns what the ranks that share layers sum, in fp32; a step waits for all of it.

    Outputs of attention and MLP, and gradients of their inputs; where layers are recomputed, attention's outputs once
    more (recomputing ends before an MLP's are summed). Where the head computes the loss, gradients of what it is given,
    of which each rank finds those of its tokens. At the end, gradients of what each rank has all of, but uses in a part
    of the layer, or for some tokens.
    """
    parts, shape = launch.tensor, shape_of(variant)
    if parts == 1 or shape is None:
        return []
    ring = 2 * (parts - 1) / parts
    tokens = setting.micro * variant.recipe.data.sequence_length // launch.sequence
    calls = (5 if setting.checkpointed else 4) * accumulation * shape.layers
    found = [Flow("all_reduce", "parts of layers", round(ring * calls * 4 * tokens * shape.h), parts, "none", calls)]
    if variant.loss_by_head:
        joined = round(ring / 2 * accumulation * 4 * tokens * shape.h)
        found.append(Flow("all_gather", "gradients of tokens", joined, parts, "none", accumulation))
    if partial := 4 * elements_of(p for p in variant.specs.trained if p.partial):
        held = partial / (launch.averaged_ranks if launch.sharded else 1)
        found.append(Flow("all_reduce", "gradients of parts", round(ring * held), parts, "none", 1))
    return found
