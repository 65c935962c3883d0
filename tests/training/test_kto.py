"""Learning from answers with a label: KTO with a baseline over the global batch, the same however a batch is split."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import plain_preferences
import pytest
from harness import Launcher, assert_same_path
from inside import run_here
from recipes_for_tests import base
from testdata import MODEL

from finetune.models.forward_wrapper import unwrap
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import FinetuneError

BOTH = {"loss": ["kto", "apo_zero_unpaired"], "loss_weights": [1.0, 0.5], "beta": 0.3}
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}


def job(micro_size: int = 4, **sections: Any) -> dict[str, Any]:
    """Four steps of eight answers: of built-in pairs, each half is one."""
    return base(
        task={"name": "kto"},
        **{
            "model": {"name": MODEL, "config": None},
            "tokenizer": {"name": None},
            "data": {"train": [{"sample": 36}], "validation": [{"sample": 5}], "sequence_length": 512},
            "chat": {"template": "plain"},
            "preference": {**BOTH, **WEIGHTS},
            "batch": {"global_size": 8, "micro_size": micro_size},
            "length": {"steps": 4},
            "optim": {"name": "AdamW", "lr": 1e-3, "weight_decay": 0.0, "clip_norm": None, "args": {"eps": 1e-6}},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "eval": {"every_steps": 2, "micro_size": 3},
            **sections,
        },
    )


LAUNCHED_RUNS = {
    "single": {"kto": job(), "kto_of_1": job(micro_size=1)},
    "ddp": {"kto": job()},
    "fsdp": {"kto": job()},
    "sp": {"kto": job()},
}
FIGURES = {"kto", "apo_zero_unpaired", "kl", "rewards/margins"}
FIGURES |= {f"{of}/{half}" for of in ("rewards", "logps") for half in ("chosen", "rejected")}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(config, name, marks=pytest.mark.xdist_group(config))
        for config, name in (("single", "kto_of_1"), ("ddp", "kto"), ("fsdp", "kto"), ("sp", "kto"))
    ],
)
def test_answers_take_the_single_process_path(launcher: Launcher, config: str, name: str) -> None:
    single = launcher.many("single", LAUNCHED_RUNS["single"])["kto"].check()
    other = launcher.many(config, LAUNCHED_RUNS[config])[name].check()
    assert_same_path(single, other, 2e-5)
    evaluated = {f"validation_{figure}" for figure in FIGURES}
    for line, wanted in zip(other.metrics, single.metrics, strict=True):
        for figure in (FIGURES if "grad_norm" in wanted else evaluated) | (evaluated & wanted.keys()):
            assert line[figure] == pytest.approx(wanted[figure], rel=1e-4, abs=1e-5), figure


@pytest.mark.xdist_group("single")
def test_figures_are_means_over_their_answers(launcher: Launcher) -> None:
    run = launcher.many("single", LAUNCHED_RUNS["single"])["kto"].check()
    assert any(line["kl"] > 0 for line in run.steps), "the baseline takes part"
    for line in run.steps:
        assert line["loss"] == pytest.approx(line["kto"] + 0.5 * line["apo_zero_unpaired"], rel=1e-6)
        assert line["rewards/margins"] == pytest.approx(line["rewards/chosen"] - line["rewards/rejected"], abs=1e-6)
    assert run.steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-5), "the model is its own reference"
    assert run.steps[-1]["rewards/margins"] > 0.01


def test_the_base_without_adapters_is_the_same_reference(tmp_path: Path) -> None:
    """In the pass over the window as well, by which the baseline is estimated; and without the policy's noise."""
    runs = []
    for name in ("start", "adapters_off"):
        tree = job(lora={"rank": 2}, preference={**BOTH, "reference": name}, output={"dir": str(tmp_path / name)})
        tree |= {"data": {**tree["data"], "cache_dir": str(tmp_path / "cache")}}
        runs.append(run_here({**tree, "model": {**tree["model"], "neftune_alpha": 5.0}}))
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=1e-6)
    assert len({*runs[0].losses}) == 4


def document(rows: Any, number: int) -> tuple[list[int], list[int]]:
    """Returns the prompt and the answer of a row, the latter up to its last learned token."""
    start, length = int(rows.packed.starts[3 * number]), int(rows.packed.lengths[3 * number]) + 1
    ids, learned = rows.tokens[start : start + length].tolist(), rows.columns["mask"][np.arange(start, start + length)]
    begin, end = int(learned.argmax()), length - int(learned[::-1].argmax())
    assert learned[begin:end].all()
    return ids[:begin], ids[begin:end]


