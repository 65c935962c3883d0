"""First weights of a network that was built on the meta device."""

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
)

from finetune.utils.compat.transformers_private import from_config
from finetune.utils.errors import RecipeError


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
