"""Private names of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    """The networks that an `AutoModelFor...` knows, by class of configuration."""
    return auto_class._model_mapping


def tied_names(network_class: Any) -> dict[str, str]:
    """Tensors that a class of networks makes one where `tie_word_embeddings` is set: the one, and which it is."""
    return dict(network_class._tied_weights_keys or {})


def attention_implementation(config: PretrainedConfig) -> str | None:
    """What a network computes its attention with."""
    return config._attn_implementation  # type: ignore[no-any-return]


def supports_sdpa(architecture: Any) -> bool:
    """Whether a network's class, or None, says that torch's fused attention computes what it does."""
    return bool(getattr(architecture, "_supports_sdpa", False))


def supports_attention_backend(architecture: Any) -> bool:
    """Whether a network's class, or None, says that it asks `AttentionInterface` for its attention."""
    return bool(getattr(architecture, "_supports_attention_backend", False))


def from_config(architecture: Any, config: PretrainedConfig, **options: Any) -> nn.Module:
    """A network of a class with first weights."""
    network: nn.Module = architecture._from_config(config, **options)
    return network


def forget_weight_conversions(network: nn.Module) -> None:
    """Has weights written as they are, not turned back into what they were read from."""
    network.__dict__.pop("_weight_conversions", None)


def enable_checkpointing(network: PreTrainedModel, options: dict[str, Any]) -> None:
    """Has a network's layers recompute their activations; transformers renamed the method in 5.23."""
    newer = getattr(network, "activation_checkpointing_enable", None)
    (network.gradient_checkpointing_enable if newer is None else newer)(options)


@contextmanager
def hidden_deepspeed() -> Iterator[None]:
    """Hides DeepSpeed from transformers, which otherwise shards models while it builds them.

    Source: transformers, `integrations/deepspeed.py`: the config is a module global.
    """
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference


def assume_one_document_a_row() -> None:
    """Says what transformers looks up in the values of positions: that no row holds several documents.

    Of tensors without values it assumes that they do, and makes a mask. For a process that does nothing else.
    Source: transformers 5.23, `find_packed_sequence_indices` in `masking_utils.py`.
    """
    masks: Any = masking_utils
    masks.find_packed_sequence_indices = lambda position_ids: None
