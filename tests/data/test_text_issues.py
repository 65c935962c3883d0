"""The data report names what is wrong with texts, with a count and an example, and `checks` bounds it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATML
from chats import tokenizer as chat_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.config.recipe import validate_recipe
from finetune.data.data_report import WORDS, SplitReport
from finetune.data.prepare import prepare_data
from finetune.data.sources.corpus import Chosen
from finetune.data.sources.readers import Document
from finetune.data.text_issues import Issues
from finetune.utils.errors import DataError


def report(
    folder: Path,
    lines: list[Any],
    chat: dict[str, Any] | None = None,
    checks: dict[str, float] | None = None,
    **keys: Any,
) -> SplitReport:
    (folder / "train.jsonl").write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": keys.pop("tokenizer", {"vocab_size": 300}),
        "chat": chat,
        "checks": checks or {},
        "data": {
            "train": [{"path": str(folder / "train.jsonl")}],
            "validation_fraction": 0.0,
            "sequence_length": 64,
            "cache_dir": str(folder / "cache"),
            **keys,
        },
        "length": {"steps": 1},
    }
    prepared = prepare_data(validate_recipe(tree), quiet=True).report
    assert prepared.train is not None
    said, first = "\n".join(prepared.lines()), prepared.start_lines()[1:]
    # What may spoil a model comes first, in full.
    for finding in prepared.train.findings:
        assert first.pop(0).startswith(
            f"train: {finding.count} of {finding.of} {WORDS[finding.kind]}; the first: {finding.example}"
        )
    for finding in prepared.train.findings:
        assert f"{finding.count} of {finding.of} " in said
        assert f"; the first: {finding.example}" in said
    return prepared.train


def found(split: SplitReport) -> dict[str, tuple[int, int, str]]:
    """Counts and examples without the folder."""
    return {f.kind: (f.count, f.of, f.example[f.example.index("train.jsonl") :]) for f in split.findings}


def fixed(folder: Path, *, end: bool) -> dict[str, str]:
    """A tokenizer of few words and no other."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "</s>", "one", "two"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>"} if end else {}
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **special).save_pretrained(str(folder / "words"))
    return {"name": str(folder / "words")}


TABLE = 'text\tn\n"a\t1\nb\nc"\t2\n"d"\t3\n'


def test_rows_that_a_table_has_swallowed_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(TABLE)
    split = report(tmp_path, [], train=[{"path": str(tmp_path / "train.tsv")}])
    (finding,) = split.findings
    assert (finding.kind, finding.count, finding.of) == ("swallowed", 1, 2)
    assert finding.example == f"{tmp_path}/train.tsv, line 2: 'a\\t1\\nb\\nc'"


@pytest.mark.parametrize(
    ("table", "count"),
    [
        ('text,n\n"a,1\nb\nc",2\n"d",3\n', 1),
        ('n;text\n1;"a\n2;b\n3;c"\n4;d\n', 1),
        ('n,text\nno,d\nyes,"a\nno,b"\n', 1),
        # Quoted prose of several lines, some of which end with a number or begin with a short text of the table.
        ('text,n\n"Dear John,\nNo, in May, 1990,\nwe met",yes\n"No",no\n', 0),
        ('n;text\n1;"a; 7\nb; c"\n2;No\n', 0),
    ],
)
def test_rows_that_commas_or_semicolons_divide_and_a_quotation_swallows(tmp_path: Path, table: str, count: int) -> None:
    (tmp_path / "train.csv").write_text(table)
    split = report(tmp_path, [], train=[{"path": str(tmp_path / "train.csv")}])
    assert [(finding.kind, finding.count) for finding in split.findings] == [("swallowed", count)] * count


CASES: dict[str, tuple[str, str, str, str]] = {
    "nul": ('{"text": "a\\u0000b"}', "max_nul", "'a\\x00b'", "NUL characters"),
    "mojibake": ('{"text": "The cafÃ© is open"}', "max_mojibake", "'The cafÃ© is open'", "wrongly decoded"),
    "duplicate_key": ('{"text": "first", "text": "last"}', "max_duplicate_keys", "'text'", "more than once"),
}


@pytest.mark.parametrize("kind", CASES)
def test_named_with_count_and_example_and_bounded(tmp_path: Path, kind: str) -> None:
    line, key, example, words = CASES[kind]
    lines = [{"text": "fine"}, line, {"text": "also fine"}, line.replace("a", "e"), {"text": "café — “quoted” Å"}]
    assert found(report(tmp_path, lines)) == {kind: (2, 5, f"train.jsonl, line 2: {example}")}
    # From the cache too.
    assert found(report(tmp_path, lines, checks={key: 0.4})) == {kind: (2, 5, f"train.jsonl, line 2: {example}")}
    with pytest.raises(DataError, match=rf"train: 2 of 5 .*{words}.*train.jsonl, line 2: .*checks.{key} is 0.3"):
        report(tmp_path, lines, checks={key: 0.3})


def test_a_json_list_tells_duplicate_keys_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "x", "meta": {"id": 1, "id": 2}}, {"text": "y"}]')
    split = report(tmp_path, [], train=[{"path": str(tmp_path / "a.json")}])
    (finding,) = split.findings
    assert (finding.count, finding.of, finding.example) == (1, 2, f"{tmp_path}/a.json, item 1: 'id'")


