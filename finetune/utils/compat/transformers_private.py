"""Private names of transformers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, core_model_loading, masking_utils
from transformers.integrations import deepspeed

from finetune.utils.compat.library_versions import require

require("transformers", AutoModelForCausalLM, "_model_mapping")
require("transformers", PretrainedConfig, "_attn_implementation")
require(
    "transformers",
    PreTrainedModel,
    *("_from_config", "_no_split_modules", "_supports_attention_backend", "_supports_sdpa", "_tied_weights_keys"),
)
require("transformers", core_model_loading, "_weight_conversions")
require("transformers", deepspeed, "_hf_deepspeed_config_weak_ref")
require("transformers", masking_utils, "find_packed_sequence_indices")


def model_mapping(auto_class: Any) -> Any:
    """Returns the networks that an `AutoModelFor...` knows, by class of configuration."""
    return auto_class._model_mapping


def attention_implementation(config: Any) -> Any:
    """Returns the attention implementation of a network, by its configuration; None if it has none."""
    return config._attn_implementation


def tied_names(network_class: Any) -> dict[str, str]:
    """Returns the tensors that a class of networks ties if `tie_word_embeddings` is set: each name, and its source."""
    return dict(network_class._tied_weights_keys or {})


def untie(network: Any, names: Sequence[str]) -> None:
    """Has a network keep tensors apart from those that its class ties them to, now and when ties are made anew."""
    network._tied_weights_keys = {k: source for k, source in network._tied_weights_keys.items() if k not in names}
    for name in names:
        source = network.all_tied_weights_keys.pop(name, None)
        tensor = network.get_parameter(name)
        if source is not None and tensor is network.get_parameter(source):
            owner, _, last = name.rpartition(".")
            copied = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
            setattr(network.get_submodule(owner), last, copied)


def supports_sdpa(architecture: Any) -> bool:
    """Tells if a class of networks, or None, supports torch's fused attention."""
    return bool(getattr(architecture, "_supports_sdpa", False))


def supports_attention_backend(architecture: Any) -> bool:
    """Tells if a class of networks, or None, takes its attention from `AttentionInterface`."""
    return bool(getattr(architecture, "_supports_attention_backend", False))


def from_config(architecture: Any, config: PretrainedConfig, **options: Any) -> nn.Module:
    """Returns a network of a class with initial weights."""
    network: nn.Module = architecture._from_config(config, **options)
    return network


def forget_weight_conversions(network: nn.Module) -> None:
    """Makes weights be written as they are, not converted back to the form that they were read in."""
    network.__dict__.pop("_weight_conversions", None)


def enable_checkpointing(network: PreTrainedModel, options: dict[str, Any]) -> None:
    """Makes the layers of a network recompute their activations; transformers renamed the method in 5.23."""
    newer = getattr(network, "activation_checkpointing_enable", None)
    (network.gradient_checkpointing_enable if newer is None else newer)(options)


def hidden_deepspeed() -> AbstractContextManager[Any]:
    """Hides DeepSpeed from transformers, which otherwise shards models while it builds them.

    Source: transformers, `integrations/deepspeed.py`: the config is a module global.
    """
    return patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None)


def assume_one_document_a_row() -> None:
    """Tells transformers that no row holds several documents, which it would look up in the positions.

    For tensors without values it assumes that rows do, and makes a mask. For a process that does nothing else.
    Source: transformers 5.23, `find_packed_sequence_indices` in `masking_utils.py`.
    """
    masks: Any = masking_utils
    masks.find_packed_sequence_indices = lambda position_ids: None
