"""Holds a frozen model's linear weights in 4 or 8 bits.

Quantized weights are stored as fp32 (eight, or four, a number): one dtype everywhere, which is what backends need to
shard them.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from finetune.config.recipe_schema import ModelSection
from finetune.models.frozen_weights import compute_dtype, multiply
from finetune.models.heads import Head
from finetune.models.pretrained_files import added_modules
from finetune.utils.compat.library_versions import require_installed
from finetune.utils.errors import RecipeError

_STORAGE = torch.float32

# Weights of 4 bits that share a scale. Source: Dettmers et al. 2023, section 3.
BLOCK = 64


class Linear8bit(nn.Linear):
    """A linear module whose frozen weight is 8 bits an element, with one scale a row.

    Inputs stay as they are. (bitsandbytes' own module rounds them to 8 bits too, and its weights cannot be sharded.)
    """

    scale: torch.Tensor
    compute_dtype = torch.float32
    """Type in which peft draws an adapter; it looks it up here."""

    def __init__(self, module: nn.Linear) -> None:
        import bitsandbytes as bnb

        nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        # The kernel knows fp16 only; a scale of its precision loses less than the 8 bits do.
        rows, scale, _ = bnb.functional.int8_vectorwise_quant(module.weight.data.half())
        self.packed = nn.Parameter(rows.contiguous().view(_STORAGE), requires_grad=False)
        self.register_buffer("scale", scale.float()[:, None] / 127, persistent=False)
        self.bias = module.bias

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight, read back. Not a parameter: nothing may be written to it."""
        return _eight_bits(self.packed, torch.float32) * self.scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = input.to(compute_dtype(input))
        # Whole numbers up to 127 are exact in every dtype; scaling what comes out spares a matrix of fp32.
        product = multiply(input, self.packed, None, _eight_bits) * self.scale.flatten()
        return (product if self.bias is None else product + self.bias).to(input.dtype)


def _eight_bits(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return packed.view(torch.int8).to(dtype)


def kept_modules(network: PreTrainedModel, section: ModelSection, head: Head) -> list[str]:
    """Returns the names of the modules that are not packed: the output head, and what a task adds to a body or leaves.

    transformers by itself keeps what has the last parameter; of a head with a bias that is no module.
    """
    added = added_modules(network, section, head)
    return [*get_keys_to_not_convert(network), *added, *head.unused_modules(network)]


def packable_modules(network: nn.Module, section: ModelSection, kept: list[str]) -> list[tuple[str, Any]]:
    """Returns the linear modules but `kept` that `quantize` packs, or transformers while it loads them, by name."""
    # Of 8 bits four go to a number; a module whose rows do not fit stays as it is.
    of_eight = section.quantization == "int8"
    of_gpt2 = "Conv1D" if section.name is not None and not of_eight else None
    linear = [(n, m) for n, m in network.named_modules() if type(m) is nn.Linear or type(m).__name__ == of_gpt2]
    return [(n, m) for n, m in linear if should_convert_module(n, kept) and not (of_eight and m.in_features % 4)]


def loading_config(section: ModelSection, kept: list[str]) -> Any | None:
    """Returns the config by which `from_pretrained` quantises weights as it reads them; None if it is not to.

    Without names of modules that are `kept`, transformers keeps some by itself.
    """
    if section.quantization is not None:
        require_installed("bitsandbytes", f"model.quantization {section.quantization}")
    if section.quantization not in ("nf4", "fp4"):
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.quantization,
        bnb_4bit_use_double_quant=section.double_quantization,
        bnb_4bit_quant_storage=_STORAGE,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=kept or None,
    )


def quantize(network: PreTrainedModel, section: ModelSection, head: Head) -> None:
    """Quantises the linear modules of a network that has its weights, all but `kept_modules`, in place.

    Those of a network that was loaded by `loading_config` are quantised already.

    Raises:
        RecipeError: If there are none.
    """
    stored = getattr(network, "is_loaded_in_4bit", False)  # by the recipe, or because it lies on the disk like that
    if section.quantization is None and not stored:
        return
    import bitsandbytes as bnb

    if not stored:
        for name, linear in packable_modules(network, section, kept_modules(network, section, head)):
            network.set_submodule(name, _packed(linear, section))
        if section.quantization != "int8":
            # What peft looks up to choose its adapters.
            network.is_loaded_in_4bit = True
    packed: list[Any] = [m for m in network.modules() if isinstance(m, (bnb.nn.Linear4bit, Linear8bit))]
    if not packed:
        raise RecipeError(
            f"model.quantization: {type(network).__name__} has no linear modules that can be packed. Leave it out."
        )
    for module in packed:
        if isinstance(module, bnb.nn.Linear4bit):
            # A forward pass in evaluation mode would repack the weights for one kernel, in place: gradients are then
            # lost without a word, and what is gathered from shards has the old packing. Source: bitsandbytes 0.50,
            # `Linear4bit.forward`.
            module.support_avx512bf16_for_cpu = False
            module.register_forward_pre_hook(as_autocast)
            module.weight.packed_weights = module.weight.quant_state.shape.numel()
        else:
            module.packed.packed_weights = module.in_features * module.out_features
    compute_in(network, torch.float32)
    for parameter in network.parameters():
        if not hasattr(parameter, "packed_weights"):
            # Read from a mapped file: one tensor that stays would keep all of the file in memory.
            parameter.data = parameter.data.clone()


def as_autocast(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts inputs as autocast casts those of other linear modules: bitsandbytes' put out the dtype that they get."""
    first, *rest = inputs
    return (first.to(compute_dtype(first)), *rest)


def _packed(module: nn.Linear, section: ModelSection) -> nn.Module:
    import bitsandbytes as bnb

    if section.quantization == "int8":
        return Linear8bit(module)
    how: dict[str, Any] = {
        "compress_statistics": section.double_quantization,
        "quant_type": section.quantization,
        "quant_storage": _STORAGE,
    }
    packed: nn.Module = bnb.nn.Linear4bit(
        module.in_features, module.out_features, compute_dtype=torch.float32, device="meta", **how
    )
    weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, module=packed, **how)
    packed.weight = weight.to(module.weight.device)
    packed.bias = module.bias
    return packed


def compute_in(network: nn.Module, dtype: torch.dtype) -> None:
    """Sets the dtype that modules of 4 bits multiply in, as autocast does for the others."""
    module: Any
    for module in network.modules():
        if hasattr(module, "compute_dtype") and hasattr(module, "quant_state"):
            module.compute_dtype = dtype
            module.compute_type_is_set = True
            # What weights are read back in: that of the file that they were quantised from may say less than `dtype`.
            for state in (module.quant_state, getattr(module.weight, "quant_state", None)):
                if state is not None:
                    state.dtype = dtype


def num_weights(parameter: Any) -> int:
    """Returns the number of weights that a parameter stands for, whole: packed, these are more than its elements."""
    packed = getattr(parameter, "packed_weights", None)
    return int(packed if packed is not None else getattr(parameter, "ds_numel", parameter.numel()))
