"""Charts of one run or of several over each other: curves over steps, tokens and time, and marks on them.

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

MOST_POINTS = 2000
"""Points of a curve; more cannot be told apart on a screen."""

# The colours that Plotly and matplotlib begin with.
_PALETTE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
_RED, _GREY = _PALETTE[3], _PALETTE[7]

# From so many points on, a curve is shown faintly below its running mean.
_SMOOTH_FROM = 150
_MEAN_OF = 50
_NOISY = ("loss", "grad_norm", "tokens_per_s", "step_s", "mfu")
_PHASES = {"data_s": "reading rows", "forward_backward_s": "forward and backward", "optimizer_s": "optimiser"}


@dataclass(frozen=True)
class Curve:
    """A line or set of points."""

    name: str
    x: dict[str, Series]
    """Positions by `step`, `tokens` and `time`."""
    y: Series
    color: str
    style: Style = "line"
    texts: tuple[str, ...] = ()
    """A text for each point, shown in place of its value when the mouse is over it."""


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
    """Name in the page and in files."""
    title: str
    unit: str
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    """Restarts, and the best evaluation."""
    wide: bool = False
    """True if it takes the whole width of the page."""
    logarithmic: bool = False
    """True if the vertical axis can be made logarithmic."""
    from_zero: bool = False


def time_unit(longest: float) -> tuple[str, float]:
    """Returns the unit for times up to so many seconds, and its seconds."""
    for name, seconds in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if longest < 200 * seconds:
            return name, seconds
    return "days", 86400.0


def _time_unit_of(runs: Sequence[tuple[str, RunHistory]]) -> tuple[str, float]:
    return time_unit(max((float(run.training_seconds[-1]) for _, run in runs if len(run.training["step"])), default=0))


@dataclass(frozen=True)
class _Drawn:
    """A run as it is drawn: in its colour, and with its times in one unit."""

    name: str
    run: RunHistory
    unit_s: float
    """Seconds of the unit of time."""
    color: str

    def positions(self, steps: Series) -> dict[str, Series]:
        """Returns the places of steps on each axis."""
        logged = self.run.training["step"]
        if len(logged) == 0:
            nothing = np.full(len(steps), np.nan)
            return {"step": steps, "tokens": nothing, "time": nothing}
        tokens, seconds = self.run.training["tokens"], self.run.training_seconds / self.unit_s
        if logged[0] > 0:
            # Nothing is logged at the start of the run.
            logged, tokens, seconds = (np.insert(values, 0, 0.0) for values in (logged, tokens, seconds))
        return {
            "step": steps,
            "tokens": np.interp(steps, logged, tokens),
            "time": np.interp(steps, logged, seconds),
        }

    def curve(self, name: str, y: Series, steps: Series, style: Style = "line", color: str = "") -> Curve:
        """A curve without the points that a screen cannot show."""
        chosen = downsample(y)
        return Curve(name, self.positions(steps[chosen]), y[chosen], color or self.color, style)

    def logged(self, key: str, name: str) -> list[Curve]:
        """A key of the logged steps; a noisy one with many points faintly, and then its running mean."""
        y, steps = self.run.training[key], self.run.training["step"]
        if key not in _NOISY or len(y) < _SMOOTH_FROM:
            return [self.curve(name, y, steps)]
        width = max(5, len(y) // _MEAN_OF)
        mean = self.curve(f"{name}, mean of {width:,}", running_mean(y, width), steps)
        return [self.curve(name, y, steps, "faint"), mean]

    def evaluated(self, key: str, name: str, color: str = "") -> Curve:
        """A key of the evaluations."""
        steps = self.run.evaluations["step"]
        return self.curve(name, self.run.evaluations.get(key, np.full(len(steps), np.nan)), steps, "points", color)

    def marks(self, steps: Sequence[float], label: str, sign: str) -> tuple[Mark, ...]:
        """Marks at these steps; `{}` in the label is the step."""
        places = self.positions(np.array(steps, dtype=np.float64))
        return tuple(
            Mark({axis: float(values[number]) for axis, values in places.items()}, label.format(int(step)), sign)
            for number, step in enumerate(steps)
        )


def charts_of(runs: Sequence[tuple[str, RunHistory]]) -> list[Chart]:
    """Returns the charts of one run, or of several over each other, but for those that have nothing to show.

    Args:
        runs: Names and runs.
    """
    (_, unit_s), many = _time_unit_of(runs), len(runs) > 1
    drawn = [_Drawn(name, run, unit_s, _PALETTE[n % len(_PALETTE)]) for n, (name, run) in enumerate(runs)]
    only = None if many else drawn[0]
    restarts = _restarts(only) if only is not None else ()
    best = _best(only) if only is not None else ()

    def logged(key: str, of: str, title: str, y_unit: str, more: Sequence[Curve] = (), **options: Any) -> Chart:
        curves = [curve for one in drawn for curve in _logged(one, of, title, many)]
        return Chart(key, title, y_unit, (*curves, *more), restarts, **options)

    def evaluated(key: str) -> tuple[Curve, ...]:
        name = key.replace("_", " ")
        return tuple(one.evaluated(key, one.name if many else name, "" if many else _PALETTE[1]) for one in drawn)

    validation = evaluated("validation_loss")
    if many:
        losses = [
            logged("loss", "loss", "Training loss", "nats a target", wide=True, logarithmic=True),
            Chart("validation-loss", "Validation loss", "nats a target", validation, wide=True, logarithmic=True),
        ]
    else:
        curves = (*_logged(drawn[0], "loss", "training loss", many), *validation)
        losses = [Chart("loss", "Loss", "nats a target", curves, (*restarts, *best), wide=True, logarithmic=True)]
    metrics = dict.fromkeys(key for _, run in runs for key in run.metrics)
    memory = f"Peak memory of {memory_of([run for _, run in runs])}, so far"
    found = [
        *losses,
        *(
            Chart(key.replace("_", "-"), key.capitalize().replace("_", " "), "", evaluated(key), (*restarts, *best))
            for key in metrics
        ),
        logged("learning-rate", "lr", "Learning rate", "", from_zero=True),
        logged(
            "gradient-norm",
            "grad_norm",
            "Gradient norm",
            "",
            _clipped_and_skipped(only) if only else (),
            logarithmic=True,
        ),
        logged("throughput", "tokens_per_s", "Throughput", "targets/s", from_zero=True),
        _step_time(only, restarts) if only else logged("step-time", "step_s", "Time of a step", "s", from_zero=True),
        logged("memory", "peak_memory_gib", memory, "GiB", from_zero=True),
        logged("mfu", "mfu", "Model FLOPs utilisation", "share", from_zero=True),
    ]
    return [chart for chart in found if any(np.isfinite(curve.y).any() for curve in chart.curves)]


def _logged(one: _Drawn, key: str, title: str, many: bool) -> list[Curve]:
    # Faint curves of several runs would hide each other.
    return one.logged(key, one.name)[-1:] if many else one.logged(key, title)


def _restarts(one: _Drawn) -> tuple[Mark, ...]:
    steps = [start.from_step for start in one.run.starts[1:]]
    return one.marks(steps, "restart at step {}", "↻") if len(one.run.training["step"]) else ()


def _best(one: _Drawn) -> tuple[Mark, ...]:
    best = one.run.best_evaluation
    return () if best is None else one.marks([best[0]], f"best {one.run.best_name}", "★")


def _clipped_and_skipped(one: _Drawn) -> list[Curve]:
    """Returns a line at what norms are clipped to, and the steps that were skipped."""
    curves, norms, steps = [], one.run.training["grad_norm"], one.run.training["step"]
    clip = one.run.recipe.get("optim", {}).get("clip_norm")
    if isinstance(clip, int | float) and len(steps):
        curves.append(one.curve(f"clipped to {clip:g}", np.full(2, float(clip)), steps[[0, -1]], "dashed", _GREY))
    if incidents := one.run.incidents:
        at = np.array([incident.step for incident in incidents], dtype=np.float64)
        # Their own norms are not numbers; they are drawn above the others.
        top = float(np.nanmax(norms)) if np.isfinite(norms).any() else 1.0
        texts = tuple(f"step {i.step} was skipped: {i.kind}, norm {i.grad_norm}" for i in incidents)
        curves.append(Curve("skipped step", one.positions(at), np.full(len(at), top), _RED, "cross", texts))
    return curves


def _step_time(one: _Drawn, marks: tuple[Mark, ...]) -> Chart:
    """Phases of a step on top of each other; what is left of it last."""
    whole = one.run.training["step_s"]
    chosen = downsample(whole)
    x = one.positions(one.run.training["step"][chosen])
    parts = {name: np.nan_to_num(one.run.training[key]) for key, name in _PHASES.items()}
    parts = {name: part for name, part in parts.items() if part.any()}
    parts["other"] = np.maximum(whole - sum(parts.values()), 0.0)
    curves = [
        Curve(name, x, part[chosen], color, "stacked")
        for (name, part), color in zip(parts.items(), _PALETTE, strict=False)
    ]
    return Chart("step-time", "Where a step's time goes", "s", tuple(curves), marks, from_zero=True)


def to_json(charts: Sequence[Chart], runs: Sequence[tuple[str, RunHistory]]) -> dict[str, Any]:
    """Returns charts for `report.js`. Plotly takes tags in texts as such, so they are escaped."""
    return {
        "axes": {"step": "step", "tokens": "tokens", "time": f"training time ({_time_unit_of(runs)[0]})"},
        "charts": {
            chart.key: {
                **vars(chart),
                "marks": [vars(mark) for mark in chart.marks],
                "curves": [
                    {
                        **vars(curve),
                        "name": escape(curve.name),
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


def _numbers(values: Series) -> list[float | None]:
    """Returns counts as they are, and others with six digits; None for what is not a number."""
    whole = [int(value) if value.is_integer() else float(f"{value:.6g}") for value in values.tolist()]
    return [value if np.isfinite(value) else None for value in whole]


def downsample(y: npt.NDArray[np.float64], most: int = MOST_POINTS) -> npt.NDArray[np.int64]:
    """Returns the positions to draw of a curve: the lowest and highest of `most / 2` equal parts, and both ends.

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
    """Returns the mean of the last `width` values that are numbers; of fewer at the beginning."""
    known = np.isfinite(y)
    sums, counts = np.cumsum(np.where(known, y, 0.0)), np.cumsum(known)
    before_sums = np.concatenate((np.zeros(min(width, len(y))), sums[:-width]))
    before_counts = np.concatenate((np.zeros(min(width, len(y))), counts[:-width]))
    inside = counts - before_counts
    return np.where(inside > 0, (sums - before_sums) / np.maximum(inside, 1), np.nan)
