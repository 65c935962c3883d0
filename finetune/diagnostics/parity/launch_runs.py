"""Launches the same recipe, its network made small if asked, under one launch config after the other."""

import os
import subprocess
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from finetune.config.recipe import dump_recipe, validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.diagnostics.parity.compare import FinishedRun, read_finished
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.launcher import launcher_command
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.distributed.resolve_config import derive_accumulation
from finetune.models.model_config import first_position, resolve_model_config
from finetune.tasks.task_lookup import head_of
from finetune.utils import signals
from finetune.utils.atomic_files import write_text
from finetune.utils.errors import BackendError, FinetuneError, RecipeError
from finetune.utils.shipped_files import launch_file


def find_launches(names: str, num_processes: int | None = None) -> dict[str, Launch]:
    """Returns the launches of `--on`: names of `accelerate_configs/` or files, with commas, the reference first.

    Each has `num_processes`, or as many as its launch file says.

    Raises:
        RecipeError: If fewer than two are named, or one twice.
        BackendError: If one is no launch file.
    """
    words = [word for word in names.split(",") if word]
    if len(words) < 2:
        raise RecipeError(f"--on {names}: name two launch configs at least, such as `--on single,ddp`.")
    options = {} if num_processes is None else {"num_processes": str(num_processes)}
    launches: dict[str, Launch] = {}
    for word in words:
        file = Path(launch_file(word))
        if file.stem in launches:
            raise RecipeError(f"--on {names}: {file.stem} is named twice. Name each launch config once.")
        launches[file.stem] = predict_environment(str(file), options, os.environ).launch
    return launches


def write_recipes(
    recipe: Recipe, launches: Mapping[str, Launch], folder: Path, *, steps: int, shrink: bool
) -> dict[str, Path]:
    """Writes the recipe of each run, the same but for the directory; nothing is launched yet.

    Every step is logged, and whatever is not compared is left out.

    Raises:
        RecipeError: If the batch does not fit the processes of a launch config, or the model cannot be shrunk.
    """
    if steps < 1:
        raise RecipeError(f"--steps {steps}: take one step at least.")
    with RecipeError.explaining(f"--to: cannot make the folder {folder}", "Give another."):
        folder.mkdir(parents=True, exist_ok=True)
    for name in launches:
        if (folder / name).exists():
            raise RecipeError(f"--to: {folder / name} is there already. Give a new folder, or remove it.")
    tree = shrink_model(recipe) if shrink else recipe.model_dump(mode="json")
    tree |= {"length": {"steps": steps}, "resume": {"mode": "never"}, "sample": None, "eval": {"at_end": False}}
    tree["guard"]["alert"] = None
    tree["log"] |= {"every_steps": 1, "trackers": []}
    tree["checkpoint"] = {"every_minutes": None, "at_end": False, "keep_best_by": None}
    if "Adam" in recipe.optim.name and ":" not in recipe.optim.name:
        given = recipe.optim.args
        tree["optim"]["args"] = {**given, "eps": max(float(given.get("eps", 0.0)), _LEAST_EPS)}
    written = {}
    for name, launch in launches.items():
        tree["output"] = {"dir": str(folder / name), "overwrite": False, "save_model": True}
        asked = validate_recipe(tree)
        try:
            derive_accumulation(asked, launch.data_ranks)
        except RecipeError as error:
            raise RecipeError(f"{name}: {error}") from error
        written[name] = folder / f"{name}.yaml"
        write_text(written[name], dump_recipe(asked))
    return written


# Adam divides gradients by their own size, so that a weight whose gradient is zero but for rounding moves by rounding
# alone, on each backend another way. With the usual 1e-8, two such weights of 2,048 put a tensor 1e-4 away.
_LEAST_EPS = 1e-6


