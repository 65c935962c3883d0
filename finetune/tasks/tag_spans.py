"""Spans of tagged words, as conlleval and seqeval find them: runs of words that are one name, or one phrase.

Letters: `B` rows, `N` words of the longest row, `K` kinds of spans, `C` classes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

OUTSIDE = "O"
_NO_SPAN, _BEGIN, _INSIDE, _END, _SINGLE = range(5)
# IOB1, IOB2, IOBES, BILOU and BMES.
_PARTS = {"B": _BEGIN, "I": _INSIDE, "M": _INSIDE, "E": _END, "L": _END, "S": _SINGLE, "U": _SINGLE}
_PREFIXED = re.compile(f"([{''.join(_PARTS)}])-(.+)")
_BARE = "span"


@dataclass(frozen=True)
class TagScheme:
    """The part of a span that each tag stands for, and the kind of that span.

    `B-PER` begins a span of the kind PER, `I-PER` goes on with one, and `O` is outside. Tags without such a prefix are
    kinds themselves: beside an `O`, neighbours of one kind are one span; without one, as of parts of speech, each word
    is a span of its own.
    """

    kinds: tuple[str, ...]
    part_of: tuple[int, ...]
    """Indexed by class number, (C,)."""
    kind_of: tuple[int, ...]
    """Position in `kinds` by class number, (C,); K outside."""

    @staticmethod
    def of(names: Sequence[str]) -> "TagScheme":
        """Reads the names of classes, in order of their numbers."""
        bare = {*names} <= {*_PARTS, OUTSIDE}
        plain = _INSIDE if OUTSIDE in names else _SINGLE
        parsed: list[tuple[int, str]] = []
        for name in names:
            prefixed = _PREFIXED.fullmatch(name)
            if name == OUTSIDE:
                parsed.append((_NO_SPAN, ""))
            elif bare:
                parsed.append((_PARTS[name], _BARE))
            else:
                parsed.append((_PARTS[prefixed[1]], prefixed[2]) if prefixed else (plain, name))
        kinds = (*dict.fromkeys(kind for _, kind in parsed if kind),)
        numbers = {"": len(kinds), **{kind: number for number, kind in enumerate(kinds)}}
        return TagScheme(kinds, tuple(part for part, _ in parsed), tuple(numbers[kind] for _, kind in parsed))


def _find_spans(classes: torch.Tensor, scheme: TagScheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Finds the spans of rows of tags, on their device.

    A word that no span of a strict scheme could hold, such as a lone `I-PER`, begins one.

    Args:
        classes: Class number of each word, (B, N); negative where there is none.

    Returns:
        Whether a span begins at a word, the kind of the span that it is in (K outside), and the number of that span's
        last word: (B, N) each.
    """
    parts, kinds = (
        torch.tensor([*table, outside], device=classes.device)[classes.clamp(min=-1)]
        for table, outside in ((scheme.part_of, _NO_SPAN), (scheme.kind_of, len(scheme.kinds)))
    )
    before, kinds_before = (functional.pad(side[:, :-1], (1, 0), value=-1) for side in (parts, kinds))
    goes_on = ((before == _BEGIN) | (before == _INSIDE)) & ((parts == _INSIDE) | (parts == _END))
    goes_on &= kinds == kinds_before
    places = torch.arange(classes.shape[1], device=classes.device).expand_as(classes)
    goes_on_behind = functional.pad(goes_on[:, 1:], (0, 1))
    lasts = places.masked_fill(goes_on_behind, classes.shape[1]).flip(1).cummin(1).values.flip(1)
    return (parts != _NO_SPAN) & ~goes_on, kinds, lasts


def count_spans(predicted: torch.Tensor, true: torch.Tensor, scheme: TagScheme) -> torch.Tensor:
    """Counts, by kind, the spans that are in both, those predicted and the true ones: (K, 3) in fp32.

    A span is in both if its first word, its last word and its kind are the same.

    Args:
        predicted: Class number of each token, (B, L).
        true: The same; negative at tokens that no word begins at, which do not count.
    """
    # Words to the left, without asking the device how many there are.
    order = torch.argsort((true < 0).int(), dim=1, stable=True)
    true, predicted = true.gather(1, order), predicted.masked_fill(true < 0, -1).gather(1, order)
    guessed, wanted = _find_spans(predicted, scheme), _find_spans(true, scheme)
    same_begin, same_kind, same_last = (one == other for one, other in zip(guessed, wanted, strict=True))
    both = wanted[0] & same_begin & same_kind & same_last
    sides = ((both, wanted[1]), guessed[:2], wanted[:2])
    kinds = torch.arange(len(scheme.kinds), device=true.device)
    counts = [(begun[..., None] & (of_words[..., None] == kinds)).sum((0, 1)) for begun, of_words in sides]
    return torch.stack(counts, dim=1).float()


def list_spans(classes: Sequence[int], scheme: TagScheme) -> list[tuple[int, int, str]]:
    """Returns first word, end and kind of each span of one row, in order."""
    if not classes:
        return []
    begins, kinds, lasts = (side[0].tolist() for side in _find_spans(torch.tensor([classes]), scheme))
    return [(first, lasts[first] + 1, scheme.kinds[kinds[first]]) for first, begun in enumerate(begins) if begun]
