"""Kinds of configuration files, and the recipe's names for keys of other tools."""

from collections.abc import Mapping
from typing import Any

from finetune.config.recipe_schema import Recipe

OTHER_NAMES = {
    "lora.targets": "target_modules lora_target_modules lora_target",
    "lora.save_modules": "modules_to_save lora_modules_to_save",
    "lora.rank": "lora_r lora_rank r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.dora": "use_dora peft_use_dora",
    "lora.rslora": "use_rslora peft_use_rslora",
    "lora.init": "init_lora_weights",
    "model.name": "model_name_or_path pretrained_model_name_or_path model_name base_model",
    "model.trust_remote_code": "trust_remote_code",
    "model.gradient_checkpointing": "gradient_checkpointing",
    "model.attention": "attn_implementation flash_attention flash_attn",
    "tokenizer.name": "tokenizer_name tokenizer_name_or_path",
    "data.train": "datasets dataset dataset_name dataset_path train_file",
    "data.validation": "test_datasets eval_dataset validation_file",
    "data.validation_fraction": "val_set_size val_size",
    "data.sequence_length": "max_seq_length max_seq_len sequence_len seq_length cutoff_len max_length block_size",
    "data.packing": "packing sample_packing",
    "data.num_workers": "dataset_num_proc preprocessing_num_workers",
    "chat.template": "chat_template",
    "batch.micro_size": "per_device_train_batch_size micro_batch_size",
    "batch.global_size": "train_batch_size global_batch_size",
    "eval.micro_size": "per_device_eval_batch_size eval_batch_size",
    "eval.every_steps": "eval_steps",
    "eval.patience": "early_stopping_patience",
    "length.epochs": "num_train_epochs num_epochs epochs",
    "length.steps": "max_steps max_train_steps",
    "optim.name": "optimizer optim_name",
    "optim.lr": "learning_rate lr",
    "optim.weight_decay": "weight_decay",
    "optim.args": "adam_beta1 adam_beta2 adam_epsilon optim_args",
    "optim.clip_norm": "max_grad_norm gradient_clipping",
    "schedule.name": "lr_scheduler lr_scheduler_type",
    "schedule.warmup_steps": "warmup_steps num_warmup_steps",
    "schedule.warmup_fraction": "warmup_ratio",
    "output.dir": "output_dir",
    "output.overwrite": "overwrite_output_dir",
    "log.every_steps": "logging_steps",
    "log.trackers": "report_to",
    "checkpoint.every_steps": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "resume.mode": "resume_from_checkpoint",
}
"""Keys of a recipe, and their names in transformers, TRL, PEFT, axolotl and LLaMA-Factory."""

KEY_OF_OTHER_NAME = {name: key for key, names in OTHER_NAMES.items() for name in names.split()} | {
    "load_in_4bit": "model.quantization: nf4",
    "load_in_8bit": "model.quantization: int8",
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
    "train_on_inputs": "chat.train_on: all",
    "assistant_only_loss": "chat.train_on: assistant",
    "gradient_accumulation_steps": "batch.global_size, which is its product with batch.micro_size and the processes",
}

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
    "a config of axolotl": (
        "base_model datasets adapter sequence_len sample_packing micro_batch_size num_epochs lora_r val_set_size "
        "lora_target_modules dataset_prepared_path special_tokens learning_rate optimizer lr_scheduler"
    ),
    "a config of LLaMA-Factory": (
        "stage do_train finetuning_type template cutoff_len dataset dataset_dir lora_target lora_rank "
        "model_name_or_path per_device_train_batch_size learning_rate num_train_epochs output_dir"
    ),
    "a config of TRL or of transformers' Trainer": (
        "model_name_or_path dataset_name learning_rate num_train_epochs per_device_train_batch_size output_dir "
        "per_device_eval_batch_size gradient_accumulation_steps max_seq_length use_peft lora_r lora_alpha "
        "lora_target_modules lr_scheduler_type warmup_ratio logging_steps save_strategy eval_strategy report_to"
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
    """Tells from its top-level keys what a file is, and where to name it; None if it may be what is expected.

    Args:
        expected: `RECIPE`, `LAUNCH` or `DEEPSPEED`.
    """
    hits = {kind: sorted(set(telling.split()) & tree.keys()) for kind, telling in _TELLING.items()}
    kind = max(hits, key=lambda kind: (len(hits[kind]), kind == expected))
    known = kind in PLACES
    if kind == expected or len(hits[kind]) < (1 if known else 3):
        return None
    said = f"this is {kind} ({', '.join(hits[kind][:4])}), not {expected}. "
    if known:
        return said + PLACES[kind]
    names = [f"{name} is {KEY_OF_OTHER_NAME[name]}" for name in hits[kind] if name in KEY_OF_OTHER_NAME]
    return (
        f"{said}`finetune init` writes a recipe, and `finetune docs recipe` lists its keys; there {', '.join(names)}."
    )
