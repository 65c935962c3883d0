"""Builds the `Accelerator` for what the launch asks, on GPUs with NCCL and on machines without one with gloo."""

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import nn

from finetune.config.recipe_schema import Recipe
from finetune.distributed import rendezvous_store
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.mesh import Mesh
from finetune.distributed.resolve_config import ResolvedConfig
from finetune.utils.compat import accelerate_private, torch_private
from finetune.utils.errors import BackendError

# Collectives wait this long for a slow rank before they give up.
TIMEOUT = timedelta(minutes=30)

REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""`optim.reduce_dtype` as torch names it."""


def start(launch: Launch, recipe: Recipe, settled: ResolvedConfig) -> Accelerator:
    """Starts the process group and the `Accelerator`."""
    # Accelerate lets the variable win over its own argument; DeepSpeed's launcher always exports it.
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    cpu = not torch.cuda.is_available()
    if cpu and launch.num_threads is not None:
        torch.set_num_threads(launch.num_threads)
    handlers: list[Any] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    settings: dict[str, Any] = {}
    if launch.uses_deepspeed:
        from accelerate.utils import DeepSpeedPlugin

        # Refuses a version that lacks what checkpoints need, before a step is taken.
        from finetune.utils.compat import deepspeed_private  # noqa: F401

        handlers.append(InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=TIMEOUT))
        settings["deepspeed_plugin"] = DeepSpeedPlugin(
            hf_ds_config=settled.ds_config, zero3_init_flag=launch.sharded_init
        )
        # It warns of every optimiser but its own, and of settings that are `auto`.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    else:
        handlers.append(InitProcessGroupKwargs(timeout=TIMEOUT))
        if launch.uses_fsdp:
            settings["fsdp_plugin"] = _fsdp_plugin(launch, REDUCED[recipe.optim.reduce_dtype])
    torch_private.start_gloo_with_one_worker()
    with _meeting_anew(), _split_by_us(launch):
        if cpu and launch.uses_fsdp:
            _enter_fsdp_on_gloo()
        accelerator = Accelerator(
            # DeepSpeed's config has its own say, completed above.
            mixed_precision="no" if launch.uses_deepspeed or settled.precision == "fp32" else settled.precision,
            gradient_accumulation_steps=settled.accumulation,
            cpu=cpu and launch.kind in ("single", "ddp"),
            dataloader_config=DataLoaderConfiguration(),
            kwargs_handlers=handlers,
            **settings,
        )
    if not cpu:
        # fp32 means fp32. Accelerate may turn TF32 on for matrix products; for convolutions torch itself does.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return accelerator


def _meeting_anew() -> AbstractContextManager[None]:
    """Lets ranks that `--max_restarts` has started again, and trials, leave their addresses under names of their own.

    The launcher keeps the store of the attempt that failed. In torch 2.13 the names in it are the same for all
    attempts, so that a rank may find the address of one that is dead.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") + os.environ.get(rendezvous_store.TRIAL, "")
    return torch_private.prefixed_rendezvous(f"finetune/attempt-{attempt}")


@contextmanager
def _split_by_us(launch: Launch) -> Iterator[None]:
    """Keeps sequence and tensor parallelism from Accelerate.

    Its sequence parallelism is DeepSpeed's and runs under DeepSpeed alone; its tensor parallelism imports a name that
    transformers 5.23 no longer has.
    """
    flag = "ACCELERATE_USE_PARALLELISM_CONFIG"
    before = os.environ.pop(flag, None) if launch.sequence * launch.tensor > 1 else None
    try:
        yield
    finally:
        if before is not None:
            os.environ[flag] = before


def _enter_fsdp_on_gloo() -> None:
    """Starts gloo and opens Accelerate's FSDP branch, which it only takes for GPU process groups.

    `verify_launch` afterwards reads back what really runs.
    Source: accelerate 1.15, `AcceleratorState.__init__` (MULTI_CPU is not in its list).
    """
    state = PartialState(cpu=True, timeout=TIMEOUT)
    if state.distributed_type != DistributedType.MULTI_CPU:
        raise BackendError(
            "This version of accelerate no longer starts gloo as MULTI_CPU, which running FSDP without a GPU builds "
            "on. Install a version of it that was tested (`finetune doctor`)."
        )
    accelerate_private.set_shared_state(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))


