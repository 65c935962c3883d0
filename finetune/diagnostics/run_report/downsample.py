"""Fewer points of a curve, for display: extremes stay."""

import numpy as np
import numpy.typing as npt

MOST_POINTS = 2000
"""Of a curve; more cannot be told apart on a screen."""


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
