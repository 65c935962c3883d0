"""Writes the report of runs: the page, and pictures beside it."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from finetune.checkpoint.run_history import RunHistory, read_run
from finetune.diagnostics.run_report import page
from finetune.diagnostics.run_report.charts import Chart, Style
from finetune.diagnostics.run_report.one_run import predict_peak
from finetune.utils import atomic_files
from finetune.utils.errors import RecipeError

EXTRA = ("plotly", "matplotlib")

# Runs that a folder is named after; a name may have 255 bytes.
_MOST_NAMES = 4
_LINES: dict[Style, dict[str, Any]] = {
    "line": {},
    "faint": {"linewidth": 0.8, "alpha": 0.35},
    "points": {"marker": "o", "markersize": 5},
    "cross": {"linestyle": "", "marker": "x"},
    "dashed": {"linestyle": "--"},
}


def write_report(directories: Sequence[Path], to: Path | None = None, *, price: float | None = None) -> list[Path]:
    """Writes the report of one run, or of several over each other.

    Args:
        to: The page; if left out, `RUN/report/report.html` for one run, for several `report.html` in a folder here
            that is named after them.
        price: Price of a GPU (or a process on CPUs) and hour.

    Returns:
        The files, the page first.

    Raises:
        FinetuneError: If a run cannot be read, or the page not be written.
    """
    check_options(price)
    runs = named_runs([(directory, read_run(directory)) for directory in directories])
    names = [run.name for _, run in runs]
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES - 1 :] = [f"{len(names) - _MOST_NAMES + 1}-more"]
    folder = directories[0] / "report" if len(runs) == 1 else Path("-".join(["report", *names]))
    file = to or folder / "report.html"
    _check_file(file)
    prediction = predict_peak(runs[0][1]) if len(runs) == 1 else None
    shown = page.content_of(runs, price=price, prediction=prediction)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(file, page.page_of(shown))
        name = runs[0][0] if len(runs) == 1 else f"{len(runs)} runs"
        pictures = [(chart, file.with_name(f"{file.stem}-{chart.key}.png")) for chart in shown.charts]
        for chart, picture in pictures:
            _draw_picture(chart, name, picture)
    except OSError as error:
        raise RecipeError(
            f"--to: cannot write {file}: {error.strerror or error}. Name another file by --to FILE.html."
        ) from error
    return [file, *(picture for _, picture in pictures)]


def _draw_picture(chart: Chart, name: str, file: Path) -> None:
    """Writes a chart over steps as PNG, for slides, papers and messages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), dpi=130, layout="constrained")
    axes: Any = figure.add_subplot()
    if stacked := [curve for curve in chart.curves if curve.style == "stacked"]:
        labels, colors = [curve.name for curve in stacked], [curve.color for curve in stacked]
        axes.stackplot(stacked[0].steps, *(np.nan_to_num(c.y) for c in stacked), labels=labels, colors=colors)
    for curve in chart.curves:
        if curve.style != "stacked" and np.isfinite(curve.y).any():
            style = _LINES["points" if len(curve.y) == 1 and curve.style == "line" else curve.style]
            axes.plot(curve.steps, curve.y, color=curve.color, label=curve.name, **style)
    for mark in chart.marks:
        axes.axvline(mark.step, color="grey", linewidth=0.8, linestyle=":")
    # A dollar sign would begin a formula.
    axes.set_title(f"{chart.title} – {name}".replace("$", r"\$"))
    axes.set(xlabel="step", ylabel=chart.unit)
    axes.grid(visible=True)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if len(chart.curves) > 1:
        axes.legend()
    figure.savefig(file)


def named_runs(found: Sequence[tuple[Path, RunHistory]]) -> list[tuple[str, RunHistory]]:
    """Returns runs with the names of their directories, or their paths where two are named alike."""
    unique = len({run.name for _, run in found}) == len(found)
    return [(run.name if unique else str(directory), run) for directory, run in found]


def check_options(price: float | None) -> None:
    """Raises RecipeError if a library that draws is not installed, or a price is no number from 0 on."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"finetune report needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed. Install the extra: pip install 'finetune[report]'. `finetune watch` and `finetune runs` work "
            "without it."
        )
    if price is not None and not (math.isfinite(price) and price >= 0.0):
        raise RecipeError(f"--price is {price}; give what a GPU, or a process on CPUs, costs an hour, such as 2.5.")


def _check_file(file: Path) -> None:
    """Raises RecipeError if a file is there that is no report."""
    if file.is_dir() or file.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"--to: {file} is not the name of a page. Give a file that ends in .html.")
    try:
        with file.open("rb") as there:
            head = there.read(1024).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecipeError(f"--to: {file} cannot be read: {error.strerror}. Name another file.") from error
    if page.GENERATOR not in head:
        raise RecipeError(f"--to: {file} is there, and is no report of this toolkit. Name another file, or remove it.")
