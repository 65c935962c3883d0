"""Predicts what a backend holds for a while: gathered weights, and gradients being reduced.

Read off the sources of torch 2.13, accelerate 1.15 and deepspeed 0.19, and compared with launched runs on CPUs
(`docs/plan-accuracy.md`). Without a GPU, gloo copies what it gathers and what it scatters; NCCL does not.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from finetune.distributed.launch.launch_config import Launch
from finetune.planning.rank_memory import Outline, Weight, fitted, keeps_gradients, shards

Device = Literal["cuda", "cpu"]

# DeepSpeed's defaults. Source: https://www.deepspeed.ai/docs/config-json/
_MAX_LIVE, _REUSE, _PREFETCH, _SUB_GROUP = 1_000_000_000, 1_000_000_000, 50_000_000, 1_000_000_000


@dataclass(frozen=True)
class TransientMemory:
    """Bytes on the device, by the moments of a step."""

    begins: int = 0
    """Weights of other ranks when the forward pass begins."""
    last_layer: int = 0
    """The same when it comes to its last layer."""
    scores: int = 0
    """The same while the loss is computed."""
    returns: int = 0
    """The same while the gradient of the loss is."""
    backward: int = 0
    """The same while layers run backwards."""
    products: int = 0
    """Gradients on their way while a layer's last product runs backwards, which is the first of its own."""
    buckets: int = 0
    """The same when all of a layer has run."""
    kept: int = 0
    """Buckets that stay from step to step."""
    steps: int = 0
    """Copies while the optimiser steps."""


def transient_memory(launch: Launch, outline: Outline, *, accumulation: int, device: Device) -> TransientMemory:
    """What a backend adds to what a rank holds from step to step.

    Args:
        accumulation: Micro-batches a step and process.
        device: Where it runs; on "cpu" with gloo.
    """
    largest = max((4 * w.elements for w in outline.trained), default=0)
    if launch.num_processes == 1 and launch.offload_params == "none":
        # A gradient is made whole before it is added to the one that is there.
        return _buckets(largest if accumulation > 1 else 0)
    if launch.uses_fsdp:
        return _fsdp(launch, outline, device)
    if launch.kind == "zero3":
        return _zero3(launch, outline, device)
    if launch.uses_deepspeed:
        return _zero2(launch, outline, device)
    # Gradients are views of DDP's buckets, and new ones are copied there.
    return _buckets(largest)


def keeps_inputs_whole(launch: Launch) -> bool:
    """Whether linear modules keep their inputs as they are given, and no 16-bit copies of these or of weights.

    DeepSpeed puts its own in place of torch's for stage 3, which casts again in the backward pass
    (`memory_efficient_linear`; `LinearFunctionForZeroStage3` in `runtime/zero/linear.py`).
    """
    return launch.kind == "zero3" and launch.ds_config["zero_optimization"].get("memory_efficient_linear", True)


def late_gradients(launch: Launch, outline: Outline) -> int:
    """Bytes of gradients that are not there before the first layer's last product has run backwards.

    Where all of them lie in one tensor, or stay from step to step, there are none such.
    """
    if launch.uses_deepspeed or keeps_gradients(launch):
        return 0
    units = outline.by_unit()
    names = {next((n for n in units if n not in ("", outline.embedding, outline.head)), "")}
    # A gradient of an embedding that is the head's weight too is there from the beginning.
    names |= {outline.embedding} - {outline.head}
    late = 4 * sum(w.elements for name in names for w in units.get(name, []) if w.group is not None)
    return late // shards(launch)


def _buckets(size: int) -> TransientMemory:
    return TransientMemory(products=size, buckets=size)


