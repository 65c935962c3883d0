"""Regression: numbers of documents, the figures of an evaluation, every backend, and what is written."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import opened_here
from filelock import FileLock
from harness import Launcher, assert_same_path
from inside import run_here
from recipes_for_tests import ARCHITECTURES, MODEL, SGD, base
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.data.synthetic import story_generator
from finetune.export import verify_export
from finetune.tasks.metrics import compare_numbers
from finetune.tasks.task_lookup import BUILT_IN, find_task
from finetune.utils.errors import DataError, RecipeError

BERT = ARCHITECTURES["bert"]["model"]["config"]
TEXTS = [" ".join(story.text.split()[: 3 + number % 20]) for number, story in enumerate(story_generator.stories(80))]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)


def save(file: Path, values: list[Any] | None = None) -> str:
    """The number of a text is that of its words, small enough to be learned."""
    numbers = [len(text.split()) / 10 - 1 for text in TEXTS] if values is None else values
    file.write_text("\n".join(json.dumps({"text": t, "score": n}) for t, n in zip(TEXTS, numbers, strict=False)))
    return str(file)


def job(file: str, **sections: Any) -> dict[str, Any]:
    source = {"path": file, "label_field": "score"}
    tree = base(
        task={"name": "regression"},
        model={"config": BERT},
        data={"train": [source], "validation": [], "packing": "padded", "sequence_length": 64},
        length={"steps": 6},
    )
    tree["data"]["validation_fraction"] = 0.25
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


BACKENDS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("ddp", "fsdp", "zero3")]


def LAUNCHED_RUNS(launcher: Launcher) -> dict[str, Any]:
    file = launcher.shared / "numbers.jsonl"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            save(file)
    jobs = {
        "numbers": job(str(file), optim={**SGD, "lr": 0.05, "args": {}}),
        "lora": job(str(file), model={"name": MODEL, "config": None}, tokenizer={"name": None}, lora={"rank": 4}),
    }
    return dict.fromkeys(("single", "ddp", "fsdp", "zero3"), jobs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_takes_the_single_process_path(launcher: Launcher, backend: str) -> None:
    jobs = LAUNCHED_RUNS(launcher)[backend]
    for name in jobs:
        single, other = launcher.many("single", jobs)[name], launcher.many(backend, jobs)[name]
        assert_same_path(single, other, 1e-4)
        for figure in ("loss", "rmse", "pearson", "spearman"):
            one, two = (run.validation(f"validation_{figure}") for run in (single, other))
            assert one == pytest.approx(two, rel=1e-3, abs=1e-4)


def test_figures_by_hand() -> None:
    numbers = torch.tensor([[0.0, 1.0, 2.0, 9.0], [1.0, 1.0, 3.0, 4.0]], dtype=torch.float64)
    found = compare_numbers(numbers)
    assert found["rmse"] == pytest.approx((27 / 4) ** 0.5)
    assert found["pearson"] == pytest.approx(np.corrcoef(numbers)[0, 1])
    # Ranks of the second are 1.5, 1.5, 3, 4.
    assert found["spearman"] == pytest.approx(np.corrcoef([1, 2, 3, 4], [1.5, 1.5, 3, 4])[0, 1])
    constant = compare_numbers(torch.tensor([[2.0, 2.0], [1.0, 5.0]]))
    assert (constant["pearson"], constant["spearman"]) == (0.0, 0.0)


@pytest.mark.parametrize("shape", ["bert", "lora"])
def test_numbers_to_the_end(tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Learned, evaluated, exported, opened by transformers alone, and predicted from every place."""
    file = save(tmp_path / "numbers.jsonl")
    more: dict[str, Any] = {"optim": {"lr": 5e-3}, "length": {"steps": 40}, "output": {"dir": str(tmp_path / "run")}}
    if shape == "lora":
        more |= {"model": {"name": MODEL, "config": None}, "tokenizer": {"name": None}, "lora": {"rank": 4}}
    tree = job(file, **more)
    tree["data"] |= {"validation": tree["data"]["train"], "validation_fraction": 0.01, "cache_dir": str(tmp_path / "c")}
    tree["checkpoint"] = {"keep_best_by": "validation_pearson"}
    run = run_here(tree)
    assert run.losses[-1] < 0.7 * run.losses[0]
    assert run.results["validation_pearson"] > 0.5
    assert run.results["validation_rmse"] == pytest.approx(run.results["validation_loss"] ** 0.5, rel=1e-5)
    assert main.main(["data", str(run.directory / "recipe.yaml"), "--show", "2"]) == 0
    shown = capsys.readouterr().out
    assert "number [-0.7]" in shown
    words = np.array([len(text.split()) / 10 - 1 for text in TEXTS])
    figures = f"targets: -0.7 to 1.2, mean {words.mean():.6g}, standard deviation {words.std():.6g}"
    assert shown.count(f"    {figures}\n") == 2  # both sides are the same file
    assert main.main(["eval", str(run.directory), "--data", file, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for name in ("loss", "rmse", "pearson", "spearman"):
        assert figures[name] == pytest.approx(run.results[f"validation_{name}"], abs=1e-4)
    assert main.main(["predict", str(run.directory), file]) == 0
    found = [json.loads(line)["prediction"] for line in capsys.readouterr().out.splitlines()]
    places = ["merged"] if shape == "bert" else ["adapter", "merged"]
    for place in places:
        assert main.main(["export", str(run.directory), "--as", place]) == 0
        capsys.readouterr()
        target = tmp_path / f"{place}.csv"
        assert main.main(["predict", str(run.directory / "exports" / place), file, "--output", str(target)]) == 0
        with target.open(newline="") as table:
            predicted = [float(row["prediction"]) for row in csv.DictReader(table)]
        assert predicted == pytest.approx(found, abs=1e-3)
    folder = run.directory / "exports" / "merged"
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert (network.config.num_labels, network.config.problem_type) == (1, "regression")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        alone = [network(tokenizer(t, return_tensors="pt")["input_ids"]).logits.item() for t in TEXTS[:5]]
    assert alone == pytest.approx(found[:5], abs=1e-3)
    assert main.main(["eval", str(run.directory), "--data", file]) == 0
    assert "pearson" in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, "many", "nan", float("nan"), -float("inf"), 1e39, 10**400, True, [1.0]])
