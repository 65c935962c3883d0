"""Reports steps: loss, gradient norm, rates, times and MFU; profiles; steps that were skipped."""

import math
from typing import Any

import torch

from finetune.monitoring.flops import peak_flops
from finetune.monitoring.metrics import peak_memory_gib
from finetune.monitoring.step_all_reduce import StepOutput
from finetune.training import profiler
from finetune.training.run import BuiltRun
from finetune.utils.compat import torch_private


def log_step(run: BuiltRun, lr: float, output: StepOutput) -> dict[str, Any] | None:
    """Shows that a step is done, and on log steps writes and returns its metrics; every rank must call it."""
    step = run.state.step
    due = step % run.recipe.log.every_steps == 0 or step in (1, run.length.num_steps)
    values = step_metrics(run, lr, output) if due else None
    if values is not None:
        run.reporter.log(values)
        run.results["train_loss"] = values["loss"] if math.isfinite(values["loss"]) else None
        run.results.setdefault("first_loss", values["loss"])
        run.state.recent_losses.append((step, values["loss"]))
    run.reporter.step(step, values)
    return values


def step_metrics(run: BuiltRun, lr: float, output: StepOutput) -> dict[str, Any]:
    """Reads a step's figures from the device; rates and times are of the steps since the last log."""
    backend, state, before = run.backend, run.state, run.state.last_log
    run.timer.mark("other")
    split = run.timer.totals()
    split.pop("aside", None)  # evaluation and samples are no part of a step
    here = output.losses.double().sum().reshape(1)
    loss_sum = backend.all_reduce_sum(here if backend.mesh.counts_loss else torch.zeros_like(here)).item()
    state.log_here()
    steps, seconds = state.step - before.step, max(sum(split.values()), 1e-9)
    # None of the steps since the last line tells a rate if all of them were compiled meanwhile.
    rate = (state.last_log.tokens - before.tokens) / seconds if steps else None
    flops = (state.computed - before.computed) * run.flops_per_target / backend.world_size
    peak = peak_flops(backend.device, backend.precision)

    def per_step(*phases: str) -> float | None:
        return sum(split.get(phase, 0.0) for phase in phases) / steps if steps else None

    return {
        "step": state.step,
        "epoch": run.feed.epoch(state.step),
        "loss": loss_sum / max(1.0, output.sync.read()[0]),
        "lr": lr,
        "grad_norm": output.norm.read()[0],
        "tokens": int(state.last_log.tokens),
        "tokens_per_s": rate,
        "step_s": per_step("data", "forward", "backward", "optimizer", "other"),
        "data_s": per_step("data"),
        "forward_backward_s": per_step("forward", "backward"),
        # Where the backend steps inside the backward pass, this is in forward_backward_s.
        "optimizer_s": None if backend.strategy.steps_in_backward else per_step("optimizer"),
        "peak_memory_gib": peak_memory_gib(backend.device),
        "mfu": None if peak is None or rate is None else flops / (seconds * peak),
        "skipped_steps": run.nonfinite.counts["nonfinite"],
        "overflows": run.nonfinite.counts["overflow"],
    }


def look_at_profile(run: BuiltRun) -> None:
    """Shows the profile of the steps that were profiled, and counts what the last step compiled."""
    if run.profiler is not None:
        found = run.profiler.after(run.state.step - 1)
        if found is not None:
            run.reporter.say(f"profile of {found['steps']} steps:\n{profiler.table(found)}")
    if run.recipe.model.compile and (count := torch_private.num_compiled_graphs()) > run.state.compiled_graphs:
        # The time of a step that compiled says nothing of the next.
        run.timer.totals()
        run.state.log_here()
        run.state.compiled_graphs = run.results["compiled_graphs"] = count


def check_nonfinite(run: BuiltRun, output: StepOutput | None) -> None:
    """Looks at the step before, whose numbers are there by now; None looks at the newest.

    Raises:
        DivergedError: If too many steps in a row were skipped.
    """
    incident = run.nonfinite.check(output)
    if incident is None:
        return
    run.checkpoints.note_incident(incident)
    counts = ", ".join(f"{count} {kind}" for kind, count in run.nonfinite.counts.items() if count)
    run.reporter.warn(
        f"step {incident['step']} was skipped on all ranks: {incident['kind']} (skipped so far: {counts})"
    )
    if incident["fatal"]:
        run.checkpoints.finish()
        raise run.nonfinite.diverged(incident, run.checkpoints.newest_address())
