"""Learning from pairs of answers: the losses of the papers, the same however a batch is split, on every backend."""

import copy
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plain_preferences
import pytest
import torch
from harness import Launcher, Result, assert_same_path
from inside import run_here, stop_after
from recipes_for_tests import base
from testdata import MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.config.preference_losses import LOSSES
from finetune.config.recipe import validate_recipe
from finetune.distributed.backend import Backend
from finetune.models.forward_wrapper import ForwardWrapper, unwrap
from finetune.tasks.task import Reference
from finetune.tasks.task_lookup import BUILT_IN
from finetune.training.built_run import BuiltRun
from finetune.training.reference_scores import join_without_adapters
from finetune.utils.errors import FinetuneError, RecipeError


def job(task: str = "dpo", micro_size: int = 4, **sections: Any) -> dict[str, Any]:
    """Five steps of eight pairs of built-in answers, a little more than an epoch."""
    return base(
        task={"name": task},
        **{
            "model": {"name": MODEL, "config": None},
            "tokenizer": {"name": None},
            "data": {"train": [{"sample": 36}], "validation": [{"sample": 10}], "sequence_length": 512},
            "chat": {"template": "plain"},
            "batch": {"global_size": 8, "micro_size": micro_size},
            "length": {"steps": 5},
            "optim": {"name": "AdamW", "lr": 2e-3, "weight_decay": 0.0, "clip_norm": None, "args": {"eps": 1e-6}},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "eval": {"every_steps": 3, "micro_size": 3},
            **sections,
        },
    )


MIXED = {"loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3}
# Each is a term of its own, logged by its name.
EVERY = {"loss": [*LOSSES["dpo"]], "beta": 0.3, "label_smoothing": 0.1}
RUNS = {
    "every": job(preference=EVERY),
    "adapted": job(lora={"rank": 4}, checkpoint={"every_steps": 3, "keep": 2}),
    "cpo": job("cpo", preference={"loss": [*LOSSES["cpo"]], "label_smoothing": 0.1}),
    "simpo": job("simpo", preference={"beta": 2.0, "gamma": 1.0, "sft_weight": 0.1}),
    "orpo": job("orpo"),
    "less_tail": job(preference={"ld_alpha": 0.25}),
}
ONES = {"every_of_1": job(micro_size=1, preference=EVERY)}
ON = {
    "single": [*RUNS],
    "ddp": [*RUNS],
    "fsdp": ["every", "adapted"],
    "zero2": ["every"],
    "zero3": ["every", "adapted"],
    "fsdp_tp": ["every"],
    "sp": ["every", "cpo", "less_tail"],
}
LAUNCHED_RUNS = {config: {f"pairs_{name}": RUNS[name] for name in names} for config, names in ON.items()}
REFERENCES = {
    config: {
        # No pair is as long as these, by which the cached scores of one launch are not another's.
        f"{name}_reference": job(
            micro_size=2,
            data={**job()["data"], "sequence_length": most},
            lora={"rank": 4},
            preference={"reference": of},
        )
        for name, of in {"live": "adapters_off", "named": {"name": MODEL}}.items()
    }
    for config, most in {"single": 504, "ddp": 496, "fsdp": 488, "zero3": 480, "fsdp_tp": 472, "sp": 464}.items()
}
for config, runs in REFERENCES.items():
    LAUNCHED_RUNS[config] |= runs
LAUNCHED_RUNS["single"] |= ONES


def assert_same_pairs(one: Result, other: Result) -> None:
    """Losses, norms, weights and every figure of steps and evaluations agree."""
    assert_same_path(one, other, 2e-5)
    for line, wanted in zip(other.metrics, one.metrics, strict=True):
        for name in (key for key in wanted if "/" in key or key in EVERY["loss"] or key.startswith("validation_")):
            # In the first step both are the reference, but for rounding.
            if not (name == "rewards/accuracies" and line["step"] == 1):
                assert line[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(config, name, marks=pytest.mark.xdist_group(config))
        for config, names in ON.items()
        for name in names
        if config != "single"
    ],
)
def test_pairs_take_the_single_process_path(launcher: Launcher, config: str, name: str) -> None:
    single, other = (launcher.many(kind, LAUNCHED_RUNS[kind])[f"pairs_{name}"].check() for kind in ("single", config))
    assert_same_pairs(single, other)


