"""`batch.micro_size: auto`: the largest that fits, the same on every rank, and the same run as with a number."""

import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import yaml
from external_commands import require_ops
from harness import Launcher, Result, assert_same_path, command, environment, run
from hypothesis import given
from hypothesis import strategies as st
from inside import alone
from ranks import needed_ops
from recipes_for_tests import LLAMA, base
from torch import nn

from finetune.cli import main
from finetune.config.recipe import divisors, validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch, read_launch
from finetune.tasks.task import Batch
from finetune.training import entry_point, micro_batch_search, micro_batch_trial
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun
from finetune.training.micro_batch_search import FULL, next_size
from finetune.utils.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Logits of 16,000 words: 31 MiB a row of 512 tokens, and several times that with the loss.
WIDE = {**LLAMA, "vocab_size": 16_000, "tie_word_embeddings": True}
# Of which what is imported takes a part.
LIMIT = 2_400_000_000


def wide(folder: Path, micro: int | str, rows: int = 64) -> dict[str, Any]:
    return {
        # All logits at once, which is what a row takes.
        "model": {"config": WIDE, "loss": "plain"},
        "tokenizer": {"vocab_size": 512},
        "data": {
            "train": [{"sample": 2000}],
            "validation_fraction": 0.0,
            "sequence_length": 512,
            "packing": "documents",
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_size": rows, "micro_size": micro},
        "length": {"steps": 2},
        "log": {"every_steps": 1},
        "precision": "fp32",
    }


def heavy(folder: Path, rows: int = 8, **args: Any) -> dict[str, Any]:
    return {
        "task": {"name": "heavy_task:heavy", "args": args},
        "data": {"cache_dir": str(folder / "cache")},
        "batch": {"global_size": rows, "micro_size": "auto"},
        "length": {"steps": 2},
        "output": {"dir": str(folder / "run"), "overwrite": True},
        "precision": "fp32",
    }


def launched(tree: dict[str, Any], folder: Path, config: str, name: str, python: str = sys.executable) -> Result:
    tree = {**tree, "output": {"dir": str(folder / name)}}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    code, output = run(command(config, str(file), python=python), env=environment())
    return Result(code, output, folder / name)


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[int], int, dict[int, float]]:
    """Sizes, what a plan says, and the share of the memory that each size really takes."""
    sizes = divisors(draw(st.integers(1, 5000)))
    first = draw(st.sampled_from(sizes))
    base, slope = draw(st.floats(0.0, 1.2)), draw(st.floats(1e-4, 1.0))
    return sizes, first, {size: base + slope * size for size in sizes}


@given(machines(), st.booleans())
def test_the_search_ends_at_the_largest_size_that_fits(
    machine: tuple[list[int], int, dict[int, float]], strict: bool
) -> None:
    sizes, first, shares = machine
    tried: dict[int, float | None] = {}
    while (size := next_size(sizes, first, tried)) is not None:
        assert size in sizes
        assert size not in tried
        # What is over 1 ends without a figure; what is only over the limit may have one.
        tried[size] = shares[size] if shares[size] <= (FULL if strict else 1.0) else None
    fit = [size for size in sizes if shares[size] <= FULL]
    found = [size for size, share in tried.items() if share is not None and share <= FULL]
    assert max(found, default=0) == max(fit, default=0)


@given(machines())
def test_a_good_plan_needs_few_trials(machine: tuple[list[int], int, dict[int, float]]) -> None:
    sizes, _, shares = machine
    fit = [size for size in sizes if shares[size] <= FULL]
    if not fit:
        return
    tried: dict[int, float | None] = {}
    while (size := next_size(sizes, fit[-1], tried)) is not None:
        tried[size] = shares[size] if shares[size] <= 1.0 else None
    # Itself, and at most the next one, which it cannot know to be too much.
    assert len(tried) <= 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher, quick_python: str) -> dict[str, Result]:
    """Under a limit to memory: `auto`, the same again, and the number that it comes to."""
    folder = tmp_path_factory.mktemp("auto")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, before[1]))
    try:
        first = launched(wide(folder, "auto", 32), folder, "fsdp", "first", quick_python).check()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    sizes = {"again": "auto", "number": first.facts["micro_size"]["rows"]}
    others = launcher.many("fsdp", {name: wide(folder, micro, 32) for name, micro in sizes.items()})
    return {"first": first, **{name: other.check() for name, other in others.items()}}


