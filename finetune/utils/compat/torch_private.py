"""Private names of torch that do not need its sharding or tracing, whose imports take a second and more."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm, dropout

from finetune.utils.compat.tested import require

# Not `torch.distributed.rendezvous`, which is a function of that name.
_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

GROWTH_TRACKER = "_growth_tracker"
"""The key of `GradScaler.state_dict()` for the steps since the scale last changed."""

require("torch", batchnorm, "_BatchNorm")
require("torch", dropout, "_DropoutNd")
require("torch", distributed_c10d, "_get_default_store")
require("torch", _rendezvous, "_create_c10d_store")
require("torch", nn.Module, "_parameters", "_buffers")
require("torch", nn.parallel.DistributedDataParallel, "_get_ddp_logging_data")
require("torch", torch.optim.Adam, "_step_supports_amp_scaling")
require("torch", torch.amp.GradScaler, GROWTH_TRACKER)

BatchNorm = batchnorm._BatchNorm
Dropout = dropout._DropoutNd
GradBucket = _distributed_c10d.GradBucket


def default_store() -> Store:
    """The store that the default process group met through."""
    return distributed_c10d._get_default_store()


@contextmanager
def prefixed_rendezvous(prefix: str) -> Iterator[None]:
    """Has process groups that are started inside keep their keys in the store under a prefix."""
    create = _rendezvous._create_c10d_store

    def prefixed(*arguments: Any, **options: Any) -> Store:
        return PrefixStore(prefix, create(*arguments, **options))

    _rendezvous._create_c10d_store = prefixed
    try:
        yield
    finally:
        _rendezvous._create_c10d_store = create


def ddp_logging_data(model: Any) -> dict[str, Any]:
    """What a `DistributedDataParallel` module says of itself, such as `comm_hook`."""
    data: dict[str, Any] = model._get_ddp_logging_data()
    return data


def skips_nonfinite_steps(optimizer: Any) -> bool:
    """Whether the optimiser's kernel reads `found_inf` and leaves out the step itself (fused optimisers)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def cpu_has_bf16() -> bool:
    """Whether oneDNN multiplies bf16 matrices on this CPU; torch must be built with it."""
    require("torch", torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def num_compiled_graphs() -> int:
    """How many graphs `torch.compile` has compiled in this process."""
    # Not above: a second of imports that only runs with model.compile need.
    from torch._dynamo import utils

    require("torch", utils, "counters")
    return int(utils.counters["stats"]["unique_graphs"])


def build_directory(name: str) -> str:
    """The folder that torch compiles an extension in; made if it is not there."""
    # Not above: it imports setuptools.
    from torch.utils import cpp_extension

    require("torch", cpp_extension, "_get_build_directory")
    return cpp_extension._get_build_directory(name, False)


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters and buffers, by name; to change a table is to change the module."""
    return module._parameters, module._buffers


def take_parameter(module: nn.Module, name: str) -> Any:
    """Takes a parameter out of a module."""
    return module._parameters.pop(name)
