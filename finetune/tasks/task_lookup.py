"""The task that a recipe names."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from finetune.config.recipe_schema import Recipe
from finetune.models import lora_adapters, pretrained_files
from finetune.models.model_config import resolve_model_config
from finetune.models.networks import check_pretrained, init_weights
from finetune.tasks.causal_lm import CAUSAL_LM
from finetune.tasks.classification import SEQUENCE_CLASSIFICATION, classifier_config
from finetune.tasks.task import Task, TaskData
from finetune.utils.errors import RecipeError
from finetune.utils.import_object import import_object


def find_task(recipe: Recipe) -> Task:
    """The task that the recipe names, with the loss that it names.

    Raises:
        RecipeError: If there is none, or it is not a `Task`.
    """
    task = _find(recipe)
    if recipe.task.loss is None:
        return task
    loss = import_object(recipe.task.loss, "task.loss")
    if not callable(loss):
        raise RecipeError(f"task.loss: '{recipe.task.loss}' is {type(loss).__name__}, not a function.")
    # What counts hits computes the task's own loss by the way.
    return replace(task, loss_sum=loss, loss_and_correct=None)


def _find(recipe: Recipe) -> Task:
    name = recipe.task.name
    if name == "causal_lm":
        return CAUSAL_LM
    if name == "sequence_classification":
        return SEQUENCE_CLASSIFICATION
    found = import_object(name, "task.name")
    if not isinstance(found, Task) and callable(found):
        try:
            found = found(**recipe.task.args)
        except TypeError as error:
            raise RecipeError(f"task.args: '{name}' refuses {recipe.task.args}: {error}.") from error
    if not isinstance(found, Task):
        raise RecipeError(
            f"task.name: '{name}' is {type(found).__name__}, not a finetune.tasks.Task or a function that returns one."
        )
    return found if recipe.lora is None else _adapted(found)


def _adapted(task: Task) -> Task:
    """A custom task whose networks get adapters; the built-in ones ask for theirs when they build."""
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


def head_of(recipe: Recipe) -> lora_adapters.Head | None:
    """What a built-in task's network puts out; None for a custom task."""
    found: dict[str, lora_adapters.Head] = {
        "causal_lm": "causal_lm",
        "sequence_classification": "sequence_classification",
    }
    return found.get(recipe.task.name)


def check_task_weights(recipe: Recipe, ready: TaskData) -> pretrained_files.Weights | None:
    """The files that a built-in task's network starts from, looked at; see `networks.check_pretrained`.

    Raises:
        RecipeError: If they do not hold all of it.
    """
    head = head_of(recipe)
    return None if head is None else check_pretrained(recipe, task_config(recipe, ready), head)


def task_config(recipe: Recipe, ready: TaskData) -> Any:
    """The configuration of the network that a built-in task builds."""
    if head_of(recipe) == "sequence_classification":
        return classifier_config(recipe, ready)
    return resolve_model_config(recipe, tokenizer=ready.tokenizer)