@pytest.mark.xdist_group("micro_size")
def test_the_largest_size_that_fits_is_found_under_the_real_backend(runs: dict[str, Result]) -> None:
    first = runs["first"]
    found = first.facts["micro_size"]
    # Twice as many would not have fitted: each row keeps at least its logits thrice.
    assert 4 <= found["rows"] < 16
    assert found["tried"][str(found["rows"])] <= FULL
    next_one = min(size for size in divisors(16) if size > found["rows"])
    # The next one was tried, or follows from those that were.
    assert found["tried"].get(str(next_one), 1.0) is None or found["tried"].get(str(next_one), 1.0) > FULL
    assert found["room"] == LIMIT
    assert f"batch.micro_size: auto is {found['rows']}" in first.output
    assert yaml.safe_load((first.directory / "recipe.yaml").read_text())["batch"]["micro_size"] == found["rows"]
    assert not (first.directory / ".trials").exists()


@pytest.mark.xdist_group("micro_size")
def test_it_is_found_once(runs: dict[str, Result]) -> None:
    first, again = runs["first"], runs["again"]
    assert "trying" in first.output
    assert "trying" not in again.output
    assert again.facts["micro_size"] == {**first.facts["micro_size"], "known": True}


@pytest.mark.xdist_group("micro_size")
def test_the_path_is_that_of_the_number(runs: dict[str, Result]) -> None:
    assert_same_path(runs["first"], runs["number"], 0.0)
    assert_same_path(runs["again"], runs["number"], 0.0)
    assert runs["number"].facts["micro_size"] == runs["first"].facts["micro_size"]["rows"]
    assert runs["first"].facts["runs"]["accumulation"] * runs["number"].facts["micro_size"] * 2 == 32


@pytest.mark.parametrize("config", ["ddp", "zero2"])
def test_one_rank_without_memory_speaks_for_all(
    tmp_path: Path, launcher: Launcher, quick_python: str, config: str
) -> None:
    require_ops(needed_ops(config))
    tree = heavy(tmp_path, most=3, rank=1)
    # Trials are real launches. Those of a fork under DeepSpeed would not find the task: PYTHONPATH is Accelerate's.
    real = config == "zero2"
    result = (launched(tree, tmp_path, config, "run", quick_python) if real else launcher.one(config, tree)).check()
    # Of 4 rows a rank; 3 does not come out even.
    assert result.facts["micro_size"]["rows"] == 2
    assert result.facts["micro_size"]["tried"]["4"] is None
    assert result.facts["runs"]["accumulation"] == 2


def test_a_trial_reads_the_longest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths: those that a trial computes are the longest, and not whichever come first."""
    tree = wide(tmp_path, 2)
    tree["model"] = {"config": {**WIDE, "vocab_size": 512}}
    tree["data"] |= {"packing": "padded", "sequence_length": 1024, "train": [{"sample": 60}]}
    tree |= {"batch": {"global_size": 4, "micro_size": 2}, "output": {"dir": str(tmp_path / "run")}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    seen, rows = [], []

    def spied(recipe: Recipe, *, quiet: bool) -> BuiltRun:
        run = build_run(recipe, quiet=quiet)
        loss_sum = run.task.loss_sum

        def noted(network: nn.Module, batch: Batch) -> torch.Tensor:
            seen.append(batch)
            return loss_sum(network, batch)

        run.task = replace(run.task, loss_sum=noted)
        rows.append(run.data.train)
        return run

    monkeypatch.setattr(micro_batch_trial, "build_run", spied)
    with alone():
        assert micro_batch_trial.main(str(file), str(tmp_path / "report.json")) == 0
    (read,) = rows
    longest = read.batch(read.longest()[:2])
    # Two steps of two micro-batches.
    assert len(seen) == 4
    for batch in seen:
        torch.testing.assert_close(dict(batch), longest, rtol=0, atol=0)
    ordinary = [read.batch(np.arange(start, start + 2))["input_ids"].shape[1] for start in range(0, len(read) - 1, 2)]
    assert longest["input_ids"].shape[1] > np.median(ordinary)


def planned(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **args: Any) -> str:
    """What is said of a run on one process that ends with an error of the user's."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(heavy(folder, **args)))
    assert entry_point.train_main([str(file), "--quiet"]) == 2
    return capsys.readouterr().err


