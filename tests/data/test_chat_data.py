"""Conversations from recipe to rows: packed with masked targets, counted exactly, reported and refused."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import CHATML, STYLES, example, learned, talk, tokenizer
from chats import unmarked as without_marks
from hypothesis import given, settings
from hypothesis import strategies as st
from testdata import CONVERSATIONS

from finetune.cli import main
from finetune.config import recipe_schema
from finetune.config.recipe import dump_recipe, validate_recipe
from finetune.data.chat.chat_templates import SHIPPED
from finetune.data.data_report import DataReport
from finetune.data.prepare import PreparedData, prepare_data
from finetune.data.rows.kinds.row_kind import TokenRows
from finetune.data.rows.packed_rows import IGNORED
from finetune.data.tokenization.memmap import MaskFile, pack_mask
from finetune.tasks.causal_lm import CAUSAL_LM
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils import exit_codes
from finetune.utils.errors import DataError, RecipeError

SHAREGPT = {"path": str(CONVERSATIONS / "sharegpt.json")}
PAIRS = {"path": str(CONVERSATIONS / "questions.jsonl")}
NESTED = {
    "path": str(CONVERSATIONS / "tasks.jsonl"),
    "fields": {"user": "instruction", "input": "instances.0.input", "assistant": "instances.0.output"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a template of its own, and templates as files."""
    made = tmp_path_factory.mktemp("chats")
    reader = tokenizer()
    reader.chat_template = CHATML
    reader.save_pretrained(str(made / "tokenizer"))
    for name, (template, _) in STYLES.items():
        (made / f"{name}.jinja").write_text(template)
        (made / f"{name}_unmarked.jinja").write_text(without_marks(template))
    return made


def recipe(folder: Path, sources: Any, chat: dict[str, Any] | None = None, **keys: Any) -> recipe_schema.Recipe:
    checks, seed = keys.pop("checks", {}), keys.pop("tokenizer", str(folder / "tokenizer"))
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"name": seed} if isinstance(seed, str) else seed,
        "chat": {} if chat is None else chat,
        "checks": checks,
        "data": {
            "train": sources,
            "validation_fraction": 0.0,
            "sequence_length": 512,
            "cache_dir": str(folder / "cache"),
            **keys,
        },
        "length": {"steps": 1},
    }
    return validate_recipe(tree)


def prepared(folder: Path, sources: Any, chat: dict[str, Any] | None = None, **keys: Any) -> PreparedData:
    return prepare_data(recipe(folder, sources, chat, **keys), quiet=True)


def targets_of(rows: TokenRows) -> int:
    return rows.num_targets(np.arange(len(rows)))


def written(path: Path, conversations: list[list[tuple[str, str]] | dict[str, Any]]) -> dict[str, Any]:
    records = [
        {"messages": [{"role": role, "content": text} for role, text in c]} if isinstance(c, list) else c
        for c in conversations
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"path": str(path)}


def pairs(number: int) -> list[Any]:
    return [[("user", f"What is {n}?"), ("assistant", f"The answer is {n * n}.")] for n in range(number)]


def learned_runs(data: PreparedData, rows: TokenRows) -> list[str]:
    """What the batches teach, run by run; a new document begins a new run."""
    found = []
    for row in range(len(rows)):
        batch = {name: values[0].tolist() for name, values in rows.batch(np.array([row])).items()}
        run: list[int] = []
        for target in [*batch["targets"], IGNORED]:
            if target != IGNORED:
                run.append(target)
            elif run:
                found.append(data.tokenizer.decode(run))
                run = []
    return found


