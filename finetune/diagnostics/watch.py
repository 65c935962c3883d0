"""`finetune watch`: shows a run in the terminal, while it goes."""

import math
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from finetune.checkpoint.run_history import RunHistory, RunReader, Series, loss_curves
from finetune.diagnostics.list_runs import COLORS
from finetune.diagnostics.run_report.charts import running_mean
from finetune.diagnostics.run_report.figures import format_count, format_duration, format_number, format_progress
from finetune.diagnostics.run_report.one_run import last_loss, status_line

REFRESH_S = 2.0
_PLOT_ROWS = 9
_SAMPLE_LINES = 5
# Bits of the eight dots of a braille character, by row and column. Source: Unicode, block U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARK = -1


def watch_run(directory: Path, console: Console, *, once: bool = False) -> None:
    """Shows a run until it has ended, or until Ctrl-C.

    Args:
        once: Shows it as it is now, and returns; the same if the output is no terminal.

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
    head = Text.assemble((run.name, "bold"), "  ", (status_line(run), f"bold {COLORS[run.status]}"))
    again = f", start {len(run.starts)}" if len(run.starts) > 1 else ""
    blocks: list[RenderableType] = [
        Group(head, Text(f"{run.launch} {run.facts.get('precision', '')}{again}", style="dim"), _progress(run))
    ]
    if (plot := loss_plot(run, width)) is not None:
        blocks.append(plot)
    blocks.append(_figures(run))
    if run.samples:
        last = run.samples[-1]
        head = Text(f"sample at step {last.step:,}", style="dim")
        blocks.append(Group(head, _first_lines(last.text, width)))
    if run.incidents:
        newest = run.incidents[-1]
        said = f"step {newest.step:,} was skipped: {newest.kind}, {newest.in_a_row} in a row"
        blocks.append(Text(f"last incident: {said}; {len(run.incidents)} in all", style="red"))
    if run.damaged_lines:
        blocks.append(Text(f"{run.damaged_lines:,} damaged lines of its metrics are left out", style="red"))
    separated = [part for block in blocks for part in (Text(), block)]
    return Group(*separated[1:])


def _progress(run: RunHistory) -> RenderableType:
    if not run.num_steps:
        return Text(f"step {run.step:,}")
    row = Table.grid(Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
    words = f"{format_progress(run.step, run.num_steps)}  {run.step / run.num_steps:.0%}"
    row.add_row(ProgressBar(run.num_steps, run.step), words)
    return row


def _figures(run: RunHistory) -> RenderableType:
    best = run.best_evaluation
    last = {key: float(values[-1]) if len(values) else math.nan for key, values in run.training.items()}
    cells = [
        ("training loss", format_number(last_loss(run))),
        (run.best_name, f"{format_number(best[1])} (best, step {best[0]:,})" if best else "–"),
        ("targets/s", f"{format_number(last['tokens_per_s'], 3)} (mean {format_number(run.tokens_per_s, 3)})"),
        ("gradient norm", format_number(last["grad_norm"])),
        ("targets learned", format_count(last["tokens"])),
        ("learning rate", format_number(last["lr"], 3)),
        ("time" if run.status != "running" else "time so far", format_duration(run.duration)),
        ("last checkpoint", f"step {run.checkpoints[-1].step:,}" if run.checkpoints else "none yet"),
    ]
    for key in run.metrics:
        newest = np.flatnonzero(np.isfinite(run.evaluations[key]))[-1]
        value, step = float(run.evaluations[key][newest]), int(run.evaluations["step"][newest])
        cells.append((key.replace("_", " "), f"{format_number(value)} (step {step:,})"))
    longest = max(len(name) for name, _ in cells)
    return Columns([Text.assemble((f"{name:<{longest}}  ", "dim"), value) for name, value in cells], (0, 2), equal=True)


def _first_lines(text: str, width: int) -> Text:
    """Returns the beginning of a text; control characters, which could move the cursor, are shown as spaces."""
    room = max(20, width - 2)
    clean = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
    lines = [line.plain.rstrip() for line in Text(clean).wrap(Console(width=room), room)]
    if len(lines) > _SAMPLE_LINES:
        lines[_SAMPLE_LINES - 1 :] = [f"{lines[_SAMPLE_LINES - 1][: room - 2]} …"]
    return Text("\n".join(f"  {line}" for line in lines))


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
    for x, y, following in zip(across, down, np.append(down[1:], down[-1]), strict=True):
        for dot in range(y, following, 1 if y < following else -1) or (y,):
            cells[dot // 4, x // 2] |= _DOTS[dot % 4][x % 2]
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
