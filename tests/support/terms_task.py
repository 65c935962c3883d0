"""A task whose loss has several terms, with what is divided otherwise, what depends on the whole global batch, and
figures that a layer records. Recipes in tests name it as `terms_task:several`."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from finetune.tasks import Evaluation, Figures, Task, TaskData, Term, record

TERMS = (
    Term("error"),
    Term("above", "rows", 0.5),
    Term("ranked", "rows", 0.25),
    Term("drift", "rows", 0.0),
    Term("positive", "rows", 0.0),
    Term("by_place", "rows", 0.0),
)


class Series:
    """Rows of up to four points of a smooth function; the others are none."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 4, 8, generator=generator)
        self.targets = self.inputs.sin().sum(-1)
        self.known = torch.arange(4) < torch.randint(1, 5, (count, 1), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[rows], "targets": self.targets[rows], "known": self.known[rows]}

    def num_targets(self, rows: np.ndarray) -> int:
        return int(self.known[rows].sum())

    def counts(self, rows: np.ndarray) -> dict[str, int]:
        return {"rows": len(rows)}


class Recording(nn.Module):
    """Two layers that are recomputed in the backward pass, and record what goes through."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(8, 16), nn.Linear(16, 1), nn.Dropout(dropout)

    def _hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.first(inputs).tanh())
        record("inside/mean", hidden.sum(), hidden.numel())
        record("inside/passes", 1)
        return hidden

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self._hidden, inputs, use_reentrant=False))[..., 0].float()


def row_values(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """The mean of each row's known points: (B,)."""
    return (outputs * batch["known"]).sum(1) / batch["known"].sum(1)


def sums_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """The sum of each term."""
    window, rows = batch["window"], batch["window_rows"]
    error = (functional.mse_loss(outputs, batch["targets"], reduction="none") * batch["known"]).sum()
    value = row_values(outputs, batch)
    # As far above the mean of all, and as far from a line through the sorted values of all.
    above = functional.softplus(value - window[:, 0].mean()).sum()
    line = torch.linspace(-1, 1, len(window), device=window.device)[window[:, 0].argsort().argsort()[rows]]
    # Zero, where rows were computed as they are now, and each was joined once.
    drift = (value.detach() - window[rows, 0]).abs().sum() + (window[:, 1] - 1).abs().sum()
    # Rows are numbered in the order of the global batch.
    by_place = (value.detach() * rows).sum()
    return torch.stack((error, above, (value - line).square().sum(), drift, (value > 0).sum().float(), by_place))


def several(dropout: float = 0.0, names: tuple[str, ...] = ()) -> Task:
    def loss_sum(network, batch):
        for name in names:
            record(name, 1.0)
        return sums_of(network(batch["inputs"]), batch)

    def over_window(network, batch):
        value = row_values(network(batch["inputs"]), batch)
        record("never", 1.0)
        return torch.stack((value, torch.ones_like(value)), 1)

    def evaluate(network, batch):
        outputs = network(batch["inputs"])
        sums, value = sums_of(outputs, batch), row_values(outputs, batch)
        total = (outputs * batch["known"]).sum()[None]
        return torch.cat((sums, total, value.sum()[None])), torch.stack((value, batch["window_rows"].float()), 1)

    def figures(sums, values, names):
        return Figures({"largest": values[:, 0].max().item(), "places": values[:, 1].sum().item(), "whole": sums[0]})

    def build_model(recipe, data):
        torch.manual_seed(recipe.seed)
        return Recording(dropout)

    def build_skeleton(recipe, data):
        with torch.device("meta"):
            return Recording(dropout)

    return Task(
        build_data=lambda recipe, quiet: TaskData(train=Series(80, 1), validation=Series(21, 2)),
        build_model=build_model,
        build_skeleton=build_skeleton,
        loss_sum=loss_sum,
        terms=TERMS,
        window=over_window,
        evaluation=Evaluation(evaluate, (Term("output", weight=0.0),), ("largest", "places", "whole"), figures),
    )
