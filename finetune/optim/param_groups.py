"""Parameter groups: with and without weight decay."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: decayed, and not (norms, biases, embeddings, DoRA's lengths).

    Without decay in one: backends that cut an optimiser's state send each group for itself.

    Decided by the module that owns a parameter, not by its name or shape, both of which backends change.
    A weight that an embedding shares with the head counts as an embedding.
    """
    plain: dict[int, nn.Parameter] = {}
    decayed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        kind = type(module).__name__.lower()
        # DoRA's columns have the lengths of pretrained ones: decay would pull them to 0 instead of there.
        spared = isinstance(module, nn.Embedding) or "norm" in kind or kind.startswith("dora")
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                (plain if spared or name.endswith("bias") else decayed)[id(parameter)] = parameter
    decayed = {key: p for key, p in decayed.items() if key not in plain}
    if not weight_decay:
        plain, decayed = {**decayed, **plain}, {}
    groups = [
        {"params": list(decayed.values()), "weight_decay": weight_decay},
        {"params": list(plain.values()), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
