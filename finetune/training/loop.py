"""The loop. `train` takes a run's steps, `train_step` is one of them."""

import math
import time
from dataclasses import astuple
from typing import Any

import numpy as np
import torch

from finetune.checkpoint import row_ledger
from finetune.data.rows.row_order import rows_at
from finetune.export import save_model
from finetune.models.forward_wrapper import unwrap
from finetune.monitoring.flops import peak_flops
from finetune.monitoring.metrics import peak_memory_gib
from finetune.monitoring.step_sync import AsyncScalar, StepOutput, StepSync
from finetune.optim import lr_schedule
from finetune.training import evaluation, profiler, sampling
from finetune.training.build_run import Run
from finetune.training.peak_memory import PeakMemoryMonitor
from finetune.training.seeding import seed_torch


def train(run: Run) -> dict[str, Any]:
    """Takes the steps that are left, and evaluates, saves and writes the model as the recipe says.

    Returns:
        The results. After a request to stop it returns early: a checkpoint is written, and `stopped` says why.
    """
    recipe, last, begin = run.recipe, run.length.num_steps, run.begin
    if begin.finished:
        run.reporter.say(f"Nothing is left to do: this run ended at step {last}. Raise its length to go on from there.")
        return run.results
    with run.reporter, run.stopper.listening():
        began = time.perf_counter()
        run.keeper.open(step=begin.step, position=begin.position, order=_order(run))
        stop = begin.must_look(last) and not _look_at(run, begin.step)
        gauge = PeakMemoryMonitor(run.backend, run.held)
        for step in range(last if stop else begin.step, last):
            lr = lr_schedule.set_learning_rates(run.optimizer, step, last, recipe)
            taken = train_step(run, step)
            gauge.took()
            _look_inside(run, step)
            done, signs = step + 1, StepSync(*taken.signs.read())
            run.computed += signs.computed
            run.keeper.took(step, signs)
            _check(run, taken)
            run.reporter.step(done, _log(run, done, lr, taken) if _due(recipe.log.every_steps, done, last) else None)
            looked = not signs.stop and _look_at(run, done)
            stop = not looked
            if stop or run.keeper.due(done, last, signs):
                _save(run, done, looked_at=looked, must=stop or done == last)
            if stop:
                break
        run.keeper.finish()
        if stop:
            run.results["stopped"] = run.stopper.reason or "another rank was asked to stop"
        elif recipe.output.save_model and last:
            _write_model(run)
        run.results["skipped"] = run.keeper.skipped
        run.results["train_s"] = time.perf_counter() - began
    run.directory.finish(run.backend, run.results, peak_memory=gauge.compare(recipe))
    return run.results


def train_step(run: Run, step: int) -> StepOutput:
    """One optimiser step over one global batch.

    The loss is the sum over all targets of the global batch divided by their number, over all ranks and
    micro-batches: however the batch is split, the gradient is the same. Nothing is read from the device, since that
    would make the host wait.
    """
    backend = run.backend
    if run.profiler is not None:
        run.profiler.before(step)
    window = _window(run, step)
    run.watch.mark("data")
    signs = _exchange(run, window)
    targets = signs[0]
    # Backends average over ranks and `backward` divides by the accumulation; both are undone here.
    scale = (backend.world * backend.accumulation / targets.clamp(min=1)).float()
    losses: list[torch.Tensor] = []
    heard = AsyncScalar(signs)
    for index, rows in enumerate(window):
        run.watch.mark("data")
        assert run.reader is not None
        batch = evaluation.to_device(run.reader.batch(rows, _behind(run, step, window, index)), backend.device)
        run.watch.mark("forward")
        # Dropout depends on where in the global batch a micro-batch stands, not on who computes it or what came before.
        seed_torch(run.recipe.seed, step, index * backend.world + backend.rank)
        with backend.micro_batch(run.model, last=index == len(window) - 1):
            part = run.model(run.task.loss_sum, batch)
            run.watch.mark("backward")
            # A loss that is not finite spoils its gradient, whatever the derivative: so every rank sees it in the norm.
            backend.backward(part * (scale + 0 * part.detach()))
        losses.append(part.detach())
    run.watch.mark("optimizer")
    norm = backend.clip(run.model, run.recipe.optim.clip_norm)
    backend.step(run.optimizer, norm)
    backend.clear(run.optimizer)
    run.watch.mark("other")
    run.targets += targets
    return StepOutput(
        step=step, signs=heard, norm=AsyncScalar(norm.reshape(1)), losses=torch.stack(losses), rows=window
    )