@pytest.mark.xdist_group("single")
def test_micro_batches_change_no_loss(launcher: Launcher) -> None:
    runs = launcher.many("single", LAUNCHED_RUNS["single"])
    whole = runs["pairs_every"].check()
    assert_same_pairs(whole, runs["every_of_1"].check())
    first = whole.steps[0]
    assert first["sigmoid"] == pytest.approx(np.log(2), rel=1e-6)
    assert first["loss"] == pytest.approx(sum(first[name] for name in EVERY["loss"]), rel=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5), "the model is its own reference"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(config, name, marks=pytest.mark.xdist_group(config))
        for config, runs in REFERENCES.items()
        for name in runs
    ],
)
def test_every_reference_gives_the_same_losses(launcher: Launcher, config: str, name: str) -> None:
    """The model as training begins, once and cached; the base, in each step; and a second network of the same files."""
    runs = launcher.many(config, LAUNCHED_RUNS[config])
    other, kept = runs[name].check(), launcher.many("single", LAUNCHED_RUNS["single"])["pairs_adapted"].check()
    assert_same_pairs(kept, other)
    if "pairs_adapted" in LAUNCHED_RUNS[config]:
        for key in ("loss", "grad_norm", "validation_loss"):
            here = [[line[key] for line in run.metrics if key in line] for run in (runs["pairs_adapted"], other)]
            np.testing.assert_allclose(here[1], here[0], rtol=1e-6, atol=1e-6)


def first_steps(run: BuiltRun, count: int) -> Iterator[list[plain_preferences.Pair]]:
    """Yields the pairs of a run's first global batches, as ids of prompts and answers."""
    for step in range(count):
        rows = np.concatenate(run.feed.micro_batches(step))  # type: ignore[attr-defined]
        yield [pair_of(run, int(row)) for row in rows]


def pair_of(run: BuiltRun, row: int) -> plain_preferences.Pair:
    rows: Any = run.data.train
    halves = []
    for segment in (2 * row, 2 * row + 1):
        start, length = int(rows.packed.starts[segment]), int(rows.packed.lengths[segment]) + 1
        ids, learned = rows.tokens[start : start + length], rows.columns["mask"][np.arange(start, start + length)]
        begin = int(learned.argmax())
        assert learned[begin : begin + int(learned.sum())].all()
        halves.append((ids[:begin].tolist(), ids[begin : begin + int(learned.sum())].tolist()))
    assert halves[0][0] == halves[1][0], "one prompt"
    return plain_preferences.Pair(halves[0][0], halves[0][1], halves[1][1])


@pytest.mark.parametrize(
    ("sft_weight", "weighted"), [(0.0, False), (0.5, False), (0.5, True)], ids=["", "sft", "sft_weighted"]
)
def test_the_path_is_that_of_a_plain_loop(sft_weight: float, weighted: bool, tmp_path: Path) -> None:
    """Of torch alone, with padded rows and whole logits, from the paper's formula; 20 steps."""
    preference = {**MIXED, "loss_weights": [1.0, sft_weight]} if sft_weight else {"beta": 0.3}
    preference["use_weighting"] = weighted
    plain: list[plain_preferences.Trained] = []

    def meddle(run: BuiltRun) -> None:
        network: Any = copy.deepcopy(unwrap(run.model))
        network.config._attn_implementation = "eager"
        keys: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.0, "eps": 1e-6}
        pairs = [*first_steps(run, 20)]
        keys |= {"sft_weight": sft_weight, "weighted": weighted}
        plain.append(plain_preferences.train_dpo(network, pairs, 0.3, **keys))

    tree = job(preference=preference, length={"steps": 20}, output={"dir": str(tmp_path / "run")})
    done = run_here({**tree, "model": {**tree["model"], "loss": "chunked"}}, meddle)
    np.testing.assert_allclose(done.losses, plain[0].losses, rtol=1e-5, atol=1e-6)
    # Of weights whose gradient is almost nothing, Adam's steps follow rounding.
    for name, weight in done.weights.items():
        assert (weight - plain[0].weights[name]).norm() <= 1e-4 * weight.norm(), name


