"""The built-in instruction set: seeded conversations about the world of the built-in stories.

A user asks for a story, or gives the beginning of one and asks about it, once or twice: who and what is in it, what
it is about, what it teaches. Answers are whole sentences, or one word if a system prompt wants that. All of them are
right: who reads the text finds the same.
"""

from collections.abc import Iterator
from typing import NamedTuple

from finetune.data.synthetic.story_generator import Dice, Tale, capital, distinct_items, read_story_data, tell_story

GENERATOR_VERSION = 1
"""Part of the cache's key, beside the stories' own: raise it whenever the conversations change."""

ONE_WORD = "Answer in one word."
SENTENCE = "Answer in a whole sentence."


class Chat(NamedTuple):
    """A conversation and what kind it is: `story`, `question`, `one_word` or `follow_up`."""

    messages: tuple[dict[str, str], ...]
    """Messages with `role` and `content`."""
    label: str


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
    told = ["home", "hero"]
    friendly = "best friend" in character  # which says as well what the friend is
    if tale.cast["h"].noun != tale.cast["f"].noun or not friendly:
        told.append("name")
    if character:
        told.append("friend" if friendly else "nature")
    facts = [*(data["facts"][name] for name in told), *data["plots"][tale.label]["facts"]]
    return [_Fact(*(capital(text.format(**tale.cast)) for text in fact)) for fact in facts]
