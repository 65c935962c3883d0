"""Reads a finished run from its directory."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.checkpoint import row_ledger, run_facts
from finetune.utils.atomic_files import Lines
from finetune.utils.errors import CheckpointError, RecipeError

_NEEDED = ("length", "identity", "runs", "precision")  # of `run.json`
_COMPARED = {"loss", "lr", "grad_norm", "tokens", "step_s"}


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended."""

    name: str
    """Name in tables."""
    directory: Path
    facts: dict[str, Any]
    """`run.json`."""
    steps: dict[int, dict[str, Any]]
    """The logged steps, counted from 1."""
    rows: dict[int, int]
    """The checksum of the rows that each step read; empty without a ledger."""
    damaged: dict[str, int]
    """Lines that cannot be read, by file."""

    @property
    def last(self) -> int:
        """Number of its last step."""
        return int(self.facts["length"]["num_steps"])

    @property
    def weights(self) -> list[Path]:
        """The files of the final weights; none if the recipe wrote no model."""
        return sorted((self.directory / "model").glob("*.safetensors"))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second over all steps but the first, which has one-time work; None if no others are logged."""
        lines = [self.steps[step] for step in sorted(self.steps)]
        seconds = sum(line["step_s"] * (line["step"] - before["step"]) for before, line in itertools.pairwise(lines))
        return (lines[-1]["tokens"] - lines[0]["tokens"]) / seconds if seconds > 0 else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Peak of training on the fullest rank; None if it was not measured."""
        measured = self.facts.get("peak_memory")
        return measured["measured"] / 2**30 if measured else None


def read_finished(directory: Path, name: str | None = None) -> FinishedRun:
    """Reads a run that has ended.

    Raises:
        RecipeError: If there is none, or it has not ended.
        CheckpointError: If its files cannot be read.
    """
    facts = run_facts.read_facts(directory)
    try:
        metrics = run_facts.read_metrics(directory)
        ledger = directory / row_ledger.LEDGER
        used = row_ledger.read_ledger(directory) if ledger.exists() else Lines([], {}, [])
    except OSError as error:
        raise CheckpointError(f"{directory}: metrics or ledger cannot be read: {error.strerror or error}.") from error
    rows = {line["step"] + 1: line["rows"] for line in used.whole if "step" in line}
    lines = [line for line in metrics.whole if "grad_norm" in line]
    steps = {line["step"]: line for line in lines if line.keys() >= _COMPARED}
    if missing := [key for key in _NEEDED if key not in facts]:
        raise CheckpointError(f"{directory / run_facts.RUN} has no {', '.join(missing)}. Restore it from a copy.")
    if "finished" not in facts or not steps:
        raise RecipeError(
            f"{directory} holds a run that has not come to its end, or has trained nothing: only finished runs are "
            "compared. Start its command again, and it resumes."
        )
    lost = len(metrics.damaged) + len(lines) - len(steps)
    damaged = {run_facts.METRICS: lost, row_ledger.LEDGER: len(used.damaged)}
    return FinishedRun(name or directory.name, directory, facts, steps, rows, damaged)