def refusal(*arguments: Any, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepared(*arguments, **keys)
    said = str(caught.value)
    assert "\n" not in said
    return said


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("style", [*STYLES, "chatml_unmarked"])
@pytest.mark.parametrize("packing", ["documents", "padded"])
def test_rows_teach_the_answers_and_their_ends(folder: Path, style: str, packing: str) -> None:
    """Of all conversations that fit a row, and nothing else."""
    everything = json.loads(Path(SHAREGPT["path"]).read_text())
    records = [r for r in everything if sum(len(turn["value"]) for turn in r["conversations"]) <= 320]
    assert len(records) > 150
    (folder / "short.json").write_text(json.dumps(records))
    sources = [{"path": str(folder / "short.json")}]
    data = prepared(folder, sources, {"template": str(folder / f"{style}.jinja")}, packing=packing)
    spoken = STYLES[style.removesuffix("_unmarked")][1]
    expected = [spoken(t["value"]) for record in records for t in record["conversations"] if t["from"] == "gpt"]
    assert sorted(learned_runs(data, data.train)) == sorted(expected)


@pytest.mark.parametrize("source", [SHAREGPT, PAIRS, NESTED], ids=["sharegpt", "pairs", "nested"])
def test_targets_are_counted_without_reading_them(folder: Path, source: dict[str, Any]) -> None:
    totals = set()
    for packing in ("documents", "padded"):
        data = prepared(folder, [source], {"template": "plain"}, packing=packing, sequence_length=1024)
        rows, report = data.train, data.report.train
        chosen = np.arange(len(rows))
        batch = rows.batch(chosen)
        assert rows.num_targets(chosen) == int((batch["targets"] != IGNORED).sum())
        for row in chosen[:20]:
            alone = rows.batch(np.array([row]))
            assert rows.num_targets(np.array([row])) == int((alone["targets"] != IGNORED).sum()) > 0
        assert report.targets == rows.num_targets(chosen)
        assert report.targets == pytest.approx(report.chat.supervised_share * report.tokens)
        totals.add((report.targets, report.tokens, report.chat.examples))
    assert len(totals) == 1, "packing moves rows, not what is learned"


@settings(max_examples=20)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=25),
    packing=st.sampled_from(["documents", "padded"]),
    weight=st.sampled_from([1.0, 2.0]),
)
def test_packed_rows_have_the_targets_of_their_examples(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, lengths: list[Any], packing: str, weight: float
) -> None:
    talks = [(f"{n} " + "what " * asked, "the answer " * told) for n, (asked, told) in enumerate(lengths)]
    place = tmp_path_factory.mktemp("talks")
    source = written(place / "a.jsonl", [[("user", a.strip()), ("assistant", b.strip())] for a, b in talks])
    data = prepared(
        folder, [{**source, "weight": weight}], packing=packing, sequence_length=400, cache_dir=str(place / "cache")
    )
    examples = [example(talk(a.strip(), b.strip()), CHATML) for a, b in talks]
    assert targets_of(data.train) == weight * sum(made.facts.supervised for made in examples)
    expected = [run for made in examples for run in learned(made)] * int(weight)
    assert sorted(learned_runs(data, data.train)) == sorted(expected)


