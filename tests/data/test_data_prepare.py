"""From a recipe to batches: what a run reads is what the sources hold, once."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testdata import BPE, MODEL, REAL
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import ChecksSection
from finetune.data.data_report import check_bounds
from finetune.data.prepare import PreparedData, prepare_data
from finetune.data.rows.kinds import classes, documents
from finetune.data.rows.kinds.row_kind import TokenRows
from finetune.data.rows.packed_rows import IGNORED
from finetune.data.sources.corpus import Chosen
from finetune.data.sources.readers import Document
from finetune.data.tokenization.tokenizer import Encoder, batch_documents
from finetune.utils.errors import DataError

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One token a word, with BERT's [CLS] and [SEP], and its own begin and end of text."""
    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>")
    vocabulary = {word: number for number, word in enumerate((*specials, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(str(folder))
    return str(folder)


def prepared(cache: Path, task: str = "causal_lm", **keys: Any) -> PreparedData:
    tokenizer = keys.pop("tokenizer", None)
    section = {"vocab_size": 300} if tokenizer is None else {"name": tokenizer}
    num_labels = keys.pop("num_labels", None)
    tree = {
        "task": {"name": task, "num_labels": num_labels},
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": section,
        "data": {"cache_dir": str(cache), "validation_fraction": 0.0, **keys},
        "length": {"steps": 0},
    }
    return prepare_data(validate_recipe(tree), documents.KIND if task == "causal_lm" else classes.KIND, quiet=True)


def jsonl(path: Path, records: list[Any]) -> dict[str, Any]:
    lines = [record if isinstance(record, dict) else {"text": record} for record in records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"path": str(path)}


def all_rows(rows: TokenRows) -> dict[str, torch.Tensor]:
    return rows.batch(np.arange(len(rows)))


def targets_of(rows: TokenRows) -> int:
    return rows.num_targets(np.arange(len(rows)))


def texts_of_rows(data: PreparedData, rows: TokenRows) -> list[str]:
    """The documents of packed or padded rows, read back from inputs and targets."""
    batch = all_rows(rows)
    found = []
    for line in range(len(rows)):
        inputs, targets = batch["input_ids"][line].tolist(), batch["targets"][line].tolist()
        current: list[int] = []
        for token, target in zip(inputs, targets, strict=True):
            if target == IGNORED:
                break
            current = current or [token]
            current.append(target)
            if target == data.tokenizer.eos_token_id:
                found.append(data.tokenizer.decode(current, skip_special_tokens=True))
                current = []
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=25).map(" ".join), min_size=1, max_size=25
    ),
    length=st.integers(26, 40),
    packing=st.sampled_from(["documents", "padded"]),
)
def test_rows_hold_every_document_once(
    tmp_path: Path, word_tokenizer: str, documents: list[str], length: int, packing: str
) -> None:
    source = jsonl(tmp_path / "a.jsonl", documents)
    data = prepared(
        tmp_path / "cache",
        tokenizer=word_tokenizer,
        train=[source],
        sequence_length=length,
        packing=packing,
    )
    assert sorted(texts_of_rows(data, data.train)) == sorted(documents)
    assert targets_of(data.train) == sum(len(text.split()) + 1 for text in documents)


def test_packed_rows_restart_and_never_cross(tmp_path: Path, word_tokenizer: str) -> None:
    documents = [" ".join(WORDS[:n]) for n in (8, 3, 5, 2, 1, 8, 7)]
    source = jsonl(tmp_path / "a.jsonl", documents)
    data = prepared(tmp_path / "c", tokenizer=word_tokenizer, train=[source], sequence_length=16)
    batch = all_rows(data.train)
    cu_seqlens = batch.pop("cu_seqlens")
    assert cu_seqlens.dtype == torch.int32
    assert torch.equal(cu_seqlens[:-1], (batch["position_ids"].flatten() == 0).nonzero()[:, 0].int())
    assert cu_seqlens[-1] == batch["input_ids"].numel()
    assert set(batch) == {"input_ids", "targets", "position_ids"}
    assert all(value.dtype == torch.int64 and value.shape[1] == 16 for value in batch.values())
    bos, eos = data.tokenizer.bos_token_id, data.tokenizer.eos_token_id
    inputs, targets, positions = batch["input_ids"], batch["targets"], batch["position_ids"]
    used = targets != IGNORED
    # A document begins at position 0 with its first token, which is nobody's target.
    assert torch.equal((positions == 0) & used, (inputs == bos) & used)
    assert not (targets == bos).any()
    assert ((targets == eos).sum() == len(documents)).item()
    for line in range(len(data.train)):
        row = positions[line].tolist()
        assert all(now == 0 or now == before + 1 for before, now in pairwise(row))
        tail = int(used[line].sum())
        assert used[line, :tail].all()
        assert row[tail:] == list(range(16 - tail))


