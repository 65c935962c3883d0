"""Completes a DeepSpeed configuration from the recipe, and refuses one that contradicts it."""

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from finetune.config.provenance import flat
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch, name_deepspeed_device
from finetune.utils.errors import BackendError

# Shipped configs say "auto" where the recipe decides.
AUTO = "auto"

# DeepSpeed's default of `stage3_param_persistence_threshold`, in elements.
PERSISTENCE_THRESHOLD = 100_000

# Those that the model decides, once it is there.
_FITTED = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.offload_param.buffer_size",
)

# Sections of DeepSpeed's that are the recipe's; schedules and keys of optimisers by their names there.
_SECTIONS = {"optimizer": "optim", "scheduler": "schedule"}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OWN = ("lr", "weight_decay")

# Keys of the recipe that decide a value.
DECIDES = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.global_size / (batch.micro_size x data ranks)",
    "gradient_clipping": "optim.clip_norm",
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
}


def complete_config(launch: Launch, recipe: Recipe, *, precision: str, accumulation: int) -> dict[str, Any]:
    """Returns the launch's config with every value that the recipe decides filled in; empty without DeepSpeed.

    Args:
        launch: Its config has `auto` or nothing where the recipe decides.
        precision: `fp32`, `bf16` or `fp16`.
        accumulation: Micro-batches an optimiser step and process.

    Raises:
        BackendError: If it contradicts the recipe, with both places.
    """
    if not launch.uses_deepspeed:
        return {}
    config, ds_path = copy.deepcopy(launch.ds_config), launch.ds_place
    batch, clip = recipe.batch, recipe.optim.clip_norm
    values: dict[str, Any] = {
        "train_batch_size": batch.rows * accumulation * launch.num_processes,
        "train_micro_batch_size_per_gpu": batch.rows,
        "gradient_accumulation_steps": accumulation,
        # Absent means 1.0 to DeepSpeed; 0.0 is its word for off.
        "gradient_clipping": 0.0 if clip is None else clip,
        "fp16.enabled": precision == "fp16",
    }
    if precision == "bf16" and flat(config).get("bf16.enabled") in (None, AUTO):
        # As on every other backend: fp32 weights, cast where an operation profits. DeepSpeed's own bf16 mode makes
        # weights, norms and the residual stream bf16; a config that says `bf16.enabled: true` gets it.
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        config["torch_autocast"] = autocast | config.get("torch_autocast", {})
    written = flat(config)
    values["bf16.enabled"] = precision == "bf16" and not written.get("torch_autocast.enabled")
    # Gradients are summed over micro-batches in fp32, and over ranks in what the recipe says, unless the config says
    # otherwise; DeepSpeed's default is the model's dtype.
    sums = {"data_types.grad_accum_dtype": "fp32", "communication_data_type": recipe.optim.reduce_dtype}
    contradictions = []
    for key, value in (values | sums).items():
        if written.get(key) in (None, AUTO):
            _set(config, key, value)
        elif written[key] != value and key in values:
            contradictions.append(f"{ds_path} says {key}: {written[key]}, the recipe's {DECIDES[key]} makes it {value}")
    for key in _SECTIONS:
        if key in config:
            words = _recipe_words(key, config[key])
            contradictions.append(f"{ds_path} has '{key}', which the recipe's optim and schedule decide{words}")
    if written.get("torch_autocast.enabled") and precision != "bf16":
        contradictions.append(f"{ds_path} says torch_autocast.enabled: true, {said_of_precision(recipe, precision)}")
    if contradictions:
        advice = f'Change the recipe, or write "auto" in {ds_path} (or remove the key).'
        raise BackendError.of("The DeepSpeed config contradicts the recipe and", contradictions, advice)
    undecided = sorted(key for key, value in flat(config).items() if value == AUTO and key not in _FITTED)
    if undecided:
        raise BackendError(
            f'{ds_path} says "auto" for {", ".join(undecided)}, which neither recipe nor model decides. Write a value, '
            "or remove the key to take DeepSpeed's default."
        )
    _offload_needs_adamw(config, recipe, ds_path)
    return config


