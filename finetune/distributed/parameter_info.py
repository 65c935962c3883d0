"""Facts that are read off parameters: names, dtypes, and the share of them that lies on this rank."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from finetune.distributed.split_parameters import Splits

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in recipes and launch files."""


def local(tensor: Any) -> torch.Tensor:
    """Returns this rank's part of a tensor, in place."""
    here: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here


def held_whole(parameter: Any) -> bool:
    """Returns whether FSDP2 cannot cut a parameter: one without dimensions, or of whole numbers."""
    return not parameter.ndim or not (parameter.is_floating_point() or parameter.is_complex())


def width_of(model: Any) -> int:
    """Returns the hidden size of a model: from its config, else the largest side of its matrices."""
    config = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or getattr(config, "n_embd", None)
    if width is not None:
        return int(width)
    shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in model.parameters()]
    return max((side for shape in shapes if len(shape) >= 2 for side in shape), default=64)


def inner_name(name: str) -> str:
    """Returns a parameter's name in the network inside a prepared model."""
    return name.partition("network.")[2] or name


def short_dtype(dtype: torch.dtype) -> str:
    """Returns a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def dtypes_of(tensors: Iterable[Any]) -> tuple[str, ...]:
    """Returns the names of the dtypes of some tensors."""
    return tuple(sorted({short_dtype(tensor.dtype) for tensor in tensors}))


SHARD_SLACK = 0.03
"""A rank may hold this much more than its share: padding, and parameters too small to be worth sharding."""


def off_share(num_parameters: int, want: float, have: float) -> bool:
    """Returns whether a rank's share is not the one that was asked for.

    A model of a few thousand parameters cannot be sharded evenly; it must only not be held whole.
    """
    tiny = num_parameters < 10_000 and want < 1.0 and have < 1.0
    return abs(want - have) > SHARD_SLACK and not tiny


def held_bytes(parameter: Any) -> int:
    """Returns the bytes that this rank holds of a parameter: its part, or DeepSpeed's shard and whole copy."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return local(parameter).nbytes
    # Small ones stay whole once training has needed them, which it may not have yet.
    whole = parameter.ds_numel * parameter.element_size() if parameter.ds_persist else parameter.nbytes
    return int(shard.ds_numel * shard.element_size()) + int(whole)


def fraction(tensors: list[Any], whole: Mapping[int, int]) -> float:
    """Returns the share of some parameters that lies here, by the elements of each whole one, by its identity."""
    here: int = sum(local(t).numel() for t in tensors)
    return here / max(1, sum(whole[id(t)] for t in tensors))


def read_parameters(model: Any, optimizer: Any, splits: Splits) -> tuple[dict[str, Any], dict[int, int]]:
    """Returns facts of `RuntimeReport`, read off parameters and master weights that torch's own wrappers hold.

    Beside them, the elements of each whole parameter, by its identity.
    """
    named = [(inner_name(name), p) for name, p in model.named_parameters()]
    whole = {id(p): splits.size(name, p) for name, p in named}
    parameters, masters = [p for _, p in named], master_weights(optimizer)
    # How many times larger whole split parameters are than here.
    parts = {math.prod(splits.parameters[name].shape) / p.numel() for name, p in named if name in splits.parameters}
    kinds: dict[str, list[Any]] = defaultdict(list)
    for name, parameter in named:
        kinds[".".join(name.split(".")[-2:])].append(parameter)
    facts = {
        "parameter_fraction": fraction(parameters, whole),
        "optimizer_fraction": fraction(masters, whole),
        "parameter_dtypes": dtypes_of(masters),
        "model_dtypes": dtypes_of(parameters),
        "tensor": int(parts.pop()) if len(parts) == 1 else 1,
        "shares": {kind: round(fraction(tensors, whole), 4) for kind, tensors in kinds.items()},
    }
    return facts, whole


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimiser inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def master_weights(optimizer: Any) -> list[Any]:
    """Returns the parameters that an optimiser steps."""
    return [p for group in inner_optimizer(optimizer).param_groups for p in group["params"]]
