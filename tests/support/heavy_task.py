"""A task that takes only so many rows at once, and shows in which way it fails beyond that: `heavy_task:heavy`."""

import os
from dataclasses import replace

from own_task import mlp

from finetune.tasks.task import Task


def heavy(most: int, rank: int = 0, fault: str = "") -> Task:
    """
    Args:
        most: Rows that fit.
        rank: Where more do not fit; the others wait for it in a collective.
        fault: What goes wrong instead of the memory.
    """
    whole = mlp()

    def loss_sum(network, batch):
        if len(batch["inputs"]) > most and os.environ.get("RANK", "0") == str(rank):
            raise RuntimeError(fault) if fault else MemoryError("all of it")
        return whole.loss_sum(network, batch)

    return replace(whole, loss_sum=loss_sum)