def test_tokens_beyond_the_shorter_answer_count_less(tmp_path: Path) -> None:
    """LD-DPO, in the policy's sums and in the reference's."""

    def meddle(run: BuiltRun) -> None:
        rows: Any = run.data.train
        network: Any = unwrap(run.model)
        with torch.no_grad():
            for row in range(6):
                pair = pair_of(run, row)
                shorter = min(len(pair.chosen), len(pair.rejected))
                for half, answer in enumerate((pair.chosen, pair.rejected)):
                    ids = torch.tensor([[*pair.prompt, *answer]])
                    logs = network(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
                    each = logs.gather(1, ids[0, 1:, None])[len(pair.prompt) - 1 :, 0]
                    wanted = each[:shorter].sum() + 0.25 * each[shorter:].sum()
                    assert rows.scores[row, half] == pytest.approx(wanted.item(), rel=1e-5)

    tree = job(preference={"ld_alpha": 0.25}, length={"steps": 1}, output={"dir": str(tmp_path / "run")})
    assert run_here(tree, meddle).losses == [pytest.approx(np.log(2), rel=1e-6)]


def test_the_reference_is_computed_once_and_what_is_damaged_again(tmp_path: Path) -> None:
    def scores(name: str, **sections: Any) -> np.ndarray:
        kept: list[np.ndarray] = []
        tree = job(data={**job()["data"], "cache_dir": str(tmp_path / "cache")}, length={"steps": 1}, **sections)
        run_here({**tree, "output": {"dir": str(tmp_path / name)}}, lambda run: kept.append(run.data.train.scores))  # type: ignore[union-attr]
        return kept[0]

    first = scores("one")
    files = sorted((tmp_path / "cache").glob("reference-*/*.npy"))
    assert len(files) == 2, "one for training, one for validation"
    written = [file.stat().st_mtime_ns for file in files]
    again = scores("two", optim={**job()["optim"], "lr": 1e-2}, batch={"global_size": 4, "micro_size": 2})
    assert np.array_equal(first, again)
    assert [file.stat().st_mtime_ns for file in files] == written
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"\x01")
    files[1].write_bytes(b"")
    mended = scores("three")
    assert np.allclose(first, mended, rtol=1e-6)
    scores("four", preference={"beta": 0.5})
    assert len(list((tmp_path / "cache").glob("reference-*"))) == 2, "the same sums"
    scores("five", lora={"rank": 2})
    assert len(list((tmp_path / "cache").glob("reference-*"))) == 4, "another network has another reference"


def test_a_resumed_run_has_the_reference_that_it_began_with(tmp_path: Path) -> None:
    tree = job(preference=MIXED, checkpoint={"every_steps": 3}, output={"dir": str(tmp_path / "run")})
    tree["data"] = {**tree["data"], "cache_dir": str(tmp_path / "cache")}
    whole = run_here({**tree, "output": {"dir": str(tmp_path / "whole")}})
    run_here(tree, stop_after(3))
    for file in (tmp_path / "cache").glob("reference-*/*.npy"):
        file.unlink()
    resumed = run_here(tree)
    assert resumed.losses[-2:] == whole.losses[-2:]
    assert all(torch.equal(weight, resumed.weights[name]) for name, weight in whole.weights.items())


