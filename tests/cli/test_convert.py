"""`finetune convert`: configs of other tools become recipes that say the same, and what is lost is listed."""

import json
from pathlib import Path
from typing import Any

import pytest
import testdata
import yaml
from forkserver import ForkServer
from harness import environment

from finetune.cli import recipe_verbs
from finetune.cli.convert_config import convert_config
from finetune.cli.main import build_parser, main
from finetune.config.peer_keys import CONVERTED
from finetune.config.recipe import load_recipe
from finetune.config.recipe_schema import Recipe
from finetune.data.chat.chat_templates import SHIPPED
from finetune.data.sources.conversation_formats import RecordForm, Tolerance
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.errors import RecipeError

TRL = {
    "model_name_or_path": "org/model",
    "dataset_name": "org/talks",
    "dataset_config": "en",
    "dataset_train_split": "train_sft",
    "assistant_only_loss": True,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "constant_with_warmup",
    "use_peft": True,
    "load_in_4bit": True,
    "optim": "paged_adamw_8bit",
    "report_to": ["wandb"],
}
AXOLOTL = {
    "base_model": "org/model",
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "datasets": [
        {
            "path": "org/talks",
            "type": "chat_template",
            "field_messages": "turns",
            "message_property_mappings": {"role": "from", "content": "value"},
            "roles": {"user": ["customer"], "assistant": ["agent"]},
        },
        {"path": "json", "data_files": ["more.jsonl"], "type": "completion", "field": "body"},
    ],
    "sequence_len": 512,
    "sample_packing": True,
    "val_set_size": 0.05,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": "2e-4",
    "adam_beta2": 0.95,
    "warmup_ratio": 0.1,
    "bf16": "auto",
    "saves_per_epoch": 2,
    "special_tokens": {"pad_token": "<pad>"},
    "wandb_entity": None,
}
FACTORY = {
    "model_name_or_path": "org/model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "q_proj, v_proj",
    "lora_rank": 4,
    "dataset": "pairs, talks, liked",
    "template": "llama3",
    "cutoff_len": 256,
    "max_samples": 100,
    "learning_rate": 1e-4,
    "max_grad_norm": 0,
    "fp16": True,
    "bf16": False,
    "warmup_steps": 5,
}
INFO = {
    "pairs": {"file_name": "pairs.json", "columns": {"prompt": "question", "response": "reply"}},
    "talks": {"hf_hub_url": "org/talks", "formatting": "sharegpt", "split": "train_sft", "num_samples": 7},
    "liked": {"file_name": "liked.json", "ranking": True},
    "chats": {
        "file_name": "chats.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "chosen": "chosen", "rejected": "bad"},
    },
}
# As the published examples are: instruct-dpo-lora-8b.yml and qwen3_lora_dpo.yaml.
AXOLOTL_DPO = {
    "base_model": "org/model",
    "adapter": "lora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "chat_template": "llama3",
    "rl": "dpo",
    "rl_beta": 0.2,
    "datasets": [
        {
            "path": "org/better",
            "type": "chat_template.default",
            "field_messages": "conversation",
            "field_chosen": "chosen",
            "field_rejected": "worse",
            "message_property_mappings": {"role": "role", "content": "content"},
            "roles": {"user": ["user"], "assistant": ["assistant"]},
        },
        {"path": "org/argilla", "split": "train", "type": "llama3.argilla"},
    ],
    "sequence_len": 512,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 1,
    "learning_rate": 2e-4,
    "dpo_label_smoothing": 0.1,
}
FACTORY_DPO = {
    "stage": "dpo",
    "pref_beta": 0.2,
    "pref_loss": "sigmoid",
    "pref_ftx": 0.5,
    "dataset": "liked, chats, pairs",
    "max_samples": None,
}
TORCHTUNE = {
    "output_dir": "out",
    "model": {
        "_component_": "torchtune.models.llama3.qlora_llama3_8b",
        "lora_attn_modules": ["q_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": 8,
        "lora_alpha": 16,
    },
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "m/t.model", "max_seq_len": None},
    "checkpointer": {"checkpoint_dir": "models/llama", "checkpoint_files": ["a"], "output_dir": "${output_dir}/model"},
    "dataset": {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": "org/pairs",
        "column_map": {"input": "q", "output": "a"},
        "packed": False,
        "split": "train[:90%]",
    },
    "batch_size": 2,
    "batch_size_val": "${batch_size}",
    "epochs": 1,
    "max_steps_per_epoch": 20,
    "gradient_accumulation_steps": 8,
    "optimizer": {"_component_": "torch.optim.SGD", "lr": "3e-4"},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "dtype": "bf16",
}