def test_long_documents(tmp_path: Path, word_tokenizer: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", [" ".join(WORDS), "one", "two three"])
    common = {
        "tokenizer": word_tokenizer,
        "train": [source],
        "sequence_length": 4,
        "packing": "padded",
    }
    split = prepared(tmp_path / "c", **common, long_documents="split")
    assert targets_of(split.train) == 9 + 2 + 3
    assert (split.report.train.over_long, split.report.train.truncated) == (1, 0)
    # The part of a document goes on where the one before it ended.
    first, second = all_rows(split.train)["input_ids"][:2].tolist()
    assert all_rows(split.train)["targets"][0, 3].item() == second[0]
    assert first[0] == split.tokenizer.bos_token_id
    cut = prepared(tmp_path / "c", **common, long_documents="truncate")
    assert targets_of(cut.train) == 4 + 2 + 3
    dropped = prepared(tmp_path / "c", **common, long_documents="drop")
    assert (dropped.report.train.rows, dropped.report.train.dropped) == (2, 1)
    assert len({split.digest, cut.digest, dropped.digest}) == 3


def test_padded_batches_are_as_wide_as_needed(tmp_path: Path, word_tokenizer: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["one", "one two three four five six seven eight"])
    data = prepared(
        tmp_path / "c",
        tokenizer=word_tokenizer,
        train=[source],
        packing="padded",
        sequence_length=12,
    )
    narrow, wide = data.train.batch(np.array([0])), data.train.batch(np.array([1, 0]))
    assert set(narrow) == {"input_ids", "targets"}
    assert narrow["input_ids"].shape == (1, 8)
    # 9 pairs would round up to 16, which is more than a row has.
    assert wide["input_ids"].shape == (2, 12)
    assert data.train.num_targets(np.array([1, 0, 1])) == 9 + 2 + 9


def test_counts_agree_with_batches(tmp_path: Path) -> None:
    for packing in ("documents", "padded", "wrapped"):
        data = prepared(tmp_path, train=[{"sample": 60}], sequence_length=100, packing=packing, validation_fraction=0.2)
        for rows in (data.train, data.validation):
            some = np.random.default_rng(0).integers(0, len(rows), 7)
            assert rows.num_targets(some) == int((rows.batch(some)["targets"] != IGNORED).sum())


@pytest.mark.real_data
def test_the_reference_windows(tmp_path: Path) -> None:
    data = prepared(
        tmp_path,
        tokenizer=str(REAL / "stories260K"),
        validation=[{"path": str(REAL / "tinystories" / "validation.jsonl")}],
        packing="wrapped",
        sequence_length=512,
        remainder="drop",
        add_eos=False,
    )
    assert data.train is None
    assert len(data.validation) == 756
    assert targets_of(data.validation) == 387_072
    batch = data.validation.batch(np.array([0, 1]))
    assert batch["input_ids"][0, 0] == 1
    assert torch.equal(batch["targets"][0, :-1], batch["input_ids"][0, 1:])
    assert batch["targets"][0, -1] == batch["input_ids"][1, 0]


@pytest.mark.real_data
def test_real_stories_fill_rows(tmp_path: Path) -> None:
    data = prepared(
        tmp_path,
        tokenizer=str(REAL / "gpt2_tokenizer"),
        train=[{"path": str(REAL / "tinystories" / "train.jsonl")}],
    )
    report = data.report.train
    assert report.documents == 7148
    # Of tokens 98.3 %; of pairs less, because the last token of a document is no input.
    assert report.tokens / (report.rows * 1024) > 0.983
    assert report.useful_share > 0.978
    assert data.tokenizer.eos_token_id == 50256


@pytest.mark.parametrize("name", [BPE, MODEL], ids=["bpe", "llama"])
def test_text_never_becomes_a_special_token(tmp_path: Path, name: str) -> None:
    text = "He wrote <|endoftext|> and <s> and </s> on the wall."
    data = prepared(
        tmp_path / "c",
        tokenizer=name,
        train=[jsonl(tmp_path / "a.jsonl", [text])],
        sequence_length=128,
    )
    batch = data.train.batch(np.array([0]))
    count = targets_of(data.train)
    tokens = [*batch["input_ids"][0, :count].tolist(), batch["targets"][0, count - 1].item()]
    inner = tokens[1:-1]
    assert tokens[0] == data.tokenizer.bos_token_id
    assert tokens[-1] == data.tokenizer.eos_token_id
    assert not set(inner) & set(data.tokenizer.all_special_ids)
    assert data.tokenizer.decode(inner).strip() == text


def test_a_trained_tokenizer_is_whole(tmp_path: Path) -> None:
    data = prepared(tmp_path / "c", train=[{"sample": 200}], tokenizer=None)
    data.tokenizer.save_pretrained(str(tmp_path / "saved"))
    again = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    text = "Nora found <|endoftext|> Ünïcödé 世界 🌍\n\n  here."
    ids = data.tokenizer.encode(text, add_special_tokens=False)
    assert again.encode(text, add_special_tokens=False) == ids
    assert len(again) == 300
    assert (again.bos_token, again.eos_token, again.pad_token) == (
        "<|endoftext|>",
        "<|endoftext|>",
        "<|pad|>",
    )
    plain = text.replace("<|endoftext|>", "it")
    assert again.decode(again.encode(plain, add_special_tokens=False)) == plain
    # Another cache, the same tokenizer.
    other = prepared(tmp_path / "d", train=[{"sample": 200}])
    assert other.tokenizer.backend_tokenizer.to_str() == data.tokenizer.backend_tokenizer.to_str()
    assert other.digest == data.digest


def test_a_slow_tokenizer_works() -> None:
    class Slow:
        """Has no fast backend."""

        def encode(self, text: str, **options: Any) -> list[int]:
            assert options == {"add_special_tokens": False, "split_special_tokens": True}
            return [ord(letter) for letter in text]

    found = Encoder(Slow(), num_workers=2).encode([b"ab", b"", b"c"])
    assert found.lengths.tolist() == [2, 0, 1]
    assert found.numbers.tolist() == [97, 98, 99]


def test_threads_change_nothing(tmp_path: Path) -> None:
    tokenizer = prepared(tmp_path, train=[{"sample": 50}]).tokenizer
    items = [Chosen(f"{n} {'x' * (n % 37)} text".encode(), n, False, 1, 0, Document("", "here")) for n in range(9000)]

    def run(workers: int) -> list[tuple[list[int], list[int]]]:
        found = Encoder(tokenizer, num_workers=workers).encode_all(batch_documents(items))
        return [(encoded.lengths.tolist(), encoded.numbers.tolist()) for _, encoded in found]

    assert run(3) == run(1)


def test_the_split_never_moves(tmp_path: Path) -> None:
    def held(records: list[str]) -> set[str]:
        source = jsonl(tmp_path / "a.jsonl", records)
        data = prepared(tmp_path / "c", train=[source], validation_fraction=0.2, sequence_length=64)
        return set(texts_of_rows(data, data.validation))

    few, many = [f"text number {n}" for n in range(200)], [f"text number {n}" for n in range(400)]
    first = held(few)
    assert 20 <= len(first) <= 60
    assert held(few[::-1]) == first
    assert held(many) & set(few) == first


def test_duplicates_fall_on_one_side(tmp_path: Path) -> None:
    records = [f"text {n}" for n in range(100)]
    source = jsonl(tmp_path / "a.jsonl", [*records, *(f"  {text}\n" for text in records)])
    data = prepared(tmp_path / "c", train=[source], validation_fraction=0.3, sequence_length=64)
    train, validation = texts_of_rows(data, data.train), texts_of_rows(data, data.validation)
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == 200
    report = data.report
    assert report.train.duplicates == len(set(train))
    assert report.validation.duplicates == len(set(validation))


def test_overlap_with_training_documents_is_counted(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", [f"Story {n}." for n in range(5)])
    validation = jsonl(tmp_path / "b.jsonl", [f"Story {n}." for n in range(3, 9)])
    report = prepared(tmp_path / "c", train=[train], validation=[validation]).report
    assert report.validation.overlap == 2
    assert "2 documents that are training documents too" in "\n".join(report.lines())


def test_weights(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "a.jsonl", [f"plain {n}" for n in range(300)])
    other = jsonl(tmp_path / "b.jsonl", [f"other {n}" for n in range(300)])

    def texts(weight: float) -> tuple[list[str], list[str]]:
        sources = [plain, {**other, "weight": weight}]
        data = prepared(tmp_path / "c", train=sources, validation_fraction=0.1, sequence_length=64)
        report = data.report.train
        assert sum(source.documents for source in report.sources) == report.documents
        assert report.duplicates == 0
        return texts_of_rows(data, data.train), texts_of_rows(data, data.validation)

    once, held = texts(1.0)
    twice, held_twice = texts(2.0)
    assert held == held_twice
    assert sorted(twice) == sorted([*once, *(t for t in once if t.startswith("other"))])
    part, _ = texts(2.5)
    half, _ = texts(0.5)
    kept = {text for text in half if text.startswith("other")}
    assert 100 < len(kept) < 170
    assert sorted(part) == sorted([*twice, *kept])


def test_copies_do_not_lie_side_by_side(tmp_path: Path, word_tokenizer: str) -> None:
    source = {**jsonl(tmp_path / "a.jsonl", ["one", "two", "three"]), "weight": 2}
    data = prepared(
        tmp_path / "c",
        tokenizer=word_tokenizer,
        train=[source],
        packing="wrapped",
        sequence_length=12,
        add_bos=False,
        add_eos=False,
    )
    assert data.tokenizer.decode(data.train.batch(np.array([0]))["input_ids"][0, :5]) == "one two three one two"


def test_normalisation_and_empty_documents(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["  Big Words \n", "more", "   ", ""])
    data = prepared(tmp_path / "c", train=[source], lowercase=True)
    assert sorted(texts_of_rows(data, data.train)) == ["big words", "more"]
    assert data.report.train.empty == 2
    loose = prepared(tmp_path / "c", train=[source], strip=False)
    assert sorted(texts_of_rows(loose, loose.train)) == ["   ", "  Big Words \n", "more"]


def test_begin_and_end_of_text(tmp_path: Path, word_tokenizer: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["one two"])

    def tokens(**flags: bool) -> str:
        data = prepared(tmp_path / "c", tokenizer=word_tokenizer, train=[source], **flags)
        batch, count = data.train.batch(np.array([0])), targets_of(data.train)
        ids = [*batch["input_ids"][0, :count].tolist(), batch["targets"][0, count - 1].item()]
        return " ".join(data.tokenizer.convert_ids_to_tokens(ids))

    assert tokens() == "<s> one two </s>"
    assert tokens(add_bos=False) == "one two </s>"
    assert tokens(add_eos=False) == "<s> one two"


def test_classification(tmp_path: Path, word_tokenizer: str) -> None:
    records = [
        {"text": "one two", "label": "low"},
        {"text": "seven eight", "label": "high"},
        {"text": " ".join(WORDS), "label": "all"},
    ]
    data = prepared(
        tmp_path / "c",
        "sequence_classification",
        tokenizer=word_tokenizer,
        train=[jsonl(tmp_path / "a.jsonl", records)],
        packing="padded",
        sequence_length=7,
    )
    assert (data.num_labels, data.label_names) == (3, ("all", "high", "low"))
    batch = all_rows(data.train)
    assert set(batch) == {"input_ids", "attention_mask", "targets"}
    assert batch["targets"].tolist() == [2, 1, 0]
    decoded = [" ".join(data.tokenizer.convert_ids_to_tokens(row)) for row in batch["input_ids"].tolist()]
    assert decoded == [
        "[CLS] one two [SEP] [PAD] [PAD] [PAD]",
        "[CLS] seven eight [SEP] [PAD] [PAD] [PAD]",
        "[CLS] one two three four five [SEP]",
    ]
    assert batch["attention_mask"].sum(1).tolist() == [4, 4, 7]
    assert data.train.num_targets(np.array([0, 2])) == 2
    assert data.report.train.truncated == 1


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([f"t{n}" for n in range(20)], "each of the 20 classes has one document: `label_field` may name another"),
        ([f"t{n}" for n in range(19)], None),
        ([*(f"t{n}" for n in range(20)), "t0"], None),
        (["Billing", "billing", "other"], "the classes Billing, billing differ in upper and lower case alone"),
    ],
)
def test_classes_that_look_wrong_are_said(
    tmp_path: Path, word_tokenizer: str, labels: list[str], says: str | None
) -> None:
    data = prepared(
        tmp_path / "c",
        "sequence_classification",
        tokenizer=word_tokenizer,
        train=[jsonl(tmp_path / "a.jsonl", [{"text": "one two", "label": label} for label in labels])],
        packing="padded",
        sequence_length=7,
    )
    for lines in (data.report.lines(), data.report.start_lines()):
        found = [line.strip() for line in lines if "one document" in line or "alone" in line]
        assert [says in line for line in found] == [True] if says is not None else found == []


