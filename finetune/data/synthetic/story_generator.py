"""The built-in sample: a seeded generator of simple stories, so that everything can be tried without a file.

Each story takes one of seven plots, and its label is the plot's name. People, places and things are drawn
from word lists, sentences from alternatives that mean the same. A model of a million parameters learns the
names, the pronouns that go with them, and the course of a plot.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import xxhash

from finetune.data.synthetic import story_words
from finetune.data.synthetic.story_plots import CHARACTER, ENDINGS, OPENINGS, PLOTS

GENERATOR_VERSION = 1
"""Part of the cache's key: raise it whenever the stories change."""

Item = TypeVar("Item")


class Story(NamedTuple):
    """A story and the kind of its plot."""

    text: str
    label: str


class Tale(NamedTuple):
    """A story as it is made."""

    label: str
    cast: dict[str, Any]
    """Who and what is in it, by the names that `sample_plots` has for them."""
    slots: list[str]
    """Opening, character, the plot's slots, ending. Some are empty."""

    @property
    def text(self) -> str:
        return " ".join(slot for slot in self.slots if slot)


def stories(count: int, seed: int = 0) -> Iterator[Story]:
    """Makes `count` distinct stories of 60 to 200 words.

    The first `n` are the same whatever `count` is, on every machine and Python version.
    """
    tales = distinct(count, lambda number: tell(Dice(f"{seed}/{number}")), lambda tale: tale.text)
    return (Story(tale.text, tale.label) for tale in tales)


def distinct(count: int, make: Callable[[int], Item], written: Callable[[Item], str]) -> Iterator[Item]:
    """The first `count` of what `make` makes of 0, 1, 2, …, without those that were written before."""
    seen: set[int] = set()
    number = 0
    while len(seen) < count:
        item = make(number)
        number += 1
        digest = xxhash.xxh3_64_intdigest(written(item).encode())
        if digest not in seen:
            seen.add(digest)
            yield item


class Dice:
    """Draws that depend on a key only; `random` promises less about its choices between versions."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._drawn = 0

    def pick(self, items: Sequence[Item]) -> Item:
        self._drawn += 1
        return items[xxhash.xxh3_64_intdigest(f"{self._key}/{self._drawn}".encode()) % len(items)]


@dataclass(frozen=True)
class _Noun:
    """Something with an article; a story says `a`, then `the`."""

    phrase: str
    noun: str
    colour: str = ""

    @property
    def a(self) -> str:
        return f"{'an' if self.phrase[0] in 'aeiou' else 'a'} {self.phrase}"

    @property
    def the(self) -> str:
        return f"the {self.phrase}"

    @property
    def A(self) -> str:
        return _capital(self.a)

    @property
    def The(self) -> str:
        return _capital(self.the)


@dataclass(frozen=True)
class _Person(_Noun):
    """Somebody with pronouns."""

    name: str = ""
    they: str = "she"
    them: str = "her"
    their: str = "her"
    self: str = "herself"

    @property
    def They(self) -> str:
        return _capital(self.they)

    @property
    def Their(self) -> str:
        return _capital(self.their)


class _Stuck(NamedTuple):
    who: str
    where: str
    why: str


def tell(dice: Dice) -> Tale:
    """Makes one story."""
    label = dice.pick(tuple(PLOTS))
    hero = _person(dice, ())
    friend = _person(dice, (hero.name,))
    nature, kind = dice.pick(story_words.HELPERS)
    colour, toy = dice.pick(story_words.COLOURS), dice.pick(story_words.TOYS)
    food, plant = dice.pick(story_words.FOODS), dice.pick(story_words.PLANTS)
    fear, deed = dice.pick(story_words.FEARS)
    cast: dict[str, Any] = {
        "h": hero,
        "f": friend,
        "g": _helper(dice, nature, kind),
        "t": _Noun(f"{colour} {toy}", toy, colour),
        "food": _Noun(food, food.split(" of ")[-1].removeprefix("big ")),
        "plant": _Noun(plant, plant),
        "stuck": _Stuck(*dice.pick(story_words.STUCK)),
        "fear": fear,
        "deed": deed,
        "nature": dice.pick(story_words.NATURES),
        "place": dice.pick(story_words.PLACES),
        "hiding": dice.pick(story_words.HIDING),
        "day": dice.pick(story_words.DAYS),
    }
    chosen = [dice.pick(slot) for slot in (OPENINGS, CHARACTER, *PLOTS[label], ENDINGS)]
    return Tale(label, cast, [sentence.format(**cast) for sentence in chosen])


def _person(dice: Dice, taken: Sequence[str]) -> _Person:
    girl = dice.pick((True, False))
    name = dice.pick([name for name in (story_words.GIRLS if girl else story_words.BOYS) if name not in taken])
    kind = dice.pick((("girl" if girl else "boy"), dice.pick(story_words.ANIMALS)))
    phrase = f"{dice.pick(story_words.SMALL)} {kind}"
    if girl:
        return _Person(phrase, kind, name=name)
    return _Person(phrase, kind, name=name, they="he", them="him", their="his", self="himself")


def _helper(dice: Dice, nature: str, kind: str) -> _Person:
    phrase = f"{nature} {kind}"
    if dice.pick((True, False)):
        return _Person(phrase, kind)
    return _Person(phrase, kind, they="he", them="him", their="his", self="himself")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
