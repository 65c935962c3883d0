"""The configuration of a network, from the recipe or from a pretrained model, checked; with RoPE scaling if asked."""

import inspect
import math
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from finetune.config import recipe_paths
from finetune.config.recipe import hint
from finetune.config.recipe_schema import ModelSection, Recipe, RopeScalingSection
from finetune.data.tokenization.special_tokens import padding_id
from finetune.data.tokenization.tokenizer import num_ids
from finetune.models import pretrained_files
from finetune.models.heads import NEXT_TOKEN, Head
from finetune.utils.compat.transformers_private import model_mapping
from finetune.utils.errors import RecipeError
from finetune.utils.exact import exact_product

# The most layers, heads and experts, and the largest sizes, of which a network is built.
_MOST_PARTS, _MOST_SIZE = 10_000, 1 << 30
_SIZES = "vocab_size hidden_size intermediate_size head_dim num_hidden_layers num_attention_heads num_key_value_heads"


def resolve_model_config(
    recipe: Recipe,
    head: Head = NEXT_TOKEN,
    *,
    tokenizer: Any | None = None,
    vocab_size: int | None = None,
    num_labels: int | None = None,
    label_names: tuple[str, ...] = (),
    advice: str = "",
) -> PretrainedConfig:
    """Returns the network's configuration, checked against tokenizer and sequence length.

    Args:
        tokenizer: Source of special token ids and the vocabulary size; None while nothing is loaded.
        vocab_size: Stands in for a tokenizer that does not exist yet.
        advice: What else to change where the network is an encoder-decoder and should not be.

    Raises:
        RecipeError: If there is no such model, no network has its sizes, or they are too small for the tokenizer or
            the rows.
    """
    section = recipe.model
    size = num_ids(tokenizer) if tokenizer is not None else vocab_size
    if section.config is not None:
        config = _config_from_recipe(section.config, size, recipe.data.sequence_length)
        if tokenizer is not None:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if name not in section.config:
                    setattr(config, name, getattr(tokenizer, name))
        if first_position(config):
            if tokenizer is not None and config.pad_token_id is None:
                config.pad_token_id = padding_id(tokenizer)
            if "max_position_embeddings" not in section.config:
                config.max_position_embeddings = recipe.data.sequence_length + first_position(config)
    else:
        config = read_pretrained_config(section)
    if head.next_token and getattr(config, "is_encoder_decoder", False):
        raise RecipeError(
            f"model: {config.model_type} is an encoder-decoder model, which writes a text from another one; task "
            f"`{recipe.task.name}` trains decoders, which continue a text. {advice}Name a decoder-only model, such as "
            "llama, qwen3 or gpt2 (`finetune docs architectures` lists those that were tried)."
        )
    if head.encodes and not getattr(config, "is_encoder_decoder", False):
        raise RecipeError(
            f"model: {config.model_type} is no encoder-decoder model; task `{recipe.task.name}` trains a network to "
            "write one text from another, which its encoder reads. Name an encoder-decoder model, such as t5, bart or "
            "marian, or leave `task` out to train a decoder."
        )
    own_code = section.trust_remote_code and getattr(config, "auto_map", None)
    if type(config) not in model_mapping(head.auto) and not own_code:
        raise RecipeError(
            f"model: transformers has no {recipe.task.name} network of a {config.model_type} model. Name a model of "
            "another architecture (`finetune docs architectures` lists language models that were tried)."
        )
    if section.name is not None and not head.encodes:
        # Merging an adapter that trained one of the tied tensors whole leaves files with two that differ. transformers
        # would load two and write one, and a network that is sharded as it loads would have one.
        known = model_mapping(head.auto)
        with suppress(OSError):  # a hub's model of which only the configuration is here
            folder = pretrained_files.weights_folder(section.name, section.revision)
            if type(config) in known and pretrained_files.untied_tensors(folder, config, known[type(config)]):
                config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    text = config.get_text_config()
    _check_sizes(text, "model.config" if section.config is not None else f"{section.name}, config.json")
    length, trained = recipe.data.sequence_length, longest_row(config)
    longest = trained
    if section.rope_scaling is not None:
        longest = stretch_positions(config, section.rope_scaling)
    if longest is not None and longest < length:
        before, more = first_position(config), ""
        less = f" less {before}, because tokens are numbered from {before}" if before else ""
        if section.name is not None and trained is not None and hasattr(text, "rope_parameters"):
            # In halves.
            more = f", or model.rope_scaling.factor to {math.ceil(2 * length / trained) / 2:g} (`finetune docs recipe`)"
        raise RecipeError(
            f"data.sequence_length is {length}, but the model knows {longest} positions (max_position_embeddings{less})"
            f". Set data.sequence_length to at most {longest}{more}."
        )
    if size is not None and size > text.vocab_size:
        raise RecipeError(
            f"The tokenizer numbers tokens up to {size - 1}, but the model's vocabulary holds {text.vocab_size}. Use "
            "the model's own tokenizer, or set vocab_size of model.config (or tokenizer.vocab_size) so that they fit."
        )
    if num_labels is not None:
        config.num_labels = num_labels
        if label_names:
            config.id2label = dict(enumerate(label_names))
            config.label2id = {name: index for index, name in enumerate(label_names)}
    return config


