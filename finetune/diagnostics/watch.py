"""`finetune watch`: shows a run in the terminal, while it goes."""

import itertools
import math
import time
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from finetune.checkpoint.best_evaluation import early_stop_sentence
from finetune.checkpoint.run_history import RunHistory, RunReader, Series
from finetune.diagnostics.list_runs import COLORS
from finetune.diagnostics.run_report import figures
from finetune.diagnostics.run_report.charts import running_mean

REFRESH_S = 2.0
_PLOT_ROWS = 9
_SAMPLE_LINES = 5
# Bits of the eight dots of a braille character, by row and column. Source: Unicode, block U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


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
        console.print(screen(run, console.width))
        return
    with Live(screen(run, console.width), console=console, auto_refresh=False, screen=False) as live:
        while run.status == "running":
            time.sleep(REFRESH_S)
            run = reader.read()
            live.update(screen(run, console.width), refresh=True)


def screen(run: RunHistory, width: int) -> RenderableType:
    """Returns what is shown of a run in a terminal of so many columns."""
    parts: list[RenderableType] = [_head(run), *_progress(run, width)]
    plot = loss_plot(run, width)
    if plot is not None:
        parts += [Text(), plot]
    parts += [Text(), _figures(run, width)]
    if run.ended_early is not None:
        parts += [Text(), Text(early_stop_sentence(run.ended_early))]
    if run.samples:
        last = run.samples[-1]
        parts += [Text(), Text(f"sample at step {last.step:,}", style="dim"), _lines(last.text, width, _SAMPLE_LINES)]
    if run.incidents:
        newest = run.incidents[-1]
        said = f"step {newest.step:,} was skipped: {newest.kind}, {newest.in_a_row} in a row"
        parts += [Text(), Text(f"last incident: {said}; {len(run.incidents)} in all", style="red")]
    if run.damaged_lines:
        parts += [Text(), Text(f"{run.damaged_lines:,} damaged lines of its metrics are left out", style="red")]
    return Group(*parts)


def _head(run: RunHistory) -> Text:
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(run.name, style="bold")
    head.append(f"  {run.status}", style=f"bold {COLORS[run.status]}")
    head.append(f"  {run.launch} {run.facts.get('precision', '')}", style="dim")
    if len(run.starts) > 1:
        head.append(f", start {len(run.starts)}", style="dim")
    return head


def _progress(run: RunHistory, width: int) -> list[RenderableType]:
    if not run.num_steps:
        return [Text(f"step {run.step:,}")]
    row = Table.grid(padding=(0, 1))
    left = f"{figures.duration(run.seconds_left)} left" if run.status == "running" and run.step_s else ""
    words = f"{run.step:,}/{run.num_steps:,}  {run.step / run.num_steps:.0%}  {left}".rstrip()
    bar = ProgressBar(
        total=run.num_steps, completed=min(run.step, run.num_steps), width=max(10, width - len(words) - 2)
    )
    row.add_row(bar, Text(words))
    return [row]


def _figures(run: RunHistory, width: int) -> RenderableType:
    # Two figures beside each other, where there is room.
    abreast = 2 if width >= 72 else 1
    rows = Table.grid(padding=(0, 2))
    for _ in range(abreast):
        rows.add_column(no_wrap=True, style="dim")
        rows.add_column(no_wrap=True)
    best, last = run.best_evaluation, run.training
    losses = last["loss"][np.isfinite(last["loss"])]
    rate = last["tokens_per_s"][-1] if len(last["step"]) else math.nan
    cells = [
        ("training loss", figures.number(float(losses[-1])) if len(losses) else "–"),
        (run.best_name, f"{figures.number(best[1])} (best, step {best[0]:,})" if best else "–"),
        ("targets/s", f"{figures.number(float(rate), 3)} (mean {figures.number(run.tokens_per_s, 3)})"),
        ("gradient norm", figures.number(float(last["grad_norm"][-1])) if len(last["step"]) else "–"),
        ("targets learned", figures.count(float(last["tokens"][-1])) if len(last["step"]) else "–"),
        ("learning rate", figures.number(float(last["lr"][-1]), 3) if len(last["step"]) else "–"),
        ("time" if run.status != "running" else "time so far", figures.duration(run.duration)),
        ("last checkpoint", f"step {run.checkpoints[-1].step:,}" if run.checkpoints else "none yet"),
        *((key.replace("_", " "), _newest(run, key)) for key in run.metrics),
    ]
    for first in range(0, len(cells), abreast):
        rows.add_row(*itertools.chain.from_iterable(cells[first : first + abreast]))
    return rows


