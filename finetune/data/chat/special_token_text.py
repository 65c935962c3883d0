"""Special tokens that are written in a conversation are characters; those that the template writes are tokens.

So that the two can be told apart in what a template has written, special tokens in messages are put between two
characters that occur nowhere else. Unicode keeps some that no text may hold.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from finetune.data.sources.conversation_formats import InvalidConversation

Span = tuple[int, int]

_NONCHARACTERS = [chr(number) for number in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class Marks:
    """Characters that open and close a special token which is only text."""

    open: str
    close: str

    def put(self, value: Any, special: re.Pattern[str]) -> Any:
        """The same texts, lists and objects, with marks."""
        return change_texts(value, partial(special.sub, lambda match: f"{self.open}{match[0]}{self.close}"))

    def remove(self, text: str) -> tuple[str, list[Span], list[int]]:
        """A text without marks, the literal parts of it, and where the marks were in the text that has them."""
        places = [match.start() for match in re.finditer(f"[{self.open}{self.close}]", text)]
        clean = text.replace(self.open, "").replace(self.close, "")
        bounds = [position - number for number, position in enumerate(places)]
        spans = list(zip(bounds[::2], bounds[1::2], strict=True)) if len(bounds) % 2 == 0 else []
        return clean, spans, places


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with other texts, at any depth; keys of objects stay."""
    if isinstance(value, dict):
        return {key: change_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [change_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def marks_for(text: str) -> Marks:
    """Two characters that a text does not hold.

    Raises:
        InvalidConversation: If it holds nearly all of them.
    """
    free = [character for character in _NONCHARACTERS if character not in text]
    if len(free) < 2:
        raise InvalidConversation("no text", "A conversation holds all of Unicode's noncharacters; remove it.")
    return Marks(free[0], free[1])


@lru_cache
def alternatives(names: tuple[str, ...], marks: Marks | None = None) -> re.Pattern[str]:
    """Matches any of some texts, the longest that fits; with `marks`, one that is not marked."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
    return re.compile(pattern if marks is None else f"(?<!{marks.open})(?:{pattern})")


def encode(
    fast: Tokenizer, literal: Tokenizer, text: str, literals: Sequence[Span]
) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Tokens of a text and where each starts and ends in it, (tokens, 2); in its literal parts nothing is special."""
    ids: list[int] = []
    offsets = [np.empty((0, 2), np.int64)]
    last = 0
    for start, end in [*literals, (len(text), len(text))]:
        for tokenizer, begin, stop in ((fast, last, start), (literal, start, end)):
            if begin < stop:
                more, places = _piece(tokenizer, text[begin:stop], first=begin == 0)
                ids += more
                offsets.append(places + begin)
        last = end
    return ids, np.concatenate(offsets)


def _piece(tokenizer: Tokenizer, text: str, *, first: bool) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Tokens of a part. Some tokenizers put a space before a text: behind a line break they do not, which then goes."""
    prefix = "" if first else "\n"
    lead = tokenizer.encode(prefix, add_special_tokens=False).ids if prefix else []
    encoding = tokenizer.encode(prefix + text, add_special_tokens=False)
    if encoding.ids[: len(lead)] != lead:
        prefix, lead, encoding = "", [], tokenizer.encode(text, add_special_tokens=False)
    places = np.array(encoding.offsets, np.int64).reshape(-1, 2)[len(lead) :] - len(prefix)
    return encoding.ids[len(lead) :], np.maximum(places, 0)