def moved(folder: Path, changes: float = 0.1) -> str:
    """The model with other weights."""
    network: Any = AutoModelForCausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        for weight in network.parameters():
            weight += changes * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return str(folder)


def test_another_model_is_the_reference_and_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Any]] = []
    hold = Backend.hold_frozen

    def noted(self: Backend, model: Any) -> Any:
        held.append(weakref.ref(model))
        network = hold(self, model)
        assert not any(p.requires_grad for p in network.parameters())
        size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
        assert self.memory(self.model, 8.0, [network]).frozen - self.memory(self.model, 8.0).frozen == size > 490_000
        return network

    monkeypatch.setattr(Backend, "hold_frozen", noted)
    network: Any = AutoModelForCausalLM.from_pretrained(moved(tmp_path / "other"), attn_implementation="eager")

    def meddle(run: BuiltRun) -> None:
        rows: Any = run.data.train
        pairs = [pair_of(run, row) for row in range(4)]
        with torch.no_grad():
            wanted = plain_preferences.both_answers(network, pairs).T
        np.testing.assert_allclose(rows.scores[:4], wanted, rtol=1e-5)

    tree = job(preference={"reference": {"name": str(tmp_path / "other")}}, length={"steps": 1})
    tree["data"] = {**tree["data"], "cache_dir": str(tmp_path / "cache")}
    run_here({**tree, "output": {"dir": str(tmp_path / "one")}}, meddle)
    assert [reference() for reference in held] == [None]
    run_here({**tree, "output": {"dir": str(tmp_path / "two")}}, meddle)
    assert len(held) == 1, "nothing was left to compute"
    moved(tmp_path / "other", 0.2)
    with pytest.raises(RecipeError, match=re.escape("preference.reference.name: other content")):
        run_here({**tree, "length": {"steps": 2}, "output": {"dir": str(tmp_path / "two")}})


def test_a_reference_has_the_vocabulary_of_the_data(tmp_path: Path) -> None:
    folder = moved(tmp_path / "other")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    tree = job(preference={"reference": {"name": folder}}, output={"dir": str(tmp_path / "run")})
    with pytest.raises(RecipeError, match=r"preference.reference: .* has another vocabulary .* 1 tokens differ"):
        run_here(tree)


def test_what_else_is_trained_takes_the_base_away() -> None:
    network = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)})
    model, reference = ForwardWrapper(torch.nn.ModuleDict({"layer": network})), Reference(lambda network, batch: batch)
    with pytest.raises(RecipeError, match=r"2 parameters beside adapters are trained, such as layer.norm.weight"):
        join_without_adapters(model, reference)
    network["norm"].requires_grad_(False)
    join_without_adapters(model, reference)


