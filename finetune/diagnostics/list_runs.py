"""`finetune runs`: lists the runs below a folder, with how each of them went."""

import os
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from finetune.checkpoint.run_history import read_run
from finetune.config.recipe_schema import ranking
from finetune.diagnostics.run_report.figures import format_duration, format_number, format_progress, format_time
from finetune.utils.console import plain_table
from finetune.utils.errors import FinetuneError, RecipeError

COLORS = {"running": "blue", "finished": "green", "stopped": "yellow", "diverged": "red", "lost": "red"}
"""Colours of statuses in a terminal."""

# Folders are searched this deep.
_DEEPEST = 6


@dataclass(frozen=True)
class RunSummary:
    """A line of the list."""

    run: str
    """The directory, relative to the folder that was searched."""
    status: str
    """`unreadable` where its files are damaged."""
    step: int = 0
    num_steps: int | None = None
    best_by: str = ""
    """The run's `checkpoint.keep_best_by`."""
    best_step: int | None = None
    best_value: float | None = None
    best_validation_loss: float | None = None
    ended_early: bool = False
    """True if `eval.patience` ended it."""
    launch: str = ""
    precision: str = ""
    duration_s: float = 0.0
    started: float | None = None
    """Seconds since 1970."""
    restarts: int = 0
    damaged_lines: int = 0
    """Damaged lines of its metrics and incidents, among those that are read for this list."""
    problem: str | None = None
    """Reason why it cannot be read."""


def list_runs(directory: Path) -> list[RunSummary]:
    """Returns the runs in a folder or below it, the one that was started last at the end.

    Raises:
        RecipeError: If there is no such folder.
    """
    if not directory.is_dir():
        raise RecipeError(
            f"{directory} is no folder, so there are no runs. Give the folder that the recipes' output.dir lies in; "
            "left out, it is `runs`."
        )
    found = []
    for folder, below, files in os.walk(directory):
        is_run = "run.json" in files
        if is_run:
            found.append(_summary(Path(folder), directory))
        if is_run or len(Path(folder).relative_to(directory).parts) == _DEEPEST:
            below.clear()
    return sorted(found, key=lambda summary: (summary.started or 0.0, summary.run))


def _summary(path: Path, root: Path) -> RunSummary:
    name = path.resolve().name if path == root else str(path.relative_to(root))
    try:
        run = read_run(path, only_outcome=True)
    except FinetuneError as error:
        return RunSummary(name, "unreadable", problem=" ".join(str(error).split()))
    best, lowest = run.best_evaluation or (None, None), run.best("validation_loss")
    return RunSummary(
        run=name,
        status=run.status,
        step=run.step,
        num_steps=run.num_steps,
        best_by=run.best_by,
        best_step=best[0],
        best_value=best[1],
        best_validation_loss=lowest[1] if lowest else None,
        ended_early=run.ended_early is not None,
        launch=run.launch,
        precision=str(run.facts.get("precision", "")),
        duration_s=run.duration,
        started=run.starts[0].time if run.starts else None,
        restarts=max(0, len(run.starts) - 1),
        damaged_lines=run.damaged_lines,
    )


def runs_table(found: list[RunSummary]) -> Table:
    """Returns the list as a table for a terminal."""
    right = ("step", "best validation", "time")
    shown = plain_table("run", "status", "step", "best validation", "launch", "time", "started", right=right)
    for one in found:
        if one.problem is not None:
            shown.add_row(Text(one.run), Text("unreadable", style="red"))
            continue
        key = ranking(one.best_by)[0].removeprefix("validation_")
        shown.add_row(
            Text(one.run),
            Text("ended early" if one.ended_early else one.status, style=COLORS[one.status]),
            format_progress(one.step, one.num_steps),
            "–" if one.best_value is None else f"{key} {format_number(one.best_value)} @{one.best_step:,}",
            Text(f"{one.launch} {one.precision}".rstrip()),
            format_duration(one.duration_s) + (f" ↻{one.restarts}" if one.restarts else ""),
            format_time(one.started)[:16],
        )
    return shown
