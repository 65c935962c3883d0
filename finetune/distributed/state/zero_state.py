"""DeepSpeed's flat buffers: which part of which parameter lies where in master weights and optimiser state.

DeepSpeed's accessors (`safe_get_full_fp32_param` and others) are not used. Those of the optimiser's state know the
first parameter group only, those of the weights look in the wrong place under `round_robin_gradients`, sums of floats
lose the sign of -0.0, setting fails for parameters that do not divide evenly among ranks, none of them updates the
copies that the network computes with, and on NVMe each call reads a whole buffer from the disk.
Source: deepspeed 0.19.8, `utils/tensor_fragment.py`, `stage_1_and_2.py::_link_all_hp_params` and
`_lazy_init_hp_params_optimizer_state`, `stage3.py::set_full_hp_param` and `_get_fp32_opt_state_partition`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from finetune.distributed.state.tensor_shards import Shard, interval
from finetune.utils.errors import BackendError


@dataclass(frozen=True)
class Part:
    """This rank's part of a parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    begin: int
    """Where the part begins in the parameter, both as one dimension."""
    place: int
    """Where it begins in the flat buffer."""
    size: int
    """0 if this rank has none of it."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor; a view."""
        return whole.reshape(-1).narrow(0, min(self.begin, whole.numel()), self.size)

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part in a flat buffer; a view."""
        return buffer.detach().narrow(0, self.place, self.size)


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
    parts: list[Part]

    @property
    def state(self) -> dict[str, Any]:
        """State by name: tensors as long as the buffer, and numbers."""
        found: dict[str, Any] = self.optimizer.state.get(self.master, {})
        return found

    def piece(self, part: Part, buffer: torch.Tensor) -> Shard:
        """What lies in such a buffer of one parameter."""
        ranks = tuple(distributed.get_process_group_ranks(self.ranks))
        blocks = interval(part.begin, part.size)
        return Shard(part.shape, part.within(buffer), blocks, ranks, lambda: self._gather(part, buffer))

    def _gather(self, part: Part, buffer: torch.Tensor) -> torch.Tensor:
        from deepspeed.accelerator import get_accelerator

        whole = torch.zeros(part.shape, dtype=buffer.dtype, device=get_accelerator().current_device_name())
        part.of(whole).copy_(part.within(buffer))
        # As integers: all but one rank add zeros, and every bit arrives.
        bits = whole.reshape(-1).view({4: torch.int32, 8: torch.int64}.get(buffer.element_size(), torch.uint8))
        distributed.all_reduce(bits, group=self.ranks)
        return whole


def zero_states(zero: Any, network: nn.Module) -> Iterator[ZeroState]:
    """The flat buffers of a ZeRO optimiser, in the same order on every rank.

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
            begin, place = (first - offset, first - low) if here else (0, 0)
            parts.append(Part(names[id(parameter)], tuple(parameter.shape), begin, place, here))
        inner = zero.optimizer
        yield ZeroState(
            index, zero.single_partition_of_fp32_groups[index], inner, inner.param_groups[index], ranks, parts
        )


def _stage_3(zero: Any, names: dict[int, str]) -> Iterator[ZeroState]:
    for index, parameters in enumerate(zero.fp16_groups):
        ranks = zero.sub_group_process_groups[index]
        parts = []
        for parameter in parameters:
            _, place, size = zero.grad_position[zero.get_param_id(parameter)]
            begin = distributed.get_rank(ranks) * size
            # The last ranks' parts are padded.
            here = max(0, min(size, parameter.ds_numel - begin))
            parts.append(Part(names[id(parameter)], tuple(parameter.ds_shape), begin, place, here))
        # With offload of a share of the optimiser, another one steps the rest.
        elsewhere = zero.offload_optimizer and zero.subgroup_to_device[index] != "cpu"
        inner = zero.backup_optimizer if elsewhere else zero.optimizer
        group = inner.param_groups[zero.sub_group_to_group_id[index]]
        yield ZeroState(index, zero.fp32_partitioned_groups_flat[index], inner, group, ranks, parts)


@contextmanager
def reading(zero: Any, flat: ZeroState) -> Iterator[None]:
    """A flat buffer and its state in host memory, if they rest on the disk."""
    if not _rests_on_disk(zero, flat):
        yield
        return
    from finetune.utils.compat import deepspeed_private

    deepspeed_private.swap_in(zero, flat.index)
    try:
        yield
    finally:
        deepspeed_private.release_swap_buffers(zero, flat.index)


@contextmanager
def writing(zero: Any, flat: ZeroState) -> Iterator[None]:
    """Likewise, to be changed: afterwards the network computes with the new weights (on this rank's part)."""
    from finetune.utils.compat import deepspeed_private

    on_disk = _rests_on_disk(zero, flat)
    if on_disk:
        deepspeed_private.swap_in(zero, flat.index)
    yield
    if hasattr(zero, "fp16_groups"):
        deepspeed_private.update_weights(zero, flat.index)
    if on_disk:
        deepspeed_private.swap_out(zero, flat.index)


@contextmanager
def changing(zero: Any) -> Iterator[None]:
    """Masters change within; afterwards the network computes with them on every rank."""
    if not hasattr(zero, "fp16_groups"):
        yield
        zero.update_lp_params()
        return
    # Gathered copies, those of persistent parameters too, are let go, as at the start of a step.
    zero.checkpoint_event_prologue()
    yield
    zero.checkpoint_event_epilogue()


def _rests_on_disk(zero: Any, flat: ZeroState) -> bool:
    from finetune.utils.compat.deepspeed_private import is_swapped

    return hasattr(zero, "fp16_groups") and is_swapped(zero, flat.index)


def is_cpu_adam(optimizer: Any) -> bool:
    """Whether it is DeepSpeed's Adam for the CPU."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return isinstance(optimizer, DeepSpeedCPUAdam)


def replay_cpu_adam(optimizer: Any, steps: int) -> None:
    """Brings the counter of DeepSpeed's CPU Adam to `steps`, as if it had taken them.

    Its C++ part multiplies the powers of beta up step by step in fp32; set to a step at once it computes them with
    `pow`, and the path would differ in the last bits. Empty tensors make a step cost a microsecond.
    Source: deepspeed 0.19.8, `csrc/includes/cpu_adam.h`, `Adam_Optimizer::IncrementStep`.
    """
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    nothing = [torch.empty(0) for _ in range(4)]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id,
            step,
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            *nothing,
        )
