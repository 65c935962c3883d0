"""Private or new names of DeepSpeed: its state, swapping of state to NVMe, and the order of gathers."""

from typing import Any

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
)
# Read by finetune/distributed/state/zero_state.py.
require(
    "deepspeed",
    DeepSpeedZeroOptimizer,
    "partition_size",
    "real_dp_process_group",
    "round_robin_bit16_groups",
    "round_robin_bit16_offsets",
    "single_partition_of_fp32_groups",
)
require(
    "deepspeed",
    DeepSpeedZeroOptimizer_Stage3,
    "fp16_groups",
    "fp32_partitioned_groups_flat",
    "grad_position",
    "sub_group_process_groups",
    "sub_group_to_group_id",
    "subgroup_to_device",
)
require("deepspeed", PartitionedParameterCoordinator, "_invalidate_trace")


def is_swapped(zero: Any, index: int) -> bool:
    """Tells if the master weights and optimiser state of a group are on NVMe.

    Args:
        zero: A `DeepSpeedZeroOptimizer_Stage3`, here and below.
        index: Index of the group, here and below.
    """
    return bool(zero._swappable_optimizer_subgroup(index))


def swap_in(zero: Any, index: int) -> None:
    """Reads a group's master weights and optimiser state."""
    zero._optimizer_states_and_gradient_swap_in(index)


def swap_out(zero: Any, index: int) -> None:
    """Writes them back and frees their memory."""
    zero._optimizer_states_and_gradient_swap_out(index)


def release_swap_buffers(zero: Any, index: int) -> None:
    """Frees their memory without writing them back."""
    zero._release_swap_buffers(index)


def update_weights(zero: Any, index: int) -> None:
    """Copies a group's master weights to this rank's part of the weights that the network computes with."""
    zero._reassign_or_swap_out_partitioned_parameters(index)


def invalidate_trace(coordinator: PartitionedParameterCoordinator) -> None:
    """Forgets the order in which modules were gathered."""
    coordinator._invalidate_trace()
