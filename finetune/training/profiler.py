"""Profiles some steps: a torch trace of each process, and a table by phase on rank 0."""

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from finetune.distributed.strategies.prediction import COLLECTIVES
from finetune.utils.atomic_files import write_json
from finetune.utils.errors import RecipeError

# Warm: buffers are made, kernels chosen, and the optimiser has its state.
_WARM_STEPS = 3

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""As the loop marks them; what is sent between processes lies within them, and is told apart by operation."""


class Profiler:
    """Profiles some steps of a run, once, and writes what it saw."""

    def __init__(self, folder: Path, rank: int, *, first: int, steps: int, last: int) -> None:
        """Profiles `steps` steps, a few after `first`; a `RecipeError` if the run ends, at `last`, before that."""
        if 0 <= last - first < _WARM_STEPS + steps:
            raise RecipeError(
                f"log.profile: {steps} steps, after {_WARM_STEPS} that warm up, are more than the {last - first} that "
                "are left of the run. Lower it, or lengthen the run."
            )
        self._folder, self._rank = folder, rank
        self._begin = first + _WARM_STEPS
        self._end = self._begin + steps
        self._profile: Any = None
        self._span = ExitStack()

    def before(self, step: int) -> None:
        """Called as a step begins."""
        if step == self._begin:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def mark(self, phase: str) -> None:
        """The time from here to the next mark belongs to a phase."""
        if self._profile is None:
            return
        self._span.close()
        self._span.enter_context(torch.profiler.record_function(f"finetune: {phase}"))

    def after(self, step: int) -> dict[str, Any] | None:
        """Called when a step is taken; the table, once it is the last one."""
        if self._profile is None or step + 1 < self._end:
            return None
        self._span.close()
        taken, self._profile = self._profile, None
        taken.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        taken.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
        table = by_phase(taken.events(), self._end - self._begin)
        write_json(self._folder / f"rank-{self._rank}.table.json", table)
        return table


def by_phase(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Milliseconds a step of each phase, of what is sent between processes within them, and the longest operations.

    Args:
        events: A profiler's.
        steps: How many were profiled.
    """
    spans, operations = Counter[str](), Counter[str]()
    sent = 0.0
    for event in events:
        # Microseconds.
        if event.name.startswith("finetune: "):
            if str(event.device_type).endswith("CPU"):
                name = event.name.removeprefix("finetune: ")
                spans[name] += event.cpu_time_total
            continue
        own = event.self_device_time_total or event.self_cpu_time_total
        operations[event.name] += own
        if event.name.startswith(COLLECTIVES):
            sent += own

    def milliseconds(value: float) -> float:
        return round(value / 1000 / steps, 3)

    return {
        "steps": steps,
        "phases_ms": {name: milliseconds(spans[name]) for name in PHASES if name in spans},
        "communication_ms": milliseconds(sent),
        "operations_ms": {name: milliseconds(value) for name, value in operations.most_common(12)},
    }


def phase_table(found: dict[str, Any]) -> str:
    """Formats the same for people."""
    phases: dict[str, float] = found["phases_ms"]
    whole = sum(phases.values()) or 1.0
    rows = [*phases.items(), ("communication (within these)", found["communication_ms"])]
    rows += [(name[:60], value) for name, value in found["operations_ms"].items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>9,.1f}  {value / whole:>7.1%}" for name, value in rows]
    lines.insert(len(phases) + 1, "")
    return "\n".join([f"{'phase':<{width}}  {'ms a step':>9}  {'share':>7}", *lines])
