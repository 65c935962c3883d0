"""The built-in sample: a seeded generator of simple stories, so that everything can be tried without a file.

Each story takes one of the plots of `stories.json`, and its label is the plot's name. People, places and things are
drawn from word lists, sentences from alternatives that mean the same; an empty alternative leaves a slot out. A model
of a million parameters learns the names, the pronouns that go with them, and the course of a plot.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import xxhash

from finetune.utils import json_files

GENERATOR_VERSION = 1
"""Part of the cache's key: raise it whenever the stories or `stories.json` change."""

_PRONOUNS = {
    True: {"they": "she", "them": "her", "their": "her", "self": "herself"},
    False: {"they": "he", "them": "him", "their": "his", "self": "himself"},
}

Item = TypeVar("Item")


class Story(NamedTuple):
    """A story and the kind of its plot."""

    text: str
    label: str


class Tale(NamedTuple):
    """A story as it is made."""

    label: str
    cast: dict[str, Any]
    """Persons and things in it: `h` is the hero, `f` a friend, `g` a helper, `t` a toy."""
    slots: list[str]
    """Opening, character, the plot's slots, ending. Some are empty."""

    @property
    def text(self) -> str:
        return " ".join(slot for slot in self.slots if slot)


def stories(count: int, seed: int = 0) -> Iterator[Story]:
    """Makes `count` distinct stories of 60 to 200 words.

    The first `n` are the same whatever `count` is, on every machine and Python version.
    """
    tales = distinct_items(count, lambda number: tell_story(Dice(f"{seed}/{number}")), lambda tale: tale.text)
    return (Story(tale.text, tale.label) for tale in tales)


def distinct_items(count: int, make: Callable[[int], Item], written: Callable[[Item], str]) -> Iterator[Item]:
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


@cache
def read_story_data() -> dict[str, Any]:
    """Returns the sentences, plots and words of stories and conversations."""
    found: dict[str, Any] = json_files.read(Path(__file__).with_name("stories.json"))
    return found


class Dice:
    """Draws that depend on a key only; `random` promises less about its choices between versions."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._drawn = 0

    def pick(self, items: Sequence[Item]) -> Item:
        self._drawn += 1
        return items[xxhash.xxh3_64_intdigest(f"{self._key}/{self._drawn}".encode()) % len(items)]


def tell_story(dice: Dice) -> Tale:
    """Makes one story."""
    data = read_story_data()
    words = data["words"]
    label = dice.pick(tuple(data["plots"]))
    hero = _person(dice, words, taken=())
    friend = _person(dice, words, taken=(hero.name,))
    nature, kind = dice.pick(words["helpers"])
    colour, toy = dice.pick(words["colours"]), dice.pick(words["toys"])
    food, plant = dice.pick(words["foods"]), dice.pick(words["plants"])
    fear, deed = dice.pick(words["fears"])
    cast: dict[str, Any] = {
        "h": hero,
        "f": friend,
        "g": _noun(f"{nature} {kind}", kind, **_PRONOUNS[dice.pick((True, False))]),
        "t": _noun(f"{colour} {toy}", toy, colour=colour),
        "food": _noun(food, food.split(" of ")[-1].removeprefix("big ")),
        "plant": _noun(plant, plant),
        "stuck": SimpleNamespace(**dict(zip(("who", "where", "why"), dice.pick(words["stuck"]), strict=True))),
        "fear": fear,
        "deed": deed,
        "nature": dice.pick(words["natures"]),
        "place": dice.pick(words["places"]),
        "hiding": dice.pick(words["hiding"]),
        "day": dice.pick(words["days"]),
    }
    slots = (data["openings"], data["character"], *data["plots"][label]["slots"], data["endings"])
    return Tale(label, cast, [dice.pick(slot).format(**cast) for slot in slots])


def _person(dice: Dice, words: dict[str, Any], *, taken: Collection[str]) -> SimpleNamespace:
    girl = dice.pick((True, False))
    name = dice.pick([name for name in words["girls" if girl else "boys"] if name not in taken])
    kind = dice.pick((("girl" if girl else "boy"), dice.pick(words["animals"])))
    return _noun(f"{dice.pick(words['small'])} {kind}", kind, name=name, **_PRONOUNS[girl])


def _noun(phrase: str, noun: str, **more: str) -> SimpleNamespace:
    """Something with an article, and the same with a capital: a story says `a`, then `the`."""
    forms = {"a": f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}", "the": f"the {phrase}", **more}
    capitals = {name.capitalize(): capital(form) for name, form in forms.items()}
    return SimpleNamespace(noun=noun, **forms, **capitals)


def capital(text: str) -> str:
    """Returns a text with a first letter that is a capital."""
    return text[:1].upper() + text[1:]
