"""The loop. `steps` takes a run's steps, `train_step` is one of them."""

import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.checkpoint import best_evaluation
from finetune.checkpoint.checkpoint_store import name_of
from finetune.data.class_labels import some
from finetune.data.rows.feed import Window
from finetune.export import merge, model_card, save_model
from finetune.export.find_weights import WeightSource
from finetune.models.forward_wrapper import unwrap
from finetune.monitoring.nonfinite import spread_nonfinite
from finetune.monitoring.step_all_reduce import AsyncScalar, StepOutput, StepSync
from finetune.optim import lr_schedule
from finetune.tasks.metrics import ClassCounts
from finetune.tasks.task import Batch
from finetune.training import evaluation, generation_metrics, profiler, sampling
from finetune.training.build_run import Run
from finetune.training.peak_memory import PeakMemoryMonitor
from finetune.training.step_metrics import log_step, rising_loss
from finetune.training.weight_check import WeightCheck
from finetune.utils.to_device import batch_to_device, tensor_to_device


@dataclass(frozen=True)
class Step:
    """A step that was taken, with what is due at it done: evaluation, sample, checkpoint."""

    step: int
    """Counted from 1."""
    metrics: dict[str, Any] | None
    """The step's line of `metrics.jsonl`; None but at every `log.every_steps`."""
    validation: dict[str, float] | None
    """Figures of the evaluation at this step, named `validation_…`; None if there was none."""


def train(run: Run) -> dict[str, Any]:
    """Takes the steps that are left.

    Returns:
        The results; see `steps`.
    """
    for _ in steps(run):
        pass
    return run.results


def steps(run: Run) -> Iterator[Step]:
    """Takes the steps that are left, and evaluates, saves and writes the model as the recipe says.

    The results are in `run.results` then. After a request to stop it ends early: a checkpoint is written, and
    `stopped` of the results says why.
    """
    recipe, state, last = run.recipe, run.state, run.length.num_steps
    if run.resume.finished:
        run.reporter.say(_nothing_left(run))
        return
    with run.reporter, run.shutdown.listening():
        began = time.perf_counter()
        run.checkpoints.open(state.step, run.feed.describe(state.step))
        peak_memory = PeakMemoryMonitor(run.backend, run.weight_bytes)
        stopped = False
        if run.resume.evaluation_is_due(last):
            stopped = not evaluate_and_sample(run)
        weights = WeightCheck(run.backend, unwrap(run.model), run.reporter.say, run.reporter.warn)
        if state.step < last:
            weights.open()
        skipped = run.nonfinite.total
        while state.step < last and not stopped and not state.best.ends_run(recipe):
            lr = lr_schedule.set_learning_rates(run.optimizer, state.step, last, recipe)
            output = train_step(run, state.step)
            state.step += 1
            peak_memory.step_taken()
            look_at_profile(run)
            sync = StepSync(*output.sync.read())
            state.computed += sync.computed
            run.checkpoints.step_taken(output.step, sync)
            check_nonfinite(run, output)
            weights.step_taken(state.step, run.nonfinite.total - skipped)
            metrics = log_step(run, lr, output)
            evaluated = not sync.stop and evaluate_and_sample(run)
            stopped = not evaluated
            end = state.step if state.best.ends_run(recipe) else last
            if stopped or run.checkpoints.due(state.step, end, sync):
                run.timer.mark("aside")
                check_nonfinite(run, None)  # A checkpoint must hold no step that diverged.
                save_checkpoint(run, evaluated=evaluated, wait=stopped or state.step == end)
            # What the caller does with it is no part of a step.
            run.timer.mark("aside")
            yield Step(state.step, metrics, run.validation())
            run.timer.mark("other")
        check_nonfinite(run, None)
        weights.finish(state.step, run.nonfinite.total - skipped)
        if weights.newest is not None:
            run.results["weights"] = weights.newest.to_dict()
        run.checkpoints.finish()
        if state.best.ends_run(recipe) and state.step < last and not stopped:
            _end_early(run)
        if stopped:
            run.results["stopped"] = run.shutdown.reason or "another rank was asked to stop"
            _say_stopped(run)
        elif recipe.output.save_model and last:
            save_final_model(run)
        if not stopped and (rising := rising_loss(run.results.get("first_loss"), state.recent_losses)):
            run.results["loss_rose"] = True
            run.reporter.warn(rising)
        run.results["skipped"] = run.checkpoints.skipped
        run.results["train_s"] = time.perf_counter() - began
    measured = peak_memory.compare(recipe)
    run.directory.finish(run.backend, run.results, peak_memory=measured)


def _say_stopped(run: Run) -> None:
    kept = run.checkpoints.newest()
    saved = "with nothing to save" if kept is None else f"saved in {kept}"
    run.reporter.say(
        f"Stopped at step {run.state.step} of {run.length.num_steps} ({run.results['stopped']}), {saved}. The same "
        "command resumes here."
    )


