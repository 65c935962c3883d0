"""Positions of ranks in a run: which of them others wait for, and what is said of it. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from finetune.utils import json_files

RANKS = "ranks.json"
"""File of a run directory with the positions of its ranks."""

CALLER = "caller"
"""Phase in which a caller of the loop holds it, for as long as it likes."""

START = "start"
"""Phase from before the process group starts until all is built and restored."""

OUTSIDE = (START, "aside", CALLER)
"""Phases that are no part of a step."""

# A rank that is in one phase for longer is shown.
_LONG_S = 15.0

_SHAPE: json_files.Shape = {"place": str, "step": int, "phase": str, "marks": int, "for_s": (int, float)}


@dataclass(frozen=True)
class Position:
    """Where a rank is."""

    place: str
    """Its number, and its machine where there are several."""
    step: int
    """Steps that it has taken."""
    phase: str
    """Part of a step, as `PhaseTimer` has them; `aside` for evaluations, samples and checkpoints."""
    marks: int
    """Phases that it has begun; ranks that are at the same point have begun as many."""
    for_s: float
    """Seconds in this phase."""
    collectives: int = 0
    """Collectives that it has begun, as far as torch's flight recorder knows."""
    collective: str = ""
    """The last of them."""
    where: str = ""
    """Line of code that its main thread is at."""

    def __str__(self) -> str:
        if self.phase == START:
            words = "before the first step, loading or restoring"
        elif self.phase in OUTSIDE:
            words = f"after step {self.step}, evaluating or saving"
        else:
            words = f"at step {self.step + 1}, in `{self.phase}`"
        if self.where:
            words += f", at {self.where}"
        return f"{words}, in or after collective {self.collective}" if self.collective else words


@dataclass(frozen=True)
class OwnWork:
    """A rank's own work since the run began."""

    steps: int
    seconds: float
    """Time that these steps took."""
    data_s: float
    """Time in which it waited for its data."""
    busy_s: float
    """Time in which its main thread ran, or would have run on a free core; 0 where that is not known."""

    def since(self, before: "OwnWork") -> "OwnWork":
        """Returns the work of one step, as the mean since then."""
        steps = self.steps - before.steps
        parts = (self.seconds - before.seconds, self.data_s - before.data_s, self.busy_s - before.busy_s)
        return OwnWork(steps, *(total / max(steps, 1) for total in parts))


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for."""

    rank: int
    late_s: float
    """Seconds a step that it needs more than the median of the others."""
    data_s: float
    """Seconds of them in `data`."""
    step_s: float
    """Time of a step."""


def find_straggler(works: Sequence[OwnWork], share: float) -> Straggler | None:
    """Returns the rank that works longest, by its mean work of a step, if others wait a `share` of each step for it."""
    own = [work.data_s + work.busy_s for work in works]
    rank = max(range(len(own)), key=own.__getitem__)
    others = [number for number in range(len(own)) if number != rank]
    if not others:
        return None
    late_s = own[rank] - median(own[other] for other in others)
    data_s = works[rank].data_s - median(works[other].data_s for other in others)
    step_s = median(work.seconds for work in works)
    if late_s <= share * step_s:
        return None
    return Straggler(rank, late_s, min(max(data_s, 0.0), late_s), step_s)


def stall_text(answers: Sequence[Position], silent: Mapping[str, Position | None], usual_s: float, folder: Path) -> str:
    """Returns the paragraph with which a run ends that stands still.

    Args:
        answers: Positions of ranks; at least one.
        silent: Ranks that do not say where they are, and where they said last that they were.
    """
    first, last = max(answers, key=_order), min(answers, key=_order)
    usual = f"; a step usually takes {usual_s:.2g} s" if usual_s else ""
    waited = f"has come further for {min(at.for_s for at in answers):.0f} s{usual}"
    if silent:
        where = " and ".join(rank if at is None else f"{rank} (last seen {at})" for rank, at in silent.items())
        why = "stopped by a signal, or held by code that lets no other thread of Python run"
        verdict = f"No rank {waited}. No answer comes from {where}, which {'is' if len(silent) == 1 else 'are'} {why}."
        verdict += f" Others are {first}."
    elif _order(last) < _order(first):
        alike = [at.place for at in answers if _order(at) == _order(last)]
        verdict = (
            f"No rank {waited}. Behind is {' and '.join(alike)}, for {last.for_s:.0f} s: {last}. Others are {first}."
        )
    elif len(kinds := {at.collective: at for at in answers}) > 1:
        at_each = (
            f"{' and '.join(at.place for at in answers if at.collective == kind)} {one}" for kind, one in kinds.items()
        )
        verdict = f"No rank {waited}. Ranks are at one point, but not in one collective: {'; '.join(at_each)}. "
        verdict += "Code that some of them run and others do not, or tensors of other sizes, may have led there."
    elif len(answers) > 1:
        verdict = f"No rank {waited}. All are {first}. The network between them may be broken."
    else:
        verdict = f"This run has not come further for {first.for_s:.0f} s{usual}. It is {first}."
    return (
        f"{verdict} Python stacks and last collectives of each rank are in {folder}. All ranks end; the same command "
        "resumes from the last checkpoint. If this was no fault, raise guard.stall_s."
    )


def read_ranks(directory: Path) -> str | None:
    """Returns a line about the rank of a run that is behind, or that is long at one place; None without any.

    A file that cannot be read says nothing.
    """
    try:
        report = json_files.read(
            directory / RANKS, {"ranks": [_SHAPE], "behind": (str, type(None))}, ("ranks", "behind")
        )
        last = min((Position(**at) for at in report["ranks"]), key=_order)
    except (OSError, ValueError, TypeError):
        return None
    behind: str | None = report["behind"]
    return f"{last.place} is {last}, for {last.for_s:.0f} s" if last.for_s > _LONG_S else behind


def straggler_line(straggler: Straggler, name: str) -> str:
    """Returns a line about a rank that others wait for."""
    why = f", {straggler.data_s:.2g} s of them for its data" if straggler.data_s > straggler.late_s / 2 else ""
    return f"{name} is behind: others wait {straggler.late_s:.2g} s of each step's {straggler.step_s:.2g} s for it{why}"


def _order(at: Position) -> tuple[int, int]:
    """Ranks of a step begin the same phases and collectives in the same order."""
    return at.marks, at.collectives
