"""A backend of one real rank whose other ranks are faked: what it wraps and allocates is real.

Communication goes to torch's fake process group, which answers at once. Under fake tensors this takes neither a GPU nor
memory. Only for a process that does nothing else: it changes what libraries do.
"""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from finetune.config.recipe_schema import Recipe
from finetune.distributed.backend import Backend
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.predicted_environment import exported_by_file
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.split_parameters import Splits
from finetune.distributed.strategies.strategy import strategy_of
from finetune.utils.compat.torch_private import GradBucket

# Accelerate's variables: what the user's shell says of another launch must not reach this one.
_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def why_closed(launch: Launch) -> str:
    """Returns why a launch cannot be imagined; empty if it can."""
    if launch.uses_deepspeed:
        return "DeepSpeed cannot run without its other ranks"
    if launch.offload_params != "none":
        return "FSDP2 offloads from a GPU only"
    return ""


def stand_in(launch: Launch) -> Launch:
    """Returns what is imagined for a launch: itself, or, if it is closed, one of its processes without a backend.

    The latter has no file. Its kind says how casts of weights are kept: not, where layers are gathered and freed.
    """
    if not why_closed(launch):
        return launch
    return Launch(kind="fsdp" if launch.sharded else "single", num_processes=launch.num_processes)


def rank_environment(launch: Launch) -> dict[str, str]:
    """Returns the environment of rank 0 of a launch, on a machine without GPUs."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(_VARIABLES)}
    # So that the figures are the same on every machine.
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if launch.file is None or launch.num_processes == 1:
        return {key: value for key, value in env.items() if key not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    ranks = str(launch.num_processes)
    env |= exported_by_file(launch.file, launch.num_processes, launch.replicate)
    env |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": "0", "LOCAL_RANK": "0"}
    return env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def start_backend(recipe: Recipe, launch: Launch) -> Backend:
    """Starts rank 0 of a launch that `stand_in` has made."""
    asked = launch
    if launch.file is None:
        share = recipe.batch.global_size // launch.num_processes
        recipe = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"global_size": share})})
        asked = Launch(kind="single", num_processes=1)
    elif launch.num_processes > 1:
        from finetune.utils.compat import torch_tracing_private

        torch_tracing_private.start_fake_process_group(launch.num_processes)
        torch_tracing_private.let_fake_tensors_pass()
    backend = Backend.start(recipe, asked, resolve_config(recipe, asked), quiet=True)
    # A first micro-batch and a last one.
    backend.accumulation = min(2, backend.accumulation)
    # A move to a device would swap tensors, and nothing can be proved of ranks that are not there.
    backend.accelerator.device_placement = False
    backend.unverified = False
    if asked is launch:
        return backend
    # Its autocast is that of the launch.
    strategy = replace(backend.strategy, autocast=strategy_of(launch).autocast)
    return replace(backend, launch=launch, strategy=strategy)


def prepare_fakes(
    backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, splits: Splits
) -> tuple[nn.Module, Any]:
    """Wraps a model of fake tensors and its optimiser, as `Backend.prepare` does."""
    from finetune.utils.compat.torch_tracing_private import keep_buckets

    for number, parameter in enumerate(model.parameters()):
        # By which Accelerate finds the optimiser's parameters again; fake ones have none.
        known: Any = parameter
        known.data_ptr = lambda number=number: number
    wrapped, prepared = backend.prepare(model, optimizer, splits)
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        wrapped.register_comm_hook(None, _arrived)
        keep_buckets(wrapped)
    return wrapped, prepared


def _arrived(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A bucket as if it had been summed: the process group's own answer holds no tensor."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
