"""Reads a launch file, and refuses what Accelerate would ignore. Loads no torch."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.provenance import flat, places
from finetune.config.recipe import hint
from finetune.distributed.launch import launch_key_docs, launch_keys
from finetune.utils import json_files
from finetune.utils.errors import BackendError
from finetune.utils.shipped_files import LAUNCH_FILES, shipped_names
from finetune.utils.yaml_files import YamlProblem, parse

_ADVICE = f"Name a file, or one of those that ship in {LAUNCH_FILES}/: {', '.join(shipped_names(LAUNCH_FILES))}."

# Accelerate refuses them beside a `deepspeed_config_file`, by a traceback in every worker.
# Source: accelerate 1.15, `DeepSpeedPlugin._deepspeed_config_checks`.
IN_DEEPSPEED_CONFIG = {
    "gradient_accumulation_steps": "the recipe's batch decides",
    "gradient_clipping": "the recipe's optim.clip_norm decides",
    "zero_stage": "zero_optimization.stage of the DeepSpeed config says it",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device of the DeepSpeed config says it",
    "offload_param_device": "zero_optimization.offload_param.device of the DeepSpeed config says it",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path of the DeepSpeed config says it",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path of the DeepSpeed config says it",
    "zero3_save_16bit_model": "models are written as the recipe's output says",
}

# Read by FSDP version 1 only. Source: accelerate 1.15, `commands/to_fsdp2.py`.
OF_FSDP_1 = {
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward says it",
    "fsdp_backward_prefetch": "version 2 prefetches by itself",
    "fsdp_forward_prefetch": "version 2 has none",
    "fsdp_sync_module_states": "first weights are equal everywhere",
    "fsdp_use_orig_params": "version 2 always does",
}

# The sections that a `distributed_type` reads.
_SECTIONS: dict[str, tuple[str, ...]] = {
    "NO": (),
    "MULTI_GPU": ("parallelism_config",),
    "FSDP": ("fsdp_config", "parallelism_config"),
    "DEEPSPEED": ("deepspeed_config", "parallelism_config"),
}
# How the options of `accelerate launch` that are a section's keys begin.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "fsdp_config": ("fsdp_",),
    "parallelism_config": ("parallelism_config_",),
    "deepspeed_config": ("deepspeed_", "zero3_init_flag", *IN_DEEPSPEED_CONFIG),
}

# What Accelerate reads as a boolean. Source: accelerate 1.15, `utils/environment.py`.
_BOOLEANS = ("true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0")


def read(file: str) -> dict[str, Any]:
    """A launch file by dotted keys.

    Raises:
        BackendError: If it is no launch file, or says what nothing would read.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
        tree = json_files.parse(text) if file.endswith(".json") else parse(text)
    except FileNotFoundError as error:
        near = hint(file, shipped_names(LAUNCH_FILES))
        raise BackendError.of(file, [f"There is no launch file {file}{near}"], _ADVICE) from error
    except YamlProblem as error:
        raise BackendError(f"{error.at(file)}: this launch file is not valid YAML: {error}. {_ADVICE}") from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BackendError(f"Cannot read the launch file {file}: {reason}. {_ADVICE}") from error
    if not isinstance(tree, dict):
        raise BackendError(f"The launch file {file} holds no keys and values. {_ADVICE}")
    tree = {name: _section(str(name), value) for name, value in tree.items() if value is not None}
    problems = list(_problems(tree))
    if problems:
        lines = places(file)
        reported = [f"{place_of(key, file, lines)}: {key}: {what}" for key, what in problems]
        raise BackendError.of(f"The launch file {file}", reported, _ADVICE)
    return {key: value for key, value in flat(tree).items() if value is not None}


def place_of(key: str, file: str, lines: Mapping[str, int]) -> str:
    """File and line of a key, by the lines of all keys as the file spells them; the file if it is not there."""
    line = lines.get(key) or lines.get(key.replace("fsdp_config.fsdp_", "fsdp_config."))
    return f"{file}:{line}" if line else file


