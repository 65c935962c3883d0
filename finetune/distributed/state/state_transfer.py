"""Trained parameters and optimiser state, one tensor at a time: read from any backend, written to any other."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.state import tensor_shards
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
from finetune.distributed.strategies.tensor import UNSPLIT, Splits
from finetune.utils.compat.torch_private import GROWTH_TRACKER
from finetune.utils.errors import BackendError, CheckpointError

PARAMETER = "parameter"


def sizes(network: nn.Module, splits: Splits = UNSPLIT) -> dict[str, int]:
    """Elements of each trainable parameter, whole, by name, in the order of `named_parameters()`."""
    return {name: splits.size(name, p) for name, p in _trainable(network)}


def read(
    launch: Launch, network: nn.Module, optimizer: Any, splits: Splits = UNSPLIT, *, parameters_only: bool = False
) -> Iterator[tuple[str, Shard]]:
    """This rank's piece of every trainable parameter (its fp32 master) and of its optimiser state, one at a time.

    All ranks run through it, and those that gather do so in step. State that does not exist yet is left out.

    Args:
        network: The network inside the prepared model, its weights sharded (`reshard`).
        optimizer: What `Backend.prepare` returned.
        splits: Which parameters are split over the ranks of a tensor-parallel group.

    Yields:
        `parameter/NAME` or `STATE/NAME`, and the piece, which lasts until the next one is asked for.

    Raises:
        CheckpointError: If the optimiser holds what cannot be written back whole.
    """
    inner = _inner(optimizer)
    if launch.uses_deepspeed:
        yield from _read_flat(inner, network, parameters_only)
        return
    for name, parameter in _trainable(network):
        _check_sharded(launch, name, parameter)
        split = splits.parameters.get(name)
        yield f"{PARAMETER}/{name}", tensor_shards.of(parameter, split, splits.group)
        for key, value in _in_order(inner.state.get(parameter, {})):
            if value is None or parameters_only:
                continue
            tensor = _as_tensor(value, f"{key}/{name}")
            if launch.cuts_state and tensor.ndim and tensor.shape != parameter.shape:
                raise _not_held(f"{key}/{name}", tensor.shape, parameter.shape)
            yield f"{key}/{name}", tensor_shards.of(tensor, split if tensor.ndim else None, splits.group)


def write(
    launch: Launch,
    network: nn.Module,
    optimizer: Any,
    keys: Collection[str],
    load: Callable[[str], torch.Tensor],
    splits: Splits = UNSPLIT,
) -> None:
    """Writes what `read` gave into a freshly prepared model and optimiser, on any backend and number of ranks.

    All ranks must call it. Nothing is gathered: of each tensor a rank copies its own part.

    Args:
        network: The network inside the prepared model, its weights sharded (`reshard`).
        optimizer: What `Backend.prepare` returned. It stays as it is if `keys` has no state at all.
        keys: Every key that there is.
        load: The whole tensor of a key, on the CPU, possibly memory-mapped.
        splits: As `read` has it.

    Raises:
        CheckpointError: If a tensor is missing, unexpected, of another shape, or cannot be held here, naming it.
    """
    states = _sort_keys(network, keys)
    inner = _inner(optimizer)
    if launch.uses_deepspeed:
        _write_flat(inner, network, states, load)
        return
    groups = {id(p): group for group in inner.param_groups for p in group["params"]}
    if any(states.values()):
        inner.state.clear()
    for name, parameter in _trainable(network):
        _check_sharded(launch, name, parameter)
        shard = tensor_shards.of(parameter, splits.parameters.get(name), splits.group)
        whole = _loaded(load, f"{PARAMETER}/{name}", torch.Size(shard.shape))
        _fill(parameter.detach(), whole, shard)
        for key in states[name]:
            whole = load(f"{key}/{name}")
            group = groups[id(parameter)]
            inner.state[parameter][key] = _placed(whole, key, name, parameter, shard, group, launch.cuts_state)


def frozen(launch: Launch, name: str, parameter: Any, splits: Splits) -> Shard:
    """This rank's piece of a parameter that is not trained, to be copied at once; every rank must call it."""
    if launch.kind != "zero3":
        return tensor_shards.of(parameter, splits.parameters.get(name), splits.group)
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return tensor_shards.undivided(parameter.detach().clone())


