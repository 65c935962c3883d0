"""Draws the losses of a run as a small SVG for its model card; `finetune report` draws all else."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from finetune.checkpoint.run_history import RunHistory, Series, read_run
from finetune.utils.errors import FinetuneError

# Pixels: the picture, and what is left around the curves for their scales.
_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_TICKS = 5

# Colours that can be told apart on white and on black.
_COLORS, _GREY = ("#4c8dff", "#e07b00"), "#8a929c"


def loss_curves(run: RunHistory) -> list[tuple[str, Series, Series]]:
    """Returns names, steps and values of the training and the validation losses that are numbers."""
    curves = []
    for name, steps, losses in (
        ("training loss", run.training["step"], run.training["loss"]),
        ("validation loss", run.evaluations["step"], run.evaluations["validation_loss"]),
    ):
        known = np.isfinite(losses)
        curves.append((name, steps[known], losses[known]))
    return curves


def write_loss_plot(folder: Path, run: Path, last_step: int | None) -> str | None:
    """Writes `loss.svg`, and returns its name; None if the run has no two losses to draw.

    Args:
        last_step: Step of the weights; later ones are left out.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        history = read_run(run)
    except FinetuneError:
        return None  # weights of which no history is left
    most = math.inf if last_step is None else last_step
    curves = [(name, steps[steps <= most], losses[steps <= most]) for name, steps, losses in loss_curves(history)]
    curves = [curve for curve in curves if len(curve[1])]
    if not curves or len(curves[0][1]) < 2:
        return None
    (folder / "loss.svg").write_text("\n".join(_svg(curves)) + "\n", encoding="utf-8")
    return "loss.svg"


def _svg(curves: Sequence[tuple[str, Series, Series]]) -> Iterator[str]:
    every_x, every_y = (np.concatenate([curve[part] for curve in curves]) for part in (1, 2))
    last, low, high = float(every_x.max()), float(every_y.min()), float(every_y.max())
    high = high if high > low else low + 1.0

    def x(step: float) -> float:
        return _LEFT + step / last * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - loss) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    for tick in np.linspace(low, high, _TICKS):
        yield f'<path d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}" stroke="{_GREY}" opacity="0.3"/>'
        yield f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="{_GREY}">{tick:.3g}</text>'
    for tick in np.linspace(0, last, _TICKS).round():
        yield f'<text x="{x(tick):.1f}" y="{_HEIGHT - 18}" text-anchor="middle" fill="{_GREY}">{tick:,.0f}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end" fill="{_GREY}">step</text>'
    for number, ((name, steps, losses), color) in enumerate(zip(curves, _COLORS, strict=False)):
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in zip(steps, losses, strict=True))
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
        yield f'<circle cx="{x(steps[-1]):.1f}" cy="{y(losses[-1]):.1f}" r="3" fill="{color}"/>'
        said = f"{name}, {losses[-1]:.4g} at the end"
        yield f'<text x="{_LEFT + number * 260}" y="18" fill="{color}">{said}</text>'
    yield "</svg>"
