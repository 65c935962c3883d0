"""Quantized modules that compute nothing: the kernels of bitsandbytes do not take fake tensors."""

import math
from typing import Any

import torch
from torch import nn

from finetune.config.recipe_schema import Recipe
from finetune.models.frozen_weights import multiply
from finetune.models.quantization import BLOCK, Linear8bit
from finetune.planning import model_shapes


class Packed4bit(nn.Linear):
    """Allocates what bitsandbytes' module does on a GPU, where a weight is read back in one step for each product.

    Source: bitsandbytes 0.50, `gemm_4bit` in `backends/cuda/ops.py` for more than 1,536 tokens (fewer may take a kernel
    that reads no whole weight); peft 0.21, `Linear4bit.forward` in `tuners/lora/bnb.py`, which copies the product.
    """

    adapted: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        product = multiply(input, self.weight, self.bias, self._read)
        return product.clone() if self.adapted else product

    def _read(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = weight.new_empty(math.ceil(self.out_features * self.in_features / BLOCK), dtype=torch.float32)
        whole = weight.new_empty((self.out_features, self.in_features), dtype=dtype)
        del scales  # there until the weight is
        return whole


def replace_quantized(network: nn.Module, modules: list[tuple[Any, torch.Size]], recipe: Recipe) -> None:
    """Puts stand-ins in the place of linear modules of a network on the meta device.

    Args:
        modules: With the shapes of their weights before layers were split over ranks.
    """
    layers: list[Any] = [m for m in network.modules() if hasattr(m, "lora_A") and hasattr(m, "get_base_layer")]
    adapted = {id(layer.get_base_layer()) for layer in layers}
    for module, whole in modules:
        shape = module.weight.shape
        scales = model_shapes.pack_linear(module, recipe, shape, part=shape != whole)
        if recipe.model.quantization == "int8":
            weight = module.weight
            del module.weight
            module.__class__ = Linear8bit
            module.packed = weight
            module.register_buffer("scale", torch.empty((shape[0], 1), device="meta"), persistent=False)
            continue
        # GPT-2's own class of linear module has its sides the other way round.
        sides = (module.nf, module.nx) if hasattr(module, "nx") else tuple(shape)
        module.__class__ = Packed4bit
        module.out_features, module.in_features = sides
        module.adapted = id(module) in adapted
        module.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"), persistent=False)
