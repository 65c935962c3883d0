"""Private or new names of DeepSpeed: its state, swapping of state to NVMe, and the order of gathers."""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from finetune.utils.compat.library_versions import require

require(
    "deepspeed",
    DeepSpeedZeroOptimizer_Stage3,
    "_optimizer_states_and_gradient_swap_in",
    "_optimizer_states_and_gradient_swap_out",
    "_reassign_or_swap_out_partitioned_parameters",
    "_release_swap_buffers",
    "_swappable_optimizer_subgroup",
    # These, and those below, are read by finetune/distributed/state/zero_state.py.
    "fp16_groups",
    "fp32_partitioned_groups_flat",
    "grad_position",
    "sub_group_process_groups",
    "sub_group_to_group_id",
    "subgroup_to_device",
)
require(
    "deepspeed",
    DeepSpeedZeroOptimizer,
    "partition_size",
    "real_dp_process_group",
    "round_robin_bit16_groups",
    "round_robin_bit16_offsets",
    "single_partition_of_fp32_groups",
)
require("deepspeed", PartitionedParameterCoordinator, "_invalidate_trace")
require("deepspeed", torch_autocast, "TORCH_AUTOCAST_INITIALIZED")

# Under that name `deepspeed.comm` has torch itself.
deepspeed_comm: Any = import_module("deepspeed.comm.torch")
# Its one use there: each rank prints at each start that an op was built, though it was loaded.
deepspeed_comm.print = lambda *_: None

# Each takes a `DeepSpeedZeroOptimizer_Stage3` and the index of a group.
is_swapped = DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup
"""Tells if the master weights and optimiser state of a group are on NVMe."""
swap_in = DeepSpeedZeroOptimizer_Stage3._optimizer_states_and_gradient_swap_in
"""Reads a group's master weights and optimiser state."""
swap_out = DeepSpeedZeroOptimizer_Stage3._optimizer_states_and_gradient_swap_out
"""Writes them back and frees their memory."""
release_swap_buffers = DeepSpeedZeroOptimizer_Stage3._release_swap_buffers
"""Frees their memory without writing them back."""
update_weights = DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters
"""Copies a group's master weights to this rank's part of the weights that the network computes with."""

invalidate_trace = PartitionedParameterCoordinator._invalidate_trace
"""Forgets the order in which modules of a coordinator were gathered."""


def forget_autocast() -> None:
    """Forgets that an earlier engine of this process computed in bf16: stage 3 would sum this one's gradients in fp32.

    Source: deepspeed 0.19, `is_autocast_initialized` in `runtime/torch_autocast.py`.
    """
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False


def viewing_scalars() -> AbstractContextManager[Any]:
    """Lets DeepSpeed view tensors without dimensions as bytes, as it does with all that it broadcasts.

    Source: deepspeed 0.19, `_broadcast_model` in `runtime/engine.py`, `_zero_init_param` in `partition_parameters.py`.
    """
    view: Any = torch.Tensor.view

    def of_bytes(tensor: torch.Tensor, *shape: Any) -> Any:
        return view(tensor.reshape(1) if shape == (torch.uint8,) and not tensor.ndim else tensor, *shape)

    return patch.object(torch.Tensor, "view", of_bytes)