def _recipe_words(key: str, section: Any) -> str:
    """Returns the recipe's keys that say what a section `optimizer` or `scheduler` does; "" if none do.

    Source: deepspeed 0.19, `runtime/lr_schedules.py`; its Adam is AdamW, unless told otherwise.
    """
    if not isinstance(section, dict):
        return ""
    given = {name: value for name, value in (section.get("params") or {}).items() if value not in (AUTO, None)}
    kind, more, says = str(section.get("type")), "", dict[str, Any]()
    if key == "optimizer":
        names = {"Adam": "AdamW" if given.pop("adam_w_mode", True) else "Adam", "Lamb": "LAMB"}
        says = {"name": names.get(kind, kind)} | {name: given.pop(name) for name in _OWN if name in given}
        # These choose between implementations.
        args = {name: value for name, value in given.items() if name not in ("torch_adam", "bias_correction")}
        says |= {"args": args} if args else {}
    elif kind in _SCHEDULES:
        says = {"name": _SCHEDULES[kind]}
        says |= {"warmup_steps": given["warmup_num_steps"]} if "warmup_num_steps" in given else {}
        says |= {"WarmupDecayLR": {"floor": 0.0}, "WarmupCosineLR": {"floor": given.get("cos_min_ratio", 1e-4)}}.get(
            kind, {}
        )
        more = f", and optim.lr: {given['warmup_max_lr']}" if "warmup_max_lr" in given else ""
        more += "" if given.get("warmup_type") == "linear" else " (whose warm-up is linear, not logarithmic)"
    text = yaml.safe_dump(says, default_flow_style=True, sort_keys=False, width=1000).strip()
    return f"; the same in the recipe: {_SECTIONS[key]}: {text}{more}" if says else ""


def said_of_precision(recipe: Recipe, precision: str) -> str:
    """Says the recipe's precision, and what that comes to on this machine."""
    which = f", which is {precision} on this machine" if recipe.precision == "auto" else ""
    return f"the recipe's precision is {recipe.precision}{which}"


def check_values(config: Mapping[str, Any], place: str) -> None:
    """Has DeepSpeed read a completed config, so that what it refuses is known before a process starts.

    Args:
        config: None is read if it is empty.
        place: Where the config is written, for messages.

    Raises:
        BackendError: With what DeepSpeed says.
    """
    if not config:
        return
    name_deepspeed_device()
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum
    from pydantic import ValidationError

    # It reads the number of processes off those that run; the batch of one process is enough.
    tree = _without_auto({key: value for key, value in config.items() if key != "train_batch_size"})
    try:
        read = DeepSpeedConfig(tree)
        DtypeEnum(read.grad_accum_dtype)  # as its engine does
    except ValidationError as error:
        problems = [
            f"{place}: {'.'.join(map(str, item['loc']))}: {item['msg']}, got {json.dumps(item['input'], default=str)}"
            for item in error.errors(include_url=False)
        ]
        raise BackendError.of(f"The DeepSpeed config {place}", problems) from error
    except (AssertionError, ValueError, TypeError, AttributeError, NotImplementedError, DeepSpeedConfigError) as error:
        raise BackendError(f"DeepSpeed refuses the config {place}: {error}.") from error


def _without_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    left = {key: value for key, value in tree.items() if value != AUTO}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in left.items()}


def _offload_needs_adamw(config: dict[str, Any], recipe: Recipe, place: str) -> None:
    """Refuses other optimisers than AdamW under offload, where Accelerate swaps any for DeepSpeed's CPU Adam."""
    device = flat(config).get("zero_optimization.offload_optimizer.device") or "none"
    if device == "none":
        return
    if recipe.optim.name != "AdamW":
        raise BackendError(
            f"{place} offloads the optimiser to {device}, where only AdamW runs; the recipe's optim.name is "
            f"{recipe.optim.name}, which would be replaced by Adam without a word. Set optim.name to AdamW, or take a "
            "launch config without offload."
        )
    if device == "nvme" and recipe.optim.ema_decay is not None:
        raise BackendError(
            f"{place} offloads the optimiser to nvme, where DeepSpeed keeps AdamW's own state only, and "
            "optim.ema_decay needs one more. Set it to null, or take accelerate_configs/zero3_offload.yaml."
        )
    if recipe.optim.args.get("amsgrad"):
        raise BackendError(f"{place} offloads the optimiser to {device}, where optim.args.amsgrad is not offered.")


def fit_to_model(config: dict[str, Any], *, hidden_size: int, parameter_sizes: Iterable[int]) -> None:
    """Fills in, in place, the sizes that depend on the model: on its width, and the elements of each parameter."""
    section = config["zero_optimization"]
    sizes = list(parameter_sizes)
    bucket = max(hidden_size * hidden_size, 1_000_000)
    # Small parameters stay whole on each rank, which saves latency; but never so many that the model is not
    # really sharded any more (of a tiny model nearly every parameter is small).
    threshold = 10 * hidden_size
    if sum(size for size in sizes if size < threshold) > 0.01 * sum(sizes):
        threshold = 0
    for key, value in (
        ("reduce_bucket_size", bucket),
        ("allgather_bucket_size", bucket),
        ("stage3_prefetch_bucket_size", int(0.9 * bucket)),
        ("stage3_param_persistence_threshold", threshold),
    ):
        if section.get(key) == AUTO:
            section[key] = value
    parameters = section.get("offload_param") or {}
    if parameters.get("buffer_size") == AUTO:
        # A buffer holds one parameter on its way to or from the disk; DeepSpeed aligns it.
        parameters["buffer_size"] = max(sizes) + 1024


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value
