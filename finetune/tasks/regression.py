"""Regression: one number a row, by the squared error. Letters as in `task`."""

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from finetune.config.recipe import NUMBER_FIGURES
from finetune.config.recipe_schema import Recipe
from finetune.data.rows.kinds import numbers
from finetune.models.model_config import resolve_model_config
from finetune.tasks.build_task import transformers_task
from finetune.tasks.classification import HEAD, class_scores, set_padding
from finetune.tasks.metrics import figures_of_numbers
from finetune.tasks.task import Batch, Evaluation, TaskData


def number_config(recipe: Recipe, ready: TaskData | None) -> PretrainedConfig:
    """Returns the configuration of a network that gives a number."""
    tokenizer = ready.tokenizer if ready else None
    config = resolve_model_config(
        recipe, HEAD, tokenizer=tokenizer, vocab_size=recipe.tokenizer.vocab_size, num_labels=1
    )
    config.problem_type = "regression"
    if tokenizer is not None:
        set_padding(config, tokenizer)
    return config


def _loss_sum(network: nn.Module, batch: Batch) -> torch.Tensor:
    return _squared_error(class_scores(network, batch), batch)


def _squared_error(numbers: torch.Tensor, batch: Batch) -> torch.Tensor:
    return functional.mse_loss(numbers[:, 0], batch["targets"].float(), reduction="sum")


def _evaluate(network: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = class_scores(network, batch)
    return _squared_error(numbers, batch).reshape(1), torch.stack((numbers[:, 0], batch["targets"].float()), 1)


REGRESSION = transformers_task(
    HEAD,
    number_config,
    numbers.KIND,
    loss_sum=_loss_sum,
    evaluation=Evaluation(_evaluate, figures=NUMBER_FIGURES, figures_of=figures_of_numbers),
    scores=class_scores,
)
