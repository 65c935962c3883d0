"""Signs of broken text, counted with an example each; nothing is repaired."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.data.sources.conversation_formats import Conversation
from finetune.data.sources.corpus import Chosen

NUL, MOJIBAKE, LOSSY = "nul", "mojibake", "lossy"

# A round trip costs as much as tokenising: of each source the first documents are taken, and few of the rest by hash.
_SAMPLED_FIRST = 32
_SAMPLED_ONE_IN = 256
_SAMPLED_CHARACTERS = 2000
_SHOWN = 24

_NUL_IN_JSON = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
# What bytes 0x80 to 0xBF, of which UTF-8 characters go on, become in Latin-1 and in Windows-1252.
_REST = "[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
# Bytes that could not be decoded, and UTF-8 decoded as one of these two: letters with accents (but not a word in
# capitals before a quotation mark), punctuation, Cyrillic and emoji. Each alternative begins with one character: a
# search for anything else takes ten times as long.
_MOJIBAKE = re.compile(
    f"\ufffd|Â(?<![A-ZÀ-ÖØ-Þ].){_REST}|Ã(?<![A-ZÀ-ÖØ-Þ].){_REST}|â(?:[€\x80]|{_REST}{{2}})"
    f"|Ð{_REST}[ÐÑ]{_REST}|Ñ{_REST}[ÐÑ]{_REST}|ð[Ÿ\x9f]{_REST}"
)


@dataclass(frozen=True)
class Finding:
    """One kind of sign in some documents."""

    kind: str
    count: int
    of: int
    """Documents that were looked at."""
    example: str
    """The first one: where it is, and what is there."""


@dataclass
class Issues:
    """Signs that were found in some documents."""

    looked: int = 0
    """Documents that were looked at, copies by weight not counted."""
    sampled: int = 0
    """Those of them that the tokenizer was to give back."""
    first: str = ""
    """The place of the first document."""
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def look(self, items: Iterable[Chosen], first: int, restore: Callable[[str], str], *, chat: bool) -> None:
        """Counts the signs in some documents.

        Args:
            items: Documents of one source.
            first: Number of the first of them in that source, from 0.
            restore: Turns a text into tokens and back.
            chat: True if they are conversations or pairs of texts, as JSON.
        """
        for number, item in enumerate(items, start=first):
            self.looked += 1
            self.first = self.first or _printable(item.document.where)
            for kind, example in _signs(item, chat=chat):
                self._count(kind, item, example)
            if number < _SAMPLED_FIRST or item.digest % _SAMPLED_ONE_IN == 0:
                self.sampled += 1
                text = plain_text(item.text, chat=chat)[:_SAMPLED_CHARACTERS]
                if (back := restore(text)) != text:
                    self._count(LOSSY, item, _difference(text, back))

    def _count(self, kind: str, item: Chosen, example: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.examples.setdefault(kind, f"{_printable(item.document.where)}: {example}")


def findings(issues: dict[str, Any]) -> tuple[Finding, ...]:
    """Returns one finding for each kind that `Issues`, as a dict, has counted."""
    return tuple(
        Finding(kind, count, issues["sampled" if kind == LOSSY else "looked"], issues["examples"][kind])
        for kind, count in sorted(issues["counts"].items())
    )


def plain_text(document: bytes, *, chat: bool) -> str:
    """The text of a document, both texts of a pair, or all that is said in a conversation."""
    parsed = Conversation.from_json(document) if chat else document.decode()
    return parsed if isinstance(parsed, str) else "\n".join(str(m.get("content", "")) for m in parsed.messages)


def _signs(item: Chosen, *, chat: bool) -> Iterator[tuple[str, str]]:
    """Kinds of signs in one document, each with an example."""
    data = item.text
    nul = b"\0" in data or (chat and b"\\u0000" in data and _NUL_IN_JSON.search(data))
    text = plain_text(data, chat=chat) if nul or not data.isascii() else ""
    if nul:
        yield NUL, _around(text, max(0, text.find("\0")), 1)
    if match := _MOJIBAKE.search(text):
        yield MOJIBAKE, _around(text, *match.span())
    if item.document.issue is not None:
        yield item.document.issue


def first_difference(one: str, other: str) -> int:
    """Number of characters that two texts have in common before they differ."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _printable(where: str) -> str:
    """A place as text: names of files may hold bytes that are not UTF-8."""
    return where.encode("utf-8", "backslashreplace").decode()


def _around(text: str, start: int, end: int) -> str:
    return repr(text[max(0, start - _SHOWN) : end + _SHOWN])


def _difference(text: str, back: str) -> str:
    """Both texts around the first place where they differ."""
    same = first_difference(text, back)
    start = max(0, same - _SHOWN // 2)
    return f"{text[start : same + _SHOWN]!r} became {back[start : same + _SHOWN]!r}"
