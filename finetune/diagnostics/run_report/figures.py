"""Formats figures for people: durations, counts, bytes, times, progress."""

import math
import time

from rich.filesize import pick_unit_and_suffix


def format_duration(seconds: float | None) -> str:
    """`3 h 20 min`, `4 min 5 s`, `12 s`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    for large, small, size, unit in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // unit
            return f"{whole // size:,} {large}" + (f" {rest} {small}" if rest else "")
    return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{whole} s"


def format_number(value: object, digits: int = 4) -> str:
    """Returns a figure with so many significant digits; a dash for what is not there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–" if value is None or isinstance(value, float) else str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def format_count(value: float) -> str:
    """`935 K`, `1.23 M`, `7.0 B`; a dash for what is not finite."""
    if not math.isfinite(value):
        return "–"
    unit, suffix = pick_unit_and_suffix(int(value), ["", " K", " M", " B", " T"], 1000)
    return f"{value / unit:.3g}{suffix}"


def format_bytes(value: float | None) -> str:
    """Returns bytes as GiB, or as MiB or KiB where they are few."""
    if value is None:
        return "–"
    unit, suffix = pick_unit_and_suffix(int(value), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{value / unit:,.{0 if unit == 1 else 2}f} {suffix}"


def format_time(seconds: float | None) -> str:
    """Returns local date and time."""
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def format_progress(step: int, num_steps: int | None, between: str = "/") -> str:
    """`5/60`."""
    return f"{step:,}" if num_steps is None else f"{step:,}{between}{num_steps:,}"
