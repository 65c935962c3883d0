"""Trained parameters and optimiser state in DeepSpeed's flat buffers: read from them, and written there.

DeepSpeed's accessors (`safe_get_full_fp32_param` and others) are not used. Those of the optimiser's state know the
first parameter group only, those of the weights look in the wrong place under `round_robin_gradients`, sums of floats
lose the sign of -0.0, setting fails for parameters that do not divide evenly among ranks, none of them updates the
copies that the network computes with, and on NVMe each call reads a whole buffer from the disk.
Source: deepspeed 0.19.8, `utils/tensor_fragment.py`, `stage_1_and_2.py::_link_all_hp_params` and
`_lazy_init_hp_params_optimizer_state`, `stage3.py::set_full_hp_param` and `_get_fp32_opt_state_partition`.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import distributed, nn

from finetune.distributed.parameter_info import inner_optimizer
from finetune.distributed.state import tensor_shards
from finetune.distributed.state.state_transfer import (
    PARAMETER,
    as_tensor,
    load_parameter,
    not_held,
    place_number,
    sort_keys,
)
from finetune.distributed.state.tensor_shards import Shard, flat_block
from finetune.utils.compat import deepspeed_private
from finetune.utils.errors import BackendError, CheckpointError


class FlatPart(NamedTuple):
    """This rank's part of a parameter."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    begin: int
    """Offset of the part in the flattened parameter."""
    place: int
    """Its offset in the flat buffer."""
    size: int
    """0 if this rank has none of it."""


@dataclass(frozen=True)
class ZeroState:
    """One flat buffer of master weights on this rank, with the optimiser that steps it."""

    index: int
    master: torch.Tensor
    """(elements here, with padding), fp32. Empty while it rests on the disk."""
    optimizer: Any
    group: dict[str, Any]
    """The optimiser's settings for it."""
    ranks: Any
    """The processes that it is sharded over."""
    parts: list[FlatPart]

    @property
    def state(self) -> dict[str, Any]:
        """State by name: tensors as long as the buffer, and numbers."""
        values: dict[str, Any] = self.optimizer.state.get(self.master, {})
        return values

    @property
    def counts_steps(self) -> bool:
        """True if its optimiser is DeepSpeed's Adam for the CPU, which keeps the step as a number of Python's."""
        return isinstance(self.optimizer, DeepSpeedCPUAdam)

    def piece(self, part: FlatPart, buffer: torch.Tensor) -> Shard:
        """Returns what lies in such a buffer of one parameter."""
        ranks = tuple(distributed.get_process_group_ranks(self.ranks))
        here, blocks = buffer.detach().narrow(0, part.place, part.size), flat_block(part.begin, part.size)

        def gather() -> torch.Tensor:
            whole = torch.zeros(part.shape, dtype=buffer.dtype, device=get_accelerator().current_device_name())
            for block in blocks:
                block.within(whole).copy_(here)
            # As integers: all but one rank add zeros, and every bit arrives.
            bits = whole.reshape(-1).view({4: torch.int32, 8: torch.int64}.get(buffer.element_size(), torch.uint8))
            distributed.all_reduce(bits, group=self.ranks)
            return whole

        return Shard(part.shape, here, blocks, ranks, gather)

    def fill(self, part: FlatPart, buffer: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes this rank's part of a whole tensor into such a buffer."""
        piece = self.piece(part, buffer)
        piece.local.copy_(tensor_shards.part_of(whole, piece))


def read_state(optimizer: Any, network: nn.Module, *, parameters_only: bool = False) -> Iterator[tuple[str, Shard]]:
    """`state_transfer.read_state`, of flat buffers."""
    zero = inner_optimizer(optimizer)
    for flat in zero_states(zero, network):
        with _in_memory(zero, flat):
            for part in flat.parts:
                yield f"{PARAMETER}/{part.name}", flat.piece(part, flat.master)
                for state, value in sorted(flat.state.items()):
                    if value is None or parameters_only:
                        continue
                    key = f"{state}/{part.name}"
                    tensor = as_tensor(value, key)
                    if tensor.shape == flat.master.shape:
                        yield key, flat.piece(part, tensor)
                        continue
                    if tensor.ndim:
                        raise not_held(key, tensor.shape, flat.master.shape)
                    counted = state == "step" and flat.counts_steps
                    yield key, tensor_shards.whole_shard(tensor.float() if counted else tensor)


def write_state(optimizer: Any, network: nn.Module, keys: Collection[str], load: Callable[[str], torch.Tensor]) -> None:
    """`state_transfer.write_state`, into flat buffers."""
    zero, states = inner_optimizer(optimizer), sort_keys(network, keys)
    steps: dict[Any, int] = {}
    with _changing(zero):
        for flat in zero_states(zero, network):
            with _in_memory(zero, flat, changes=True):
                for part in flat.parts:
                    flat.fill(part, flat.master, load_parameter(load, f"{PARAMETER}/{part.name}", part.shape))
                if any(states[part.name] for part in flat.parts):
                    flat.optimizer.state[flat.master] = _flat_state(flat, states, load)
                    if flat.counts_steps:
                        steps[flat.optimizer] = flat.state["step"]
    for stepped, step in steps.items():
        _replay_cpu_adam(stepped, step)


def each_master(
    network: nn.Module, optimizer: Any, change: Callable[[Any, dict[str, Any]], None], changes: bool
) -> None:
    """`strategy.each_master`, of flat buffers."""
    zero = inner_optimizer(optimizer)
    with _changing(zero) if changes else nullcontext():
        for flat in zero_states(zero, network):
            with _in_memory(zero, flat, changes=changes):
                change(flat.master.detach(), flat.optimizer.state[flat.master])


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
                    old: Any = flat.state.get(state)
                    same = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (flat.master.shape, whole.dtype)
                    made = old.zero_() if same else torch.zeros_like(flat.master.detach(), dtype=whole.dtype)
                    buffers[state] = made
                flat.fill(part, buffers[state], whole)
            elif whole.ndim:
                raise not_held(key, whole.shape, part.shape)
            elif not torch.equal(numbers.setdefault(state, (whole, key))[0], whole):
                other, of = numbers[state]
                raise CheckpointError(
                    f"The checkpoint's '{key}' is {whole.item():g} and '{of}' is {other.item():g}, but DeepSpeed keeps "
                    "one number for both. Resume on one process, DDP or FSDP."
                )
    device = flat.master.device
    return buffers | {
        state: int(whole) if state == "step" and flat.counts_steps else place_number(whole, state, flat.group, device)
        for state, (whole, _) in numbers.items()
    }


def zero_states(zero: Any, network: nn.Module) -> Iterator[ZeroState]:
    """Yields the flat buffers of a ZeRO optimiser, in the same order on every rank.

    Raises:
        BackendError: If it is another kind of optimiser.
    """
    names = {id(p): name for name, p in network.named_parameters()}
    if hasattr(zero, "fp16_groups"):
        return _stage_3(zero, names)
    if hasattr(zero, "round_robin_bit16_groups"):
        return _stage_1_and_2(zero, names)
    # DeepSpeed takes it for ZeRO-1 with weights in bf16 and gradients in fp32.
    raise BackendError(
        f"DeepSpeed runs this as {type(zero).__name__}, whose state cannot be read or written. Take stage 2 or 3, or "
        'leave "bf16" to "auto".'
    )


def _stage_1_and_2(zero: Any, names: dict[int, str]) -> Iterator[ZeroState]:
    for index, parameters in enumerate(zero.round_robin_bit16_groups):
        ranks, size = zero.real_dp_process_group[index], zero.partition_size[index]
        low = distributed.get_rank(ranks) * size
        parts = []
        for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[index], strict=True):
            first, last = max(offset, low), min(offset + parameter.numel(), low + size)
            here = max(0, last - first)
            begin, buffer_offset = (first - offset, first - low) if here else (0, 0)
            parts.append(FlatPart(names[id(parameter)], tuple(parameter.shape), begin, buffer_offset, here))
        inner = zero.optimizer
        yield ZeroState(
            index, zero.single_partition_of_fp32_groups[index], inner, inner.param_groups[index], ranks, parts
        )