def _fsdp_plugin(launch: Launch, reduced: torch.dtype) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = FullyShardedDataParallelPlugin()
    # Accelerate's own policy reduces gradients in bf16 and casts every output, the loss too, to bf16.
    # Without an output dtype the loss leaves the model as it was computed: in fp32. Weights stay fp32 and are cast
    # inside operations, as on one device, unless the launch file asks for the lighter way.
    weights = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(launch.mixed_precision)
    # Gradients of fp32 weights are fp32 unless another dtype is named. Named, torch 2.13 fails over a unit that took no
    # part in a micro-batch (the vision tower of a model that reads text) where gradients are held until the last one.
    named = None if weights is None and reduced is torch.float32 else reduced
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=named)
    return plugin


def loading(launch: Launch, pretrained: bool) -> AbstractContextManager[None]:
    """A context to build the model in: whole on every rank, or sharded as it loads where the launch says so.

    Random weights are always drawn whole: drawn in shards they would differ from every other backend's.
    """
    if launch.kind != "zero3" or (pretrained and launch.sharded_init):
        return nullcontext()
    from finetune.utils.compat.transformers_private import hidden_deepspeed

    return hidden_deepspeed()


def prepare_beside_split_layers(
    accelerator: Accelerator, launch: Launch, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Any]:
    """`accelerator.prepare` over the ranks that hold the same part of each layer: gradients are averaged over these."""
    if launch.uses_fsdp:
        with accelerate_private.sharding_over(accelerator, mesh.averaging_mesh(accelerator.device.type)):
            wrapped, prepared = accelerator.prepare(model, optimizer)
        return wrapped, prepared
    moved: Any = accelerator.prepare_model(model, evaluation_mode=True)
    devices = None if accelerator.device.type == "cpu" else [accelerator.device.index]
    wrapped = nn.parallel.DistributedDataParallel(
        moved, device_ids=devices, process_group=mesh.groups["average"].handle, **accelerator.ddp_handler.to_kwargs()
    )
    return wrapped, accelerator.prepare_optimizer(optimizer)


def sum_in_bf16(group: Any, bucket: Any) -> Any:
    """What DDP calls to sum a bucket of gradients over ranks: in bf16, on gloo too, unlike torch's own."""
    rounded = bucket.buffer().to(torch.bfloat16).div_(torch.distributed.get_world_size(group))
    sent: Any = torch.distributed.all_reduce(rounded, group=group, async_op=True)
    return sent.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def shard_in_own_dtype(model: nn.Module, config: dict[str, Any]) -> None:
    """Shards a whole model for ZeRO-3 before DeepSpeed does, in place, so that NVMe holds it in its own dtype.

    Left to itself, DeepSpeed 0.19 takes the dtype of what it swaps from the device instead of the model where fp16
    is not supported: fp32 parameters would go to disk, and come back, as bf16.
    Source: deepspeed, `Init._set_dtype` in `runtime/zero/partition_parameters.py` (a conditional's precedence).
    """
    import deepspeed

    if not any(hasattr(p, "ds_id") for p in model.parameters()):
        deepspeed.zero.Init(module=model, config_dict_or_path=config)


def match_shards(model: nn.Module) -> None:
    """Puts shards of a network that was sharded as it was loaded in the dtypes that its parameters have by now."""
    for parameter in model.parameters():
        shard: Any = getattr(parameter, "ds_tensor", None)
        if shard is not None and shard.dtype != parameter.dtype:
            shard.data = shard.data.to(parameter.dtype)


def plan_gathers_by_training(engine: Any) -> None:
    """Has ZeRO-3 learn from the first training step, not from forward passes before it, what is needed when.

    DeepSpeed records the order of the first pass, and remembers for ever, by position in it, which weights are not
    needed again soon. Told by a forward pass alone, it would free all of them before the backward pass, which would
    gather them again one by one.
    Source: deepspeed 0.19, `__params_to_release` in `runtime/zero/partitioned_param_coordinator.py` (an `lru_cache`
    that outlives the order it was made for).
    """
    from finetune.utils.compat.deepspeed_private import invalidate_trace

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()

    def forget(module: nn.Module, arguments: Any) -> None:
        if not coordinator.is_invalid_trace():
            invalidate_trace(coordinator)
        if torch.is_grad_enabled():
            handle.remove()

    # Before DeepSpeed's own hook, which takes the order of the pass before as settled.
    handle = engine.module.register_forward_pre_hook(forget, prepend=True)
