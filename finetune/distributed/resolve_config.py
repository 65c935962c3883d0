"""Resolves and checks recipe and launch together, before data is read or anything is started."""

import os
from collections.abc import Mapping

from finetune.config.recipe import divisors
from finetune.config.recipe_schema import Recipe
from finetune.distributed import device_selection
from finetune.distributed.launch.launch_config import Launch, ResolvedConfig, check_installed
from finetune.distributed.strategies import deepspeed_config, refusals
from finetune.utils.compat.library_versions import installed, require_installed
from finetune.utils.errors import BackendError, RecipeError


def resolve_config(recipe: Recipe, launch: Launch, env: Mapping[str, str] = os.environ) -> ResolvedConfig:
    """Settles precision, accumulation and DeepSpeed's values, for a worker's environment.

    Raises:
        RecipeError: If the batch does not come out even, or a tracker is not installed.
        BackendError: If the planes contradict each other, or this machine cannot run what is asked.
    """
    check_installed(launch)
    refusals.check_library(launch)
    settled = resolve_for_devices(recipe, launch, device_selection.visible_gpus(), env)
    deepspeed_config.check_values(settled.ds_config, launch.ds_place)
    check_trackers(recipe)
    held = {"model": recipe.model.quantization} | {n: s.quantization for n, s in recipe.frozen_models.items()}
    for key, kind in held.items():
        if kind is not None:
            require_installed("bitsandbytes", f"{key}.quantization {kind}")
    return settled


def resolve_for_devices(recipe: Recipe, launch: Launch, gpus: int, env: Mapping[str, str]) -> ResolvedConfig:
    """`resolve_config` on so many GPUs and for a worker's environment, without torch.

    Raises:
        RecipeError: If the batch does not come out even.
        BackendError: If the planes contradict each other, or the devices cannot run what is asked.
    """
    refusals.check_devices(launch, gpus, env)
    precision = _pick_precision(recipe, gpus)
    accumulation = derive_accumulation(recipe, launch.data_ranks, launch.num_processes)
    rows = micro_rows(recipe, launch.data_ranks)
    _check_planes(recipe, launch, precision, accumulation, env)
    config = deepspeed_config.complete_config(
        launch, recipe.with_micro_size(rows), precision=precision, accumulation=accumulation
    )
    for each in (recipe, *map(recipe.of_frozen, recipe.frozen_models.values())):
        refusals.check_packed_weights(each, launch, config)
    return ResolvedConfig(precision, accumulation, rows, config)


def micro_rows(recipe: Recipe, world: int) -> int:
    """Returns the rows of a micro-batch: the largest number up to `batch.micro_size` that divides a data rank's share.

    Over the data ranks, `world`, the global batch comes out even.
    """
    share, most = recipe.batch.global_size // world, recipe.batch.rows
    # An evaluation has no share, nor do more ranks than rows, which are refused.
    if recipe.length.steps == 0 or share == 0:
        return most
    return max(size for size in divisors(share) if size <= most)


def derive_accumulation(recipe: Recipe, world: int, processes: int | None = None) -> int:
    """Returns the micro-batches of an optimiser step and process: global batch / (`micro_rows` x data ranks).

    Args:
        world: Data ranks: processes, or groups of processes that read the same rows.
        processes: All of them, for messages; as many as data ranks if left out.

    Raises:
        RecipeError: If the global batch does not come out even.
    """
    size = recipe.batch.global_size
    if recipe.length.steps == 0:
        return 1  # nothing is trained, so there is no global batch to fill
    if size % world == 0:
        return size // (micro_rows(recipe, world) * world)
    split = 1 if processes is None else processes // world
    ranks = "processes" if split == 1 else f"groups of {split} processes"
    near = ", ".join(str(number) for number in (size // world * world, -(-size // world) * world) if number)
    raise RecipeError(
        f"batch.global_size {size} is not a multiple of the {world} {ranks} that share it. Set it to such a number "
        f"({near}), or take another number of processes."
    )


def _pick_precision(recipe: Recipe, gpus: int) -> str:
    """Returns `fp32`, `bf16` or `fp16`, as the recipe asks; the device decides for `auto`, and can refuse."""
    if recipe.precision == "auto":
        # Every GPU that torch runs on has bf16, natively or not.
        return "bf16" if gpus else "fp32"
    if recipe.precision == "fp16" and not gpus:
        raise BackendError(
            "The recipe asks for precision fp16, which needs a GPU: on a CPU there is no loss scaling. Set `precision: "
            "bf16` or `fp32`."
        )
    return recipe.precision


def _check_planes(
    recipe: Recipe, launch: Launch, precision: str, accumulation: int, env: Mapping[str, str] = os.environ
) -> None:
    """Refuses what the launch cannot do of the recipe, and values of the launch plane that are the recipe's to say."""
    refusals.check_recipe(recipe, launch, precision)
    if recipe.model.fp8 and precision != "bf16":
        came = " on this machine" if recipe.precision == "auto" else ""
        raise RecipeError(
            f"model.fp8 needs bf16 for all that is not computed in fp8, and precision is {precision}{came}. Set "
            "`precision: bf16`, or model.fp8 to false."
        )
    wanted = launch.mixed_precision
    if wanted not in ("no", {"fp32": "no"}.get(precision, precision)):
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
            f"{accumulation}. The recipe decides: `unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS`."
        )


def check_trackers(recipe: Recipe) -> None:
    """Raises a `RecipeError` for a tracker whose package is missing, with the extra to install."""
    for name in recipe.log.trackers:
        if installed(name) is None:
            raise RecipeError(
                f"log.trackers: {name} is not installed here. Install it with `pip install 'finetune[{name}]'`, or "
                "take it out."
            )
