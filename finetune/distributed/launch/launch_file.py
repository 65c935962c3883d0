"""Reads a launch file, and refuses what Accelerate would ignore. Loads no torch."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config import file_kinds
from finetune.config.provenance import flat, places
from finetune.config.recipe import hint
from finetune.distributed.launch import launch_key_docs, launch_keys
from finetune.utils import json_files
from finetune.utils.errors import BackendError
from finetune.utils.file_formats import read_text
from finetune.utils.shipped_files import LAUNCH_FILES, RECIPES, shipped_names
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

_TEXTS = (
    "main_process_ip",
    "gpu_ids",
    "mixed_precision",
    "rdzv_backend",
    "main_training_function",
    "fsdp_config.fsdp_auto_wrap_policy",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    "fsdp_config.fsdp_state_dict_type",
    "deepspeed_config.deepspeed_config_file",
    "deepspeed_config.deepspeed_multinode_launcher",
)
# Numbers that Accelerate finds for itself, or takes from its command line, where the file says `null`.
_MAY_BE_NULL = ("num_processes", "main_process_port")

# What Accelerate exports only where the launch file says so, or says anything else than its default.
_IF_WRITTEN = ("deepspeed_config.zero3_init_flag", *launch_key_docs.OWN)
_IF_CHOSEN = ("gpu_ids", "debug")


def read(file: str) -> dict[str, Any]:
    """A launch file by dotted keys.

    Raises:
        BackendError: If it is no launch file, or says what nothing would read.
    """
    try:
        text = read_text(Path(file))
        tree = json_files.parse(text) if file.endswith(".json") else parse(text)
    except FileNotFoundError as error:
        if file in shipped_names(RECIPES):
            raise BackendError(
                f"{file} is a recipe that ships, not a launch file. {file_kinds.PLACES[file_kinds.RECIPE]}"
            ) from error
        near = hint(file, shipped_names(LAUNCH_FILES))
        raise BackendError.of(file, [f"There is no launch file {file}{near}"], _ADVICE) from error
    except YamlProblem as error:
        raise BackendError(f"{error.at(file)}: this launch file is not valid YAML: {error}. {_ADVICE}") from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BackendError(f"Cannot read the launch file {file}: {reason}. {_ADVICE}") from error
    if not isinstance(tree, dict):
        raise BackendError(f"The launch file {file} holds no keys and values. {_ADVICE}")
    if (other := file_kinds.other_kind(tree, file_kinds.LAUNCH)) is not None:
        raise BackendError(f"{file}: {other}")
    tree = {name: _section(str(name), value) for name, value in tree.items()}
    mistyped = list(_mistyped(tree))
    tree = {name: value for name, value in tree.items() if value is not None}
    problems = [*_problems(tree), *mistyped]
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
    path = os.path.expanduser(path)
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
    elif tree["distributed_type"] is False:
        yield "distributed_type", "false, which is what YAML makes of NO without quotes; write 'NO'"
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
    for name in ("dynamo_config", "fp8_config", "megatron_lm_config", "mpirun_config"):
        section = tree.get(name)
        harmless = name == "dynamo_config" and section in ({"dynamo_backend": "NO"}, {"backend": "NO"})
        if section and not harmless:
            yield name, f"not offered. {launch_key_docs.GENERAL[name].meaning} Take the section out"


def _mistyped(tree: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Values that Accelerate would take for others, or fail to read by a traceback.

    It takes what YAML makes of a value as it is: a text "2" is no number to it, and a text "false" is true.
    """
    for name, value in flat(tree).items():
        key = launch_key_docs.KNOWN.get(name)
        if key is None:
            continue
        boolean, got = isinstance(key.default, bool), "null" if value is None else repr(value)
        quoted = ", which is a text: take its quotes off" if isinstance(value, str) else ""
        if value is None:
            # At the top level, Accelerate takes null for false.
            wrong = (key.least is not None and name not in _MAY_BE_NULL) or (boolean and "." in name)
            expected = "true or false" if boolean else f"a number from {key.least}"
            if wrong:
                yield name, f"must be {expected}, got null; give a value, or take the key out"
        elif key.least is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < key.least:
                number = isinstance(value, str) and value.strip().isdecimal()
                yield name, f"must be a number from {key.least}, got {got}{quoted if number else ''}"
        elif boolean:
            # `accelerate config` writes 'no' for this one, which only TPUs read.
            if not isinstance(value, bool) and name != "downcast_bf16":
                known = str(value).lower() in ("true", "false", "yes", "no", "on", "off")
                near = quoted if known else hint(str(value).lower(), ["true", "false"])
                yield name, f"must be true or false, got {got}{near}"
        elif name in _TEXTS and not isinstance(value, str):
            made = " (which YAML makes of yes, no, on and off)" if isinstance(value, bool) else ""
            yield name, f"must be a text, got {got}{made}; put it in quotes"
        elif key.allowed and str(value).upper() not in key.allowed:
            near = hint(str(value).upper(), key.allowed)
            yield name, f"must be one of {', '.join(key.allowed)}, got {got}{near}"


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


def groups(kind: str, written: Mapping[str, Any]) -> dict[str, launch_key_docs.Key]:
    """The keys that a launch of a kind, in Accelerate's words, listens to."""
    known = dict(launch_key_docs.GENERAL)
    if kind == "FSDP":
        known |= launch_key_docs.FSDP
    if kind == "DEEPSPEED":
        known |= launch_key_docs.DEEPSPEED
    if kind != "NO" and any(key.startswith("parallelism_config.") for key in written):
        known |= launch_key_docs.PARALLELISM
    return known


def exported(kind: str, written: Mapping[str, Any]) -> dict[str, str]:
    """The variables by which `accelerate launch` tells workers of a launch file.

    Source: accelerate 1.15, `utils/launch.py`, for the variables that this toolkit reads.
    """
    flags = {"FSDP": "ACCELERATE_USE_FSDP", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED"}
    found = {flags[kind]: "true"} if kind in flags else {}
    if kind == "NO":
        found["ACCELERATE_USE_CPU"] = str(bool(written.get("use_cpu", False)))
    if kind != "NO" and any(key.startswith("parallelism_config.") for key in written):
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    for name, key in groups(kind, written).items():
        value = written.get(name, key.default)
        silent = (name in _IF_WRITTEN and name not in written) or (name in _IF_CHOSEN and value == key.default)
        if key.variable is not None and value is not None and not silent:
            found[key.variable] = str(value).lower() if isinstance(value, bool) else str(value)
    return found
