"""What a look at data finds, and the sizes of a recipe that follow from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import testdata

from finetune.cli.recipe_sizes import size_recipe
from finetune.config.recipe import validate_recipe
from finetune.data.source_survey import Kind, UnknownColumns, row_length_for, survey_source, token_lengths
from finetune.utils.errors import DataError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write(folder: Path, *records: Any, times: int = 1) -> str:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records * times))
    return str(path)


@pytest.mark.parametrize(
    ("record", "kind", "keys"),
    [
        ({"messages": CHAT}, "conversations", {}),
        ({"Messages": CHAT}, "conversations", {"fields": {"messages": "Messages"}}),
        ({"question": "a", "answer": "b"}, "conversations", {}),
        ({"Question": "a", "ANSWER": "b"}, "conversations", {"fields": {"user": "Question", "assistant": "ANSWER"}}),
        (
            {"Instruction": "a", "Input": "", "Output": "b"},
            "conversations",
            {"fields": {"user": "Instruction", "assistant": "Output", "input": "Input"}},
        ),
        ({"instruction": "a", "input": "", "output": "b"}, "conversations", {}),
        (
            {"instruction": "a", "context": "", "response": "b", "category": "c"},
            "conversations",
            {"fields": {"user": "instruction", "assistant": "response", "input": "context"}},
        ),
        ({"prompt": "a", "completion": "b"}, "conversations", {}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "pairs", {}),
        (
            {"Prompt": "a", "Chosen": "b", "Rejected": "c"},
            "pairs",
            {"fields": {"chosen": "Chosen", "rejected": "Rejected", "prompt": "Prompt"}},
        ),
        ({"chosen": "a b", "rejected": "a c"}, "pairs", {}),
        ("a bare text", "text", {}),
        ({"text": "a", "url": "b"}, "text", {}),
        ({"id": "1", "Passage": "a"}, "text", {"text_field": "Passage"}),
        ({"text": "a", "label": 1}, "labelled", {}),
        ({"Review": "a", "Sentiment": "good"}, "labelled", {"text_field": "Review", "label_field": "Sentiment"}),
    ],
)
def test_what_records_are(record: Any, kind: Kind, keys: dict[str, Any], tmp_path: Path) -> None:
    found = survey_source(write(tmp_path, record, times=3))
    assert (found.kind, found.keys, found.documents, found.whole) == (kind, keys, 3, True)


@pytest.mark.parametrize(
    ("record", "kind", "says"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "conversations", r"these are no conversations\.$"),
        ({"prompt": "a", "completion": "b"}, "pairs", r"these are no pairs of answers\.$"),
        (
            {"text": "a"},
            "labelled",
            r"these are no texts with a class\.$",
        ),
        (
            {"text": "a"},
            "conversations",
            r"these are no conversations\.$",
        ),
        ({"question": "a", "answer": ""}, None, "the answer is empty"),
        ({"prompt": "a", "chosen": [{}], "rejected": [{}]}, None, "both answers are the same"),
        ({"ask": "a", "reply": "b"}, None, "the fields are ask, reply"),
        ({"text": "a", "label": 0.5}, None, "a class is an integer or a text"),
    ],
)
def test_what_cannot_be_read_is_refused(record: Any, kind: Kind | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        survey_source(write(tmp_path, record), kind)


@pytest.mark.parametrize(
    ("record", "kind", "given", "likely"),
    [
        ({"body": "a", "Queue 2": "b"}, "labelled", {}, {"text_field": "body", "label_field": "Queue 2"}),
        ({"body": "a", "Queue 2": "b"}, "labelled", {"text_field": "body"}, {"label_field": "Queue 2"}),
        ({"text": "a"}, "labelled", {}, {}),
        ({"text": "a"}, "conversations", {}, {}),
        ({"id": "1", "ask": "a", "reply": "b"}, None, {}, {"fields.user": "ask", "fields.assistant": "reply"}),
        ({"n": 1}, None, {}, {}),
    ],
)
def test_columns_are_guessed_by_what_they_hold(
    record: Any, kind: Kind | None, given: dict[str, str], likely: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UnknownColumns) as caught:
        survey_source(write(tmp_path, record), kind, given)
    assert caught.value.overrides == tuple(f"data.train.0.{key}={name}" for key, name in likely.items())


def test_classes_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, *({"text": f"a {n}", "label": ["x", "y", "x"][n % 3]} for n in range(60)))
    assert survey_source(path).labels == {"x": 40, "y": 20}
    assert survey_source(path, "text").labels == {}
    # A name for each document is none of a class.
    path = write(tmp_path, *({"text": f"a {n}", "category": f"c {n}"} for n in range(60)))
    assert survey_source(path).kind == "text"


def test_lengths_are_those_of_rows(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "Why?", "answer": "So."}, {"question": "Why " * 50, "answer": "So."})
    tree = {"model": testdata.MODEL, "chat": "plain", "data": {"train": path}, "length": {"steps": 1}}
    short, long = token_lengths(survey_source(path), validate_recipe(tree))
    assert short < 40 < 50 < long


def test_a_row_holds_nearly_all() -> None:
    assert row_length_for([50] * 100, 1024, split=False) == 64
    assert row_length_for([50] * 100 + [90], 1024, split=False) == 128
    assert row_length_for([50] * 200 + [1000], 1024, split=False) == 64
    assert row_length_for([5000], 1024, split=True) == 1024


@pytest.mark.parametrize(("documents", "ranks"), [(10, 2), (300, 1), (300, 2), (300, 8), (3000, 6), (100_000, 8)])
@pytest.mark.parametrize("packing", ["documents", "split", "padded"])
def test_sizes_follow_the_data(documents: int, ranks: int, packing: str) -> None:
    sizes = size_recipe(documents, [40, 60, 100], 1024, ranks, packing=packing)
    rows = documents if packing == "padded" else documents * 67 // sizes.row_length
    steps = sizes.epochs * rows // sizes.rows
    assert rows >= sizes.rows
    assert sizes.rows % sizes.micro_rows == 0
    assert sizes.rows % ranks == 0 or rows < ranks
    assert 1 <= sizes.epochs <= 5
    assert steps >= 50 or sizes.warnings
    assert rows // sizes.rows >= 18 or sizes.rows <= ranks


def test_large_data_gets_long_rows() -> None:
    assert size_recipe(1_000_000, [50], 4096, 2, packing="documents").row_length == 1024
    assert size_recipe(300, [50], 4096, 2, packing="documents").row_length == 64


@pytest.mark.parametrize(
    ("given", "most", "says"),
    [
        ({}, 512, "(data.sequence_length 512) and will be left out: set chat.too_long=cut_left."),
        ({}, 900, "left out: raise data.sequence_length as far as memory allows or set chat.too_long=cut_left."),
        ({"chat": {"too_long": "cut_right"}}, 512, "and will be cut: the model takes no longer rows."),
        ({"data": {"sequence_length": 256}}, 512, "(data.sequence_length 256) and will be left out: raise data.seq"),
        ({"data": {"sequence_length": 2048}}, 4096, None),
    ],
)
def test_what_is_too_long_is_warned_of(given: dict[str, Any], most: int, says: str | None) -> None:
    """Nothing is advised that the model cannot take, and what the command sets is read."""
    lengths = [50] * 8 + [2000] * 2
    sizes = size_recipe(3000, lengths, 512, 2, packing="documents", most=most, given=given)
    assert [says in warning for warning in sizes.warnings] == [True] if says else sizes.warnings == ()
    assert sizes.row_length == given.get("data", {}).get("sequence_length", 512)


def test_few_steps_are_no_news_where_the_length_is_given() -> None:
    assert "raise length.epochs" in size_recipe(20, [50], 512, 2, packing="padded").warnings[0]
    assert size_recipe(20, [50], 512, 2, packing="padded", given={"length": {"steps": 9}}).warnings == ()
