"""Shows runs in the terminal: `finetune watch` one while it goes, `finetune runs` a list of those below a folder."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from finetune.checkpoint.run_history import MachineHistory, RunHistory, RunReader, Series, loss_curves, read_run
from finetune.config.recipe_schema import ranking
from finetune.diagnostics.run_report import run_summary
from finetune.diagnostics.run_report.charts import running_mean
from finetune.monitoring.rank_progress import read_ranks
from finetune.utils.console import plain_table
from finetune.utils.errors import FinetuneError, RecipeError
from finetune.utils.quoting import visible

COLORS = {"running": "blue", "finished": "green", "stopped": "yellow", "diverged": "red", "lost": "red"}
"""Colours of statuses in a terminal."""

REFRESH_S = 2.0
_PLOT_ROWS = 9
_SAMPLE_LINES = 5
# Bits of the eight dots of a braille character, by row and column. Source: Unicode, block U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARK = -1

# Folders are searched this deep.
_DEEPEST = 6


def watch_run(directory: Path, console: Console, *, once: bool = False) -> None:
    """Shows a run until it has ended, or until Ctrl-C; with `once`, or if the output is no terminal, as it is now.

    Raises:
        FinetuneError: If it cannot be read.
    """
    reader = RunReader(directory)
    run = reader.read()
    if once or not console.is_terminal:
        console.print(run_screen(run, console.width))
        return
    with Live(run_screen(run, console.width), console=console, auto_refresh=False) as live:
        while run.status == "running":
            time.sleep(REFRESH_S)
            run = reader.read()
            live.update(run_screen(run, console.width), refresh=True)


def run_screen(run: RunHistory, width: int) -> RenderableType:
    """Returns what is shown of a run in a terminal of so many columns."""
    head = Text.assemble((run.name, "bold"), "  ", (run_summary.status_line(run), f"bold {COLORS[run.status]}"))
    again = f", start {len(run.starts)}" if len(run.starts) > 1 else ""
    progress = Table.grid(Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
    if run.num_steps:
        words = f"{run_summary.format_progress(run.step, run.num_steps)}  {run.step / run.num_steps:.0%}"
        progress.add_row(ProgressBar(run.num_steps, run.step), words)
    else:
        progress.add_row(f"step {run.step:,}")
    started = Text(f"{run.launch} {run.facts.get('precision', '')}{again}", style="dim")
    blocks: list[RenderableType] = [Group(head, started, progress)]
    if (plot := loss_plot(run, width)) is not None:
        blocks.append(plot)
    blocks.append(_figures(run))
    if run.status == "running" and (behind := read_ranks(run.directory)) is not None:
        blocks.append(Text(behind, style="yellow"))
    if run.machines:
        blocks.append(_machines_table(run.machines))
    if run.samples:
        last = run.samples[-1]
        head = Text(f"sample at step {last.step:,}", style="dim")
        room = max(20, width - 2)
        lines = [line.plain.rstrip() for line in Text(visible(last.text)).wrap(Console(width=room), room)]
        if len(lines) > _SAMPLE_LINES:
            lines[_SAMPLE_LINES - 1 :] = [f"{lines[_SAMPLE_LINES - 1][: room - 2]} …"]
        blocks.append(Group(head, Text("\n".join(f"  {line}" for line in lines))))
    if run.incidents:
        newest = run.incidents[-1]
        incident = f"step {newest.step:,} was skipped: {newest.kind}, {newest.in_a_row} in a row"
        blocks.append(Text(f"last incident: {incident}; {len(run.incidents)} in all", style="red"))
    if run.damaged_lines:
        blocks.append(Text(f"{run.damaged_lines:,} damaged lines of its metrics are left out", style="red"))
    separated = [renderable for block in blocks for renderable in (Text(), block)]
    return Group(*separated[1:])


def _figures(run: RunHistory) -> RenderableType:
    best = run.best_evaluation
    last = {key: float(values[-1]) if len(values) else math.nan for key, values in run.training.items()}
    cells = [
        ("training loss", run_summary.format_number(run_summary.last_loss(run))),
        (run.best_name, f"{run_summary.format_number(best[1])} (best, step {best[0]:,})" if best else "–"),
        (
            "targets/s",
            "{} (mean {})".format(*(run_summary.format_number(v, 3) for v in (last["tokens_per_s"], run.tokens_per_s))),
        ),
        ("gradient norm", run_summary.format_number(last["grad_norm"])),
        ("targets learned", run_summary.format_count(last["tokens"])),
        ("learning rate", run_summary.format_number(last["lr"], 3)),
        ("time" if run.status != "running" else "time so far", run_summary.format_duration(run.duration)),
        ("last checkpoint", f"step {run.checkpoints[-1].step:,}" if run.checkpoints else "none yet"),
    ]
    for key in run.metrics:
        newest = np.flatnonzero(np.isfinite(run.evaluations[key]))[-1]
        value, step = float(run.evaluations[key][newest]), int(run.evaluations["step"][newest])
        cells.append((key.replace("_", " "), f"{run_summary.format_number(value)} (step {step:,})"))
    longest = max(len(name) for name, _ in cells)
    return Columns([Text.assemble((f"{name:<{longest}}  ", "dim"), value) for name, value in cells], (0, 2), equal=True)


def _machines_table(machines: Sequence[MachineHistory]) -> Table:
    """Returns the newest figures of machines, a line each; what a machine receives and reads comes first."""
    shown = plain_table("machine", "CPU", "memory GiB", "GPU", "net MiB/s", "disk MiB/s", "free GiB")
    for machine in machines:

        def newest(*keys: str, of: MachineHistory = machine) -> str:
            return "/".join(run_summary.format_number(float(of.samples[key][-1]), 3) for key in keys)

        gpu = f"{newest('gpu_percent')}% {newest('gpu_temperature_c')}°C"
        shown.add_row(
            Text(visible(machine.name)),
            f"{newest('cpu_percent')}%",
            newest("memory_used_gib", "memory_total_gib"),
            gpu if machine.has_gpus else "–",
            newest("received_mib_s", "sent_mib_s"),
            newest("disk_read_mib_s", "disk_written_mib_s"),
            newest("disk_free_gib"),
        )
    return shown


def loss_plot(run: RunHistory, width: int) -> Text | None:
    """Returns the losses over steps, in braille; None if there is nothing to draw."""
    (_, steps, loss), (_, validation_steps, validation) = loss_curves(run)
    if len(loss) < 2:
        return None
    if len(loss) > 2 * width:
        loss = running_mean(loss, max(3, len(loss) // width))
    values = np.concatenate((loss, validation))
    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1.0
    first, last = float(steps[0]), float(np.concatenate((steps, validation_steps)).max())
    columns = max(10, width - 10)

    # A place for each column of dots: the curve between two of them is drawn as a vertical stroke.
    places = np.linspace(first, last, 2 * columns)
    places = places[(places >= steps[0]) & (places <= steps[-1])]
    across = _nearest_dots(places, first, last, 2 * columns)
    down = _nearest_dots(-np.interp(places, steps, loss), -high, -low, 4 * _PLOT_ROWS)
    cells = np.zeros((_PLOT_ROWS, columns), dtype=np.int64)
    for column, row_of_dots, following in zip(across, down, np.append(down[1:], down[-1]), strict=True):
        for dot in range(row_of_dots, following, 1 if row_of_dots < following else -1) or (row_of_dots,):
            cells[dot // 4, column // 2] |= _DOTS[dot % 4][column % 2]
    marked_columns = _nearest_dots(validation_steps, first, last, 2 * columns) // 2
    cells[_nearest_dots(-validation, -high, -low, 4 * _PLOT_ROWS) // 4, marked_columns] = _MARK

    labels = {0: f"{high:.4g}", _PLOT_ROWS // 2: f"{(high + low) / 2:.4g}", _PLOT_ROWS - 1: f"{low:.4g}"}
    shown = Text(no_wrap=True)
    for row in range(_PLOT_ROWS):
        shown.append(f"{labels.get(row, ''):>8} ", style="dim")
        for dots in cells[row].tolist():
            letter = {_MARK: "●", 0: " "}.get(dots, chr(0x2800 + dots))
            shown.append(letter, style="yellow" if dots == _MARK else "blue")
        shown.append("\n")
    ends = f"step {int(first):,}", f"{int(last):,}"
    key = "⠤ training loss   ● validation loss" if len(validation) else "⠤ training loss"
    room = columns - len(ends[0]) - len(ends[1])
    shown.append(f"{'':9}{ends[0]}{(key if len(key) <= room - 2 else ''):^{room}}{ends[1]}", style="dim")
    return shown


def _nearest_dots(values: Series, low: float, high: float, dots: int) -> npt.NDArray[np.int64]:
    return np.round((values - low) / (high - low) * (dots - 1)).astype(np.int64)


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
    summaries = []
    for folder, below, files in os.walk(directory):
        is_run = "run.json" in files
        if is_run:
            summaries.append(_summary(Path(folder), directory))
        if is_run or len(Path(folder).relative_to(directory).parts) == _DEEPEST:
            below.clear()
    return sorted(summaries, key=lambda summary: (summary.started or 0.0, summary.run))


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


def runs_table(summaries: list[RunSummary]) -> Table:
    """Returns the list as a table for a terminal."""
    right = ("step", "best validation", "time")
    shown = plain_table("run", "status", "step", "best validation", "launch", "time", "started", right=right)
    for one in summaries:
        if one.problem is not None:
            shown.add_row(Text(one.run), Text("unreadable", style="red"))
            continue
        key = ranking(one.best_by)[0].removeprefix("validation_")
        shown.add_row(
            Text(one.run),
            Text("ended early" if one.ended_early else one.status, style=COLORS[one.status]),
            run_summary.format_progress(one.step, one.num_steps),
            "–" if one.best_value is None else f"{key} {run_summary.format_number(one.best_value)} @{one.best_step:,}",
            Text(f"{one.launch} {one.precision}".rstrip()),
            run_summary.format_duration(one.duration_s) + (f" ↻{one.restarts}" if one.restarts else ""),
            run_summary.format_time(one.started)[:16],
        )
    return shown
