"""Frozen weights: held in the dtype that they are stored in, computed as if they were fp32.

Casting such a weight up loses nothing, so this changes memory and no result.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune.models.lora_adapters import match_names
from finetune.utils.errors import RecipeError


class StoredLinear(nn.Linear):
    """A linear module whose frozen weight may be of another dtype than its inputs."""

    compute_dtype = torch.float32
    """Type in which peft draws an adapter; it looks it up here."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype == self.weight.dtype or torch.is_autocast_enabled(input.device.type):
            return functional.linear(input, self.weight, self.bias)
        return multiply(input, self.weight, self.bias, torch.Tensor.to)


class StoredEmbedding(nn.Embedding):
    """An embedding whose frozen weight may be 16 bit, but whose outputs, which are added to, are fp32."""

    output_dtype = torch.float32

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).to(self.output_dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        read: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.read, ctx.bias_dtype = read, None if bias is None else bias.dtype
        return functional.linear(input, read(weight, input.dtype), None if bias is None else bias.to(input.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        (weight,), gradient = ctx.saved_tensors, gradients[0]
        inputs = gradient @ ctx.read(weight, gradient.dtype) if ctx.needs_input_grad[0] else None
        # Trained where a head shares its frozen weight with an embedding, but not its bias.
        bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return inputs, None, bias, None


def compute_dtype(inputs: torch.Tensor) -> torch.dtype:
    """Returns the dtype that a linear module computes in: autocast's where that is on, else that of its inputs."""
    kind = inputs.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype


def multiply(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    read: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
) -> torch.Tensor:
    """Computes a linear function of a frozen weight that is read for each product, not kept for the backward pass.

    Args:
        inputs: (..., in).
        weight: The weight as it is held.
        bias: (out,).
        read: Makes of a held weight the (out, in) matrix, in a dtype.
    """
    product: torch.Tensor = _Product.apply(inputs, weight, bias, read)  # type: ignore[no-untyped-call]
    return product


_STORED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: StoredLinear, nn.Embedding: StoredEmbedding}


def freeze_modules(network: nn.Module, wanted: str | tuple[str, ...]) -> None:
    """Freezes modules (see `match_names`) and all in them; a `RecipeError` if that leaves nothing to train."""
    modules = {n: module for n, module in network.named_modules() if n and any(True for _ in module.parameters())}
    for name in match_names("model.freeze", wanted, list(modules), kind="module", of=type(network).__name__):
        modules[name].requires_grad_(False)
    if not any(p.requires_grad for p in network.parameters()):
        raise RecipeError(
            f"model.freeze: {wanted!r} leaves nothing to train. Leave some modules out of it, or add a `lora` section."
        )


def parameter_owners(network: nn.Module) -> dict[int, list[nn.Module]]:
    """Returns the modules that hold each parameter, by the parameter's id."""
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(module)
    return owners


def cast_frozen(network: nn.Module, dtype: torch.dtype) -> None:
    """Puts frozen linear modules and embeddings in the dtype that they are stored in, all else in fp32, in place.

    Weights of other modules stay fp32: norms and biases are small, and some classes compute in ways of their own.
    """
    if dtype == torch.float32:
        return
    owners = parameter_owners(network)
    for parameter in network.parameters():
        here = owners[id(parameter)]
        if not parameter.requires_grad and all(type(m) in (*_STORED, *_STORED.values()) for m in here):
            parameter.data = parameter.data.to(dtype)
            for module in here:
                module.__class__ = _STORED.get(type(module), type(module))
        elif parameter.is_floating_point() and not hasattr(parameter, "packed_weights"):
            parameter.data = parameter.data.float()


def set_output_dtype(network: nn.Module, dtype: torch.dtype) -> None:
    """Sets the dtype that embeddings put out, where all weights are of it."""
    for module in network.modules():
        if isinstance(module, StoredEmbedding):
            module.output_dtype = dtype
