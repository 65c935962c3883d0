"""The rows that each step read, for `finetune audit` to verify, and the steps that were skipped.

`ledger.jsonl` has a line for each start of a run, which says how positions map to rows, and one for each step with
a checksum over the rows that all ranks read for it. The checksum is a sum, so it rides on the step's all-reduce.
`audit` computes the rows of each step anew, compares the checksums, and counts how often each row was used.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.checkpoint.checkpoint_store import open_store, step_of
from finetune.checkpoint.run_facts import INCIDENTS, Incident, brief_list, read_facts, read_incidents
from finetune.data.rows.row_order import RowOrder, row_checksum
from finetune.utils.atomic_files import Lines, read_whole_lines, rewrite_lines, set_damaged_lines_aside
from finetune.utils.errors import CheckpointError, FinetuneError

LEDGER = "ledger.jsonl"
# Whole numbers in the line of a start.
_START = ("start", "position", "seed", "num_rows", "epoch_rows", "global_size")
# Of the line that a resume leaves in the place of one that it could not read.
_DAMAGED = "damaged"
# Far more than there are; an audit makes a table of so many.
_MOST_ROWS = 1 << 40


def read_skipped(directory: Path) -> list[Incident]:
    """Returns the steps that a run has skipped, in order, as far as they can be read."""
    with CheckpointError.explaining(f"{directory / INCIDENTS} cannot be read", "", OSError):
        return [Incident.from_line(line) for line in read_incidents(directory).whole]


@dataclass(frozen=True)
class Used:
    """A step's line in the ledger, and the rows that the step used."""

    step: int
    position: int
    order: RowOrder
    checksum: int
    sure: bool
    """True if no damaged line since the last start can have been another one."""

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """Row numbers in the order of positions: micro-batches, ranks, rows."""
        return self.order.step_rows(self.position)

    @cached_property
    def proved(self) -> bool:
        """True if the checksum that the ranks wrote is that of these rows."""
        return row_checksum(self.rows) == self.checksum


def used_rows(directory: Path) -> Iterator[Used]:
    """Returns the rows that the run's weights have learned from, step by step.

    Steps without a readable line are left out. Where a resume took steps again, the later time counts: the earlier one
    was lost with the weights.

    Raises:
        CheckpointError: If there is no ledger, or a step is there twice.
    """
    return _read(directory)[1]


def read_ledger(directory: Path) -> Lines:
    """Returns the lines of a run's ledger."""
    return read_whole_lines(directory / LEDGER, _is_line)


def mend_ledger(directory: Path, step: int) -> list[str]:
    """Sets damaged lines of the ledger aside before a run goes on after a step, and returns what to report.

    Nothing holds a copy of them: what is lost is said, here and by each audit.

    Raises:
        CheckpointError: If a step is there twice.
        OSError: If the ledger cannot be read or written.
    """
    file = directory / LEDGER
    lines = read_ledger(directory) if file.exists() else Lines([], {}, [])
    reports = []
    if (moved := set_damaged_lines_aside(file, lines)) is not None:
        reports.append(f"{moved}.")
        kept = list(lines.whole)
        for index in reversed(lines.before):
            kept.insert(index, {_DAMAGED: 1})  # any of them may have been that of a start
        rewrite_lines(file, kept)
    first, steps = _steps(file, lines)
    begun = read_facts(directory)["starts"][0]["from_step"]
    missing = [number + 1 for number in range(min(begun, first), step) if number not in steps]
    if missing:
        reports.append(
            f"{file}: {_no_line(missing)}. The run goes on, and learns what it would have learned; but which rows "
            "these steps read can no longer be proved, and `finetune audit` will say so."
        )
    return reports


