"""Classes that an opened classifier predicts: from every place they are those that the run's evaluation counted."""

import csv
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from exports import opened_here
from inside import run_here
from testdata import MODEL
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BitsAndBytesConfig,
)

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.data.synthetic import story_generator
from finetune.export import verify_export
from finetune.export.load_model import load_model
from finetune.tasks.class_tables import classes_table, confusion_table
from finetune.tasks.metrics import count_classes, count_confusions, mean_of_classes
from finetune.tasks.task_lookup import BUILT_IN, find_task
from finetune.utils.errors import RecipeError

NAMES = ("fine", "bad", "mixed")
TEXTS = [f"{NAMES[n % 3]} {NAMES[n % 3]} {story.text}" for n, story in enumerate(story_generator.stories(60))]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)


class Job(NamedTuple):
    run: Path
    results: dict[str, Any]
    file: Path
    predicted: list[str]
    """Of the run's own evaluation, by row."""


def labelled(file: Path, texts: list[str], **more: Any) -> Path:
    rows = [{"story": f" {text}\n", "verdict": text.split()[0], **more} for text in texts]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def job(folder: Path, **sections: Any) -> Job:
    """Trains a few steps, and evaluates; rows are shorter than most texts."""
    train, held = labelled(folder / "train.jsonl", TEXTS[:40]), labelled(folder / "held.jsonl", TEXTS[40:])
    source = {"text_field": "story", "label_field": "verdict"}
    tree: dict[str, Any] = {
        "task": "sequence_classification",
        "data": {
            "train": [{"path": str(train), **source}],
            "validation": [{"path": str(held), **source}],
            "packing": "padded",
            "sequence_length": 48,
            "lowercase": True,
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_size": 8, "micro_size": 4},
        "length": {"steps": 30},
        "optim": {"lr": 3e-3},
        "eval": {"metrics": ["accuracy"]},
        "output": {"dir": str(folder / "run")},
        "precision": "fp32",
        **sections,
    }
    done = run_here(tree)
    lines = (done.directory / "predictions.jsonl").read_text().splitlines()
    return Job(done.directory, done.results, held, [json.loads(line)["prediction"] for line in lines])


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained BERT without a head."""
    folder = tmp_path_factory.mktemp("bert")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(4)
    config = BertConfig(vocab_size=512, max_position_embeddings=64, initializer_range=0.3, **size)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def full(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job(tmp_path_factory.mktemp("full"), model=str(bert))


def lines_of(place: Path, file: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main.main(["predict", str(place), str(file), *more]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_place_predicts_what_the_evaluation_counted(full: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(set(full.predicted)) > 1
    found = lines_of(full.run, full.file, capsys)
    assert [line["prediction"] for line in found] == full.predicted
    again = lines_of(full.run / "checkpoints" / "step-00000030", full.file, capsys, "--batch-size", "3")
    for one, other in zip(found, again, strict=True):
        assert one["prediction"] == other["prediction"]
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)
    for line in found:
        assert sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert max(line["probabilities"], key=line["probabilities"].get) == line["prediction"]
    # A folder knows neither the run's row length nor its fields, nor that it reads small letters.
    small = full.file.with_name("small.jsonl")
    labelled(small, [text.lower() for text in TEXTS[40:]])
    assert main.main(["export", str(full.run), "--as", "merged"]) == 0
    for folder in (full.run / "model", full.run / "exports" / "merged"):
        lines = lines_of(folder, small, capsys, "--text-field", "story")
        network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for text, line in zip(TEXTS[40:], lines, strict=True):
            ids = tokenizer(text.lower().strip(), truncation=True, max_length=64, return_tensors="pt")
            shares = network(input_ids=ids["input_ids"]).logits.softmax(-1)[0].tolist()
            assert list(line["probabilities"].values()) == pytest.approx(shares, abs=1e-4)
            assert line["prediction"] == network.config.id2label[max(range(3), key=shares.__getitem__)]


@pytest.mark.parametrize("shape", ["bert", "llama"])
def test_adapters_predict_what_the_evaluation_counted(
    bert: Path, tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = job(tmp_path, model=str(bert) if shape == "bert" else MODEL, lora={"rank": 4})
    assert [line["prediction"] for line in lines_of(done.run, done.file, capsys)] == done.predicted
    for kind in ("adapter", "merged"):
        assert main.main(["export", str(done.run), "--as", kind]) == 0
    folders = [done.run / "exports" / kind for kind in ("adapter", "merged")]
    one, other = (lines_of(folder, done.file, capsys, "--text-field", "story") for folder in folders)
    assert [line["prediction"] for line in one] == [line["prediction"] for line in other]
    assert set(one[0]["probabilities"]) == set(NAMES)
    (folders[0] / "export.json").unlink()
    assert main.main(["predict", str(folders[0]), str(done.file)]) == 2
    assert "no export.json names its classes" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("way", ["whole", "nf4", "stored"])
def test_a_base_without_a_pooler(tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is drawn, and trained whole, as the head above it is."""
    base = tmp_path / "base"
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(4)
    config = BertConfig(vocab_size=512, max_position_embeddings=64, initializer_range=0.3, **size)
    AutoModelForMaskedLM.from_config(config).save_pretrained(base)
    if way == "stored":
        packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        AutoModelForMaskedLM.from_pretrained(base, quantization_config=packed).save_pretrained(tmp_path / "stored")
        base = tmp_path / "stored"
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(base)
    model = {"name": str(base), **({"quantization": "nf4"} if way == "nf4" else {})}
    done = job(tmp_path, model=model, lora={"rank": 4})
    assert len(set(done.predicted)) > 1
    assert [line["prediction"] for line in lines_of(done.run, done.file, capsys)] == done.predicted
    exports = done.run / "exports"
    assert main.main(["export", str(done.run), "--as", "merged"]) == 0
    merged = lines_of(exports / "merged", done.file, capsys, "--text-field", "story")
    assert len(merged) == len(done.predicted)
    code = main.main(["export", str(done.run), "--as", "adapter"])
    if way == "stored":
        assert code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{base} is stored in 4 bits and lacks bert.pooler, which transformers cannot draw there" in said
        return
    assert code == 0
    config = json.loads((exports / "adapter" / "adapter_config.json").read_text())
    assert {"bert.pooler", "classifier"} <= set(config["modules_to_save"])
    adapter = lines_of(exports / "adapter", done.file, capsys, "--text-field", "story")
    assert [line["prediction"] for line in adapter] == [line["prediction"] for line in merged]


def test_a_table_has_a_row_for_each_document(full: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, also where there is no text."""
    file, target = tmp_path / "some.csv", tmp_path / "out.csv"
    file.write_text('story\n"Once upon a time"\n"  "\n"The end, ""said"" she."\n')
    assert main.main(["predict", str(full.run), str(file), "--output", str(target)]) == 0
    assert "Documents without text, which get nothing: 1." in capsys.readouterr().err
    with target.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert list(rows[0]) == ["story", "prediction", *(f"probability_{name}" for name in sorted(NAMES))]
    assert [row["story"] for row in rows] == ["Once upon a time", "  ", 'The end, "said" she.']
    assert [bool(row["prediction"]) for row in rows] == [True, False, True]
    assert {value for key, value in rows[1].items() if key != "story"} == {""}
    lines = lines_of(full.run, file, capsys)
    assert lines[1] == {"story": "  ", "prediction": None, "probabilities": None}
    other = tmp_path / "some.jsonl"
    texts = ["Once upon a time", None, 'The end, "said" she.']
    other.write_text("\n".join(json.dumps({"story": text}) for text in texts))
    again = lines_of(full.run, other, capsys)
    assert again[1].pop("story") is None
    assert again == [lines[0], {key: lines[1][key] for key in again[1]}, lines[2]], "in a format that has nulls"
    assert float(rows[0]["probability_bad"]) == lines[0]["probabilities"]["bad"]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_columns_of_the_file_are_kept(
    full: Job, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order, as they were, whatever they hold."""
    records = [{"id": n, "story": text, "verdict": 'é,"', "when": f"{n}\nh"} for n, text in enumerate(TEXTS[:5])]
    file, target = tmp_path / f"some.{suffix}", tmp_path / "out.csv"
    table = pd.DataFrame(records)
    if suffix == "jsonl":
        # Fields that not all records have, and that are lists.
        records[1]["more"] = ["a", 1]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif suffix == "parquet":
        table.to_parquet(file)
    else:
        table.to_csv(file, index=False, sep="\t" if suffix == "tsv" else ",")
    lines = lines_of(full.run, file, capsys)
    ours = ("prediction", "probabilities")
    kept = [{key: value for key, value in line.items() if key not in ours} for line in lines]
    as_text = [{**record, "id": str(record["id"])} for record in records]
    assert kept == (as_text if suffix in ("csv", "tsv") else records)
    assert [list(line)[-2:] for line in lines] == [[*ours]] * 5
    assert main.main(["predict", str(full.run), str(file), "--output", str(target)]) == 0
    with target.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [{key: row[key] for key in as_text[0]} for row in rows] == [
        {key: record[key] for key in as_text[0]} for record in as_text
    ]
    if suffix == "jsonl":
        assert [row["more"] for row in rows] == ["", '["a", 1]', "", "", ""]
    file.write_text(json.dumps({"story": "a", "prediction": "b"})) if suffix == "jsonl" else None
    if suffix == "jsonl":
        assert main.main(["predict", str(full.run), str(file)]) == 2
        assert "a field 'prediction', as what is predicted has" in " ".join(capsys.readouterr().err.split())


def test_eval_has_the_figures_of_the_run(full: Job, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main.main(["eval", str(full.run), "--data", str(full.file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(full.results["validation_loss"], abs=1e-5)
    assert found["accuracy"] == full.results["validation_accuracy"]
    assert found["recall_macro"] == full.results["validation_recall_macro"]
    assert found["classes"] == full.results["classes"]
    assert found["confusions"] == full.results["confusions"]
    assert sum(sum(row.values()) for row in found["confusions"].values()) == found["targets"] == 20
    assert main.main(["eval", str(full.run), "--data", str(full.file)]) == 0
    captured = capsys.readouterr()
    assert "Not evaluated" not in captured.err
    text = captured.out
    assert all(part in text for part in ("accuracy", "macro F1", "precision", "true class, taken for", *NAMES))


def test_eval_says_what_is_left_out(full: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = labelled(tmp_path / "held.jsonl", TEXTS[40:])
    lines = file.read_text().splitlines()
    lines[1:1] = [json.dumps({"story": text, "verdict": "bad"}) for text in ("", "  ")]
    file.write_text("\n".join(lines))
    assert main.main(["eval", str(full.run), "--data", str(file)]) == 0
    said = capsys.readouterr()
    assert "Not evaluated: documents without text 2." in said.err
    assert "over 20 documents" in said.out


def test_counts_by_hand() -> None:
    """Five rows; nothing is taken for `c`, and no row is `d`."""
    classes = torch.tensor([[0, 0, 1, 3, 1], [0, 1, 1, 2, 0]])
    counts = count_classes(classes, "abcd")
    assert counts["a"] == {"rows": 2, "predicted": 2, "precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert counts["c"] == {"rows": 1, "predicted": 0, "precision": None, "recall": 0.0, "f1": 0.0}
    assert counts["d"] == {"rows": 0, "predicted": 1, "precision": 0.0, "recall": None, "f1": 0.0}
    assert mean_of_classes(counts, "f1") == pytest.approx(0.25)
    confusions = count_confusions(classes, "abcd")
    assert confusions == {"a": {"a": 1, "b": 1}, "b": {"a": 1, "b": 1}, "c": {"d": 1}}
    assert confusion_table(confusions, list("abcd"))[1:3] == [["a", "1", "1", "0", "0"], ["b", "1", "1", "0", "0"]]
    assert classes_table(counts)[3] == ["c", "–", "0.0000", "0.0000", "1"]
    many = {str(n): {str(n): 5, str(n + 1): n} for n in range(30)}
    head, first, *_ = confusion_table(many, [str(n) for n in range(31)])
    assert (head, first) == (["true class", "taken for", "rows"], ["29", "30", "29"])


def test_the_report_shows_the_classes(full: Job) -> None:
    assert main.main(["report", str(full.run)]) == 0
    page = (full.run / "report" / "report.html").read_text()
    assert "true class, taken for" in page
    assert "Classes, at the last evaluation" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "RUN", "--prompt", "x"], "is no causal language model"),
        (["chat", "RUN"], "is no causal language model"),
        (["predict", MODEL, "FILE"], "there is no field 'text'.*--text-field"),
        (["predict", MODEL, "FILE", "--pair-field", "x"], "--pair-field is for classifiers of documents.* is none"),
        (["predict", "RUN", "FILE", "--field", "user=x"], "--field is for language models.* is none"),
        (["eval", MODEL, "--data", "FILE", "--label-field", "x"], "--label-field is for classifiers of documents"),
        (["eval", MODEL, "--data", "FILE", "--pair-field", "x"], "--pair-field is for classifiers of documents"),
        (["eval", MODEL, "--data", "FILE", "--field", "user"], "--field user is not of the form KEY=NAME"),
        (["predict", "RUN", "FILE", "--output", "out.txt"], "Name a file that ends in .jsonl or .csv"),
        (["predict", "RUN", "FILE", "--output", "FILE"], "is the file that is read"),
        (["predict", "RUN", "FILE", "--batch-size", "0"], "--batch-size is 0; give 1 or more"),
        (["predict", "RUN", "FILE", "--text-field", "body"], "there is no field 'body'.*--text-field"),
        (["predict", "RUN", "BODY"], "as --text-field, such as --text-field body\\.$"),
        (["eval", "RUN", "--data", "BODY"], "as --text-field, such as --text-field body\\.$"),
        (
            ["predict", "RUN", "CHATS"],
            "as --text-field; if these are conversations, write each as one text: .* only\\.$",
        ),
        (["eval", "RUN", "--data", "FILE", "--label-field", "story"], "labels of the documents are .* has the classes"),
    ],
)
def test_refusals(full: Job, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"RUN": str(full.run), "FILE": str(full.file)}
    for name, record in (("BODY", {"body": "a"}), ("CHATS", {"messages": [{"role": "user", "content": "a"}]})):
        places[name] = str(full.file.with_name(f"{name}.jsonl"))
        Path(places[name]).write_text(json.dumps(record))
    assert main.main([places.get(word, word) for word in words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in error
    assert re.search(said, error), error


def test_heads_of_other_kinds_are_refused(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for labels, kind in ((3, "multi_label_classification"), (3, "regression")):
        config = BertConfig.from_pretrained(bert, num_labels=labels, problem_type=kind)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / kind)
        AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / kind)
        with pytest.raises(RecipeError, match="for a document, as its config"):
            load_model(str(tmp_path / kind)).require_labels()
    file = labelled(tmp_path / "held.jsonl", TEXTS[:8])
    place, words = str(tmp_path / "multi_label_classification"), ["--text-field", "story"]
    for command in (["predict", place, str(file)], ["eval", place, "--data", str(file), "--label-field", "verdict"]):
        capsys.readouterr()
        assert main.main([*command, *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        opening, error = filter(None, said.err.splitlines())
        assert opening.startswith("Opening ")
        assert "problem_type multi_label_classification, num_labels 3). Name a model that gives one, or train " in error
    # One that is trained on from here learns one class.
    source = {"path": str(file), "text_field": "story", "label_field": "verdict"}
    data = {"train": [source], "packing": "padded", "sequence_length": 32, "cache_dir": str(tmp_path / "cache")}
    recipe = validate_recipe(
        {"task": "sequence_classification", "model": place, "data": data, "length": {"steps": 1}}, None, BUILT_IN
    )
    task = find_task(recipe)
    config = task.build_config(recipe, task.build_data(recipe, True))
    assert config.problem_type == "single_label_classification"