def converted(
    folder: Path, config: dict[str, Any], tool: str | None = None, devices: int | None = None
) -> tuple[Recipe, str]:
    """Returns the recipe that is written of a config, and what is said."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    said = "\n".join(convert_config(file, tool, folder / "new", devices))
    return load_recipe(folder / "new" / "recipe.yaml", tasks=BUILT_IN), said


def refusal(folder: Path, config: dict[str, Any], tool: str | None = None) -> str:
    with pytest.raises(RecipeError) as refused:
        converted(folder, config, tool)
    assert not (folder / "new").exists()
    return str(refused.value)


def test_trl(tmp_path: Path) -> None:
    recipe, said = converted(tmp_path, TRL, devices=2)
    assert "is a config of TRL" in said
    (source,), (held_out,) = recipe.data.train, recipe.data.validation
    assert (source.hub, source.hub_config, source.split, held_out.split) == ("org/talks", "en", "train_sft", "test")
    assert (recipe.batch.micro_size, recipe.batch.global_size) == (4, 16)
    assert "4 rows a device x 2 accumulation x 2 devices = 16 rows" in said
    assert (recipe.schedule.name, recipe.schedule.warmup_fraction) == ("constant", 0.1)
    assert recipe.chat is not None
    assert (recipe.chat.train_on, recipe.eval.every_steps, recipe.optim.name) == ("assistant", 50, "PagedAdamW8bit")
    assert recipe.lora is not None
    # TRL's and PEFT's own values, where the config says nothing.
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets) == (16, 32, ("q_proj", "v_proj"))
    assert (recipe.optim.lr, recipe.optim.weight_decay, recipe.data.sequence_length) == (2e-5, 0.0, 1024)
    assert (recipe.model.quantization, recipe.model.double_quantization) == ("nf4", False)
    assert (recipe.data.packing, recipe.precision, recipe.log.trackers) == ("padded", "bf16", ("wandb",))
    assert "Not carried over" not in said


def test_the_shortest_config(tmp_path: Path) -> None:
    recipe, said = converted(tmp_path, {"model_name_or_path": "org/model", "dataset_name": "org/talks"})
    assert "is a config of TRL" in said
    assert recipe.chat is not None
    assert recipe.chat.train_on == "all"
    assert "write `completions`" in said.lower()
    assert recipe.lora is None


def test_axolotl(tmp_path: Path) -> None:
    recipe, said = converted(tmp_path, AXOLOTL)
    talks, texts = recipe.data.train
    assert (talks.hub, talks.format, talks.fields) == ("org/talks", "sharegpt", {"messages": "turns"})
    assert (texts.path, texts.format, texts.text_field) == ("more.jsonl", "text", "body")
    assert recipe.chat is not None
    assert recipe.chat.roles == {"customer": "user", "agent": "assistant"}
    assert (recipe.chat.template, recipe.chat.too_long) == (None, "drop")
    assert recipe.lora is not None
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets) == (8, 16, "all-linear")
    assert (recipe.data.packing, recipe.data.sequence_length, recipe.data.validation_fraction) == (
        "documents",
        512,
        0.05,
    )
    assert (recipe.batch.micro_size, recipe.batch.global_size, recipe.length.epochs) == (2, 8, 3)
    assert (recipe.optim.name, recipe.optim.lr, recipe.optim.args) == ("AdamW8bit", 2e-4, {"betas": [0.9, 0.95]})
    assert (recipe.schedule.floor, recipe.schedule.warmup_fraction, recipe.precision) == (0.0, 0.1, "auto")
    assert (recipe.checkpoint.per_epoch, recipe.eval.per_epoch) == (2, None)
    assert "what is learned may differ" not in said


def test_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    recipe, said = converted(tmp_path, FACTORY)
    pairs, talks = recipe.data.train
    assert pairs.path == str(tmp_path / "pairs.json")
    assert (pairs.format, pairs.fields, pairs.limit) == ("pairs", {"user": "question", "assistant": "reply"}, 100)
    assert (talks.hub, talks.format, talks.split, talks.limit) == ("org/talks", "sharegpt", "train_sft", 7)
    assert "dataset.2: liked has preferences" in said
    assert recipe.lora is not None
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets) == (4, 8.0, ("q_proj", "v_proj"))
    assert (recipe.optim.clip_norm, recipe.precision, recipe.schedule.warmup_steps) == (None, "fp16", 5)
    assert (recipe.data.sequence_length, recipe.data.long_documents) == (256, "truncate")
    assert recipe.model.gradient_checkpointing
    assert recipe.chat is not None
    assert recipe.chat.template == "llama3"


def test_llama_factory_pre_training(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    recipe, _ = converted(tmp_path, {**FACTORY, "stage": "pt", "dataset": "pairs", "finetuning_type": "full"})
    assert (recipe.data.packing, recipe.data.remainder, recipe.data.train[0].text_field) == (
        "wrapped",
        "drop",
        "question",
    )
    assert recipe.chat is None
    assert recipe.lora is None


def test_trl_of_pairs(tmp_path: Path) -> None:
    config = {**TRL, "beta": 0.2, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "label_smoothing": 0.1}
    config |= {"max_prompt_length": 64, "precompute_ref_log_probs": True, "assistant_only_loss": None}
    recipe, said = converted(tmp_path, config)
    assert recipe.task.name == "dpo"
    assert "does not name its trainer. The task is dpo; --task names another." in said
    assert recipe.preference is not None
    assert recipe.preference.model_dump(exclude_defaults=True) == {
        "loss": ("sigmoid", "sft"),
        "loss_weights": (1.0, 0.5),
        "beta": 0.2,
    }
    assert "label_smoothing: label_smoothing is 0.1, and sigmoid, sft do not take it" in said
    assert "max_prompt_length: data.sequence_length is for a prompt with an answer" in said
    # TRL's own values: its trainers of pairs switch dropout off, adapters' too.
    assert recipe.lora is not None
    assert (recipe.lora.dropout, recipe.optim.lr, recipe.data.packing) == (0.0, 1e-6, "documents")
    assert recipe.chat is not None
    assert recipe.chat.train_on == "assistant"
    assert recipe.data.train[0].format == "auto"


@pytest.mark.parametrize(
    ("keys", "asked", "task", "section"),
    [
        ({"beta": 0.3}, "orpo", "orpo", {"beta": 0.3}),
        (
            {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0},
            None,
            "simpo",
            {"gamma": 1.0, "sft_weight": 0.0},
        ),
        ({"loss_type": "simpo"}, None, "simpo", {"sft_weight": 1.0}),  # TRL's own weight
        ({"loss_type": "hinge", "cpo_alpha": 0.5}, None, "cpo", {"loss": ("hinge",), "sft_weight": 0.5}),
        ({"loss_type": "robust", "label_smoothing": 0.1}, None, "dpo", {"loss": ("robust",), "label_smoothing": 0.1}),
        ({"rpo_alpha": 0.5, "beta": 0.1}, None, "dpo", {"loss": ("sigmoid", "sft"), "loss_weights": (1.0, 0.5)}),
        ({"loss_type": "dft"}, None, "causal_lm", None),
        ({"loss_type": "apo_zero_unpaired"}, None, "kto", {"loss": ("apo_zero_unpaired",)}),
        ({"desirable_weight": 1.5, "beta": 0.2}, None, "kto", {"desirable_weight": 1.5, "beta": 0.2}),
        ({"center_rewards_coefficient": 0.01}, None, "reward", {"centering": 0.01}),
        ({"center_rewards_coefficient": 0.0}, "reward", "reward", None),
        # What a trainer does not read is left out.
        ({"beta": 0.2, "simpo_gamma": 1.0, "f_alpha_divergence_coef": 1.0}, "dpo", "dpo", {"beta": 0.2}),
    ],
)
def test_tasks_of_trl(
    keys: dict[str, Any], asked: str | None, task: str, section: dict[str, Any] | None, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**TRL, **keys}))
    convert_config(file, "trl", tmp_path / "new", None, asked)
    recipe = load_recipe(tmp_path / "new" / "recipe.yaml", tasks=BUILT_IN)
    assert recipe.task.name == task
    assert (recipe.preference and recipe.preference.model_dump(exclude_defaults=True)) == section


def test_noise_and_smoothing(tmp_path: Path) -> None:
    """Of which pairs know the first."""
    keys = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5}

    def both(name: str, config: dict[str, Any]) -> tuple[tuple[Any, Any], str]:
        (tmp_path / name).mkdir()
        recipe, said = converted(tmp_path / name, config)
        return (recipe.task.label_smoothing, recipe.model.neftune_alpha), said

    found, said = both("texts", {**TRL, **keys})
    assert found == (0.1, 5.0)
    assert "label_smoothing_factor: evaluations here report the loss without it." in said
    found, said = both("pairs", {**TRL, "beta": 0.2, **keys})
    assert found == (None, 5.0)
    assert "label_smoothing_factor: dpo learns answers, whose loss it does not change" in said
    found, _ = both("none", {**TRL, "label_smoothing_factor": 0.0, "neftune_noise_alpha": None})
    assert found == (None, None)


def test_answers_with_labels_and_rewards(tmp_path: Path) -> None:
    """Of Axolotl and LLaMA-Factory."""

    def of(config: dict[str, Any]) -> tuple[Any, dict[str, Any], str]:
        (tmp_path / "new" / "recipe.yaml").unlink(missing_ok=True)
        recipe, said = converted(tmp_path, config)
        return recipe, recipe.preference.model_dump(exclude_defaults=True) if recipe.preference else {}, said

    labelled = {"path": "org/labelled", "type": {"field_prompt": "q", "field_completion": "a", "field_label": "good"}}
    data = [labelled, {"path": "org/argilla", "type": "llama3.argilla"}]
    kto = {"rl": "kto", "datasets": data, "kto_desirable_weight": 0.2, "kto_undesirable_weight": 1.0}
    recipe, section, _ = of({**AXOLOTL_DPO, "dpo_label_smoothing": None, **kto})
    assert (recipe.task.name, section) == ("kto", {"beta": 0.2, "desirable_weight": 0.2})
    named, argilla = recipe.data.train
    assert (named.fields, argilla.fields) == ({"prompt": "q", "completion": "a", "label": "good"}, {})
    rewards = {"rl": None, "rl_beta": None, "reward_model": True, "center_rewards_coefficient": 0.1}
    data = [{"path": "org/pairs", "type": "bradley_terry.chat_template"}]
    recipe, section, _ = of({**AXOLOTL_DPO, "dpo_label_smoothing": None, **rewards, "datasets": data})
    assert (recipe.task.name, recipe.data.packing, section) == ("reward", "padded", {"centering": 0.1})

    liked = {"file_name": "liked.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "good"}}
    talks = {"formatting": "sharegpt", "columns": {"messages": "talk", "kto_tag": "label"}, "file_name": "talks.json"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({**INFO, "tagged": liked, "talks": talks}))
    keys = {**FACTORY, **FACTORY_DPO, "pref_ftx": 0.5, "kto_chosen_weight": 2.0, "kto_rejected_weight": 1.0}
    recipe, section, said = of({**keys, "stage": "kto", "dataset": "tagged,talks,liked"})
    assert (recipe.task.name, section) == ("kto", {"beta": 0.2, "desirable_weight": 2.0})
    assert [source.fields for source in recipe.data.train] == [
        {"instruction": "q", "output": "a", "kto_tag": "good"},
        {"conversations": "talk", "kto_tag": "label"},
    ]
    assert "pref_ftx: kto has no cross-entropy beside its loss" in said
    assert "dataset.2: liked has no answers with a kto_tag" in said
    recipe, section, said = of({**FACTORY, "stage": "rm", "dataset": "liked, tagged"})
    assert (recipe.task.name, recipe.data.packing, section) == ("reward", "padded", {})
    assert "dataset.1: tagged has no pairs of answers" in said


def test_axolotl_of_pairs(tmp_path: Path) -> None:
    recipe, said = converted(tmp_path, AXOLOTL_DPO)
    talks, argilla = recipe.data.train
    assert (talks.hub, talks.fields) == ("org/better", {"messages": "conversation", "rejected": "worse"})
    assert argilla.fields == {"chosen": "chosen_response", "rejected": "rejected_response"}
    assert recipe.chat is not None
    assert (recipe.task.name, recipe.chat.template, recipe.data.packing) == ("dpo", "llama3", "documents")
    assert recipe.preference is not None
    assert recipe.preference.beta == 0.2
    assert "dpo_label_smoothing: label_smoothing is 0.1, and sigmoid does not take it" in said
    (tmp_path / "new" / "recipe.yaml").unlink()
    recipe, _ = converted(tmp_path, {**AXOLOTL_DPO, "rl": "ipo"})
    assert recipe.preference is not None
    assert recipe.preference.loss == ("ipo",)


def test_llama_factory_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    recipe, said = converted(tmp_path, {**FACTORY, **FACTORY_DPO, "ref_model": "org/other"})
    liked, chats = recipe.data.train
    assert (liked.path, liked.fields) == (str(tmp_path / "liked.json"), {})
    assert chats.fields == {"conversations": "talk", "rejected": "bad"}
    assert "dataset.2: pairs has no pairs of answers" in said
    assert recipe.task.name == "dpo"
    assert recipe.preference is not None
    section = {"beta": 0.2, "loss": ("sigmoid", "sft"), "loss_weights": (1.0, 0.5), "reference": {"name": "org/other"}}
    assert recipe.preference.model_dump(exclude_defaults=True) == section
    assert "pref_ftx: there it is a mean of each answer's mean" in said
    (tmp_path / "new" / "recipe.yaml").unlink()
    recipe, _ = converted(tmp_path, {**FACTORY, **FACTORY_DPO, "pref_loss": "orpo", "pref_ftx": 0.0})
    assert recipe.task.name == "orpo"


def test_names_of_llama_factory_need_their_table(tmp_path: Path) -> None:
    assert "Copy dataset_info.json beside the config" in refusal(tmp_path, FACTORY)
    recipe, _ = converted(tmp_path, {**FACTORY, "dataset": "org/talks", "dataset_dir": "ONLINE"})
    assert recipe.data.train[0].hub == "org/talks"


def test_torchtune(tmp_path: Path) -> None:
    recipe, said = converted(tmp_path, TORCHTUNE, devices=4)
    assert "config of torchtune" in said
    assert "--config_file fsdp --num_processes 4" in said
    (source,) = recipe.data.train
    assert (source.hub, source.split, source.format) == ("org/pairs", "train[:90%]", "pairs")
    assert source.fields == {"user": "q", "assistant": "a"}
    assert recipe.model.name == "models/llama"
    assert recipe.model.quantization == "nf4"
    assert recipe.lora is not None
    assert recipe.lora.targets == ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (recipe.length.steps, recipe.length.epochs, recipe.batch.global_size, recipe.eval.micro_size) == (
        20,
        None,
        64,
        2,
    )
    assert (recipe.optim.name, recipe.optim.lr, recipe.optim.weight_decay) == ("SGD", 3e-4, 0.0)
    assert (recipe.optim.clip_norm, recipe.schedule.name, recipe.data.packing) == (None, "constant", "padded")
    assert (recipe.data.sequence_length, recipe.checks.max_too_long, recipe.checkpoint.per_epoch) == (2048, 0.0, 1)
    assert "torchtune cuts nothing where tokenizer.max_seq_len is null" in said


SHARDED = {**TRL, "optim": "adamw_torch"}


@pytest.mark.parametrize(
    ("keys", "launch"),
    [
        ({}, "single"),
        ({"num_processes": 3}, "ddp --num_processes 3"),
        ({"deepspeed": "ds/ds_z2_config.json"}, "zero2 --num_processes 1"),
        ({"deepspeed": "zero3_bf16_cpuoffload_all.json"}, "zero3_offload --num_processes 1"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}}, "zero3_nvme --num"),
        ({"fsdp": "full_shard auto_wrap"}, "fsdp --num"),
        ({"fsdp": ["shard_grad_op"], "fsdp_config": {"fsdp_version": 2}}, "fsdp_grad_op --num"),
        ({"fsdp": "full_shard", "fsdp_config": {"offload_params": True}}, "fsdp_offload --num"),
        ({"accelerate_config": "zero1"}, "zero1 --num"),
    ],
)
def test_launch_files(keys: dict[str, Any], launch: str, tmp_path: Path) -> None:
    assert f"--config_file {launch}" in converted(tmp_path, {**SHARDED, **keys})[1]


def test_a_deepspeed_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}')
    assert "--config_file zero3 --num" in converted(tmp_path, {**SHARDED, "deepspeed": "mine.json"})[1]


def test_what_is_not_known_is_listed(tmp_path: Path) -> None:
    more = {
        "brand_new": 3,
        "use_galore": True,
        "optim": "muon",
        "weight_decay": "much",
        "dataloader_num_workers": 2,
    }
    recipe, said = converted(tmp_path, {**TRL, **more, "weight_decay": 0.1})
    learned, others, unknown = said.split("\nNot ")[1:]
    assert "what is learned may differ" in learned
    assert "use_galore: this method is not offered" in learned
    assert "optim: muon has no counterpart in optim.name" in learned
    assert "dataloader_num_workers: the launch file or the run decides it" in others
    assert unknown.splitlines()[1:] == ["    brand_new: got 3"]
    assert recipe.optim.weight_decay == 0.1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**FACTORY, "stage": "ppo"}, "stage is ppo, and next tokens and preferences are learned"),
        (
            {**AXOLOTL, "rl": "grpo"},
            "grpo has no counterpart in task.name (dpo, ipo, orpo, simpo, kto)",
        ),
        ({**TRL, "loss_type": ["sigmoid", "kto_pair"]}, "kto_pair is no loss of dpo here (sigmoid, hinge"),
        ({**TRL, "beta": 0.1, "sync_ref_model": True}, "sync_ref_model is true, and a reference stays as it is"),
        (
            {**FACTORY, **FACTORY_DPO, "ref_model_adapters": "org/other"},
            "ref_model_adapters is org/other, and a reference stays as it is, and is a whole model",
        ),
        ({**AXOLOTL, "adapter": "llama-adapter"}, "adapter is llama-adapter"),
        ({**AXOLOTL, "datasets": [{"path": "a", "type": "oasst"}]}, "datasets.0: data of type oasst is not read"),
        ({**AXOLOTL, "micro_batch_size": "two"}, 'batch.micro_size: got "two"; allowed are a whole number above 0'),
        ({**TRL, "use_peft": False}, "quantized weights (nf4) cannot be trained"),
        ({"learning_rate": 1, "output_dir": "x", "max_steps": 3}, "TRL or Axolotl or LLaMA-Factory"),
        ({"one": 1}, "Say which by --from"),
        # What the launch file cannot do.
        ({**TRL, "fsdp": "full_shard"}, "PagedAdamW8bit of bitsandbytes keeps its state in blocks of whole tensors"),
        ({**TRL, "deepspeed": "z3_offload"}, "zero3_offload.json offloads the optimiser to cpu, where only AdamW runs"),
        ({**AXOLOTL, "deepspeed": "zero3.json", "gradient_checkpointing": True}, "AdamW8bit of bitsandbytes"),
        # With all that was not read.
        (
            {
                **TRL,
                "num_generations": 8,
                "beta": 0.1,
                "brand_new": 3,
                "use_galore": True,
                "dataloader_num_workers": 2,
            },
            "may differ: use_galore: this method is not offered; Not carried over; files, figures, speed or "
            "memory may differ: dataloader_num_workers: the launch file or the run decides it; Not in the table of the "
            "tool's keys: brand_new: got 3.",
        ),
        (
            {**FACTORY, "stage": "ppo", "ppo_epochs": 2},
            "and `rm`. ppo_epochs is 2, and online methods and",
        ),
        # Other tools.
        (
            {"model": {"model_name": "x"}, "training": {"trainer_type": "TRL_SFT"}, "peft": {"lora_r": 4}},
            "is a config of Oumi (model.model_name, peft.lora_r, training.trainer_type), which is not read",
        ),
        (
            {"step_scheduler": {"num_epochs": 1}, "model": {"_target_": "a"}, "optimizer": {"_target_": "b", "lr": 1}},
            "is a config of NeMo (model._target_, optimizer._target_, step_scheduler.num_epochs), which is not read",
        ),
        (
            {
                "model": "x",
                "train_type": "lora",
                "torch_dtype": "bfloat16",
                "lora_rank": 8,
                "learning_rate": 1e-4,
                "target_modules": "all-linear",
                "num_train_epochs": 1,
                "per_device_train_batch_size": 1,
            },
            "is a config of ms-swift (target_modules, torch_dtype, train_type), which is not read",
        ),
    ],
)
def test_what_makes_no_recipe_is_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    found = refusal(tmp_path, config)
    assert said in found
    assert "\n" not in found


@pytest.mark.parametrize("text", ["- a", "a: [", "a: 1\na: 2", ""])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match="config"):
        convert_config(file, None, tmp_path, None)


@pytest.mark.parametrize(
    ("keys", "every_steps", "per_epoch"),
    [
        ({"eval_strategy": "epoch", "eval_steps": 50}, None, 1),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, None, 2),  # of 2 epochs
        ({"eval_strategy": "steps", "eval_steps": 0.25, "max_steps": 30}, 8, None),
        ({"eval_strategy": "steps", "eval_steps": None, "logging_steps": 7}, 7, None),
        ({"eval_strategy": "no", "eval_steps": 50}, None, None),
    ],
)
def test_evaluations(keys: dict[str, Any], every_steps: int | None, per_epoch: float | None, tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, {**TRL, **keys})
    assert (recipe.eval.every_steps, recipe.eval.per_epoch) == (every_steps, per_epoch)
    # Without an evaluation before the end, none is the best.
    (tmp_path / "best").mkdir()
    best, said = converted(tmp_path / "best", {**TRL, **keys, "load_best_model_at_end": True})
    assert best.output.model == ("best" if every_steps or per_epoch else "last")
    assert (best.output.model == "best") != ("load_best_model_at_end" in said)


@pytest.mark.parametrize(
    ("config", "trackers", "said"),
    [
        (
            {**TRL, "report_to": ["wandb", "tensorboard", "mlflow"]},
            ("tensorboard", "wandb"),
            "mlflow has no counterpart",
        ),
        ({**TRL, "report_to": "none"}, (), ""),
        ({**AXOLOTL, "wandb_project": "mine", "use_tensorboard": True}, ("tensorboard", "wandb"), "WANDB_PROJECT=mine"),
        ({**AXOLOTL, "wandb_project": "mine", "use_wandb": False}, (), ""),
        (
            {**TORCHTUNE, "metric_logger": {"_component_": "torchtune.training.metric_logging.WandBLogger"}},
            ("wandb",),
            "",
        ),
        ({**TORCHTUNE, "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger"}}, (), ""),
    ],
)
def test_trackers(config: dict[str, Any], trackers: tuple[str, ...], said: str, tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path, config)
    assert recipe.log.trackers == trackers
    assert said in lines
    assert "trackers (" not in lines or "mlflow" in said


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({**FACTORY, "dataset": "pairs", "template": "qwen3_nothink"}, "chatml"),
        ({**FACTORY, "dataset": "pairs", "template": "deepseek3"}, "deepseek"),
        ({**FACTORY, "dataset": "pairs", "template": "moss_vl"}, None),
        ({**AXOLOTL, "chat_template": "phi_35"}, "phi"),
        ({**AXOLOTL, "chat_template": "tokenizer_default"}, None),
        ({**AXOLOTL, "datasets": [{"path": "org/pairs", "type": "alpaca"}]}, "alpaca"),
    ],
)
def test_templates_by_name(config: dict[str, Any], name: str | None, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    recipe, said = converted(tmp_path, config)
    assert recipe.chat is not None
    assert recipe.chat.template == name
    assert name is None or name in SHIPPED
    assert ("template: the tokenizer's own template is taken" in said) == ("moss_vl" in config.values())


def test_mixtures_of_trl(tmp_path: Path) -> None:
    mixture = {
        "datasets": [
            {"id": "org/talks", "config": "en", "columns": ["messages"], "weight": 0.5},
            {"id": "org/more", "split": "all", "columns": ["messages"]},
        ],
        "test_split_size": 0.1,
    }
    plain = {key: value for key, value in TRL.items() if "dataset" not in key and "eval" not in key}
    recipe, said = converted(tmp_path, {**plain, "dataset_mixture": mixture})
    talks, more = recipe.data.train
    assert (talks.hub, talks.hub_config, talks.weight, talks.format) == ("org/talks", "en", 0.5, "messages")
    assert (more.hub, more.split, more.weight) == ("org/more", "all", 1.0)
    assert recipe.data.validation_fraction == 0.1
    assert "differ" not in said


def test_pairs_of_trl_are_completions(tmp_path: Path) -> None:
    plain = {key: value for key, value in TRL.items() if key not in ("dataset_name", "assistant_only_loss")}
    pairs = [{"path": "org/pairs", "columns": ["prompt", "completion"]}]
    recipe, said = converted(tmp_path, {**plain, "datasets": pairs})
    assert (recipe.data.train[0].format, recipe.chat and recipe.chat.train_on) == ("prompt", "completions")
    assert "TRL looks at the data" not in said


def test_null_and_defaults_of_the_tools(tmp_path: Path) -> None:
    """TRL's null length cuts nothing; Axolotl's bf16 is auto; its batch_size is of one device."""
    recipe, said = converted(tmp_path, {**TRL, "max_length": None})
    assert (recipe.data.sequence_length, recipe.checks.max_too_long) == (2048, 0.0)
    assert "TRL cuts nothing where max_length is null" in said
    (tmp_path / "axolotl").mkdir()
    left_out = {key: value for key, value in AXOLOTL.items() if key not in ("bf16", "gradient_accumulation_steps")}
    recipe, said = converted(tmp_path / "axolotl", {**left_out, "batch_size": 8}, devices=3)
    assert (recipe.precision, recipe.batch.micro_size, recipe.batch.global_size) == ("auto", 2, 24)
    assert "2 rows a device x 4 accumulation x 3 devices = 24 rows" in said


def test_turns_of_other_names(tmp_path: Path) -> None:
    """Of Axolotl, where the field of messages is left out, and LLaMA-Factory's tags."""
    turns = {"role": "speaker", "content": "text"}
    source = {"path": "org/talks", "type": "chat_template", "message_property_mappings": turns}
    recipe, _ = converted(tmp_path, {**AXOLOTL, "datasets": [source]})
    assert recipe.data.train[0].fields == {"messages": "messages", **turns}
    tags = {"role_tag": "speaker", "content_tag": "text", "user_tag": "customer", "assistant_tag": "agent"}
    tags |= {"observation_tag": "result", "function_tag": "call", "system_tag": "rules"}
    info = {
        "talks": {"file_name": "talks.json", "formatting": "sharegpt", "columns": {"messages": "turns"}, "tags": tags}
    }
    (tmp_path / "factory").mkdir()
    (tmp_path / "factory" / "dataset_info.json").write_text(json.dumps(info))
    recipe, said = converted(tmp_path / "factory", {**FACTORY, "dataset": "talks"})
    assert (recipe.data.train[0].format, recipe.data.train[0].fields) == ("messages", {"messages": "turns", **turns})
    assert recipe.chat is not None
    roles = {"customer": "user", "agent": "assistant", "result": "tool", "rules": "system"}
    assert recipe.chat.roles == roles
    assert "dataset.0.tags: calls are read of the role `function_call`, not call" in said
    # What is written is what is read.
    form = RecordForm("messages", recipe.data.train[0].fields, roles, "text", strip=False, tolerance=Tolerance(False))
    record = {"turns": [{"speaker": "customer", "text": "Who?"}, {"speaker": "agent", "text": "Nora."}]}
    assert [turn["content"] for turn in json.loads(form.read(record, "here"))["messages"]] == ["Who?", "Nora."]