def test_the_sample_has_labels(tmp_path: Path) -> None:
    data = prepared(
        tmp_path,
        "sequence_classification",
        train=[{"sample": 300}],
        packing="padded",
        sequence_length=64,
        validation_fraction=0.2,
    )
    assert data.num_labels == 7
    assert set(all_rows(data.validation)["targets"].tolist()) <= set(range(7))


def test_documents_without_a_text_are_counted(tmp_path: Path) -> None:
    records = [{"text": text, "label": label} for label in (0, 1) for text in ("a b", "", None)]
    sizes = {"packing": "padded", "sequence_length": 64}
    train = [jsonl(tmp_path / "t.jsonl", records)]
    says = (
        r"4 of 6 documents would be left out \(documents without text 4\): name the field of the texts as the source's"
    )
    with pytest.raises(DataError, match=says):
        prepared(tmp_path / "c", "sequence_classification", train=train, **sizes)
    train = [jsonl(tmp_path / "t.jsonl", [*records, *({"text": f"c {n}", "label": n} for n in (0, 1))])]
    data = prepared(tmp_path / "c", "sequence_classification", train=train, **sizes)
    assert (len(data.train), data.report.train.empty) == (4, 4)
    assert "4 empty documents" in "\n".join(data.report.start_lines())


def classify(tmp_path: Path, labels: list[Any], others: list[Any] | None = None, **keys: Any) -> PreparedData:
    def records(values: list[Any]) -> list[Any]:
        return [{"text": f"text {n}", "label": value} for n, value in enumerate(values)]

    validation = [jsonl(tmp_path / "v.jsonl", records(others))] if others else []
    return prepared(
        tmp_path / "c",
        "sequence_classification",
        train=[jsonl(tmp_path / "t.jsonl", records(labels))],
        validation=validation,
        packing="padded",
        **keys,
    )


