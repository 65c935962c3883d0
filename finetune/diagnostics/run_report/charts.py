"""What is drawn of one run or of several: curves over steps, tokens and time, and the marks on them.

A chart is plain data. `report.js` draws it with Plotly on the page, `png_charts` with matplotlib.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from finetune.checkpoint.run_history import RunHistory, Series
from finetune.diagnostics.run_report.one_run import memory_of

Style = Literal["line", "faint", "points", "stacked", "cross", "dashed"]

AXES = {"step": "step", "tokens": "tokens", "time": "training time"}
"""What curves can be drawn over."""

MOST_POINTS = 2000
"""Of a curve; more cannot be told apart on a screen."""

# Above so many points a curve is shown faintly, below its running mean.
_SMOOTH_FROM = 150
_MEAN_OF = 50
_NOISY = ("loss", "grad_norm", "tokens_per_s", "step_s", "mfu")
# Names of the colours of `report.css`.
_MAIN, _SECOND, _BAD = "series-0", "series-1", "bad"
_PHASES = {
    "data_s": ("reading rows", "series-3"),
    "forward_backward_s": ("forward and backward", "series-0"),
    "optimizer_s": ("optimiser", "series-2"),
}


@dataclass(frozen=True)
class Curve:
    """One line or set of points."""

    name: str
    x: dict[str, Series]
    """By the keys of `AXES`."""
    y: Series
    color: str
    """Of the page's style."""
    style: Style = "line"
    texts: tuple[str, ...] = ()
    """Of each point, shown when it is hovered over; none: its value."""


@dataclass(frozen=True)
class Mark:
    """A place on the horizontal axis."""

    x: dict[str, float]
    label: str
    sign: str = "↻"


@dataclass(frozen=True)
class Chart:
    """A picture."""

    key: str
    """Names it in the page and in files."""
    title: str
    unit: str
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    """Restarts, and the best evaluation."""
    wide: bool = False
    """Whether it takes the whole width of the page."""
    logarithmic: bool = False
    """Whether the vertical axis can be made logarithmic."""
    from_zero: bool = False


@dataclass(frozen=True)
class TimeUnit:
    """What training time is counted in."""

    name: str
    seconds: float


def time_unit(longest: float) -> TimeUnit:
    """The unit for times up to so many seconds."""
    for name, seconds in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if longest < 200 * seconds:
            return TimeUnit(name, seconds)
    return TimeUnit("days", 86400.0)


def charts_of(runs: Sequence[tuple[str, RunHistory]]) -> list[Chart]:
    """The charts of one run, or of several over each other; without those that have nothing to show.

    Args:
        runs: Each with its name.
    """
    unit = time_unit(max((float(run.training_seconds[-1]) for _, run in runs if len(run.training["step"])), default=0))
    if len(runs) == 1:
        found = _of_one(runs[0][1], unit)
    else:
        found = _of_several(runs, unit)
    return [chart for chart in found if any(np.isfinite(curve.y).any() for curve in chart.curves)]


def _of_one(run: RunHistory, unit: TimeUnit) -> list[Chart]:
    marks = _restarts(run, unit)

    def simple(key: str, of: str, title: str, y_unit: str, *, from_zero: bool = False, color: str = _MAIN) -> Chart:
        curve = _curve(title, run, run.training[of], unit, color)
        curves = _smoothed(curve, run.training[of], run, unit) if of in _NOISY else [curve]
        return Chart(key, title, y_unit, tuple(curves), marks, from_zero=from_zero)

    training = _curve("training loss", run, run.training["loss"], unit, _MAIN)
    validation = _evaluation_curve("validation loss", run, unit, _SECOND, "validation_loss")
    best = _best(run, unit)
    loss = Chart(
        "loss",
        "Loss",
        "nats a target",
        (*_smoothed(training, run.training["loss"], run, unit), validation),
        (*marks, *best),
        wide=True,
        logarithmic=True,
    )
    return [
        loss,
        *(
            _metric(key, (_evaluation_curve(key.replace("_", " "), run, unit, _SECOND, key),), (*marks, *best))
            for key in run.metrics
        ),
        simple("learning-rate", "lr", "Learning rate", "", from_zero=True),
        _gradient_norm(run, unit, marks),
        simple("throughput", "tokens_per_s", "Throughput", "targets/s", from_zero=True),
        _step_time(run, unit, marks),
        simple("memory", "peak_memory_gib", f"Peak memory of {memory_of([run])}, so far", "GiB", from_zero=True),
        simple("mfu", "mfu", "Model FLOPs utilisation", "share", from_zero=True),
    ]


