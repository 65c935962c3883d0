"""Classes of a classifier: what a pretrained head or a data set calls them, in every format, and their counts."""

import csv
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
import xxhash
from inside import run_here
from testdata import MODEL
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.data.class_labels import ClassList, KnownClasses
from finetune.data.prepare import PreparedData, prepare_data
from finetune.data.synthetic import story_generator
from finetune.models.pretrained_classes import pretrained_classes
from finetune.tasks.classification import HEAD
from finetune.tasks.task_lookup import find_task
from finetune.utils.errors import DataError, RecipeError

NAMES = ("positive", "negative", "mixed")  # not in sorted order
TEXTS = [" ".join(story.text.split()[:12]) for story in story_generator.stories(60)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier as transformers saves it, which takes these texts for all three classes."""
    folder = tmp_path_factory.mktemp("classes") / "bert"
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    config = BertConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=2,
        initializer_range=0.5,
        id2label=dict(enumerate(NAMES)),
        label2id={name: number for number, name in enumerate(NAMES)},
    )
    torch.manual_seed(4)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def renamed(classifier: Path, folder: Path, **values: Any) -> Path:
    """The same weights, with other values in config.json."""
    shutil.copytree(classifier, folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **values}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def predicted(folder: Path, texts: list[str] = TEXTS) -> list[int]:
    """What transformers takes each text for."""
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [int(network(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]


def tree(model: Path | None, source: str, folder: Path, **data: Any) -> dict[str, Any]:
    return {
        "task": {"name": "sequence_classification"},
        "model": {"name": str(model)} if model else {"config": {"model_type": "llama"}},
        "tokenizer": {} if model else {"name": MODEL},
        "data": {
            "validation": [{"path": source}],
            "packing": "padded",
            "sequence_length": 64,
            "cache_dir": str(folder / "cache"),
            **data,
        },
        "batch": {"global_size": 4, "micro_size": 4},
        "length": {"steps": 0},
        "precision": "fp32",
        "output": {"dir": str(folder / "run")},
    }


def prepare(recipe: Recipe) -> PreparedData:
    """What the recipe's task prepares, before it is made a task's."""
    rows = find_task(recipe).rows
    known = pretrained_classes(recipe, HEAD) if rows.labels == "class" else None
    return prepare_data(recipe, rows, known=known, quiet=True)


def prepared(model: Path | None, source: str, folder: Path, num_labels: int | None = None, **data: Any) -> PreparedData:
    made = tree(model, source, folder, **data)
    made["task"]["num_labels"] = num_labels
    return prepare(validate_recipe(made))


def numbers_of(data: PreparedData) -> list[int]:
    return data.validation.batch(np.arange(len(data.validation)))["targets"].tolist()


def to_jsonl(folder: Path, labels: list[Any], texts: list[str] = TEXTS) -> str:
    rows = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=False)]
    (folder / "data.jsonl").write_text("\n".join(rows))
    return str(folder / "data.jsonl")


def to_json(folder: Path, labels: list[Any]) -> str:
    (folder / "data.json").write_text(
        json.dumps([{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=False)])
    )
    return str(folder / "data.json")


def to_csv(folder: Path, labels: list[Any]) -> str:
    with open(folder / "data.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *zip(TEXTS, labels, strict=False)])
    return str(folder / "data.csv")


def to_pandas(folder: Path, labels: list[Any]) -> str:
    pandas.DataFrame({"text": TEXTS[: len(labels)], "label": labels}).to_parquet(folder / "plain.parquet")
    return str(folder / "plain.parquet")


def _dataset(labels: list[Any], names: list[str]) -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"text": TEXTS[: len(labels)], "label": labels}, features=features)


def to_parquet(folder: Path, labels: list[Any], names: list[str] | None = None) -> str:
    _dataset(labels, names or sorted(NAMES)).to_parquet(folder / "data.parquet")
    return str(folder / "data.parquet")


def to_disk(folder: Path, labels: list[Any], names: list[str] | None = None) -> str:
    _dataset(labels, names or sorted(NAMES)).save_to_disk(folder / "saved")
    return str(folder / "saved")


WRITERS: dict[str, tuple[Callable[..., str], bool]] = {
    "jsonl": (to_jsonl, False),
    "json": (to_json, False),
    "csv": (to_csv, False),
    "pandas": (to_pandas, False),
    "parquet": (to_parquet, False),
    "save_to_disk": (to_disk, False),
    "jsonl, numbers": (to_jsonl, True),
    "csv, numbers": (to_csv, True),
    "pandas, numbers": (to_pandas, True),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_labels_mean_what_the_head_has_learned(classifier: Path, tmp_path: Path, kind: str) -> None:
    classes = predicted(classifier)
    assert len(set(classes)) == 3
    write, by_number = WRITERS[kind]
    source = write(tmp_path, classes if by_number else [NAMES[number] for number in classes])
    data = prepared(classifier, source, tmp_path)
    assert numbers_of(data) == classes
    assert data.label_names == NAMES


@pytest.mark.parametrize("subset", [False, True])
def test_the_first_accuracy_is_that_of_transformers(classifier: Path, tmp_path: Path, subset: bool) -> None:
    """Labels of some rows are wrong; the accuracy, each class's recall and the mean of these are counted by hand."""
    classes = predicted(classifier)
    chosen = [n for n, number in enumerate(classes) if not subset or number != 2]
    told = [NAMES[(classes[n] + (n % 3 == 0)) % (2 if subset else 3)] for n in chosen]
    source = to_jsonl(tmp_path, told, [TEXTS[n] for n in chosen])
    results = run_here(tree(classifier, source, tmp_path)).results
    pairs = [(NAMES[classes[n]], label) for n, label in zip(chosen, told, strict=True)]
    assert results["validation_accuracy"] == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    rows, hits = Counter(told), Counter(b for a, b in pairs if a == b)
    assert results["validation_recall_macro"] == pytest.approx(sum(hits[n] / rows[n] for n in rows) / len(rows))
    found = results["classes"]
    assert list(found) == list(NAMES)
    for name in rows:
        taken = sum(a == name for a, _ in pairs)
        there = {"rows": rows[name], "predicted": taken, "recall": hits[name] / rows[name]}
        there |= {"precision": hits[name] / taken, "f1": 2 * hits[name] / (rows[name] + taken)}
        assert found[name] == pytest.approx(there)
        for other, count in results["confusions"][name].items():
            assert count == pairs.count((other, name))


def check_names(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {str(number): name for number, name in enumerate(NAMES)}
    assert config["label2id"] == {name: number for number, name in enumerate(NAMES)}


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_what_is_written_has_the_names_of_the_head(
    classifier: Path, tmp_path: Path, lora: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two classes alone; after a step by which nothing is learned, what is written takes texts for what it did."""
    classes = predicted(classifier)
    chosen = [n for n, number in enumerate(classes) if number != 1]
    source = to_jsonl(tmp_path, [NAMES[classes[n]] for n in chosen], [TEXTS[n] for n in chosen])
    made = tree(classifier, source, tmp_path, train=[{"path": source}])
    made |= {"length": {"steps": 1}, "optim": {"lr": 1e-9}} | ({"lora": lora} if lora else {})
    assert run_here(made).results["validation_accuracy"] == 1.0
    run = tmp_path / "run"
    if lora is None:
        check_names(run / "model")
    assert main.main(["export", str(run), "--as", "merged"]) == 0
    folder = run / "exports" / "merged"
    check_names(folder)
    assert predicted(folder) == classes
    assert main.main(["replay", str(run), "--step", "1"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("labels", "num_labels", "said"),
    [
        (
            ["positive", "neutral"],
            None,
            "labels of the documents are positive, neutral, but the trained head of .* has",
        ),
        (["Positive", "negative"], None, "positive, negative, mixed"),
        ([1, 2, 3], None, "The labels of the documents are 1, 2, 3, but the trained head"),
        (["positive", "negative"], 2, "task.num_labels is 2, but the trained head of .* has 3 classes"),
        (["positive", "negative"], 5, "task.num_labels is 5"),
    ],
)
def test_other_classes_than_those_of_the_head_are_refused(
    classifier: Path, tmp_path: Path, labels: list[Any], num_labels: int | None, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        prepared(classifier, to_jsonl(tmp_path, labels), tmp_path, num_labels)


def test_names_that_are_numbers(classifier: Path, tmp_path: Path) -> None:
    """Stars from 1 to 3: CSV writes their names as numbers, which must not be those of classes."""
    model = renamed(classifier, tmp_path / "stars", id2label={0: "3", 1: "4", 2: "5"}, label2id=None)
    assert numbers_of(prepared(model, to_csv(tmp_path, [5, 3, 4]), tmp_path)) == [2, 0, 1]
    model = renamed(classifier, tmp_path / "more", id2label={0: "1", 1: "2", 2: "3"}, label2id=None)
    assert numbers_of(prepared(model, to_jsonl(tmp_path, ["3", "1"]), tmp_path)) == [2, 0]
    assert numbers_of(prepared(model, to_jsonl(tmp_path, [3, 1]), tmp_path)) == [2, 0]
    with pytest.raises(DataError, match=r"labels 1, 2 are names of classes .* and numbers of other ones"):
        prepared(model, to_jsonl(tmp_path, [1, 2]), tmp_path)


def test_heads_whose_names_mean_nothing(classifier: Path, tmp_path: Path) -> None:
    made_up = {str(number): f"LABEL_{number}" for number in range(3)}
    plain = renamed(classifier, tmp_path / "plain", id2label=made_up, label2id=None)
    data = prepared(plain, to_jsonl(tmp_path, ["b", "c", "a"]), tmp_path)
    assert (data.label_names, numbers_of(data)) == (("a", "b", "c"), [1, 2, 0])
    assert "does not name its classes (LABEL_0, ...)" in "\n".join(data.report.start_lines())
    # Numbers that are not the head's are classes of their own as well.
    data = prepared(plain, to_jsonl(tmp_path, [3, 1, 0, 2]), tmp_path)
    assert (data.label_names, numbers_of(data)) == (("0", "1", "2", "3"), [3, 1, 0, 2])
    assert "does not name its classes (LABEL_0, ...)" in "\n".join(data.report.start_lines())
    # What a pipeline of transformers writes.
    assert numbers_of(prepared(plain, to_jsonl(tmp_path, ["LABEL_2", "LABEL_0"]), tmp_path)) == [2, 0]
    assert numbers_of(prepared(plain, to_jsonl(tmp_path, [2, 0]), tmp_path)) == [2, 0]
    # Without a head in the files, the names are those of nothing.
    base = tmp_path / "base"
    AutoModel.from_pretrained(classifier).save_pretrained(base)
    AutoTokenizer.from_pretrained(classifier).save_pretrained(base)
    data = prepared(base, to_jsonl(tmp_path, ["b", "a"]), tmp_path)
    assert (data.label_names, numbers_of(data)) == (("a", "b"), [1, 0])
    both = renamed(classifier, tmp_path / "both", label2id={"positive": 1, "negative": 0, "mixed": 2})
    with pytest.raises(RecipeError, match="id2label and label2id contradict each other"):
        prepared(both, to_jsonl(tmp_path, ["positive"]), tmp_path)
    alone = renamed(classifier, tmp_path / "alone", id2label=None, label2id={name: n for n, name in enumerate(NAMES)})
    data = prepared(alone, to_jsonl(tmp_path, ["mixed", "positive"]), tmp_path)
    assert numbers_of(data) == [2, 0]


@pytest.mark.parametrize("write", [to_parquet, to_disk])
def test_a_data_sets_own_names_stay(tmp_path: Path, write: Callable[..., str]) -> None:
    """With their numbers, though one never occurs; other files may say a name or its number."""
    names = ["world", "sports", "business", "science"]
    numbers = [3, 0, 1, 3, 0]
    source = write(tmp_path, numbers, names)
    data = prepared(None, source, tmp_path)
    assert (data.label_names, data.num_labels, numbers_of(data)) == (tuple(names), 4, numbers)
    for labels in (["science", "business"], [3, 2]):
        both = prepared(None, to_jsonl(tmp_path, labels), tmp_path, train=[{"path": source}])
        assert numbers_of(both) == [3, 2]
        assert both.label_names == tuple(names)
    assert "no training document has the class business" in "\n".join(both.report.lines())
    with pytest.raises(DataError, match="labels that no training document has: weather"):
        prepared(None, to_jsonl(tmp_path, ["weather"]), tmp_path, train=[{"path": source}])
    assert prepared(None, source, tmp_path, 5).label_names == (*names, "LABEL_4")


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["00", "01", "02", "00"], ["00", "01", "02"]),
        (["01", "1", "1"], ["1", "01"]),
        (["10115", "00501", "10115"], ["10115", "00501"]),
        (["1", "2", "2a"], ["1", "2", "2a"]),
        (["٣", "²", "+1", "1"], ["1", "+1", "²", "٣"]),
        ([-1, 0, 1, 0], ["-1", "0", "1"]),
        ([1, 5, 3, 1], ["1", "3", "5"]),
        ([*range(12)], [*map(str, range(12))]),
        ([2, 0, 1], ["0", "1", "2"]),
    ],
    ids=str,
)
def test_one_file_in_every_format_gives_the_same_classes(tmp_path: Path, labels: list[Any], names: list[str]) -> None:
    """An integer is the class of its digits, whether a format has integers or, as CSV, none; so is what is held out."""

    def to_tsv(folder: Path, labels: list[Any]) -> str:
        rows = [("text", "label"), *zip(TEXTS, labels, strict=False)]
        (folder / "data.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
        return str(folder / "data.tsv")

    def to_arrow(folder: Path, labels: list[Any]) -> str:
        datasets.Dataset.from_dict({"text": TEXTS[: len(labels)], "label": labels}).save_to_disk(folder / "arrow")
        return str(folder / "arrow")

    # Each class often enough that some are held out.
    labels = (labels * 40)[: len(TEXTS)]
    found = []
    for write in (to_jsonl, to_json, to_pandas, to_arrow, to_csv, to_tsv):
        for kind in {type(labels[0]), str}:
            source = write(tmp_path, [kind(label) for label in labels])
            data = prepared(None, source, tmp_path / write.__name__)
            parts = prepared(None, source, tmp_path, train=[{"path": source}], validation=[], validation_fraction=0.2)
            found.append((data.label_names, numbers_of(data), numbers_of(parts)))
    assert found[0][:2] == (tuple(names), [names.index(str(label)) for label in labels])
    assert all(other == found[0] for other in found)
    assert len(found[0][2]) == round(0.2 * len(TEXTS))
    # A model that has learned them reads labels by these names, whatever the format.
    known = [KnownClasses(tuple(names), "a model")]
    for given in (labels[:1], [str(labels[0])]):
        if names == [*map(str, range(len(names)))] or given != [1]:
            assert ClassList.of(given, None, known).renumber(np.array([0]), given) == [names.index(str(labels[0]))]


MISSING: dict[str, tuple[Callable[..., str], Any]] = {
    "csv, blank": (to_csv, ""),
    "csv, spaces": (to_csv, "  "),
    "jsonl, null": (to_jsonl, None),
    "jsonl, NaN": (to_jsonl, float("nan")),
    "jsonl, blank": (to_jsonl, ""),
    "json, tab": (to_json, "\t"),
    "json, null": (to_json, None),
    "pandas": (to_pandas, None),
    "pandas, NaN": (to_pandas, float("nan")),
    "parquet": (to_parquet, None),
    "parquet, -1": (to_parquet, -1),
    "save_to_disk": (to_disk, None),
    "save_to_disk, -1": (to_disk, -1),
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_missing_label_is_no_class(tmp_path: Path, kind: str) -> None:
    write, missing = MISSING[kind]
    whole = [0, 1, 0] if "-1" in kind else ["negative", "positive", "negative"]
    source = write(tmp_path, [*whole, missing])
    with pytest.raises(DataError, match=r"(line 5|line 4|item 4|row 4): the label in 'label' is missing"):
        prepared(None, source, tmp_path)


def test_labels_that_look_missing_are_told(tmp_path: Path) -> None:
    """`None` may be a class, and is one; white space around a name is never meant."""
    data = prepared(None, to_csv(tmp_path, ["nan", "joy", "None"]), tmp_path)
    assert data.label_names == ("None", "joy", "nan")
    assert "the class 'None', 'nan' may stand for missing labels" in "\n".join(data.report.start_lines())
    with pytest.raises(DataError, match="labels 'joy', 'joy ' differ in white space alone"):
        prepared(None, to_csv(tmp_path, ["joy", "joy ", "fear"]), tmp_path)


# ---------------------------------------------------------------- the hold-out


def held_out(tmp_path: Path, labels: list[str], fraction: float, texts: list[str] | None = None) -> PreparedData:
    texts = texts or [f"text {n}" for n in range(len(labels))]
    source = to_jsonl(tmp_path, labels, texts)
    return prepared(None, source, tmp_path, train=[{"path": source}], validation=[], validation_fraction=fraction)


def test_each_class_is_held_out_by_its_share(tmp_path: Path) -> None:
    labels = ["a"] * 160 + ["b"] * 30 + ["c"] * 9 + ["d"]
    data = held_out(tmp_path, labels, 0.1)
    # Of 200 texts 20: 16, 3 and 0.9, whose rest is the largest; the last of a class is never held out.
    assert data.report.validation.classes == {"a": 16, "b": 3, "c": 1, "d": 0}
    assert data.report.train.classes == {"a": 144, "b": 27, "c": 8, "d": 1}
    text = "\n".join(data.report.lines())
    assert "classes: a 144, b 27, c 8, d 1" in text
    assert "no validation document has the class d" in text

    def sides(found: PreparedData) -> list[set[str]]:
        pairs = []
        for rows in (found.train, found.validation):
            ids = rows.batch(np.arange(len(rows)))["input_ids"]
            pairs.append(set(found.tokenizer.batch_decode(ids, skip_special_tokens=True)))
        return pairs

    first = sides(data)
    assert not first[0] & first[1]
    order = np.random.default_rng(0).permutation(200).tolist()
    again = held_out(tmp_path, [labels[n] for n in order], 0.1, [f"text {n}" for n in order])
    assert sides(again) == first


@pytest.mark.parametrize("task", ["sequence_classification", "causal_lm"])
def test_the_split_does_not_depend_on_sources(tmp_path: Path, task: str) -> None:
    """Of language models it is that of each text's hash alone."""
    texts, labels = [f"text {n}" for n in range(100)], [n % 3 for n in range(100)]
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    parts = [to_jsonl(tmp_path / "one", labels[:30], texts[:30]), to_jsonl(tmp_path / "two", labels[30:], texts[30:])]
    whole = to_jsonl(tmp_path, labels, texts)
    held = []
    for sources in ([whole], parts):
        made = tree(None, "", tmp_path, train=[{"path": path} for path in sources], validation=[])
        made["task"]["name"] = task
        made["data"]["validation_fraction"] = 0.2
        data = prepare(validate_recipe(made))
        ids = data.validation.batch(np.arange(len(data.validation)))["input_ids"]
        held.append(set(data.tokenizer.batch_decode(ids, skip_special_tokens=True)))
    assert held[0] == held[1]
    if task == "causal_lm":
        assert held[0] == {text for text in texts if xxhash.xxh3_64_intdigest(text.encode()) < 0.2 * 2**64}
    else:
        assert len(held[0]) == 20


def test_copies_of_a_text_stay_on_one_side(tmp_path: Path) -> None:
    """Even where they have several classes."""
    texts = [f"text {n % 50}" for n in range(150)]
    data = held_out(tmp_path, ["a"] * 50 + ["b"] * 100, 0.3, texts)
    rows = [side.batch(np.arange(len(side)))["input_ids"][:, :12] for side in (data.train, data.validation)]
    one, other = ({tuple(row) for row in part.tolist()} for part in rows)
    assert not one & other
    assert (len(data.train), len(data.validation)) == (3 * 35, 3 * 15)


@pytest.mark.parametrize("task", ["sequence_classification", "causal_lm"])
def test_without_validation_rows_a_run_says_so(tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = to_jsonl(tmp_path, [0, 1] * 10)
    made = tree(None, "", tmp_path, train=[{"path": source}], validation=[])
    made["task"]["name"] = task
    made["model"]["config"] |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    made["model"]["config"] |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    said = (
        "no validation rows, so nothing is evaluated: none of 20 documents is held out (data.validation_fraction 0.01"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(made))
    assert main.main(["data", str(recipe)]) == 0
    assert said in capsys.readouterr().out
    made["length"] = {"steps": 1}
    assert said in " ".join(run_here(made).said.split())
    made["data"]["validation_fraction"] = 0.0  # as asked
    recipe.write_text(json.dumps(made))
    assert main.main(["data", str(recipe)]) == 0
    assert "no validation" not in capsys.readouterr().out


# ---------------------------------------------------------------- examples


def test_examples_of_every_task_are_shown(classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(made: dict[str, Any]) -> str:
        (tmp_path / "recipe.yaml").write_text(json.dumps(made))
        assert main.main(["data", str(tmp_path / "recipe.yaml"), "--show", "3"]) == 0
        return capsys.readouterr().out

    text = shown(tree(classifier, to_jsonl(tmp_path, ["mixed", "positive"]), tmp_path))
    assert all(part in text for part in ("example 1: ", "class [mixed]", "class [positive]"))
    assert "example 3" not in text
    first = AutoTokenizer.from_pretrained(classifier)(TEXTS[0])["input_ids"]
    assert f"example 1: {len(first)} tokens" in text
    text = shown({"task": {"name": "own_task:mlp"}, "length": {"steps": 1}})
    assert all(part in text for part in ("train: 200 rows", "inputs: float32 of shape (8,): ", "example 3: 1 targets"))
    for packing in ("documents", "padded", "wrapped"):
        made = tree(None, "", tmp_path, packing=packing, train=[{"sample": 20}], validation=[])
        made["task"]["name"] = "causal_lm"
        assert "example 3: " in shown(made)
