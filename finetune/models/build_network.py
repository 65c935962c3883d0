"""Builds networks: pretrained or with random weights, with adapters, quantized, or without storage."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.config.recipe_schema import ModelSection, Recipe
from finetune.models import (
    activation_checkpointing,
    attention,
    chunked_loss,
    float8,
    frozen_weights,
    lora_adapters,
    pretrained_files,
    prompts,
    quantization,
)
from finetune.models.heads import Head
from finetune.models.lora_adapters import transformer
from finetune.models.model_config import one_line
from finetune.utils.compat.transformers_private import from_config
from finetune.utils.errors import FinetuneError, RecipeError


def build_model(recipe: Recipe, config: PretrainedConfig, head: Head, *, trained: bool = True) -> nn.Module:
    """Returns a network in training mode: trained weights in fp32, frozen ones as they are stored, or packed.

    They are pretrained, or drawn from `recipe.seed`: every rank draws the same, whole. A new head is drawn likewise.

    Args:
        trained: False for a network that stays as it is: all of it is frozen.

    Raises:
        RecipeError: If weights are missing or the architecture cannot do what is asked.
    """
    section = recipe.model
    stored = base_dtype(recipe) if trained else _stored_dtype(recipe.model)
    network = build_base_model(recipe, config, head, dtype=stored, loading=loading_config(recipe, config, head))
    if stored != torch.float32:
        _restore_buffers(network)
    if section.rope_scaling is not None and section.rope_scaling.type == "dynamic":
        fix_dynamic_rope(network, recipe.data.sequence_length)
    quantization.quantize(network, section, head)
    if recipe.lora is not None or not trained:
        network.requires_grad_(False)
    elif section.freeze is not None:
        frozen_weights.freeze_modules(network, section.freeze)
    _freeze_unused(network, head)
    frozen_weights.cast_frozen(network, stored)
    whole: nn.Module = lora_adapters.attach(network, recipe, head)
    frozen_weights.cast_frozen(whole, stored)  # what adapters copy to train it whole
    if head.next_token and recipe.loss_by_head:
        chunked_loss.fuse_loss(network)
    float8.convert(network, section.fp8)
    activation_checkpointing.checkpoint_activations(network, section.gradient_checkpointing)
    return whole.train()


def _freeze_unused(network: nn.Module, head: Head) -> None:
    """Freezes modules that nothing is learned of: backends refuse those that are trained and get no gradient."""
    for name in head.unused_modules(network):
        network.get_submodule(name).requires_grad_(False)


def loading_config(recipe: Recipe, config: PretrainedConfig, head: Head) -> Any | None:
    """Returns the config by which pretrained weights are quantised as they are read, if they are to be.

    That of weights which are stored quantised gets the names of the modules that they lack.
    """
    section, stored = recipe.model, getattr(config, "quantization_config", None)
    if not head.may_be_new or section.name is None or (section.quantization is None and stored is None):
        return quantization.loading_config(section, [])
    with torch.device("meta"):
        bare = head.auto.from_config(copy.deepcopy(config), trust_remote_code=section.trust_remote_code)
    kept = quantization.kept_modules(bare, section, head)
    if stored is not None and type(bare).__name__ not in (config.architectures or ()):
        stored["llm_int8_skip_modules"] = [*(stored.get("llm_int8_skip_modules") or ()), *kept]
    return quantization.loading_config(section, kept)


def fix_dynamic_rope(network: nn.Module, length: int) -> None:
    """Fixes the frequencies of `dynamic` RoPE scaling to those of rows of a length, in place, whatever a batch holds.

    By itself transformers takes those of the longest row so far, so that training would depend on which rows share a
    micro-batch, and on those before.

    Source: transformers 5.23, `dynamic_rope_update` in `modeling_rope_utils.py`.
    """
    module: Any
    for module in network.modules():
        if getattr(module, "rope_type", None) == "dynamic" and length > module.original_max_seq_len:
            fixed, module.attention_scaling = ROPE_INIT_FUNCTIONS["dynamic"](
                module.config, module.inv_freq.device, seq_len=length
            )
            module.inv_freq.copy_(fixed)
            module.max_seq_len_cached, module.original_max_seq_len = length, 0


def base_dtype(recipe: Recipe) -> torch.dtype:
    """Returns the dtype that a recipe's base is read in: that of its files, or fp32 where all of it will change."""
    section, lora = recipe.model, recipe.lora
    # PiSSA takes singular vectors out of the frozen weights: what is left is not what is stored.
    changed = section.freeze is None if lora is None else lora.init == "pissa"
    return torch.float32 if section.name is None or changed else _stored_dtype(section)


def _stored_dtype(section: ModelSection) -> torch.dtype:
    # Read off the files: the configuration may name another.
    return pretrained_files.stored_dtype(pretrained_files.weights_folder(str(section.name), section.revision))


def set_stop_tokens(network: nn.Module, tokenizer: Any, taught: Sequence[int]) -> None:
    """Has a network whose learned answers end in `taught` tokens, if in any, stop there wherever it is opened."""
    inner = transformer(network)
    if inner is not None and taught and inner.can_generate():
        generation = inner.generation_config
        inner.generation_config = prompts.stopping_at(generation, prompts.stop_tokens(generation, tokenizer, taught))


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