@pytest.mark.parametrize(
    ("asked", "most", "weight", "limit"),
    [(90, None, 1.5, None), (90, 75, 1.25, None), (60, None, 1.0, None), (7, None, 1.0, 7), (7, 5, 1.0, 5)],
)
@pytest.mark.parametrize("name", ["pairs.json", "pairs.jsonl"])
def test_samples_beyond_the_set(
    name: str, asked: int, most: int | None, weight: float, limit: int | None, tmp_path: Path
) -> None:
    """LLaMA-Factory draws documents again until there are as many."""
    record = json.dumps({"instruction": "Who?", "output": "Nora."})
    (tmp_path / name).write_text(f"[{', '.join([record] * 60)}]" if name == "pairs.json" else f"{record}\n" * 60)
    info = {"pairs": {"file_name": name, "num_samples": asked}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    recipe, said = converted(tmp_path, {**FACTORY, "dataset": "pairs", "max_samples": most})
    assert (recipe.data.train[0].weight, recipe.data.train[0].limit) == (weight, limit)
    assert ("pairs.num_samples: there samples are random" in said) == (limit is not None)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(yaml.safe_dump(AXOLOTL))
    words = ["convert", "c.yaml", "--output", "new", "--devices", "2", "--from", "axolotl"]
    assert main(words) == 0
    assert "finetune launch --config_file ddp --num_processes 2 new/recipe.yaml" in capsys.readouterr().out
    assert Path("new/recipe.yaml").read_text().startswith("# From c.yaml, a config of Axolotl.\n# finetune launch")
    assert main(words) != 0
    assert "is there already, and nothing is overwritten" in capsys.readouterr().err
    assert main(["convert", "c.yaml", "--output", "c.yaml/new", "--from", "axolotl"]) == 2
    assert "Cannot write to c.yaml/new: Not a directory." in capsys.readouterr().err
    assert recipe_verbs.CONVERTED_TOOLS == CONVERTED
    assert build_parser().parse_args(words).tool == "axolotl"


def test_a_converted_recipe_trains(tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "talks.jsonl").write_text('{"question": "Who?", "reply": "Nora and her cat."}\n' * 60)
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"talks": {"file_name": "talks.jsonl", "columns": {"prompt": "question", "response": "reply"}}})
    )
    config = {
        **FACTORY,
        "model_name_or_path": str(testdata.MODEL),
        "dataset": "talks",
        "max_steps": 2,
        "warmup_steps": 1,
    }
    config |= {"per_device_train_batch_size": 2, "output_dir": "run", "fp16": False}
    converted(tmp_path, config)
    words = ["-m", "finetune.training", "new/recipe.yaml", "chat.template=plain", "data.cache_dir=.cache"]
    code, output = fork_server.run(words, cwd=tmp_path, env=environment())
    assert code == 0, output[-3000:]
    assert (tmp_path / "run" / "model").is_dir()
