"""Splits the layers of a network over the ranks of a tensor-parallel group, by its architecture's own plan.

transformers' configurations say of each module whether its outputs ("colwise") or its inputs ("rowwise") are split.
Queries, keys, values and the first half of an MLP are split by outputs, which nobody needs whole; what follows takes
them as its inputs, and its outputs are summed over the ranks: two sums a layer and pass. Embedding and output head stay
whole on every rank; where the head computes the loss, each rank does so for a part of the tokens.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard as plan_name

from finetune.distributed.mesh import Group
from finetune.distributed.split_parameters import Split, Splits
from finetune.distributed.strategies import tensor
from finetune.distributed.strategies.tensor import SharedInputs
from finetune.models import chunked_loss, quantization
from finetune.models.frozen_weights import StoredLinear
from finetune.models.lora_adapters import embeddings_and_head, transformer
from finetune.utils.errors import BackendError

_COLUMNS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Styles that split outputs; True if these are gathered again."""
_ROWS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
"""Styles that split inputs; True if these come whole."""
_EXPERTS = {"packed_colwise": (1, 2), "rowwise": (2, 1)}
"""Styles that split the weights of all experts, (E, out, in): the dimension, and the matrices that lie in it."""


@dataclass(frozen=True)
class Division:
    """A way to split the layers of a network, over however many ranks."""

    splits: Splits
    units: Mapping[str, int]
    """Numbers that ranks must divide, by names of the things counted."""

    def check(self, size: int) -> None:
        """Raises a `BackendError` if something does not divide over so many ranks."""
        for what, number in self.units.items():
            if number % size:
                fits = ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)
                raise BackendError(
                    f"The launch file splits layers over {size} ranks (tp_size), over which the {number} {what} do not "
                    f"divide. Set tp_size to a number that divides them: {fits}."
                )


def divide(network: nn.Module, *, loss_by_head: bool) -> Division:
    """Returns how the layers of a network, which may be without storage, would be split by its architecture's plan.

    Raises:
        BackendError: If the architecture has no plan, or one that is not known here.
    """
    inner, plan = _plan(network)
    finder, config = _Finder(), inner.config.get_text_config()
    for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads")):
        if isinstance(heads := getattr(config, key, None), int):
            finder.units[f"{what} of {type(inner).__name__}"] = heads
    for name, module, style in _styled(inner, plan):
        finder.add_module(name, module, style)
    for name, module in inner.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            own = f"{name}.{key}"
            if (how := plan.get(plan_name(own))) is None:
                continue
            if weight.ndim != 3 or getattr(module, "is_transposed", False) or how not in _EXPERTS:
                raise _refused(own, f"the style {how}")
            finder.add_weight(own, weight, *_EXPERTS[how])
    partial = finder.partial | (_loss_parameters(network, inner) if loss_by_head else set())
    names = [(name, id(p)) for name, p in network.named_parameters()]
    return Division(
        Splits(
            {name: finder.splits[key] for name, key in names if key in finder.splits},
            frozenset(name for name, key in names if key in partial),
        ),
        finder.units,
    )


def split(network: nn.Module, group: Group) -> Splits:
    """Leaves this rank its part of a network's layers, in place; before, each rank has the whole network.

    Raises:
        BackendError: If the architecture has no plan, or what it has cannot be split over so many ranks.
    """
    inner, plan = _plan(network)
    head = chunked_loss.loss_head(inner)
    division = divide(network, loss_by_head=head is not None)
    division.check(group.size)
    shared = SharedInputs(group)
    for _, module, style in _styled(inner, plan):
        _join(module, style, shared, group)
    for name, how in division.splits.parameters.items():
        where, _, key = name.rpartition(".")
        owner: Any = network.get_submodule(where)
        if how.packed is not None:
            _shard_4bit(owner, how, group)
            continue
        whole = getattr(owner, key)
        shard = how.part_of(whole.detach(), group.size, group.rank)
        setattr(owner, key, nn.Parameter(shard, requires_grad=whole.requires_grad))
        if isinstance(owner, nn.Linear) and key == "weight":
            owner.out_features, owner.in_features = shard.shape
    if head is not None:
        # Each rank computes the loss of a part of the tokens, unless others use the head's parameters, too.
        parameters, (embedding, _) = _loss_parameters(network, inner), embeddings_and_head(inner)
        head.token_group = group if parameters else None
        if embedding is not None and any(id(parameter) in parameters for parameter in embedding.parameters()):
            # As the head, it gets the gradients of that part of the tokens only.
            embedding.register_forward_hook(lambda _, __, values: tensor.split_gradients(values, group))
    return replace(division.splits, group=group)


