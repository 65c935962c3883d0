"""Charts of one run or of several over each other: curves over steps, tokens and time, and marks on them.

A chart is plain data. `report.js` draws it with Plotly on the page, `write_and_serve` with matplotlib.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from finetune.checkpoint.run_history import TRAINING, RunHistory, Series, loss_curves
from finetune.diagnostics.run_report.run_summary import whose_memory

Style = Literal["line", "faint", "points", "stacked", "cross", "dashed"]

MOST_POINTS = 2000
"""Most points of a curve; a screen cannot show more."""

# The colours that Plotly and matplotlib begin with.
_PALETTE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
_RED, _GREY = _PALETTE[3], _PALETTE[7]

# From so many points on, a curve is shown faintly below its running mean.
_SMOOTH_FROM = 150
_MEAN_OF = 50
_STYLES: tuple[Style, ...] = ("line", "dashed")
_NOISY = ("loss", "grad_norm", "tokens_per_s", "step_s", "mfu")
# Charts of machines: of what, its unit, and the keys of its curves.
_OF_MACHINES = {
    "machine-cpu": ("CPU", "%", {"cpu_percent": ""}),
    "machine-memory": ("Memory", "GiB", {"memory_used_gib": "used", "processes_gib": "by the run's processes"}),
    "machine-network": ("Network", "MiB/s", {"received_mib_s": "received", "sent_mib_s": "sent"}),
    "machine-disk": ("Disk", "MiB/s", {"disk_read_mib_s": "read", "disk_written_mib_s": "written"}),
    "machine-gpu": ("Utilisation, least busy GPU", "%", {"gpu_percent": ""}),
    "machine-gpu-memory": ("Memory, fullest GPU", "GiB", {"gpu_memory_used_gib": ""}),
    "machine-gpu-temperature": ("Temperature, hottest GPU", "°C", {"gpu_temperature_c": ""}),
    "machine-gpu-clock": ("SM clock, slowest GPU", "MHz", {"gpu_sm_clock_mhz": ""}),
    "machine-gpu-power": ("Power of all GPUs", "W", {"gpu_power_w": ""}),
}
_COMPARED = {"loss-difference": "training loss", "validation-loss-difference": "validation loss"}
# Curves that are nowhere farther apart than this share seem to be one.
_ALIKE = 0.02
_PHASES = {"data_s": "reading rows", "forward_backward_s": "forward and backward", "optimizer_s": "optimiser"}


@dataclass(frozen=True)
class Curve:
    """A line or set of points."""

    name: str
    run: RunHistory
    steps: Series
    y: Series
    color: str
    style: Style = "line"
    texts: Sequence[str] = ()
    """A text for each point, shown in place of its value when the mouse is over it."""


@dataclass(frozen=True)
class Mark:
    """A place on the horizontal axis."""

    step: int
    label: str
    sign: str


@dataclass(frozen=True)
class Chart:
    """A picture."""

    key: str
    """Name in the page and in files."""
    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    """Restarts, and the best evaluation."""
    wide: bool = False
    """True if it takes the whole width of the page."""
    logarithmic: bool = False
    """True if the vertical axis can be made logarithmic."""
    from_zero: bool = False
    axis: str = ""
    """Title of a horizontal axis of its own, on which `steps` of its curves are places; else it has the page's."""