def launch_run(launch: Launch, recipe: Path, directory: Path, fault: str | None) -> FinishedRun:
    """Launches one run, with a fault of `fault_injection.FAULTS` if one is named, waits for its end, and reads it.

    Raises:
        BackendError: If it fails; it has said why.
    """
    name, file = directory.name, str(launch.file)
    module = "finetune.diagnostics.fault_injection" if fault else "finetune.training"
    options = ["--num_processes", str(launch.num_processes)]
    words = launcher_command(file, options, [*([fault] if fault else []), str(recipe)], module=module)
    with signals.held_back():
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2)
    try:
        code = process.wait()
    finally:
        # If this process is ended, it ends the launcher first.
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise BackendError(
            f"The run under {file} ended with exit code {code}, as it says above, so that there is nothing to "
            f"compare. Its recipe is {recipe}; leave {name} out of --on, or mend what it names."
        )
    try:
        return read_finished(directory)
    except FinetuneError as error:
        raise BackendError(f"The run under {file} left nothing to compare: {error}") from error


# Attention heads, and the width of each: powers of two, so that they divide by any usual number of ranks, and the
# product fills the blocks of 64 weights that are quantised together.
_HEADS, _HEAD_WIDTH = 4, 16
_WIDTH = _HEADS * _HEAD_WIDTH

# The most that is left of a size, by what architectures call it.
_AT_MOST = {
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 2 * _WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _WIDTH),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), _WIDTH // 2),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}

# Not of the architecture: where the weights came from, and what a run settles for itself.
_LEFT_OUT = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config"),
    *("id2label", "label2id", "num_labels", "problem_type", "model_type"),
)


def shrink_model(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe's keys and values with a small network in place of its own.

    Raises:
        RecipeError: If it is of an architecture that cannot be shrunk.
    """
    if (head := head_of(recipe)) is None:
        raise RecipeError(
            f"--shrink: the network of {recipe.task.name} is the task's own. Make it small by task.args, or leave "
            "--shrink out."
        )
    config = resolve_model_config(recipe, head, vocab_size=recipe.tokenizer.vocab_size)
    given = recipe.model.config
    if given is None:
        known = AutoConfig.for_model(config.model_type).to_dict()
        given = {key: value for key, value in config.to_diff_dict().items() if key in known and key not in _LEFT_OUT}
    what = f"--shrink: a small {config.model_type} cannot be derived from its configuration"
    advice = "Write a small model.config into the recipe, and leave --shrink out."
    # Architectures answer to sizes that they cannot have with many error types.
    with RecipeError.explaining(what, advice, Exception):
        values = {**given, "model_type": config.model_type, **small_sizes(config, recipe.data.sequence_length)}
        AutoModel.from_config(AutoConfig.for_model(**values), trust_remote_code=False)(
            input_ids=torch.zeros(1, 8, dtype=torch.long)
        )
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    tree["model"] |= {"name": None, "revision": None, "config": values}
    # A model's own tokenizer stays, and its vocabulary as large as that wants it.
    own = recipe.model.name if recipe.tokenizer.vocab_size is None else None
    tree["tokenizer"]["name"] = recipe.tokenizer.name or own
    return tree


def small_sizes(config: Any, sequence_length: int) -> dict[str, Any]:
    """Returns the sizes of a small network of the same architecture, in its own words."""
    sizes: dict[str, Any] = {}

    def put(name: str, value: Any) -> None:
        if hasattr(config, name):
            sizes[config.attribute_map.get(name, name)] = value

    heads = config.num_attention_heads
    layers, kinds = 2, getattr(config, "layer_types", None)
    if kinds:
        # One layer of each kind, where they alternate.
        distinct = list(dict.fromkeys(kinds))
        kinds = distinct if len(distinct) > 1 else distinct * 2
        layers = len(kinds)
        put("layer_types", kinds)
    put("num_hidden_layers", layers)
    put("hidden_size", _WIDTH)
    put("num_attention_heads", _HEADS)
    # As many queries a key as before, as far as the heads allow.
    put("num_key_value_heads", _HEADS // gcd(_HEADS, heads // (getattr(config, "num_key_value_heads", None) or heads)))
    if getattr(config, "head_dim", None) is not None and not hasattr(config, "qk_rope_head_dim"):
        put("head_dim", _HEAD_WIDTH)
    for name, most in _AT_MOST.items():
        if isinstance(value := getattr(config, name, None), int):
            put(name, min(value, most))
    if hasattr(config, "max_position_embeddings"):
        least = max(sequence_length, 64) + first_position(config)
        put("max_position_embeddings", min(config.max_position_embeddings, least))
    return sizes
