"""A task of a user's own: an MLP that fits a fixed function. Recipes in tests name it as `own_task:mlp`."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from finetune.tasks.causal_lm import causal_lm_logits
from finetune.tasks.task import Task, TaskData


class Points:
    """Points on a smooth function of 8 numbers."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 8, generator=generator)
        self.targets = self.inputs.sin().sum(-1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[rows], "targets": self.targets[rows]}

    def num_targets(self, rows: np.ndarray) -> int:
        return len(rows)


def mlp(width: int = 32, dropout: float = 0.0, meta: bool = False, masked: bool = False, normed: bool = False) -> Task:
    def network() -> nn.Module:
        layers = _layers()
        if masked:
            layers.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
            layers.register_buffer("scale", torch.ones(2))
        return layers

    def _layers() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width),
            nn.BatchNorm1d(width) if normed else nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        )

    def build_model(recipe, data):
        torch.manual_seed(recipe.seed)
        with torch.device("meta" if meta else "cpu"):
            return network()

    def skeleton(recipe, data):
        with torch.device("meta"):
            return network()

    def loss_sum(network, batch):
        return functional.mse_loss(network(batch["inputs"]).float(), batch["targets"], reduction="sum")

    return Task(
        build_data=lambda recipe, quiet: TaskData(train=Points(200, 1), validation=Points(33, 2)),
        build_model=build_model,
        loss_sum=loss_sum,
        build_skeleton=skeleton,
    )


def smoothed(network, batch):
    """A loss of one's own: cross-entropy with label smoothing."""
    logits = causal_lm_logits(network, batch).float().flatten(0, 1)
    return functional.cross_entropy(logits, batch["targets"].flatten(), reduction="sum", label_smoothing=0.1)
