"""The best evaluation so far, and the end of a run in which none has been better for a while."""

import math
from dataclasses import dataclass
from typing import Any

from finetune.config.recipe_schema import Recipe, ranking


@dataclass
class BestEvaluation:
    """The best evaluation by `checkpoint.keep_best_by`; checkpoints store it, so that a resumed run ends where it would
    have ended."""

    by: str | None
    """`checkpoint.keep_best_by`."""
    step: int | None = None
    value: float | None = None
    evaluations: int = 0
    """How many followed that were no better."""

    @classmethod
    def resumed(cls, recipe: Recipe, saved: dict[str, Any] | None) -> "BestEvaluation":
        """Returns it as a checkpoint left it; a new one if the recipe names another key by now."""
        by = recipe.checkpoint.keep_best_by
        return cls(**saved) if saved is not None and saved["by"] == by else cls(by)

    def note(self, step: int, values: dict[str, float]) -> None:
        """Takes in an evaluation, by the keys of `metrics.jsonl`."""
        if self.by is None:
            return
        key, sign = ranking(self.by)
        value = values.get(key, math.nan)
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            self.step, self.value, self.evaluations = step, value, 0
        else:
            self.evaluations += 1

    def ends_run(self, recipe: Recipe) -> bool:
        """Returns whether the run's patience is at its end."""
        return recipe.eval.patience is not None and self.evaluations >= recipe.eval.patience


def still_ended(recipe: Recipe, results: dict[str, Any]) -> bool:
    """Returns whether a finished run that ended early, as its results say, is at its end under this recipe too."""
    ended = results.get("ended_early")
    return ended is None or BestEvaluation.resumed(recipe, ended["best"]).ends_run(recipe)


def early_stop_sentence(ended: dict[str, Any]) -> str:
    """Returns why a run ended early, for people, from the results' `ended_early`."""
    best = BestEvaluation(**ended["best"])
    key = ranking(best.by or "")[0]
    than = f"than {best.value:.4f} at step {best.step:,}" if best.value is not None else "so far"
    return (
        f"ended early at step {ended['step']:,}: no better {key} {than} in {best.evaluations} evaluations in a row "
        "(eval.patience)"
    )
