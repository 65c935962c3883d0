"""What follows from recipe and launch together, resolved and checked before data is read or anything is started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.recipe import divisors
from finetune.config.recipe_schema import Recipe
from finetune.distributed import deepspeed_config, device_selection
from finetune.distributed.device_selection import Devices
from finetune.distributed.launch.launch_config import Launch, check_installed
from finetune.utils.compat.library_versions import installed, require_installed
from finetune.utils.errors import BackendError, RecipeError

# See `data.rows.row_dataset`.
_ROWS_GROW_BY = 8
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"


@dataclass(frozen=True)
class ResolvedConfig:
    """What neither plane says alone."""

    precision: str
    """What the network computes in: fp32, bf16 or fp16."""
    accumulation: int
    """Micro-batches an optimiser step and process."""
    ds_config: dict[str, Any]
    """The DeepSpeed config, completed from the recipe; empty for other backends."""


def resolve_config(recipe: Recipe, launch: Launch, env: Mapping[str, str] = os.environ) -> ResolvedConfig:
    """Settles precision, accumulation and DeepSpeed's values.

    Args:
        env: A worker's environment.

    Raises:
        RecipeError: If the batch does not come out even, or a tracker is not installed.
        BackendError: If the planes contradict each other, or this machine cannot run what is asked.
    """
    check_installed(launch)
    if launch.sync_each_batch:
        _check_sync_each_batch(launch)
    settled = agree(recipe, launch, device_selection.of_torch(), env)
    if launch.uses_deepspeed:
        deepspeed_config.check_values(settled.ds_config, launch.ds_place)
    check_trackers(recipe)
    if recipe.model.quantization is not None:
        require_installed("bitsandbytes", f"model.quantization {recipe.model.quantization}")
    return settled


def _check_sync_each_batch(launch: Launch) -> None:
    """Refuses sums after each micro-batch where ranks that use other weights in one (experts) would wait for ever."""
    import torch

    from finetune.utils.compat.torch_private import reduces_unused_gradients

    if not reduces_unused_gradients():
        raise BackendError(
            f"{launch.file or 'The launch environment'} says fsdp_sync_each_batch: true, for which torch "
            f"{torch.__version__} lacks a function that 2.13 has (set_reduce_scatter_unused_params). Set it to false, "
            "with which gradients are held whole between micro-batches, or install a newer torch."
        )


def agree(recipe: Recipe, launch: Launch, here: Devices, env: Mapping[str, str]) -> ResolvedConfig:
    """`resolve_config` on given devices and for a worker's environment, without torch.

    Raises:
        RecipeError: If the batch does not come out even.
        BackendError: If the planes contradict each other, or the devices cannot run what is asked.
    """
    check_devices(launch, here, env)
    precision = _pick_precision(recipe, here)
    accumulation = derive_accumulation(recipe, launch.data_ranks, launch.num_processes)
    _check_planes(recipe, launch, precision, accumulation, env)
    config: dict[str, Any] = {}
    if launch.uses_deepspeed:
        config = deepspeed_config.complete_config(
            launch.ds_config,
            recipe=recipe,
            precision=precision,
            accumulation=accumulation,
            world=launch.num_processes,
            place=launch.ds_place,
        )
    _check_packed(recipe, launch, config)
    return ResolvedConfig(precision, accumulation, config)


def derive_accumulation(recipe: Recipe, world: int, processes: int | None = None) -> int:
    """Micro-batches an optimiser step and process: global batch / (micro-batch x data ranks).

    Args:
        world: Data ranks: processes, or groups of processes that read the same rows.
        processes: All of them, for messages; as many as data ranks if left out.

    Raises:
        RecipeError: If it does not come out even, with the sizes that do.
    """
    batch = recipe.batch
    if recipe.length.steps == 0:
        return 1  # nothing is trained, so there is no global batch to fill
    if batch.global_size % (batch.rows * world) == 0:
        return batch.global_size // (batch.rows * world)
    share = batch.global_size // world if batch.global_size % world == 0 else 0
    fits = divisors(share) if share else []
    split = 1 if processes is None else processes // world
    ranks = "processes" if split == 1 else f"groups of {split} processes, which read the same rows,"
    advice = (
        f"With {world} {ranks} batch.micro_size can be {', '.join(map(str, fits))}."
        if fits
        else f"No micro-batch fits {world} {ranks.rstrip(',')}: batch.global_size must be a multiple of {world}."
    )
    raise RecipeError(
        f"batch.global_size {batch.global_size} is not a multiple of batch.micro_size {batch.rows} x {world} "
        f"{ranks.partition(',')[0]} = {batch.rows * world}. {advice}"
    )


def _pick_precision(recipe: Recipe, here: Devices) -> str:
    """`fp32`, `bf16` or `fp16`: what the recipe asks for, `auto` settled by the device.

    Raises:
        BackendError: If this machine cannot compute in it.
    """
    if recipe.precision == "auto":
        return "bf16" if here.gpus and here.bf16 else "fp32"
    if recipe.precision == "fp16" and not here.gpus:
        raise BackendError(
            "The recipe asks for precision fp16, which needs a GPU: on a CPU there is no loss scaling, and it would "
            "silently run as fp32 on some backends and without scaling on others. Set `precision: bf16` or `fp32`."
        )
    if recipe.precision == "bf16" and not here.bf16:
        raise BackendError("The recipe asks for precision bf16, which this GPU does not have. Set it to fp16 or fp32.")
    return recipe.precision


def check_devices(launch: Launch, here: Devices, env: Mapping[str, str]) -> None:
    """Refuses what this machine's devices, and what they talk by, cannot run.

    Args:
        env: A worker's environment.

    Raises:
        BackendError: With what is missing.
    """
    place = launch.file or "The launch environment"
    if here.gpus:
        local = int(env.get("LOCAL_WORLD_SIZE", "1"))
        if local > here.gpus:
            raise BackendError(
                f"{place} starts {local} processes on a machine with {here.gpus} GPU(s); each needs one of its own. "
                f"Set num_processes (or --num_processes) to {here.gpus}."
            )
    elif launch.uses_fsdp and launch.offload_params != "none":
        raise BackendError(
            f"{place} asks FSDP to offload parameters to the CPU, which needs a GPU to compute on; this machine has "
            "none. Use accelerate_configs/fsdp.yaml here, or zero3_offload.yaml, which runs without a GPU."
        )
    elif launch.uses_fsdp and _in_detail(env) and (installed("torch") or "").startswith(("2.11.", "2.12.")):
        raise BackendError(
            f"{_DEBUG} is DETAIL, under which this torch ({installed('torch')}) cannot gather FSDP2's weights over "
            f"gloo, so that no model is written. Set {_DEBUG} to INFO, or install torch 2.13 or newer."
        )
    elif launch.kind == "ddp" and _in_detail(env):
        # What wraps the group is taken for the group. Source: torch 2.13, `Logger::set_env_variables` in
        # `csrc/distributed/c10d/logger.cpp`, which casts it to `ProcessGroupGloo` and reads its number of threads.
        raise BackendError(
            f"{_DEBUG} is DETAIL, under which DDP on gloo reads memory that is not its own, a fault of torch (seen in "
            f"2.13), and all processes end with signal 11. Set {_DEBUG} to INFO, or take "
            "accelerate_configs/fsdp.yaml, which runs in detail."
        )


def _in_detail(env: Mapping[str, str]) -> bool:
    return env.get(_DEBUG, "").upper() == "DETAIL"


def _check_planes(
    recipe: Recipe, launch: Launch, precision: str, accumulation: int, env: Mapping[str, str] = os.environ
) -> None:
    """Refuses values of the launch plane that are the recipe's to say."""
    mixed = {"fp32": "no"}.get(precision, precision)
    if launch.kind == "zero3" and recipe.model.gradient_checkpointing == "selective":
        raise BackendError(
            f"{launch.file or 'The launch environment'} asks for ZeRO stage 3, which gathers weights inside of what "
            "`model.gradient_checkpointing: selective` recomputes. Set it to true or false, or take another launch "
            "config, such as accelerate_configs/fsdp.yaml."
        )
    if launch.uses_fsdp and launch.offload_optimizer != "none" and precision == "fp16":
        # Source: torch 2.13, `_MultiDeviceReplicator.get` in `amp/grad_scaler.py`, a copy that nobody waits for.
        raise BackendError(
            f"{launch.file or 'The launch environment'} offloads FSDP2's gradients to host memory, where torch's loss "
            "scaling for fp16 reads the scale before it has arrived from the GPU, and trains on wrong gradients. Set "
            "`precision: bf16`, or take accelerate_configs/zero3_offload.yaml."
        )
    if launch.sequence > 1:
        check_split_rows(recipe, launch)
    if launch.tensor > 1:
        check_split_layers(recipe, launch, precision)
    if recipe.model.fp8 and precision != "bf16":
        came = " on this machine" if recipe.precision == "auto" else ""
        raise RecipeError(
            f"model.fp8 needs bf16 for all that is not computed in fp8, and precision is {precision}{came}. Set "
            "`precision: bf16`, or model.fp8 to false."
        )
    if recipe.model.fp8 and launch.kind == "zero3" and not recipe.model.gradient_checkpointing:
        raise BackendError(
            f"{launch.file or 'The launch environment'} asks for ZeRO stage 3, and `model.fp8` would keep its gathered "
            "weights, all of them and in fp32, from the forward to the backward pass. Set "
            "`model.gradient_checkpointing: true`, with which those of one layer are kept at a time, or take another "
            "launch config, such as accelerate_configs/fsdp.yaml."
        )
    if launch.mixed_precision not in ("no", mixed):
        wanted = launch.mixed_precision
        more = f", and set `precision: {wanted}` in the recipe if that is meant" if wanted in ("bf16", "fp16") else ""
        raise BackendError(
            f"{launch.file or 'ACCELERATE_MIXED_PRECISION'} says mixed_precision: {wanted}, and "
            f"{deepspeed_config.said_of_precision(recipe, precision)}. The recipe decides: take mixed_precision out of "
            f"the launch config{more}."
        )
    exported = env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if exported not in ("auto", "1", str(accumulation)):
        # A launch file that says so has been refused when it was read.
        raise BackendError(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {exported} in the environment, and the recipe's batch makes it "
            f"{accumulation}. The recipe decides: `unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, or take the "
            "launcher's option of that name away."
        )