def find(path: str, file: str | None) -> Path:
    """The file that a launch file names: beside it, in the folder above it, as in a checkout, or where we are.

    Raises:
        BackendError: If there is none.
    """
    beside = [] if file is None else [Path(file).parent, Path(file).parent / ".."]
    for folder in (*beside, Path()):
        place = Path(os.path.normpath(folder / path))
        if place.is_file():
            return place
    looked = dict.fromkeys(os.path.abspath(folder) for folder in (*beside, Path()))
    where = "" if Path(path).is_absolute() else f" in {', '.join(looked)}"
    raise BackendError(f"{file or 'The environment'} names the DeepSpeed config {path}, and there is none{where}.")


def _section(name: str, value: Any) -> Any:
    """A section with its keys as Accelerate completes them: `version` under `fsdp_config` is `fsdp_version`."""
    if name != "fsdp_config" or not isinstance(value, dict):
        return value
    return {key if str(key).startswith("fsdp") else f"fsdp_{key}": below for key, below in value.items()}


def _problems(tree: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """The keys of a launch file that cannot be used, each with what is wrong."""
    general = {name: None for name in launch_key_docs.GENERAL if name != "max_restarts"}
    yield from launch_keys.unknown(tree, general)
    if tree.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        yield "compute_environment", f"{tree['compute_environment']}, and only LOCAL_MACHINE is offered"
    kind = str(tree.get("distributed_type"))
    if "distributed_type" not in tree:
        yield "distributed_type", "missing"
    elif kind not in _SECTIONS:
        yield (
            "distributed_type",
            f"{kind}, which is not offered; use {', '.join(_SECTIONS)} (without a GPU these run on gloo, so MULTI_CPU "
            "is not needed)",
        )
    for name in _OPTIONS:
        section = tree.get(name)
        if not section:
            continue
        if not isinstance(section, dict):
            yield name, f"must hold keys and values, got {section!r}"
        elif kind in _SECTIONS and name not in _SECTIONS[kind]:
            yield name, f"distributed_type {kind} does not read this section; take it out"
        else:
            yield from _of_section(name, section)
    yield from _misspelt(tree)
    for name in ("dynamo_config", "fp8_config", "megatron_lm_config", "mpirun_config"):
        section = tree.get(name)
        harmless = name == "dynamo_config" and section in ({"dynamo_backend": "NO"}, {"backend": "NO"})
        if section and not harmless:
            yield name, f"not offered. {launch_key_docs.GENERAL[name].meaning} Take the section out"


def _misspelt(tree: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Values that Accelerate would fail to read, in every worker, by a traceback."""
    for name, value in flat(tree).items():
        key = launch_key_docs.KNOWN.get(name)
        if key is None or value is None:
            continue
        text = str(value)
        if key.allowed and text.upper() not in key.allowed:
            near = hint(text.upper(), key.allowed)
            yield name, f"must be one of {', '.join(key.allowed)}, got {value!r}{near}"
        elif isinstance(key.default, bool) and text.lower() not in _BOOLEANS:
            yield name, f"must be true or false, got {value!r}{hint(text.lower(), ['true', 'false'])}"
        elif type(key.default) is int and not text.isdecimal():
            yield name, f"must be a number from 0, got {value!r}"


def _of_section(name: str, section: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    refused: dict[str, str] = {}
    if name == "parallelism_config":
        refused = {"parallelism_config_pp_size": "pipeline parallelism is not offered"}
    elif name == "deepspeed_config" and section.get("deepspeed_config_file"):
        refused = IN_DEEPSPEED_CONFIG
    elif name == "fsdp_config" and str(section.get("fsdp_version")) == "2":
        refused = OF_FSDP_1
    for key in [key for key in section if key in refused]:
        yield f"{name}.{key}", f"is not read here: {refused[key]}. Take it out"
    ours = (key.removeprefix(f"{name}.") for key in launch_key_docs.KNOWN if key.startswith(f"{name}."))
    known = [option for option in (*launch_keys.accelerate_options(), *ours) if option.startswith(_OPTIONS[name])]
    left = {key: value for key, value in section.items() if key not in refused}
    yield from launch_keys.unknown(left, dict.fromkeys(key for key in known if key not in refused), f"{name}.")
