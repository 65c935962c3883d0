"""How a run ends: stopped, early, or with a loss that rose."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from finetune.checkpoint import best_evaluation
from finetune.checkpoint.checkpoint_store import name_of
from finetune.training.run import RECENT, BuiltRun


def nothing_left(results: dict[str, Any], num_steps: int) -> str:
    """Returns why a finished run is not continued, and how it could be."""
    ended = results.get("ended_early")
    if ended is not None:
        said = best_evaluation.early_stop_sentence(ended)
        return f"Nothing is left to do: this run {said}. Raise eval.patience, or set it to null, to continue it."
    return f"Nothing is left to do: this run ended at step {num_steps}. Raise its length to continue it."


def stop(run: BuiltRun) -> None:
    """Notes and says that a run stops because it was asked to."""
    reason = run.results["stopped"] = run.shutdown.reason or "another rank was asked to stop"
    kept = run.checkpoints.newest_address()
    saved = "with nothing to save" if kept is None else f"saved in {kept}"
    run.reporter.say(
        f"Stopped at step {run.state.step} of {run.length.num_steps} ({reason}), {saved}. The same command resumes "
        "here."
    )


def end_early(run: BuiltRun) -> None:
    """Notes and says that a run ends before its length is used up, since evaluations got no better."""
    best = run.state.best
    ended = run.results["ended_early"] = {"step": run.state.step, "best": asdict(best)}
    store, name = run.directory.checkpoints, name_of(best.step or 0)
    saved = name in store.list_names()
    where = f"The best checkpoint is {store.address(name)}" if saved else "No checkpoint was saved at the best step"
    run.reporter.say(f"This run {best_evaluation.early_stop_sentence(ended)}. {where}.")


def warn_of_rising_loss(run: BuiltRun) -> None:
    """Notes and says that the loss ended above where it began, if it did."""
    if rising := rising_loss(run.results.get("first_loss"), run.state.recent_losses):
        run.results["loss_rose"] = True
        run.reporter.warn(rising)


def rising_loss(first: float | None, recent: Sequence[tuple[int, float]]) -> str | None:
    """Returns a warning if the loss ends above where it began, else None.

    Batches differ: each of several losses at the end lies above the first, or the last and most of them by a fifth.

    Args:
        first: The loss of the run's first step.
        recent: Steps and losses of the last lines of metrics, oldest first.
    """
    later = [loss for step, loss in recent if step > 1]
    if first is None or not later:
        return None
    all_above = len(later) == RECENT and min(later) > first
    if not all_above and not min(median(later), later[-1]) > 1.2 * first:
        return None
    return (
        f"The loss ended at {later[-1]:.4g}, above the {first:.4g} that it began with: this run has made the model "
        "worse. Lower optim.lr, look at the curve (`finetune report`), and do not use what it wrote."
    )
