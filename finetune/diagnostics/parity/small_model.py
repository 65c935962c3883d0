"""Makes a recipe's network small: the same architecture with random weights."""

from math import gcd
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from finetune.config.recipe_schema import Recipe
from finetune.models.model_config import resolve_model_config
from finetune.tasks.task_lookup import head_of
from finetune.utils.errors import RecipeError

# Attention heads, and the width of each: powers of two, so that they divide by any usual number of ranks, and the
# product fills the blocks of 64 weights that are quantised together.
_HEADS, _HEAD_WIDTH = 4, 16
_WIDTH = _HEADS * _HEAD_WIDTH

# The most that is left of a size, by what architectures call it.
_AT_MOST = {
    "intermediate_size": 2 * _WIDTH,
    "n_inner": 2 * _WIDTH,
    "ffn_dim": 2 * _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": _WIDTH // 2,
    "kv_lora_rank": _WIDTH // 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# Not of the architecture: where the weights came from, and what a run settles for itself.
_LEFT_OUT = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config"),
    *("id2label", "label2id", "num_labels", "problem_type", "model_type"),
)


def shrink_model(recipe: Recipe, tree: dict[str, Any]) -> dict[str, Any]:
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
    given = recipe.model.config if recipe.model.config is not None else _said(config)
    try:
        values = {**given, "model_type": config.model_type, **small_sizes(config, recipe.data.sequence_length)}
        AutoModel.from_config(AutoConfig.for_model(**values), trust_remote_code=False)(
            input_ids=torch.zeros(1, 8, dtype=torch.long)
        )
    except Exception as error:  # architectures answer to sizes that they cannot have with many error types
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise RecipeError(
            f"--shrink: a small {config.model_type} cannot be derived from its configuration: {reason}. Write a small "
            "model.config into the recipe, and leave --shrink out."
        ) from error
    model = {**tree["model"], "name": None, "revision": None, "config": values}
    # A model's own tokenizer stays, and its vocabulary as large as that wants it.
    own = recipe.model.name if recipe.tokenizer.vocab_size is None else None
    tokenizer = {**tree["tokenizer"], "name": recipe.tokenizer.name or own}
    return {**tree, "model": model, "tokenizer": tokenizer}


def _said(config: Any) -> dict[str, Any]:
    """Returns what a model's configuration says of its architecture."""
    known = AutoConfig.for_model(config.model_type).to_dict()
    return {key: value for key, value in config.to_diff_dict().items() if key in known and key not in _LEFT_OUT}


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
        put("max_position_embeddings", min(config.max_position_embeddings, max(sequence_length, 64)))
    return sizes
