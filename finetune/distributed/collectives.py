"""Collectives over a group of the mesh."""

import torch
from torch import distributed

from finetune.distributed.mesh import Group


def gather_parts(part: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """What each of the group's ranks has, in their order; every one of them must call it."""
    here = part.contiguous()
    parts = [torch.empty_like(here) for _ in range(group.size)]
    distributed.all_gather(parts, here, group=group.handle)
    return parts