def test_integer_labels_are_kept(tmp_path: Path) -> None:
    data = classify(tmp_path, [2, 0, 1, 2], [1, 1])
    assert data.num_labels == 3
    assert all_rows(data.train)["targets"].tolist() == [2, 0, 1, 2]
    assert all_rows(data.validation)["targets"].tolist() == [1, 1]
    assert classify(tmp_path, [2, 0], num_labels=4).num_labels == 4


@pytest.mark.parametrize(
    ("labels", "others", "num_labels", "expected"),
    [
        (
            [1, 0, "0", "a"],
            None,
            None,
            r"numbers \(0, 1\) and some are texts \('0', 'a'\)\. The first number is 1 \(.*jsonl, line 1\), and the "
            r"first text '0' \(.*jsonl, line 3\)\. Write them",
        ),
        ([0, 3, 5], None, 2, r"The data has 3 classes \(0, 3, 5\), and task.num_labels is 2"),
        (["a", "b", "c"], None, 2, "The data has 3 classes"),
        (["a", "b"], ["c"], None, "no training document has: c; known are a, b"),
    ],
)
def test_labels_that_do_not_fit(
    tmp_path: Path, labels: list[Any], others: list[Any] | None, num_labels: int | None, expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        classify(tmp_path, labels, others, num_labels=num_labels)


def test_the_report_is_json_and_readable(tmp_path: Path) -> None:
    data = prepared(tmp_path, train=[{"sample": 50}, {"sample": 20, "weight": 2}], sequence_length=512)
    tree = json.loads(json.dumps(asdict(data.report)))
    assert tree["train"]["duplicates"] > 0
    assert [source["name"] for source in tree["train"]["sources"]] == [
        "built-in sample (50 stories)",
        "built-in sample (20 stories)",
    ]
    text = "\n".join(data.report.lines())
    assert "prepared in" in text
    assert "duplicate documents" in text
    assert "built-in sample (20 stories)" in text


def test_bounds_are_decimals(tmp_path: Path) -> None:
    """In binary, 0.29 x 100 is 28.999999999999996."""
    report = prepared(tmp_path, train=[{"sample": 5}]).report
    report = replace(report, train=replace(report.train, documents=100, truncated=29))
    check_bounds(report, ChecksSection(max_too_long=0.29))
    with pytest.raises(
        DataError, match=r"29 of 100 documents are longer than a row, and checks\.max_too_long is 0\.28"
    ):
        check_bounds(report, ChecksSection(max_too_long=0.28))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no source": ({}, "The recipe names no documents"),
    "empty file": ({"train": ["empty"], "tokenizer": "words"}, "There are no documents in"),
    "nothing to train a tokenizer on": (
        {"train": ["empty"]},
        "no training documents to train a tokenizer on",
    ),
    "only white space": ({"train": ["blank"], "tokenizer": "words"}, "There are no documents in"),
    "no training text for a tokenizer": (
        {"validation": ["good"]},
        "trains a tokenizer on data.train, which is empty",
    ),
    "everything held out": (
        {"train": ["good"], "validation_fraction": 1.0, "tokenizer": "words"},
        "held out for validation (data.validation_fraction is 1, the share of them that is), and none is left",
    ),
    "no full row": (
        {"train": ["good"], "packing": "wrapped", "remainder": "drop", "validation_fraction": 0.0},
        "fill no row of 1024 tokens (packing wrapped, remainder drop). Add documents, or lower data.sequence_length.",
    ),
    "all too long": (
        {"train": ["good"], "tokenizer": "words", "long_documents": "drop", "sequence_length": 2},
        "fill no row of 2 tokens (packing documents, long_documents drop). Add shorter documents, or raise data.seq",
    ),
    "weighted validation": (
        {"train": ["good"], "validation": [{"sample": 3, "weight": 2.0}]},
        "data.validation.0.weight is 2",
    ),
    "half a character": ({"train": ["surrogate"]}, "line 1: the text holds half a character"),
    "no tokenizer": (
        {"train": ["good"], "tokenizer": "./nowhere"},
        "The tokenizer './nowhere' cannot be loaded",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_prepared(tmp_path: Path, word_tokenizer: str, case: str) -> None:
    files = {
        "empty": "",
        "blank": '{"text": " "}\n',
        "good": '{"text": "a b"}\n',
        "surrogate": '{"text": "\\ud800"}\n',
    }
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [{"path": str(tmp_path / f"{v}.jsonl")} if isinstance(v, str) else v for v in value]
        return word_tokenizer if value == "words" else value

    keys, expected = REFUSED[case]
    resolved = {key: resolve(value) for key, value in keys.items()}
    recipe = validate_recipe(
        {
            "task": {"name": "package.module:own"},
            "model": {"config": {"model_type": "llama"}},
            "tokenizer": {"name": resolved.pop("tokenizer")} if "tokenizer" in resolved else {"vocab_size": 300},
            "data": {"cache_dir": str(tmp_path / "c"), **resolved},
            "length": {"steps": 1},
        }
    )
    with pytest.raises(DataError) as caught:
        prepare_data(recipe, quiet=True)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_tokenizer_named(tmp_path: Path) -> None:
    tree = {
        "task": {"name": "a:b"},
        "data": {"train": [{"sample": 3}], "cache_dir": str(tmp_path)},
        "length": {"steps": 1},
    }
    with pytest.raises(DataError, match="The recipe names no tokenizer"):
        prepare_data(validate_recipe(tree))


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "t5", "roberta", "qwen2", "mbart"])
def test_a_tokenizer_without_its_files(tmp_path: Path, model_type: str) -> None:
    """transformers makes an empty one of the model's type, for which all text is one unknown token, or none."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps({"model_type": model_type}))
    tree = {
        "task": {"name": "a:b"},
        "model": {"name": str(tmp_path / "base")},
        "data": {"train": [{"sample": 3}], "cache_dir": str(tmp_path)},
        "length": {"steps": 1},
    }
    with pytest.raises(DataError, match=r"The tokenizer '.*base' knows no text, only tokens such as .*: its files"):
        prepare_data(validate_recipe(tree))


def test_rows_too_short_for_special_tokens(tmp_path: Path, word_tokenizer: str) -> None:
    with pytest.raises(DataError, match="the 2 special tokens of this tokenizer fill alone"):
        prepared(
            tmp_path,
            "sequence_classification",
            tokenizer=word_tokenizer,
            train=[{"sample": 3}],
            packing="padded",
            sequence_length=2,
        )
