"""Traces candidates of a plan: each in a process of its own, which takes one step under fake tensors."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from finetune.distributed import fake_backend
from finetune.planning.launch_candidates import Candidate
from finetune.planning.model_shapes import Variant, is_half
from finetune.planning.planner import Plan
from finetune.utils import json_files
from finetune.utils.errors import RecipeError
from finetune.utils.temporary_folders import temporary_folder

# Parts of a cell's peak that come with the micro-batch.
_OF_THE_BATCH = ("activations", "loss", "copies")


@dataclass(frozen=True)
class Traced:
    """One step as it was traced, or the reason why it could not be."""

    candidate: Candidate
    """The candidate as the formulas (tier 1) have it."""
    parts: dict[str, int]
    """Bytes of the peak on the device, by what they are for; empty if it could not be traced."""
    moment: str
    """Time of the peak: forward, backward or optimizer."""
    state: dict[str, int]
    """Bytes from step to step: weights, gradients at their most, optimizer."""
    cpu_s: float
    """CPU time of the process that traced it."""
    reason: str = ""
    """Reason why it could not be traced, or part of it that comes from tier 1."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    @property
    def difference(self) -> float | None:
        """Share of what was traced by which tier 1 predicts more."""
        return self.candidate.peak / self.peak - 1 if self.parts and self.candidate.parts else None


def find_wanted(plan: Plan, names: str) -> list[Candidate]:
    """Returns the candidates to trace: of launch files in the recipe's own way, or the one that is recommended.

    Raises:
        RecipeError: If there is no such launch file.
    """
    if names == "recommended":
        if plan.advice.candidate is None:
            raise RecipeError(f"--trace: nothing is recommended, {plan.advice.reason} Name what to trace: --trace ddp.")
        return [plan.advice.candidate]
    chosen = list(plan.launches) if names == "all" else names.split(",")
    for name in chosen:
        if name not in plan.launches:
            raise RecipeError(
                f"--trace: the plan has no launch file '{name}', but {', '.join(plan.launches)}. Name some of these "
                "with commas, or `all`, or nothing for the one that is recommended."
            )
    return [plan.candidates[name, plan.kind] for name in chosen]


def trace_all(plan: Plan, candidates: list[Candidate], stored: str | None, say: Callable[[str], None]) -> list[Traced]:
    """Traces candidates one after the other, whose names it says; `stored` is as for `planner.make_plan`."""
    traced, taken = [], dict[str, dict[str, Any]]()
    for candidate in candidates:
        variant, closed = plan.variants[candidate.kind], fake_backend.why_closed(candidate.launch)
        if candidate.memory is None or not isinstance(variant, Variant):
            step = {"reason": candidate.reason}
        elif candidate.launch.sequence > 1 and closed:
            step = {"reason": f"{closed}, and its ranks exchange parts of rows"}
        else:
            # In a precision that a machine without a GPU has.
            precision = {"precision": "bf16" if is_half(variant.recipe) else "fp32"}
            recipe = candidate.setting.applied_to(variant.recipe).model_copy(update=precision)
            launch = fake_backend.stand_in(candidate.launch)
            job = json.dumps({"recipe": recipe.model_dump(mode="json"), "launch": asdict(launch), "stored": stored})
            if job not in taken:
                say(f"tracing {candidate.name} ({candidate.kind}) …")
                taken[job] = _run(job, fake_backend.rank_environment(launch))
            step = taken[job]
        traced.append(_read(candidate, step, closed))
    return traced


def _run(job: str, env: dict[str, str]) -> dict[str, Any]:
    with temporary_folder() as folder:
        file, result = folder / "job.json", folder / "result.json"
        file.write_text(job, encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "finetune.planning.trace.trace_step", str(file), str(result)],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if not result.exists():
            last = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
            return {"reason": f"the process that traces it ended: {last}"}
        taken: dict[str, Any] = json_files.read(result)
        return taken


def _read(candidate: Candidate, step: dict[str, Any], closed: str) -> Traced:
    cpu_s = step.get("cpu_s", 0.0)
    if "reason" in step:
        return Traced(candidate, {}, "", {}, cpu_s, f"cannot be traced: {step['reason']}. Tier 1 stands")
    if closed:
        rest = {name: size for name, size in (candidate.parts or {}).items() if name not in _OF_THE_BATCH}
        reason = f"{closed}: activations are traced on one process, the rest is tier 1's"
        return Traced(candidate, {**rest, "activations": step["batch"]}, step["moment"], {}, cpu_s, reason)
    return Traced(candidate, step["parts"], step["moment"], step["state"], cpu_s)