def _loss_parameters(network: nn.Module, inner: PreTrainedModel) -> set[int]:
    """Returns the ids of parameters that get gradients of a rank's part of the tokens only.

    They are those of the head, and of the embedding if that shares some; none if other modules hold one of them.
    """
    embedding, head = (set() if m is None else set(map(id, m.parameters())) for m in embeddings_and_head(inner))
    ids = head | embedding if head & embedding else head
    inside = {id(submodule) for m in embeddings_and_head(inner) if m is not None for submodule in m.modules()}
    outside = [module for module in network.modules() if id(module) not in inside]
    return set() if any(id(p) in ids for m in outside for p in m.parameters(recurse=False)) else ids


def _plan(network: nn.Module) -> tuple[PreTrainedModel, dict[str, str]]:
    inner = transformer(network)
    if inner is not None:
        both = embeddings_and_head(inner)
        if inner.tp_plan.keys() - {plan_name(name) for name, module in inner.named_modules() if module in both}:
            return inner, dict(inner.tp_plan)
    who = type(network).__name__ if inner is None else f"{type(inner).__name__} ({inner.config.model_type})"
    raise BackendError(
        "The launch file splits layers over ranks (tp_size), but transformers has no plan by which those of "
        f"{who} are split. Take a launch config that shards weights, which does so with any network."
    )


