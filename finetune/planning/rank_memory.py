"""Predicts what a rank holds from step to step, from the shapes of a network alone.

Its counterpart, `held_memory.py`, reads the same four figures back from what runs.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from finetune.distributed.held_memory import Memory
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.split_parameters import UNSPLIT, Split, Splits
from finetune.distributed.strategies.deepspeed_config import PERSISTENCE_THRESHOLD, fit_to_model
from finetune.distributed.tensor_facts import width_of
from finetune.models.module_matching import embeddings_and_head
from finetune.utils.compat.accelerate_private import unsplit_classes


@dataclass(frozen=True)
class Weight:
    """A parameter as it is held."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes an element: quantized weights lie in fp32."""
    group: int | None
    """The optimiser's group that it is in; None if it is not trained."""
    unit: str
    """What it is gathered with: a layer, an end of the network, or the rest."""
    multiplied: bool
    """Whether autocast makes a copy of it in 16 bit."""
    packed: int = 0
    """How many weights it stands for, if they are packed: they are read back for each product."""
    split: Split | None = None
    """How it is split over the ranks of a tensor-parallel group, if it is where there are such groups."""
    partial: bool = False
    """Whether these ranks each hold all of it, and its gradients are to be summed over them."""

    def part(self, size: int) -> "Weight":
        """What each of so many ranks has of it that split layers among them."""
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
class Outline:
    """What of a network decides how a backend holds it."""

    weights: tuple[Weight, ...]
    rest: int
    """Bytes that every rank holds whole: buffers, and the scales of quantized weights."""
    width: int
    embedding: str = ""
    """The unit of what looks tokens up, and of what scores them; "" if these are in no unit of their own."""
    head: str = ""

    @cached_property
    def trained(self) -> list[Weight]:
        return [w for w in self.weights if w.group is not None]

    def by_unit(self) -> dict[str, list[Weight]]:
        """Weights by what is gathered at a time, in the order of the network."""
        found: dict[str, list[Weight]] = {}
        for weight in self.weights:
            found.setdefault(weight.unit, []).append(weight)
        return found


def outline(model: Any, groups: Sequence[dict[str, Any]], scales: int = 0, splits: Splits = UNSPLIT) -> Outline:
    """Reads an outline off a network on the meta device.

    Args:
        model: The `ForwardWrapper` around the network.
        groups: The optimiser's.
        scales: Bytes of the scales of quantized weights that are no buffers.
        splits: How its layers are split where they are.
    """
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    both = embeddings_and_head(model)
    unit_of: dict[int, str] = {}
    plain: set[int] = set()
    for name, module in model.named_modules():
        layer = type(module).__name__ in unsplit_classes(model)
        if layer or module in both:
            for parameter in module.parameters():
                unit_of.setdefault(id(parameter), name)
        if isinstance(module, nn.Embedding):
            plain |= {id(p) for p in module.parameters(recurse=False)}
    head = both[1]
    plain -= {id(p) for p in head.parameters()} if head is not None else set()
    weights = tuple(
        Weight(
            tuple(p.shape),
            p.element_size(),
            group_of.get(id(p)),
            unit_of.get(id(p), ""),
            p.ndim >= 2 and id(p) not in plain and not hasattr(p, "packed_weights"),
            int(getattr(p, "packed_weights", 0)),
            splits.parameters.get(name.removeprefix("network.")),
            name.removeprefix("network.") in splits.partial,
        )
        for name, p in model.named_parameters()
    )
    # A head may be without weights of its own, such as one that a task adds.
    units = [unit_of.get(id(next(iter(end.parameters()), None)), "") if end is not None else "" for end in both]
    return Outline(weights, scales + sum(b.nbytes for b in model.buffers()), width_of(model), *units)


def state(
    launch: Launch, outline: Outline, *, accumulation: int, state_bytes: float, gradient_bytes: int = 4
) -> Memory:
    """The bytes that a rank holds from step to step: the fullest one, where shards are uneven.

    Args:
        accumulation: Micro-batches a step and process.
        state_bytes: That the optimiser keeps for an element.
        gradient_bytes: An element; this toolkit sums gradients in fp32, the ZeRO paper in 2 bytes.
    """
    frozen = [w for w in outline.weights if w.group is None]
    trained = outline.trained
    held_trained, masters = sum(_held(launch, outline, trained)), sum(_part(launch, w) for w in trained)
    if launch.kind in ("zero1", "zero2"):
        masters = sum(_partitions(launch.averaged_ranks, trained))
        # Weights of a group are views of one tensor, padded.
        held_trained = sum(w.nbytes for w in trained) + _padding(launch.averaged_ranks, trained)
    whole = sum(w.elements for w in trained)
    if not launch.holds_whole_gradients(accumulation):
        whole = masters
    return Memory(
        frozen=sum(_held(launch, outline, frozen)) + outline.rest,
        trained=held_trained + (4 * masters if launch.uses_deepspeed else 0),
        gradients=gradient_bytes * whole,
        optimizer=round(state_bytes * masters),
    )


