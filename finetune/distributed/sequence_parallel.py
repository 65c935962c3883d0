"""Sequence parallelism (Ulysses): the ranks of a group hold parts of the same rows, and exchange them for heads.

Everything but attention looks at one token at a time, and so works on a part of a row as on a whole one. Attention gets
whole rows, of some of the heads, by an all-to-all of queries, keys and values, and gives its result back by another.

Letters: B rows, T tokens a row, N ranks of a group, H heads, E a head's width, D documents of a batch.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from finetune.utils.errors import BackendError


@dataclass
class Group:
    """The ranks that this one shares its rows with."""

    size: int
    """N."""
    rank: int
    """This rank's number among them, which is that of the part of a row that it holds."""
    handle: Any
    """torch's process group."""
    splits: bool = True
    """Whether `split` splits now."""


@dataclass
class Exchanged:
    """What was exchanged around attention."""

    count: int = 0
    """All-to-alls."""
    parts: int = 1
    """How many times as long as before rows came out of the last exchange for heads."""


_group: Group | None = None
_exchanged = Exchanged()


@contextmanager
def recorded() -> Iterator[Exchanged]:
    """Counts what is exchanged in here."""
    global _exchanged
    before, _exchanged = _exchanged, Exchanged()
    try:
        yield _exchanged
    finally:
        _exchanged = before


def start(size: int, timeout: timedelta, *, stride: int = 1) -> None:
    """Forms the groups of `size` ranks. Every rank must call it.

    Args:
        stride: How far the ranks of a group are apart: as many as share layers.
    """
    global _group
    _group = None
    rank, world = distributed.get_rank(), distributed.get_world_size()
    for begin in range(0, world, size * stride):
        for first in range(begin, begin + stride):
            ranks = list(range(first, first + size * stride, stride))
            handle = distributed.new_group(ranks, timeout=timeout)
            if rank in ranks:
                _group = Group(size, ranks.index(rank), handle)


def group() -> Group | None:
    """This rank's group; None where rows are not split."""
    return _group


@contextmanager
def whole_rows() -> Iterator[None]:
    """In here, each rank computes whole rows by itself."""
    if _group is None:
        yield
        return
    _group.splits = False
    try:
        yield
    finally:
        _group.splits = True


def split(batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """This rank's part of a language model's batch, whose targets are shifted already.

    Args:
        batch: As `data.rows.row_dataset.TokenRows.batch` has it. Rows must divide into N parts.

    Returns:
        `input_ids`, `targets` and `position_ids`, (B, T / N); positions are those of the whole row. `cu_seqlens`, where
        documents begin in the whole batch, once a part: (N, D + 1). The batch itself where rows are not split.
    """
    if _group is None or not _group.splits:
        return batch
    ids = batch["input_ids"]
    rows, length = ids.shape
    cu_seqlens, positions = batch.get("cu_seqlens"), batch.get("position_ids")
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=ids.device)
    if positions is None:
        positions = torch.arange(length, device=ids.device).expand(rows, length)
    parts = {"input_ids": ids, "targets": batch["targets"], "position_ids": positions}
    return {
        **{name: values.tensor_split(_group.size, 1)[_group.rank] for name, values in parts.items()},
        "cu_seqlens": cu_seqlens.expand(_group.size, -1),
    }


def gather_rows(part: torch.Tensor) -> torch.Tensor:
    """All heads of a part of each row, (B, H, T / N, E), to some heads of whole rows, (B, H / N, T, E).

    Raises:
        BackendError: If the heads do not divide into N parts.
    """
    assert _group is not None
    heads = part.shape[1]
    if heads % _group.size:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise BackendError(
            f"The launch file splits rows over {_group.size} ranks (sp_size), each of which attends whole rows with a "
            f"part of the {heads} attention heads. Set sp_size to a number that divides them: {sizes}."
        )
    found: torch.Tensor = _Exchange.apply(part, 1, 2)  # type: ignore[no-untyped-call]
    _exchanged.parts = found.shape[2] // part.shape[2]
    return found


def gather_heads(found: torch.Tensor) -> torch.Tensor:
    """Some heads of whole rows, (B, T, H / N, E), to all heads of a part of each row, (B, T / N, H, E)."""
    part: torch.Tensor = _Exchange.apply(found, 1, 2)  # type: ignore[no-untyped-call]
    return part


class _Exchange(torch.autograd.Function):
    """Splits one dimension over the group, and joins another one."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, split: int, join: int) -> torch.Tensor:
        ctx.split, ctx.join = split, join
        return _exchange(values, split, join)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _exchange(gradients[0], ctx.join, ctx.split), None, None


def _exchange(values: torch.Tensor, split: int, join: int) -> torch.Tensor:
    assert _group is not None
    sent = torch.stack(values.chunk(_group.size, split))
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=_group.handle)
    _exchanged.count += 1
    return torch.cat(received.unbind(), join)