def early_gradients(launch: Launch, outline: Outline, gradients: int) -> int:
    """Bytes of gradients that are there when the first layer runs backwards.

    Args:
        gradients: Bytes of all, as they are held when there are most.
    """
    if launch.uses_deepspeed:
        # They lie in one tensor.
        return gradients
    own = 4 * sum(w.elements for w in outline.by_unit().get(outline.head, []) if w.group is not None)
    return min(gradients, own // shards(launch))


def _fsdp(launch: Launch, outline: Outline, device: Device) -> TransientMemory:
    """FSDP2 gathers into one tensor, copies weights out of it, and keeps it until the next unit is copied out.

    In the backward pass the next unit is gathered while one computes, and the last one's gradients are still being
    scattered while this one's are made. Accelerate never frees the head's unit between the passes.
    Source: torch, `FSDPParamGroup.wait_for_unshard` and `post_backward`; accelerate, `fsdp2_prepare_model`.
    """
    sizes = {name: _bytes(unit) for name, unit in outline.by_unit().items()}
    # What is in no unit of its own is gathered with the head, or with the root.
    rest = sizes.pop("", 0)
    head = sizes.pop(outline.head, 0) if outline.head else 0
    tail, layers = head + rest, list(sizes.values()) or [0]
    # An embedding that is the head's weight too, or what the root has, is there from the beginning.
    apart = _own_head(outline)
    early = 0 if apart else tail
    pairs = list(zip(layers, layers[1:] if early else [*layers[1:], tail], strict=False)) or [(0, layers[0])]
    forward, backward = max(a + 2 * b for a, b in pairs) + early, max(a + b for a, b in pairs) + early
    scores, returns = (early + layers[-1] if early else 2 * tail), tail
    if not launch.reshard:
        every = sum(layers) + tail
        forward, scores, returns, backward = every + max(layers), every + tail, every, every
    # As they run backwards: a unit's gradients are scattered while the next one's are made.
    embeddings_and_head = [apart, ""] if apart else [""]
    units = outline.by_unit()
    order = [[w for name in embeddings_and_head for w in units.get(name, [])]]
    order += [unit for name, unit in reversed(units.items()) if name not in embeddings_and_head]
    made = [[4 * w.elements for w in unit if w.group is not None] for unit in order]
    steps = list(zip(made, made[1:], order[1:], strict=False)) or [([], made[0], order[0])]
    products = max(sum(last) + max(own, default=0) for last, own, _ in steps)
    # gloo's copy of a unit is gone before this unit's gradients are there.
    copied = max(sum(last) + _bytes(unit) for last, _, unit in steps) if device == "cpu" and launch.reshard else 0
    return TransientMemory(
        begins=forward,
        last_layer=forward,
        scores=scores,
        returns=returns,
        backward=backward,
        products=products,
        buckets=max(copied, *(sum(last) + sum(own) for last, own, _ in steps)),
    )


def _zero2(launch: Launch, outline: Outline, device: Device) -> TransientMemory:
    """Buckets are there for the backward pass only; a gradient is made whole before it is copied there.

    Sources: https://www.deepspeed.ai/docs/config-json/ (`overlap_comm` doubles them), `stage_1_and_2.py`.
    """
    section = fitted(launch, outline)["zero_optimization"]
    buckets = 4 * int(section["reduce_bucket_size"]) * (2 if section.get("overlap_comm") else 1)
    groups: dict[int | None, int] = {}
    for weight in outline.trained:
        groups[weight.group] = groups.get(weight.group, 0) + weight.nbytes
    # gloo copies a group's new weights as it gathers them.
    steps = max(groups.values(), default=0) if device == "cpu" else 0
    return replace(_buckets(buckets + max((4 * w.elements for w in outline.trained), default=0)), steps=steps)


def _zero3(launch: Launch, outline: Outline, device: Device) -> TransientMemory:
    """Stage 3 runs ahead as the forward pass begins, at every module by another bucket, and frees what has run,
    but for what the backward pass needs again within a distance, counted in elements that are used between.

    In the backward pass other weights are gathered as they are needed. The optimiser steps a copy of the gradients.
    Source: deepspeed, `_fetch_sub_module_impl` and `__params_to_release` in `partitioned_param_coordinator.py`;
    `reduce_scatter_coalesced`; `_prepare_fp32_grad_for_sub_group` in `stage3.py`.
    """
    section = fitted(launch, outline)["zero_optimization"]
    bucket = 4 * int(section["reduce_bucket_size"])
    units = outline.by_unit()
    whole, elements = _bytes(outline.weights), sum(w.elements for w in outline.weights)
    live = round(whole * min(1.0, int(section.get("stage3_max_live_parameters", _MAX_LIVE)) / elements))
    largest = max(w.nbytes for w in outline.weights)
    ahead = min(whole, 4 * int(section.get("stage3_prefetch_bucket_size", _PREFETCH)))
    held, distance = 0, 0
    for weight in reversed(outline.weights):
        if distance < int(section.get("stage3_max_reuse_distance", _REUSE)):
            held += weight.nbytes
        distance += 2 * weight.elements
    scores = max(held, min(live, _bytes(units.get(outline.head, [])) + ahead))
    # Without the head, which is first to run backwards, and freed unless it looks tokens up as well.
    apart = _own_head(outline)
    own = _bytes(units[apart]) if apart else 0
    gradients = [4 * w.elements for w in outline.trained]
    # A bucket goes when it is full: all of an adapter's may fit in one.
    gradient = max(min(bucket, sum(gradients)), max(gradients, default=0))
    masters = math.ceil(sum(w.elements for w in outline.trained) / launch.averaged_ranks)
    return TransientMemory(
        begins=live + (max(map(_bytes, units.values())) if device == "cpu" else 0),
        last_layer=max(held, min(live, scores + largest)),
        scores=scores,
        returns=scores,
        backward=max(held - own, min(live, whole - own, scores + largest)),
        products=gradient * (2 if device == "cpu" else 1),
        buckets=gradient * (2 if device == "cpu" else 1),
        kept=bucket,
        steps=4 * min(masters, int(section.get("sub_group_size", _SUB_GROUP))),
    )


def _own_head(outline: Outline) -> str:
    """The unit of a head that does not look tokens up as well; "" if there is none."""
    return outline.head if outline.head != outline.embedding else ""


def _bytes(weights: list[Weight] | tuple[Weight, ...]) -> int:
    return sum(w.nbytes for w in weights)
