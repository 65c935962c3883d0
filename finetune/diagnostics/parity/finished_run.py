"""A finished run, as read from its directory."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.utils.atomic_files import read_lines
from finetune.utils.errors import CheckpointError, RecipeError


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended."""

    name: str
    """What it is called in tables."""
    directory: Path
    facts: dict[str, Any]
    """`run.json`."""
    steps: dict[int, dict[str, Any]]
    """The logged steps, counted from 1."""
    rows: dict[int, int]
    """The checksum of the rows that each step read; empty without a ledger."""

    @property
    def last(self) -> int:
        """The step that it came to."""
        return int(self.facts["length"]["num_steps"])

    @property
    def weights(self) -> list[Path]:
        """The files of the final weights; none if the recipe wrote no model."""
        return sorted((self.directory / "model").glob("*.safetensors"))

    @property
    def tokens_per_s(self) -> float | None:
        """Over all steps but the first, which pays for what comes once; None if no others are logged."""
        lines = [self.steps[step] for step in sorted(self.steps)]
        pairs = itertools.pairwise(lines)
        seconds = sum(line["step_s"] * (line["step"] - before["step"]) for before, line in pairs)
        return (lines[-1]["tokens"] - lines[0]["tokens"]) / seconds if seconds > 0 else None

    @property
    def peak_memory_gib(self) -> float | None:
        """The most that training took on the fullest rank; None if that was not measured."""
        measured = self.facts.get("peak_memory")
        return measured["measured"] / 2**30 if measured else None


def read(directory: Path, name: str | None = None) -> FinishedRun:
    """Reads a run that has ended.

    Raises:
        RecipeError: If there is none, or it has not ended.
        CheckpointError: If its files cannot be read.
    """
    facts = read_facts(directory)
    try:
        lines = read_lines(directory / "metrics.jsonl")
        ledger = directory / "ledger.jsonl"
        used = read_lines(ledger) if ledger.exists() else []
    except OSError as error:
        raise CheckpointError(f"{directory}: metrics or ledger cannot be read: {error.strerror or error}.") from error
    rows = {line["step"] + 1: line["rows"] for line in used if "step" in line}
    steps = {line["step"]: line for line in lines if "grad_norm" in line}
    if "finished" not in facts or not steps:
        raise RecipeError(
            f"{directory} holds a run that has not come to its end, or has trained nothing: only finished runs are "
            "compared. Start its command again, and it resumes."
        )
    return FinishedRun(name or directory.name, directory, facts, steps, rows)


def read_facts(directory: Path) -> dict[str, Any]:
    """The `run.json` of a run.

    Raises:
        RecipeError: If there is no run.
        CheckpointError: If it cannot be read.
    """
    try:
        facts: dict[str, Any] = json.loads((directory / "run.json").read_bytes())
    except FileNotFoundError as error:
        raise RecipeError(
            f"{directory} holds no run: it has no run.json. Give a directory such as runs/sample."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / 'run.json'} cannot be read: {error}.") from error
    return facts
