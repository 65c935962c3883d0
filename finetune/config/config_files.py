"""Kinds of configuration files, told by their keys."""

from collections.abc import Mapping
from typing import Any

from finetune.config.peer_keys import count_keys, tool_name
from finetune.config.recipe_schema import Recipe

RECIPE, LAUNCH, DEEPSPEED = "a recipe", "a launch file", "a DeepSpeed config"

# Keys at the top of a file by which its kind is known.
_TELLING = {
    RECIPE: " ".join(Recipe.model_fields),
    LAUNCH: (
        "compute_environment distributed_type num_processes num_machines machine_rank main_process_ip "
        "main_process_port main_training_function mixed_precision use_cpu fsdp_config deepspeed_config "
        "parallelism_config downcast_bf16 rdzv_backend same_network dynamo_config gpu_ids"
    ),
    DEEPSPEED: (
        "zero_optimization train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "gradient_clipping fp16 bf16 optimizer scheduler zero_allow_untested_optimizer steps_per_print "
        "wall_clock_breakdown activation_checkpointing torch_autocast"
    ),
}

PLACES = {
    RECIPE: "A recipe is named by itself, as in `finetune launch --config_file LAUNCH_FILE RECIPE`.",
    LAUNCH: "A launch file is named behind --config_file, as in `finetune launch --config_file LAUNCH_FILE RECIPE`.",
    DEEPSPEED: (
        "A launch file names it, by `deepspeed_config: {deepspeed_config_file: FILE}`, as "
        "accelerate_configs/zero2.yaml does; that file is named behind --config_file."
    ),
}
"""Place where a file of each kind is named."""


def other_kind(tree: Mapping[Any, Any], expected: str) -> str | None:
    """Tells from its top-level keys what a file is, and where to name it; None if it may be of the `expected` kind."""
    hits = {kind: sorted(set(telling.split()) & tree.keys()) for kind, telling in _TELLING.items()}
    if len(hits[expected]) < len(tree):
        hits |= {f"a config of {tool_name(tool)}": keys for tool, keys in count_keys(tree).items()}
    kind = max(hits, key=lambda kind: (len(hits[kind]), kind == expected))
    known = kind in PLACES
    if kind == expected or len(hits[kind]) < (1 if known else 3):
        return None
    message = f"this is {kind} ({', '.join(hits[kind][:4])}), not {expected}. "
    return message + PLACES.get(kind, "`finetune convert FILE` makes a recipe of it, and names a launch file.")