def _window(run: Run, step: int) -> list[np.ndarray]:
    """This rank's micro-batches of a step, as row numbers; a pure function of seed and step."""
    assert run.data.train is not None
    batch, backend, first = run.recipe.batch, run.backend, run.position_of(step)
    positions = np.arange(first, first + batch.global_size)
    rows = rows_at(positions, num_rows=len(run.data.train), seed=run.recipe.seed, epoch_rows=run.length.epoch_rows)
    # (micro-batch, rank, row): with equal micro-batches, the same rows make a forward pass on any number of ranks.
    grid = rows.reshape(backend.accumulation, backend.world, batch.rows)
    return list(grid[:, backend.rank])


def _behind(run: Run, step: int, window: list[np.ndarray], index: int) -> np.ndarray | None:
    """The micro-batch that this rank reads after one of a step's."""
    if index + 1 < len(window):
        return window[index + 1]
    return _window(run, step + 1)[0] if step + 1 < run.length.num_steps else None


def _exchange(run: Run, window: list[np.ndarray]) -> torch.Tensor:
    """The one all-reduce of a step: what all ranks tell each other, as `Signs`."""
    assert run.data.train is not None
    num_computed = getattr(run.data.train, "num_computed", run.data.train.num_targets)
    signs = StepSync(
        targets=sum(run.data.train.num_targets(rows) for rows in window),
        computed=sum(num_computed(rows) for rows in window),
        rows=sum(row_ledger.checksum(rows) for rows in window),
        stop=float(run.stopper.requested),
        **run.keeper.signs(),
    )
    return run.backend.sum(evaluation.send(torch.tensor(astuple(signs), dtype=torch.float64), run.backend.device))


def _order(run: Run) -> dict[str, Any]:
    """How positions map to rows, for the ledger."""
    return {
        "seed": run.recipe.seed,
        "num_rows": len(run.data.train) if run.data.train is not None else 0,
        "epoch_rows": run.length.epoch_rows,
        "global_size": run.recipe.batch.global_size,
        "data": run.data.digest,
    }


def _look_inside(run: Run, step: int) -> None:
    """Profiles a step that was taken, and counts what it compiled, whose time says nothing of the next."""
    if run.profiler is not None:
        found = run.profiler.after(step)
        if found is not None:
            run.reporter.say(f"profile of {found['steps']} steps:\n{profiler.table(found)}")
    if run.graphs is not None and run.graphs.grew():
        run.watch.totals()
        run.results["_logged"] = {"step": step + 1, "targets": run.targets.item(), "computed": run.computed}
        run.results["compiled_graphs"] = run.graphs.count


def _due(every: int, done: int, last: int) -> bool:
    return done % every == 0 or done in (1, last)


def _check(run: Run, taken: StepOutput | None) -> None:
    """Looks at the step before, whose numbers are there by now; None looks at the newest."""
    incident = run.guard.look(taken)
    if incident is None:
        return
    run.keeper.incident(incident)
    counts = ", ".join(f"{count} {kind}" for kind, count in run.guard.counts.items() if count)
    run.reporter.warn(
        f"step {incident['step']} was skipped on all ranks: {incident['kind']} (skipped so far: {counts})"
    )
    if incident["fatal"]:
        run.keeper.finish()
        raise run.guard.diverged(incident, run.keeper.newest())


