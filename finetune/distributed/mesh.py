"""The named mesh of a run's ranks: made once, and handed to whatever asks who shares what with whom.

torch's own `init_device_mesh` makes a group for each dimension with a time limit of its own, and has no public way to
join dimensions, over which gradients are averaged. So groups are made here, and torch gets its `DeviceMesh` of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from finetune.distributed.launch.launch_config import Launch

DIMENSIONS = ("dp_replicate", "dp_shard", "sp", "tp")
"""From the outermost: ranks that differ in the last one follow each other."""

AVERAGE = ("dp_replicate", "dp_shard", "sp")
"""The dimensions that gradients are averaged over: ranks that share rows get gradients of other tokens."""


@dataclass(frozen=True)
class Group:
    """Ranks that differ from this one in some dimensions only."""

    size: int
    rank: int
    handle: Any
    """torch's process group; None for all ranks."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run by named dimensions, as this rank sees them."""

    sizes: Mapping[str, int]
    """Ranks in each dimension; their product is the world size."""
    rank: int
    groups: Mapping[str, Group]
    """`sp` and `tp` if they split anything, and `average`."""
    sharding_mesh: DeviceMesh | None = None
    """torch's mesh of the ranks that hold the same part of each layer, copies by shards where there are copies; None
    where these are all ranks, and the network is sharded over all of them."""

    @classmethod
    def of_launch(cls, launch: Launch, rank: int, device_type: str, timeout: timedelta) -> "Mesh":
        """Makes the groups of a launch, whose collectives wait so long for a rank; every rank must call it."""
        data = launch.data_ranks // launch.replicate
        shards = launch.sharded or launch.uses_deepspeed
        sizes = {
            "dp_replicate": launch.replicate if shards else data,
            "dp_shard": data if shards else 1,
            "sp": launch.sequence,
            "tp": launch.tensor,
        }
        mesh = cls(sizes, rank, {})
        groups = {name: mesh.make_group((name,), timeout) for name in ("tp", "sp") if sizes[name] > 1}
        # Without tensor parallelism these are all ranks, which have a group already.
        groups["average"] = Group(launch.num_processes, rank, None)
        sharding = None
        if launch.tensor > 1:
            groups["average"] = mesh.make_group(AVERAGE, timeout)
            sharding = DeviceMesh.from_group(groups["average"].handle, device_type)
        elif launch.replicate > 1:
            handles = [mesh.make_group((name,), timeout).handle for name in ("dp_replicate", "dp_shard")]
            ranks = torch.arange(launch.num_processes).view(launch.replicate, -1)
            sharding = DeviceMesh.from_group(handles, device_type, ranks, mesh_dim_names=("dp_replicate", "dp_shard"))
        return cls(sizes, rank, groups, sharding)

    def make_group(self, dimensions: tuple[str, ...], timeout: timedelta) -> Group:
        """Makes the group of this rank over some dimensions; every rank must call it."""
        ranks = np.arange(np.prod(list(self.sizes.values()))).reshape(tuple(self.sizes.values()))
        axes = [DIMENSIONS.index(name) for name in dimensions]
        rows = np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, self.size(*dimensions)).tolist()
        handle, _ = distributed.new_subgroups_by_enumeration(rows, timeout=timeout)  # type: ignore[no-untyped-call]
        mine = next(row for row in rows if self.rank in row)
        return Group(len(mine), mine.index(self.rank), handle)

    def size(self, *dimensions: str) -> int:
        """Ranks over some dimensions."""
        return int(np.prod([self.sizes[name] for name in dimensions]))

    def group(self, name: str) -> Group | None:
        """The group of this rank along `sp` or `tp`; None where that splits nothing."""
        return self.groups.get(name)

    @property
    def data_size(self) -> int:
        """Ranks, or groups of ranks that share rows, that read rows of their own."""
        return self.size("dp_replicate", "dp_shard")

    @property
    def data_rank(self) -> int:
        """The number of this rank, or of its group, among them."""
        return self.rank // self.size("sp", "tp")

    @property
    def average_size(self) -> int:
        """Ranks, or groups of ranks that share layers, over which gradients are averaged."""
        return self.groups["average"].size

    @property
    def average_rank(self) -> int:
        """The number of this rank, or of its group, among them."""
        return self.groups["average"].rank

    @property
    def counts_rows(self) -> bool:
        """True on one of the ranks that share rows: the one that counts what they read."""
        return self.rank % self.size("sp", "tp") == 0

    @property
    def counts_loss(self) -> bool:
        """True on one of the ranks that share layers, all of which compute the same loss."""
        return self.rank % self.size("tp") == 0


ONE_RANK = Mesh(dict.fromkeys(DIMENSIONS, 1), 0, {"average": Group(1, 0, None)})
"""The mesh of a process by itself."""


def gather_parts(part: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Returns what each rank of a group has, in their order; every one of them must call it."""
    here = part.contiguous()
    parts = [torch.empty_like(here) for _ in range(group.size)]
    distributed.all_gather(parts, here, group=group.handle)
    return parts
