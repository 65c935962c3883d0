"""Tensor parallelism: the ranks of a group hold parts of the same layers, and compute the same rows with them.

A rank's part of a parameter is a tensor like any other: backends shard it, optimisers step it, and kernels read it as
they do a whole one. What a part is of, `Split` says. `models.split_layers` splits a network's layers, and joins what
they put out with the functions here.

Letters: B rows, T tokens a row, n tokens of a batch, h width, N ranks of a group.

Source: Shoeybi et al. 2019, "Megatron-LM".
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from finetune.distributed.mesh import Group, gather_parts
from finetune.distributed.parameter_info import inner_name, local
from finetune.distributed.split_parameters import Splits


def reduce_partial(model: nn.Module, splits: Splits) -> None:
    """Sums the gradients of which each rank of the group has a part, in place; each of them must call it."""
    if splits.group is not None:
        named = {inner_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        sum_partial([local(named[name]) for name in sorted(splits.partial & named.keys())], splits.group)


def counts_in_norm(splits: Splits, name: str) -> bool:
    """Returns whether this rank counts a parameter's gradient: of one that is not split, one of a group does."""
    return splits.group is None or splits.group.rank == 0 or name in splits.parameters


class SharedInputs:
    """Hands a tensor to layers of which each rank computes a part, and sums its gradients over ranks.

    Layers that are given the same tensor (queries, keys and values) share one sum.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._given: weakref.ref[torch.Tensor] | None = None
        self._handed: torch.Tensor | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and values.requires_grad):
            return values
        if self._handed is None or self._given is None or self._given() is not values:
            # No longer than what was given: the graph that it belongs to is let go with that.
            self._given, self._handed = weakref.ref(values, self._forget), sum_gradients(values, self._group)
        return self._handed

    def _forget(self, given: weakref.ref[torch.Tensor]) -> None:
        if given is self._given:
            self._given = self._handed = None


# Elements from which a gradient is summed by itself: copies of small ones save calls, one of an output head's is large.
_LARGE = 1 << 20


def sum_partial(gradients: Sequence[torch.Tensor], group: Group) -> None:
    """Sums gradients over the group's ranks, in place, small ones at once."""
    small: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient.numel() < _LARGE or not gradient.is_contiguous():
            small.append(gradient)
        else:
            distributed.all_reduce(gradient, group=group.handle)
    if not small:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in small])
    distributed.all_reduce(flat, group=group.handle)
    begin = 0
    for gradient in small:
        gradient.copy_(flat.narrow(0, begin, gradient.numel()).view_as(gradient))
        begin += gradient.numel()


def sum_gradients(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the same values, whose gradients are summed over the group's ranks."""
    return apply_passes(values, _same, partial(sum_over, group))


def sum_outputs(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the sum over the group's ranks, on each of them."""
    return apply_passes(values, partial(sum_over, group), _same)


def gather_outputs(shard: torch.Tensor, group: Group) -> torch.Tensor:
    """Joins the parts of the group's ranks, (..., h / N), to (..., h), on each of them."""
    return apply_passes(shard, partial(_join, group), partial(_own, group))


def split_inputs(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns this rank's part, (..., h / N), of values that each has, (..., h)."""
    return apply_passes(whole, partial(_own, group), partial(_join, group))


def split_tokens(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns this rank's part of tokens that each has, (n, ...) to (n / N, ...); see `part_of_tokens`."""
    return apply_passes(whole, partial(part_of_tokens, group=group), partial(_join_tokens, group, len(whole)))


def gather_tokens(shard: torch.Tensor, tokens: int, group: Group) -> torch.Tensor:
    """Joins the parts that `split_tokens` gives the group's ranks, (n / N, ...) to (n, ...), on each of them."""
    return apply_passes(shard, partial(_join_tokens, group, tokens), partial(part_of_tokens, group=group))


def _join_tokens(group: Group, tokens: int, shard: torch.Tensor) -> torch.Tensor:
    joined = shard.new_empty(group.size * len(shard), *shard.shape[1:])
    distributed.all_gather_into_tensor(joined, shard.contiguous(), group=group.handle)
    return joined[:tokens]


def part_of_tokens(whole: torch.Tensor, fill: int = 0, *, group: Group) -> torch.Tensor:
    """Returns this rank's part of tokens that each has, (n, ...) to (n / N, ...), rounded up and filled up."""
    first, last = _own_tokens(len(whole), group)
    tokens = whole[first:last]
    missing = last - first - len(tokens)
    return torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), fill)]) if missing else tokens.clone()


def split_gradients(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the same values, (B, T, h); of gradients each rank has those of its tokens, and else zeros."""

    def of_own_tokens(gradients: torch.Tensor) -> torch.Tensor:
        masked = torch.zeros_like(gradients, memory_format=torch.contiguous_format)
        first, last = _own_tokens(gradients[..., 0].numel(), group)
        masked.flatten(0, -2)[first:last] = gradients.flatten(0, -2)[first:last]
        return masked

    return apply_passes(values, _same, of_own_tokens)


def _own_tokens(tokens: int, group: Group) -> tuple[int, int]:
    per_rank = -(-tokens // group.size)
    return group.rank * per_rank, (group.rank + 1) * per_rank


Pass = Callable[[torch.Tensor], torch.Tensor]


def apply_passes(values: torch.Tensor, forward: Pass, backward: Pass) -> torch.Tensor:
    """Returns `forward(values)`, whose gradients go through `backward`."""
    output: torch.Tensor = _Collective.apply(values, forward, backward)  # type: ignore[no-untyped-call]
    return output


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: Pass, backward: Pass) -> torch.Tensor:
        ctx.backward_pass = backward
        return forward(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.backward_pass(gradients[0]), None, None


def _same(values: torch.Tensor) -> torch.Tensor:
    return values.view_as(values)


def _join(group: Group, shard: torch.Tensor) -> torch.Tensor:
    return torch.cat(gather_parts(shard, group), -1)


def sum_over(group: Group, values: torch.Tensor) -> torch.Tensor:
    # In fp32: rounded to 16 bit before they are added, parts would lose what the whole product keeps.
    wide = torch.float32 if values.dtype in (torch.bfloat16, torch.float16) else values.dtype
    whole = values.to(wide, copy=True, memory_format=torch.contiguous_format)
    distributed.all_reduce(whole, group=group.handle)
    return whole.to(values.dtype)


def _own(group: Group, whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(group.size, -1)[group.rank].contiguous()
