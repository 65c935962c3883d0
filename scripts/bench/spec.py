"""What an arm's process is told."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.cases import GROUPS, Case

LR, CLIP, BETAS = 1e-3, 1.0, (0.9, 0.999)
"""Of all arms. Nothing decays, since libraries decay different parameters."""


@dataclass(frozen=True)
class Spec:
    """An arm of a case."""

    case: Case
    arm: str
    launch: str
    processes: int
    address: str
    """The socket to connect to."""
    model: str
    rows: str
    folder: str
    """For files of its own."""
    steps: int
    spoil: bool = False
    """Reads the rows backwards: its losses must then be refused."""

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Spec":
        """The inverse of `write`."""
        tree = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**tree, "case": Case(**{**tree["case"], "arms": tuple(tree["case"]["arms"])})})

    def load_rows(self) -> np.ndarray:
        """The rows, in the order in which they are read."""
        rows: np.ndarray = np.load(self.rows)
        return np.ascontiguousarray(rows[::-1]) if self.spoil else rows

    @property
    def micro(self) -> int:
        """Rows of a micro-batch of one process, or of the group that it shares them with."""
        groups = 1 if self.processes == 1 else GROUPS.get(self.launch, 2)
        return self.case.micro // groups

    def window(self, step: int, rank: int) -> list[slice]:
        """The positions that a rank reads in a step, a slice for each micro-batch."""
        first, micro = step * self.case.rows, self.micro
        starts = (first + (m * self.processes + rank) * micro for m in range(self.case.accumulation))
        return [slice(start, start + micro) for start in starts]
