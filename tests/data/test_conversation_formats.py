"""Each format says the same conversation, and each way in which a record can be broken is said with its place."""

import contextlib
import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testdata import CONVERSATIONS, REAL

from finetune.config.recipe_schema import Source
from finetune.data.rows.kinds import classes, tags
from finetune.data.sources.conversation_formats import Conversation, RecordForm, Tolerance
from finetune.data.sources.corpus import open_source
from finetune.utils.errors import DataError

OPENED = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def form(*, lenient: bool = False, **keys: Any) -> RecordForm:
    given_format, fields, roles = keys.pop("format", "auto"), keys.pop("fields", {}), keys.pop("roles", {})
    return RecordForm(given_format, fields, roles, "text", strip=True, tolerance=Tolerance(lenient), **keys)


def read(record: Any, **keys: Any) -> Any:
    return Conversation.from_json(form(**keys).read(record, "chats.jsonl, line 3"))


def refusal(record: Any, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(record, **keys)
    said = str(caught.value)
    assert said.startswith("chats.jsonl, line 3")
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("record", "detected", "fields"),
    [
        ({"messages": OPENED}, "messages", {}),
        ({"id": 7, "messages": [{**turn, "id": "x", "weight": None} for turn in OPENED]}, "messages", {}),
        ({"messages": [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in OPENED]}, "messages", {}),
        ({"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}, "sharegpt", {}),
        ({"conversation": [{"from": "user", "value": "Hello"}, {"from": "bot", "value": "Hi"}]}, "sharegpt", {}),
        ({"messages": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}, "sharegpt", {}),
        ({"conversations": OPENED}, "messages", {}),
        ({"instruction": "Hello", "input": "", "output": "Hi"}, "alpaca", {}),
        ({"instruction": "Hello", "output": "Hi"}, "alpaca", {}),
        ({"instruction": "Hello", "input": None, "output": "Hi"}, "alpaca", {}),
        ({"prompt": "Hello", "completion": "Hi"}, "prompt", {}),
        ({"prompt": "Hello", "response": "Hi"}, "prompt", {}),
        ({"prompt": OPENED[:1], "completion": OPENED[1:]}, "prompt", {}),
        ({"question": "Hello", "answer": "Hi"}, "pairs", {}),
        ({"ask": "Hello", "reply": "Hi"}, "pairs", {"user": "ask", "assistant": "reply"}),
        (
            {"name": "x", "in": {"it": "Hello"}, "out": [{"is": "Hi"}]},
            "pairs",
            {"user": "in.it", "assistant": "out.0.is"},
        ),
        ({"a.b": "Hello", "a": {"b": "no"}, "c": "Hi"}, "pairs", {"user": "a.b", "assistant": "c"}),
        ({"chat": {"turns": OPENED}}, "messages", {"messages": "chat.turns"}),
    ],
)
def test_one_conversation_in_many_formats(record: Any, detected: str, fields: dict[str, str]) -> None:
    reader = form(fields=fields)
    found: Any = Conversation.from_json(reader.read(record, "here"))
    assert found.messages == OPENED
    assert found.weights == [1, 1]
    assert found.completion == 1
    assert reader.detected == detected


def test_an_input_goes_below_its_instruction() -> None:
    found = read({"instruction": "Add.", "input": "2 and 3", "output": "5"})
    assert found.messages[0]["content"] == "Add.\n\n2 and 3"


def test_a_system_prompt_of_its_own() -> None:
    found = read({"instruction": "Add.", "system": "Be brief.", "output": "5"})
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant"]
    assert found.completion == 2


@pytest.mark.parametrize("turns", [{"messages": OPENED}, {"conversations": [{"from": "human", "value": "Hello"}]}])
def test_a_system_prompt_beside_the_turns(turns: dict[str, Any]) -> None:
    found = read({"system": "Be brief.", **turns})
    assert found.messages[:2] == [{"role": "system", "content": "Be brief."}, OPENED[0]]
    assert len(found.weights) == len(found.messages)
    assert "two system turns" in refusal({"system": "a", "messages": [{"role": "system", "content": "b"}, *OPENED]})
    assert read({"system": "", "messages": OPENED}).messages == OPENED


def test_an_input_means_something_in_one_format_only() -> None:
    assert read({"question": "Hello", "answer": "Hi", "input": 7}).messages == OPENED
    paths = {"user": "question", "assistant": "answer", "input": "input"}
    assert read({"question": "A", "answer": "C", "input": "B"}, fields=paths).messages[0]["content"] == "A\n\nB"


def test_no_calls_are_no_answer() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": []}
    assert "turn 2: there is no field 'content'; there are role, tool_calls" in refusal(
        {"messages": [*OPENED[:1], turn]}
    )


def test_tools_and_weights() -> None:
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    turns = [
        {"role": "user", "content": "2 + 3?", "weight": 0},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "5", "name": "add", "tool_call_id": "1"},
        {"role": "assistant", "content": "Five.", "weight": 0},
    ]
    found = read({"messages": turns, "tools": json.dumps([{"name": "add"}])})
    assert found.messages[1] == {"role": "assistant", "tool_calls": call}
    assert found.messages[2] == {"role": "tool", "content": "5", "name": "add", "tool_call_id": "1"}
    assert found.weights == [0, 1, 1, 0]
    assert found.tools == [{"name": "add"}]
    for name, value in ("function_call", call[0]["function"]), ("Function_Call", [call[0]["function"]]):
        shared = [{"from": "human", "value": "2"}, {"from": name, "value": json.dumps(value)}]
        found = read({"conversations": [*shared, {"from": "observation", "value": "5"}]})
        assert found.messages[1] == {"role": "assistant", "tool_calls": call}
        assert [message["role"] for message in found.messages] == ["user", "assistant", "tool"]


def test_roles_of_ones_own() -> None:
    turns = [{"role": "customer", "content": "Hello"}, {"role": "agent", "content": "Hi"}]
    assert read({"messages": turns}, roles={"customer": "user", "agent": "assistant"}).messages == OPENED


@pytest.mark.parametrize(
    ("name", "role"),
    [("Assistant", "assistant"), ("AI", "assistant"), ("USER", "user"), ("developer", "system"), ("ipython", "tool")],
)
def test_roles_of_other_dialects(name: str, role: str) -> None:
    turns = [{"role": name, "content": "Hello"}, *OPENED]
    assert read({"messages": turns}).messages[0] == {"role": role, "content": "Hello"}
    assert read({"messages": turns}, roles={name: "user"}).messages[0]["role"] == "user"


@pytest.mark.parametrize("answer", ["Hi", [*OPENED]])
def test_preferences_are_named(answer: Any) -> None:
    record = {"prompt": "Hello", "chosen": answer, "rejected": "No"}
    for other in ({}, {"messages": OPENED}, {"instruction": "a", "output": "b"}):
        assert "To learn the chosen answers alone, name them in the source's `fields`" in refusal({**record, **other})
    fields = {"messages": "chosen"} if isinstance(answer, list) else {"user": "prompt", "assistant": "chosen"}
    assert read(record, fields=fields).messages == OPENED


def test_plain_text_is_a_document() -> None:
    assert read({"text": " Once.\n"}) == read(" Once.\n", format="text") == "Once."


def test_the_first_record_decides() -> None:
    reader = form()
    reader.read({"question": "Hello", "answer": "Hi"}, "line 1")
    with pytest.raises(
        DataError, match=r"line 2: there is no field 'question' \(read as pairs\); the fields are prompt"
    ):
        reader.read({"prompt": "Hello", "completion": "Hi"}, "line 2")


@pytest.mark.parametrize(
    ("record", "keys", "says"),
    [
        ({"messages": [{"role": "narrator", "content": "x"}]}, {}, "turn 1: the role is 'narrator'; known are system,"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, {}, "chat.roles: {narrator: ROLE}, where"),
        ({"conversations": [{"from": "function_call", "value": "add(2)"}]}, {}, "turn 1: 'value' is not valid JSON"),
        ({"conversations": [{"from": "function_call", "value": "5"}]}, {}, "a function_call is an object with a name"),
        ({"messages": [{"role": None, "content": "x"}]}, {}, "has the fields role and content, got content."),
        ({"messages": [*OPENED[:1], {"role": "assistant", "content": " \n"}]}, {}, "turn 2: the answer is empty"),
        ({"prompt": "Hello", "completion": ""}, {}, "turn 2: the answer is empty"),
        (
            {"conversations": [{"from": "system", "value": "a"}] * 2 + [{"from": "gpt", "value": "b"}]},
            {},
            "turn 2: there are two system turns, and a conversation has at most one",
        ),
        ({"messages": [*OPENED, {"role": "system", "content": "x"}]}, {}, "turn 3: the system turn is not the first"),
        ({"messages": []}, {}, "'messages' must be a list of turns, got an empty list"),
        ({"messages": "Hello"}, {}, "'messages' must be a list of turns, got a text"),
        ({"messages": None}, {}, "the fields are none, and no format has these"),
        ({"messages": ["Hello"]}, {}, "has the fields role and content, got a text"),
        ({"messages": [{"role": "user"}]}, {}, "turn 1: there is no field 'content'; there are role"),
        ({"messages": [{"role": "user", "content": None}]}, {}, "there is no field 'content'; there are role. A null"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "'content' must be a text, got a list"),
        ({"messages": [{"role": "user", "content": "x", "weight": 0.5}]}, {}, "the weight is 0.5"),
        ({"messages": OPENED, "tools": "{"}, {}, "'tools' is not valid JSON"),
        ({"messages": OPENED, "tools": {"a": 1}}, {}, "'tools' must be a list, got an object"),
        ({"question": 7, "answer": "x"}, {}, "'question' must be a text, got a number"),
        ({"body": "x", "meta": {"a": [{"b": 1}]}}, {}, "the fields are body, meta.a.0.b, and no format has these"),
        ({"body": "x"}, {}, "messages: messages; sharegpt: conversations"),
        ({"prompt": "x", "completion": "y"}, {"format": "alpaca"}, "Known are alpaca: instruction, output."),
        (
            {"task": "x", "instances": [{"input": "", "output": "y"}]},
            {"fields": {"user": "task", "assistant": "instances.0.outputs"}},
            "there is no field 'instances.0.outputs' (read as pairs); the fields are task, instances.0.input, "
            "instances.0.output.",
        ),
        ([1], {}, "a conversation is an object with fields, got list"),
    ],
)
def test_broken_records(record: Any, keys: dict[str, Any], says: str) -> None:
    assert says in refusal(record, **keys)


def test_an_empty_answer_may_be_one_that_is_not_learned() -> None:
    found = read({"messages": [*OPENED[:1], {"role": "assistant", "content": "", "weight": 0}]})
    assert found.weights == [1, 0]


def test_broken_records_are_counted_where_they_are_tolerated() -> None:
    reader = form(lenient=True)
    good = {"messages": OPENED}
    unknown = {"messages": [{"role": "narrator", "content": "x"}]}
    empty = {"messages": [*OPENED[:1], {"role": "assistant", "content": ""}]}
    kept = [reader.read(record, f"line {n}") for n, record in enumerate([good, unknown, empty, unknown, good], start=1)]
    assert [bool(text) for text in kept] == [True, False, False, False, True]
    assert reader.tolerance.counts == {"unknown role": 2, "empty answer": 1}
    assert reader.tolerance.first is not None
    assert reader.tolerance.first.startswith("line 2, turn 1: the role is 'narrator'")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "role", "content", "from", "value", "weight", "tools"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(record=st.dictionaries(st.sampled_from(["messages", "conversations", "prompt", "completion", "tools"]), JSON))
def test_anything_is_read_or_refused(record: Any) -> None:
    found: Any = None
    with contextlib.suppress(DataError):
        found = read(record)
    if found is None:
        refusal(record)
        return
    assert {message["role"] for message in found.messages} <= {"system", "user", "assistant", "tool"}
    assert Conversation.from_json(found.to_json()) == found


def test_every_kind_of_file(tmp_path: Path) -> None:
    """Nested fields come through Parquet and `datasets` too, where each object has every field."""
    records = [{"id": n, "messages": [{**turn, "name": None} for turn in OPENED]} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "a.json").write_text(json.dumps(records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.jsonl", "a.json", "a.parquet", "saved"):
        corpus = open_source(Source(path=str(tmp_path / name)), form=form())
        found: list[Any] = [Conversation.from_json(document.text) for document in corpus.documents()]
        assert [conversation.messages for conversation in found] == [OPENED] * 3, name


def test_csv_and_txt(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nHello,Hi\n")
    (tmp_path / "a.txt").write_text("Once.\n<|endoftext|>\nTwice.\n")
    found = [
        [Conversation.from_json(d.text) for d in open_source(Source(path=str(p)), form=form(format=kind)).documents()]
        for p, kind in ((tmp_path / "a.csv", "auto"), (tmp_path / "a.txt", "text"))
    ]
    assert found[0][0].messages == OPENED  # type: ignore[union-attr]
    assert found[1] == ["Once.", "Twice."]


def test_conversations_without_a_chat_section_are_pointed_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": OPENED}))
    with pytest.raises(DataError, match="or give the recipe a `chat` section if these are conversations"):
        list(open_source(Source(path=str(tmp_path / "a.jsonl"))).documents())
    source = Source(path=str(tmp_path / "a.jsonl"))
    pair = source.model_copy(update={"pair_field": "other"})
    for fields in (
        classes.KIND.fields(source),
        classes.KIND.fields(source, labels=False),
        tags.KIND.fields(source, labels=False),
        classes.KIND.fields(pair, labels=False),
    ):
        with pytest.raises(DataError, match="if these are conversations, write each as one text") as caught:
            list(open_source(source, fields).documents())
        assert "chat={}" not in str(caught.value), "a task that refuses it next"


NESTED = {"user": "instruction", "input": "instances.0.input", "assistant": "instances.0.output"}
FILES = {
    str(CONVERSATIONS / "sharegpt.json"): ({}, "sharegpt", 400),
    str(CONVERSATIONS / "questions.jsonl"): ({}, "pairs", 300),
    str(CONVERSATIONS / "tasks.jsonl"): (NESTED, "pairs", 150),
}
PUBLISHED = {
    str(REAL / "instruct" / "fastchat_dummy_conversation.json"): ({}, "sharegpt", 500),
    str(REAL / "instruct" / "gsm8k_train.jsonl"): ({}, "pairs", 7473),
    str(REAL / "instruct" / "self_instruct_seed_tasks.jsonl"): (NESTED, "pairs", 175),
}


@pytest.mark.parametrize("files", [FILES, pytest.param(PUBLISHED, marks=pytest.mark.real_data)], ids=["made", "real"])
def test_formats_of_whole_files(files: dict[str, tuple[dict[str, str], str, int]]) -> None:
    for path, (fields, detected, count) in files.items():
        reader, text = form(fields=fields), Path(path).read_text()
        documents = list(open_source(Source(path=path), form=reader).documents())
        assert len(documents) == count
        assert reader.detected == detected
        record = json.loads(text.splitlines()[0]) if path.endswith(".jsonl") else json.loads(text)[0]
        first: Any = Conversation.from_json(documents[0].text)
        if detected == "sharegpt":
            assert [m["content"] for m in first.messages] == [turn["value"] for turn in record["conversations"]]
        else:
            assert first.messages[-1]["content"] == (record.get("answer") or record["instances"][0]["output"])


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
def test_bare_texts_are_no_conversations(tmp_path: Path, name: str) -> None:
    """Every token of them would be learned, which nobody asked for by `chat`."""
    texts = ["Once.", "Twice."]
    written = {"a.json": json.dumps(texts), "a.jsonl": "\n".join(map(json.dumps, texts)), "a.txt": "Once.\n"}
    (tmp_path / name).write_text(written[name])
    for lenient in (False, True):
        corpus = open_source(Source(path=str(tmp_path / name)), form=form(lenient=lenient))
        with pytest.raises(DataError, match=r"this is a bare text, .*set the source's `format` to `text`"):
            list(corpus.documents())
    asked = open_source(Source(path=str(tmp_path / name)), form=form(format="text"))
    assert Conversation.from_json(next(asked.documents()).text) == "Once."


def test_a_bare_text_among_conversations_is_refused_too() -> None:
    reader = form()
    reader.read({"messages": OPENED}, "line 1")
    with pytest.raises(DataError, match="line 2: this is a bare text"):
        reader.read("Once.", "line 2")


def test_values_that_json_has_no_form_for(tmp_path: Path) -> None:
    """Parquet holds dates, bytes and decimals."""
    records = [{"messages": OPENED, "tools": [{"name": "f", "since": datetime.date(2024, 1, 1)}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    corpus = open_source(Source(path=str(tmp_path / "a.parquet")), form=form())
    with pytest.raises(DataError, match=r"row 1: messages or tools hold what JSON cannot: .*date"):
        list(corpus.documents())