def _newest(run: RunHistory, key: str) -> str:
    values = run.evaluations[key]
    last = np.flatnonzero(np.isfinite(values))[-1]
    return f"{figures.number(float(values[last]))} (step {int(run.evaluations['step'][last]):,})"


def _lines(text: str, width: int, most: int) -> Text:
    """The beginning of a text; control characters, which could move the cursor, are shown as spaces."""
    clean = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
    shown = Text(clean)
    wrapped = shown.wrap(Console(width=max(20, width - 2)), max(20, width - 2))
    lines = list(wrapped)[:most]
    if len(wrapped) > most:
        lines[-1] = Text(f"{lines[-1].plain.rstrip()[: max(20, width - 2) - 2]} …")
    return Text("\n").join(Text(f"  {line.plain.rstrip()}") for line in lines)


def loss_plot(run: RunHistory, width: int) -> Text | None:
    """Returns the losses over steps, in braille; None if there is nothing to draw."""
    steps, loss = run.training["step"], run.training["loss"]
    if np.isfinite(loss).sum() < 2:
        return None
    if len(loss) > 2 * width:
        loss = running_mean(loss, max(3, len(loss) // width))
    validation_steps, validation = run.evaluations["step"], run.evaluations["validation_loss"]
    values = np.concatenate((loss[np.isfinite(loss)], validation[np.isfinite(validation)]))
    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1.0
    columns = max(10, width - 10)
    last = max(float(steps[-1]), float(validation_steps[-1]) if len(validation_steps) else 0.0)
    first = min(float(steps[0]), last - 1.0)

    def place(at: Series, y: Series) -> list[tuple[int, int]]:
        known = np.isfinite(y)
        across = np.round((at[known] - first) / (last - first) * (2 * columns - 1)).astype(int)
        down = np.round((high - y[known]) / (high - low) * (4 * _PLOT_ROWS - 1)).astype(int)
        return list(zip(across.tolist(), down.tolist(), strict=True))

    cells = np.zeros((_PLOT_ROWS, columns), dtype=np.int64)
    for (x0, y0), (x1, y1) in itertools.pairwise(place(steps, loss)):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        line = np.round(np.linspace((x0, y0), (x1, y1), length + 1)).astype(int)
        for x, y in line.tolist():
            cells[y // 4, x // 2] |= _DOTS[y % 4][x % 2]
    marks = {(y // 4, x // 2) for x, y in place(validation_steps, validation)}
    labels = {0: f"{high:.4g}", _PLOT_ROWS // 2: f"{(high + low) / 2:.4g}", _PLOT_ROWS - 1: f"{low:.4g}"}
    shown = Text(no_wrap=True)
    for row in range(_PLOT_ROWS):
        shown.append(f"{labels.get(row, ''):>8} ", style="dim")
        for column in range(columns):
            if (row, column) in marks:
                shown.append("●", style="yellow")
            else:
                shown.append(chr(0x2800 + int(cells[row, column])) if cells[row, column] else " ", style="blue")
        shown.append("\n")
    ends = f"step {int(first):,}", f"{int(last):,}"
    key = "⠤ training loss   ● validation loss" if marks else "⠤ training loss"
    room = columns - len(ends[0]) - len(ends[1])
    shown.append(f"{'':9}{ends[0]}{(key if len(key) <= room - 2 else ''):^{room}}{ends[1]}", style="dim")
    return shown
