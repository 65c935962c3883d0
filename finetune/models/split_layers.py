"""Splits the layers of a network over the ranks of a tensor-parallel group, by its architecture's own plan.

transformers' configurations say of each module whether its outputs ("colwise") or its inputs ("rowwise") are split.
Queries, keys, values and the first half of an MLP are split by outputs, which nobody needs whole; what follows takes
them as its inputs, and its outputs are summed over the ranks: two sums a layer and pass. Embedding and output head stay
whole on every rank.
"""

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.distributed import tensor_parallel
from finetune.distributed.tensor_parallel import SharedInputs, Split, Splits
from finetune.models.frozen_weights import StoredLinear
from finetune.models.lora_adapters import transformer
from finetune.utils.errors import BackendError

_COLUMNS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""By outputs; whether these are gathered again."""
_ROWS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
"""By inputs; whether these come whole."""


def split(network: nn.Module) -> Splits:
    """Leaves this rank its part of a network's layers, in place; each rank has the whole network before.

    Raises:
        BackendError: If the architecture has no plan, or what it has cannot be split over so many ranks.
    """
    inner = transformer(network)
    plan = _plan(network, inner)
    assert inner is not None
    _check_heads(inner)
    splitter = _Splitter()
    for name, module in list(inner.named_modules()):
        style = plan.get(_generic(name))
        if style is not None and module not in _ends(inner):
            splitter.module(name, module, style)
        for parameter in list(module._parameters):
            own = f"{name}.{parameter}"
            if (style := plan.get(_generic(own))) is not None:
                splitter.parameter(own, module, parameter, style)
    found = {id(p): how for p, how in splitter.splits}
    summed = {id(p) for p in splitter.partial}
    return Splits(
        {name: found[id(p)] for name, p in network.named_parameters() if id(p) in found},
        frozenset(name for name, p in network.named_parameters() if id(p) in summed),
    )


def _plan(network: nn.Module, inner: PreTrainedModel | None) -> dict[str, str]:
    plan: dict[str, str] = {} if inner is None else dict(inner.tp_plan)
    ends = set() if inner is None else {_generic(name) for name, m in inner.named_modules() if m in _ends(inner)}
    if not plan.keys() - ends:
        who = type(network).__name__ if inner is None else f"{type(inner).__name__} ({inner.config.model_type})"
        raise BackendError(
            f"The launch file splits layers over {tensor_parallel.group().size} ranks (tp_size), but transformers has "
            f"no plan by which those of {who} are split. Take a launch config without it, such as one that shards, "
            "which any network can be."
        )
    return plan


def _ends(inner: PreTrainedModel) -> list[nn.Module | None]:
    return [inner.get_input_embeddings(), inner.get_output_embeddings()]


def _generic(name: str) -> str:
    """A name as plans have it: `layers.0.mlp` is `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check_heads(inner: PreTrainedModel) -> None:
    size, config = tensor_parallel.group().size, inner.config.get_text_config()
    for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads")):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % size:
            _refuse_size(f"the {heads} {what} of {type(inner).__name__}", heads)


def _refuse_size(what: str, number: int) -> None:
    size = tensor_parallel.group().size
    fits = ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)
    raise BackendError(
        f"The launch file splits layers over {size} ranks (tp_size), over which {what} do not divide. Set tp_size to a "
        f"number that divides them: {fits}."
    )


class _Splitter:
    """Splits modules and parameters, and remembers which."""

    def __init__(self) -> None:
        self.group = tensor_parallel.group()
        self.shared = SharedInputs()
        self.splits: list[tuple[nn.Parameter, Split]] = []
        self.partial: list[nn.Parameter] = []

    def module(self, name: str, module: nn.Module, style: str) -> None:
        if style in _COLUMNS:
            self._columns(name, module, gathers=_COLUMNS[style])
        elif style in _ROWS:
            self._rows(name, module, comes_whole=_ROWS[style])
        elif style == "replicated_with_grad_allreduce":
            self.partial += module.parameters()
        elif style == "moe_tp_experts":
            module.register_forward_pre_hook(_share_all)
            module.register_forward_hook(lambda _, __, output: tensor_parallel.sum_outputs(output))
        else:
            raise _unknown(name, style)

    def parameter(self, name: str, module: Any, key: str, style: str) -> None:
        """Splits a parameter that a plan names itself: the weights of all experts, (E, out, in)."""
        weight = module._parameters[key]
        if weight.ndim != 3 or getattr(module, "is_transposed", False) or style not in ("packed_colwise", "rowwise"):
            raise _unknown(name, style)
        if style == "packed_colwise":
            self._cut(name, module, key, 1, blocks=2)
        else:
            self._cut(name, module, key, 2)

    def _columns(self, name: str, module: Any, *, gathers: bool) -> None:
        base = self._linear(name, module, 0)
        if base is not module:
            self.partial += module.lora_A.parameters()
            for key, adapter in module.lora_B.items():
                self._cut(f"{name}.lora_B.{key}", adapter, "weight", 0)
        if base.bias is not None:
            self._cut(f"{name}.bias", base, "bias", 0)
        module.register_forward_pre_hook(lambda _, inputs: (self.shared(inputs[0]), *inputs[1:]))
        if gathers:
            module.register_forward_hook(lambda _, __, output: tensor_parallel.gather_outputs(output))

    def _rows(self, name: str, module: Any, *, comes_whole: bool) -> None:
        base = self._linear(name, module, 1)
        if base is not module:
            self.partial += module.lora_B.parameters()
            for key, adapter in module.lora_A.items():
                self._cut(f"{name}.lora_A.{key}", adapter, "weight", 1)
        if comes_whole:
            module.register_forward_pre_hook(lambda _, inputs: (tensor_parallel.split_inputs(inputs[0]), *inputs[1:]))
        if base.bias is None:
            module.register_forward_hook(lambda _, __, output: tensor_parallel.sum_outputs(output))
        else:
            _add_bias_once(module, base)

    def _linear(self, name: str, module: Any, dim: int) -> Any:
        """Splits the weight of a linear module, inside its adapter if it has one, and returns that module."""
        base = getattr(module, "base_layer", module)
        adapted = base is not module
        if adapted and not (hasattr(module, "lora_A") and not any(map(bool, module.use_dora.values()))):
            raise BackendError(_refused(name, "an adapter that is no LoRA"))
        kind = type(base)
        if kind in (nn.Linear, StoredLinear):
            self._cut(name, base, "weight", dim)
            base.out_features, base.in_features = base.weight.shape
        elif kind.__name__ == "Linear4bit":
            self._cut_4bit(name, base, dim)
        else:
            raise BackendError(_refused(name, kind.__name__))
        return base

    def _cut(self, name: str, module: nn.Module, key: str, dim: int, *, blocks: int = 1) -> None:
        whole: Any = module._parameters[key]
        how = Split(tuple(whole.shape), dim, blocks)
        if whole.shape[dim] % (blocks * self.group.size):
            _refuse_size(f"the {whole.shape[dim] // blocks} rows or columns of {name}", whole.shape[dim] // blocks)
        part = how.part_of(whole.detach(), self.group.size, self.group.rank)
        module._parameters[key] = parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
        self.splits.append((parameter, how))

    def _cut_4bit(self, name: str, module: Any, dim: int) -> None:
        """Splits a weight of 4 bits, each block of which has a scale: of whole blocks only."""
        weight, size, rank = module.weight, self.group.size, self.group.rank
        state = weight.quant_state
        (out, features), block = state.shape, state.blocksize
        shape = (out // size, features) if dim == 0 else (out, features // size)
        run = shape[0] * features if dim == 0 else shape[1]
        if (out, features)[dim] % size or run % block or features % (block if dim else 1):
            raise BackendError(
                f"The launch file splits layers over {size} ranks (tp_size), but {name} is quantized in blocks of "
                f"{block} weights, which its {out} x {features} weights do not give each rank whole. Set tp_size to a "
                "smaller number, or take a launch config without it."
            )
        if state.nested:
            # The scales are quantized in blocks of their own: these are read back, exactly, and kept in fp32.
            from bitsandbytes.functional import dequantize_blockwise

            state.absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
            state.offset, state.state2, state.nested = None, None, False
        rows = out if dim else 1
        weight_bytes = weight.data.view(torch.uint8).view(rows, -1).chunk(size, 1)[rank].contiguous()
        state.absmax = state.absmax.view(rows, -1).chunk(size, 1)[rank].contiguous().view(-1)
        state.shape = torch.Size(shape)
        numbers = weight.numel() // rows
        weight.data = weight_bytes.view(-1).view(weight.dtype).view(-1, *weight.shape[1:])
        module.out_features, module.in_features = shape
        self.splits.append((weight, Split((rows, numbers), 1, packed=out * features)))


def _unknown(name: str, style: str) -> BackendError:
    return BackendError(_refused(name, f"the style {style}"))


def _refused(name: str, what: str) -> str:
    return (
        f"The launch file splits layers over {tensor_parallel.group().size} ranks (tp_size), but {name} has {what}, "
        "which is not offered there. Take a launch config without it, such as one that shards."
    )


def _share_all(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What goes into experts: tokens, and the weight that each has in the sum of its experts."""
    return tuple(
        tensor_parallel.sum_gradients(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
    )


def _add_bias_once(module: nn.Module, base: nn.Module) -> None:
    """Has a bias added to the sum over ranks, not to each part of it.

    Args:
        module: The linear module, or the adapter around it.
        base: The linear module.
    """
    kept: list[torch.Tensor | None] = []

    def take(_: nn.Module, inputs: Any) -> None:
        kept.append(base._parameters["bias"])
        base._parameters["bias"] = None

    def give(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        bias: Any = kept.pop()
        base._parameters["bias"] = bias
        whole = tensor_parallel.sum_outputs(output)
        summed: torch.Tensor = (whole + bias).to(whole.dtype)
        return summed

    module.register_forward_pre_hook(take)
    module.register_forward_hook(give)
