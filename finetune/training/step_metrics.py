"""Reports steps: loss, gradient norm, rates, times, MFU, profiles, steps that were skipped; and their peak memory."""

import math
import zlib
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.checkpoint.run_facts import FIGURE_NAME
from finetune.config.recipe_schema import Recipe
from finetune.distributed import device_selection
from finetune.distributed.backend import Backend
from finetune.monitoring.flops import peak_flops
from finetune.monitoring.metrics import peak_memory_gib
from finetune.monitoring.rank_progress import OUTSIDE
from finetune.monitoring.step_all_reduce import StepOutput
from finetune.planning.planner import candidates_of
from finetune.tasks.task import mean_figures
from finetune.training import profiler
from finetune.training.built_run import BuiltRun
from finetune.utils.compat import torch_private
from finetune.utils.errors import RecipeError
from finetune.utils.platforms import peak_bytes

# The optimiser's state is there by the second step. Later ones take the same, and checkpoints and evaluations come in.
_PEAK_STEPS = 2


def log_step(run: BuiltRun, lr: float, output: StepOutput) -> dict[str, Any] | None:
    """Shows that a step is done, and on log steps writes and returns its metrics; every rank must call it.

    The figures are read from the device; rates and times are of the steps since the last log.
    """
    backend, state, before = run.backend, run.state, run.state.last_log
    if state.step % run.recipe.log.every_steps and state.step not in (1, run.length.num_steps):
        run.reporter.step(state.step, None)
        return None
    run.timer.mark("other")
    split = run.timer.totals()
    for phase in OUTSIDE:
        split.pop(phase, None)
    sums, recorded = _join_figures(backend, output)
    means = mean_figures(run.task.terms, sums, output.read_sync()[1])
    loss = means["loss"]
    state.log_here()
    steps, seconds = state.step - before.step, max(sum(split.values()), 1e-9)
    # None of the steps since the last line tells a rate if all of them were compiled meanwhile.
    rate = (state.last_log.tokens - before.tokens) / seconds if steps else None
    flops = (state.computed - before.computed) * run.flops_per_target / backend.world_size
    peak = peak_flops(backend.device, backend.precision)

    def per_step(*phases: str) -> float | None:
        return sum(split.get(phase, 0.0) for phase in phases) / steps if steps else None

    values = {
        "step": state.step,
        "epoch": None if (epoch := run.feed.epoch(state.step)) is None else float(epoch),
        "loss": loss,
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
    named = recorded | means
    taken = recorded.keys() & means.keys() | named.keys() & values.keys() - {"loss"}
    if bad := [name for name in named if name in taken or not FIGURE_NAME.fullmatch(name)]:
        raise RecipeError(
            f"A term or a recorded figure is called '{bad[0]}'. A name has at most 64 letters, digits, `_`, `-` and "
            "`/`, and is none that metrics have already. Rename it."
        )
    values |= means | recorded
    run.reporter.log(values)
    run.results["train_loss"] = loss if math.isfinite(loss) else None
    run.results.setdefault("first_loss", loss)
    state.recent_losses.append((state.step, loss))
    run.reporter.step(state.step, values)
    return values


def _join_figures(backend: Backend, output: StepOutput) -> tuple[list[float], dict[str, float]]:
    """Returns the sum of each term and what was recorded in a step, of all ranks; every rank must call it.

    Raises:
        RecipeError: If ranks have recorded other names.
    """
    names, here = sorted(output.recorded), output.sums
    # Of other names on some rank, the sum of squares is more than that of equal numbers.
    number = 1 + (zlib.crc32("\n".join(names).encode()) >> 12) if names else 0
    terms = here if backend.mesh.counts_loss else torch.zeros_like(here)
    *sums, total, squares = backend.all_reduce_sum(
        torch.cat((terms, here.new_tensor([number, number * number])))
    ).tolist()
    if squares * backend.world_size != total * total:
        raise RecipeError(
            f"Ranks record other figures in step {output.step + 1}; this one records {', '.join(names) or 'none'}. "
            "Record the same names on every rank in each step, with 0 where there is nothing."
        )
    if not names:
        return sums, {}
    pairs = torch.stack(
        [torch.as_tensor(one, device=here.device).double() for n in names for one in output.recorded[n]]
    )
    joined = iter(backend.all_reduce_sum(pairs).tolist())
    return sums, {name: value / (count or 1.0) for name, value, count in zip(names, joined, joined, strict=True)}


def log_epoch(run: BuiltRun) -> None:
    """Shows and logs the mean loss of an epoch that ends with this step, if one does; every rank must call it."""
    step = run.state.step
    epoch = run.parts_read(step)
    if step == run.length.num_steps and epoch == run.parts_read(step - 1):
        epoch = run.parts_read(step + 1)  # its last rows do not fill a step
    if epoch == run.parts_read(step - 1):
        return
    totals, terms = run.epoch_totals(), run.task.terms
    run.state.epoch_sums.zero_()
    mean = mean_figures(terms, totals[: len(terms)], totals[len(terms) :])["loss"]
    run.reporter.log({"step": step, "epoch": float(epoch), "epoch_loss": mean})
    over = f"{totals[len(terms)]:,.0f} {terms[0].counts}"
    run.reporter.say(f"step {step}: epoch {epoch} ends, mean loss {mean:.4f} over {over}")


def look_at_profile(run: BuiltRun) -> None:
    """Shows the profile of the steps that were profiled, and counts what the last step compiled."""
    if run.profiler is not None:
        table = run.profiler.after(run.state.step - 1)
        if table is not None:
            run.reporter.say(f"profile of {table['steps']} steps:\n{profiler.phase_table(table)}")
    if run.recipe.model.compile and (count := torch_private.num_compiled_graphs()) > run.state.compiled_graphs:
        # The time of a step that compiled says nothing of the next.
        run.timer.totals()
        run.state.log_here()
        run.state.compiled_graphs = run.results["compiled_graphs"] = count


def check_nonfinite(run: BuiltRun, output: StepOutput | None) -> None:
    """Looks at the step before, whose numbers are there by now; None looks at the newest.

    Raises:
        DivergedError: If too many steps in a row were skipped, or all steps of the run.
    """
    incident = run.nonfinite.check(output)
    if incident is None:
        return
    run.checkpoints.note_incident(incident)
    counts = ", ".join(f"{count} {kind}" for kind, count in run.nonfinite.counts.items() if count)
    run.reporter.warn(
        f"step {incident['step']} was skipped on all ranks: {incident['kind']} (skipped so far: {counts})"
    )
    nothing = output is None and run.nonfinite.total == run.state.step == run.length.num_steps
    if incident["fatal"] or nothing:
        run.checkpoints.finish()
        raise run.nonfinite.diverged(incident, run.checkpoints.newest_address(), nothing=nothing)


class PeakMemoryMonitor:
    """Measures the peak memory of the first steps.

    Resident memory is all that a CPU has, so what was held before them is taken off, but for the weights (`held`, in
    bytes).
    """

    def __init__(self, backend: Backend, held: int) -> None:
        self._backend, self._left, self._peak = backend, _PEAK_STEPS, 0
        self._on_gpu = backend.device.type == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(backend.device)
            return
        self._base = psutil.Process().memory_info().rss - held
        try:
            # The peak is counted from here. Source: the kernel's documentation of /proc/PID/clear_refs.
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._left = 0  # not on this system: nothing can be said

    def step_taken(self) -> None:
        """Measures the peak, if this is one of the first steps."""
        if self._left:
            self._left -= 1
            device = self._backend.device
            self._peak = torch.cuda.max_memory_allocated(device) if self._on_gpu else peak_bytes() - self._base

    def compare(self, recipe: Recipe) -> dict[str, Any] | None:
        """Compares the peak of the rank that held the most with what a plan predicts; every rank must call it.

        Rank 0 gets the figures for `run.json`, if something was measured.
        """
        backend = self._backend
        seen = torch.tensor([float(self._peak)], dtype=torch.float64, device=backend.device)
        measured = int(backend.all_reduce_max(seen).item())
        if not (measured and backend.is_main):
            return None
        what, predicted = "allocated" if self._on_gpu else "resident", None
        # Networks are counted here alone: none may be shared out among the ranks while it is built.
        with backend.loading(pretrained=False):
            candidate_of = candidates_of(recipe, backend.launch, device_selection.available_memory())
            candidate = candidate_of(recipe.batch.rows) if candidate_of is not None else None
        if candidate is not None and candidate.parts is not None and not candidate.reason:
            # A CPU has no other place for what is kept in host memory.
            predicted = candidate.peak + (device_selection.matmul_workspaces() if self._on_gpu else candidate.host)
        return {"of": what, "measured": measured, "predicted": predicted}
