"""Preferences that cannot be learned from are refused by line or row, in each format of files that can hold them."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from testdata import MODEL
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from finetune.config.recipe import validate_recipe
from finetune.data.prepare import PreparedData, prepare_data
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.errors import DataError

FORMATS = {"jsonl": "line 2", "json": "item 2", "csv": "line 3", "parquet": "row 2"}
NAN = float("nan")
GOOD = {"prompt": "What is it?", "chosen": "A fox.", "rejected": "It is a fox."}
LABELLED = {"prompt": "What is it?", "completion": "A fox.", "label": True}
ASK = [{"role": "user", "content": "What is it?"}]
TURNS = {name: [{"role": "assistant", "content": GOOD[name]}] for name in ("chosen", "rejected")}
TURNS = {"prompt": ASK, **TURNS}


def write(file: Path, records: list[dict[str, Any]]) -> None:
    """Writes records, which have the same fields."""
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    elif file.suffix == ".csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, records[0])
            writer.writeheader()
            writer.writerows(records)
    else:
        lines = [json.dumps(record) for record in records]
        file.write_text("".join(f"{line}\n" for line in lines) if file.suffix == ".jsonl" else f"[{', '.join(lines)}]")


def prepared(file: Path, task: str = "dpo", tokenizer: str = MODEL, **sections: Any) -> PreparedData:
    data = {"train": [{"path": str(file)}], "validation_fraction": 0.0, "sequence_length": 256}
    data |= {"cache_dir": str(file.parent / "cache"), **sections.pop("data", {})}
    tree = {"task": {"name": task}, "model": {"name": MODEL}, "tokenizer": {"name": tokenizer}, "data": data}
    recipe = validate_recipe({**tree, "length": {"epochs": 1}, **sections}, tasks=BUILT_IN)
    return prepare_data(recipe, BUILT_IN[task].rows, quiet=True)


def refusal(file: Path, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepared(file, **keys)
    said = str(caught.value)
    assert "\n" not in said
    return said


SCORED = {**GOOD, "score_chosen": 2.0, "score_rejected": 1.0}
FLAT: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("dpo", GOOD, {"chosen": ""}, ", chosen", "the answer is empty"),
    ("dpo", GOOD, {"rejected": " \n"}, ", rejected", "the answer is empty"),
    ("dpo", GOOD, {"chosen": "</s>"}, ", chosen", "the answer is nothing but special tokens"),
    ("dpo", GOOD, {"chosen": GOOD["rejected"]}, "", "both answers are the same"),
    ("dpo", SCORED, {"score_chosen": NAN}, "", "'score_chosen' must be a finite number"),
    ("dpo", SCORED, {"score_rejected": None}, "", "'score_rejected' must be a finite number"),
    ("dpo", SCORED, {"score_chosen": 0.5}, "", "the chosen answer is the worse one"),
    ("reward", {**GOOD, "margin": 1.0}, {"margin": NAN}, "", "'margin' must be a finite number"),
    ("kto", LABELLED, {"label": None}, "", "label"),
    ("kto", {**LABELLED, "label": 1.0}, {"label": NAN}, "", "'label' is 'nan'; it is true for a desirable answer"),
    ("kto", {**LABELLED, "label": "true"}, {"label": "good"}, "", "'label' is 'good'; it is true for a desirable"),
    ("kto", LABELLED, {"completion": " "}, "", "the answer is empty"),
    ("kto", LABELLED, {"completion": "</s> "}, "", "the answer is nothing but special tokens"),
]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("chat", [None, {"template": "plain"}], ids=["texts", "turns"])
@pytest.mark.parametrize(("task", "good", "bad", "place", "words"), FLAT)
def test_bad_records_are_refused_by_row(
    task: str, good: dict[str, Any], bad: dict[str, Any], place: str, words: str, chat: Any, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / f"pairs.{kind}"
    write(file, [good, {**good, **bad}])
    packing = {"packing": "padded"} if task == "reward" else {}
    said = refusal(file, task=task, chat=chat, data=packing)
    assert said.startswith(f"{file}, {FORMATS[kind]}{place if chat is None else ''}")
    assert words in said


NESTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TURNS, {"chosen": [*TURNS["chosen"], *ASK]}, "an answer ends with a turn of the assistant"),
    (TURNS, {"chosen": [{"role": "assistant", "content": "</s>"}]}, "the answer is nothing but special tokens"),
    (
        {"chosen": ASK + TURNS["chosen"], "rejected": ASK + TURNS["rejected"]},
        {"rejected": [{"role": "user", "content": "Who?"}, *TURNS["rejected"]]},
        "the answers are to different prompts",
    ),
    (
        {"prompt": "What is it?", "completions": ["A fox.", "A hen."], "scores": [2.0, 1.0]},
        {"scores": [NAN, 1.0]},
        "'scores', answer 1 must be a finite number",
    ),
    (
        {"prompt": "What is it?", "completions": ["A fox.", "A hen."], "scores": [2.0, 1.0]},
        {"scores": [1.0, 1.0]},
        "no answer has better 'scores' than another",
    ),
]


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "csv"])
@pytest.mark.parametrize(("good", "bad", "words"), NESTED)
def test_bad_turns_and_rankings(
    good: dict[str, Any], bad: dict[str, Any], words: str, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / f"pairs.{kind}"
    write(file, [good, {**good, **bad}])
    said = refusal(file, chat={"template": "plain"})
    assert said.startswith(f"{file}, {FORMATS[kind]}")
    assert words in said


THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_what_tells_answers_apart_may_not_be_dropped(tmp_path: Path) -> None:
    """By a template that writes no thoughts, or by a tokenizer."""
    thinking = [{"role": "assistant", "content": "A fox.", "reasoning_content": thought} for thought in ("Red", "Big")]
    pair = {"prompt": ASK, "chosen": thinking[:1], "rejected": thinking[1:]}
    write(tmp_path / "pairs.jsonl", [TURNS, pair])
    (tmp_path / "thinks.jinja").write_text(THINKS)
    chat = {"template": str(tmp_path / "thinks.jinja")}
    said = refusal(tmp_path / "pairs.jsonl", chat=chat)
    assert "line 2, chosen, turn 2: the answer has `reasoning_content`" in said
    said = refusal(tmp_path / "pairs.jsonl", chat={**chat, "drop_reasoning": True})
    assert "line 2: both answers become the same tokens: the chat template or the tokenizer drops" in said
    data = prepared(tmp_path / "pairs.jsonl", chat={**chat, "drop_reasoning": True}, checks={"max_broken": 0.5})
    assert data.report.train is not None
    assert data.report.train.broken == {"equal halves": 1}

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    fast: Tokenizer = tokenizer.backend_tokenizer
    fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace("\u200b", "")])
    tokenizer.save_pretrained(tmp_path / "lower")
    write(tmp_path / "case.jsonl", [GOOD, {**GOOD, "chosen": "A FOX.", "rejected": "A fox."}])
    said = refusal(tmp_path / "case.jsonl", tokenizer=str(tmp_path / "lower"))
    assert "line 2: both answers become the same tokens" in said
    write(tmp_path / "blank.jsonl", [GOOD, {**GOOD, "chosen": "\u200b"}])
    said = refusal(tmp_path / "blank.jsonl", tokenizer=str(tmp_path / "lower"))
    assert "line 2, chosen: the answer is nothing but special tokens" in said


def test_what_truncation_makes_alike_is_left_out_and_counted(tmp_path: Path) -> None:
    file, long = tmp_path / "pairs.jsonl", "fox " * 60
    tie = {"score_chosen": 3, "score_rejected": 3}
    records = [{**GOOD, **tie}, {**GOOD, "chosen": f"{long} one", "rejected": f"{long} two"}]
    write(file, [*records, {**GOOD, "rejected": long}])
    chat = {"template": "plain", "too_long": "cut_right"}
    report = prepared(file, chat=chat, data={"sequence_length": 40}).report
    assert report.train is not None
    assert report.train.chat is not None
    assert (report.train.documents, report.train.chat.alike, report.train.chat.ties) == (2, 1, 1)
    assert report.train.chat.cut == 1, "also where the second half alone is cut"
    lines = "\n".join(report.lines())
    for words in (
        "1 conversations left out as too long",
        "1 pairs left out that differ only in what was cut off",
        "1 pairs whose answers have the same score",
        "1 conversations cut",
        "2 examples, 4 answers learned",
    ):
        assert words in lines


def test_answers_to_one_prompt_are_held_out_together(tmp_path: Path) -> None:
    """Of rankings, of several records, and of pairs that are learned as answers with labels."""
    ranked = {"completions": ["A fox.", "A hen.", "A cat."], "scores": [3, 2, 1]}
    again = {"completions": ["A dog.", "A cow."], "scores": [2, 1]}
    prompts = [f"What is number {n}?" for n in range(60)]
    write(tmp_path / "ranks.jsonl", [{"prompt": prompt, **more} for more in (ranked, again) for prompt in prompts])
    held_out = []
    for task, preference in (("dpo", {"ranking": "all"}), ("kto", {}), ("orpo", {})):
        data = prepared(tmp_path / "ranks.jsonl", task, preference=preference, data={"validation_fraction": 0.3})
        sides = []
        for rows in (data.train, data.validation):
            assert rows is not None
            texts = [data.tokenizer.decode(next(iter(rows.kind.examples(rows, n, ()))).ids) for n in range(len(rows))]
            sides.append({prompt for prompt in prompts for text in texts if prompt in text})
        assert not sides[0] & sides[1]
        assert len(sides[0] | sides[1]) == 60
        held_out.append(sides[1])
    assert 8 <= len(held_out[0]) <= 28
    assert held_out[0] == held_out[1] == held_out[2], "whatever is made of a record"