def _stage_3(zero: Any, names: dict[int, str]) -> Iterator[ZeroState]:
    for index, parameters in enumerate(zero.fp16_groups):
        ranks = zero.sub_group_process_groups[index]
        parts = []
        for parameter in parameters:
            _, buffer_offset, size = zero.grad_position[zero.get_param_id(parameter)]
            begin = distributed.get_rank(ranks) * size
            # The last ranks' parts are padded.
            here = max(0, min(size, parameter.ds_numel - begin))
            parts.append(FlatPart(names[id(parameter)], tuple(parameter.ds_shape), begin, buffer_offset, here))
        # With offload of a share of the optimiser, another one steps the rest.
        elsewhere = zero.offload_optimizer and zero.subgroup_to_device[index] != "cpu"
        inner = zero.backup_optimizer if elsewhere else zero.optimizer
        group = inner.param_groups[zero.sub_group_to_group_id[index]]
        yield ZeroState(index, zero.fp32_partitioned_groups_flat[index], inner, group, ranks, parts)


@contextmanager
def _in_memory(zero: Any, flat: ZeroState, *, changes: bool = False) -> Iterator[None]:
    """Has a flat buffer and its state in host memory, if they rest on the disk.

    With `changes` its new weights are computed with afterwards (on this rank's part), and are written to the disk.
    """
    stage3 = hasattr(zero, "fp16_groups")
    on_disk = stage3 and deepspeed_private.is_swapped(zero, flat.index)
    if on_disk:
        deepspeed_private.swap_in(zero, flat.index)
    try:
        yield
        if changes and stage3:
            deepspeed_private.update_weights(zero, flat.index)
    finally:
        if on_disk:
            (deepspeed_private.swap_out if changes else deepspeed_private.release_swap_buffers)(zero, flat.index)


@contextmanager
def _changing(zero: Any) -> Iterator[None]:
    """Masters change within; afterwards the network computes with them on every rank."""
    if not hasattr(zero, "fp16_groups"):
        yield
        zero.update_lp_params()
        return
    # Gathered copies, those of persistent parameters too, are let go, as at the start of a step.
    zero.checkpoint_event_prologue()
    yield
    zero.checkpoint_event_epilogue()


def _replay_cpu_adam(optimizer: Any, steps: int) -> None:
    """Brings the counter of DeepSpeed's CPU Adam to `steps`, as if it had taken them.

    Its C++ part multiplies the powers of beta up step by step in fp32; set to a step at once it computes them with
    `pow`, and the path would differ in the last bits. Empty tensors make a step cost a microsecond.
    Source: deepspeed 0.19.8, `csrc/includes/cpu_adam.h`, `Adam_Optimizer::IncrementStep`.
    """
    group = optimizer.param_groups[0]
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
    nothing = [torch.empty(0) for _ in range(4)]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *settings, *nothing)
