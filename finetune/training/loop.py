"""The loop. `steps` takes a run's steps, `train_step` is one of them."""

import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from finetune.data.rows.feed import Window
from finetune.distributed.rank_notes import failures_told
from finetune.models.embedding_noise import with_noise
from finetune.models.forward_wrapper import unwrap
from finetune.monitoring.machine_sampler import sample_machines
from finetune.monitoring.nonfinite import spread_nonfinite
from finetune.monitoring.step_all_reduce import AsyncScalar, StepOutput, StepSync
from finetune.optim import lr_schedule
from finetune.tasks.evaluate_rows import with_window
from finetune.tasks.task import Batch
from finetune.training import finish_run
from finetune.training.built_run import BuiltRun
from finetune.training.evaluate_run import evaluate_and_sample
from finetune.training.step_metrics import PeakMemoryMonitor, check_nonfinite, log_epoch, log_step, look_at_profile
from finetune.training.weight_check import WeightCheck
from finetune.utils.recorded_figures import Totals, recording
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


def train(run: BuiltRun) -> dict[str, Any]:
    """Takes the steps that are left, and returns the results; see `steps`."""
    for _ in steps(run):
        pass
    return run.results


def steps(run: BuiltRun) -> Iterator[Step]:
    """Takes the steps that are left, and evaluates, saves and writes the model as the recipe says.

    The results are in `run.results` then. After a request to stop it ends early: a checkpoint is written, and
    `stopped` of the results says why.
    """
    with run.watch:
        if run.resume.finished:
            run.reporter.say(finish_run.nothing_left(run.results, run.length.num_steps))
            return
        with finish_run.alerts_at_end(run):
            yield from _take_steps(run)
        run.backend.barrier()


def _take_steps(run: BuiltRun) -> Iterator[Step]:
    recipe, state, last = run.recipe, run.state, run.length.num_steps
    sampling = sample_machines(
        run.backend, run.directory.path, recipe.log.system_every_s, lambda: state.step, run.reporter.log_machine
    )
    with run.reporter, run.shutdown.listening(), sampling, failures_told():
        run.watch.mark("other")
        began = time.perf_counter()
        run.checkpoints.note_start(state.step, run.feed.describe(state.step))
        peak_memory = PeakMemoryMonitor(run.backend, run.weight_bytes)
        stopped = run.resume.evaluation_is_due(last) and not evaluate_and_sample(run)
        weights = WeightCheck(run.backend, unwrap(run.model), run.reporter)
        if state.step < last:
            weights.open()
        skipped = run.nonfinite.total
        while state.step < last and not stopped and not state.best.ends_run(recipe):
            lr = lr_schedule.set_learning_rates(run.optimizer, state.step, last, recipe)
            output = train_step(run, state.step)
            state.step += 1
            run.watch.step_taken(state.step)
            peak_memory.step_taken()
            look_at_profile(run)
            sync, _ = output.read_sync()
            state.computed += sync.computed
            run.checkpoints.step_taken(output.step, sync)
            check_nonfinite(run, output)
            weights.step_taken(state.step, run.nonfinite.total - skipped)
            metrics = log_step(run, lr, output)
            log_epoch(run)
            evaluated = not sync.stop and evaluate_and_sample(run)
            stopped = not evaluated
            end = state.step if state.best.ends_run(recipe) else last
            due = sync.save > 0 or run.is_due(recipe.checkpoint.every_steps, recipe.checkpoint.per_epoch)
            due |= recipe.output.model == "best" and state.best.step == state.step < end
            if stopped or (recipe.checkpoint.at_end if state.step == end else due):
                run.timer.mark("aside")
                check_nonfinite(run, None)  # A checkpoint must hold no step that diverged.
                finish_run.save_checkpoint(run, evaluated=evaluated, wait=stopped or state.step == end)
            # What the caller does with it is no part of a step.
            run.timer.mark("caller")
            evaluation = {key: value for key, value in state.evaluation.items() if key != "step"}
            yield Step(state.step, metrics, evaluation or None)
            run.timer.mark("other")
        run.timer.mark("aside")
        check_nonfinite(run, None)
        weights.finish(state.step, run.nonfinite.total - skipped)
        if weights.newest is not None:
            run.results["weights"] = weights.newest.to_dict()
        run.checkpoints.finish()
        if stopped:
            finish_run.note_stop(run)
        else:
            if state.step < last:
                finish_run.note_early_end(run)
            if recipe.output.save_model and last:
                finish_run.save_final_model(run)
            if rising := finish_run.rising_loss(run.results.get("first_loss"), state.recent_losses):
                run.results["loss_rose"] = True
                run.reporter.warn(rising)
            elif "model" in run.results:
                run.reporter.say(finish_run.next_commands(run))
        run.results["skipped"] = run.checkpoints.skipped
        run.results["train_s"] = time.perf_counter() - began
    measured = peak_memory.compare(recipe)
    run.directory.finish(run.backend, run.results, peak_memory=measured)


