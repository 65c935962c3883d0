"""Conversations that cannot be used: refused at once, or left out and counted."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune.utils.errors import DataError


class InvalidConversation(DataError):
    """One conversation cannot be used as it is."""

    def __init__(self, kind: str, text: str) -> None:
        """`kind` is a few words for the report, `text` the whole paragraph."""
        super().__init__(text)
        self.kind = kind


@dataclass
class Tolerance:
    """What is done about broken conversations."""

    lenient: bool
    """Whether they are left out."""
    counts: Counter[str] = field(default_factory=Counter)
    """How many were left out, of each kind."""
    first: str | None = None
    """What was wrong with the first one."""

    def reset(self) -> None:
        """Forgets what was counted."""
        self.counts.clear()
        self.first = None

    def restore(self, counts: Mapping[str, int], first: str | None) -> None:
        """Takes what another process has counted instead of what this one has."""
        self.counts = Counter(counts)
        self.first = first

    def meet(self, problem: InvalidConversation) -> None:
        """Raises it, or counts it.

        Raises:
            BrokenConversation: If nothing is tolerated.
        """
        if not self.lenient:
            raise problem
        self.counts[problem.kind] += 1
        self.first = self.first or str(problem)
