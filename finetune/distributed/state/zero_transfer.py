"""Trained parameters and optimiser state in DeepSpeed's flat buffers: read from them, and written there."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from finetune.distributed.state import tensor_shards
from finetune.distributed.state.state_transfer import (
    PARAMETER,
    as_tensor,
    in_order,
    inner_optimizer,
    loaded,
    not_held,
    scalar,
    sort_keys,
)
from finetune.distributed.state.tensor_shards import Shard
from finetune.distributed.state.zero_state import (
    ZeroState,
    changing,
    is_cpu_adam,
    reading,
    replay_cpu_adam,
    writing,
    zero_states,
)
from finetune.utils.errors import CheckpointError


def read(optimizer: Any, network: nn.Module, *, parameters_only: bool = False) -> Iterator[tuple[str, Shard]]:
    """`state_transfer.read`, of flat buffers."""
    zero = inner_optimizer(optimizer)
    for flat in zero_states(zero, network):
        with reading(zero, flat):
            for part in flat.parts:
                yield f"{PARAMETER}/{part.name}", flat.piece(part, flat.master)
                for state, value in in_order(flat.state):
                    if value is None or parameters_only:
                        continue
                    key = f"{state}/{part.name}"
                    tensor = as_tensor(value, key)
                    if tensor.shape == flat.master.shape:
                        yield key, flat.piece(part, tensor)
                        continue
                    if tensor.ndim:
                        raise not_held(key, tensor.shape, flat.master.shape)
                    counted = state == "step" and is_cpu_adam(flat.optimizer)
                    yield key, tensor_shards.undivided(tensor.float() if counted else tensor)


def write(optimizer: Any, network: nn.Module, keys: Collection[str], load: Callable[[str], torch.Tensor]) -> None:
    """`state_transfer.write`, into flat buffers."""
    zero, states = inner_optimizer(optimizer), sort_keys(network, keys)
    steps: dict[Any, int] = {}
    with changing(zero):
        for flat in zero_states(zero, network):
            with writing(zero, flat):
                for part in flat.parts:
                    part.within(flat.master).copy_(part.of(loaded(load, f"{PARAMETER}/{part.name}", part.shape)))
                if any(states[part.name] for part in flat.parts):
                    flat.optimizer.state[flat.master] = _flat_state(flat, states, load)
                    if is_cpu_adam(flat.optimizer):
                        steps[flat.optimizer] = flat.state["step"]
    for optimizer, step in steps.items():
        replay_cpu_adam(optimizer, step)


def _flat_state(flat: ZeroState, states: dict[str, list[str]], load: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """The state of a flat buffer, of that of its parameters; those that had no gradient yet have none, and get 0."""
    holders = [part for part in flat.parts if states[part.name]]
    buffers: dict[str, torch.Tensor] = {}
    numbers: dict[str, tuple[torch.Tensor, str]] = {}
    for state in dict.fromkeys(state for part in holders for state in states[part.name]):
        for part in holders:
            key = f"{state}/{part.name}"
            if state not in states[part.name]:
                raise CheckpointError(
                    f"The checkpoint has no '{key}', though it has that state of other parameters. It is not whole: "
                    "resume from another one."
                )
            whole = load(key)
            if whole.shape == part.shape and state != "step":
                if state not in buffers:
                    buffers[state] = _buffer(flat, state, whole.dtype)
                part.within(buffers[state]).copy_(part.of(whole))
            elif whole.ndim:
                raise not_held(key, whole.shape, part.shape)
            elif not torch.equal(numbers.setdefault(state, (whole, key))[0], whole):
                other, of = numbers[state]
                raise CheckpointError(
                    f"The checkpoint's '{key}' is {whole.item():g} and '{of}' is {other.item():g}, but DeepSpeed keeps "
                    "one number for both. Resume on one process, DDP or FSDP."
                )
    device = flat.master.device
    counted = is_cpu_adam(flat.optimizer)
    return buffers | {
        state: int(whole) if counted and state == "step" else scalar(whole, state, flat.group, device)
        for state, (whole, _) in numbers.items()
    }


def _buffer(flat: ZeroState, state: str, dtype: torch.dtype) -> torch.Tensor:
    """The buffer of a kind of state, all 0: the one that there is, or a new one."""
    old = flat.state.get(state)
    if isinstance(old, torch.Tensor) and old.shape == flat.master.shape and old.dtype == dtype:
        return old.zero_()
    return torch.zeros_like(flat.master.detach(), dtype=dtype)