def test_a_label_that_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    recipe = validate_recipe(job(save(tmp_path / "numbers.jsonl", [0.5, value])))
    with pytest.raises(
        DataError, match=r"numbers.jsonl, line 2: the label in 'score' is .* regression needs a finite number"
    ):
        find_task(recipe).build_data(recipe, True)


def test_targets_that_are_all_equal_are_said(tmp_path: Path) -> None:
    recipe = validate_recipe(job(save(tmp_path / "numbers.jsonl", [0.1] * 8), data={"validation_fraction": 0.0}))
    said = find_task(recipe).build_data(recipe, True).report_lines
    assert "all targets are 0.1, and there is nothing to tell apart" in said


def test_texts_that_are_numbers_are_read(tmp_path: Path) -> None:
    file = tmp_path / "numbers.csv"
    file.write_text("text,score\none two,3\nthree,-0.25\nfour,1e2\n")
    recipe = validate_recipe(job(str(file), data={"validation_fraction": 0.0, "cache_dir": str(tmp_path / "c")}))
    data = find_task(recipe).build_data(recipe, True)
    assert data.train.batch(np.arange(3))["targets"].tolist() == [3.0, -0.25, 100.0]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"task": {"num_labels": 3}}, "task.num_labels: regression has no classes"),
        ({"task": {"class_weights": "balanced"}}, "task.class_weights: regression has no classes"),
        ({"eval": {"metrics": ["accuracy"]}}, "eval.metrics: regression always reports rmse, pearson, spearman"),
        ({"data": {"packing": "documents"}}, "data.packing: regression reads one document a row"),
        ({"checkpoint": {"keep_best_by": "validation_accuracy"}}, "no evaluation has 'validation_accuracy'"),
    ],
)
def test_what_contradicts_is_said(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        validate_recipe(job("x.jsonl", **sections), None, BUILT_IN)