def _of_several(runs: Sequence[tuple[str, RunHistory]], unit: TimeUnit) -> list[Chart]:
    def over(key: str, of: str, title: str, y_unit: str, **options: Any) -> Chart:
        curves = []
        for number, (name, run) in enumerate(runs):
            curve = _curve(name, run, run.training[of], unit, _color(number))
            # Faint ones of several runs would hide each other.
            curves.append(_smoothed(curve, run.training[of], run, unit)[-1] if of in _NOISY else curve)
        return Chart(key, title, y_unit, tuple(curves), **options)

    def evaluated(key: str) -> tuple[Curve, ...]:
        return tuple(_evaluation_curve(name, run, unit, _color(n), key) for n, (name, run) in enumerate(runs))

    metrics = dict.fromkeys(key for _, run in runs for key in run.metrics)
    return [
        over("loss", "loss", "Training loss", "nats a target", wide=True, logarithmic=True),
        Chart(
            "validation-loss",
            "Validation loss",
            "nats a target",
            evaluated("validation_loss"),
            wide=True,
            logarithmic=True,
        ),
        *(_metric(key, evaluated(key), ()) for key in metrics),
        over("learning-rate", "lr", "Learning rate", "", from_zero=True),
        over("gradient-norm", "grad_norm", "Gradient norm", "", logarithmic=True),
        over("throughput", "tokens_per_s", "Throughput", "targets/s", from_zero=True),
        over("step-time", "step_s", "Time of a step", "s", from_zero=True),
        over(
            "memory",
            "peak_memory_gib",
            f"Peak memory of {memory_of([run for _, run in runs])}, so far",
            "GiB",
            from_zero=True,
        ),
    ]


def _color(number: int) -> str:
    return f"series-{number % 8}"


def _x(run: RunHistory, unit: TimeUnit, steps: Series) -> dict[str, Series]:
    """Where steps lie on each axis."""
    logged = run.training["step"]
    if len(logged) == 0:
        nothing = np.full(len(steps), np.nan)
        return {"step": steps, "tokens": nothing, "time": nothing}
    # From the start of the run, where nothing is logged.
    known = np.concatenate(([0.0], logged)) if logged[0] > 0 else logged
    extra = len(known) - len(logged)
    tokens = np.concatenate((np.zeros(extra), run.training["tokens"]))
    seconds = np.concatenate((np.zeros(extra), run.training_seconds))
    return {
        "step": steps,
        "tokens": np.interp(steps, known, tokens),
        "time": np.interp(steps, known, seconds / unit.seconds),
    }


def _curve(name: str, run: RunHistory, y: Series, unit: TimeUnit, color: str, style: Style = "line") -> Curve:
    chosen = downsample(y)
    return Curve(name, _x(run, unit, run.training["step"][chosen]), y[chosen], color, style)


