"""Private names of torch's FSDP2 and DTensor; a module of its own because of what it imports."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, _utils

from finetune.utils.compat.library_versions import require

require("torch", FSDPModule, "_get_fsdp_state")
require("torch", FSDPState, "_fsdp_param_group")
require(
    "torch",
    FSDPParamGroup,
    *("fsdp_params", "mp_policy", "offload_policy", "_partial_reduce_output", "_reshard_after_forward"),
)
require(
    "torch",
    FSDPParam,
    *("sharded_param", "reduce_dtype", "unsharded_accumulated_grad", "_param_fqn", "_unsharded_param"),
)
require("torch", _utils, "compute_local_shape_and_global_offset")


def fsdp_param_group(module: FSDPModule) -> FSDPParamGroup | None:
    """Returns the parameters that a sharded unit owns; None if it owns none."""
    return module._get_fsdp_state()._fsdp_param_group


def fsdp_param_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Returns the parameters of each sharded unit of a model that owns any."""
    groups = [fsdp_param_group(module) for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for group in groups if group is not None]


def fsdp_params(model: nn.Module) -> list[FSDPParam]:
    """Returns the sharded parameters of a model."""
    return [parameter for group in fsdp_param_groups(model) for parameter in group.fsdp_params]


def parameter_name(parameter: FSDPParam) -> str:
    """Returns the name of a parameter in the whole model."""
    return str(parameter._param_fqn)


def partial_reduce_output(group: FSDPParamGroup) -> torch.Tensor | None:
    """Returns gradients that wait to be summed over the replicas of a hybrid shard, or None."""
    return group._partial_reduce_output


def reshards_after_forward(group: FSDPParamGroup) -> bool:
    """Tells if a group is freed between the forward and the backward pass."""
    return bool(group._reshard_after_forward)


def unsharded(parameter: FSDPParam) -> nn.Parameter | None:
    """Returns the whole parameter that the forward pass uses; None if it was never gathered."""
    return getattr(parameter, "_unsharded_param", None)


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's shard of a tensor, and its offset in the whole tensor."""
    return _utils.compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
