"""Builds the `Accelerator` for what the launch asks, on GPUs with NCCL and on machines without one with gloo."""

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import nn

from finetune.backend import deepspeed_config, ops
from finetune.backend.launch import Launch
from finetune.errors import BackendError, RecipeError
from finetune.recipe import Recipe

# Collectives wait this long for a slow rank before they give up.
TIMEOUT = timedelta(minutes=30)


def pick_precision(recipe: Recipe) -> str:
    """`fp32`, `bf16` or `fp16`: what the recipe asks for, `auto` settled by the device.

    Raises:
        BackendError: If this machine cannot compute in it.
    """
    gpu = torch.cuda.is_available()
    if recipe.precision == "auto":
        return "bf16" if gpu and torch.cuda.is_bf16_supported() else "fp32"
    if recipe.precision == "fp16" and not gpu:
        raise BackendError(
            "The recipe asks for precision fp16, which needs a GPU: on a CPU there is no loss scaling, and it would "
            "silently run as fp32 on some backends and without scaling on others. Set `precision: bf16` or `fp32`."
        )
    if recipe.precision == "bf16" and gpu and not torch.cuda.is_bf16_supported():
        raise BackendError("The recipe asks for precision bf16, which this GPU does not have. Set it to fp16 or fp32.")
    return recipe.precision


def check_devices(launch: Launch) -> None:
    """Refuses what this machine's devices cannot run.

    Raises:
        BackendError: With what is missing.
    """
    place = launch.file or "The launch environment"
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if local > torch.cuda.device_count():
            raise BackendError(
                f"{place} starts {local} processes on a machine with {torch.cuda.device_count()} GPU(s); each needs "
                f"one of its own. Set num_processes (or --num_processes) to {torch.cuda.device_count()}."
            )
    elif launch.uses_fsdp and launch.offload_params != "none":
        raise BackendError(
            f"{place} asks FSDP to offload parameters to the CPU, which needs a GPU to compute on; this machine has "
            "none. Use accelerate_configs/fsdp.yaml here, or zero3_offload.yaml, which runs without a GPU."
        )


def needed_ops(launch: Launch) -> list[ops.Op]:
    """The native DeepSpeed ops that a launch needs."""
    if not launch.uses_deepspeed:
        return []
    names: list[ops.Op] = [] if torch.cuda.is_available() else ["shm_comm"]
    if launch.offload_optimizer != "none":
        names.append("cpu_adam")
    if "nvme" in (launch.offload_params, launch.offload_optimizer):
        names.append("async_io")
    return names


def start(launch: Launch, recipe: Recipe, precision: str, accumulation: int) -> Accelerator:
    """Starts the process group and the `Accelerator`.

    Args:
        accumulation: Micro-batches an optimiser step and process.

    Raises:
        BackendError: If the launch plane contradicts the recipe.
    """
    mixed = {"fp32": "no"}.get(precision, precision)
    if launch.mixed_precision not in ("no", mixed):
        raise BackendError(
            f"{launch.file or 'ACCELERATE_MIXED_PRECISION'} says mixed_precision: {launch.mixed_precision}, the "
            f"recipe says precision: {precision}. The recipe decides: take mixed_precision out of the launch config."
        )
    exported = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if exported not in ("auto", "1", str(accumulation)):
        raise BackendError(
            f"{launch.file or 'ACCELERATE_GRADIENT_ACCUMULATION_STEPS'} says gradient accumulation {exported}, the "
            f"recipe's batch makes it {accumulation}. The recipe decides: take it out of the launch config."
        )
    # Accelerate lets the variable win over its own argument; DeepSpeed's launcher always exports it.
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    _check_trackers(recipe)
    cpu = not torch.cuda.is_available()
    if cpu and launch.num_threads is not None:
        torch.set_num_threads(launch.num_threads)
    handlers: list[Any] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    settings: dict[str, Any] = {}
    if launch.uses_deepspeed:
        handlers.append(InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=TIMEOUT))
        settings["deepspeed_plugin"] = _deepspeed_plugin(launch, recipe, precision, accumulation)
        # It warns of every optimiser but its own, and of settings that are `auto`.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    else:
        handlers.append(InitProcessGroupKwargs(timeout=TIMEOUT))
        if cpu and launch.uses_fsdp:
            _enter_fsdp_on_gloo()
        if launch.uses_fsdp:
            settings["fsdp_plugin"] = _fsdp_plugin(launch)
    accelerator = Accelerator(
        # DeepSpeed's config has its own say, completed above.
        mixed_precision="no" if launch.uses_deepspeed else mixed,
        gradient_accumulation_steps=accumulation,
        cpu=cpu and launch.kind in ("single", "ddp"),
        dataloader_config=DataLoaderConfiguration(),
        kwargs_handlers=handlers,
        log_with=list(recipe.log.trackers) or None,
        project_dir=recipe.output.dir,
        **settings,
    )
    if not cpu:
        # Accelerate may turn TF32 on behind the recipe's back; fp32 means fp32.
        torch.backends.cuda.matmul.allow_tf32 = False
    return accelerator