def reshard(model: nn.Module) -> None:
    """Frees gathered weights that FSDP2 left in place, as after an evaluation; others would not see a write.

    Args:
        model: The prepared model: its outermost wrapper may own weights of the network within.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def scaler_state(accelerator: Any, launch: Launch) -> dict[str, float | int] | None:
    """The loss scale and for how many steps it has held; None if losses are not scaled.

    Returns:
        `scale` and `good_steps`; from DeepSpeed's scaler `hysteresis` too, which other scalers do not know.
    """
    if launch.uses_deepspeed:
        scaler = accelerator.deepspeed_engine_wrapped.engine.optimizer.loss_scaler
        if not scaler.dynamic:
            return None
        return {
            "scale": float(scaler.cur_scale),
            "good_steps": int(scaler.cur_iter - scaler.last_overflow_iter - 1),
            "hysteresis": int(scaler.cur_hysteresis),
        }
    if accelerator.scaler is None or not accelerator.scaler.is_enabled():
        return None
    values = accelerator.scaler.state_dict()
    return {"scale": float(values["scale"]), "good_steps": int(values[GROWTH_TRACKER])}


def set_scaler_state(accelerator: Any, launch: Launch, state: dict[str, float | int] | None) -> None:
    """Takes up what `scaler_state` gave, on any backend; nothing if either side does not scale losses."""
    if state is None or scaler_state(accelerator, launch) is None:
        return
    if launch.uses_deepspeed:
        scaler = accelerator.deepspeed_engine_wrapped.engine.optimizer.loss_scaler
        scaler.cur_scale = float(state["scale"])
        scaler.last_overflow_iter = scaler.cur_iter - int(state["good_steps"]) - 1
        scaler.cur_hysteresis = int(state.get("hysteresis", scaler.delayed_shift))
    else:
        values = {"scale": float(state["scale"]), GROWTH_TRACKER: int(state["good_steps"])}
        accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), **values})


def _read_flat(zero: Any, network: nn.Module, parameters_only: bool) -> Iterator[tuple[str, Shard]]:
    for flat in zero_states(zero, network):
        with reading(zero, flat):
            for part in flat.parts:
                yield f"{PARAMETER}/{part.name}", flat.piece(part, flat.master)
                for state, value in _in_order(flat.state):
                    if value is None or parameters_only:
                        continue
                    key = f"{state}/{part.name}"
                    tensor = _as_tensor(value, key)
                    if tensor.shape == flat.master.shape:
                        yield key, flat.piece(part, tensor)
                        continue
                    if tensor.ndim:
                        raise _not_held(key, tensor.shape, flat.master.shape)
                    counted = state == "step" and is_cpu_adam(flat.optimizer)
                    yield key, tensor_shards.undivided(tensor.float() if counted else tensor)


def _write_flat(
    zero: Any, network: nn.Module, states: dict[str, list[str]], load: Callable[[str], torch.Tensor]
) -> None:
    steps: dict[Any, int] = {}
    with changing(zero):
        for flat in zero_states(zero, network):
            with writing(zero, flat):
                for part in flat.parts:
                    part.within(flat.master).copy_(part.of(_loaded(load, f"{PARAMETER}/{part.name}", part.shape)))
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
                raise _not_held(key, whole.shape, part.shape)
            elif not torch.equal(numbers.setdefault(state, (whole, key))[0], whole):
                other, of = numbers[state]
                raise CheckpointError(
                    f"The checkpoint's '{key}' is {whole.item():g} and '{of}' is {other.item():g}, but DeepSpeed keeps "
                    "one number for both. Resume on one process, DDP or FSDP."
                )
    device = flat.master.device
    counted = is_cpu_adam(flat.optimizer)
    return buffers | {
        state: int(whole) if counted and state == "step" else _scalar(whole, state, flat.group, device)
        for state, (whole, _) in numbers.items()
    }


def _buffer(flat: ZeroState, state: str, dtype: torch.dtype) -> torch.Tensor:
    """The buffer of a kind of state, all 0: the one that there is, or a new one."""
    old = flat.state.get(state)
    if isinstance(old, torch.Tensor) and old.shape == flat.master.shape and old.dtype == dtype:
        return old.zero_()
    return torch.zeros_like(flat.master.detach(), dtype=dtype)


def _in_order(held: dict[str, Any]) -> list[tuple[str, Any]]:
    """State in the same order on every rank: that of the dictionary is the order in which a resume filled it."""
    return sorted(held.items())


def _trainable(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in network.named_parameters() if p.requires_grad)


def _inner(optimizer: Any) -> Any:
    """The optimiser inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _sort_keys(network: nn.Module, keys: Collection[str]) -> dict[str, list[str]]:
    """The names of the state of each parameter."""
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