def charts_of(runs: Sequence[tuple[str, RunHistory]]) -> list[Chart]:
    """Returns the charts of one run, or of several over each other, but for those that have nothing to show."""
    drawn = [(name, run, color) for (name, run), color in zip(runs, cycle(_PALETTE), strict=False)]
    only = runs[0][1] if len(runs) == 1 else None
    restarts: list[Mark] = []
    best: list[Mark] = []
    if only is not None and len(only.training["step"]):
        restarts = [Mark(start.from_step, f"restart at step {start.from_step}", "↻") for start in only.starts[1:]]
    if only is not None and (evaluation := only.best_evaluation) is not None:
        best = [Mark(evaluation[0], f"best {only.best_name}", "★")]

    def logged(key: str, title: str) -> list[Curve]:
        curves = []
        for name, run, color in drawn:
            if key not in run.training:
                continue
            label = name if only is None else title
            values, steps = run.training[key], run.training["step"]
            if key in _NOISY and len(values) >= _SMOOTH_FROM:
                # Faint curves of several runs would hide each other.
                if only is not None:
                    curves.append(_curve(label, run, steps, values, color, "faint"))
                width = max(5, len(values) // _MEAN_OF)
                label, values = f"{label}, mean of {width:,}", running_mean(values, width)
            curves.append(_curve(label, run, steps, values, color))
        return curves

    def evaluated(key: str) -> list[Curve]:
        return [
            _curve(label, run, run.evaluations["step"], run.evaluations[key], color, "points")
            for name, run, own in drawn
            for label, color in [(name, own) if only is None else (key.replace("_", " "), _PALETTE[1])]
            if key in run.evaluations
        ]

    def chart(key: str, of: str, title: str, unit: str) -> Chart:
        return Chart(key, title, unit, logged(of, title), restarts, from_zero=True)

    training, validation = logged("loss", "training loss"), evaluated("validation_loss")
    losses = {"loss": ("Training loss", training), "validation-loss": ("Validation loss", validation)}
    norms = logged("grad_norm", "Gradient norm")
    step_time = chart("step-time", "step_s", "Time of a step", "s")
    if only is not None:
        losses = {"loss": ("Loss", [*training, *validation])}
        norms += _clipped_and_skipped(only)
        step_time = Chart("step-time", "Where a step's time goes", "s", _phases(only), restarts, from_zero=True)
    figures = {key: logged(key, key) for _, run in runs for key in run.training if key not in TRAINING}
    for key in dict.fromkeys(key for _, run in runs for key in run.metrics):
        # Of a single run, what steps and evaluations both have is one chart.
        of = key.removeprefix("validation_")
        chart_key = of if only is not None and of in figures else key
        figures[chart_key] = [*figures.get(chart_key, []), *evaluated(key)]
    away = {key: (title, _differences(drawn, title)) for key, title in _COMPARED.items()} if only is None else {}
    shown = [
        *(
            Chart(key, title, "nats a target", curves, [*restarts, *best], wide=True, logarithmic=True)
            for key, (title, curves) in losses.items()
        ),
        *(
            Chart(re.sub("[_/]", "-", key), key.capitalize().replace("_", " "), "", curves, [*restarts, *best])
            for key, curves in figures.items()
        ),
        *(
            Chart(key, f"{title.capitalize()}: difference to {runs[0][0]}", "share of it", curves, logarithmic=True)
            for key, (title, curves) in away.items()
        ),
        chart("learning-rate", "lr", "Learning rate", ""),
        Chart("gradient-norm", "Gradient norm", "", norms, restarts, logarithmic=True),
        chart("throughput", "tokens_per_s", "Throughput", "targets/s"),
        step_time,
        chart("memory", "peak_memory_gib", f"Peak memory of {whose_memory([run for _, run in runs])}, so far", "GiB"),
        chart("mfu", "mfu", "Model FLOPs utilisation", "share"),
    ]
    if only is not None:
        shown += _machine_charts(only)
    return [chart for chart in shown if any(np.isfinite(curve.y).any() for curve in chart.curves)]


def _differences(drawn: Sequence[tuple[str, RunHistory, str]], loss: str) -> list[Curve]:
    """Returns how far losses of runs are from the first run's at common steps, of curves that seem to be one."""
    (_, first), *others = ((drawing, _losses_of(drawing[1], loss)) for drawing in drawn)
    curves = []
    for (name, run, color), (steps, losses) in others:
        both, ours, theirs = np.intersect1d(first[0], steps, return_indices=True)
        reference = first[1][ours]
        away = np.abs(losses[theirs] - reference) / np.maximum(np.abs(reference), np.finfo(np.float64).tiny)
        if len(both) and float(away.max()) < _ALIKE:
            curves.append(_curve(name, run, both, away, color))
    return curves


def _losses_of(run: RunHistory, loss: str) -> tuple[Series, Series]:
    return next((steps, losses) for name, steps, losses in loss_curves(run) if name == loss)


def _machine_charts(run: RunHistory) -> Iterator[Chart]:
    """Yields charts over the time since the first sample, of all machines over each other."""
    times = [machine.samples["time"] for machine in run.machines]
    first = min((float(np.nanmin(time)) for time in times if np.isfinite(time).any()), default=0.0)
    last = max((float(np.nanmax(time)) for time in times if np.isfinite(time).any()), default=0.0)
    unit, unit_s = time_unit(last - first)
    for key, (title, measure, keys) in _OF_MACHINES.items():
        curves = [
            _curve(
                f"machine {machine.name}{label and f', {label}'}", run, (time - first) / unit_s, values, color, style
            )
            for machine, time, color in zip(run.machines, times, cycle(_PALETTE), strict=False)
            for (name, label), style in zip(keys.items(), _STYLES, strict=False)
            if np.isfinite(values := machine.samples[name]).any()
        ]
        yield Chart(key, title, measure, curves, from_zero=True, axis=f"time since the first sample ({unit})")


def _curve(name: str, run: RunHistory, steps: Series, y: Series, color: str, style: Style = "line") -> Curve:
    """Returns a curve without the points that a screen cannot show."""
    chosen = downsample_curve(y)
    return Curve(name, run, steps[chosen], y[chosen], color, style)


def _clipped_and_skipped(run: RunHistory) -> Iterator[Curve]:
    """Yields a line at what norms are clipped to, and the steps that were skipped."""
    norms, steps = run.training["grad_norm"], run.training["step"]
    clip = run.recipe.get("optim", {}).get("clip_norm")
    if isinstance(clip, int | float) and len(steps):
        yield Curve(f"clipped to {clip:g}", run, steps[[0, -1]], np.full(2, float(clip)), _GREY, "dashed")
    if incidents := run.incidents:
        at = np.array([incident.step for incident in incidents], dtype=np.float64)
        # Their own norms are not numbers; they are drawn above the others.
        top = float(np.nanmax(norms)) if np.isfinite(norms).any() else 1.0
        texts = [f"step {i.step} was skipped: {i.kind}, norm {i.grad_norm}" for i in incidents]
        yield Curve("skipped step", run, at, np.full(len(at), top), _RED, "cross", texts)


def _phases(run: RunHistory) -> list[Curve]:
    """Returns the phases of a step on top of each other; what is left of it last."""
    whole = run.training["step_s"]
    chosen = downsample_curve(whole)
    parts = {name: np.nan_to_num(run.training[key]) for key, name in _PHASES.items()}
    parts = {name: seconds for name, seconds in parts.items() if seconds.any()}
    parts["other"] = np.maximum(whole - sum(parts.values()), 0.0)
    return [
        Curve(name, run, run.training["step"][chosen], seconds[chosen], color, "stacked")
        for (name, seconds), color in zip(parts.items(), _PALETTE, strict=False)
    ]


def charts_as_json(charts: Sequence[Chart], runs: Sequence[tuple[str, RunHistory]]) -> dict[str, Any]:
    """Returns charts for `report.js`. Plotly takes tags in texts as such, so they are escaped."""
    longest = max((run.training_seconds[-1] for _, run in runs if len(run.training["step"])), default=0.0)
    unit, unit_s = time_unit(longest)

    def positions(run: RunHistory, steps: Series) -> dict[str, list[float | None]]:
        """Returns the places of steps on each axis."""
        # The start of the run is a place too, though nothing is logged there.
        logged, tokens, seconds = (
            np.insert(values, 0, 0.0 if len(values) else np.nan)
            for values in (run.training["step"], run.training["tokens"], run.training_seconds / unit_s)
        )
        places = {"step": steps, "tokens": np.interp(steps, logged, tokens), "time": np.interp(steps, logged, seconds)}
        return {axis: _values_as_json(values) for axis, values in places.items()}

    return {
        "axes": {"step": "step", "tokens": "tokens", "time": f"training time ({unit})"},
        "charts": {
            chart.key: {
                **vars(chart),
                "marks": [
                    # Marks are of a single run.
                    {
                        **vars(mark),
                        "x": {axis: x for axis, (x,) in positions(runs[0][1], np.array([float(mark.step)])).items()},
                    }
                    for mark in chart.marks
                ],
                "curves": [
                    {
                        "name": escape(curve.name),
                        "x": dict.fromkeys(("step", "tokens", "time"), _values_as_json(curve.steps))
                        if chart.axis
                        else positions(curve.run, curve.steps),
                        "y": _values_as_json(curve.y),
                        "color": curve.color,
                        "style": curve.style,
                        "texts": [escape(text) for text in curve.texts],
                    }
                    for curve in chart.curves
                ],
            }
            for chart in charts
        },
    }


def time_unit(longest: float) -> tuple[str, float]:
    """Returns the unit for times up to so many seconds, and its seconds."""
    for name, seconds in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if longest < 200 * seconds:
            return name, seconds
    return "days", 86400.0


def _values_as_json(values: Series) -> list[float | None]:
    """Returns counts as they are, and others with six digits; None for what is not a number."""
    whole = [int(value) if value.is_integer() else float(f"{value:.6g}") for value in values.tolist()]
    return [value if np.isfinite(value) else None for value in whole]


def downsample_curve(y: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Returns the positions to draw of a curve: the lowest and highest of `MOST_POINTS / 2` equal parts, and both ends.

    All of them if there are no more. A part without a finite value gives its first position, so that a
    gap stays a gap.
    """
    if len(y) <= MOST_POINTS:
        return np.arange(len(y))
    low, high = (np.where(np.isfinite(y), y, gap) for gap in (np.inf, -np.inf))
    firsts = np.linspace(0, len(y), MOST_POINTS // 2 + 1).astype(np.int64)[:-1]
    ends = [
        first + extreme
        for first, lows, highs in zip(firsts, np.split(low, firsts[1:]), np.split(high, firsts[1:]), strict=True)
        for extreme in (lows.argmin(), highs.argmax())
    ]
    return np.unique([0, *ends, len(y) - 1])


def running_mean(y: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Returns the mean of the last `width` values that are numbers; of fewer at the beginning."""
    known = np.isfinite(y)
    sums, counts = (np.insert(np.cumsum(values), 0, 0.0) for values in (np.where(known, y, 0.0), known))
    first = np.maximum(np.arange(1 - width, len(y) + 1 - width), 0)
    inside = counts[1:] - counts[first]
    return np.where(inside > 0, (sums[1:] - sums[first]) / np.maximum(inside, 1), np.nan)
