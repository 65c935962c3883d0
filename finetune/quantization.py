"""Holds a frozen model's linear weights in 4 bits. The only module that imports bitsandbytes.

Packed weights are stored as fp32 (eight a number): one dtype everywhere, which is what backends need to shard them.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.recipe import Recipe

_STORAGE = torch.float32


def loading_config(recipe: Recipe) -> Any | None:
    """What `from_pretrained` needs to quantise weights as it reads them; None if the recipe does not quantise."""
    section = recipe.model
    if section.quantization is None:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.quantization,
        bnb_4bit_use_double_quant=section.double_quantization,
        bnb_4bit_quant_storage=_STORAGE,
        bnb_4bit_compute_dtype=torch.float32,
    )


def quantise(network: PreTrainedModel, recipe: Recipe) -> None:
    """Quantises the linear modules of a network that has its weights, all but the output head, in place.

    Those of a network that was loaded by `loading_config` are quantised already.
    """
    section = recipe.model
    stored = getattr(network, "is_loaded_in_4bit", False)  # by the recipe, or because it lies on the disk like that
    if section.quantization is None and not stored:
        return
    import bitsandbytes as bnb

    head = network.get_output_embeddings()
    if not stored:
        for name, module in list(network.named_modules()):
            if type(module) is not nn.Linear or module is head:
                continue
            with torch.device("meta"):
                packed = bnb.nn.Linear4bit(
                    module.in_features,
                    module.out_features,
                    bias=module.bias is not None,
                    compute_dtype=torch.float32,
                    compress_statistics=section.double_quantization,
                    quant_type=section.quantization,
                    quant_storage=_STORAGE,
                )
            options: dict[str, Any] = {
                "requires_grad": False,
                "compress_statistics": section.double_quantization,
                "quant_type": section.quantization,
                "quant_storage": _STORAGE,
                "module": packed,
            }
            packed.weight = bnb.nn.Params4bit(module.weight.data, **options).to(module.weight.device)
            packed.bias = module.bias
            parent, _, last = name.rpartition(".")
            setattr(network.get_submodule(parent), last, packed)
        # What peft looks up to choose its adapters.
        network.is_loaded_in_4bit = True
    for module in network.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # A forward pass in evaluation mode would repack the weights for one kernel, in place: gradients are then
            # lost without a word, and what is gathered from shards has the old packing. Source: bitsandbytes 0.50,
            # `Linear4bit.forward`.
            module.support_avx512bf16_for_cpu = False


def compute_in(network: nn.Module, dtype: torch.dtype) -> None:
    """Lets quantised modules multiply in a dtype, as autocast lets the others."""
    module: Any
    for module in network.modules():
        if hasattr(module, "compute_dtype") and hasattr(module, "quant_state"):
            module.compute_dtype = dtype
            module.compute_type_is_set = True


def num_weights(parameter: Any) -> int:
    """How many weights a parameter stands for, whole: more than it has elements, if these are packed."""
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel()) if state is not None else int(getattr(parameter, "ds_numel", parameter.numel()))
