"""Formats figures for people: durations, counts, bytes, money."""

import math
import time


def duration(seconds: float | None) -> str:
    """`3 h 20 min`, `4 min 5 s`, `12 s`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    for large, small, size, unit in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // unit
            return f"{whole // size:,} {large}" + (f" {rest} {small}" if rest else "")
    return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{whole} s"


def number(value: object, digits: int = 4) -> str:
    """Returns a figure with so many significant digits; a dash for what is not there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–" if value is None or isinstance(value, float) else str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """`935 K`, `1.23 M`, `7.0 B`."""
    if value is None or not math.isfinite(value):
        return "–"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def memory(value: float | None) -> str:
    """Returns bytes as GiB, or as MiB or KiB where they are few."""
    if value is None:
        return "–"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def moment(seconds: float | None) -> str:
    """Returns local date and time."""
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def share(value: float | None) -> str:
    """Per cent."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.1%}"


def cost(price: float | None, hours: float, device: str) -> tuple[str, str]:
    """Returns the cost of a run at a price of a device and hour, or its hours without one, and a label."""
    what = "GPU" if device == "cuda" else "process"
    if price is None:
        return f"{hours:,.2f} h" if hours >= 0.1 else duration(hours * 3600), f"{what} time held"
    return f"{price * hours:,.2f}", f"cost at {price:g} a {what} and hour"