def _check_packed(recipe: Recipe, launch: Launch, ds_config: Mapping[str, Any]) -> None:
    """Refuses a cast of all weights to 16 bit where some of them are packed."""
    lighter = [launch.uses_fsdp and launch.mixed_precision != "no"]
    lighter += [bool((ds_config.get(name) or {}).get("enabled")) for name in ("bf16", "fp16")]
    if recipe.model.quantization is not None and any(lighter):
        raise BackendError(
            f"{launch.ds_place or launch.file or 'The launch environment'} asks for weights in 16 bit, and a cast "
            'would destroy those that model.quantization packs. Remove mixed_precision (or "bf16") there, and '
            "take precision bf16: products are then computed in 16 bit."
        )


def check_split_rows(recipe: Recipe, launch: Launch) -> None:
    """Refuses what is not computed, or was never shown to be, on rows that are split over ranks."""
    parts, length, model = launch.sequence, recipe.data.sequence_length, recipe.model
    place = f"{launch.file or 'The launch environment'} splits each row over {parts} ranks (sp_size)"
    if length % parts:
        fits = ", ".join(str(size) for size in divisors(length) if size <= 64)
        near = length // parts * parts
        advice = f"Set sp_size to a divisor of it ({fits})" + (f", or data.sequence_length to {near}" if near else "")
        raise BackendError(f"{place}, which does not divide data.sequence_length {length}. {advice}.")
    if recipe.data.packing == "padded" and _ROWS_GROW_BY % parts:
        raise BackendError(
            f"{place}, but padded rows grow in steps of {_ROWS_GROW_BY} tokens. Set sp_size to a divisor of that, or "
            "data.packing to `documents`."
        )
    if (launch.offload_params, launch.offload_optimizer) != ("none", "none"):
        raise BackendError(f"{place}, which is not offered with offload. Take a launch config without one of them.")
    refused = {
        f"model.attention {model.attention}": (model.attention not in ("auto", "packed"), "auto"),
        "model.compile": (model.compile, "false"),
        "model.fp8": (bool(model.fp8), "false"),
        "model.activation_offload": (model.activation_offload, "false"),
    }
    _refuse_keys(refused, place, "sequence parallelism")