def test_weights_of_another_task_are_no_reference(tmp_path: Path) -> None:
    """They would be trained on, while pairs were compared with the base below them."""
    short = {"length": {"steps": 1}, "lora": {"rank": 2}, "checkpoint": {"every_steps": 1}}
    run_here(job("kto", **short, output={"dir": str(tmp_path / "one")}))
    resume = {"mode": str(tmp_path / "one"), "allow": ["task", "data"]}
    with pytest.raises(RecipeError, match="is of another task, and dpo compares with the model as training begins"):
        run_here(job(**{**short, "length": {"steps": 2}}, resume=resume, output={"dir": str(tmp_path / "two")}))


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"lora": {"rank": 4}}, id="adapters"),
        pytest.param({"preference": {"loss": ["sigmoid", "aot"]}}, id="base"),
        pytest.param({"preference": {"reference": {"name": ""}}, "lora": {"rank": 4}}, id="named"),
        pytest.param({"task": "kto", "lora": {"rank": 4, "save_modules": ["norm"]}}, id="kto"),
    ],
)
def test_new_data_is_compared_with_the_runs_reference(
    sections: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the network without its adapters, the base that the run began from, or the model that the recipe names."""
    named = sections.get("preference", {}).get("reference")
    if named is not None:
        sections = {**sections, "preference": {"reference": {"name": moved(tmp_path / "other")}}}
    base_model = moved(tmp_path / "base", 0.05)
    lines = [
        json.dumps({"prompt": f"Is {n} odd?", "chosen": "Yes." * n, "rejected": "No, it is."}) for n in range(1, 7)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    tree = job(**{"length": {"steps": 3}, "output": {"dir": str(tmp_path / "run")}, **sections})
    tree["model"] = {"name": base_model}
    tree["data"] = {**tree["data"], "validation": [{"path": str(tmp_path / "pairs.jsonl")}]}
    done = run_here(tree)
    assert main.main(["eval", str(tmp_path / "run"), "--data", str(tmp_path / "pairs.jsonl"), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    for name in ("loss", "rewards/margins", "logps/chosen"):
        assert results[name] == pytest.approx(done.results[f"validation_{name}"], rel=1e-5, abs=1e-6), name
    assert abs(results["rewards/margins"]) > 1e-4
    assert main.main(["eval", str(tmp_path / "run"), "--data", str(tmp_path / "pairs.jsonl")]) == 0
    assert f"rewards/margins {results['rewards/margins']:.4f}" in capsys.readouterr().out
    if named is None and "adapters" not in str(tmp_path):
        moved(tmp_path / "base", 0.2)
        assert main.main(["eval", str(tmp_path / "run"), "--data", str(tmp_path / "pairs.jsonl")]) != 0
        assert "other content" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"preference": {"loss": ["sigmoidal"]}}, "preference.loss names sigmoidal"),
        ({"preference": {"loss": ["exo_pair"]}}, "exo_pair takes the logarithm"),
        ({"preference": {"loss": ["robust"], "label_smoothing": 0.5}}, "label_smoothing is 0.5"),
        ({"data": {**job()["data"], "packing": "padded"}}, "set `documents`"),
        ({"chat": {"template": "plain", "train_on": "all"}}, "train_on: all"),
        ({"task": {"name": "causal_lm"}, "preference": {}}, "learns no preferences"),
        ({"task": {"name": "cpo"}, "preference": {"reference": {"name": MODEL}}}, "reference is no key of task cpo"),
        ({"preference": {"reference": "adapters_off"}}, "has no `lora` section"),
        ({"preference": {"reference": "adapters_off"}, "lora": {"save_modules": ["norm"]}}, "computed once and cached"),
        ({"preference": {"reference": "adapters_off"}, "lora": {"init": "pissa"}}, "out of the base"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        validate_recipe({**job(), **sections}, tasks=BUILT_IN)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both answers are the same"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "the answer is empty"),
        ({"prompt": "a", "chosen": "b"}, "preference has `chosen` and `rejected`"),
    ],
)
def test_bad_pairs_are_refused_by_row(record: dict[str, str], words: str, tmp_path: Path) -> None:
    good = {"prompt": "What is it?", "chosen": "A fox.", "rejected": "It is a fox."}
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (good, record)))
    data = {**job()["data"], "train": [{"path": str(file)}], "validation": []}
    with pytest.raises(FinetuneError, match="line 2.*" + re.escape(words)):
        run_here({**job(data=data), "output": {"dir": str(tmp_path / "run")}})


def test_texts_without_turns_are_pairs_too(tmp_path: Path) -> None:
    """Where tokens of prompt and answer merge, the answer begins with the token that holds both."""
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "Once upon a ti", "chosen": "me there was", "rejected": "ger"}) + "\n")
    tree = job(data={**job()["data"], "train": [{"path": str(file)}], "validation": []}, chat=None, length={"steps": 1})
    rows: list[Any] = []
    run_here(
        {**tree, "batch": {"global_size": 1, "micro_size": 1}, "output": {"dir": str(tmp_path / "run")}}, rows.append
    )
    report = rows[0].data.report["train"]
    assert report["chat"]["shared"] == 1
    assert report["pairs"]["pairs"] == 1
