"""Tasks that no fake tensor goes through: one reads a value, one ends its process."""

import os
from dataclasses import replace

from own_task import mlp

from finetune.tasks.task import Task


def reads() -> Task:
    plain = mlp()

    def loss_sum(network, batch):
        return plain.loss_sum(network, batch) * (2.0 if batch["inputs"].sum().item() > 0 else 1.0)

    return replace(plain, loss_sum=loss_sum)


def ends() -> Task:
    return replace(mlp(), loss_sum=lambda network, batch: os._exit(3))
