"""Memory peaks that runs on this machine have measured, beside the predicted ones."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.utils.atomic_files import read_lines

_FILE = "peaks.jsonl"

# Below this, what libraries load meanwhile is a good part of a process's resident memory.
_LEAST_RESIDENT = 512 * 2**20


@dataclass(frozen=True)
class Peak:
    """The most that a rank held while it trained."""

    device: str
    of: str
    """`allocated` on a GPU; `resident` on a CPU: over what the process held before, libraries and all."""
    launch: str
    kind: str
    processes: int
    predicted: int
    """Bytes, without the margin."""
    measured: int


@dataclass(frozen=True)
class Error:
    """Measured peaks on a device beside the predicted ones."""

    device: str
    runs: int
    least: float
    median: float
    most: float
    """Measured by predicted."""

    def line(self) -> str:
        """Returns one line for people."""
        return (
            f"On this machine ({self.device}) {self.runs} run(s) took {self.least:.2f} to {self.most:.2f} of the peak "
            f"that was predicted, {self.median:.2f} in the middle."
        )


def add_peak(folder: Path, peak: Peak) -> None:
    """Writes a peak down.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # One write of one line: runs beside each other append, and do not mix.
    with (folder / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(peak)) + "\n")


def read_peaks(folder: Path) -> list[Peak]:
    """All that can be read of what was written down."""
    try:
        lines: list[Any] = read_lines(folder / _FILE)
    except (OSError, ValueError):
        return []
    return [Peak(**line) for line in lines if line.keys() == Peak.__dataclass_fields__.keys()]


def compare_peaks(peaks: Sequence[Peak], device: str) -> Error | None:
    """Compares all peaks of a device; None if none was large enough to tell."""
    told = [p for p in peaks if p.device == device and (p.of == "allocated" or p.predicted >= _LEAST_RESIDENT)]
    ratios = [peak.measured / peak.predicted for peak in told]
    return Error(device, len(ratios), min(ratios), statistics.median(ratios), max(ratios)) if ratios else None