def test_the_mask_is_a_bit_a_token(folder: Path, tmp_path: Path) -> None:
    data = prepared(folder, [written(tmp_path / "a.jsonl", pairs(200))], cache_dir=str(tmp_path / "cache"))
    (mask,) = (tmp_path / "cache").glob("tokens-*/train.mask")
    assert mask.stat().st_size == -(-data.report.train.tokens // 8)
    assert not list((tmp_path / "cache").glob("tokens-*/*.loose"))


@given(bits=st.lists(st.booleans(), min_size=2, max_size=100), data=st.data())
def test_mask_file(tmp_path_factory: pytest.TempPathFactory, bits: list[bool], data: Any) -> None:
    place = tmp_path_factory.mktemp("mask")
    (place / "loose").write_bytes(np.array(bits, np.bool_).tobytes())
    pack_mask(place / "loose", place / "mask")
    mask = MaskFile(place / "mask")
    assert mask[np.arange(len(bits))].tolist() == bits
    start = data.draw(st.integers(0, len(bits) - 2))
    length = data.draw(st.integers(1, len(bits) - 1 - start))
    counted = mask.counts(np.array([start, 0]), np.array([length, len(bits) - 1]))
    assert counted.tolist() == [sum(bits[start + 1 : start + length + 1]), sum(bits[1:])]


def test_the_loss_is_over_learned_tokens_only(folder: Path, tmp_path: Path) -> None:
    data = prepared(folder, [written(tmp_path / "a.jsonl", pairs(10))])
    rows = np.arange(len(data.train))
    batch = data.train.batch(rows)

    def network(**_: Any) -> Any:
        return type("Output", (), {"logits": torch.zeros(*batch["targets"].shape, len(tokenizer()))})

    loss = CAUSAL_LM.loss_sum(network, batch)  # type: ignore[arg-type]
    assert loss.item() / data.train.num_targets(rows) == pytest.approx(np.log(len(tokenizer())), rel=1e-5)


def test_padding_that_is_the_end_token_leaves_ends_learned(folder: Path, tmp_path: Path) -> None:
    reader = tokenizer()
    place = tmp_path / "same"
    reader.save_pretrained(str(place))
    config = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "</s>"}))
    source = written(tmp_path / "a.jsonl", pairs(5))
    data = prepared(folder, [source], {"template": "plain"}, tokenizer=str(place), packing="padded")
    assert data.tokenizer.pad_token_id == data.tokenizer.eos_token_id
    assert [text.endswith("</s>") for text in learned_runs(data, data.train)] == [True] * 5
    assert targets_of(data.train) == sum(
        len(data.tokenizer(text)["input_ids"]) for text in learned_runs(data, data.train)
    )


def test_text_beside_conversations(folder: Path, tmp_path: Path) -> None:
    """All of a text is learned; a long one continues in another row."""
    (tmp_path / "a.txt").write_text("what is the answer " * 100)
    sources = [{"path": str(tmp_path / "a.txt"), "format": "text"}, written(tmp_path / "a.jsonl", pairs(3))]
    data = prepared(folder, sources, sequence_length=100)
    runs = learned_runs(data, data.train)
    assert sum("The answer is" in run for run in runs) == 3
    assert data.report.train.over_long == 1
    assert [source.format for source in data.report.train.sources] == ["text", "messages"]
    assert "".join(run for run in runs if "The answer" not in run).count("answer") >= 98


