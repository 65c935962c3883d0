"""Reads the DeepSpeed config that a launch file names. Loads neither torch nor DeepSpeed, which need not be installed.

DeepSpeed's own models of a config can be imported with torch alone, and have no key of its top level: it passes over
those that it does not know. So its keys are listed here; a test compares them.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config import file_kinds
from finetune.config.provenance import flat, place_of, places
from finetune.config.recipe import hint
from finetune.utils import json_files
from finetune.utils.errors import BackendError
from finetune.utils.file_formats import read_text

MEANINGS = {
    "train_batch_size": ("Rows an optimiser step, over all processes: the recipe's.", "rows"),
    "train_micro_batch_size_per_gpu": ("Rows in one forward pass of one process: the recipe's.", "rows"),
    "gradient_accumulation_steps": ("Micro-batches an optimiser step and process.", "micro-batches"),
    "gradient_clipping": ("Largest global gradient norm; 0.0 is off. Absent, it would be 1.0 to DeepSpeed.", "norm"),
    "bf16.enabled": ("DeepSpeed's own bf16, with weights in bf16. `auto` takes torch_autocast instead.", ""),
    "fp16.enabled": ("fp16 with loss scaling, if the recipe's precision is fp16.", ""),
    "torch_autocast.enabled": ("bf16 inside operations over fp32 weights, as on every other backend.", ""),
    "torch_autocast.dtype": ("Dtype that operations compute in.", ""),
    "torch_autocast.lower_precision_safe_modules": ("Modules whose gradients are summed in bf16 as well.", ""),
    "data_types.grad_accum_dtype": ("Dtype that gradients are accumulated in over micro-batches.", ""),
    "communication_data_type": ("Dtype that gradients are summed over processes in; bf16 halves traffic.", ""),
    "zero_optimization.stage": ("Sharded: 1 optimiser state, 2 gradients too, 3 parameters too.", "stage"),
    "zero_optimization.overlap_comm": ("Reduce gradients while the backward pass runs; more buffers.", ""),
    "zero_optimization.contiguous_gradients": ("Copy gradients into one buffer as they come.", ""),
    "zero_optimization.reduce_bucket_size": ("Reduced at a time. `auto`: max(hidden size squared, 1e6).", "elements"),
    "zero_optimization.allgather_bucket_size": ("Gathered at a time. `auto`: as reduce_bucket_size.", "elements"),
    "zero_optimization.stage3_prefetch_bucket_size": ("Gathered ahead. `auto`: 0.9 of the size reduced.", "elements"),
    "zero_optimization.stage3_param_persistence_threshold": (
        "Parameters smaller than this stay whole on every process. `auto`: 10 x hidden size, or 0 where those would "
        "be more than 1 % of the model.",
        "elements",
    ),
    **{
        f"zero_optimization.offload_{of}.{key}": text
        for of in ("param", "optimizer")
        for key, text in {
            "device": ("Place between uses: cpu, nvme or none.", ""),
            "pin_memory": ("Page-locked host memory: faster copies to a GPU, and it cannot be swapped out.", ""),
            "nvme_path": ("Folder on the disk.", ""),
            "buffer_count": ("Buffers to the disk. The optimiser needs one a state: AdamW has four.", "buffers"),
        }.items()
    },
    "zero_optimization.offload_param.buffer_size": (
        "Size of such a buffer. `auto`: the model's largest parameter and a little more.",
        "elements",
    ),
    "zero_optimization.offload_param.max_in_cpu": ("Parameters that stay in host memory, not on the disk.", "elements"),
}
"""The keys whose values matter here, dotted: meaning and unit."""

# Of each section the keys besides those with a meaning. DeepSpeed itself refuses unknown ones of other sections.
# Source: deepspeed 0.19.
_OTHER_KEYS = {
    "": (
        "managed_gradient_accumulation gradient_allreduce_op gradient_predivide_factor prescale_gradients "
        "seq_parallel_communication_data_type disable_allgather steps_per_print wall_clock_breakdown memory_breakdown "
        "dump_state log_level disable_python_gc dataloader_drop_last vocabulary_size zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer use_data_before_expert_parallelism autotuning data_efficiency datastates_ckpt "
        "expert_parallel hybrid_engine pipeline tensor_parallel weight_quantization comms_logger "
        "compile tensorboard wandb csv_monitor comet timers"
    ),
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "data_types": "param_dtype buffer_dtype keep_in_fp32_modules",
    "activation_checkpointing": (
        "partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints "
        "synchronize_checkpoint_boundary profile"
    ),
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "checkpoint": (
        "tag_validation checkpoint_serialization writer load_universal use_node_local_storage parallel_write"
    ),
    "zero_optimization": (
        "reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions compute_grad_norm load_from_fp32_weights "
        "elastic_checkpoint sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload "
        "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save "
        "ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size "
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory zenflow leaf_module"
    ),
    "zero_optimization.offload_optimizer": (
        "cpuadam_cores_perc fast_init pipeline_read pipeline_write ratio super_offload"
    ),
    "bf16": "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow immediate_grad_update",
    "fp16": (
        "auto_cast consecutive_hysteresis fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale "
        "loss_scale_window min_loss_scale"
    ),
}

# Of earlier versions of DeepSpeed, and what says the same.
_DEPRECATED = {
    "zero_optimization.cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "pin_memory below offload_optimizer and offload_param",
}


def read_deepspeed_file(path: str, file: str | None) -> tuple[str, dict[str, Any]]:
    """Reads the config that a launch file, or the environment, names.

    Args:
        path: As it is named: beside the launch file, in the folder above it, as in a checkout, or where we are.
        file: The launch file.

    Returns:
        Where it is, and its keys and values, by the names of DeepSpeed's documentation, whichever are written.

    Raises:
        BackendError: If there is none, it cannot be read, or it holds keys that DeepSpeed does not know.
    """
    place = find_deepspeed_file(path, file)
    try:
        config = json_files.parse(read_text(place), pairs=_each_once)
    except (OSError, ValueError) as error:
        raise BackendError(f"The DeepSpeed config {place} cannot be read as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise BackendError(f"The DeepSpeed config {place} must hold keys and values, not {type(config).__name__}.")
    if (other := file_kinds.other_kind(config, file_kinds.DEEPSPEED)) is not None:
        raise BackendError(f"{place}: {other}")
    problems = [*_rename(config), *_unknown(config)]
    problems += [(key, f"deprecated; write {new}") for key, new in _DEPRECATED.items() if key in flat(config)]
    if problems:
        lines = places(place)
        reported = [f"{place_of(key, place, lines)}: {key}: {what}" for key, what in problems]
        raise BackendError.of(f"The DeepSpeed config {place}", reported)
    zero = config.get("zero_optimization")
    for section in zero.values() if isinstance(zero, dict) else ():
        if isinstance(section, dict) and isinstance(folder := section.get("nvme_path"), str):
            section["nvme_path"] = os.path.expanduser(folder)
    return str(place), config


def find_deepspeed_file(path: str, file: str | None) -> Path:
    """Returns the DeepSpeed config that a launch file names; see `read_deepspeed_file`.

    Raises:
        BackendError: If there is none.
    """
    beside = [] if file is None else [Path(file).parent, Path(file).parent / ".."]
    looked = [Path(os.path.normpath(folder / os.path.expanduser(path))) for folder in (*beside, Path())]
    if (place := next((place for place in looked if place.is_file()), None)) is not None:
        return place
    where = ", ".join(dict.fromkeys(os.path.abspath(place.parent) for place in looked))
    raise BackendError(f"{file or 'The environment'} names the DeepSpeed config {path}, and there is none in {where}.")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key '{next(name for name in names if names.count(name) > 1)}' is given twice")
    return found


def known_keys(section: str) -> list[str]:
    """Returns the keys of a section, "" being the top; none where what is below it is not looked at."""
    prefix = f"{section}." if section else ""
    below = (key.removeprefix(prefix) for key in (*MEANINGS, *_OTHER_KEYS) if key and key.startswith(prefix))
    return list(dict.fromkeys([*(key.split(".")[0] for key in below), *_OTHER_KEYS.get(section, "").split()]))


def _rename(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Gives keys with several names the one of DeepSpeed's documentation, in place; those given twice are problems."""
    zero, known = config.get("zero_optimization"), known_keys("zero_optimization")
    names = [(config, "", "bfloat16", "bf16")]
    if isinstance(zero, dict):
        names += [(zero, "zero_optimization.", n, f"stage3_{n}") for n in zero if f"stage3_{n}" in known]
    for section, prefix, old, new in names:
        if old in section and new in section:
            yield f"{prefix}{old}", f"the same as {new}; take one out"
        if old in section:
            section[new] = section.pop(old)


def _unknown(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yields the keys of a section that DeepSpeed does not know, dotted, each with what is wrong."""
    known = known_keys(section)
    for name, value in tree.items():
        key = f"{section}.{name}".removeprefix(".")
        if name not in known:
            yield key, f"unknown key{hint(name, known) or ' (allowed: ' + ', '.join(known) + ')'}"
        elif isinstance(value, dict) and known_keys(key):
            yield from _unknown(value, key)