def _read(directory: Path) -> tuple[int, Iterator[Used], Lines]:
    """Returns the first step, counted from 0 as in the file, the steps that count, in order, and all lines."""
    file = directory / LEDGER
    with CheckpointError.explaining(f"{file} cannot be read", "", OSError):
        if not file.exists():
            read_facts(directory)  # says what it is instead if it is no run
        lines = read_ledger(directory)
    first, steps = _steps(file, lines)
    # Each is taken out, so that its rows do not stay in memory.
    entries = (steps.pop(step) for step in sorted(steps))
    return first, (entry for entry in entries if entry.sure or entry.proved), lines


def _steps(file: Path, lines: Lines) -> tuple[int, dict[int, Used]]:
    """Returns the first step, and the line of each step that counts."""
    steps: dict[int, Used] = {}
    first, start, sure = 0, None, True
    torn = set(lines.before)
    for index, line in enumerate(lines.whole):
        sure = sure and index not in torn and _DAMAGED not in line
        if _DAMAGED in line:
            continue
        if "start" in line:
            start, sure = line, True
            order = RowOrder(**{key.name: line[key.name] for key in fields(RowOrder)})
            steps = {step: value for step, value in steps.items() if step < line["start"]}
            if not steps:
                first = line["start"]
            continue
        step = line["step"]
        if start is None or step < start["start"]:
            continue  # nothing says how positions map to rows
        if step in steps:
            if sure:
                raise CheckpointError(f"{file} has two lines for step {step + 1}, and no start between them.")
            steps = {number: value for number, value in steps.items() if number < step}
        position = start["position"] + (step - start["start"]) * order.global_size
        steps[step] = Used(step, position, order, line["rows"], sure)
    return first, steps


def _is_line(line: dict[str, Any]) -> bool:
    keys = _START if "start" in line else (_DAMAGED,) if _DAMAGED in line else ("step", "rows")
    if not all(type(line.get(key)) is int and 0 <= line[key] < 1 << 63 for key in keys):
        return False
    return "start" not in line or (
        isinstance(line.get("data"), str)
        and 0 < line["global_size"] <= _MOST_ROWS
        and 0 < line["epoch_rows"] <= line["num_rows"] <= _MOST_ROWS
    )


@dataclass(frozen=True)
class Epoch:
    """Uses of an epoch's rows."""

    number: int
    rows: int
    uses: npt.NDArray[np.uint8]
    """How often each row was used."""

    @property
    def once(self) -> int:
        return int((self.uses == 1).sum())

    @property
    def more(self) -> int:
        return int((self.uses > 1).sum())

    @property
    def finished(self) -> bool:
        return self.once + self.more >= self.rows


@dataclass
class Audit:
    """Facts that the ledger proves. Steps are counted from 1."""

    first: int = 0
    """The first step: another than that of a run that began from another one's checkpoint."""
    num_steps: int = 0
    lost: str | None = None
    """Sentence on steps that the run has taken and the ledger does not have; None if it has all."""
    epochs: list[Epoch] = field(default_factory=list)
    unproved: list[int] = field(default_factory=list)
    """Steps whose checksum is not that of the rows they should have read."""
    gaps: list[int] = field(default_factory=list)
    """Steps that do not begin where the one before ended."""
    missing: list[int] = field(default_factory=list)
    """Steps before the last of which no line can be read."""
    skipped: list[Incident] = field(default_factory=list)
    """Steps whose rows were read, and changed no weight."""

    @property
    def holds(self) -> bool:
        exact = all(epoch.more == 0 and (epoch.once == epoch.rows or not epoch.finished) for epoch in self.epochs)
        problems = (self.unproved, self.gaps, self.missing, self.lost)
        return exact and not any(problems) and self.num_steps > 0

    def lines(self) -> list[str]:
        """Lines for people."""
        begin = f", from step {self.first} on," if self.first > 1 else ""
        lines = [f"{self.num_steps:,} steps{begin or ','} each with the checksum of the rows that its ranks read"]
        for epoch in self.epochs:
            end = "each row exactly once" if epoch.once == epoch.rows else f"{epoch.once:,} rows once so far"
            more = f", {epoch.more:,} MORE THAN ONCE" if epoch.more else ""
            lines.append(f"epoch {epoch.number + 1}: {epoch.rows:,} rows, {end}{more}")
        if self.skipped:
            lines.append(f"{len(self.skipped):,} of these steps skipped, so their rows changed no weight:")
            lines += [f"  {incident.line()}" for incident in self.skipped[:10]]
            lines += [f"  and {len(self.skipped) - 10:,} more, in {INCIDENTS}"] * (len(self.skipped) > 10)
        faults = {"the rows that the order says": self.unproved, "where the step before ended": self.gaps}
        lines += [f"NOT {what}: steps {brief_list(steps)}" for what, steps in faults.items() if steps]
        lines += [f"NOT audited: {_no_line(self.missing)}"] if self.missing else []
        return [*lines, *filter(None, [self.lost]), "the ledger holds" if self.holds else "THE LEDGER DOES NOT HOLD"]


