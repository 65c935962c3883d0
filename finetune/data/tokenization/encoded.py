"""Documents as tokens, and counts of conversations."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

WEIGHTS = "weights"
"""The column of tokens' weights, which is there once some weight is neither 0 nor 1."""


@dataclass
class Facts:
    """Counts of one conversation, or of several; copies by weight are not counted."""

    examples: int = 0
    """Conversations that are learned from."""
    tokens: int = 0
    supervised: int = 0
    """Tokens that are targets."""
    ended: int = 0
    """Examples whose last answer ends in a special token that is learned."""
    answers: int = 0
    """Answers that are to be learned."""
    cut: int = 0
    """Conversations that lost turns or their end."""
    answers_cut: int = 0
    """Answers that lost their end, or all."""
    too_long: int = 0
    """Conversations left out because they are too long."""
    alike: int = 0
    """Pairs among these, whose answers are the same once they are cut."""
    ties: int = 0
    """Pairs whose answers have the same score."""
    unsupervised: int = 0
    """Conversations left out because there is nothing to learn from."""
    refused: int = 0
    """Conversations that the template refuses."""
    tools_dropped: int = 0
    """Conversations whose tools the template does not write."""
    shared: int = 0
    """Answers that begin inside a token of what comes before: at inference their first token is another one."""
    unwritten: dict[str, int] = field(default_factory=dict)
    """Conversations with other fields of which the template does not write all, by field."""

    ends: dict[str, int] = field(default_factory=dict)
    """Examples by the special token that ends their last answer, if it is learned."""
    supervised_share: float = 0.0
    """Of a report: tokens that are learned / all tokens."""
    ended_share: float = 0.0
    """Of a report: `ended` / `examples`."""

    def add(self, other: "Facts") -> None:
        """Adds another's counts."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, dict(Counter(mine) + Counter(value)) if isinstance(value, dict) else mine + value)


class Example(NamedTuple):
    """A conversation as it is learned from."""

    ids: npt.NDArray[np.uint32]
    """(N,) for N tokens; empty if it is left out."""
    mask: Mask
    """(N,): which tokens are targets."""
    facts: Facts
    """Counts of this one."""
    weights: npt.NDArray[np.float32] | None = None
    """(N,): factors of the tokens' losses; None where those that are learned have 1."""


class Encoded(NamedTuple):
    """Some documents as tokens."""

    lengths: npt.NDArray[np.uint32]
    numbers: npt.NDArray[np.uint32]
    """Tokens of all, in a row."""
    columns: dict[str, npt.NDArray[Any]]
    """More that is stored of them: a number for each document, or for each token."""
    words: npt.NDArray[np.int32] | None = None
    """Number of the word that begins at each token, within its document; -1 where none does. None without words."""
    facts: tuple[Facts, ...] = ()
    """Of each document, if they are conversations."""
