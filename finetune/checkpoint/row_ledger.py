"""Which rows each step read, so that `finetune audit` can verify it, and which steps were skipped.

`ledger.jsonl` has a line for each start of a run, which says how positions map to rows, and one for each step with
a checksum over the rows that all ranks read for it. The checksum is a sum, so it rides on the step's all-reduce.
`audit` computes the rows of each step anew, compares the checksums, and counts how often each row was used.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.checkpoint import integrity
from finetune.data.rows.row_order import mix, rows_at
from finetune.utils.atomic_files import read_lines
from finetune.utils.errors import CheckpointError, RecipeError

LEDGER = "ledger.jsonl"
INCIDENTS = "incidents.jsonl"
# Whole numbers in the line of a start.
_START = ("start", "position", "seed", "num_rows", "epoch_rows", "global_size")


def checksum(rows: npt.NDArray[np.integer]) -> int:
    """32 mixed bits a row, added up. Sums over ranks stay exact in float64 for up to 2 million rows a step."""
    return int((mix(np.asarray(rows).astype(np.uint64).ravel()) >> np.uint64(32)).sum())


@dataclass(frozen=True)
class Skipped:
    """A step that changed no weight."""

    step: int
    """Counted from 1."""
    kind: str
    """`nonfinite`: a loss or gradient was not finite; `overflow`: fp16's loss scale was too large."""
    rows: list[int]
    """That it read, in the order of positions."""

    @classmethod
    def of(cls, incident: dict[str, Any]) -> "Skipped":
        """What a line of `incidents.jsonl` tells."""
        rows = [row for part in incident["micro_batches"] for row in part["rows"]]
        return cls(incident["step"], incident["kind"], rows)

    def line(self) -> str:
        """For people."""
        return f"step {self.step} ({self.kind}): rows {_brief(self.rows, 32)}"


