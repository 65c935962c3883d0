"""Trained parameters and optimiser state, one tensor at a time: read from any backend, written to any other."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from finetune.distributed.parameter_info import inner_optimizer, local
from finetune.distributed.split_parameters import UNSPLIT, Splits
from finetune.distributed.state import tensor_shards
from finetune.distributed.state.tensor_shards import Shard
from finetune.utils.errors import CheckpointError

PARAMETER = "parameter"


def parameter_sizes(network: nn.Module, splits: Splits = UNSPLIT) -> dict[str, int]:
    """Returns the elements of each whole trainable parameter, by name, in the order of `named_parameters()`."""
    return {name: splits.size(name, p) for name, p in _trainable(network)}


def read_state(
    network: nn.Module, optimizer: Any, splits: Splits = UNSPLIT, *, cut: bool, parameters_only: bool = False
) -> Iterator[tuple[str, Shard]]:
    """Yields this rank's piece of every trainable parameter (its fp32 master) and of its optimiser state.

    All ranks run through it, and those that gather do so in step. State that does not exist yet is left out.

    Args:
        network: The network inside the prepared model, its weights sharded (`reshard`).
        optimizer: What `Backend.prepare` returned.
        splits: Parameters that are split over the ranks of a tensor-parallel group.
        cut: True where a tensor may lie on several ranks in parts.

    Yields:
        `parameter/NAME` or `STATE/NAME`, and the piece, which lasts until the next one is asked for.

    Raises:
        CheckpointError: If the optimiser holds what cannot be written back whole.
    """
    inner = inner_optimizer(optimizer)
    for name, parameter in _trainable(network):
        split = splits.parameters.get(name)
        yield f"{PARAMETER}/{name}", tensor_shards.shard_of(parameter, split, splits.group)
        # A dictionary's own order is that in which a resume filled it, which may differ from rank to rank.
        for key, value in sorted(inner.state.get(parameter, {}).items()):
            if value is None or parameters_only:
                continue
            tensor = as_tensor(value, f"{key}/{name}")
            if cut and tensor.ndim and tensor.shape != parameter.shape:
                raise not_held(f"{key}/{name}", tensor.shape, parameter.shape)
            yield f"{key}/{name}", tensor_shards.shard_of(tensor, split if tensor.ndim else None, splits.group)


def write_state(
    network: nn.Module,
    optimizer: Any,
    keys: Collection[str],
    load: Callable[[str], torch.Tensor],
    splits: Splits = UNSPLIT,
    *,
    cut: bool,
) -> None:
    """Writes what `read_state` gave into a freshly prepared model and optimiser, on any backend and number of ranks.

    All ranks call it. Nothing is gathered: of each tensor a rank copies its own part. Others: see `read_state`.

    Args:
        optimizer: It stays as it is if `keys` has no state at all.
        keys: Every key that there is.
        load: The whole tensor of a key, on the CPU, possibly memory-mapped.

    Raises:
        CheckpointError: If a tensor is missing, unexpected, of another shape, or cannot be held here, naming it.
    """
    states = sort_keys(network, keys)
    inner = inner_optimizer(optimizer)
    groups = {id(p): group for group in inner.param_groups for p in group["params"]}
    if any(states.values()):
        inner.state.clear()
    for name, parameter in _trainable(network):
        shard = tensor_shards.shard_of(parameter, splits.parameters.get(name), splits.group)
        whole = load_parameter(load, f"{PARAMETER}/{name}", torch.Size(shard.shape))
        _fill(parameter.detach(), whole, shard)
        for key in states[name]:
            whole = load(f"{key}/{name}")
            if whole.shape == shard.shape and key != "step":
                # Laid out as the parameter is: sharded, and with its strides.
                placed: Any = torch.empty_like(parameter.detach(), dtype=whole.dtype)
                _fill(placed, whole, shard)
            elif whole.ndim == 0:
                placed = place_number(whole, key, groups[id(parameter)], parameter.device)
            elif cut:
                raise not_held(f"{key}/{name}", whole.shape, shard.shape)
            else:
                placed = whole.to(parameter.device, copy=True)
            inner.state[parameter][key] = placed


def _trainable(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in network.named_parameters() if p.requires_grad)


def sort_keys(network: nn.Module, keys: Collection[str]) -> dict[str, list[str]]:
    """Returns the names of the state of each parameter; refuses keys of another model."""
    states: dict[str, list[str]] = {name: [] for name, _ in _trainable(network)}
    missing = [name for name in states if f"{PARAMETER}/{name}" not in keys]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no '{PARAMETER}/{missing[0]}', which this model trains ({len(missing)} of "
            f"{len(states)} parameters are missing). Resume with the recipe that the checkpoint was made with."
        )
    for key in keys:
        state, _, name = key.partition("/")
        if name not in states:
            raise CheckpointError(
                f"The checkpoint has '{key}', but this model trains no parameter of that name. Resume with the recipe "
                "that the checkpoint was made with."
            )
        if state != PARAMETER:
            states[name].append(state)
    return states


def load_parameter(load: Callable[[str], torch.Tensor], key: str, shape: Any) -> torch.Tensor:
    whole = load(key)
    if whole.shape != shape or whole.dtype != torch.float32:
        raise CheckpointError(
            f"The checkpoint's '{key}' is {tuple(whole.shape)} in {whole.dtype}, this model's is {tuple(shape)} in "
            "torch.float32. Resume with the recipe that the checkpoint was made with."
        )
    return whole


def _fill(tensor: Any, whole: torch.Tensor, shard: Shard) -> None:
    here = local(tensor)
    here.copy_(tensor_shards.part_of(whole, shard).reshape(here.shape))


def place_number(whole: torch.Tensor, key: str, group: dict[str, Any], device: torch.device) -> Any:
    """Returns a number as the optimiser holds it: `step` rests on the CPU unless kernels read it.

    Source: torch, `Optimizer._process_value_according_to_param_policy`.
    """
    if whole.dtype in (torch.int64, torch.float64):
        return whole.item()
    if key == "step" and not group.get("fused") and not group.get("capturable"):
        device = torch.device("cpu")
    return whole.to(device, copy=True)


def as_tensor(value: Any, key: str) -> torch.Tensor:
    """Returns state as a tensor: Python's numbers in a dtype of 64 bit, by which they are recognised again."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (int, float)):
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
    raise CheckpointError(
        f"The optimiser's state '{key}' is {type(value).__name__}, which cannot be kept in a checkpoint: tensors and "
        "numbers can. Choose another optim.name."
    )


def not_held(key: str, shape: Any, parameter: Any) -> CheckpointError:
    return CheckpointError(
        f"The optimiser's state '{key}' is {tuple(shape)} for a parameter of {tuple(parameter)}; where parameters are "
        "sharded, state can be kept only if it is a number or has the parameter's shape. Choose another optim.name, or "
        "a launch config without sharding."
    )
