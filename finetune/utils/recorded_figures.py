"""Figures that any part of a step's forward pass records by name; a log step has them among its metrics."""

from collections.abc import Callable
from functools import wraps
from typing import Any

Totals = dict[str, tuple[Any, Any]]
"""Sums of values and of counts by name: numbers, or scalars in fp64 on the device."""

# Those of the forward pass that runs, if one of a step does.
_open: list[Totals] = []


def record(name: str, value: Any, count: Any = 0) -> None:
    """Records a figure of the step whose forward pass runs; elsewhere, as in evaluations, it does nothing.

    Metrics have the sum of all values over micro-batches and ranks, divided by the sum of their counts, if there are
    any. Every rank must record the same names in a step. What is recomputed in the backward pass counts once, and
    nothing is read from the device but on log steps.

    Args:
        value: A number, or a tensor with one element.
        count: Of what a mean is taken; 0 for a sum.
    """
    for totals in _open:
        so_far = totals.get(name, (0.0, 0.0))
        totals[name] = (so_far[0] + _detached(value), so_far[1] + _detached(count))


def _detached(value: Any) -> Any:
    return value.detach().double().reshape(()) if hasattr(value, "detach") else float(value)


def recording(function: Callable[..., Any], totals: Totals) -> Callable[..., Any]:
    """Returns a function in which figures are recorded: added to `totals`."""

    @wraps(function)
    def recorded(*args: Any) -> Any:
        _open.append(totals)
        try:
            return function(*args)
        finally:
            _open.remove(totals)

    return recorded
