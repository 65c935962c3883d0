"""Splits the time of steps into named parts."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


class PhaseTimer:
    """Splits time into named parts without making the host wait for the device.

    On a GPU, parts are measured between events, and read when the totals are asked for.
    """

    def __init__(self, device: torch.device, also: Callable[[str], None] = lambda name: None) -> None:
        """`also` is told of each mark."""
        self._cuda = device.type == "cuda"
        self._also = also
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """The time from here to the next mark belongs to `name`."""
        self._also(name)
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def totals(self) -> dict[str, float]:
        """Seconds a name since the last call. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        totals: defaultdict[str, float] = defaultdict(float)
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            totals[name] += start.elapsed_time(end) / 1000 if self._cuda else end - start
        self._marks = self._marks[-1:]
        return dict(totals)
