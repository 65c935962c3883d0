"""The charts as PNG files, for slides, papers and messages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.checkpoint.run_history import RunHistory
from finetune.diagnostics.run_report.charts import Chart

# The light colours of `report.css`.
_COLORS = {
    "series-0": "#2f6feb",
    "series-1": "#e07b00",
    "series-2": "#2b9a66",
    "series-3": "#b0489e",
    "series-4": "#6b5bd6",
    "series-5": "#0e8fa8",
    "series-6": "#c9302c",
    "series-7": "#98a1ad",
    "muted": "#626a74",
    "bad": "#c9302c",
}


def write(charts: Sequence[Chart], runs: Sequence[tuple[str, RunHistory]], page: Path) -> list[Path]:
    """Writes a PNG for each chart, over steps, beside the page and named after it.

    Raises:
        OSError: If one cannot be written.
    """
    return [_draw(chart, runs, page.with_name(f"{page.stem}-{chart.key}.png")) for chart in charts]


def _draw(chart: Chart, runs: Sequence[tuple[str, RunHistory]], file: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    stacked = [curve for curve in chart.curves if curve.style == "stacked"]
    if stacked:
        colors = [_COLORS[curve.color] for curve in stacked]
        y = [np.nan_to_num(curve.y) for curve in stacked]
        axes.stackplot(stacked[0].x["step"], *y, labels=[curve.name for curve in stacked], colors=colors, linewidth=0)
    for curve in chart.curves:
        if curve.style == "stacked" or not np.isfinite(curve.y).any():
            continue
        how: dict[str, Any] = {"color": _COLORS[curve.color], "label": curve.name}
        if curve.style == "cross":
            how |= {"linestyle": "", "marker": "x", "markersize": 7, "markeredgewidth": 2}
        elif curve.style == "faint":
            how |= {"linewidth": 0.8, "alpha": 0.35}
        elif curve.style == "dashed":
            how |= {"linewidth": 1.2, "linestyle": "--"}
        elif curve.style == "points" or len(curve.y) == 1:
            how |= {"linewidth": 1.6, "marker": "o", "markersize": 5}
        else:
            how |= {"linewidth": 1.8}
        axes.plot(curve.x["step"], curve.y, **how)
    for mark in chart.marks:
        axes.axvline(mark.x["step"], color=_COLORS["muted"], linewidth=0.8, linestyle=":")
    name = runs[0][0] if len(runs) == 1 else f"{len(runs)} runs"
    # A dollar sign would begin a formula.
    axes.set_title(f"{chart.title} – {name}".replace("$", r"\$"), loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(chart.unit)
    axes.grid(color="#e8ebef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if len(chart.curves) > 1:
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(file)
    return file
