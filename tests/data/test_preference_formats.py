"""Each format says the same preference, and each way in which a record can be broken is said with its place."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testdata import REAL

from finetune.data.sources.conversation_formats import Conversation, RecordForm, Tolerance
from finetune.data.sources.preference_formats import Preference, PreferenceForm
from finetune.utils.errors import DataError

ASK = [{"role": "user", "content": "Hello"}]
GOOD, BAD = [{"role": "assistant", "content": "Hi"}], [{"role": "assistant", "content": "Go"}]
HUMAN, GPT = {"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}


def form(
    *, chat: bool = True, lenient: bool = False, roles: dict[str, str] | None = None, **keys: Any
) -> PreferenceForm:
    inner = RecordForm("auto", {}, roles or {}, "text", strip=True, tolerance=Tolerance(lenient=False))
    return PreferenceForm(inner, Tolerance(lenient), chat, **keys)


def lines_of(reader: PreferenceForm, record: Any, where: str) -> list[str]:
    return [line for line in reader.read(record, where).split("\n") if line]


def read(record: Any, **keys: Any) -> list[Preference]:
    return [Preference.from_json(text) for text in lines_of(form(**keys), record, "pairs.jsonl, line 3")]


def refusal(record: Any, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(record, **keys)
    said = str(caught.value)
    assert said.startswith("pairs.jsonl, line 3")
    assert "\n" not in said
    return said


def attempt(record: Any, **keys: Any) -> list[Preference] | str:
    try:
        return read(record, **keys)
    except DataError as error:
        return str(error)


PAIRS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"prompt": ASK, "chosen": GOOD, "rejected": BAD}, {}),
    ({"prompt": ASK, "chosen": GOOD[0], "rejected": BAD[0], "margin": None}, {}),
    ({"prompt": ASK, "chosen": "Hi", "rejected": "Go"}, {}),
    ({"prompt": "Hello", "chosen": "Hi", "rejected": "Go"}, {}),
    ({"prompt": "Hello", "chosen": GOOD, "rejected": BAD}, {}),
    ({"prompt": "Hello", "chosen": ASK + GOOD, "rejected": ASK + BAD}, {}),
    ({"prompt": ASK, "chosen": ASK + GOOD, "rejected": ASK + BAD}, {}),
    ({"chosen": ASK + GOOD, "rejected": ASK + BAD}, {}),
    ({"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "Go"}}, {}),
    ({"conversations": [HUMAN], "chosen": "Hi", "rejected": "Go"}, {}),
    ({"messages": ASK, "chosen": GOOD, "rejected": BAD}, {}),
    ({"instruction": "Hello", "input": "", "chosen": "Hi", "rejected": "Go"}, {}),
    ({"question": "Hello", "chosen": "Hi", "rejected": "Go"}, {}),
    ({"q": {"text": "Hello"}, "a": ["Hi", "Go"]}, {"prompt": "q.text", "chosen": "a.0", "rejected": "a.1"}),
]


@pytest.mark.parametrize(("record", "fields"), PAIRS)
def test_one_pair_in_many_formats(record: dict[str, Any], fields: dict[str, str]) -> None:
    assert read(record, fields=fields) == [Preference(ASK, GOOD, BAD)]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASK, "completion": GOOD, "label": True},
        {"prompt": "Hello", "completion": "Hi", "label": "true"},
        {"prompt": ASK, "completion": "Hi", "label": 1.0},
        {"messages": ASK + GOOD, "label": 1},
        {"messages": ASK + GOOD, "kto_tag": True},
        {"conversations": [HUMAN, GPT], "kto_tag": True},
        {"instruction": "Hello", "output": "Hi", "kto_tag": True},
    ],
)
def test_one_answer_in_many_formats(record: dict[str, Any]) -> None:
    assert read(record) == [Preference(ASK, completion=GOOD, label=True)]
    name = "label" if "label" in record else "kto_tag"
    assert [read({**record, name: no})[0].label for no in (False, 0, "False")] == [False] * 3


def test_texts() -> None:
    pair = {"prompt": "Beautiful is better than", "chosen": " ugly.", "rejected": " the moon."}
    whole = {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")}
    wanted = [Preference(pair["prompt"], " ugly.", " the moon.")]
    assert read(pair, chat=False) == read(whole, chat=False) == wanted
    assert wanted[0].half("rejected") == ("Beautiful is better than", " the moon.")
    # The space before an answer is the answer's; a common beginning of words is the prompt's, as TRL has it.
    assert read({"chosen": "So this", "rejected": "So that"}, chat=False) == [Preference("So th", "is", "at")]
    single = {"prompt": "So", "completion": " it is", "label": False}
    assert read(single, chat=False) == [Preference("So", completion=" it is", label=False)]


def test_a_half_is_a_conversation_that_learns_its_answer() -> None:
    system, call = {"role": "system", "content": "Be brief."}, [{"type": "function", "function": {"name": "f"}}]
    steps = [
        {"role": "assistant", "tool_calls": call},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Five."},
    ]
    record = {
        "system": "Be brief.",
        "prompt": ASK,
        "chosen": [{**steps[0], "weight": 0}, *steps[1:]],
        "rejected": BAD,
        "tools": json.dumps([{"name": "f"}]),
        "chat_template_kwargs": {"enable_thinking": False},
        "margin": "0.5",
    }
    (found,) = read(record)
    assert found.margin == 0.5
    conversation = found.half("chosen")
    assert isinstance(conversation, Conversation)
    assert conversation.messages == [
        system,
        *ASK,
        {**steps[0], "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
        *steps[1:],
    ]
    assert conversation.weights == [0, 0, 0, 1, 1]
    assert conversation.completion == 2
    assert conversation.tools == [{"name": "f"}]
    assert conversation.variables == {"enable_thinking": False}
    assert found.half("rejected").weights == [0, 0, 1]  # type: ignore[union-attr]


def test_answers_of_several_turns() -> None:
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}]
    (found,) = read({"chosen": ASK + GOOD + more, "rejected": ASK + BAD + more})
    assert found == Preference(ASK, GOOD + more, BAD + more)
    (later,) = read({"chosen": ASK + GOOD + more, "rejected": ASK + GOOD + more[:1] + BAD})
    assert later.prompt == ASK + GOOD + more[:1]


def test_scores_and_rankings() -> None:
    scored = {"prompt": "Hello", "chosen": "Hi", "rejected": "Go", "score_chosen": 8, "score_rejected": 8.0}
    assert read(scored) == [Preference(ASK, GOOD, BAD, score=[8.0, 8.0])]
    ranked = {"prompt": "Hello", "completions": ["Hm", "Hi", "Go", "Ha"], "scores": [3, 5, 1, 3]}
    assert read(ranked) == [Preference(ASK, GOOD, BAD, score=[5.0, 1.0])]
    texts = {"Hm": 3, "Hi": 5, "Go": 1, "Ha": 3}
    got = {(p.chosen[0]["content"], p.rejected[0]["content"]) for p in read(ranked, ranking="all")}  # type: ignore[index]
    assert got == {
        (a, b) for a, b in [*combinations(texts, 2), *combinations([*texts][::-1], 2)] if texts[a] > texts[b]
    }
    ranks = {"prompt": "Hello", "completions": [BAD, GOOD], "ranks": [2, 1]}
    assert read(ranks) == [Preference(ASK, GOOD, BAD, score=[-1.0, -2.0])]


def test_names_of_roles_and_unread_fields() -> None:
    turns = {
        "chosen": [{"role": "me", "content": "Hello"}, *GOOD],
        "rejected": [{"role": "me", "content": "Hello"}, *BAD],
    }
    assert read(turns, roles={"me": "user"}) == [Preference(ASK, GOOD, BAD)]
    for chat in (True, False):
        reader = form(chat=chat)
        reader.read({**PAIR, "source": "x"}, "here")
        assert reader.form.unread == {"source"}
    (found,) = read({**PAIR, "chosen": GOOD, "rejected": BAD, "system": "Be brief."})
    assert found == Preference(SYSTEM + ASK, GOOD, BAD)


PAIR = {"prompt": "Hello", "chosen": "Hi", "rejected": "Go"}
BYE, SYSTEM = [{"role": "user", "content": "Bye"}], [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({**PAIR, "chosen": ""}, "line 3, chosen, turn 2: the answer is empty"),
        (
            {**PAIR, "chosen": GOOD, "rejected": [{"role": "assistant", "content": ""}]},
            "line 3, rejected, turn 1: the answer is empty",
        ),
        ({"prompt": ASK, "chosen": " ", "rejected": "Go"}, "line 3, chosen: the answer is empty"),
        ({"prompt": ASK, "chosen": [], "rejected": BAD}, "line 3, chosen: the answer is empty"),
        ({"chosen": ASK, "rejected": ASK + BAD}, "line 3, chosen: the answer is empty"),
        ({**PAIR, "chosen": "Go"}, "line 3: both answers are the same. Remove the record."),
        ({**PAIR, "chosen": 7}, "line 3, chosen: an answer is a text or turns, got a number."),
        ({"chosen": "Hello: Hi", "rejected": "Hello: Go"}, "of chosen, rejected, none is a prompt. Name it"),
        (
            {"chosen": ASK + GOOD, "rejected": [{"role": "user", "content": "Hey"}, *BAD]},
            "line 3, turn 1: the answers are to different prompts, or to none.",
        ),
        (
            {"prompt": "Hey", "chosen": ASK + GOOD, "rejected": ASK + BAD},
            "line 3, chosen, prompt: the answers are to different prompts",
        ),
        (
            {"chosen": ASK + GOOD + ASK + GOOD, "rejected": ASK + GOOD + BYE + BAD},
            "line 3, turn 3: the answers are to diff",
        ),
        ({"chosen": GOOD, "rejected": BAD}, "line 3, turn 1: the answers are to different prompts, or to none."),
        ({**PAIR, "chosen": GOOD, "rejected": SYSTEM + BAD}, "line 3, turn 1: the answers are to different prompts"),
        (
            {**PAIR, "chosen": GOOD, "rejected": BYE + GOOD + ASK + BAD},
            "line 3, turn 1: the answers are to different prompts",
        ),
        ({"prompt": ASK, "chosen": ASK, "rejected": BAD}, "line 3, chosen: the answer is empty"),
        ({"text": "A", "label": True}, "line 3, completion: there is no answer; the fields are text, label."),
        ({"chosen": ASK + GOOD + ASK, "rejected": ASK + BAD}, "chosen: an answer ends with a turn of the assistant"),
        (
            {**PAIR, "weight": 0},
            "chosen: an answer ends with a turn of the assistant, and at least one of its turns is learned",
        ),
        ({**PAIR, "margin": math.nan}, "line 3: 'margin' must be a finite number, got nan."),
        ({**PAIR, "margin": True}, "line 3: 'margin' must be a finite number, got True."),
        ({**PAIR, "score_chosen": 3}, "line 3: 'score_rejected' must be a finite number, got None."),
        (
            {**PAIR, "score_chosen": 3, "score_rejected": 4},
            "score_chosen is 3 and score_rejected is 4: the chosen answer is",
        ),
        (
            {"prompt": "A", "completions": ["B", "C"], "scores": [1]},
            "lists of the same length, got 2 items and 1 items.",
        ),
        ({"prompt": "A", "completions": ["B", "C"]}, "'completions' and 'ranks' must be lists of the same length, got"),
        ({"prompt": "A", "completions": ["B", "C"], "scores": [1, None]}, "'scores', answer 2 must be a finite number"),
        ({"prompt": "A", "completions": ["B", "C"], "scores": [1, 1]}, "no answer has better 'scores' than another"),
        ({"prompt": "A", "completions": [], "scores": []}, "no answer has better 'scores' than another"),
        ({"prompt": "A", "completion": "B", "label": "good"}, "'label' is 'good'; it is true for a desirable answer"),
        ({"messages": ASK + GOOD, "kto_tag": 2}, "'kto_tag' is '2'; it is true"),
        ({"messages": ASK, "label": True}, "line 3, completion: the answer is empty"),
        ({"prompt": "A", "completion": None, "label": True}, "line 3"),
        ({"prompt": "A", "chosen": "B"}, "the fields are prompt, chosen. A preference has `chosen` and `rejected`, `"),
        (
            {"prompt": [{"role": "x", "content": "A"}], "chosen": GOOD, "rejected": BAD},
            "chosen, turn 1: the role is 'x'",
        ),
        ([1], "line 3: a preference is an object with fields, got a list."),
    ],
)
def test_broken_records(record: Any, said: str) -> None:
    assert said in refusal(record)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({**PAIR, "rejected": " \n"}, "line 3, rejected: the answer is empty"),
        ({"chosen": "Same", "rejected": "Same more"}, "line 3, chosen: the answer is empty"),
        (
            {"chosen": "A", "rejected": "B"},
            "line 3: the answers are to different prompts, or to none. A pair is two answers to one prompt",
        ),
        ({"prompt": ASK, "chosen": "A", "rejected": "B"}, "prompt: it must be a text, got a list. Turns are read with"),
        ({**PAIR, "chosen": GOOD}, "chosen: it must be a text, got a list. Turns are read with a `chat` section"),
        ({"messages": ASK + GOOD, "label": True}, "completion: it must be a text, got no such field."),
    ],
)
def test_broken_texts(record: Any, said: str) -> None:
    assert said in refusal(record, chat=False)


@pytest.mark.parametrize(
    "record", [{**PAIR, "chosen": ""}, {**PAIR, "chosen": "Go"}, {"prompt": "A"}, {**PAIR, "margin": "x"}]
)
def test_broken_records_may_be_left_out(record: Any) -> None:
    reader = form(lenient=True)
    assert [len(lines_of(reader, each, "here")) for each in (PAIR, record, PAIR)] == [1, 0, 1]
    assert reader.tolerance.counts.total() == 1
    assert str(reader.tolerance.first).startswith("here")


def test_missing_fields_are_named() -> None:
    said = refusal({"q": "A", "chosen": "B", "rejected": "C"}, fields={"prompt": "question"})
    assert "there is no field 'question' (a null is none); the fields are q, chosen, rejected." in said


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.just("assistant"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value"]), inner, max_size=2)
    ),
    max_leaves=6,
)
NAMES = ["prompt", "chosen", "rejected", "completion", "completions", "scores", "ranks", "label", "messages", "margin"]


@given(st.dictionaries(st.sampled_from([*NAMES, "conversations", "kto_tag", "tools"]), ANYTHING), st.booleans())
def test_any_record_is_read_or_refused(record: dict[str, Any], chat: bool) -> None:
    found = attempt(record, chat=chat)
    if isinstance(found, str):
        assert found.startswith("pairs.jsonl, line 3")
        return
    for preference in found:
        assert Preference.from_json(preference.to_json()) == preference
        for name in ("chosen", "rejected", "completion"):
            if getattr(preference, name) is not None:
                assert preference.half(name)  # type: ignore[arg-type]


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)


@given(WORDS, WORDS, WORDS)
def test_a_prompt_that_is_left_out_is_found(prompt: str, chosen: str, rejected: str) -> None:
    if chosen == rejected:
        return
    turns = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}] for text in (chosen, rejected)
    ]
    (found,) = read({"chosen": turns[0], "rejected": turns[1]})
    assert found == Preference(turns[0][:1], turns[0][1:], turns[1][1:])
    halves = [prompt + text for text in (chosen, rejected)]
    texts = attempt({"chosen": halves[0], "rejected": halves[1]}, chat=False)
    if isinstance(texts, str):
        assert "is empty" in texts
    else:
        assert [f"{texts[0].prompt}{half}" for half in (texts[0].chosen, texts[0].rejected)] == halves


@pytest.mark.real_data
def test_published_preferences() -> None:
    folder = REAL / "preferences"
    counts = {}
    for file in sorted(folder.iterdir()):
        text = file.read_text(encoding="utf-8")
        records = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
        reader = form(chat="standard" not in file.name, lenient=True)
        found = [
            item
            for n, record in enumerate(records)
            for item in lines_of(reader, record, f"{Path(file).name}, line {n}")
        ]
        counts[file.name] = (len(records), len(found), dict(reader.tolerance.counts))
        halves = {"chosen", "rejected"} if "unpaired" not in file.name and "kto" not in file.name else {"completion"}
        assert all(halves <= json.loads(item).keys() for item in found)
    assert all(total == found + sum(left.values()) for total, found, left in counts.values())
    assert counts["dpo_sharegpt.json"][1] > 190
    assert counts["kto_messages.json"][1] > 190
    assert all(not left for name, (_, _, left) in counts.items() if name.startswith("zen"))