def places(launch: Launch, memory: Memory, accumulation: int) -> dict[str, int]:
    """Where that rests: bytes on the device, in host memory and on disk."""
    found = {"none": 0, "cpu": 0, "nvme": 0}
    found[launch.offload_params] += memory.frozen + memory.trained
    found[launch.offload_optimizer] += memory.optimizer
    found["none" if adds_on_device(launch, accumulation) else launch.offload_optimizer] += memory.gradients
    return {"device": found["none"], "host": found["cpu"], "disk": found["nvme"]}


def adds_on_device(launch: Launch, accumulation: int) -> bool:
    """Whether gradients add up on the device: FSDP2 offloads only those that it has reduce-scattered."""
    whole = launch.uses_fsdp and launch.holds_whole_gradients(accumulation)
    return whole or launch.offload_optimizer == "none"


def casts_weights(launch: Launch) -> bool:
    """Whether the launch asks for the lighter way, weights in 16 bit, which is not forecast."""
    lighter = [(launch.ds_config.get(name) or {}).get("enabled") is True for name in ("bf16", "fp16")]
    return launch.mixed_precision in ("bf16", "fp16") or any(lighter)


def keeps_gradients(launch: Launch) -> bool:
    """Whether gradients' memory stays from step to step: DDP's buckets do, and what stage 3 sums up in."""
    return launch.kind in ("ddp", "zero3")


def steps_on_host(launch: Launch) -> bool:
    """Whether DeepSpeed's own optimiser steps in place of the recipe's."""
    return launch.uses_deepspeed and launch.offload_optimizer != "none"


def fitted(launch: Launch, outline: Outline) -> dict[str, Any]:
    """DeepSpeed's config with the sizes that depend on the model, and its default of a size that is always needed.

    Source: `DeepSpeedZeroConfig`, `reduce_bucket_size`.
    """
    config = copy.deepcopy(launch.ds_config)
    config["zero_optimization"].setdefault("reduce_bucket_size", 500_000_000)
    sizes = [w.elements for w in outline.weights]
    # What the recipe fills in plays no part in sizes.
    zero = {"zero_optimization": config["zero_optimization"]}
    fit_to_model(zero, hidden_size=outline.width, parameter_sizes=sizes)
    return zero


def shards(launch: Launch) -> int:
    """Ranks that hold a copy of the weights among them."""
    return launch.averaged_ranks // launch.replicate if launch.sharded else 1


def _part(launch: Launch, weight: Weight) -> int:
    """Elements of a weight that the fullest rank holds."""
    if launch.kind == "zero3":
        return math.ceil(weight.elements / launch.averaged_ranks)
    if launch.uses_fsdp:
        # Along the first side, as torch.chunk cuts it.
        rows = weight.shape[0]
        return math.ceil(rows / shards(launch)) * (weight.elements // max(1, rows))
    return weight.elements


def _held(launch: Launch, outline: Outline, weights: Iterable[Weight]) -> Iterable[int]:
    whole = -1
    if launch.kind == "zero3":
        whole = int(
            fitted(launch, outline)["zero_optimization"].get(
                "stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD
            )
        )
    for weight in weights:
        # Small ones are held whole as well.
        yield _part(launch, weight) * weight.itemsize + (weight.nbytes if weight.elements <= whole else 0)


def _groups(weights: Iterable[Weight]) -> list[list[Weight]]:
    found: dict[int | None, list[Weight]] = {}
    for weight in weights:
        found.setdefault(weight.group, []).append(weight)
    return list(found.values())


def _partitions(ranks: int, trained: Iterable[Weight]) -> Iterable[int]:
    """Elements of each group's flat tensor on a rank.

    Padded to two elements a rank. Source: deepspeed 0.19, `nccl_start_alignment_factor` in
    `runtime/zero/stage_1_and_2.py`.
    """
    for group in _groups(trained):
        yield 2 * math.ceil(sum(w.elements for w in group) / (2 * ranks))


def _padding(ranks: int, trained: Sequence[Weight]) -> int:
    padded = zip(_partitions(ranks, trained), _groups(trained), strict=True)
    return sum((part * ranks - sum(w.elements for w in group)) * group[0].itemsize for part, group in padded)