def skipped(directory: Path) -> list[Skipped]:
    """The steps that a run has skipped, in order; none if it has written down no incident.

    Raises:
        CheckpointError: If `incidents.jsonl` cannot be read.
    """
    file = directory / INCIDENTS
    try:
        return [Skipped.of(line) for line in read_lines(file)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (LookupError, TypeError) as error:
        raise CheckpointError(f"{file} holds a line that no run writes: {error}.") from error


@dataclass(frozen=True)
class Used:
    """What one step used."""

    step: int
    position: int
    rows: npt.NDArray[np.int64]
    """In the order of positions: micro-batches, ranks, rows."""
    proved: bool
    """Whether the checksum that the ranks wrote is that of these rows."""
    order: dict[str, Any]


def used(directory: Path) -> Iterator[Used]:
    """What each step used that the run's weights have learned from, in order.

    Where a resume took steps again, the later time counts: the earlier one was lost with the weights.

    Raises:
        CheckpointError: If there is no ledger, it is damaged, or a step is missing or there twice.
    """
    try:
        lines = read_lines(directory / LEDGER)
    except OSError as error:
        raise CheckpointError(f"{directory / LEDGER} cannot be read: {error.strerror or error}.") from error
    try:
        yield from _used(directory / LEDGER, lines)
    except (LookupError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{directory / LEDGER} holds a line that no run writes: {error}.") from error


def _used(file: Path, lines: list[dict[str, Any]]) -> Iterator[Used]:
    steps: dict[int, tuple[int, dict[str, Any], int]] = {}
    first, start = 0, None
    for line in lines:
        _check_numbers(line)
        if "start" in line:
            start = line
            steps = {step: value for step, value in steps.items() if step < line["start"]}
            if not steps:
                first = line["start"]
            continue
        if start is None:
            raise CheckpointError(f"{file} has a step before the line that says how the run was started.")
        if line["step"] in steps:
            raise CheckpointError(f"{file} has two lines for step {line['step'] + 1}, and no start between them.")
        position = start["position"] + (line["step"] - start["start"]) * start["global_size"]
        steps[line["step"]] = (position, start, line["rows"])
    for expected, step in enumerate(sorted(steps), start=first):
        if step != expected:
            raise CheckpointError(f"{file} has no line for step {expected + 1}, but one for a later step.")
        position, order, written = steps[step]
        rows = rows_at(
            np.arange(position, position + order["global_size"]),
            num_rows=order["num_rows"],
            seed=order["seed"],
            epoch_rows=order["epoch_rows"],
        )
        yield Used(step, position, rows, checksum(rows) == written, order)


def _check_numbers(line: dict[str, Any]) -> None:
    for key in _START if "start" in line else ("step", "rows"):
        if type(line[key]) is not int or not 0 <= line[key] < 1 << 63:
            raise ValueError(f"{key} is {line[key]!r}")


@dataclass
class Epoch:
    """How often an epoch's rows were used."""

    number: int
    rows: int
    """Rows that the epoch has."""
    once: int = 0
    """Used exactly once."""
    more: int = 0
    """Used more than once."""

    @property
    def finished(self) -> bool:
        return self.once + self.more >= self.rows


@dataclass(frozen=True)
class Audit:
    """What the ledger proves."""

    first: int
    """The first step, counted from 1: another than that of a run that began from another one's checkpoint."""
    num_steps: int
    lost: str | None
    """What the ledger does not reach, though the run did."""
    epochs: list[Epoch]
    unproved: list[int]
    """Steps, counted from 1, whose checksum is not that of the rows they should have read."""
    gaps: list[int]
    """Steps, counted from 1, that do not begin where the one before ended."""
    skipped: list[Skipped]
    """Steps whose rows were read, and changed no weight."""

    @property
    def holds(self) -> bool:
        exact = all(epoch.more == 0 and (epoch.once == epoch.rows or not epoch.finished) for epoch in self.epochs)
        return exact and not self.unproved and not self.gaps and not self.lost and self.num_steps > 0

    def lines(self) -> list[str]:
        """What people read."""
        begin = f", from step {self.first} on," if self.first > 1 else ""
        lines = [f"{self.num_steps:,} steps{begin or ','} each with the checksum of the rows that its ranks read"]
        for epoch in self.epochs:
            end = "each row exactly once" if epoch.once == epoch.rows else f"{epoch.once:,} rows once so far"
            more = f", {epoch.more:,} MORE THAN ONCE" if epoch.more else ""
            lines.append(f"epoch {epoch.number + 1}: {epoch.rows:,} rows, {end}{more}")
        if self.skipped:
            lines.append(f"{len(self.skipped):,} of these steps skipped, so their rows changed no weight:")
            lines += [f"  {step.line()}" for step in self.skipped[:10]]
            lines += [f"  and {len(self.skipped) - 10:,} more, in {INCIDENTS}"] * (len(self.skipped) > 10)
        if self.unproved:
            lines.append(f"NOT the rows that the order says: steps {_brief(self.unproved)}")
        if self.gaps:
            lines.append(f"NOT where the step before ended: steps {_brief(self.gaps)}")
        if self.lost:
            lines.append(self.lost)
        lines.append("the ledger holds" if self.holds else "THE LEDGER DOES NOT HOLD")
        return lines


def span(text: str) -> tuple[int, int]:
    """The steps of `A:B`, or of `A` alone.

    Raises:
        RecipeError: If it is neither.
    """
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError as error:
        raise RecipeError(f"--steps {text}: give A:B, such as 100:120, or one step.") from error


def _brief(numbers: list[int], most: int = 10) -> str:
    more = f" and {len(numbers) - most:,} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def audit(directory: Path) -> Audit:
    """Counts how often each row of each epoch was used, over all resumes.

    Raises:
        CheckpointError: If the ledger cannot be read.
    """
    counts: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}
    sizes: dict[tuple[str, int], int] = {}
    unproved: list[int] = []
    gaps: list[int] = []
    expected: int | None = None
    first = total = 0
    for entry in used(directory):
        first = first or entry.step + 1
        total += 1
        if not entry.proved:
            unproved.append(entry.step + 1)
        if expected is not None and entry.position != expected:
            gaps.append(entry.step + 1)
        expected = entry.position + len(entry.rows)
        epoch_rows = entry.order["epoch_rows"]
        numbers = np.arange(entry.position, expected) // epoch_rows
        for number in np.unique(numbers).tolist():
            key = (str(entry.order["data"]), number)
            sizes[key] = epoch_rows
            seen = counts.setdefault(key, np.zeros(entry.order["num_rows"], np.uint8))
            np.add.at(seen, entry.rows[numbers == number], 1)
    epochs = [
        Epoch(number, sizes[data, number], int((seen == 1).sum()), int((seen > 1).sum()))
        for (data, number), seen in counts.items()
    ]
    last = first + total - 1
    unlearned = [step for step in skipped(directory) if first <= step.step <= last]
    return Audit(first, total, _lost(directory, first, last), epochs, unproved, gaps, unlearned)


def _lost(directory: Path, first: int, last: int) -> str | None:
    """Steps that the run has taken, as `run.json` and its checkpoints say, and the ledger has not; None if none."""
    try:
        facts = json.loads((directory / "run.json").read_bytes())
        starts = facts["starts"]
        begun, reached = starts[0]["from_step"] + 1, starts[-1]["from_step"]
        if "finished" in facts:
            reached = facts["length"]["num_steps"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # the ledger alone has to do
    if first > begun:
        return f"NOT from the beginning: the run began with step {begun}"
    checkpoints = integrity.list_checkpoints(directory / "checkpoints")
    saved = (integrity.step_of(checkpoints[0]) or 0) if checkpoints else 0
    # Where a damaged checkpoint was refused, its step was taken, and lost again: the ledger has been there.
    if all(line.get("step", -1) + 1 < saved for line in read_lines(directory / LEDGER)):
        reached = max(reached, saved)
    return f"NOT to the end: the run has come to step {reached}" if last < reached else None
