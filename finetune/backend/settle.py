"""What follows from recipe and launch together, settled and checked before data is read or anything is started."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from finetune.backend import deepspeed_config
from finetune.backend.launch import Launch
from finetune.errors import BackendError, RecipeError
from finetune.recipe import Recipe, divisors


@dataclass(frozen=True)
class Settled:
    """What neither plane says alone."""

    precision: str
    """What the network computes in: fp32, bf16 or fp16."""
    accumulation: int
    """Micro-batches an optimiser step and process."""
    ds_config: dict[str, Any]
    """The DeepSpeed config, completed from the recipe; empty for other backends."""


def settle(recipe: Recipe, launch: Launch) -> Settled:
    """Settles precision, accumulation and DeepSpeed's values.

    Raises:
        RecipeError: If the batch does not come out even, or a tracker is not installed.
        BackendError: If the planes contradict each other, or this machine cannot run what is asked.
    """
    _check_devices(launch)
    precision = _pick_precision(recipe)
    accumulation = derive_accumulation(recipe, launch.num_processes)
    _check_planes(launch, precision, accumulation)
    _check_trackers(recipe)
    config: dict[str, Any] = {}
    if launch.uses_deepspeed:
        config = deepspeed_config.complete(
            launch.ds_config,
            recipe=recipe,
            precision=precision,
            accumulation=accumulation,
            world=launch.num_processes,
            place=launch.ds_place,
        )
    return Settled(precision, accumulation, config)


def derive_accumulation(recipe: Recipe, world: int) -> int:
    """Micro-batches an optimiser step and process: global batch / (micro-batch x processes).

    Raises:
        RecipeError: If it does not come out even, with the sizes that do.
    """
    batch = recipe.batch
    if recipe.length.steps == 0:
        return 1  # nothing is trained, so there is no global batch to fill
    if batch.global_size % (batch.micro_size * world) == 0:
        return batch.global_size // (batch.micro_size * world)
    share = batch.global_size // world if batch.global_size % world == 0 else 0
    fits = divisors(share) if share else []
    advice = (
        f"With {world} processes batch.micro_size can be {', '.join(map(str, fits))}."
        if fits
        else f"No micro-batch fits {world} processes: batch.global_size must be a multiple of {world}."
    )
    raise RecipeError(
        f"batch.global_size {batch.global_size} is not a multiple of batch.micro_size {batch.micro_size} x {world} "
        f"processes = {batch.micro_size * world}. {advice}"
    )


def _pick_precision(recipe: Recipe) -> str:
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


def _check_devices(launch: Launch) -> None:
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


def _check_planes(launch: Launch, precision: str, accumulation: int) -> None:
    """Refuses values of the launch plane that are the recipe's to say."""
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
