"""The best evaluation so far, and the end of a run in which none has been better for a while."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.recipe_schema import Recipe, ranking


@dataclass
class BestEvaluation:
    """The best evaluation by `checkpoint.keep_best_by`; checkpoints store it, so that a resumed run ends where it would
    have ended."""

    by: str | None
    step: int | None = None
    value: float | None = None
    evaluations: int = 0
    """How many followed that were no better."""
    loss: float | None = None
    """Its validation loss."""

    @classmethod
    def resumed(cls, recipe: Recipe, saved: dict[str, Any] | None) -> "BestEvaluation":
        """Returns it as a checkpoint left it; a new one if the recipe names another key by now."""
        by = recipe.checkpoint.keep_best_by
        return cls(**saved) if saved is not None and saved["by"] == by else cls(by)

    def note(self, step: int, values: dict[str, float]) -> None:
        """Takes in an evaluation, by the keys of `metrics.jsonl`."""
        if self.by is None:
            return
        key, rank = ranking(self.by)[0], rank_of(self.by, values)
        best = rank_of(self.by, {"validation_loss": self.loss, key: self.value})
        if rank is not None and (best is None or rank > best):
            self.step, self.value, self.evaluations = step, values[key], 0
            self.loss = values.get("validation_loss")
        else:
            self.evaluations += 1

    def ends_run(self, recipe: Recipe) -> bool:
        """Returns whether the run's patience is at its end."""
        return recipe.eval.patience is not None and self.evaluations >= recipe.eval.patience


def rank_of(best_by: str, values: Mapping[str, Any]) -> tuple[float, float] | None:
    """Returns what orders evaluations, the highest being the best: the value, and of equals the loss.

    Args:
        best_by: As `checkpoint.keep_best_by` has it.
        values: By the keys of `metrics.jsonl`.

    Returns:
        None if the value is missing or not finite.
    """
    key, sign = ranking(best_by)
    value, loss = (values[name] if values.get(name) is not None else math.nan for name in (key, "validation_loss"))
    return (sign * value, -loss if math.isfinite(loss) else -math.inf) if math.isfinite(value) else None


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