def _end_early(run: Run) -> None:
    best = run.state.best
    ended = run.results["ended_early"] = {"step": run.state.step, "best": asdict(best)}
    store, name = run.directory.checkpoints, name_of(best.step or 0)
    saved = name in store.list_names()
    where = f"The best checkpoint is {store.address(name)}" if saved else "No checkpoint was saved at the best step"
    run.reporter.say(f"This run {best_evaluation.early_stop_sentence(ended)}. {where}.")


def _nothing_left(run: Run) -> str:
    """Why a finished run is not continued, and how it could be."""
    ended = run.results.get("ended_early")
    if ended is not None:
        said = best_evaluation.early_stop_sentence(ended)
        return f"Nothing is left to do: this run {said}. Raise eval.patience, or set it to null, to continue it."
    return f"Nothing is left to do: this run ended at step {run.length.num_steps}. Raise its length to continue it."


def train_step(run: Run, step: int) -> StepOutput:
    """One optimiser step over one global batch.

    The loss is the sum over all targets of the global batch divided by their number, over all ranks and
    micro-batches: however the batch is split, the gradient is the same. Nothing is read from the device, since that
    would make the host wait.
    """
    backend, timer = run.backend, run.timer
    if run.profiler is not None:
        run.profiler.before(step)
    window = run.feed.step(step)
    timer.mark("data")
    sync = _all_reduce_sync(run, window)
    targets = sync[0]
    # Backends average over ranks and `backward` divides by the accumulation; both are undone here.
    scale = (backend.mesh.average_size * backend.accumulation / targets.clamp(min=1)).float()
    read_later = AsyncScalar(sync)

    def scaled(loss_sum: torch.Tensor) -> torch.Tensor:
        timer.mark("backward")
        return spread_nonfinite(loss_sum, scale)

    losses = backend.forward_backward(run.model, run.task.loss_sum, _batches(run, step, window), scaled)
    timer.mark("optimizer")
    norm = backend.clip(run.model, run.recipe.optim.clip_norm)
    backend.step(run.optimizer, norm)
    backend.clear(run.optimizer)
    timer.mark("other")
    run.state.tokens += targets
    return StepOutput(
        step=step, sync=read_later, norm=AsyncScalar(norm.reshape(1)), losses=torch.stack(losses), rows=window.rows
    )


def _batches(run: Run, step: int, window: Window) -> Iterator[Batch]:
    """This rank's micro-batches of a step on its device, each seeded when it is asked for."""
    mesh, timer = run.backend.mesh, run.timer
    for index in range(len(window.rows)):
        timer.mark("data")
        batch = batch_to_device(next(window.batches), run.backend.device)
        timer.mark("forward")
        # Dropout depends on where in the global batch a micro-batch stands, not on who computes it or what came before.
        seed_torch(run.recipe.seed, step, index * mesh.average_size + mesh.average_rank)
        yield batch


def seed_torch(*parts: int) -> None:
    """Seeds torch from whole numbers, so that randomness has no history.

    Source: numpy's SeedSequence, whose mixing is fixed for all versions.
    """
    seed = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
    # What torch.manual_seed does, which writes down a stack trace for each kind of device that is not there.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _all_reduce_sync(run: Run, window: Window) -> torch.Tensor:
    """The one all-reduce of a step: what all ranks tell each other, as `StepSync`."""
    counts = run.backend.mesh.counts_rows
    sync = StepSync(
        targets=counts * window.num_targets,
        computed=counts * window.num_computed,
        rows=counts * window.checksum,
        stop=float(run.shutdown.requested),
        **run.checkpoints.sync_flags(),
    )
    return run.backend.all_reduce_sum(
        tensor_to_device(torch.tensor(astuple(sync), dtype=torch.float64), run.backend.device)
    )


def look_at_profile(run: Run) -> None:
    """Shows the profile of the steps that were profiled, and counts what the last step compiled."""
    if run.profiler is not None:
        found = run.profiler.after(run.state.step - 1)
        if found is not None:
            run.reporter.say(f"profile of {found['steps']} steps:\n{profiler.table(found)}")
    if run.compiled_graphs is not None and run.compiled_graphs.grew():
        # The time of a step that compiled says nothing of the next.
        run.timer.totals()
        run.state.log_here()
        run.results["compiled_graphs"] = run.compiled_graphs.count


def check_nonfinite(run: Run, output: StepOutput | None) -> None:
    """Looks at the step before, whose numbers are there by now; None looks at the newest.

    Raises:
        DivergedError: If too many steps in a row were skipped.
    """
    incident = run.nonfinite.check(output)
    if incident is None:
        return
    run.checkpoints.incident(incident)
    counts = ", ".join(f"{count} {kind}" for kind, count in run.nonfinite.counts.items() if count)
    run.reporter.warn(
        f"step {incident['step']} was skipped on all ranks: {incident['kind']} (skipped so far: {counts})"
    )
    if incident["fatal"]:
        run.checkpoints.finish()
        raise run.nonfinite.diverged(incident, run.checkpoints.newest())


