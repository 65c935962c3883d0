"""`run.json`, and what else every reader of a run directory has to know of its files. No torch here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import recipe_paths
from finetune.utils import json_files
from finetune.utils.atomic_files import Lines, read_whole_lines
from finetune.utils.errors import CheckpointError, RecipeError

RUN = "run.json"
METRICS, INCIDENTS, MACHINES, EXAMPLES = "metrics.jsonl", "incidents.jsonl", "machines.jsonl", "examples.json"

_NUMBER, _TEXT, _OBJECT = (float, type(None)), (str, type(None)), (dict, type(None))
# What is read of `run.json`. Earlier versions wrote less, so only the starts must be there.
_SHAPE: json_files.Shape = {
    "starts": [
        {
            **dict.fromkeys(("time", "host"), str),
            **dict.fromkeys(("pid", "processes", "data_ranks", "from_step"), int),
            **dict.fromkeys(("ended", "resumed_from"), _TEXT),
            "to_step": (int, type(None)),
            "last_logged": _NUMBER,
        }
    ],
    "first_checkpoint": int,
    "command": list,
    "results": {"ended_early": {"step": int, "best": {"by": _TEXT, "value": _NUMBER, "evaluations": int}}},
    "length": {"num_steps": int},
    **dict.fromkeys(("finished", "stopped", "precision"), str),
    **dict.fromkeys(("identity", "data", "launch", "runs", "versions"), dict),
    **dict.fromkeys(("base", "memory", "peak_memory", "kernels", "gradients"), _OBJECT),
}
FIGURE_NAME = re.compile("[A-Za-z0-9_/-]{1,64}")
"""Names that terms of the loss, and figures that are recorded, may have."""
STEP_NUMBERS = ("loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "time")
"""Keys of a line of metrics whose values are numbers, or null if they are not finite."""
_STEP: json_files.Shape = {"step": int, **dict.fromkeys((*STEP_NUMBERS, "validation_loss"), _NUMBER)}
_INCIDENT: dict[str, json_files.Shape] = {"step": int, "kind": str, "in_a_row": int, "micro_batches": [{"rows": [int]}]}


def read_facts(directory: Path) -> dict[str, Any]:
    """Returns the `run.json` of a run.

    Raises:
        RecipeError: If there is no run.
        CheckpointError: If it cannot be read.
    """
    file = directory / RUN
    with CheckpointError.explaining(f"{file} cannot be read", "Restore it from a copy."):
        try:
            facts: dict[str, Any] = json_files.read(file, _SHAPE, needed=["starts"])
        except (FileNotFoundError, NotADirectoryError) as error:
            none = (
                f"{directory} holds no run: it has no run.json. Give a run directory, such as runs/sample; `finetune "
                "runs` lists those that are here."
            )
            raise RecipeError(recipe_paths.why_not(directory, "run") or none) from error
    return facts


@dataclass(frozen=True)
class Incident:
    """A step that was skipped: it changed no weight."""

    step: int
    """Counted from 1."""
    kind: str
    """`nonfinite`: a loss or gradient was not finite; `overflow`: fp16's loss scale was too large."""
    in_a_row: int
    fatal: bool
    """True if the run ended by it."""
    grad_norm: str
    rows: tuple[int, ...]
    """Rows that it read, in the order of positions."""

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> "Incident":
        """Returns what a line of `incidents.jsonl` tells."""
        rows = tuple(row for micro_batch in line["micro_batches"] for row in micro_batch["rows"])
        fatal, norm = bool(line.get("fatal", False)), str(line.get("grad_norm", ""))
        return cls(line["step"], line["kind"], line["in_a_row"], fatal, norm, rows)

    def line(self) -> str:
        """Returns what people read."""
        return f"step {self.step} ({self.kind}): rows {brief_list(self.rows, 32)}"


def brief_list(items: Sequence[int | str], most: int = 10) -> str:
    """Returns the first of many numbers or names, and how many more there are."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def read_metrics(directory: Path) -> Lines:
    """Returns the lines of a run's metrics, as the file has them.

    Raises:
        OSError: If there is no such file.
    """
    return read_whole_lines(
        directory / METRICS,
        lambda line: json_files.shape_mismatch(line, _STEP, ["step"]) is None and line["step"] >= 0,
    )


def read_incidents(directory: Path) -> Lines:
    """Returns the lines of the steps that a run has skipped; none without such a file.

    Raises:
        OSError: If it cannot be read.
    """
    try:
        return read_whole_lines(
            directory / INCIDENTS,
            lambda line: json_files.shape_mismatch(line, _INCIDENT, _INCIDENT) is None and line["step"] > 0,
        )
    except FileNotFoundError:
        return Lines([], {}, [])
