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

# Of each section the keys that are passed on unread: they change speed, logs and DeepSpeed's own checkpoints, which are
# not written here. DeepSpeed itself refuses unknown ones of other sections. Source: deepspeed 0.19.
_PASSED_ON = {
    "": (
        "gradient_predivide_factor prescale_gradients steps_per_print wall_clock_breakdown memory_breakdown dump_state "
        "log_level disable_python_gc vocabulary_size zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "comms_logger tensorboard wandb csv_monitor comet timers"
    ),
    # Answered with the recipe's keys, see `deepspeed_config`.
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "checkpoint": (
        "tag_validation checkpoint_serialization writer load_universal use_node_local_storage parallel_write"
    ),
    "zero_optimization": (
        "reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions load_from_fp32_weights elastic_checkpoint "
        "sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
        "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters round_robin_gradients "
        "memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
        "enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module"
    ),
    "zero_optimization.offload_optimizer": "cpuadam_cores_perc fast_init pipeline_read pipeline_write",
    "bf16": "check_grad_overflow immediate_grad_update",
    "fp16": (
        "auto_cast consecutive_hysteresis hysteresis initial_scale_power loss_scale loss_scale_window min_loss_scale"
    ),
}

_DTYPES = "the recipe's precision decides dtypes, and trained weights and their optimiser state are fp32"
_REFUSED = {
    "activation_checkpointing": "no network calls it; set model.gradient_checkpointing in the recipe",
    "autotuning": "it would train other batches than the recipe's; set batch.micro_size: auto in the recipe",
    "compile": "set model.compile in the recipe",
    "data_efficiency": "it would change rows and drop tokens; the recipe decides what is learned",
    "data_types.buffer_dtype": _DTYPES,
    "data_types.keep_in_fp32_modules": _DTYPES,
    "data_types.param_dtype": _DTYPES,
    "dataloader_drop_last": "rows come from the recipe's data",
    "datastates_ckpt": "checkpoints are finetune's own",
    "disable_allgather": "ranks would compute with weights that the others have not sent",
    "expert_parallel": "experts split over ranks are not offered",
    "gradient_allreduce_op": "gradients are averaged over ranks, and the loss is scaled for that",
    "hybrid_engine": "generating while training is not offered",
    "managed_gradient_accumulation": "the training loop relies on it",
    "pipeline": "pipeline parallelism is not offered",
    "seq_parallel_communication_data_type": "rows are not split by DeepSpeed; set sp_size in the launch file",
    "tensor_parallel": (
        "layers would be split over ranks that read other rows. Take accelerate_configs/fsdp_tp.yaml, which splits them"
    ),
    "use_data_before_expert_parallelism": "experts split over ranks are not offered",
    "weight_quantization": "set model.quantization in the recipe",
    "bf16.bf16_master_weights_and_grads": _DTYPES,
    "bf16.bf16_optimizer_states": _DTYPES,
    "fp16.fp16_master_weights_and_grads": _DTYPES,
    "zero_optimization.compute_grad_norm": "each step's gradient norm is read",
    "zero_optimization.legacy_stage1": "DeepSpeed runs one stage 1 only",
    "zero_optimization.parameter_alignment": "its padding is not known to checkpoints and plans",
    "zero_optimization.zenflow": "weights would be updated later than the step that computed their gradients",
    "zero_optimization.zero_hpz_partition_size": (
        "a second copy of the weights in each group of ranks is not planned or verified. Take "
        "accelerate_configs/hsdp.yaml, which shards within groups"
    ),
    "zero_optimization.zero_quantized_weights": "weights would be rounded on their way to other ranks",
    "zero_optimization.zero_quantized_nontrainable_weights": "set model.quantization in the recipe",
    "zero_optimization.zero_quantized_gradients": "gradients would be rounded; set optim.reduce_dtype in the recipe",
    "zero_optimization.offload_optimizer.ratio": "optimiser state on both host and device is not planned or verified",
    "zero_optimization.offload_optimizer.super_offload": "steps would be taken before their gradient norm is known",
}
"""Keys that DeepSpeed acts on and nothing here reads or verifies, dotted, with the reason; as DeepSpeed's default they
may stand."""

_DEFAULTS: dict[str, Any] = {
    "data_types.keep_in_fp32_modules": "auto",
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "seq_parallel_communication_data_type": "fp32",
    "zero_optimization.compute_grad_norm": True,
}

# Of earlier versions of DeepSpeed, and what stands in their place.
_REMOVED = {
    "amp": "set precision in the recipe",
    "compression_training": "",
    "curriculum_learning": "",
    "eigenvalue": "",
    "elasticity": "for machines that come and go, start `finetune launch --nnodes MIN:MAX`",
    "graph_harvesting": "",
    "nebula": "checkpoints are finetune's own",
    "progressive_layer_drop": "",
    "quantize_training": "set model.quantization in the recipe",
    "sparse_attention": "set model.attention in the recipe",
    "sparse_gradients": "",
    "zero_optimization.mics_hierarchical_params_gather": "",
    "zero_optimization.mics_shard_size": "take accelerate_configs/hsdp.yaml, which shards within groups",
    "zero_optimization.zeropp_loco_param": "",
}

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
    problems += [
        (key, f"is not read here: {reason}. Take it out")
        for key, reason in _REFUSED.items()
        if _acts(key, _value_of(config, key))
    ]
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
    below = (key.removeprefix(prefix) for key in (*MEANINGS, *_REFUSED, *_PASSED_ON) if key and key.startswith(prefix))
    return list(dict.fromkeys([*(key.split(".")[0] for key in below), *_PASSED_ON.get(section, "").split()]))


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
        if key in _REMOVED:
            yield key, "; ".join(filter(None, ("DeepSpeed has removed it, so take it out", _REMOVED[key])))
        elif name not in known:
            yield key, f"unknown key{hint(name, known) or ' (allowed: ' + ', '.join(known) + ')'}"
        elif isinstance(value, dict) and known_keys(key):
            yield from _unknown(value, key)


def _value_of(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _acts(key: str, value: Any) -> bool:
    """Tells if a value changes what DeepSpeed does; of a section, if any value of it would."""
    if isinstance(value, dict):
        return value.get("enabled") is not False and any(_acts("", each) for each in value.values())
    if key in _DEFAULTS:
        return value not in (None, _DEFAULTS[key])
    # A group of one rank, and a ratio of 1, are none.
    return value is True or value not in (None, False, 0, 1)
