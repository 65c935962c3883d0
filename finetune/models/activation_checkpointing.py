"""Activation checkpointing and offloading, and compilation of layers."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from finetune.models import attention
from finetune.utils.compat.transformers_private import enable_checkpointing
from finetune.utils.errors import RecipeError


def checkpoint_activations(network: PreTrainedModel, how: bool | Literal["selective"]) -> None:
    """Has layers recompute activations in the backward pass; a `RecipeError` if the architecture does not offer it."""
    if not how:
        return
    if not network.supports_gradient_checkpointing:
        raise RecipeError(f"model.gradient_checkpointing: {type(network).__name__} does not offer it.")
    # Recomputing re-entrantly needs inputs with gradients, which frozen embeddings do not give.
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    enable_checkpointing(network, options)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


# Matrix products, and attention by all of its kernels: what takes longest to recompute.
_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_SAVED_OPERATIONS = {
    *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")),
    *(f"aten::_scaled_dot_product_{name}" for name in _ATTENTION),
    "torch_attn::_varlen_attn",
}


def offload_activations(device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context in which activations of a device are kept in host memory."""
    return nullcontext() if device.type == "cpu" else torch.autograd.graph.save_on_cpu(pin_memory=True)


def compile_layers(network: nn.Module, layers: set[str]) -> int:
    """Compiles each layer of the named classes by itself, and returns how many there are.

    One graph serves all, so that compiling takes as long as for one. Hooks around a layer, by which backends gather its
    weights, stay as they are.
    """
    attention.keep_eager()
    # A backend may have made subclasses of them.
    modules: list[Any] = [
        module for module in network.modules() if any(c.__name__ in layers for c in type(module).__mro__)
    ]
    for layer in modules:
        layer.forward = torch.compile(layer.forward)
    return len(modules)