def _log(run: Run, done: int, lr: float, taken: StepOutput) -> dict[str, Any]:
    """Reads the step's figures from the device, on every rank alike, and writes them on rank 0."""
    run.watch.mark("other")
    split = run.watch.totals()
    split.pop("aside", None)  # evaluation and samples are no part of a step
    total = run.backend.sum(taken.losses.double().sum().reshape(1))
    seen = run.targets.item()
    before = run.results.get("_logged", {"step": run.begin.step, "targets": float(run.begin.tokens), "computed": 0.0})
    steps = done - before["step"]
    seconds = sum(split.values())
    # None of the steps since the last line tells a rate if all of them were compiled meanwhile.
    rate = (seen - before["targets"]) / max(seconds, 1e-9) if steps else None
    run.results["_logged"] = {"step": done, "targets": seen, "computed": run.computed}
    flops = (run.computed - before["computed"]) * run.flops_per_target / run.backend.world
    peak = peak_flops(run.backend.device, run.backend.precision)
    loss = total.item() / max(1.0, taken.signs.read()[0])

    def a_step(*parts: str) -> float | None:
        return sum(split.get(part, 0.0) for part in parts) / steps if steps else None

    values = {
        "step": done,
        "epoch": run.position_of(done) / max(1, run.length.epoch_rows),
        "loss": loss,
        "lr": lr,
        "grad_norm": taken.norm.read()[0],
        "tokens": int(seen),
        "tokens_per_s": rate,
        "step_s": a_step("data", "forward", "backward", "optimizer", "other"),
        "data_s": a_step("data"),
        "forward_backward_s": a_step("forward", "backward"),
        # Where the backend steps inside the backward pass, this is in forward_backward_s.
        "optimizer_s": None if run.backend.steps_in_backward() else a_step("optimizer"),
        "peak_memory_gib": peak_memory_gib(run.backend.device),
        "mfu": None if peak is None or rate is None else flops / (max(seconds, 1e-9) * peak),
        "skipped_steps": run.guard.counts["nonfinite"],
        "overflows": run.guard.counts["overflow"],
    }
    run.reporter.log(values)
    run.results["train_loss"] = loss if math.isfinite(loss) else None
    return values


def _look_at(run: Run, done: int) -> bool:
    """Evaluates and samples after `done` steps, where that is due; False if a request to stop came in between."""
    recipe, last = run.recipe, run.length.num_steps
    evaluates = recipe.eval.at_end if done == last else _falls_on(recipe.eval.every_steps, done)
    if evaluates and run.data.validation is not None and not _evaluate(run, done):
        return False
    section = recipe.sample
    if section is not None and (section.at_end if done == last else _falls_on(section.every_steps, done)):
        _sample(run, done)
    return True


def _falls_on(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _evaluate(run: Run, done: int) -> bool:
    run.watch.mark("aside")
    assert run.data.validation is not None

    def stopped() -> bool:
        asked = torch.tensor([float(run.stopper.requested)], device=run.backend.device)
        return run.backend.sum(asked).item() > 0

    micro = run.recipe.eval.micro_size or run.recipe.batch.rows
    figures = evaluation.evaluate(run.backend, run.model, run.task, run.data.validation, micro, stopped=stopped)
    if figures is None:
        return False
    values = {f"validation_{key}": value for key, value in figures.items()}
    run.reporter.log({"step": done, **values})
    run.results |= {**values, "_evaluated_at": done}
    shown = ", ".join(f"{key} {value:,.4f}" for key, value in figures.items() if key != "targets")
    run.reporter.say(f"step {done}: validation {shown} over {figures['targets']:,.0f} targets")
    return True


def _sample(run: Run, done: int) -> None:
    run.watch.mark("aside")
    text = sampling.sample_text(run.backend, run.model, run.recipe, run.data.tokenizer, run.data.ends)
    run.reporter.log({"step": done, "sample": text})
    run.reporter.say(f"step {done}: sample\n{text}\n")
    run.results["sample"] = text


def _save(run: Run, done: int, *, looked_at: bool, must: bool) -> None:
    """Saves a checkpoint of the state after `done` steps, of which none that is not finite has touched the weights."""
    run.watch.mark("aside")
    _check(run, None)
    evaluated = run.results.get("_evaluated_at") == done
    state = {
        "step": done,
        "position": run.position_of(done),
        "tokens": int(run.targets.item()),
        "scaler": run.backend.scaler_state(),
        "skipped": run.guard.state,
        "looked_at": looked_at,
        "validation_loss": run.results["validation_loss"] if evaluated else None,
        "results": {key: value for key, value in run.results.items() if not key.startswith("_")},
        "identity": run.identity,
        "recipe": run.recipe.model_dump(mode="json"),
        "backend": run.backend.launch.kind,
        "processes": run.backend.world,
        "precision": run.backend.precision,
    }
    run.keeper.save(unwrap(run.model), run.optimizer, state, must=must)


def _write_model(run: Run) -> None:
    path = run.directory.path / "model"
    skeleton = run.task.build_skeleton
    with run.backend.loading(pretrained=False):
        save_model.save_model(
            run.backend,
            run.model,
            skeleton(run.recipe, run.data) if skeleton is not None else None,
            run.data.tokenizer,
            path,
        )
    run.results["model"] = str(path)
    run.reporter.say(f"model written to {path}")