def check_split_layers(recipe: Recipe, launch: Launch, precision: str) -> None:
    """Refuses what is not computed, or was never shown to be, in layers that are split over ranks."""
    model, lora = recipe.model, recipe.lora
    place = f"{launch.file or 'The launch environment'} splits layers over {launch.tensor} ranks (tp_size)"
    if (launch.offload_params, launch.offload_optimizer) != ("none", "none"):
        raise BackendError(f"{place}, which is not offered with offload. Take a launch config without one of them.")
    if launch.mixed_precision != "no":
        raise BackendError(
            f"{place}, which is not offered with mixed_precision {launch.mixed_precision}. Take that out: the recipe's "
            "precision already has products computed in 16 bit."
        )
    refused = {
        "precision fp16": (precision == "fp16", "bf16"),
        "model.compile": (model.compile, "false"),
        "model.fp8": (bool(model.fp8), "false"),
        "model.activation_offload": (model.activation_offload, "false"),
        "model.quantization int8": (model.quantization == "int8", "nf4"),
        "lora.dora": (lora is not None and lora.dora, "false"),
        "lora.dropout": (lora is not None and bool(lora.dropout), "0"),
    }
    _refuse_keys(refused, place, "tensor parallelism")


def _refuse_keys(refused: Mapping[str, tuple[bool, str]], place: str, kind: str) -> None:
    """Refuses what a recipe asks for: by key and value, whether it does and what to set the key to."""
    for what, (given, instead) in refused.items():
        if given:
            key = what.split()[0]
            raise BackendError(
                f"{place}, which is not offered with {what}. Set {key} to {instead}, or take a launch config without "
                f"{kind}."
            )


def check_trackers(recipe: Recipe) -> None:
    """Refuses trackers whose package is missing.

    Raises:
        RecipeError: With the extra to install.
    """
    for name in recipe.log.trackers:
        if installed(name) is None:
            raise RecipeError(
                f"log.trackers: {name} is not installed here. Install it with `pip install 'finetune[{name}]'`, or "
                "take it out: metrics.jsonl is written in any case."
            )