def test_a_tokenizer_that_does_not_give_text_back(tmp_path: Path) -> None:
    lines = [{"text": "one two"}, {"text": "one three two"}, {"text": "one  two"}]
    words = fixed(tmp_path, end=True)
    expected = {"lossy": (2, 3, "train.jsonl, line 2: 'one three two' became 'one [UNK] two'")}
    assert found(report(tmp_path, lines, tokenizer=words)) == expected
    with pytest.raises(
        DataError, match=r"2 of 3 sampled documents are not given back .*line 2: .*checks.max_lossy is 0"
    ):
        report(tmp_path, lines, tokenizer=words, checks={"max_lossy": 0.0})


def test_only_some_documents_are_tried_and_always_the_same() -> None:
    tried: list[str] = []

    def restore(text: str) -> str:
        tried.append(text)
        return text

    rng = np.random.default_rng(0)
    items = [
        Chosen(f"document {n} {'x' * 5000}".encode(), int(digest), False, 1, 0, Document("", f"line {n}"))
        for n, digest in enumerate(rng.integers(0, 2**63, 20_000))
    ]
    whole, parts = Issues(), Issues()
    whole.look(items, 0, restore, chat=False)
    assert 32 < whole.sampled == len(tried) < 200
    assert max(map(len, tried)) == 2000
    for start in range(0, len(items), 777):
        parts.look(items[start : start + 777], start, restore, chat=False)
    assert parts == whole


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"text": "two one"}]
    words = fixed(tmp_path, end=False)
    split = report(tmp_path, lines, tokenizer=words)
    assert found(split) == {"no_end": (2, 2, "train.jsonl, line 1")}
    assert split.ended_share == 0
    with pytest.raises(DataError, match=r"0.0% of the documents end in a special token .*checks.min_ended is 0.5"):
        report(tmp_path, lines, tokenizer=words, checks={"min_ended": 0.5})
    # Whoever wants no ends is told nothing, but for a bound of theirs.
    assert not found(report(tmp_path, lines, tokenizer=words, add_eos=False))
    with_end = fixed(tmp_path, end=True)
    assert not found(report(tmp_path, lines, tokenizer=with_end, checks={"min_ended": 1.0}))
    cut = {"sequence_length": 2, "long_documents": "truncate"}
    assert report(tmp_path, lines, tokenizer=with_end, **cut).ended_share == 1
    assert report(tmp_path, [*lines, {"text": "one two one"}], tokenizer=with_end, **cut).ended_share == 2 / 3


def talk(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]}


def test_conversations_are_looked_at_too(tmp_path: Path) -> None:
    double = json.dumps(talk("one")).replace('"role": "user"', '"role": "system", "role": "user"')
    lines = [
        talk("fine"),
        talk("a\0b"),
        talk("don\u2019t"),
        talk("don\u00e2\u20ac\u2122t"),
        double,
        talk("backslash \\u0000"),
    ]
    assert found(report(tmp_path, lines, {"template": "plain"})) == {
        "nul": (1, 6, "train.jsonl, line 2: 'Hello\\na\\x00b'"),
        "mojibake": (1, 6, "train.jsonl, line 4: 'Hello\\ndon\u00e2\u20ac\u2122t'"),
        "duplicate_key": (1, 6, "train.jsonl, line 5: 'role'"),
    }


def test_a_template_that_ends_answers_where_the_tokenizer_has_no_end(tmp_path: Path) -> None:
    reader = chat_tokenizer()
    reader.chat_template = CHATML
    reader.save_pretrained(str(tmp_path / "reader"))
    config = json.loads((tmp_path / "reader" / "tokenizer_config.json").read_text())
    (tmp_path / "reader" / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    name = {"name": str(tmp_path / "reader")}
    assert not found(report(tmp_path, [talk("Hi")] * 2, {}, tokenizer=name))
    plain = report(tmp_path, [talk("Hi")] * 2, {"template": "plain"}, tokenizer=name)
    assert found(plain)["no_end"][:2] == (2, 2)


@pytest.mark.parametrize(
    "text",
    [
        "Il est né à Évian, « CAFÉ »",
        "“CAFÉ” — IRMÃ” … MAÇÔ",
        "Ñandú, ESPAÑA, ÂNGELO, Ångström, Ð ð Þ",
        "Привет, мир! Ещё “раз”",
        "世界，你好。ÄÖÜß",
        "price: £5 · 20 °C ± 1½",
        "chaîne â côté, €5",
    ],
)
def test_text_as_it_should_be_is_not_mojibake(text: str) -> None:
    issues = Issues()
    issues.look([Chosen(text.encode(), 1, False, 1, 0, Document("", "here"))], 0, str, chat=False)
    assert issues.counts == {}


WRONG = ["café", "à la carte", "20 °C", "“quoted”", "it’s", "Привет", "🎉", "sûr", "10 €"]


@pytest.mark.parametrize("codec", ["latin-1", "cp1252"])
@pytest.mark.parametrize("text", WRONG)
def test_text_in_the_wrong_encoding_is_mojibake(text: str, codec: str) -> None:
    # Five bytes have no character in Windows-1252, and what reads files so leaves them out.
    wrong = f"so {text.encode().decode(codec, 'ignore')}"
    issues = Issues()
    issues.look([Chosen(wrong.encode(), 1, False, 1, 0, Document("", "here"))], 0, str, chat=False)
    assert issues.counts == {"mojibake": 1}, wrong
    replaced = text.encode("cp1251", "replace").decode("utf-8", "replace")
    if "\ufffd" in replaced:
        issues.look([Chosen(replaced.encode(), 1, False, 1, 0, Document("", "here"))], 0, str, chat=False)
        assert issues.counts == {"mojibake": 2}
