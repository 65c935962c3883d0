"""Classifiers of pairs of texts, and weighted classes: by hand, as transformers has them, and on every backend."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from harness import Launcher, assert_same_path
from inside import run_here
from recipes_for_tests import ARCHITECTURES, SGD, base
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.data.tokenization.special_tokens import truncate_pair
from finetune.tasks.classification import SEQUENCE_CLASSIFICATION
from finetune.tasks.task import TaskData
from finetune.tasks.task_lookup import BUILT_IN, find_task
from finetune.utils.errors import DataError, RecipeError

WORDS = [f"w{number}" for number in range(40)]
BERT = ARCHITECTURES["bert"]["model"]["config"]
TASK = {"name": "sequence_classification"}


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer that pairs as BERT's does: [CLS] A [SEP] B [SEP], with type ids."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=names, **special).save_pretrained(folder)
    return folder


def records(count: int) -> list[dict[str, Any]]:
    """Pairs of all lengths, a side of some empty; a quarter is of the class `same`."""
    random = np.random.default_rng(3)
    found = []
    for number in range(count):
        one, other = (" ".join(random.choice(WORDS, size)) for size in random.integers(0 if number else 1, 14, 2))
        same = number % 4 == 0
        found.append({"premise": one, "claim": one if same else other, "kind": "same" if same else "other"})
    return [record for record in found if record["premise"] or record["claim"]]


def save_pairs(folder: Path) -> dict[str, Any]:
    """Returns the source of a file of them."""
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records(90)))
    return {"path": str(file), "text_field": "premise", "pair_field": "claim", "label_field": "kind"}


def job(source: dict[str, Any], tokenizer: Path, **sections: Any) -> dict[str, Any]:
    tree = base(
        task={**TASK, "class_weights": "balanced"},
        model={"config": BERT},
        tokenizer={"name": str(tokenizer)},
        data={"train": [source], "validation": [], "packing": "padded", "sequence_length": 24},
        optim={**SGD, "lr": 0.3, "args": {}},
        length={"steps": 6},
    )
    tree["data"]["validation_fraction"] = 0.2
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


def jobs_of(launcher: Launcher) -> dict[str, dict[str, Any]]:
    folder = launcher.shared / "pairs"
    with FileLock(f"{folder}.lock"):
        folder.mkdir(exist_ok=True)
        source, tokenizer = save_pairs(folder), save_tokenizer(folder / "tokenizer")
    sizes = {
        f"micro_{size}": job(source, tokenizer, batch={"global_size": 8, "micro_size": size}) for size in (1, 2, 8)
    }
    # Dropout depends on what shares a micro-batch.
    quiet = {"config": {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}
    sizes = {name: {**tree, "model": quiet} for name, tree in sizes.items()}
    return {**sizes, "dropout": job(source, tokenizer)}


FEW = ("micro_2", "dropout")


def LAUNCHED_RUNS(launcher: Launcher) -> dict[str, Any]:
    jobs = jobs_of(launcher)
    few = {name: jobs[name] for name in FEW}
    return {"single": jobs, **dict.fromkeys(("ddp", "fsdp", "zero2", "zero3"), few)}


BACKENDS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("ddp", "fsdp", "zero2", "zero3")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_takes_the_single_process_path(launcher: Launcher, backend: str) -> None:
    """Weighted losses of pairs."""
    jobs = {name: jobs_of(launcher)[name] for name in FEW}
    for name in jobs:
        single, other = launcher.many("single", jobs)[name], launcher.many(backend, jobs)[name]
        assert_same_path(single, other, 1e-4)
        assert single.validation() == pytest.approx(other.validation(), rel=1e-4)


@pytest.mark.xdist_group("single")
def test_micro_batches_change_nothing(launcher: Launcher) -> None:
    found = launcher.many("single", jobs_of(launcher))
    for name in ("micro_1", "micro_8"):
        assert_same_path(found["micro_2"], found[name], 1e-4)


# ---------------------------------------------------------------- weights


def ready(tree: dict[str, Any], folder: Path) -> TaskData:
    recipe = validate_recipe({**tree, "data": {**tree["data"], "cache_dir": str(folder / "cache")}}, None, BUILT_IN)
    return find_task(recipe).build_data(recipe, True)


def test_losses_are_weighted_by_hand(tmp_path: Path) -> None:
    tree = job(save_pairs(tmp_path), save_tokenizer(tmp_path / "tokenizer"))
    data = ready(tree, tmp_path)
    assert data.label_names == ("other", "same")
    assert data.validation is not None
    numbers = data.train.batch(np.arange(len(data.train)))["targets"]
    counts = torch.bincount(numbers)
    weights = len(numbers) / (2 * counts)
    line = f"class weights: other {weights[0]:.4g}, same {weights[1]:.4g}"
    assert line in data.report_lines
    batch = data.train.batch(np.array([0, 3, 4, 5]))
    assert batch["weights"].tolist() == pytest.approx(weights[batch["targets"]].tolist())
    assert "weights" not in data.validation.batch(np.arange(3))
    scores = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    network: Any = lambda **inputs: SimpleNamespace(logits=scores)  # noqa: E731
    plain = {name: batch[name] for name in ("input_ids", "attention_mask", "targets", "weights")}
    losses = cross_entropy(scores, batch["targets"], reduction="none")
    expected = (losses * weights[batch["targets"]]).sum()
    assert SEQUENCE_CLASSIFICATION.loss_sum(network, plain).item() == pytest.approx(expected.item())
    mean = cross_entropy(scores, batch["targets"], weight=weights, reduction="sum")  # torch's, without its division
    assert expected.item() == pytest.approx(mean.item())
    tree["task"]["class_weights"] = [1.0, 5.0]
    assert ready(tree, tmp_path).train.batch(np.arange(2))["weights"].tolist() == [5.0, 1.0]


def test_evaluation_is_not_weighted(tmp_path: Path) -> None:
    source, tokenizer = save_pairs(tmp_path), save_tokenizer(tmp_path / "tokenizer")
    found = []
    for weights in (None, [1.0, 9.0]):
        tree = job(source, tokenizer, optim={"lr": 1e-12}, length={"steps": 1}, task={"class_weights": weights})
        tree["output"] = {"dir": str(tmp_path / f"run{bool(weights)}")}
        tree["data"]["cache_dir"] = str(tmp_path / "cache")
        found.append(run_here(tree).results)
    assert found[0]["validation_loss"] == pytest.approx(found[1]["validation_loss"], rel=1e-6)
    assert found[0]["first_loss"] * 1.2 < found[1]["first_loss"]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({**TASK, "class_weights": [1.0, 2.0, 3.0]}, r"got 3 weights for 2 classes.* order: other, same"),
        ({**TASK, "class_weights": [1.0, 0.0]}, r"task\.class_weights.*one number above 0 for each"),
        ({**TASK, "class_weights": "balance"}, r"task\.class_weights"),
        ({**TASK, "class_weights": "balanced", "loss": "own_task:smoothed"}, r"your own `task\.loss` weighs"),
        ({"name": "causal_lm", "class_weights": "balanced"}, "causal_lm has no classes; remove it"),
        ({"name": "own_task:mlp", "class_weights": "balanced"}, "builds its own rows, and weighs classes in its own"),
    ],
)
def test_weights_that_cannot_be(tmp_path: Path, task: dict[str, Any], said: str) -> None:
    tree = job(save_pairs(tmp_path), save_tokenizer(tmp_path / "tokenizer"))
    if task["name"] == "causal_lm":
        tree["data"]["train"][0].pop("pair_field")
    with pytest.raises(RecipeError, match=said):
        ready({**tree, "task": task}, tmp_path)


# ---------------------------------------------------------------- pairs


@pytest.mark.parametrize("length", [24, 11, 5])
def test_rows_are_what_transformers_makes_of_pairs(tmp_path: Path, length: int) -> None:
    """In both sides of the split, with copies, and truncated by its rule."""
    source = {**save_pairs(tmp_path), "weight": 2.0}
    place = save_tokenizer(tmp_path / "tokenizer")
    data = ready(job(source, place, data={"sequence_length": length, "train": [source]}), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(place)
    wanted: dict[str, int] = {}
    for record in records(90):
        # In a list: a text alone that is empty is no pair to it.
        made = tokenizer([record["premise"]], [record["claim"]], truncation=True, max_length=length)
        key = json.dumps([made["input_ids"][0], made["token_type_ids"][0], record["kind"]])
        wanted[key] = wanted.get(key, 0) + 1
    found: dict[str, int] = {}
    for copies, rows in ((2, data.train), (1, data.validation)):
        assert rows is not None
        batch = rows.batch(np.arange(len(rows)))
        for ids, types, mask, target in zip(*(batch[name] for name in NAMES), strict=True):
            here = mask == 1
            assert not types[~here].any()
            key = json.dumps([ids[here].tolist(), types[here].tolist(), data.label_names[target]])
            found[key] = found.get(key, 0) + 2 // copies
    assert {key: 2 * count for key, count in wanted.items()} == found
    assert data.train.num_computed(np.arange(2)) == int(data.train.batch(np.arange(2))["attention_mask"].sum())


NAMES = ("input_ids", "token_type_ids", "attention_mask", "targets")


def test_pairs_are_truncated_as_the_tokenizers_library_does(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "tokenizer"))
    for one in range(9):
        for other in range(9):
            for room in range(2, 12):
                texts = [" ".join(WORDS[:one])], [" ".join(WORDS[20 : 20 + other])]
                (ids,) = tokenizer(*texts, truncation=True, max_length=room + 3)["input_ids"]
                kept, then = truncate_pair(one, other, room)
                assert ids == [2, *range(4, 4 + kept), 3, *range(24, 24 + then), 3]


def test_a_classifier_of_pairs_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, evaluated, exported, and opened by transformers alone, which finds the same classes."""
    source = save_pairs(tmp_path)
    tree = job(
        source, save_tokenizer(tmp_path / "tokenizer"), optim={"name": "AdamW", "lr": 1e-2}, length={"steps": 30}
    )
    tree["data"] |= {"validation": [source], "validation_fraction": 0.01, "cache_dir": str(tmp_path / "cache")}
    run = run_here({**tree, "output": {"dir": str(tmp_path / "run")}})
    capsys.readouterr()
    assert main.main(["eval", str(run.directory), "--data", source["path"], "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["classes"] == run.results["classes"]
    assert figures["loss"] == pytest.approx(run.results["validation_loss"], abs=1e-5)
    assert main.main(["predict", str(run.directory), source["path"]]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    network = AutoModelForSequenceClassification.from_pretrained(run.directory / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "model")
    for record, line in zip(records(90), found, strict=True):
        options = {"truncation": True, "max_length": 24, "return_tensors": "pt"}
        with torch.no_grad():
            shares = network(**tokenizer([record["premise"]], [record["claim"]], **options)).logits.softmax(-1)[0]
        assert list(line["probabilities"].values()) == pytest.approx(shares.tolist(), abs=1e-4)
    fields = ["--text-field", "premise", "--pair-field", "claim"]
    assert main.main(["predict", str(run.directory / "model"), source["path"], *fields]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # It knows 24 positions.
    assert [line["prediction"] for line in again] == [line["prediction"] for line in found]
    assert main.main(["export", str(run.directory), "--as", "merged"]) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": {"name": "causal_lm", "class_weights": None}}, "data: `pair_field` .* causal_lm reads one text"),
        ({"data": {"validation": [{"sample": 9}]}}, "some sources have a `pair_field` and some have none"),
        ({"source": {"pair_field": "hypothesis"}}, "no field 'hypothesis'; the fields are .* source's `pair_field`"),
        ({"source": {"pair_field": "number"}}, "the field 'number' holds .* as `pair_field`"),
    ],
)
def test_pairs_that_cannot_be(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    source = {**save_pairs(tmp_path), **changes.pop("source", {})}
    if source["pair_field"] == "number":
        Path(source["path"]).write_text(json.dumps({"premise": "w1", "number": 3, "kind": "same"}))
    tree = job(source, save_tokenizer(tmp_path / "tokenizer"), **changes)
    with pytest.raises((RecipeError, DataError)) as caught:
        ready(tree, tmp_path)
    assert re.search(said, str(caught.value)), caught.value
