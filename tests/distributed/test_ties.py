"""Tensors that a network shares stay one when it is wrapped."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import ONE_RANK
from torch import nn

from finetune.distributed.backend import Backend
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.strategies import strategy
from finetune.utils.errors import BackendError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def prepared(untie: bool) -> None:
    def prepare_model(model: Any, evaluation_mode: bool) -> Any:
        if untie:
            # What accelerate 1.14 comes to, which shards the ends one after the other.
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        return model

    accelerator: Any = SimpleNamespace(prepare_model=prepare_model, prepare_optimizer=lambda optimizer: optimizer)
    network = Tied()
    backend = Backend(accelerator, Launch("single", 1), strategy.STRATEGY, ONE_RANK, "fp32", 1)
    backend.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))


def test_ties_that_break_are_seen_before_the_first_step() -> None:
    prepared(untie=False)
    with pytest.raises(BackendError, match=r"head\.weight had no tensor of its own, .* accelerate"):
        prepared(untie=True)