def test_tools_that_are_dropped_are_reported(folder: Path, tmp_path: Path) -> None:
    record = {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")], "tools": [{"name": "add"}]}
    source = written(tmp_path / "a.jsonl", [*pairs(2), record])
    assert "a.jsonl, line 3: the conversation has tools" in refusal(folder, [source])
    report = prepared(folder, [source], {"drop_tools": True}).report
    assert "1 conversations without their tools" in "\n".join(report.lines())
    assert "without their tools" not in "\n".join(prepared(folder, [source], {"template": "plain"}).report.lines())


def test_a_tokenizer_is_trained_on_what_is_said(folder: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", pairs(50))
    data = prepared(folder, [source], {"template": "plain"}, tokenizer={"vocab_size": 300})
    assert "messages" not in json.dumps(data.tokenizer.get_vocab())
    assert len(data.tokenizer.tokenize("The answer is")) < len("The answer is") / 2
    # What is saved with the model is what it was trained with.
    assert data.tokenizer.chat_template == SHIPPED["plain"].read_text()


# ---------------------------------------------------------------- report and checks


def test_the_report_counts(folder: Path, tmp_path: Path) -> None:
    long = [("user", "what"), ("assistant", "the answer " * 200)]
    silent = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
    source = written(tmp_path / "a.jsonl", [*pairs(6), *pairs(1), long, silent, [("user", "nobody answers")]])
    data = prepared(folder, [source], sequence_length=100)
    report = data.report.train
    assert (report.documents, report.duplicates, report.empty) == (7, 1, 0)
    assert (report.chat.examples, report.chat.answers, report.chat.too_long, report.chat.unsupervised) == (7, 7, 1, 2)
    assert report.chat.ends == {"<|im_end|>": 7}
    text = "\n".join(data.report.lines())
    for part in (
        "7 examples",
        "100.0% end in",
        "1 conversations left out as too long",
        "2 conversations left out (nothing",
    ):
        assert part in text
    assert json.loads(json.dumps(asdict(data.report)))["train"]["chat"]["examples"] == 7
    # The same from the cache.
    again = prepared(folder, [source], sequence_length=100).report
    assert again.reused
    assert again.train == report


def test_too_long(folder: Path, tmp_path: Path) -> None:
    turns = [("user", "what is"), ("assistant", "the answer " * 10)]
    source = written(
        tmp_path / "a.jsonl", [[("system", "Hello"), *turns * 4], turns, [turns[0], ("assistant", "a " * 90)]]
    )
    found = {}
    for too_long in ("drop", "cut_left", "cut_right"):
        data = prepared(folder, [source], {"too_long": too_long}, sequence_length=100, checks={"max_left_out": 1.0})
        chat = data.report.train.chat
        found[too_long] = (chat.examples, chat.too_long, chat.cut, chat.answers_cut > 0)
        assert data.report.train.over_long == 0
    assert found == {"drop": (1, 2, 0, False), "cut_left": (2, 1, 1, False), "cut_right": (3, 0, 2, True)}


@pytest.mark.parametrize(
    ("too_long", "longest", "advice"),
    [
        ("drop", None, "raise data.sequence_length (100) or set chat.too_long=cut_left"),
        ("drop", 200, "raise data.sequence_length (100, of 200 that the model takes) or set chat.too_long=cut_left"),
        ("drop", 100, "set chat.too_long=cut_left"),
        ("cut_left", 100, "set chat.too_long=cut_right"),
    ],
)
def test_more_than_half_left_out_is_refused(
    folder: Path, tmp_path: Path, too_long: str, longest: int | None, advice: str
) -> None:
    """With what to write, which the model can take."""
    long = [("user", "what"), ("assistant", "the answer " * 200)]
    sources = [written(tmp_path / "a.jsonl", [*pairs(3), *[long] * 4])]

    def report(**keys: Any) -> DataReport:
        made = recipe(folder, sources, {"too_long": too_long}, sequence_length=100, **keys)
        return prepare_data(made, longest=lambda: longest, quiet=True).report

    with pytest.raises(DataError) as caught:
        report()
    said = "train: 4 of 7 conversations would be left out (documents that are too long 4): "
    assert f"{said}{advice}, and checks.max_left_out is 0.5." in str(caught.value)
    lines = report(checks={"max_left_out": 0.6}).start_lines()
    assert f"57% of the data left out as too long: {advice}" in lines


@pytest.mark.parametrize(
    ("chat", "checks", "says"),
    [
        ({}, {"min_supervised": 0.9}, "% of the tokens are learned, and checks.min_supervised is 0.9"),
        ({}, {"max_too_long": 0.05}, "1 of 7 documents are longer than a row, and checks.max_too_long is 0.05"),
        ({}, {"max_unsupervised": 0.0}, "1 of 7 conversations hold nothing to learn, and checks.max_unsupervised is 0"),
        ({}, {"max_overlap": 0.5}, "validation: 3 of 4 documents are training documents too"),
        ({"template": "no_end"}, {"min_ended": 1.0}, "0.0% of the examples end in a special token that is learned"),
    ],
)
def test_checks(folder: Path, tmp_path: Path, chat: Any, checks: Any, says: str) -> None:
    if chat:
        chat = {"template": str(tmp_path / "no_end.jinja")}
        bare = CHATML.replace(
            "message.content + '<|im_end|>' }}{% endgeneration %}", "message.content }}{% endgeneration %}"
        )
        assert bare != CHATML
        (tmp_path / "no_end.jinja").write_text(bare)
    long = [("user", "what"), ("assistant", "the answer " * 200)]
    sources = [written(tmp_path / "a.jsonl", [*pairs(5), long, [("user", "nobody")]])]
    other = [written(tmp_path / "b.jsonl", [*pairs(3), [("user", "no"), ("assistant", "yes")]])]
    prepared(folder, sources, chat, validation=other, sequence_length=100)
    assert says in refusal(folder, sources, chat, checks=checks, validation=other, sequence_length=100)


BROKEN: list[Any] = [
    [("narrator", "x")],
    [("user", "a"), ("assistant", "")],
    {"other": 1},
    [("system", "a"), ("system", "b"), ("user", "a"), ("assistant", "b")],
]


def test_broken_conversations(folder: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", [*pairs(6), *BROKEN])
    assert "a.jsonl, line 7, turn 1: the role is 'narrator'" in refusal(folder, [source])
    data = prepared(folder, [source], checks={"max_broken": 0.5})
    assert data.report.train.broken == {"unknown role": 1, "empty answer": 1, "missing field": 1, "system turns": 1}
    assert "1 conversations left out (empty answer)" in "\n".join(data.report.lines())
    assert data.report.train.documents == 6
    for bound in (0.3, 0.0):  # the second one finds the rows in the cache
        said = refusal(folder, [source], checks={"max_broken": bound})
        assert "4 of 10 conversations are broken (1 unknown role, 1 empty answer, 1 missing field" in said
        assert "line 7, turn 1: the role is 'narrator'" in said


def test_broken_conversations_are_counted_once(folder: Path, tmp_path: Path) -> None:
    """Though training a tokenizer reads them first, and validation has its own."""
    sources = [[written(tmp_path / f"{name}.jsonl", [*pairs(6), BROKEN[number]])] for number, name in enumerate("ab")]
    keys: dict[str, Any] = {"tokenizer": {"vocab_size": 300}, "checks": {"max_broken": 0.5}, "validation": sources[1]}
    report = prepared(folder, sources[0], {"template": "plain"}, **keys).report
    assert report.train.broken == {"unknown role": 1}
    assert report.validation.broken == {"empty answer": 1}


def test_what_the_template_refuses_is_broken(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% if messages[0].role == 'tool' %}{{ raise_exception('No tools first') }}{% endif %}\n" + CHATML
    )
    source = written(tmp_path / "a.jsonl", [*pairs(6), [("tool", "x"), ("assistant", "a")]])
    chat = {"template": str(template)}
    said = refusal(folder, [source], chat)
    assert "a.jsonl, line 7: the chat template" in said
    assert "refuses this conversation: No tools first. Its roles are tool, assistant." in said
    data = prepared(folder, [source], chat, checks={"max_broken": 0.2})
    assert data.report.train.broken == {"refused by the template": 1}
    assert data.report.train.empty == 0


# ---------------------------------------------------------------- refusals


def test_all_labels_masked(folder: Path, tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
    said = refusal(folder, [written(tmp_path / "a.jsonl", [silent] * 3)])
    assert "3 conversations have no token that is learned (all labels are masked)" in said


def test_a_syntax_error_has_its_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}\n{{ m.content }}\n{% endfr %}\n")
    said = refusal(folder, [written(tmp_path / "a.jsonl", pairs(2))], {"template": str(tmp_path / "bad.jinja")})
    assert f"The chat template ({tmp_path / 'bad.jinja'}) has a syntax error in line 3: " in said
    assert "The line is `{% endfr %}`." in said


def test_no_template(folder: Path, tmp_path: Path) -> None:
    reader = tokenizer()
    reader.chat_template = None
    reader.save_pretrained(str(tmp_path / "bare"))
    source = written(tmp_path / "a.jsonl", pairs(2))
    said = refusal(folder, [source], tokenizer=str(tmp_path / "bare"))
    assert "has no chat template. Set chat.template to a Jinja file, or to one that ships (alpaca, chatml," in said
    assert "cannot be read: No such file" in refusal(folder, [source], {"template": "nope.jinja"})


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"data": {"packing": "wrapped"}}, "`wrapped` cuts through conversations"),
        ({"data": {"lowercase": True}}, "data.lowercase: conversations are read as they are written"),
        ({"task": {"name": "sequence_classification"}}, "a classifier reads no conversations"),
        ({"chat": None, "data": {"train": [{"sample": 3, "format": "alpaca"}]}}, "add `chat: {}`"),
        ({"chat": {"roles": {"x": "narrator"}}}, "'system', 'user', 'assistant' or 'tool', got \"narrator\""),
    ],
)
def test_recipes_that_cannot_be(folder: Path, tree: dict[str, Any], says: str) -> None:
    whole = recipe(folder, [{"sample": 3}]).model_dump(mode="json")
    for key, value in tree.items():
        whole[key] = {**whole[key], **value} if isinstance(value, dict) else value
    with pytest.raises(RecipeError, match=says.replace("{", r"\{")):
        validate_recipe(whole, tasks=BUILT_IN)