def build_base_model(
    recipe: Recipe,
    config: PretrainedConfig,
    head: Head,
    *,
    dtype: torch.dtype = torch.float32,
    loading: Any | None = None,
) -> PreTrainedModel:
    """Returns the network that a recipe starts from, without adapters.

    Args:
        dtype: Type of its weights. In the one that they are stored in they are mapped from their files, not copied.
        loading: A quantisation config for weights as they are read; None leaves them as they are.

    Raises:
        RecipeError: If weights are missing or the architecture cannot do what is asked.
    """
    section = recipe.model
    torch.manual_seed(recipe.seed)
    if section.name is not None:
        return _pretrained(recipe, config, head, dtype=dtype, quantization_config=loading)[0]
    kernel = attention.choose_attention(section.attention, config, head.auto, told=head.next_token)
    with _naming("model", f"no {recipe.task.name} network from '{config.model_type}'"):
        network: PreTrainedModel = head.auto.from_config(
            config, dtype=dtype, attn_implementation=kernel, trust_remote_code=section.trust_remote_code
        )
    return network


def check_pretrained(recipe: Recipe, config: PretrainedConfig, head: Head) -> pretrained_files.Weights | None:
    """Checks every tensor's name and shape in the files of a recipe's pretrained network; None if it has none.

    Reads headers only, into a network without storage. Belongs before any process group: there every rank finds the
    same, however the network is loaded afterwards.

    Raises:
        RecipeError: If a file cannot be read, or a tensor is missing or of another shape.
    """
    if recipe.model.name is None:
        return None
    if getattr(config, "quantization_config", None) is not None:
        # Never sharded as it is loaded: whatever is left to find is found by every rank alike.
        with _naming("model.name", f"'{recipe.model.name}' cannot be loaded"):
            folder = pretrained_files.weights_folder(recipe.model.name, recipe.model.revision)
            return pretrained_files.check_packed_files(folder)
    return _pretrained(recipe, copy.deepcopy(config), head, dtype="auto", device_map="meta")[1]


def _pretrained(
    recipe: Recipe, config: PretrainedConfig, head: Head, **options: Any
) -> tuple[PreTrainedModel, pretrained_files.Weights]:
    section = recipe.model
    kernel = attention.choose_attention(section.attention, config, head.auto, told=head.next_token)
    with _naming("model.name", f"'{section.name}' cannot be loaded"):
        return pretrained_files.load_pretrained(
            head.auto,
            str(section.name),
            config,
            new_head=head.may_be_new,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            attn_implementation=kernel,
            **options,
        )


@contextmanager
def _naming(key: str, problem: str) -> Iterator[None]:
    """Names a key of the recipe in errors of loading."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{key}: {error}") from error
    except (FinetuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # architectures refuse sizes and names in many ways
        if "can't allocate memory" in str(error):
            raise
        reason = f"it does not know {error}" if isinstance(error, KeyError) else one_line(error)
        raise RecipeError(f"{key}: {problem}: {reason}.") from error


def build_meta_model(config: PretrainedConfig, head: Head, recipe: Recipe) -> nn.Module:
    """Returns the network on the meta device, with the recipe's adapters: to count, or to fill."""
    with torch.device("meta"):
        with _naming("model", f"no {recipe.task.name} network from this '{config.model_type}'"):
            network: Any = head.auto.from_config(
                config, dtype=torch.float32, trust_remote_code=recipe.model.trust_remote_code
            )
        if head.encodes and recipe.model.name is not None:
            with suppress(OSError):  # a hub's model of which only the configuration is here
                folder = pretrained_files.weights_folder(recipe.model.name, recipe.model.revision)
                pretrained_files.keep_apart(network, folder)
        if recipe.model.freeze is not None:
            frozen_weights.freeze_modules(network, recipe.model.freeze)
        _freeze_unused(network, head)
        return lora_adapters.attach(network, recipe, head)


def init_weights(network: nn.Module, seed: int) -> nn.Module:
    """Gives a network that was built on the meta device its storage and first weights, the same on every rank.

    A network with storage is returned as it is.

    Raises:
        RecipeError: If a module cannot initialise itself.
    """
    if not any(t.is_meta for t in (*network.parameters(), *network.buffers())):
        return network
    torch.manual_seed(seed)
    if isinstance(network, PreTrainedModel):
        fresh = from_config(type(network), network.config, dtype=torch.float32)
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


# Neither gloo nor NCCL sends them, and safetensors holds no complex numbers of 128 bits.
_NOT_SENT = (torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex128)


def settle_parameters(network: nn.Module) -> nn.Module:
    """Makes a network's parameters such that every backend can hold and step them, in place.

    What is not contiguous becomes so, in memory of its own. What has no elements, of which there is nothing to train,
    becomes a buffer of the same name.

    Raises:
        RecipeError: If a parameter is trained in another dtype than fp32, or no rank can send it to another.
    """
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.dtype in _NOT_SENT or (tensor.requires_grad and tensor.dtype != torch.float32):
            raise RecipeError(
                f"The network's '{name}' is {'trained ' if tensor.requires_grad else ''}in {tensor.dtype}. Trained "
                "parameters have to be in float32 (`precision` of the recipe says what products are computed in), and "
                "all others in a dtype that ranks can send each other (not uint16, uint32, uint64 or complex128). Cast "
                "it in the task's build_model, as network.float() does, keep real and imaginary parts of trained "
                "complex numbers apart, or set its requires_grad to False."
            )
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # What was sharded as it was loaded only looks empty.
            if not parameter.numel() and not hasattr(parameter, "ds_id"):
                delattr(module, name)
                module.register_buffer(name, parameter.detach())
            elif not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
    return network
