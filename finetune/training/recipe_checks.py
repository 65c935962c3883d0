"""Checks a recipe against a launch, before data is read or anything is started."""

import os
from collections.abc import Mapping

from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch, ResolvedConfig
from finetune.distributed.resolve_config import resolve_config
from finetune.models import float8
from finetune.optim import optimizers
from finetune.tasks.metrics import check_metrics
from finetune.tasks.task_lookup import check_task_splits


def check_recipe(recipe: Recipe, launch: Launch, env: Mapping[str, str] = os.environ) -> ResolvedConfig:
    """Returns what follows from recipe and launch, which a run, a dry run and `finetune doctor` refuse alike.

    Args:
        env: A worker's environment.

    Raises:
        FinetuneError: If they contradict each other, or this machine cannot run what is asked.
    """
    config = resolve_config(recipe, launch, env)
    check_task_splits(recipe, launch)
    check_metrics(recipe.eval.metrics)
    optimizers.check_optimizer(recipe.optim, cut=launch.cuts_state, flat=launch.flattens)
    float8.check_fp8(recipe)
    return config