def _loaded(load: Callable[[str], torch.Tensor], key: str, shape: Any) -> torch.Tensor:
    whole = load(key)
    if whole.shape != shape or whole.dtype != torch.float32:
        raise CheckpointError(
            f"The checkpoint's '{key}' is {tuple(whole.shape)} in {whole.dtype}, this model's is {tuple(shape)} in "
            "torch.float32. Resume with the recipe that the checkpoint was made with."
        )
    return whole


def _fill(tensor: Any, whole: torch.Tensor, shard: Shard) -> None:
    """Gives a tensor that is divided as a shard is its part of a whole one."""
    here = tensor_shards.local(tensor)
    here.copy_(tensor_shards.part_of(whole, shard).reshape(here.shape))


def _placed(
    whole: torch.Tensor, key: str, name: str, parameter: Any, shard: Shard, group: dict[str, Any], divided: bool
) -> Any:
    """State as an optimiser of torch's holds it for a parameter, of which this rank has a shard."""
    if whole.shape == shard.shape and key != "step":
        # Laid out as the parameter is: sharded, and with its strides.
        like = torch.empty_like(parameter.detach(), dtype=whole.dtype)
        _fill(like, whole, shard)
        return like
    if whole.ndim == 0:
        return _scalar(whole, key, group, parameter.device)
    if divided:
        raise _not_held(f"{key}/{name}", whole.shape, shard.shape)
    return whole.to(parameter.device, copy=True)


def _scalar(whole: torch.Tensor, key: str, group: dict[str, Any], device: torch.device) -> Any:
    """A number as the optimiser holds it: `step` rests on the CPU unless kernels read it.

    Source: torch, `Optimizer._process_value_according_to_param_policy`.
    """
    if whole.dtype in (torch.int64, torch.float64):
        return whole.item()
    if key == "step" and not group.get("fused") and not group.get("capturable"):
        device = torch.device("cpu")
    return whole.to(device, copy=True)


def _as_tensor(value: Any, key: str) -> torch.Tensor:
    """State as a tensor: Python's numbers in a dtype of 64 bit, by which they are known again."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (int, float)):
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
    raise CheckpointError(
        f"The optimiser's state '{key}' is {type(value).__name__}, which cannot be kept in a checkpoint: tensors and "
        "numbers can. Choose another optim.name."
    )


def _not_held(key: str, shape: Any, parameter: Any) -> CheckpointError:
    return CheckpointError(
        f"The optimiser's state '{key}' is {tuple(shape)} for a parameter of {tuple(parameter)}; where parameters are "
        "sharded, state can be kept only if it is a number or has the parameter's shape. Choose another optim.name, or "
        "a launch config without sharding."
    )


def _check_sharded(launch: Launch, name: str, parameter: Any) -> None:
    if launch.uses_fsdp and not hasattr(parameter, "full_tensor"):
        raise BackendError(f"The parameter '{name}' is not sharded at this moment: call reshard(model) first.")