def test_what_fits_in_no_way_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each size is a launch: two show that the least was tried.
    said = planned(tmp_path, capsys, monkeypatch, rows=2, most=0)
    assert "not even 1 row(s) a forward pass fit" in said
    assert "gradient_checkpointing" in said


def test_a_trial_that_fails_otherwise_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = planned(tmp_path, capsys, monkeypatch, rows=2, most=0, fault="the seventh seal")
    assert "failed with exit code 1" in said
    assert "the seventh seal" in said
    assert "give a number" in said
    assert not (tmp_path / "run" / ".trials").exists()


def of(**sections: Any) -> Recipe:
    return validate_recipe(base(**sections))


def test_what_was_found_is_kept_for_its_kind_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    auto = {"global_size": 8, "micro_size": "auto"}
    one: Launch = read_launch()

    def kept(recipe: Any, asked: Launch = one, digest: str = "a") -> Path:
        return micro_batch_search._kept(recipe, asked, digest)

    first = kept(of(batch=auto))
    assert first == kept(of(batch=auto, seed=7, length={"steps": 9}), digest="b")
    others: Sequence[Path] = [
        kept(of(batch={**auto, "global_size": 16})),
        kept(of(batch=auto, optim={"name": "SGD"})),
        kept(of(batch=auto, lora={"rank": 4})),
        kept(of(batch=auto, data={**base()["data"], "sequence_length": 48})),
        kept(of(batch=auto), Launch(kind="fsdp", num_processes=2)),
    ]
    assert len({first, *others}) == 1 + len(others)
    padded = of(batch=auto, data={**base()["data"], "packing": "padded"})
    assert kept(padded, digest="a") != kept(padded, digest="b")


def test_what_cannot_be_read_is_tried_again(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"rows": 4}', '{"rows": 4, "room": 1, "tried": {"8": 0.5}}'):
        file = tmp_path / "kept.json"
        file.write_text(text)
        assert micro_batch_search._read(file, 1 << 40) is None


def test_what_was_found_must_fit_the_memory_of_today(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    found = {"rows": 4, "room": 1000, "tried": {"4": 0.46, "8": None}}
    file.write_text(json.dumps(found))
    assert micro_batch_search._read(file, 1000) == found
    assert micro_batch_search._read(file, 500) == found
    assert micro_batch_search._read(file, 499) is None


def test_an_evaluation_has_nothing_to_try() -> None:
    with pytest.raises(RecipeError, match=r"micro_size: `auto` tries training steps, and length.steps is 0"):
        of(batch={"micro_size": "auto"}, length={"steps": 0})


def test_the_other_verbs_take_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**wide(tmp_path, "auto"), "output": {"dir": str(tmp_path / "run")}}))
    assert main.main(["explain", str(file), "batch.micro_size", "accumulation", "--json"]) == 0
    assert {value["value"] for value in json.loads(capsys.readouterr().out)} == {"auto"}
    assert main.main(["plan", str(file), "--json"]) == 0
    # Of 64 rows on 8 ranks all 8 fit a large GPU.
    assert json.loads(capsys.readouterr().out)["first_size"] == 8
    assert main.main(["plan", str(file), "--gpu", "memory=1.7,bf16=70"]) == 0
    first = int(re.findall(r"trials begin with (\d+)", capsys.readouterr().out)[0])
    assert 1 <= first < 8
    assert entry_point.train_main([str(file), "--dry-run"]) == 0
    assert "64 rows = 1 x auto" in capsys.readouterr().out
