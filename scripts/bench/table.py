"""What was measured, for people: a table of each case, in Markdown."""

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from bench.cases import DPO, OURS
from bench.parts import PartsMeasured
from bench.turns import JUDGED, Measured, Result, middle, ratios

PACKAGES = ("torch", "accelerate", "transformers", "peft", "bitsandbytes", "deepspeed", "trl", "litgpt")

NAMES = {
    "bare": "PyTorch, by hand",
    "bare+": "the same, our forward pass",
    "ours": "**finetune**",
    "ours-texts": "finetune, the same rows learned as texts",
    "trainer": "HF Trainer",
    "trl": "TRL SFTTrainer",
    "trl-best": "TRL SFTTrainer, at its best",
    "litgpt": "LitGPT",
}


def header() -> dict[str, str]:
    """Where and with what it was measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def label(arm: str) -> str:
    """An arm's name in the table."""
    name, _, launch = arm.partition("@")
    return NAMES.get(name, name) + (f", {launch}" if launch else "")


def own(measured: Measured) -> Result:
    """The arm that the others are compared with: the first of ours."""
    return next(result for result in measured.results if result.arm.partition("@")[0] == OURS)


def text(measured: Measured) -> str:
    """A case as Markdown."""
    case = measured.case
    title = (
        f"### {case.name}\n\n{case.rows} rows of {case.length} a step in micro-batches of {case.micro}, "
        f"{case.threads} thread(s), {measured.rounds} rounds of {case.turn} steps after {case.warm} warm-up steps; "
        f"load {measured.load[0]:.1f} to {measured.load[1]:.1f}.\n\n"
    )
    head = (
        "| | ms a step | CPU ms | targets/s | time ÷ ours | quartiles | CPU ÷ ours | peak MiB | above libraries | "
        "host reads | collectives | loss gap |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    reference = own(measured)
    return title + head + "\n".join(_line(result, reference, case.kind) for result in measured.results) + "\n"


def _line(result: Result, reference: Result, kind: str) -> str:
    name = label(result.arm)
    if kind == DPO:
        name = name.replace("SFTTrainer", "DPOTrainer")
    if result.problem:
        return f"| {name} | {result.problem} |" + " |" * 10
    cells = [
        name,
        f"{statistics.median(result.step_ms):,.1f}",
        f"{statistics.median(result.cpu_ms):,.1f}",
        f"{result.targets_per_s:,.0f}",
        *_compared(result, reference),
        f"{result.peak_mib:,.0f}",
        f"{result.peak_mib - result.baseline_mib:,.0f}",
        "" if result.reads is None else f"{result.reads:.2f}",
        "" if result.collectives is None else f"{result.collectives:.2f}",
        f"{result.loss_gap:.0e} / {min(result.compared, JUDGED)}"
        + (f", {result.last_gap:.0e} / {result.compared}" if result.compared > JUDGED else ""),
    ]
    return "| " + " | ".join(cells) + " |"


def _compared(result: Result, reference: Result) -> Sequence[str]:
    if reference.problem:
        return "", "", ""
    median, low, high = ratios(result, reference)
    return f"{median:.3f}", f"{low:.3f}–{high:.3f}", f"{ratios(result, reference, 'cpu_ms')[0]:.3f}"


def parts_text(measured: PartsMeasured) -> str:
    """A row of whole processes as Markdown."""
    parts = measured.parts
    columns = {
        "raw": ("total_s", "cpu_s", "prepare_s", "steps_s", "end_s", "steps", "useful", "useful_per_s", "loss"),
        "start": ("start_s", "cpu_s"),
    }[parts.kind]
    title = (
        f"### {parts.name}\n\n{parts.stories} stories, {parts.threads} thread(s), {measured.rounds} rounds; load "
        f"{measured.load[0]:.1f} to {measured.load[1]:.1f}.\n\n"
    )
    head = " | ".join(HEADINGS.get(column, column) for column in columns)
    lines = [f"| | {head} | time ÷ ours | quartiles | CPU ÷ ours |", "|---" * (len(columns) + 4) + "|"]
    for arm in parts.arms:
        if arm in measured.problems:
            lines.append(f"| {label(arm)} | {measured.problems[arm]} |" + " |" * (len(columns) + 2))
            continue
        figures = measured.figures[arm]
        cells = [f"{statistics.median(figures[column]):,.{DIGITS.get(column, 2)}f}" for column in columns]
        ratio, by_cpu = (parts_ratio(measured, arm, clock) for clock in CLOCKS)
        found = ratio and by_cpu and [f"{ratio[0]:.3f}", f"{ratio[1]:.3f}–{ratio[2]:.3f}", f"{by_cpu[0]:.3f}"]
        cells += found or ["", "", ""]
        lines.append(f"| {label(arm)} | " + " | ".join(cells) + " |")
    return title + "\n".join(lines) + "\n"


HEADINGS = {
    "total_s": "seconds",
    "prepare_s": "preparing",
    "steps_s": "steps",
    "end_s": "after the last",
    "steps": "number of steps",
    "useful": "targets learned",
    "useful_per_s": "targets/s",
    "loss": "loss (other batches)",
    "start_s": "seconds",
    "cpu_s": "CPU seconds",
}
DIGITS = {"steps": 0, "useful": 0, "useful_per_s": 0}


CLOCKS = ("wall", "cpu")
"""Time that passed, or that processors worked for an arm: where a machine is shared, only the latter is its own."""


def parts_ratio(measured: PartsMeasured, arm: str, clock: str) -> tuple[float, float, float] | None:
    """How many times as long as ours an arm takes, for the same tokens: median and quartiles."""
    if OURS in measured.problems or arm in measured.problems:
        return None
    column = "cpu_s" if clock == "cpu" else {"raw": "total_s", "start": "start_s"}[measured.parts.kind]
    own_figures, figures = measured.figures[OURS], measured.figures[arm]
    if not all(own_figures[column]):
        return None  # too short for the clock, which counts ticks
    found = zip(figures[column], own_figures[column], strict=True)
    per = [theirs / ours for theirs, ours in found]
    if "useful" in figures:  # what does not fill a last step is left out by some
        per = [
            one * ours / theirs for one, theirs, ours in zip(per, figures["useful"], own_figures["useful"], strict=True)
        ]
    return middle(per)


Cells = dict[str, tuple[float, float, float] | str]


def headline(rows: Sequence[Measured | PartsMeasured], clock: str) -> list[tuple[str, Cells]]:
    """Of each row its name, and of each other arm the time that it takes divided by ours, or why there is none."""
    found: list[tuple[str, Cells]] = []
    for row in rows:
        cells: Cells = {}
        if isinstance(row, PartsMeasured):
            for arm in row.parts.arms:
                if arm != OURS:
                    cells[arm] = parts_ratio(row, arm, clock) or row.problems.get(arm) or row.problems[OURS]
            found.append((row.parts.name, cells))
            continue
        reference = own(row)
        for result in row.results:
            if result is not reference:
                problem = result.problem or reference.problem
                cells[result.arm] = problem or ratios(result, reference, STEP[clock])
        found.append((row.case.name, cells))
    return found


STEP = {"wall": "step_ms", "cpu": "cpu_ms"}


def summary(rows: Sequence[Measured | PartsMeasured], clock: str) -> str:
    """One line a row: how many times as long as ours each arm takes. Above 1 we are faster, below 1 slower."""
    lines, what = headline(rows, clock), {"wall": "time", "cpu": "CPU time"}[clock]
    arms = [name for name in NAMES if name != OURS]
    table = [f"| {what} ÷ ours | " + " | ".join(NAMES[arm] for arm in arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for name, cells in lines:
        by_name: dict[str, list[str]] = {}
        for arm, value in cells.items():
            by_name.setdefault(arm.partition("@")[0], []).append(
                f"{value[0]:.2f}" if isinstance(value, tuple) else value.partition(":")[0]
            )
        table.append(f"| {name} | " + " | ".join(", ".join(by_name.get(arm, [])) for arm in arms) + " |")
    return "\n".join(table) + "\n"


def write(path: Path, content: str) -> None:
    """Puts the results behind the line of the document that says so.

    Raises:
        ValueError: If it has no such line.
    """
    head, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{path} has no line {MARK!r}, behind which the results go")
    path.write_text(f"{head}{mark}\n\n{content}", encoding="utf-8")


MARK = "<!-- what follows is written by scripts/benchmark.py -->"