def _check_sizes(text: PretrainedConfig, where: str) -> None:
    """Raises a `RecipeError` for sizes of which no network can be built, or only in hours."""
    counts = [name for name in text.to_dict() if re.search(r"(layer|head|expert|block)s?$", name)]
    for name in (*_SIZES.split(), *counts):
        value, most = getattr(text, name, None), _MOST_PARTS if name in counts or "num_" in name else _MOST_SIZE
        if type(value) is int and not (1 if name in _SIZES.split() else -most) <= value <= most:
            key = text.attribute_map.get(name, name)
            raise RecipeError(f"{where}: {key} is {value}, and networks are built with 1 to {most:,}. Correct it.")
    heads, shared = (getattr(text, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if type(heads) is int and type(shared) is int and heads % shared:
        raise RecipeError(
            f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {shared}, each of which "
            "serves as many as the others. Correct one of them."
        )


def longest_row(config: PretrainedConfig) -> int | None:
    """Returns the tokens of the longest row that a network takes; None where its configuration sets no limit."""
    table = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if table is None or table < 0 else table - first_position(config)


def first_position(config: PretrainedConfig) -> int:
    """Returns the position of a row's first token: 0, or that behind the padding token's number.

    RoBERTa and its relatives count so, in a table of `max_position_embeddings` positions: a published model has 514 of
    them for rows of 512 tokens. No key of a configuration says it, so it is read in the network's code.
    """
    text = config.get_text_config(decoder=True)  # of two that write texts (Musicgen), transformers refuses to choose
    fixed = _padding_before_rows(type(text))  # type: ignore[arg-type]
    if fixed is None:
        return 0
    return (int(fixed) if fixed.isdecimal() else getattr(text, "pad_token_id", None) or 0) + 1


@cache
def _padding_before_rows(kind: type[PretrainedConfig]) -> str | None:
    """Returns the padding token of an architecture's table of positions as its code has it; None if it has none."""
    file = Path(inspect.getfile(kind))
    code = file.with_name(file.name.replace("configuration_", "modeling_"))
    if code == file or not code.is_file():
        return None
    text = code.read_text(encoding="utf-8")
    table = re.search(r"Embedding\(\s*config\.max_position_embeddings,[^()]*padding_idx=self\.padding_idx", text)
    padding = re.search(r"self\.padding_idx = (config\.pad_token_id|\d+)", text)
    return padding.group(1) if table and padding else None


def stretch_positions(config: PretrainedConfig, section: RopeScalingSection) -> int:
    """Writes a scaling into a model's configuration, and returns the number of positions that the model has then.

    Where kinds of layers have frequencies of their own, those that see whole rows are stretched.

    Raises:
        RecipeError: If the model has no rotary positions, or stretched ones already.
    """
    text: Any = config.get_text_config()
    whole: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = "full_attention" in whole
    parameters: dict[str, Any] = whole["full_attention"] if nested else whole
    if not parameters or not getattr(text, "max_position_embeddings", None):
        raise RecipeError(
            f"model.rope_scaling: {config.model_type} has no rotary positions that could be stretched. Remove the "
            "section, and set data.sequence_length to at most what the model knows."
        )
    if parameters.get("rope_type", "default") != "default":
        raise RecipeError(
            f"model.rope_scaling: positions of this {config.model_type} are stretched already "
            f"({parameters['rope_type']}, rope_parameters of config.json). Remove the section, or take its base model."
        )
    if nested and section.type == "dynamic":
        raise RecipeError(
            f"model.rope_scaling: layers of {config.model_type} have frequencies of several kinds, for which `dynamic` "
            "is not offered. Set model.rope_scaling.type to `yarn` or `linear`."
        )
    known = text.max_position_embeddings
    defaults = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if section.type == "llama3" else {}
    given = section.model_dump(exclude={"type"}, exclude_none=True)
    changed = {**parameters, "rope_type": section.type, **defaults, **given}
    if section.type in ("llama3", "yarn"):
        changed["original_max_position_embeddings"] = known
    text.rope_parameters = {**whole, "full_attention": changed} if nested else changed
    longest = int(exact_product(section.factor, known))
    if section.type != "dynamic":
        # From which `dynamic` reads how far rows go beyond what the model was trained on.
        text.max_position_embeddings = longest
    return longest


def _config_from_recipe(values: dict[str, Any], vocab_size: int | None, sequence_length: int) -> PretrainedConfig:
    values = dict(values)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        meant = hint(model_type, list(CONFIG_MAPPING_NAMES)) or "."
        raise RecipeError(f"model.config.model_type: transformers knows no architecture '{model_type}'{meant}")
    what, advice = f"model.config: transformers has no configuration of {model_type} to start from", "Name a model in "
    # A few architectures refuse the sizes of their own configuration.
    with RecipeError.explaining(what, f"{advice}model.name instead.", Exception):
        default = AutoConfig.for_model(model_type)
    known = set(default.to_dict()) | set(default.attribute_map)
    unknown = sorted(key for key in set(values) - known if not _reads(default, key))
    if unknown:
        meant = hint(unknown[0], sorted(known), cutoff=0.6) or "."
        if unknown[0] in ("rope_theta", "rope_scaling") and "rope_parameters" in known:
            # What transformers 4 called them, and many published configurations still do.
            meant = "; write rope_parameters: {rope_type: default, rope_theta: 500000.0}, with your values."
        raise RecipeError(f"model.config: {model_type} has no key {', '.join(map(repr, unknown))}{meant}")
    renamed = dict(default.attribute_map)
    given = set(values) | {renamed.get(key, key) for key in values} | {a for a, n in renamed.items() if n in values}
    if vocab_size is not None and "vocab_size" not in given:
        values["vocab_size"] = vocab_size
    if "max_position_embeddings" in known and "max_position_embeddings" not in given:
        values[renamed.get("max_position_embeddings", "max_position_embeddings")] = sequence_length
    # transformers validates sizes with many error types.
    with RecipeError.explaining(f"model.config: {model_type} refuses these sizes", "", Exception):
        return AutoConfig.for_model(model_type, **values)


def _reads(config: PretrainedConfig, key: str) -> bool:
    """True if an architecture's network reads a key that its configuration does not declare.

    Published configurations have such keys: `head_dim` of Qwen3-MoE.
    """
    network = model_mapping(NEXT_TOKEN.auto).get(type(config), None)
    source = inspect.getsource(inspect.getmodule(network)) if network is not None else ""  # type: ignore[arg-type]
    return re.search(rf'config(\.|, "){re.escape(key)}\b', source) is not None


def read_pretrained_config(section: ModelSection) -> PretrainedConfig:
    """Returns the configuration of `model.name`, as it lies there.

    Raises:
        RecipeError: If there is none.
    """
    if (wrong := recipe_paths.why_not(Path(str(section.name)), "model")) is not None:
        raise RecipeError(f"model.name: {wrong}")
    advice = (
        "Name a directory with a config.json, or a model on the hub (which needs a network, or a copy in the local "
    )
    causes = (OSError, ValueError, KeyError, StrictDataclassError)
    with RecipeError.explaining(f"model.name: no model configuration at '{section.name}'", f"{advice}cache).", *causes):
        return AutoConfig.from_pretrained(
            section.name, revision=section.revision, trust_remote_code=section.trust_remote_code
        )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
