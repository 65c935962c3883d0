"""Wraps a network so that any function of it can run under any backend."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from finetune.models.embedding_noise import adding_noise
from finetune.models.frozen_weights import parameter_owners
from finetune.models.lora_adapters import embeddings_and_head, transformer
from finetune.utils.compat import accelerate_private


class ForwardWrapper(nn.Module):
    """Runs functions of a network inside `forward`, where every backend has the weights in place.

    Sharded backends gather weights, and autocast and DDP do their part, only around `forward`. Computing the
    loss inside it also means that just a scalar leaves the model: no backend casts or copies logits.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.keeping: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Context in which activations are kept in host memory, or on the device."""
        # What accelerate and its backends look up on the model that they are given.
        known = transformer(network)
        if known is not None:
            self.config = known.config
            self._no_split_modules = _units(network, accelerate_private.unsplit_classes(known))
        whole = [m for m in network.modules() if type(m).__name__ in accelerate_private.unsplit_classes(self)]
        # Embeddings inside a unit that is sharded as a whole: accelerate 1.15 would shard them twice.
        self._inside_units = {id(module) for m in whole for module in m.modules()}

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(network, *args)`."""
        with self.autocast(), self.keeping(), adding_noise(self.network, args[0] if args else None):
            return function(self.network, *args)

    # Sharding gives embeddings, last norm and head units of their own if it can find them.
    base_model_prefix = "base_model"

    @property
    def base_model(self) -> nn.Module:
        return getattr(transformer(self.network), "base_model", self.network)

    def get_input_embeddings(self) -> nn.Module | None:
        return self._own_unit(0)

    def get_output_embeddings(self) -> nn.Module | None:
        return self._own_unit(1)

    def _own_unit(self, which: int) -> nn.Module | None:
        known = transformer(self.network)
        if known is None:
            return None
        both = embeddings_and_head(known)
        # Tied, both are one unit; what else holds a parameter of theirs (BERT's second bias) must be in it too.
        shared = _share_parameters(parameter_owners(self.network), [one for one in both if one is not None])
        return None if id(both[which]) in self._inside_units or shared else both[which]

    def tie_weights(self) -> None:
        known = transformer(self.network)
        if known is not None:
            known.tie_weights()


def _units(network: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns those of an architecture's classes whose modules can be sharded each as a whole.

    Some are of networks that are not there (the part of a model that sees), and some hold weights that others hold
    as well (BERT's embeddings, tied to its head).
    """
    by_name: dict[str, list[nn.Module]] = {name: [] for name in names}
    for module in network.modules():
        by_name.get(type(module).__name__, []).append(module)
    owners = parameter_owners(network)
    return [n for n, modules in by_name.items() if modules and not any(_share_parameters(owners, [m]) for m in modules)]


def _share_parameters(owners: Mapping[int, Sequence[nn.Module]], parts: Sequence[nn.Module]) -> bool:
    """True if a module outside some parts of a network holds a parameter of theirs."""
    inside = {id(module) for part in parts for module in part.modules()}
    return any(id(owner) not in inside for part in parts for p in part.parameters() for owner in owners[id(p)])


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the network inside a `ForwardWrapper` inside whatever a backend put around it."""
    inner: Any = model
    while not isinstance(inner, ForwardWrapper):
        inner = inner.module
    return inner.network


@contextmanager
def without_training(model: nn.Module) -> Iterator[None]:
    """Forward passes in here have no dropout and leave no gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
