"""The groups of parameters that an optimiser gets: by weight decay, by learning rate, and for Muon matrices apart."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn

from finetune.config.recipe_schema import OptimSection
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.lora_adapters import embeddings_and_head, match_names, transformer
from finetune.utils.errors import RecipeError


def parameter_groups(model: nn.Module, optim: OptimSection) -> list[dict[str, Any]]:
    """Groups trainable parameters: decayed, and not (norms, biases, embeddings, DoRA's lengths); in these by rate.

    Without decay in one: backends that cut an optimiser's state send each group for itself. `lr_factor` of a group is
    what its rate is times `optim.lr`; `matrix`, which groups of Muon have, is true for matrices of layers.

    Decided by the module that owns a parameter, not by its name or shape, both of which backends change.
    A weight that an embedding shares with the head counts as an embedding.

    Raises:
        RecipeError: If a key of rates does not fit the network.
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
    network = model.network if isinstance(model, ForwardWrapper) else model
    factors, matrices = _lr_factors(network, optim), _matrices(network) if optim.name == "Muon" else None
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for parameters, decay in ((decayed, optim.weight_decay), (plain, 0.0)):
        for key, parameter in parameters.items():
            settings = {"weight_decay": decay, "lr_factor": factors[key]}
            if matrices is not None:
                settings["matrix"] = key in matrices
            group = groups.setdefault(tuple(settings.values()), {"params": [], **settings})
            group["params"].append(parameter)
    return list(groups.values())


def _lr_factors(network: nn.Module, optim: OptimSection) -> dict[int, float]:
    """Returns what the rates of parameters are times `optim.lr`, by identity; of those left out it is 1.

    Source: Hayou et al. 2024 (LoRA+) as peft 0.19 has it (`create_loraplus_optimizer`): tensors of one dimension learn
    as `B` does; Bao et al. 2022 (BEiT), `get_num_layer_for_vit`.
    """
    factors: dict[int, float] = defaultdict(lambda: 1.0)
    kind = type(network).__name__
    for name, parameter in network.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # sharded ones have the first
        if optim.lora_plus is not None and ("lora_B" in name or len(shape) == 1):
            factors[id(parameter)] *= optim.lora_plus
    if optim.layer_decay is not None:
        stacks = [*_stacks(network)]
        if len(stacks) != 1:
            raise RecipeError(
                f"optim.layer_decay: it is for networks with one stack of layers (a ModuleList), and this {kind} "
                f"trains {len(stacks)}. Set it to null, and give rates by optim.lr_factors."
            )
        depths, last = _depths(network, stacks[0]), len(stacks[0]) + 1
        for parameter in network.parameters():
            factors[id(parameter)] *= optim.layer_decay ** (last - depths.get(id(parameter), last))
    modules = {n: m for n, m in network.named_modules() if n and any(p.requires_grad for p in m.parameters())}
    for word, factor in optim.lr_factors.items():
        names = match_names("optim.lr_factors", (word,), list(modules), kind="trained module", of=kind)
        for key in {id(p) for name in names for p in modules[name].parameters()}:
            factors[key] *= factor
    return factors


def _depths(network: nn.Module, stack: nn.ModuleList) -> dict[int, int]:
    """Returns the depths of parameters, by identity: 0 for embeddings, from 1 on for layers."""
    head = _head(network)
    inside_head = set(head.modules()) if head is not None else set()
    depths: dict[int, int] = {}
    for name, module in network.named_modules():
        # With the norms and positions beside them: `bert.embeddings.LayerNorm`. GPT-NeoX has a head `embed_out`.
        if isinstance(module, nn.Embedding) or ("embed" in name.lower() and module not in inside_head):
            depths |= {id(p): 0 for p in module.parameters(recurse=False)}
    return depths | {id(p): depth for depth, layer in enumerate(stack, 1) for p in layer.parameters()}


def _matrices(network: nn.Module) -> set[int]:
    """Returns the matrices of layers, by identity: those in stacks, or without any all but embeddings and head."""
    head, stacks = _head(network), list[nn.Module](_stacks(network))
    inside = [module for part in stacks or [network] for module in part.modules() if module is not head]
    matrices = {id(p) for module in inside for p in module.parameters(recurse=False) if len(p.shape) == 2}
    return matrices - {id(p) for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}


def _stacks(network: nn.Module) -> Iterator[nn.ModuleList]:
    """Yields the lists of modules that are trained and lie in no other list."""
    inside: set[nn.Module] = set()
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            inside |= set(module.modules())
            if any(p.requires_grad for p in module.parameters()):
                yield module


def _head(network: nn.Module) -> nn.Module | None:
    known = transformer(network)
    return embeddings_and_head(known)[1] if known is not None else None