def _smoothed(curve: Curve, y: Series, run: RunHistory, unit: TimeUnit) -> list[Curve]:
    """The curve; where it has many points, faintly, below its running mean."""
    if len(y) < _SMOOTH_FROM:
        return [curve]
    faint = Curve(curve.name, curve.x, curve.y, curve.color, "faint")
    width = max(5, len(y) // _MEAN_OF)
    return [faint, _curve(f"{curve.name}, mean of {width:,}", run, running_mean(y, width), unit, curve.color)]


def _metric(key: str, curves: tuple[Curve, ...], marks: tuple[Mark, ...]) -> Chart:
    return Chart(key.replace("_", "-"), key.capitalize().replace("_", " "), "", curves, marks)


def _best(run: RunHistory, unit: TimeUnit) -> tuple[Mark, ...]:
    """Where the best evaluation is."""
    if (best := run.best_evaluation) is None:
        return ()
    x = _x(run, unit, np.array([float(best[0])]))
    return (Mark({axis: float(values[0]) for axis, values in x.items()}, f"best {run.best_name}", "★"),)


def _evaluation_curve(name: str, run: RunHistory, unit: TimeUnit, color: str, key: str) -> Curve:
    y = run.evaluations.get(key, np.full(len(run.evaluations["step"]), np.nan))
    chosen = downsample(y)
    return Curve(name, _x(run, unit, run.evaluations["step"][chosen]), y[chosen], color, "points")


def _gradient_norm(run: RunHistory, unit: TimeUnit, marks: tuple[Mark, ...]) -> Chart:
    norms = run.training["grad_norm"]
    curves = _smoothed(_curve("gradient norm", run, norms, unit, _MAIN), norms, run, unit)
    clip = run.recipe.get("optim", {}).get("clip_norm")
    steps = run.training["step"]
    if isinstance(clip, int | float) and len(steps):
        ends = np.array([steps[0], steps[-1]])
        curves.append(Curve(f"clipped to {clip:g}", _x(run, unit, ends), np.full(2, float(clip)), "muted", "dashed"))
    if run.incidents:
        at = np.array([incident.step for incident in run.incidents], dtype=np.float64)
        # Their own norms are not numbers; they are drawn above the others.
        top = float(np.nanmax(norms)) if np.isfinite(norms).any() else 1.0
        texts = tuple(f"step {i.step} was skipped: {i.kind}, norm {i.grad_norm}" for i in run.incidents)
        curves.append(Curve("skipped step", _x(run, unit, at), np.full(len(at), top), _BAD, "cross", texts))
    return Chart("gradient-norm", "Gradient norm", "", tuple(curves), marks, logarithmic=True)


def _step_time(run: RunHistory, unit: TimeUnit, marks: tuple[Mark, ...]) -> Chart:
    whole = run.training["step_s"]
    chosen = downsample(whole)
    x = _x(run, unit, run.training["step"][chosen])
    curves, rest = [], whole.copy()
    for key, (name, color) in _PHASES.items():
        part = run.training[key]
        if np.isfinite(part).any():
            curves.append(Curve(name, x, np.nan_to_num(part[chosen]), color, "stacked"))
            rest = rest - np.nan_to_num(part)
    curves.append(Curve("other", x, np.maximum(rest[chosen], 0.0), "series-7", "stacked"))
    return Chart("step-time", "Where a step's time goes", "s", tuple(curves), marks, from_zero=True)


def _restarts(run: RunHistory, unit: TimeUnit) -> tuple[Mark, ...]:
    if not len(run.training["step"]):
        return ()
    at = np.array([start.from_step for start in run.starts[1:]], dtype=np.float64)
    x = _x(run, unit, at)
    return tuple(
        Mark({axis: float(values[number]) for axis, values in x.items()}, f"restart at step {int(at[number])}")
        for number in range(len(at))
    )


def to_json(charts: Sequence[Chart], runs: Sequence[tuple[str, RunHistory]]) -> dict[str, Any]:
    """Charts for `report.js`; what is not a number is null. Plotly takes tags in texts as such, so they are escaped."""
    unit = time_unit(max((float(run.training_seconds[-1]) for _, run in runs if len(run.training["step"])), default=0))
    return {
        "axes": {**AXES, "time": f"{AXES['time']} ({unit.name})"},
        "charts": {
            chart.key: {
                "title": chart.title,
                "unit": chart.unit,
                "logarithmic": chart.logarithmic,
                "fromZero": chart.from_zero,
                "marks": [{"x": mark.x, "label": mark.label, "sign": mark.sign} for mark in chart.marks],
                "curves": [
                    {
                        "name": escape(curve.name),
                        "color": curve.color,
                        "style": curve.style,
                        "x": {axis: _numbers(values) for axis, values in curve.x.items()},
                        "y": _numbers(curve.y),
                        "texts": [escape(text) for text in curve.texts],
                    }
                    for curve in chart.curves
                ],
            }
            for chart in charts
        },
    }


def _numbers(values: Series) -> list[float | int | None]:
    """Six digits are more than a screen shows."""
    found: list[float | int | None] = []
    for value in values.tolist():
        if not np.isfinite(value):
            found.append(None)
        elif value == int(value) and abs(value) < 2**53:
            found.append(int(value))
        else:
            found.append(float(f"{value:.6g}"))
    return found


def downsample(y: npt.NDArray[np.float64], most: int = MOST_POINTS) -> npt.NDArray[np.int64]:
    """Positions to draw of a curve: the lowest and the highest of each of `most / 2` equal parts, and both ends.

    All of them if there are no more than `most`. A part without a finite value gives its first position, so that a
    gap stays a gap.
    """
    if len(y) <= most:
        return np.arange(len(y))
    edges = np.linspace(0, len(y), most // 2 + 1).astype(np.int64)
    chosen = {0, len(y) - 1}
    for first, behind in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = y[first:behind]
        if np.isfinite(part).any():
            chosen |= {first + int(np.nanargmin(part)), first + int(np.nanargmax(part))}
        else:
            chosen.add(first)
    return np.array(sorted(chosen), dtype=np.int64)


def running_mean(y: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """The mean of the last `width` values that are numbers; fewer at the beginning."""
    known = np.isfinite(y)
    sums, counts = np.cumsum(np.where(known, y, 0.0)), np.cumsum(known)
    before_sums = np.concatenate((np.zeros(min(width, len(y))), sums[:-width]))
    before_counts = np.concatenate((np.zeros(min(width, len(y))), counts[:-width]))
    inside = counts - before_counts
    return np.where(inside > 0, (sums - before_sums) / np.maximum(inside, 1), np.nan)