def _styled(inner: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yields modules that a plan names, each with its style; embedding and head stay whole."""
    for name, module in inner.named_modules():
        style = plan.get(plan_name(name))
        if style is not None and module not in embeddings_and_head(inner):
            yield name, module, style


class _Finder:
    """Collects what is split, and how."""

    def __init__(self) -> None:
        self.splits: dict[int, Split] = {}
        """Splits by the id of a parameter."""
        self.partial: set[int] = set()
        self.units: dict[str, int] = {}

    def add_module(self, name: str, module: Any, style: str) -> None:
        if style in _COLUMNS or style in _ROWS:
            self._add_linear(name, module, 0 if style in _COLUMNS else 1)
        elif style == "replicated_with_grad_allreduce":
            self.partial |= {id(p) for p in module.parameters()}
        elif style != "moe_tp_experts":
            raise _refused(name, f"the style {style}")

    def _add_linear(self, name: str, module: Any, dim: int) -> None:
        """Adds the weights of a linear module, and of its adapter if it has one."""
        base = getattr(module, "base_layer", module)
        adapted = base is not module
        if adapted and (not hasattr(module, "lora_A") or any(module.use_dora.values())):
            raise _refused(name, "an adapter that is no LoRA")
        plain = type(base) in (nn.Linear, StoredLinear)
        if type(base).__name__ == "Linear4bit" or (plain and hasattr(base.weight, "packed_weights")):
            self._add_4bit(name, base, dim)
        elif plain:
            self.add_weight(name, base.weight, dim)
        else:
            raise _refused(name, type(base).__name__)
        if adapted:
            whole, split = (module.lora_A, module.lora_B) if dim == 0 else (module.lora_B, module.lora_A)
            self.partial |= {id(p) for p in whole.parameters()}
            for key, adapter in split.items():
                self.add_weight(f"{name}'s adapter {key}", adapter.weight, dim)
        # Of rows, a bias is added to what is summed.
        if dim == 0 and base.bias is not None:
            self.add_weight(f"{name}.bias", base.bias, 0)

    def add_weight(self, name: str, weight: Any, dim: int, blocks: int = 1) -> None:
        self.splits[id(weight)] = Split(tuple(weight.shape), dim, blocks)
        self.units[f"rows or columns of {name}"] = weight.shape[dim] // blocks

    def _add_4bit(self, name: str, base: Any, dim: int) -> None:
        """Adds a weight of 4 bits, each block of which has a scale: it is split between blocks only."""
        out, features = base.out_features, base.in_features
        state = getattr(base.weight, "quant_state", None)
        block = quantization.BLOCK if state is None else state.blocksize
        rows = out if dim else 1
        self.splits[id(base.weight)] = Split((rows, base.weight.numel() // rows), 1, packed=out * features)
        # Of columns a block, of rows as many as fill blocks.
        side, step = (features, block) if dim else (out, block // math.gcd(features, block))
        what = f"{'columns' if dim else 'rows'} of {name}"
        if step > 1:
            what = f"groups of {step} {what}, which is quantized in blocks of {block} weights,"
        self.units[what] = side // step if side % step == 0 else 1


def _join(module: Any, style: str, shared: SharedInputs, group: Group) -> None:
    """Has a module's inputs and outputs handed from rank to rank as its part of the layer asks for."""
    if style in _COLUMNS:
        module.register_forward_pre_hook(lambda _, inputs: (shared(inputs[0]), *inputs[1:]))
        if _COLUMNS[style]:
            module.register_forward_hook(lambda _, __, output: tensor.gather_outputs(output, group))
    elif style in _ROWS:
        base = getattr(module, "base_layer", module)
        if _ROWS[style]:
            module.register_forward_pre_hook(lambda _, inputs: (tensor.split_inputs(inputs[0], group), *inputs[1:]))
        if base.bias is None:
            module.register_forward_hook(lambda _, __, output: tensor.sum_outputs(output, group))
        else:
            _add_bias_once(module, base, group)
    elif style == "moe_tp_experts":
        # Its inputs are tokens, and the weight that each has in the sum of its experts.
        module.register_forward_pre_hook(
            lambda _, inputs: tuple(
                tensor.sum_gradients(x, group) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in inputs
            )
        )
        module.register_forward_hook(lambda _, __, output: tensor.sum_outputs(output, group))


def _shard_4bit(module: Any, how: Split, group: Group) -> None:
    """Leaves a module this rank's part of its weight."""
    weight, (size, rank) = module.weight, (group.size, group.rank)
    state, rows = weight.quant_state, how.shape[0]
    if state.nested:
        # The scales are quantized in blocks of their own: these are read back, exactly, and kept in fp32.
        from bitsandbytes.functional import dequantize_blockwise

        state.absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
        state.offset, state.state2, state.nested = None, None, False
    weight_bytes = weight.data.view(torch.uint8).view(rows, -1).chunk(size, 1)[rank].contiguous()
    state.absmax = state.absmax.view(rows, -1).chunk(size, 1)[rank].contiguous().view(-1)
    out, features = state.shape
    state.shape = torch.Size((out // size, features) if rows == 1 else (out, features // size))
    weight.data = weight_bytes.view(-1).view(weight.dtype).view(-1, *weight.shape[1:])
    module.out_features, module.in_features = state.shape


def _refused(name: str, what: str) -> BackendError:
    return BackendError(
        f"The launch file splits layers over ranks (tp_size), but {name} has {what}, which is not offered there. Take "
        "a launch config that shards weights, which does so with any network."
    )


def _add_bias_once(module: nn.Module, base: Any, group: Group) -> None:
    """Has the bias of a linear module, `base`, added to the sum over ranks, not to each part of it."""
    kept: list[torch.Tensor | None] = []

    def take(_: nn.Module, inputs: Any) -> None:
        kept.append(base.bias)
        base.bias = None

    def give(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        bias: Any = kept.pop()
        base.bias = bias
        whole = tensor.sum_outputs(output, group)
        summed: torch.Tensor = (whole + bias).to(whole.dtype)
        return summed

    module.register_forward_pre_hook(take)
    module.register_forward_hook(give)
