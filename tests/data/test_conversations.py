"""The built-in conversations: distinct, repeatable, and right, which is read off their texts alone."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.config.recipe import validate_recipe
from finetune.data.prepare import prepare_data
from finetune.data.synthetic.story_generator import ONE_WORD, SENTENCE, Chat, conversations, read_story_data
from finetune.utils.errors import DataError

WORDS = read_story_data()["words"]
NAME = "(?:" + "|".join(WORDS["girls"] + WORDS["boys"]) + ")"
PLACE = "(?:" + "|".join(WORDS["places"]) + ")"
SMALL = f"(?:{'|'.join(WORDS['small'])}) (?:girl|boy|{'|'.join(WORDS['animals'])})"
NATURE = "(?:" + "|".join(WORDS["natures"]) + ")"
FEAR = "(?:" + "|".join(fear for fear, _ in WORDS["fears"]) + ")"

# Words of which each plot has some by the end of the passage, and no other plot has.
PLOT_MARKS = {
    "lost": "was gone|could not find|was not there",
    "afraid": f"afraid of {FEAR}",
    "quarrel": "No, it is mine!|No, I want it first|Both of them wanted",
    "broken": "[Bb]roke",
    "rescue": "was stuck",
    "share": "May I have a little bit|I am so hungry",
    "patience": "seed",
}
ABOUT = {
    "lost": ("a lost toy", "Friends help each other."),
    "afraid": ("being afraid", "It is fine to be afraid."),
    "quarrel": ("a quarrel", "A friend is worth more than a toy."),
    "broken": ("telling the truth", "It is best to tell the truth."),
    "rescue": ("a rescue", "Together we are stronger than alone."),
    "share": ("sharing", "It is nice to share."),
    "patience": ("waiting", "Good things take time."),
}


@pytest.fixture(scope="module")
def made() -> list[Chat]:
    return list(conversations(4000))


def turns(chat: Chat) -> list[tuple[str, str]]:
    """Questions and answers, without the system prompt."""
    spoken = [message["content"] for message in chat.messages if message["role"] != "system"]
    return list(zip(spoken[::2], spoken[1::2], strict=True))


def system(chat: Chat) -> str:
    return "".join(message["content"] for message in chat.messages if message["role"] == "system")


def found(pattern: str, passage: str) -> str:
    """What a group of the pattern matches; only one thing may."""
    hits = {group for match in re.finditer(pattern, passage) for group in match.groups() if group}
    assert len(hits) == 1, (pattern, passage, hits)
    return hits.pop()


def reader(question: str, passage: str) -> tuple[str, str]:
    """The right answer, as a word and as a sentence, from the passage alone."""
    if question in ("What is this story about?", "What does this story teach?"):
        (plot,) = [name for name, marks in PLOT_MARKS.items() if re.search(marks, passage)]
        return "", f"It is about {ABOUT[plot][0]}." if "about" in question else ABOUT[plot][1]
    opening = re.split(r" (?:His|Her) best friend ", passage)[0]
    hero = found(rf"^.*?\b({NAME})\b", opening)
    kind = found(rf"({SMALL})", opening)
    their = "Her" if hero in WORDS["girls"] else "His"
    asked = re.search(rf"\b({NAME})\b", question)
    assert asked is None or asked[1] == hero, "questions are about the hero"
    if question.startswith("Where does"):
        return "", f"{hero} lives {found(rf'({PLACE})', opening)}."
    if question.startswith("Where is the"):
        who = found(r"Where is the (\w+) stuck", question)
        where = found(rf"{who}(?:, and it)? was stuck ((?:in|under|high|behind) [^.]*?)(?: and could|\.)", passage)
        return "", f"The {who} is stuck {where}."
    if question.startswith("Who is the best friend"):
        friend = found(rf"best friend was an? {SMALL} named ({NAME})\.", passage)
        return friend, f"{their} best friend is {friend}."
    if question.startswith("Who is"):
        return "", f"{hero} is a {kind}."
    if question.startswith("What is the name"):
        noun = found(r"name of the (\w+)\?", question)
        assert kind.endswith(f" {noun}")
        assert len(re.findall(rf"\b{noun}\b", passage)) == 1, "only one can be meant"
        return hero, f"{their} name is {hero}."
    if question.startswith("What color"):
        toy = found(r"color is the (\w+)\?", question)
        color = found(rf"\b({'|'.join(WORDS['colours'])}) {toy}\b", passage)
        return color, f"The {toy} is {color}."
    if question.startswith("Whose"):
        toy = found(r"Whose (\w+) is it", question)
        lender = re.search(rf"({NAME}) had an? \w+ {toy} that|({NAME}) once let", passage)
        owner = (lender[1] or lender[2]) if lender else hero
        return owner, f"The {toy} belongs to {owner}."
    if question.endswith("like?"):
        nature = found(rf"\b(?:was|was very) ({NATURE})(?:\.| and|,)", passage)
        return nature, f"{hero} is {nature}."
    if question.endswith("afraid of?"):
        return "", f"{hero} is afraid of {found(rf'afraid of ({FEAR})', passage)}."
    assert question == f"What does {hero} have?", question
    return "", f"{hero} has {found(r'(?:got|made|found) (an? .*?) (?:from|all by|on the table)', passage)}."


def test_all_answers_are_right(made: list[Chat]) -> None:
    asked = Counter()
    for chat in made:
        if chat.label == "story":
            continue
        passage, first = re.fullmatch(r"(.*[.!?]\"?) ([WH][^.?!]*\?)", turns(chat)[0][0]).groups()  # type: ignore[union-attr]
        questions = [first, *(question for question, _ in turns(chat)[1:])]
        for question, (_, answer) in zip(questions, turns(chat), strict=True):
            word, sentence = reader(question, passage)
            asked[question.split()[0]] += 1
            if system(chat) == ONE_WORD:
                sentence = f"{word[0].upper()}{word[1:]}."
            assert answer == sentence, (passage, question)
    assert asked.keys() == {"Who", "Whose", "What", "Where"}
    assert min(asked.values()) > 100, asked


def test_a_story_is_about_what_was_asked_for(made: list[Chat]) -> None:
    plots = Counter()
    names = 0
    for chat in made:
        if chat.label != "story":
            continue
        ((asked, story),) = turns(chat)
        name, about = re.fullmatch(  # type: ignore[union-attr]
            rf"(?:Write|Tell me) a story about (?:({NAME}) and )?(.*)\.", asked
        ).groups()
        (plot,) = [plot for plot, (what, _) in ABOUT.items() if what == about]
        assert re.search(PLOT_MARKS[plot], story), (asked, story)
        plots[plot] += 1
        if name is not None:
            names += 1
            assert re.search(NAME, story)[0] == name  # type: ignore[index]
    assert min(plots[plot] for plot in PLOT_MARKS) > 50
    assert names > 300


def test_kinds_and_turns(made: list[Chat]) -> None:
    counts = Counter(chat.label for chat in made)
    assert counts.keys() == {"story", "question", "one_word", "follow_up"}
    assert min(counts.values()) > 300
    systems = Counter(system(chat) for chat in made)
    assert systems.keys() == {"", ONE_WORD, SENTENCE}
    for chat in made:
        roles = [message["role"] for message in chat.messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (2 if chat.label == "follow_up" else 1)
        assert (system(chat) == ONE_WORD) == (chat.label == "one_word")
        if chat.label == "follow_up":
            assert turns(chat)[0] != turns(chat)[1]


def test_they_are_distinct(made: list[Chat]) -> None:
    assert len({repr(chat.messages) for chat in made}) == len(made)


def test_the_first_ones_never_depend_on_the_number(made: list[Chat]) -> None:
    assert list(conversations(20)) == made[:20]
    assert next(conversations(1, seed=1)) != made[0]


def test_sentences_are_whole(made: list[Chat]) -> None:
    for chat in made:
        for message in chat.messages:
            assert not re.search(r"[{}\n]|  |\ba [aeiou]|\ban [^aeiou]", message["content"]), message
            assert re.fullmatch(r'[A-Z"].*[.!?]"?', message["content"]), message


# ---------------------------------------------------------------- as a source


def rows(tmp_path: Path, sources: list[dict[str, Any]], *, chat: bool = True) -> Any:
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"vocab_size": 600},
        "data": {"train": sources, "validation_fraction": 0.1, "sequence_length": 512, "cache_dir": str(tmp_path)},
        "length": {"steps": 1},
    }
    return prepare_data(validate_recipe({**tree, **({"chat": {"template": "plain"}} if chat else {})}), quiet=True)


def test_with_a_chat_section_the_sample_is_conversations(tmp_path: Path) -> None:
    data = rows(tmp_path, [{"sample": 300}])
    train, held = data.report.train, data.report.validation
    assert train.chat.examples + held.chat.examples == 300
    assert held.chat.examples > 10, "split by hash, as stories are"
    assert train.chat.answers > train.chat.examples
    assert train.duplicates == 0
    assert not rows(tmp_path, [{"sample": 300}], chat=False).report.train.chat


def test_plain_stories_can_stand_beside_them(tmp_path: Path) -> None:
    lines = "\n".join(rows(tmp_path, [{"sample": 100}, {"sample": 50, "format": "text"}]).report.lines())
    assert "built-in sample (100 conversations): messages" in lines
    assert "built-in sample (50 stories): text" in lines


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the built-in sample, conversation 1: the fields are messages"):
        rows(tmp_path, [{"sample": 5, "format": "alpaca"}])