def answer_of(run: BuiltRun, number: int) -> plain_preferences.Labelled:
    """Returns a row, whose mismatched answer is some other row's."""
    rows: Any = run.data.train
    batch = {name: values[0] for name, values in rows.batch(np.array([number])).items()}
    prompt, answer = document(rows, number)
    ids, targets = batch["mismatched_ids"].tolist(), batch["mismatched_targets"]
    mismatched = targets[targets != -100].tolist()
    assert ids[: len(prompt)] == prompt
    assert ids[len(prompt) :][: len(mismatched) - 1] == mismatched[:-1]
    assert any(document(rows, other)[1] == mismatched for other in range(len(rows)) if other != number)
    return plain_preferences.Labelled(prompt, answer, mismatched, bool(batch["desirable"]))


def test_the_path_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """Of torch alone, with padded rows and whole logits, from the paper's formula; 12 steps."""
    plain: list[plain_preferences.Trained] = []

    def meddle(run: BuiltRun) -> None:
        network: Any = copy.deepcopy(unwrap(run.model))
        network.config._attn_implementation = "eager"
        numbers = [np.concatenate(run.feed.micro_batches(step)) for step in range(12)]  # type: ignore[attr-defined]
        batches = [[answer_of(run, int(row)) for row in rows] for rows in numbers]
        keys = {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-6}
        plain.append(plain_preferences.train_kto(network, batches, 0.3, (1.5, 0.5), **keys))

    tree = job(preference={"beta": 0.3, **WEIGHTS}, length={"steps": 12}, output={"dir": str(tmp_path / "run")})
    done = run_here({**tree, "model": {**tree["model"], "loss": "chunked"}}, meddle)
    np.testing.assert_allclose(done.losses, plain[0].losses, rtol=1e-5, atol=1e-6)
    for name, weight in done.weights.items():
        assert (weight - plain[0].weights[name]).norm() <= 1e-4 * weight.norm(), name


def test_mismatched_answers_are_fixed_and_fit_the_row(tmp_path: Path) -> None:
    """Also where the file is in another order of training, another batch, and rows are short."""
    file, kept = tmp_path / "answers.jsonl", []
    records = [
        {"prompt": "x" * number, "completion": "y" * (32 - number), "label": not number % 3} for number in range(1, 31)
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {**job()["data"], "train": [{"path": str(file)}], "validation": [], "sequence_length": 40}
    data |= {"cache_dir": str(tmp_path / "cache")}
    for name, sections in {"one": {}, "two": {"seed": 8, "batch": {"global_size": 4, "micro_size": 2}}}.items():
        tree = job(data=data, chat=None, length={"steps": 1}, output={"dir": str(tmp_path / name)}, **sections)
        run_here(tree, lambda run: kept.append(run.data.train))
    one, two = ({k: v for k, v in rows.batch(np.arange(len(rows))).items() if k != "reference"} for rows in kept)
    assert all((one[name] == two[name]).all() for name in one)
    starts, lengths = (values.reshape(-1, 3) for values in (kept[0].packed.starts, kept[0].packed.lengths))
    begins = starts[:, 0] + lengths[:, 1]
    assert (starts[:, 2] != begins).all()
    assert sorted(starts[:, 2]) == sorted(begins), "each answer is the mismatched one of one other row"
    whole = dict(zip(begins.tolist(), (lengths[:, 0] - lengths[:, 1]).tolist(), strict=True))
    fitting = np.minimum([whole[begin] for begin in starts[:, 2].tolist()], 40 - lengths[:, 1])
    assert lengths[:, 2].tolist() == fitting.tolist()
    cut = (fitting == 40 - lengths[:, 1]).sum()
    assert 0 < cut < len(kept[0])
    assert one["mismatched_ids"].shape[1] == 40
    assert kept[0].counts(np.arange(3)) == {"answers": 3, "desirable": 1, "undesirable": 2}


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"prompt": "a", "completion": "b", "label": True}] * 2, "data.train: all 2 answers are desirable"),
        ([{"prompt": "a", "completion": "b", "label": "perhaps"}], "'label' is 'perhaps'"),
        ([{"prompt": "a", "completion": "", "label": True}], "the answer is empty"),
    ],
)
def test_bad_answers_are_refused(records: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=re.escape(words)):
        _run(records, tmp_path)


def test_pairs_are_not_learned_from_labels(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=re.escape("line 1: this is one answer with a label")):
        _run([{"prompt": "a", "completion": "b", "label": True}], tmp_path, task={"name": "dpo"}, preference=None)


def _run(records: list[dict[str, Any]], folder: Path, **sections: Any) -> None:
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {**job()["data"], "train": [{"path": str(file)}], "validation": []}
    run_here({**job(data=data), "output": {"dir": str(folder / "run")}, **sections})