# ---------------------------------------------------------------- cache


@pytest.mark.parametrize(
    "change",
    [
        {"chat": {"template": "plain"}},
        {"chat": {"template_args": {"x": 1}}},
        {"chat": {"train_on": "last"}},
        {"chat": {"end_token": "add"}},
        {"chat": {"too_long": "cut_left"}},
        {"chat": {"roles": {"x": "user"}}},
        {"sequence_length": 256},
    ],
)
def test_what_shapes_rows_makes_others(folder: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    source = written(tmp_path / "a.jsonl", pairs(4))
    keys = {key: value for key, value in change.items() if key != "chat"}
    one = prepared(folder, [source])
    assert prepared(folder, [source], checks={"max_overlap": 0.1}).digest == one.digest
    assert prepared(folder, [source], change.get("chat"), **keys).digest != one.digest


def test_another_template_in_the_same_file(folder: Path, tmp_path: Path) -> None:
    file, source = tmp_path / "t.jinja", written(tmp_path / "a.jsonl", pairs(4))
    file.write_text(CHATML)
    one = prepared(folder, [source], {"template": str(file)})
    assert prepared(folder, [source]).digest == one.digest, "the tokenizer's own says the same"
    file.write_text(CHATML.replace("assistant\\n", "assistant: "))
    assert prepared(folder, [source], {"template": str(file)}).digest != one.digest


# ---------------------------------------------------------------- what people see


def test_show(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "a.jsonl", pairs(4))
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe(folder, [source], packing="padded")))
    assert main.main(["data", str(file), "--show", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if "<|im_start|>" in line]
    assert len(shown) == 2
    assert shown[0].startswith("<|im_start|>|")
    assert shown[0].endswith("[<|im_end|>]\\n|")
    inside = "".join(part.split("]")[0] for part in shown[0].split("[")[1:])
    assert inside == "The answer is 0.<|im_end|>"
    assert any(line.startswith("example 1: ") and line.endswith("learned") for line in lines)


def test_show_is_coloured_on_a_terminal(folder: Path, tmp_path: Path) -> None:
    from finetune.data.show_examples import examples

    data = prepared(folder, [written(tmp_path / "a.jsonl", pairs(2))])
    _, _, line = list(examples(data.train, data.tokenizer, (), 1, coloured=True))
    green = "".join(line.plain[span.start : span.end] for span in line.spans if "green" in str(span.style))
    assert green == "The answer is 0.<|im_end|>"


def test_the_command_line_says_one_paragraph(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "a.jsonl", BROKEN[:1])
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe(folder, [source])))
    assert main.main(["data", str(file)]) == exit_codes.USER_ERROR
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "the role is 'narrator'" in said
