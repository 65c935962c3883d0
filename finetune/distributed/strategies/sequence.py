"""Sequence parallelism (Ulysses): the ranks of a group hold parts of the same rows, and exchange them for heads.

Everything but attention looks at one token at a time, and so works on a part of a row as on a whole one. Attention gets
whole rows, of some of the heads, by an all-to-all of queries, keys and values, and gives its result back by another.

Letters: B rows, T tokens a row, N ranks of a group, H heads, E a head's width, D documents of a batch.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed, nn

from finetune.distributed.mesh import Group
from finetune.distributed.strategies.tensor import apply_passes, sum_over
from finetune.utils.errors import BackendError


@dataclass
class RowGroup:
    """The ranks that this one shares its rows with, and what was exchanged with them around attention."""

    group: Group
    splits: bool = True
    """False while each rank computes whole rows by itself."""
    exchanges: int = 0
    parts: int = 1
    """Length of rows after the last exchange for heads, relative to before."""


def install(network: nn.Module, group: Group | None) -> None:
    """Tells a network's modules the ranks that rows are split over; without any it stays as it is."""
    if group is not None:
        rows = RowGroup(group)
        for module in network.modules():
            module.row_group = rows  # type: ignore[assignment]


def row_group(model: nn.Module) -> RowGroup | None:
    """Returns the ranks that rows of a network, or of the one in a wrapper, are split over; None for whole rows."""
    groups = (vars(module).get("row_group") for module in model.modules())
    return next((group for group in groups if group is not None), None)


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Has each rank compute whole rows by itself."""
    group = row_group(model)
    if group is None:
        yield
        return
    group.splits = False
    try:
        yield
    finally:
        group.splits = True


def split(batch: Mapping[str, torch.Tensor], rows: RowGroup | None) -> Mapping[str, torch.Tensor]:
    """Returns this rank's part of a language model's batch, whose targets are shifted already.

    Args:
        batch: As `data.rows.kinds.documents` has it. Rows must divide into N parts.

    Returns:
        `input_ids`, `targets`, `position_ids` and any `weights`, (B, T / N); positions are those of the whole row.
        `cu_seqlens`, where documents begin in the whole batch, once a part: (N, D + 1). The batch itself where rows are
        not split.
    """
    if rows is None or not rows.splits:
        return batch
    group = rows.group
    ids = batch["input_ids"]
    count, length = ids.shape
    cu_seqlens, positions = batch.get("cu_seqlens"), batch.get("position_ids")
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=ids.device)
    if positions is None:
        positions = torch.arange(length, device=ids.device).expand(count, length)
    parts = {"input_ids": ids, "targets": batch["targets"], "position_ids": positions}
    parts |= {"weights": batch["weights"]} if "weights" in batch else {}
    return {
        **{name: values.tensor_split(group.size, 1)[group.rank] for name, values in parts.items()},
        "cu_seqlens": cu_seqlens.expand(group.size, -1),
    }


def part_of_row(values: torch.Tensor, network: nn.Module) -> torch.Tensor:
    """Returns this rank's part of values of each token, (..., T / N) of (..., T); all where rows are not split."""
    rows: RowGroup | None = getattr(network, "row_group", None)
    return values if rows is None or not rows.splits else values.tensor_split(rows.group.size, -1)[rows.group.rank]


def sum_of_parts(values: torch.Tensor, network: nn.Module) -> torch.Tensor:
    """Returns the sum, without gradients, of what ranks have of parts of a row; the values where it is not split."""
    rows: RowGroup | None = getattr(network, "row_group", None)
    return values if rows is None or not rows.splits else sum_over(rows.group, values)


def share_of(function: Callable[[torch.Tensor], torch.Tensor], sums: torch.Tensor, network: nn.Module) -> torch.Tensor:
    """Returns this rank's share, 1 / N, of a function of what its row's parts sum up to; without parts, all of it.

    Args:
        sums: Sums over this rank's part of each row. Their gradients are those of all shares.
    """
    rows: RowGroup | None = getattr(network, "row_group", None)
    if rows is None or not rows.splits:
        return function(sums)
    add = partial(sum_over, rows.group)
    return function(apply_passes(sums, add, add)) / rows.group.size


def gather_rows(shard: torch.Tensor, rows: RowGroup) -> torch.Tensor:
    """Exchanges all heads of a part of each row, (B, H, T / N, E), for some heads of whole rows, (B, H / N, T, E).

    Raises:
        BackendError: If the heads do not divide into N parts.
    """
    heads, size = shard.shape[1], rows.group.size
    if heads % size:
        sizes = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise BackendError(
            f"The launch file splits rows over {size} ranks (sp_size), each of which attends whole rows with a "
            f"part of the {heads} attention heads. Set sp_size to a number that divides them: {sizes}."
        )
    heads_of_rows = exchange(shard, rows)
    rows.parts = heads_of_rows.shape[2] // shard.shape[2]
    return heads_of_rows


def exchange(values: torch.Tensor, rows: RowGroup) -> torch.Tensor:
    """Splits the second dimension over the group, and joins the third; gradients go the other way.

    Of what `gather_rows` has returned, after attention has turned it, (B, T, H / N, E), it makes all heads of a part of
    each row, (B, T / N, H, E).
    """
    return apply_passes(values, partial(_all_to_all, rows, 1, 2), partial(_all_to_all, rows, 2, 1))


def _all_to_all(rows: RowGroup, split: int, join: int, values: torch.Tensor) -> torch.Tensor:
    sent = torch.stack(values.chunk(rows.group.size, split))
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=rows.group.handle)
    rows.exchanges += 1
    return torch.cat(received.unbind(), join)
