"""One conversation as tokens with a mask, and what is counted of it.

Letters: `N` tokens of one conversation.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


@dataclass
class Facts:
    """Counts of one conversation, or of several."""

    examples: int = 0
    """Conversations that are learned from."""
    tokens: int = 0
    supervised: int = 0
    """Tokens that are targets."""
    ended: int = 0
    """Examples whose last supervised token ends an answer: a special token."""
    answers: int = 0
    """Answers that are to be learned."""
    cut: int = 0
    """Conversations that lost turns or their end."""
    answers_cut: int = 0
    """Answers that lost their end, or all."""
    too_long: int = 0
    """Conversations left out because they are too long."""
    unsupervised: int = 0
    """Conversations left out because there is nothing to learn from."""
    refused: int = 0
    """Conversations that the template refuses."""
    tools_dropped: int = 0
    """Conversations whose tools the template does not write."""
    shared: int = 0
    """Answers that begin inside a token of what comes before."""
    unwritten: dict[str, int] = field(default_factory=dict)
    """Conversations with other fields of which the template does not write all, by field."""

    def add(self, other: "Facts") -> None:
        """Adds another's counts."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, dict(Counter(mine) + Counter(value)) if isinstance(value, dict) else mine + value)


@dataclass(frozen=True)
class Example:
    """A conversation as it is learned from."""

    ids: npt.NDArray[np.uint32]
    """(N,); empty if it is left out."""
    mask: Mask
    """(N,): which tokens are targets."""
    facts: Facts
    end: int | None = None
    """The special token that ends its last answer, if it is learned."""


def left_out(facts: Facts) -> Example:
    """No tokens, but counts."""
    return Example(np.array([], np.uint32), np.array([], np.bool_), facts)


def cut_right(example: Example, room: int, special: Collection[int]) -> Example:
    """An example without its end; left out if that leaves nothing to learn.

    Args:
        example: One of more than `room` tokens.
        room: Tokens that stay.
        special: Tokens that end answers.
    """
    mask = example.mask[:room]
    if not mask[1:].any():
        return left_out(Facts(too_long=1))
    gone = _runs(example.mask) - _runs(mask)
    lost = gone + int(mask[-1] and example.mask[room])
    last = int(example.ids[:room][np.flatnonzero(mask)[-1]])
    end = (last if last in special else None) if lost else example.end
    supervised = int(mask[1:].sum())
    facts = replace(example.facts, tokens=room, supervised=supervised, ended=int(end is not None), cut=1)
    facts = replace(facts, answers=example.facts.answers - gone, answers_cut=lost)
    return Example(example.ids[:room], mask, facts, end)


def _runs(mask: Mask) -> int:
    """Number of runs of targets."""
    return int(mask[:1].sum()) + int((mask[1:] & ~mask[:-1]).sum())
