"""Loads or initialises networks, and wraps one so that any function of it can run under any backend."""

import copy
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from finetune import adapters, attention, fp8, frozen, loss, pretrained, prompts, quantization, recompute
from finetune.adapters import Head, transformer
from finetune.errors import RecipeError
from finetune.recipe import ModelSection, Recipe

_AUTO = {
    "causal_lm": AutoModelForCausalLM,
    "sequence_classification": AutoModelForSequenceClassification,
}


class Caller(nn.Module):
    """Runs functions of a network inside `forward`, where every backend has the weights in place.

    Sharded backends gather weights, and autocast and DDP do their part, only around `forward`. Computing the
    loss inside it also means that just a scalar leaves the model: no backend casts or copies logits.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.keeping: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Where activations are kept."""
        # What accelerate and its backends look up on the model that they are given.
        known = transformer(network)
        if known is not None:
            self.config = known.config
            self._no_split_modules = _units(network, known._no_split_modules or ())
        whole = [m for m in network.modules() if type(m).__name__ in getattr(self, "_no_split_modules", ())]
        # Embeddings inside a unit that is sharded as a whole: accelerate 1.15 would shard them twice.
        self._inside_units = {id(part) for m in whole for part in m.modules()}

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(network, *args)`."""
        with self.autocast(), self.keeping():
            return function(self.network, *args)

    # Sharding gives embeddings, last norm and head units of their own if it can find them.
    base_model_prefix = "base_model"

    @property
    def base_model(self) -> nn.Module:
        return getattr(transformer(self.network), "base_model", self.network)

    def get_input_embeddings(self) -> nn.Module | None:
        return self._own_unit("get_input_embeddings")

    def get_output_embeddings(self) -> nn.Module | None:
        return self._own_unit("get_output_embeddings")

    def _own_unit(self, getter: str) -> nn.Module | None:
        known = transformer(self.network)
        if known is None:
            return None
        module: nn.Module | None = getattr(known, getter)()
        # Tied, both ends are one unit; what else holds a parameter of theirs (BERT's second bias) must be in it too.
        ends = [end for end in (known.get_input_embeddings(), known.get_output_embeddings()) if end is not None]
        return None if id(module) in self._inside_units or _shares(self.network, ends) else module

    def tie_weights(self) -> None:
        known = transformer(self.network)
        if known is not None:
            known.tie_weights()


def _units(network: nn.Module, names: Iterable[str]) -> list[str]:
    """Classes of modules that can be sharded each as a whole, of those that an architecture names.

    Some are of networks that are not there (the part of a model that sees), and some hold weights that others hold
    as well (BERT's embeddings, tied to its head).
    """
    by_name: dict[str, list[nn.Module]] = {name: [] for name in names}
    for module in network.modules():
        by_name.get(type(module).__name__, []).append(module)
    return [name for name, found in by_name.items() if found and not any(_shares(network, [unit]) for unit in found)]


def _shares(network: nn.Module, parts: Sequence[nn.Module]) -> bool:
    """Whether a module outside some parts of a network holds a parameter of theirs."""
    inside = {id(module) for part in parts for module in part.modules()}
    theirs = {id(p) for part in parts for p in part.parameters()}
    others = (m for m in network.modules() if id(m) not in inside)
    return any(id(p) in theirs for module in others for p in module.parameters(recurse=False))


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside a `Caller` inside whatever a backend put around it."""
    inner: Any = model
    while not isinstance(inner, Caller):
        inner = inner.module
    return inner.network


def resolve_config(
    recipe: Recipe,
    *,
    tokenizer: Any | None = None,
    vocab_size: int | None = None,
    num_labels: int | None = None,
    label_names: tuple[str, ...] = (),
) -> PretrainedConfig:
    """The network's configuration, checked against tokenizer and sequence length.

    Args:
        tokenizer: Where special token ids and the vocabulary size come from; None while nothing is loaded.
        vocab_size: Stands in for a tokenizer that does not exist yet.

    Raises:
        RecipeError: If there is no such model, or it is too small for the tokenizer or the rows.
    """
    section = recipe.model
    size = len(tokenizer) if tokenizer is not None else vocab_size
    if section.config is not None:
        config = _config_from_recipe(section.config, size, recipe.data.sequence_length)
        if tokenizer is not None:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if name not in section.config:
                    setattr(config, name, getattr(tokenizer, name))
    else:
        config = _config_from_name(section)
    _check_kind(config, section, "causal_lm" if num_labels is None else "sequence_classification")
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and 0 <= longest < recipe.data.sequence_length:
        raise RecipeError(
            f"data.sequence_length is {recipe.data.sequence_length}, but the model knows {longest} positions "
            f"(max_position_embeddings). Set data.sequence_length to at most {longest}."
        )
    if size is not None and size > text.vocab_size:
        raise RecipeError(
            f"The tokenizer has {size} pieces, but the model's vocabulary holds {text.vocab_size}: the last "
            f"{size - text.vocab_size} have no embedding. Use the model's own tokenizer, or set vocab_size of "
            f"model.config (or tokenizer.vocab_size) so that they fit."
        )
    if num_labels is not None:
        config.num_labels = num_labels
        if label_names:
            config.id2label = dict(enumerate(label_names))
            config.label2id = {name: index for index, name in enumerate(label_names)}
        if config.pad_token_id is None and tokenizer is not None:
            # Decoders classify at the last token that is not padding.
            config.pad_token_id = tokenizer.pad_token_id
    return config


def _check_kind(config: PretrainedConfig, section: ModelSection, head: Head) -> None:
    """Raises a `RecipeError` if there is no network of a kind to train for a head."""
    if head == "causal_lm" and getattr(config, "is_encoder_decoder", False):
        raise RecipeError(
            f"model: {config.model_type} is an encoder-decoder model, which writes a text from another one; task "
            "`causal_lm` trains decoders, which go on with a text. Name a decoder-only model, such as llama, qwen3 or "
            "gpt2 (docs/architectures.md lists those that were tried)."
        )
    own_code = section.trust_remote_code and getattr(config, "auto_map", None)
    if type(config) not in _AUTO[head]._model_mapping and not own_code:
        raise RecipeError(
            f"model: transformers has no {head} network of a {config.model_type} model. Name a model of another "
            "architecture (docs/architectures.md lists language models that were tried)."
        )


def _config_from_recipe(values: dict[str, Any], vocab_size: int | None, sequence_length: int) -> PretrainedConfig:
    values = dict(values)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        close = difflib.get_close_matches(model_type, list(CONFIG_MAPPING_NAMES), n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise RecipeError(f"model.config.model_type: transformers knows no architecture '{model_type}'.{hint}")
    try:
        default = AutoConfig.for_model(model_type)
    except Exception as error:  # a few architectures refuse the sizes of their own configuration
        raise RecipeError(
            f"model.config: transformers has no configuration of {model_type} to start from: {_one_line(error)}. "
            "Name a model in model.name instead."
        ) from error
    known = set(default.to_dict()) | set(default.attribute_map)
    unknown = sorted(key for key in set(values) - known if not _reads(default, key))
    if unknown:
        close = difflib.get_close_matches(unknown[0], sorted(known), n=1)
        hint = f", did you mean '{close[0]}'?" if close else ""
        raise RecipeError(f"model.config: {model_type} has no key {', '.join(map(repr, unknown))}{hint}.")
    renamed = dict(default.attribute_map)
    given = set(values) | {renamed.get(key, key) for key in values} | {a for a, n in renamed.items() if n in values}
    if vocab_size is not None and "vocab_size" not in given:
        values["vocab_size"] = vocab_size
    if "max_position_embeddings" in known and "max_position_embeddings" not in given:
        values[renamed.get("max_position_embeddings", "max_position_embeddings")] = sequence_length
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers validates sizes with many error types
        raise RecipeError(f"model.config: {model_type} refuses these sizes: {_one_line(error)}.") from error


def _reads(config: PretrainedConfig, key: str) -> bool:
    """Whether an architecture's network reads a key that its configuration does not declare.

    Published configurations have such keys: `head_dim` of Qwen3-MoE.
    """
    known = _AUTO["causal_lm"]._model_mapping
    network = known.get(type(config), None)
    source = inspect.getsource(inspect.getmodule(network)) if network is not None else ""  # type: ignore[arg-type]
    return re.search(rf'config(\.|, "){re.escape(key)}\b', source) is not None


def _config_from_name(section: ModelSection) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            section.name, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"model.name: no model configuration at '{section.name}': {_one_line(error)}. Name a directory with a "
            "config.json, or a model on the hub (which needs a network, or a copy in the local cache)."
        ) from error


def build(recipe: Recipe, config: PretrainedConfig, head: Head) -> nn.Module:
    """A network in training mode: what is trained in fp32, what is frozen in the dtype that it is stored in, or packed.

    Its weights are pretrained, or random ones drawn from `recipe.seed`.

    Every rank draws the same random weights, whole; what a checkpoint lacks (a new head) is drawn likewise.

    Raises:
        RecipeError: If weights are missing or the architecture cannot do what is asked.
    """
    section = recipe.model
    network, stored = _as_stored(recipe, config, head)
    quantization.quantise(network, recipe)
    if recipe.lora is not None:
        network.requires_grad_(False)
    elif section.freeze is not None:
        frozen.freeze(network, section.freeze)
    frozen.hold(network, stored)
    whole: nn.Module = adapters.attach(network, recipe, head)
    frozen.hold(whole, stored)  # what adapters copy to train it whole
    if head == "causal_lm" and section.loss != "plain":
        loss.fuse(network)
    fp8.convert(network, section.fp8)
    recompute.recompute(network, section.gradient_checkpointing)
    return whole.train()


def _as_stored(recipe: Recipe, config: PretrainedConfig, head: Head) -> tuple[PreTrainedModel, torch.dtype]:
    """A recipe's network as `frozen.hold` takes it, and the dtype that its weights are stored in.

    Where all is trained, weights are read as fp32 right away.
    """
    section, loading = recipe.model, quantization.loading_config(recipe)
    # Singular vectors are taken out of the frozen weights: what is left is not what is stored.
    changed = recipe.lora is not None and recipe.lora.init == "pissa"
    if section.name is None or changed or (recipe.lora is None and section.freeze is None):
        return plain(recipe, config, head, loading=loading), torch.float32
    said = config.dtype if config.dtype in (torch.bfloat16, torch.float16) else torch.float32
    network = plain(recipe, config, head, dtype=said, loading=loading)
    stored = pretrained.stored_dtype(pretrained.weights_folder(section))
    if stored != said:  # the configuration does not say what is in the files
        network = plain(recipe, config, head, dtype=stored, loading=loading)
    if stored != torch.float32:
        _restore_buffers(network)
    return network, stored


def end_texts(network: nn.Module, tokenizer: Any, taught: Sequence[int]) -> None:
    """Has a network that learns conversations stop where its answers do, wherever it is opened.

    Args:
        taught: The tokens that learned answers end in; without any the network stays as it is.
    """
    inner = transformer(network)
    if inner is not None and taught and inner.can_generate():
        told = inner.generation_config
        inner.generation_config = prompts.stopping_at(told, prompts.ends(told, tokenizer, taught))


def _restore_buffers(network: PreTrainedModel) -> None:
    """Gives a network that was built in 16 bit the constants of one that was built in fp32.

    Architectures compute some when they are built (rotary frequencies, Gemma's scale), in the dtype of the weights.
    """
    with init_empty_weights(include_buffers=False):
        exact = type(network)(network.config)
    kept = network.state_dict().keys()
    for name, buffer in exact.named_buffers():
        owner, _, last = name.rpartition(".")
        if name in kept:  # read from the files
            value = getattr(network.get_submodule(owner), last)
            value.data = value.data.float() if value.is_floating_point() else value.data
        else:
            network.get_submodule(owner).register_buffer(last, buffer, persistent=False)


def plain(
    recipe: Recipe,
    config: PretrainedConfig,
    head: Head,
    *,
    dtype: torch.dtype = torch.float32,
    loading: Any | None = None,
) -> PreTrainedModel:
    """The network that a recipe starts from, without adapters.

    Args:
        dtype: Of its weights. In the one that they are stored in they are mapped from their files, not copied.
        loading: How to quantise weights as they are read; None leaves them as they are.

    Raises:
        RecipeError: If weights are missing or the architecture cannot do what is asked.
    """
    section = recipe.model
    torch.manual_seed(recipe.seed)
    if section.name is not None:
        return _pretrained(recipe, config, head, dtype=dtype, quantization_config=loading)[0]
    kernel = attention.choose(section.attention, config, _AUTO[head], told=head == "causal_lm")
    try:
        network: PreTrainedModel = _AUTO[head].from_config(
            config, dtype=dtype, attn_implementation=kernel, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(f"model: no {head} network from '{config.model_type}': {_one_line(error)}") from error
    return network


def check_weights(recipe: Recipe, config: PretrainedConfig, head: Head) -> pretrained.Weights | None:
    """The files of a recipe's pretrained network, after a look at every tensor's name and shape; None if it has none.

    It reads headers only, into a network without storage, so it belongs before any process group: there every rank
    finds the same, however the network is loaded afterwards.

    Raises:
        RecipeError: If a file cannot be read, or a tensor is missing or of another shape.
    """
    if recipe.model.name is None:
        return None
    if getattr(config, "quantization_config", None) is not None:
        # Never sharded as it is loaded: whatever is left to find is found by every rank alike.
        with _named_by_the_recipe(recipe):
            return pretrained.look_at_packed(recipe.model)
    return _pretrained(recipe, copy.deepcopy(config), head, dtype="auto", device_map="meta")[1]


def _pretrained(
    recipe: Recipe, config: PretrainedConfig, head: Head, **options: Any
) -> tuple[PreTrainedModel, pretrained.Weights]:
    section = recipe.model
    kernel = attention.choose(section.attention, config, _AUTO[head], told=head == "causal_lm")
    with _named_by_the_recipe(recipe):
        return pretrained.load(
            _AUTO[head],
            str(section.name),
            config,
            new_head=head == "sequence_classification",
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            attn_implementation=kernel,
            **options,
        )


@contextmanager
def _named_by_the_recipe(recipe: Recipe) -> Iterator[None]:
    """Says of what cannot be loaded which key named it."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"model.name: {error}") from error
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(f"model.name: '{recipe.model.name}' cannot be loaded: {_one_line(error)}.") from error


def skeleton(
    config: PretrainedConfig, head: Head, recipe: Recipe | None = None, *, trust_remote_code: bool = False
) -> nn.Module:
    """The network without storage, on the meta device: to count, or to fill from elsewhere.

    Args:
        recipe: Where the adapters come from; None for the network without any.
        trust_remote_code: Whether the model's own code may run, if there is no recipe to say so.
    """
    trusted = trust_remote_code if recipe is None else recipe.model.trust_remote_code
    with torch.device("meta"):
        network: nn.Module = _AUTO[head].from_config(config, dtype=torch.float32, trust_remote_code=trusted)
        if recipe is None:
            return network
        if recipe.model.freeze is not None:
            frozen.freeze(network, recipe.model.freeze)
        return adapters.attach(network, recipe, head)


def materialise(network: nn.Module, seed: int) -> nn.Module:
    """Gives a network that was built on the meta device its storage and first weights, the same on every rank.

    A network with storage is returned as it is.

    Raises:
        RecipeError: If a module cannot initialise itself.
    """
    if not any(t.is_meta for t in (*network.parameters(), *network.buffers())):
        return network
    torch.manual_seed(seed)
    if isinstance(network, PreTrainedModel):
        fresh: nn.Module = type(network)._from_config(network.config, dtype=torch.float32)
        return fresh.train(network.training)
    network.to_empty(device="cpu")
    for name, module in network.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not own:
            continue
        if not hasattr(module, "reset_parameters"):
            raise RecipeError(
                f"The model was built on the meta device, but its module '{name}' ({type(module).__name__}) has no "
                "reset_parameters() to give it its first weights. Add one, or build the model on the CPU."
            )
        module.reset_parameters()
    return network


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
