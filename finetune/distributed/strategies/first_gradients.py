"""Proof, in the first micro-batches, that each trained tensor gets a gradient where a missing one does harm."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from finetune.utils.errors import BackendError

DECAY = "weight decay would shrink them here"
"""Why an optimiser that takes missing gradients for zeros must have all of them."""


def decays(optimizer: object) -> bool:
    """Returns whether the optimiser shrinks weights whose gradients are zeros."""
    return any(group.get("weight_decay") for group in getattr(optimizer, "param_groups", []))


@contextmanager
def expect_all(leaves: Mapping[str, torch.Tensor | None], why: str) -> Iterator[None]:
    """Proves that each trained tensor gets a gradient in the forward and backward pass inside.

    Args:
        leaves: What autograd gives the gradient of each trained tensor to, by name; None for what no pass can miss.
        why: Why a missing one does harm, for the message.

    Raises:
        BackendError: With the parts that got none.
    """
    used = {name for name, leaf in leaves.items() if leaf is None}
    hooks = [
        leaf.register_hook(lambda _, name=name: used.add(name))  # type: ignore[no-untyped-call]
        for name, leaf in leaves.items()
        if leaf is not None
    ]
    yield
    for hook in hooks:
        hook.remove()
    refuse_unused(leaves, used, why)


def refuse_unused(trained: Iterable[str], used: Collection[str], why: str) -> None:
    """Refuses a model that has trained tensors beside those that are used, by their names."""
    if found := unused(trained, used):
        shown = ", ".join([*found[:4], *(["…"] if len(found) > 4 else [])])
        raise BackendError(
            f"These parts of the model take no part in the loss, and {why}: {shown}. Freeze what the task never uses "
            "(model.freeze, by these names), give no adapters to it (lora.targets), or, where each batch uses other "
            "parts, take accelerate_configs/fsdp.yaml with fsdp_sync_each_batch: false and sums in fp32."
        )


def unused(trained: Iterable[str], used: Collection[str]) -> list[str]:
    """Returns the names of modules none of whose trained tensors is used, and of single tensors of others."""
    found: dict[str, None] = {}
    for name in trained:
        if name not in used:
            words = name.split(".")
            above = (".".join(words[:count]) for count in range(1, len(words)))
            found[next((top for top in above if not any(n.startswith(f"{top}.") for n in used)), name)] = None
    return list(found)


def trained_leaves(model: object) -> dict[str, torch.Tensor | None]:
    """Returns trained parameters of the network inside a wrapper that holds them whole, or gathers them in place."""
    network: torch.nn.Module = model.module.network  # type: ignore[attr-defined]
    return {name: p for name, p in network.named_parameters() if p.requires_grad}