def train_step(run: BuiltRun, step: int) -> StepOutput:
    """One optimiser step over one global batch.

    The loss is the sum over all targets of the global batch divided by their number, over all ranks and
    micro-batches, and of several terms the weighted sum: however the batch is split, the gradient is the same. Nothing
    is read from the device, since that would make the host wait.
    """
    backend, timer, task = run.backend, run.timer, run.task
    if run.profiler is not None:
        run.profiler.before(step)
    window = run.feed.step(step)
    timer.mark("data")
    sync = _all_reduce_sync(run, window)
    counts = sync[-len(task.terms) :]
    # Backends average over ranks and `backward` divides by the accumulation; both are undone here.
    size = backend.mesh.average_size * backend.accumulation
    weights = [term.weight for term in task.terms if term.weight]
    # A sum of weights may be less than 1.
    divisors = torch.where(counts > 0, counts, 1)
    scale = torch.stack([weights[k] * size / divisors[k] for k in range(len(weights))]).float()
    read_later, recorded = AsyncScalar(sync), Totals()
    batches = window.batches if task.window is None else _pass_over_window(run, step, window)

    def scaled(sums: torch.Tensor) -> torch.Tensor:
        timer.mark("backward")
        return spread_nonfinite(sums, scale)

    loss_sum = recording(task.loss_sum, recorded)
    losses = backend.forward_backward(run.model, loss_sum, _sent(run, step, window, batches), scaled)
    timer.mark("optimizer")
    norm = backend.clip(run.model, run.recipe.optim.clip_norm)
    backend.step(run.optimizer, norm)
    if run.average is not None:
        run.average.update(norm, step)
    backend.clear(run.optimizer)
    timer.mark("other")
    run.state.tokens += sync[0]
    each = torch.stack(losses).reshape(len(losses), -1)
    sums = each.double().sum(0)
    # Of a step that is skipped, nothing counts.
    totals = torch.cat([sums, counts])
    finite = torch.isfinite(norm.reshape(1))
    # With the optimiser on the host, the norm is there too.
    finite = tensor_to_device(finite, backend.device) if finite.is_cpu else finite
    run.state.epoch_sums += torch.where(finite, totals, 0.0)
    learned = each[:, : len(weights)].sum(1)
    return StepOutput(step, read_later, AsyncScalar(norm.reshape(1)), learned, window.rows, sums, recorded)


def _places(run: BuiltRun, window: Window) -> np.ndarray:
    """Returns the number in the global batch of each of this rank's rows of a step, by micro-batches."""
    mesh, size = run.backend.mesh, run.recipe.batch.global_size
    return np.arange(size).reshape(len(window.rows), mesh.data_size, -1)[:, mesh.data_rank]


def _sent(run: BuiltRun, step: int, window: Window, batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[Batch]:
    """Yields this rank's micro-batches of a step on its device, each seeded when it is asked for."""
    mesh, alpha = run.backend.mesh, run.recipe.model.neftune_alpha
    for index in range(run.backend.accumulation):
        run.timer.mark("data")
        batch = next(batches)
        if alpha is not None:
            widths = getattr(run.data.train, "widths", None)
            of_rows = None if widths is None else widths[window.rows[index]]
            batch = with_noise(batch, alpha, (run.recipe.seed, step), _places(run, window)[index].tolist(), of_rows)
        sent: Batch = batch_to_device(batch, run.backend.device)
        run.timer.mark("forward")
        sent = run.join(sent)
        # Dropout depends on where in the global batch a micro-batch stands, not on who computes it or what came before.
        seed_torch(run.recipe.seed, step, index * mesh.average_size + mesh.average_rank)
        yield sent


def _pass_over_window(run: BuiltRun, step: int, window: Window) -> Iterator[dict[str, torch.Tensor]]:
    """Returns this rank's micro-batches with what the task's `window` gives for all rows of the global batch.

    The network computes as it does when it learns, and with the same random numbers: dropout masks are those of the
    pass that follows, so that a row's value there is the one here.
    """
    given, size = zip(_places(run, window), window.batches, strict=True), run.recipe.batch.global_size
    whole = with_window(run.backend, run.model, run.task, given, size, partial(_sent, run, step, window))
    return (batch for _, batch in whole)


def seed_torch(*parts: int) -> None:
    """Seeds torch from whole numbers, so that randomness has no history.

    Source: numpy's SeedSequence, whose mixing is fixed for all versions.
    """
    seed = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
    # What torch.manual_seed does, which writes down a stack trace for each kind of device that is not there.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _all_reduce_sync(run: BuiltRun, window: Window) -> torch.Tensor:
    """The one all-reduce of a step: what all ranks tell each other; see `StepOutput.sync`."""
    here = run.backend.mesh.counts_rows
    sync = StepSync(
        targets=here * window.num_targets,
        computed=here * window.num_computed,
        rows=here * window.checksum,
        stop=float(run.shutdown.requested),
        **run.checkpoints.sync_flags(),
    )
    numbers = [*astuple(sync), *(here * window.counts[term.counts] for term in run.task.terms)]
    return run.backend.all_reduce_sum(tensor_to_device(torch.tensor(numbers, dtype=torch.float64), run.backend.device))
