"""Matrix products of linear modules in fp8, by torchao and through Accelerate.

Each token's inputs, and its gradient, have a scale of their own, and so has each row of a weight (for the product with
gradients, all of it): powers of two. So what a token gets does not depend on which others are computed beside it:
documents of a row stay apart, and micro-batches and ranks change nothing. One scale for all of a tensor is faster, and
breaks both. A weight's gradient, a sum over tokens, is a product in bf16.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.config.recipe_schema import Recipe
from finetune.models.quantization import as_autocast
from finetune.utils.compat.library_versions import require_installed
from finetune.utils.errors import RecipeError

# The first GPUs with such products. Source: NVIDIA, CUDA C++ Programming Guide, compute capabilities.
_CAPABILITY = (8, 9)


def check_fp8(recipe: Recipe) -> None:
    """Where fp8 is asked for, raises a `LibraryVersionError` without torchao, a `RecipeError` without a GPU for it."""
    if not recipe.model.fp8:
        return
    require_installed("torchao", "model.fp8", extra="fp8")
    if recipe.model.fp8 == "emulated":
        return
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < _CAPABILITY:
        here = "this machine has no GPU" if capability is None else "this GPU's is {}.{}".format(*capability)
        raise RecipeError(
            "model.fp8 is true, which needs a GPU of compute capability {}.{} or above; {}. Set it to false, or to "
            "`emulated`, which computes the same on any device, slower than without fp8.".format(*_CAPABILITY, here)
        )


def convert(network: PreTrainedModel, how: bool | Literal["emulated"]) -> None:
    """Has linear modules compute in fp8, in place; their weights stay the parameters that they are.

    Not the first and the last, where rounding hurts most and the head computes the loss itself; not frozen ones; and
    not those with sides that 16 does not divide, which no kernel takes.
    """
    if not how:
        return
    from accelerate.utils.ao import convert_model_to_fp8_ao, filter_linear_layers, find_first_last_linear_layers
    from torchao.float8 import Float8LinearConfig

    ends, head = find_first_last_linear_layers(network), network.get_output_embeddings()

    def wanted(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module is head or not module.weight.requires_grad:
            return False
        return bool(filter_linear_layers(module, name, list(ends)))

    config = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=how == "emulated")
    convert_model_to_fp8_ao(network, config, wanted)
    for module in _converted(network):
        # torchao's module heeds the autocast of GPUs only.
        module.register_forward_pre_hook(as_autocast)


def describe_products(network: nn.Module, how: bool | Literal["emulated"]) -> dict[str, str]:
    """Describes for `run.json` what linear modules multiply in; nothing where fp8 is not asked for.

    Raises:
        RecipeError: If fp8 is asked for and no module computes in it.
    """
    if not how:
        return {}
    if not (count := len(_converted(network))):
        raise RecipeError(
            f"model.fp8: {type(network).__name__} has no linear modules that can compute in fp8: trained `nn.Linear`s, "
            "other than the first and the last, with sides that 16 divides. A custom task has to convert its network "
            "itself (finetune.models.float8.convert). Set model.fp8 to false."
        )
    linear = sum(isinstance(module, nn.Linear) for module in network.modules())
    return {"products": f"{'emulated ' if how == 'emulated' else ''}fp8 in {count} of {linear} linear modules"}


def _converted(network: nn.Module) -> list[nn.Module]:
    # By name: who asks may not have torchao.
    return [module for module in network.modules() if type(module).__name__ == "Float8Linear"]
