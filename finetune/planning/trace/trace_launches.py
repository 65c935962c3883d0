"""Traces candidates of a plan: each in a process of its own, which takes one step under fake tensors."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from finetune.config.recipe_schema import Recipe
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
    """The candidates to trace.

    Args:
        names: Launch files of the plan, with commas, in the recipe's own way; `recommended`, as it is recommended.

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
    """Traces candidates one after the other.

    Args:
        stored: As `planner.make` takes it.
        say: Takes the name of what is being traced.
    """
    found, taken = [], dict[str, dict[str, Any]]()
    for candidate in candidates:
        variant = plan.variants[candidate.kind]
        if candidate.memory is None or not isinstance(variant, Variant):
            found.append(_not(candidate, candidate.reason))
            continue
        if candidate.launch.sequence > 1 and (why := fake_backend.why_closed(candidate.launch)):
            found.append(_not(candidate, f"{why}, and its ranks exchange parts of rows"))
            continue
        recipe, launch = _settled(candidate, variant.recipe), fake_backend.stand_in(candidate.launch)
        job = json.dumps({"recipe": recipe.model_dump(mode="json"), "launch": asdict(launch), "stored": stored})
        if job not in taken:
            say(f"tracing {candidate.name} ({candidate.kind}) …")
            taken[job] = _run(job, fake_backend.rank_environment(launch))
        found.append(_read(candidate, taken[job]))
    return found


def _run(job: str, env: dict[str, str]) -> dict[str, Any]:
    """Has a process of its own take a step."""
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
            return {"reason": f"the process that traces it ended: {last}", "cpu_s": 0.0}
        taken: dict[str, Any] = json_files.read(result)
        return taken


def _read(candidate: Candidate, taken: dict[str, Any]) -> Traced:
    if "reason" in taken:
        return _not(candidate, taken["reason"], taken["cpu_s"])
    if why := fake_backend.why_closed(candidate.launch):
        rest = {name: size for name, size in (candidate.parts or {}).items() if name not in _OF_THE_BATCH}
        reason = f"{why}: activations are traced on one process, the rest is tier 1's"
        return Traced(candidate, {**rest, "activations": taken["batch"]}, taken["moment"], {}, taken["cpu_s"], reason)
    return Traced(candidate, taken["parts"], taken["moment"], taken["state"], taken["cpu_s"])


def _settled(candidate: Candidate, recipe: Recipe) -> Recipe:
    """The recipe in a cell's setting, in a precision that a machine without a GPU has."""
    return candidate.setting.applied_to(recipe).model_copy(update={"precision": "bf16" if is_half(recipe) else "fp32"})


def _not(candidate: Candidate, reason: str, cpu_s: float = 0.0) -> Traced:
    return Traced(candidate, {}, "", {}, cpu_s, f"cannot be traced: {reason}. Tier 1 stands")