def _check_trackers(recipe: Recipe) -> None:
    """Accelerate drops a tracker that is not installed with a warning; whoever asked for it would miss it."""
    from accelerate.tracking import get_available_trackers

    installed = sorted(str(getattr(t, "value", t)) for t in get_available_trackers())
    absent = [name for name in recipe.log.trackers if name not in installed]
    if absent:
        raise RecipeError(
            f"log.trackers: {', '.join(absent)} cannot be used; installed here: {', '.join(installed) or 'none'}. "
            "Install it with pip, or take it out: metrics.jsonl is written in any case."
        )


def _enter_fsdp_on_gloo() -> None:
    """Starts gloo and opens Accelerate's FSDP branch, which it only takes for GPU process groups.

    Private state, so in this one place; `prove` afterwards reads back what really runs.
    Source: accelerate 1.15, `AcceleratorState.__init__` (MULTI_CPU is not in its list).
    """
    state = PartialState(cpu=True, timeout=TIMEOUT)
    if state.distributed_type != DistributedType.MULTI_CPU:
        raise BackendError(
            "This version of accelerate no longer starts gloo as MULTI_CPU, which running FSDP without a GPU builds "
            "on. Install the accelerate version of constraints.txt."
        )
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = torch.device("cpu")


def _fsdp_plugin(launch: Launch) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = FullyShardedDataParallelPlugin()
    # Accelerate's own policy reduces gradients in bf16 and casts every output, the loss too, to bf16.
    # Without an output dtype the loss leaves the model as it was computed: in fp32. Weights stay fp32 and are cast
    # inside operations, as on one device, unless the launch file asks for the lighter way.
    weights = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(launch.mixed_precision)
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=torch.float32)
    return plugin


def _deepspeed_plugin(launch: Launch, recipe: Recipe, precision: str, accumulation: int) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    config = deepspeed_config.complete(
        launch.ds_config,
        recipe=recipe,
        precision=precision,
        accumulation=accumulation,
        world=launch.num_processes,
        place=launch.ds_place,
    )
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=launch.sharded_init)


def loading(launch: Launch, pretrained: bool) -> AbstractContextManager[None]:
    """A context to build the model in: whole on every rank, or sharded as it loads where the launch says so.

    Random weights are always drawn whole: drawn in shards they would differ from every other backend's.
    """
    if launch.kind != "zero3" or (pretrained and launch.sharded_init):
        return nullcontext()
    return _WholeModel()


def shard_in_own_dtype(model: nn.Module, config: dict[str, Any]) -> None:
    """Shards a whole model for ZeRO-3 before DeepSpeed does, in place, so that NVMe holds it in its own dtype.

    Left to itself, DeepSpeed 0.19 takes the dtype of what it swaps from the device instead of the model where fp16
    is not supported: fp32 parameters would go to disk, and come back, as bf16.
    Source: deepspeed, `Init._set_dtype` in `runtime/zero/partition_parameters.py` (a conditional's precedence).
    """
    import deepspeed

    if not any(hasattr(p, "ds_id") for p in model.parameters()):
        deepspeed.zero.Init(module=model, config_dict_or_path=config)


class _WholeModel(AbstractContextManager[None]):
    """Hides DeepSpeed from transformers, which otherwise shards models while it builds them.

    Source: transformers, `integrations/deepspeed.py`: the config is a module global.
    """

    def __enter__(self) -> None:
        from transformers.integrations import deepspeed

        self._config = deepspeed.deepspeed_config()
        self._reference = deepspeed._hf_deepspeed_config_weak_ref
        deepspeed.unset_hf_deepspeed_config()

    def __exit__(self, *_: object) -> None:
        from transformers.integrations import deepspeed

        deepspeed._hf_deepspeed_config_weak_ref = self._reference
