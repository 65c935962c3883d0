"""Saves what a run has trained, as it goes and at its end, and says how it ended."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from finetune.checkpoint import best_evaluation, resume_point
from finetune.checkpoint.checkpoint_store import name_of
from finetune.checkpoint.resume_point import ResumePoint
from finetune.checkpoint.run_facts import read_facts
from finetune.checkpoint.run_fingerprint import base_folder
from finetune.config.recipe_schema import Event
from finetune.export import model_card, save_model
from finetune.export.find_weights import WeightSource
from finetune.models.forward_wrapper import unwrap
from finetune.models.pretrained_files import unknown_processor, write_beside
from finetune.monitoring.alerts import send_alert
from finetune.training.built_run import RECENT, BuiltRun
from finetune.utils.errors import CheckpointError, DivergedError, FinetuneError
from finetune.utils.exit_codes import lost_peer
from finetune.utils.quoting import shell_word

# Results that an alert tells.
_FIGURES = ("train_loss", "validation_loss")
# Before so many, a loss says little about a run.
_ENOUGH_STEPS = 20


def save_checkpoint(run: BuiltRun, *, evaluated: bool, wait: bool) -> None:
    """Saves a checkpoint of the state after the last step.

    Args:
        evaluated: Whether evaluation and samples that were due at this step are done.
        wait: Whether the checkpoint must be there before this returns.
    """
    state = {
        **run.state.to_dict(),
        **run.feed.state_dict(run.state.step),
        "epoch_sums": run.epoch_totals(),
        "scaler": run.backend.scaler_state(),
        "skipped": run.nonfinite.state,
        "looked_at": evaluated,
        "results": dict(run.results),  # It is written while training continues.
        "identity": run.identity,
        "recipe": run.recipe.model_dump(mode="json"),
        "backend": run.backend.launch.kind,
        "processes": run.backend.world_size,
        "precision": run.backend.precision,
    }
    run.checkpoints.save(unwrap(run.model), run.optimizer, state, must=wait)


def save_final_model(run: BuiltRun) -> None:
    """Writes the network that the recipe asks for, in the format that transformers opens, into the run directory.

    Every rank must call it. The network has the weights of the best evaluation then, if these are asked for. What is
    written is what is evaluated: averages, if the recipe asks for these.

    Raises:
        CheckpointError: If it cannot be written, or the best evaluation's weights are not there.
    """
    directory, recipe, build = run.directory, run.recipe, run.task.build_skeleton
    step, figures, restored = run.state.step, run.results, False
    if recipe.output.model == "best" and run.state.best.step != step:
        best, restored = _restore_best(run), True
        step, figures = (
            best.step,
            figures | {key: value for key, value in best.state.items() if key.startswith("validation_")},
        )

    def add_rest(folder: Path) -> None:
        write_beside(folder, run.beside)
        facts = {**read_facts(directory.path), "results": figures}
        source = WeightSource(directory.path, folder, step, recipe, facts)
        model_card.write_model_card(folder, source, "model", [], base_folder(recipe.model), run.task.head)

    path = directory.path / "model"
    weights = nullcontext() if restored else run.backend.evaluated_weights(unwrap(run.model))
    with weights, run.backend.loading(pretrained=False):
        skeleton = build(recipe, run.data) if build is not None else None
        save_model.save_model(run.backend, run.model, skeleton, run.data.tokenizer, path, add_rest)
    run.results |= {"model": str(path), "model_step": step}
    of = "" if step == run.state.step else f", of step {step}, the best evaluation by {run.state.best.by}"
    run.reporter.say(f"model written to {path}{of}")
    if run.task.head is not None and (warning := unknown_processor(recipe.model, path)) is not None:
        run.reporter.say(warning)


def _restore_best(run: BuiltRun) -> ResumePoint:
    """Fills the network with the weights of the best evaluation."""
    best, own = run.state.best, run.directory.checkpoints
    name, stores = name_of(best.step or 0), [own, run.resume.store]
    # As rank 0 sees it: another machine's view of a shared folder may lag behind.
    place: int | None = run.backend.broadcast_object(
        next((n for n, store in enumerate(stores) if store is not None and name in store.list_names()), None)
    )
    store = None if place is None else stores[place]
    if best.step is None or store is None:
        lacks = "no evaluation was finite" if best.step is None else f"the checkpoint of step {best.step} is not there"
        raise CheckpointError(
            f"output.model: best, but {lacks}, by {best.by}. No model is written. `finetune export "
            f"{run.directory.path} --as merged` writes the last checkpoint's, and with --step another's."
        )
    point = replace(resume_point.verify_on_all_ranks(store, name, run.backend), keep_optimizer=False)
    point.restore(run.backend, unwrap(run.model), run.optimizer, evaluated=True)
    return point


def next_commands(run: BuiltRun) -> str:
    """Returns what can be done with the model that a run has written, for people."""
    task, place = run.task, shell_word(str(run.directory.path))
    if task.head is None:
        return f"Next:\n  finetune report {place}"
    use = f"chat {place}" if run.recipe.chat is not None else f"generate {place} --prompt TEXT"
    if task.rows.one_document or task.rows.gives_scores:
        use = f"predict {place} FILE"
    kind = "merged-16bit" if run.recipe.lora is None else "merged-16bit  # or adapter"
    return "\n  finetune ".join(("Next:", use, f"eval {place} --data FILE", f"export {place} --as {kind}"))


def nothing_left(results: dict[str, Any], num_steps: int) -> str:
    """Returns why a finished run is not continued, and how it could be."""
    ended, change = f"ended at step {num_steps}", "Raise its length"
    if (early := results.get("ended_early")) is not None:
        ended, change = best_evaluation.early_stop_sentence(early), "Raise eval.patience, or set it to null,"
    return f"Nothing is left to do: this run {ended}. {change} to continue it."


def note_stop(run: BuiltRun) -> None:
    """Notes and says that a run stops because it was asked to."""
    run.results["stopped"] = run.shutdown.reason or "another rank was asked to stop"
    run.reporter.say(_stop_sentence(run))


def _stop_sentence(run: BuiltRun) -> str:
    kept = run.checkpoints.newest_address()
    saved = "with nothing to save" if kept is None else f"saved in {kept}"
    at = f"step {run.state.step} of {run.length.num_steps} ({run.results['stopped']})"
    return f"Stopped at {at}, {saved}. The same command resumes here."


def note_early_end(run: BuiltRun) -> None:
    """Notes and says that a run ends before its length is used up, since evaluations got no better."""
    best = run.state.best
    ended = run.results["ended_early"] = {"step": run.state.step, "best": asdict(best)}
    store, name = run.directory.checkpoints, name_of(best.step or 0)
    saved = name in store.list_names()
    where = f"The best checkpoint is {store.address(name)}" if saved else "No checkpoint was saved at the best step"
    run.reporter.say(f"This run {best_evaluation.early_stop_sentence(ended)}. {where}.")


def rising_loss(first: float | None, recent: Sequence[tuple[int, float]]) -> str | None:
    """Returns a warning if the loss ends above where it began, else None.

    Batches differ, and a learning rate warms up: after some steps, several losses lie above the first by more than they
    differ, or the last and most of them by a fifth.

    Args:
        first: The loss of the run's first step.
        recent: Steps and losses of the last lines of metrics, oldest first.
    """
    later = [loss for step, loss in recent if step > 1]
    if first is None or not later or recent[-1][0] < _ENOUGH_STEPS:
        return None
    all_above = len(later) == RECENT and min(later) - first > max(later) - min(later)
    if not all_above and not min(median(later), later[-1]) > 1.2 * first:
        return None
    return (
        f"The loss ended at {later[-1]:.4g}, above the {first:.4g} that it began with: this run has made the model "
        "worse. Lower optim.lr, look at the curve (`finetune report`), and do not use what it wrote."
    )


@contextmanager
def alerts_at_end(run: BuiltRun) -> Iterator[None]:
    """Sends an alert of how the run ends inside, on rank 0 and if the recipe asks for alerts."""
    if run.recipe.guard.alert is None or not run.backend.is_main:
        yield
        return

    def send(event: Event, text: str) -> None:
        facts = {"run": str(run.directory.path), "step": run.state.step, "num_steps": run.length.num_steps}
        facts |= {key: run.results[key] for key in _FIGURES if key in run.results}
        send_alert(run.recipe.guard, event, text, facts, wait=True)

    try:
        yield
    except Exception as error:
        run.watch.give_way()  # and send no second alert
        kinds: dict[type[Exception], Event] = {DivergedError: "diverged", CheckpointError: "write_failed"}
        text = str(error) if isinstance(error, FinetuneError) else f"{type(error).__name__}: {error}"
        if lost_peer(error):
            text = f"Another rank is gone; the log of the launch says which. {text[:200]}"
        send(kinds.get(type(error), "failed"), text)
        raise
    with run.shutdown.saved():
        if "stopped" in run.results:
            send("stopped", _stop_sentence(run))
            return
        read = {key.replace("_", " "): run.results[key] for key in _FIGURES if run.results.get(key) is not None}
        figures = ", ".join(f"{name} {value:.4f}" for name, value in read.items()) or "no loss was read"
        early = run.results.get("ended_early")
        ended = best_evaluation.early_stop_sentence(early) if early else f"ended at step {run.state.step}"
        rose = " The loss ended above where it began." if run.results.get("loss_rose") else ""
        send("finished", f"This run {ended}; {figures}.{rose}")
