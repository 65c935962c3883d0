"""Refuses what a way of holding a network cannot do, before its strategy and torch are imported."""

from collections.abc import Mapping
from typing import Any

from finetune.config.recipe import divisors
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.utils.compat.library_versions import installed
from finetune.utils.errors import BackendError

# See `data.rows.packed_rows`.
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"


def check_devices(launch: Launch, gpus: int, env: Mapping[str, str]) -> None:
    """Raises a `BackendError` for what this machine's GPUs, or what processes talk by without any, cannot run.

    `env` is a worker's environment.
    """
    local, detail = int(env.get("LOCAL_WORLD_SIZE", "1")), env.get(_DEBUG, "").upper() == "DETAIL"
    if gpus and local > gpus:
        raise BackendError(
            f"{launch.place} starts {local} processes on a machine with {gpus} GPU(s); each needs one of its own. "
            f"Set num_processes (or --num_processes) to {gpus}."
        )
    if gpus:
        return
    if launch.uses_fsdp and launch.offload_params != "none":
        raise BackendError(
            f"{launch.place} asks FSDP to offload parameters to the CPU, which needs a GPU to compute on; this machine "
            "has none. Use accelerate_configs/fsdp.yaml here, or zero3_offload.yaml, which runs without a GPU."
        )
    if launch.uses_fsdp and detail and (installed("torch") or "").startswith(("2.11.", "2.12.")):
        raise BackendError(
            f"{_DEBUG} is DETAIL, under which this torch ({installed('torch')}) cannot gather FSDP2's weights over "
            f"gloo, so that no model is written. Set {_DEBUG} to INFO, or install torch 2.13 or newer."
        )
    if launch.kind == "ddp" and detail:
        # What wraps the group is taken for the group. Source: torch 2.13, `Logger::set_env_variables` in
        # `csrc/distributed/c10d/logger.cpp`, which casts it to `ProcessGroupGloo` and reads its number of threads.
        raise BackendError(
            f"{_DEBUG} is DETAIL, under which DDP on gloo reads memory that is not its own, a fault of torch (seen in "
            f"2.13), and all processes end with signal 11. Set {_DEBUG} to INFO, or take "
            "accelerate_configs/fsdp.yaml, which runs in detail."
        )


def check_recipe(recipe: Recipe, launch: Launch, precision: str) -> None:
    """Raises a `BackendError` for what a recipe asks for, in fp32, bf16 or fp16, and the launch cannot do."""
    if launch.kind == "zero3" and recipe.model.gradient_checkpointing == "selective":
        raise BackendError(
            f"{launch.place} asks for ZeRO stage 3, which gathers weights inside of what "
            "`model.gradient_checkpointing: selective` recomputes. Set it to true or false, or take another launch "
            "config, such as accelerate_configs/fsdp.yaml."
        )
    if launch.uses_fsdp and launch.offload_optimizer != "none" and precision == "fp16":
        # Source: torch 2.13, `_MultiDeviceReplicator.get` in `amp/grad_scaler.py`, a copy that nobody waits for.
        raise BackendError(
            f"{launch.place} offloads FSDP2's gradients to host memory, where torch's loss scaling for fp16 reads the "
            "scale before it has arrived from the GPU, and trains on wrong gradients. Set `precision: bf16`, or take "
            "accelerate_configs/zero3_offload.yaml."
        )
    check_split_rows(recipe, launch)
    check_split_layers(recipe, launch, precision)
    if recipe.model.fp8 and precision == "bf16" and launch.kind == "zero3" and not recipe.model.gradient_checkpointing:
        raise BackendError(
            f"{launch.place} asks for ZeRO stage 3, and `model.fp8` would keep its gathered weights, all of them and "
            "in fp32, from the forward to the backward pass. Set `model.gradient_checkpointing: true`, with which "
            "those of one layer are kept at a time, or take another launch config, such as "
            "accelerate_configs/fsdp.yaml."
        )


def check_packed_weights(recipe: Recipe, launch: Launch, ds_config: Mapping[str, Any]) -> None:
    """Refuses a cast of all weights to 16 bit where some of them are packed; `ds_config` is completed, or empty."""
    casts = launch.uses_fsdp and launch.mixed_precision != "no"
    casts = casts or any((ds_config.get(name) or {}).get("enabled") for name in ("bf16", "fp16"))
    if casts and recipe.model.quantization is not None:
        raise BackendError(
            f"{launch.ds_place or launch.place} asks for weights in 16 bit, and a cast "
            'would destroy those that model.quantization packs. Remove mixed_precision (or "bf16") there, and '
            "take precision bf16: products are then computed in 16 bit."
        )


def check_split_rows(recipe: Recipe, launch: Launch) -> None:
    """Refuses what is not computed, or was never shown to be, on rows that are split over ranks."""
    if launch.sequence == 1:
        return
    parts, length, model = launch.sequence, recipe.data.sequence_length, recipe.model
    intro = f"{launch.place} splits each row over {parts} ranks (sp_size)"
    if length % parts:
        fits = ", ".join(str(size) for size in divisors(length) if size <= 64)
        near = length // parts * parts
        advice = f"Set sp_size to a divisor of it ({fits})" + (f", or data.sequence_length to {near}" if near else "")
        raise BackendError(f"{intro}, which does not divide data.sequence_length {length}. {advice}.")
    refused = {
        f"model.attention {model.attention}": (model.attention not in ("auto", "packed"), "auto"),
        "model.compile": (model.compile, "false"),
        "model.fp8": (bool(model.fp8), "false"),
        "model.activation_offload": (model.activation_offload, "false"),
    }
    _refuse_with_splits(launch, refused, intro, "sequence parallelism")


def check_split_layers(recipe: Recipe, launch: Launch, precision: str) -> None:
    """Refuses what is not computed, or was never shown to be, in layers that are split over ranks."""
    if launch.tensor == 1:
        return
    model, lora = recipe.model, recipe.lora
    intro = f"{launch.place} splits layers over {launch.tensor} ranks (tp_size)"
    if launch.mixed_precision != "no":
        raise BackendError(
            f"{intro}, which is not offered with mixed_precision {launch.mixed_precision}. Take that out: the recipe's "
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
    _refuse_with_splits(launch, refused, intro, "tensor parallelism")


def _refuse_with_splits(launch: Launch, refused: Mapping[str, tuple[bool, str]], place: str, kind: str) -> None:
    """Refuses offload, and what a recipe asks for: by key and value, if it does and what to set the key to."""
    if (launch.offload_params, launch.offload_optimizer) != ("none", "none"):
        raise BackendError(f"{place}, which is not offered with offload. Take a launch config without one of them.")
    for what, (given, instead) in refused.items():
        if given:
            key = what.split()[0]
            raise BackendError(
                f"{place}, which is not offered with {what}. Set {key} to {instead}, or take a launch config without "
                f"{kind}."
            )


def check_library(launch: Launch) -> None:
    """Refuses a torch with which a launch cannot run.

    Without a function of torch 2.13, FSDP2's sums after each micro-batch would wait for ever where ranks use other
    weights in one (experts).
    """
    if not launch.sync_each_batch:
        return
    import torch

    from finetune.utils.compat.torch_private import reduces_unused_gradients

    if not reduces_unused_gradients():
        raise BackendError(
            f"{launch.place} says fsdp_sync_each_batch: true, for which torch "
            f"{torch.__version__} lacks a function that 2.13 has (set_reduce_scatter_unused_params). Set it to false, "
            "with which gradients are held whole between micro-batches, or install a newer torch."
        )