def _no_line(steps: list[int]) -> str:
    """Names steps of which no line can be read, in ranges."""
    ranges = np.split(steps, np.flatnonzero(np.diff(steps) != 1) + 1)
    labels = [str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}" for numbers in ranges]
    return f"no line for step{'s' * (len(steps) > 1)} {brief_list(labels)} is there, or can be read"


def audit_ledger(directory: Path) -> Audit:
    """Counts how often each row of each epoch was used, over all resumes.

    Raises:
        CheckpointError: If the ledger cannot be read.
    """
    audit, epochs = Audit(), dict[tuple[str, int], Epoch]()
    expected: int | None = None
    begun, used, lines = _read(directory)
    last = begun
    for entry in used:
        step, order = entry.step + 1, entry.order
        if step > last + 1:
            audit.missing += range(last + 1, step)
            expected = None
        last = step
        audit.first = audit.first or step
        audit.num_steps += 1
        if not entry.proved:
            audit.unproved.append(step)
        if expected is not None and entry.position != expected:
            audit.gaps.append(step)
        expected = entry.position + len(entry.rows)
        numbers = np.arange(entry.position, expected) // order.epoch_rows
        for number in np.unique(numbers).tolist():
            before = epochs.get((order.data, number))
            uses = np.zeros(order.num_rows, np.uint8) if before is None else before.uses
            if len(uses) != order.num_rows:
                raise CheckpointError(
                    f"{directory / LEDGER} says of the same data that they have {len(uses):,} rows and "
                    f"{order.num_rows:,}. One of its starts is damaged: which rows were used cannot be proved."
                )
            np.add.at(uses, entry.rows[numbers == number], 1)
            epochs[order.data, number] = Epoch(number, order.epoch_rows, uses)
    audit.epochs = list(epochs.values())
    audit.lost = _lost(directory, lines, begun + 1, last)
    audit.skipped = [incident for incident in read_skipped(directory) if audit.first <= incident.step <= last]
    return audit


def _lost(directory: Path, lines: Lines, first: int, last: int) -> str | None:
    """Returns a sentence on steps that `run.json` and checkpoints know and the ledger does not; None without any."""
    try:
        facts = read_facts(directory)
        starts = facts["starts"]
        begun, reached = starts[0]["from_step"] + 1, starts[-1]["from_step"]
        if "finished" in facts:
            reached = facts["length"]["num_steps"]
    except (FinetuneError, LookupError):
        return None  # the ledger alone has to do
    if first > begun:
        return f"NOT from the beginning: the run began with step {begun}"
    saved = next((step_of(name) or 0 for name in open_store(directory).list_names()), 0)
    # Where a damaged checkpoint was refused, its step was taken, and lost again: the ledger has been there.
    if all(line.get("step", -1) + 1 < saved for line in lines.whole):
        reached = max(reached, saved)
    return f"NOT to the end: the run has come to step {reached}" if last < reached else None
