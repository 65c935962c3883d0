"""What a launcher tells of a run whose rank 0 could not."""

import argparse
from collections.abc import Sequence

from finetune.config.recipe import load_recipe
from finetune.monitoring.alerts import send_alert, warn_unsent
from finetune.tasks.task_lookup import BUILT_IN
from finetune.training.entry_point import add_recipe_arguments
from finetune.utils.errors import RecipeError


def send_alert_of_failure(arguments: Sequence[str], text: str) -> None:
    """Sends an alert that a run has failed, if its recipe asks for alerts.

    Args:
        arguments: Those of the run's workers.
        text: How it has failed.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_recipe_arguments(parser)
    parsed, _ = parser.parse_known_intermixed_args(arguments)
    try:
        recipe = load_recipe(parsed.recipe, parsed.overrides, BUILT_IN, quiet=True)
    except RecipeError as error:  # changed, or moved, since the run began: how it ended is told all the same
        warn_unsent("failed", str(error))
        return
    send_alert(recipe.guard, "failed", text, {"run": str(recipe.output.dir)}, wait=True)
