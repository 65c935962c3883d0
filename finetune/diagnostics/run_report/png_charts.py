"""The charts as PNG files, for slides, papers and messages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.diagnostics.run_report.charts import Chart, Style

_STYLES: dict[Style, dict[str, Any]] = {
    "line": {},
    "faint": {"linewidth": 0.8, "alpha": 0.35},
    "points": {"marker": "o", "markersize": 5},
    "cross": {"linestyle": "", "marker": "x"},
    "dashed": {"linestyle": "--"},
}


def write_pictures(charts: Sequence[Chart], name: str, page: Path) -> list[Path]:
    """Writes a PNG for each chart, over steps, beside the page and named after it.

    Args:
        name: Stands in the titles.

    Raises:
        OSError: If one cannot be written.
    """
    return [_write_picture(chart, name, page.with_name(f"{page.stem}-{chart.key}.png")) for chart in charts]


def _write_picture(chart: Chart, name: str, file: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), dpi=130, layout="constrained")
    axes: Any = figure.add_subplot()
    if stacked := [curve for curve in chart.curves if curve.style == "stacked"]:
        labels, colors = [curve.name for curve in stacked], [curve.color for curve in stacked]
        axes.stackplot(stacked[0].x["step"], *(np.nan_to_num(c.y) for c in stacked), labels=labels, colors=colors)
    for curve in chart.curves:
        if curve.style == "stacked" or not np.isfinite(curve.y).any():
            continue
        style = _STYLES["points" if len(curve.y) == 1 and curve.style == "line" else curve.style]
        axes.plot(curve.x["step"], curve.y, color=curve.color, label=curve.name, **style)
    for mark in chart.marks:
        axes.axvline(mark.x["step"], color="grey", linewidth=0.8, linestyle=":")
    # A dollar sign would begin a formula.
    axes.set_title(f"{chart.title} – {name}".replace("$", r"\$"))
    axes.set(xlabel="step", ylabel=chart.unit)
    axes.grid(visible=True)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if len(chart.curves) > 1:
        axes.legend()
    figure.savefig(file)
    return file
