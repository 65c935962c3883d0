"""Tasks whose networks are transformers', and adapters for those of others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from finetune.config.recipe_schema import Recipe
from finetune.models import lora_adapters, pretrained_files
from finetune.models.build_network import build_meta_model, build_model, check_pretrained, init_weights
from finetune.models.heads import Head
from finetune.tasks.task import Task, TaskData


def transformers_task(
    head: Head, build_config: Callable[[Recipe, TaskData | None], PretrainedConfig], **fields: Any
) -> Task:
    """A task that trains the recipe's model with a head.

    Args:
        build_config: To the network's configuration.
        fields: Those of `Task` that are left: data, loss, and what it says of itself.
    """
    return Task(
        build_model=lambda recipe, ready: build_model(recipe, build_config(recipe, ready), head),
        build_skeleton=lambda recipe, ready: build_meta_model(build_config(recipe, ready), head, recipe),
        head=head,
        build_config=build_config,
        **fields,
    )


def adapted_task(task: Task) -> Task:
    """A task without a head whose networks get adapters; those with one ask for theirs when they build."""
    build_skeleton = task.build_skeleton

    def model(recipe: Recipe, ready: TaskData) -> nn.Module:
        # With weights first: adapters may be computed from them.
        return lora_adapters.attach(init_weights(task.build_model(recipe, ready), recipe.seed), recipe)

    def skeleton(recipe: Recipe, ready: TaskData | None) -> nn.Module:
        assert build_skeleton is not None
        network = build_skeleton(recipe, ready)
        with torch.device("meta"):
            return lora_adapters.attach(network, recipe)

    return replace(task, build_model=model, build_skeleton=skeleton if build_skeleton is not None else None)


def check_task_weights(task: Task, recipe: Recipe, ready: TaskData) -> pretrained_files.Weights | None:
    """The files that the recipe's network starts from, looked at; see `build_network.check_pretrained`.

    Raises:
        RecipeError: If they do not hold all of it.
    """
    if task.head is None or task.build_config is None:
        return None
    return check_pretrained(recipe, task.build_config(recipe, ready), task.head)