def evaluate_and_sample(run: Run) -> bool:
    """Evaluates and samples where that is due; False if a request to stop came in between."""
    recipe, step = run.recipe, run.state.step

    def due(every: int | None, at_end: bool) -> bool:
        if step == run.length.num_steps or run.state.best.ends_run(recipe):
            return at_end
        return every is not None and step % every == 0

    evaluates = run.data.validation is not None or run.prompts
    if evaluates and due(recipe.eval.every_steps, recipe.eval.at_end) and not _evaluate(run):
        return False
    if recipe.sample is not None and due(recipe.sample.every_steps, recipe.sample.at_end):
        run.timer.mark("aside")
        text = sampling.sample_text(run.backend, run.model, recipe, run.data.tokenizer, run.data.ends)
        run.reporter.log({"step": step, "sample": text})
        run.reporter.say(f"step {step}: sample\n{text}\n")
        run.results["sample"] = text
    return True


def _evaluate(run: Run) -> bool:
    run.timer.mark("aside")
    recipe, rows, step = run.recipe, run.data.validation, run.state.step

    def stopped() -> bool:
        requested = torch.tensor([float(run.shutdown.requested)], device=run.backend.device)
        return run.backend.all_reduce_sum(requested).item() > 0

    counts: ClassCounts | None = None
    figures: dict[str, float] | None = {}
    if rows is not None:
        micro, classes = recipe.eval.micro_size or recipe.batch.rows, None
        named = run.task.labelled and run.task.loss_and_correct is not None
        if named or (run.metrics and not run.task.text):
            classes = torch.zeros(2, len(rows), dtype=torch.int64, device=run.backend.device)
        figures = evaluation.evaluate(run.backend, run.model, run.task, rows, micro, stopped=stopped, classes=classes)
        if figures is not None and classes is not None and named:
            counts = ClassCounts.of(classes, len(run.data.label_names))
            figures["recall_macro"] = counts.recall_macro
        if figures is not None and classes is not None and run.metrics:
            figures |= generation_metrics.of_classes(run, rows, classes)
    if figures is not None and run.prompts:
        found = generation_metrics.of_texts(run)
        figures = None if found is None else figures | found
    if figures is None:
        return False
    values = {f"validation_{key}": value for key, value in figures.items()}
    run.reporter.log({"step": step, **values})
    run.results |= values
    run.state.last_evaluation = {"step": step, **values}
    run.state.best.note(step, values)
    shown = ", ".join(
        f"{key} {value:,.4f}" if abs(value) < 1e9 else f"{key} {value:.3g}"
        for key, value in figures.items()
        if key != "targets"
    )
    over = f" over {figures['targets']:,.0f} targets" if rows is not None else ""
    run.reporter.say(f"step {step}: validation {shown}{over}")
    if counts is not None:
        _show_classes(run, counts)
    return True


def _show_classes(run: Run, counts: ClassCounts) -> None:
    """Says what became of each class: a share of all rows hides those that have few."""
    found = counts.by_name(run.data.label_names)
    run.results["classes"] = found
    held = {name: class_ for name, class_ in found.items() if class_["rows"]}
    shown = [f"{name} {c['recall']:.1%} of {c['rows']:,} (predicted {c['predicted']:,})" for name, c in held.items()]
    run.reporter.say(f"  recognised: {some(shown)}")
    never = [f"{name} ({class_['rows']:,} rows)" for name, class_ in held.items() if not class_["predicted"]]
    if never:
        run.reporter.warn(f"step {run.state.step}: no row is taken for the class {some(never)}.")


def save_checkpoint(run: Run, *, evaluated: bool, wait: bool) -> None:
    """Saves a checkpoint of the state after the last step.

    Args:
        evaluated: Whether evaluation and samples that were due at this step are done.
        wait: Whether the checkpoint must be there before this returns.
    """
    state = {
        **run.state.to_dict(),
        **run.feed.state_dict(run.state.step),
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


def save_final_model(run: Run) -> None:
    """Writes the trained network, in the format that transformers opens, into the run directory."""
    path = run.directory.path / "model"
    build = run.task.build_skeleton
    with run.backend.loading(pretrained=False):
        skeleton = build(run.recipe, run.data) if build is not None else None
        save_model.save_model(run.backend, run.model, skeleton, run.data.tokenizer, path, partial(_write_card, run))
    run.results["model"] = str(path)
    run.reporter.say(f"model written to {path}")


def _write_card(run: Run, folder: Path) -> None:
    facts = {**run.directory.facts(), "results": run.results}
    source = WeightSource(run.directory.path, folder, run.state.step, run.recipe, facts)
    model_card.write_model_card(folder, source, "model", [], merge.base_folder(run.recipe), run.task.head)
