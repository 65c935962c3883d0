"""The built-in samples: seeded stories, and conversations about them, so that everything can be tried without a file.

Each story takes one of the plots of `stories.json`, and its label is the plot's name. People, places and things are
drawn from word lists, sentences from alternatives that mean the same; an empty alternative leaves a slot out. A model
of a million parameters learns the names, the pronouns that go with them, and the course of a plot.

In a conversation a user asks for a story, or gives the beginning of one and asks about it, once or twice: who and what
is in it, what it is about, what it teaches. Answers are whole sentences, or one word if a system prompt wants that. All
of them are right: who reads the text finds the same.
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
CONVERSATIONS_VERSION = 1
"""Part of the cache's key, beside the stories' own: raise it whenever the conversations, or the preferences, change."""

ONE_WORD = "Answer in one word."
SENTENCE = "Answer in a whole sentence."

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
    data: dict[str, Any] = json_files.read(Path(__file__).with_name("stories.json"))
    return data


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


class Chat(NamedTuple):
    """A conversation and what kind it is: `story`, `question`, `one_word` or `follow_up`."""

    messages: tuple[dict[str, str], ...]
    """Messages with `role` and `content`."""
    label: str


class Preference(NamedTuple):
    """A question about a story, and two right answers: one word is preferred to a whole sentence."""

    prompt: list[dict[str, str]]
    chosen: list[dict[str, str]]
    rejected: list[dict[str, str]]


class Halves(NamedTuple):
    """A story's beginning, and what follows it."""

    anchor: str
    positive: str


class _Fact(NamedTuple):
    """A question about the beginning of a story."""

    question: str
    answer: str
    word: str = ""
    """The same answer as one word, where it is one."""


def conversations(count: int, seed: int = 0) -> Iterator[Chat]:
    """Makes `count` distinct conversations: one in five asks for a story, the others ask about one.

    The first `n` are the same whatever `count` is, on every machine and Python version.
    """
    return distinct_items(
        count, lambda number: _chat(Dice(f"conversation/{seed}/{number}")), lambda chat: repr(chat.messages)
    )


def preferences(count: int, seed: int = 0) -> Iterator[Preference]:
    """Makes `count` distinct preferences.

    The first `n` are the same whatever `count` is, on every machine and Python version.
    """
    return distinct_items(count, lambda number: _preference(Dice(f"preference/{seed}/{number}")), repr)


def halves(count: int) -> Iterator[Halves]:
    """Makes the halves of `count` distinct stories, which are those of `stories`."""
    for story in stories(count):
        sentences = story.text.split(". ")
        middle = len(sentences) // 2
        yield Halves(". ".join(sentences[:middle]) + ".", ". ".join(sentences[middle:]))


def _preference(dice: Dice) -> Preference:
    tale = tell_story(dice)
    fact = dice.pick([fact for fact in _facts(tale) if fact.word])
    passage = " ".join(
        slot for slot in tale.slots[: 2 + read_story_data()["plots"][tale.label]["passage_slots"]] if slot
    )
    answers = ([{"role": "assistant", "content": text}] for text in (f"{fact.word}.", fact.answer))
    return Preference([{"role": "user", "content": f"{passage} {fact.question}"}], *answers)


def _chat(dice: Dice) -> Chat:
    label = dice.pick(("story", "question", "question", "one_word", "follow_up"))
    tale = tell_story(dice)
    plot = read_story_data()["plots"][tale.label]
    if label == "story":
        about = dice.pick(("", f"{tale.cast['h'].name} and ")) + plot["about"]
        asked = f"{dice.pick(('Write', 'Tell me'))} a story about {about}."
        return Chat(_messages("", [(asked, tale.text)]), label)
    # The beginning says who the hero is and shows the plot.
    passage = " ".join(slot for slot in tale.slots[: 2 + plot["passage_slots"]] if slot)
    facts = _facts(tale)
    if label == "one_word":
        fact = dice.pick([fact for fact in facts if fact.word])
        return Chat(_messages(ONE_WORD, [(f"{passage} {fact.question}", f"{fact.word}.")]), label)
    gists = [
        _Fact("What is this story about?", f"It is about {plot['about']}."),
        _Fact("What does this story teach?", plot["lesson"]),
    ]
    first = dice.pick(dice.pick((facts, gists)))
    turns = [(f"{passage} {first.question}", first.answer)]
    if label == "follow_up":
        second = dice.pick([fact for fact in dice.pick((facts, gists)) if fact is not first])
        turns.append((second.question, second.answer))
    return Chat(_messages(dice.pick(("", "", "", SENTENCE)), turns), label)


def _messages(system: str, turns: list[tuple[str, str]]) -> tuple[dict[str, str], ...]:
    first = [{"role": "system", "content": system}] if system else []
    spoken = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return (*first, *spoken)


def _facts(tale: Tale) -> list[_Fact]:
    """Lists what can be asked about the beginning of a story. There is always a fact that is one word."""
    data, character = read_story_data(), tale.slots[1]
    fact_names = ["home", "hero"]
    friendly = "best friend" in character  # which says as well what the friend is
    if tale.cast["h"].noun != tale.cast["f"].noun or not friendly:
        fact_names.append("name")
    if character:
        fact_names.append("friend" if friendly else "nature")
    facts = [*(data["facts"][name] for name in fact_names), *data["plots"][tale.label]["facts"]]
    return [_Fact(*(capital(text.format(**tale.cast)) for text in fact)) for fact in facts]
