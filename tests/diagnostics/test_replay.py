"""`finetune replay`: a step taken again is the step that was taken, from wherever the weights have to come."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Launcher, Result
from inside import alone, copy, mlp, run_here
from recipes_for_tests import GPT2, base

from finetune.checkpoint.run_facts import Incident
from finetune.cli import main
from finetune.data.rows.row_order import rows_at
from finetune.diagnostics import replay
from finetune.diagnostics.replay import Replayed
from finetune.utils.atomic_files import file_digest
from finetune.utils.console import plain_console
from finetune.utils.errors import CheckpointError, RecipeError

JOB = base(
    model={"config": GPT2},
    length={"steps": 7},
    eval={"at_end": False},
    output={"save_model": False},
    checkpoint={"every_steps": 3, "at_end": False},
)


LAUNCHED_RUNS = {"fsdp": {"replayed": JOB}}


@pytest.fixture(scope="module")
def sharded(launcher: Launcher) -> Result:
    return launcher.many("fsdp", LAUNCHED_RUNS["fsdp"])["replayed"].check()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps in this process, with checkpoints at 15 and 20."""
    return run_here(mlp(tmp_path_factory.mktemp("replay") / "run", task={"args": {"dropout": 0.1}})).directory


def again(directory: Path, step: int) -> Replayed:
    with alone():
        return replay.replay_step(directory, step)


def state(directory: Path) -> dict[str, tuple[str, int]]:
    """Content and time of every file, and of the folders."""
    return {
        str(path): (file_digest(path) if path.is_file() else "", path.stat().st_mtime_ns)
        for path in sorted((directory, *directory.rglob("*")))
    }


@pytest.mark.xdist_group("replay")
@pytest.mark.parametrize(("step", "start"), [(2, "the first ones"), (4, "step-00000003"), (6, "step-00000003")])
def test_a_step_of_two_processes_is_taken_again_by_one(sharded: Result, step: int, start: str) -> None:
    before = state(sharded.directory)
    found = again(sharded.directory, step)
    assert found.differences == []
    assert start in found.start
    assert found.then is not None
    assert found.now["loss"] == pytest.approx(found.then["loss"], rel=1e-6)
    assert found.now["grad_norm"] == pytest.approx(found.then["grad_norm"], rel=1e-5)
    assert found.now["lr"] == found.then["lr"]
    assert found.now["tokens"] == found.then["tokens"]
    assert state(sharded.directory) == before
    # Every row once, with its text, on the rank that it was on.
    assert [where for where, _, _ in found.micro_batches] == [
        "rank 0 of 2, its number 1",
        "rank 1 of 2, its number 1",
        "rank 0 of 2, its number 2",
        "rank 1 of 2, its number 2",
    ]
    rows = [row for _, _, part in found.micro_batches for row in part]
    assert len({row.number for row in rows}) == 8
    assert all(len(row.text) > 20 and row.targets > 0 for row in rows)
    total, targets = sum(loss for _, loss, _ in found.micro_batches), sum(row.targets for row in rows)
    assert total / targets == pytest.approx(found.now["loss"])


@pytest.mark.parametrize("step", [1, 14, 16, 20])
def test_a_step_is_taken_again_to_the_bit(run: Path, step: int) -> None:
    found = again(run, step)
    assert found.holds
    assert found.now == found.then
    assert ("step-00000015" in found.start) == (step > 15)


def test_the_command_says_all_and_ends_in_0(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with alone():
        assert main.main(["replay", str(run), "--step", "17"]) == 0
    said = capsys.readouterr().out
    assert "this is the step that the run took" in said
    assert said.count("\n  row ") == 8
    assert "inputs [" in said


def test_a_step_that_was_not_logged_is_shown_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_here(mlp(tmp_path / "run", length={"steps": 4}, log={"every_steps": 4})).directory
    found = again(directory, 3)
    assert found.holds
    assert found.then is None
    found.print_to(plain_console())
    assert "not logged" in capsys.readouterr().out


def meddle(file: Path, number: int, **values: Any) -> None:
    """Changes the line of a journal that a step has written."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line.get("step") == number:
            line.update(values)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("file", "number", "values", "says"),
    [
        ("metrics.jsonl", 17, {"loss": 0.123}, "loss is"),
        ("metrics.jsonl", 17, {"grad_norm": None}, "grad_norm is"),
        ("metrics.jsonl", 17, {"lr": 1.0}, "lr is"),
        ("metrics.jsonl", 17, {"tokens": 1}, "tokens is"),
        ("ledger.jsonl", 16, {"rows": 1}, "the ledger's checksum"),
    ],
)
def test_another_step_is_told_from_this_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, number: int, values: Any, says: str
) -> None:
    spoiled = copy(run, tmp_path / "run")
    meddle(spoiled / file, number, **values)
    with alone():
        assert main.main(["replay", str(spoiled), "--step", "17"]) == 1
    assert f"DRIFT: {says}" in capsys.readouterr().out


def test_a_recipe_that_was_changed_is_refused(run: Path, tmp_path: Path) -> None:
    spoiled = copy(run, tmp_path / "run")
    recipe = (spoiled / "recipe.yaml").read_text()
    assert "\nseed: 3\n" in recipe
    (spoiled / "recipe.yaml").write_text(recipe.replace("\nseed: 3\n", "\nseed: 4\n"))
    with pytest.raises(RecipeError, match="now gives another"):
        again(spoiled, 17)


def test_a_damaged_checkpoint_is_passed_over(run: Path, tmp_path: Path) -> None:
    spoiled = copy(run, tmp_path / "run")
    tensors = next((spoiled / "checkpoints" / "step-00000015").rglob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    found = again(spoiled, 17)
    assert found.holds
    assert found.start == "the first ones"


def test_an_incident_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row whose loss is not a number: the step was skipped, and the row is named."""
    spoiled = int(rows_at(np.arange(200), num_rows=200, seed=3, epoch_rows=200)[50])
    monkeypatch.setenv("TROUBLE", json.dumps({"loss": {spoiled: "nan"}}))
    job = mlp(tmp_path / "run", task={"name": "troubled_task:mlp"}, eval={"at_end": False})
    directory = run_here(job).directory
    line = json.loads((directory / "incidents.jsonl").read_text())
    assert line["step"] == 50 // 8 + 1
    found = again(directory, line["step"])
    assert found.holds, found.differences
    assert found.now["grad_norm"] is None
    assert found.incident == Incident.from_line(line)
    (bad,) = [row for _, _, part in found.micro_batches for row in part if row.loss != row.loss]
    assert bad.number == spoiled
    found.print_to(plain_console())
    assert "skipped this step" in capsys.readouterr().out
    # Steps after it go on from weights that it did not touch.
    assert again(directory, line["step"] + 1).holds
    monkeypatch.setenv("TROUBLE", "{}")
    healed = again(directory, line["step"])
    assert "the gradient is finite, and was not" in healed.differences


@pytest.mark.parametrize(("step", "says"), [(0, "steps 1 to 20"), (21, "steps 1 to 20")])
def test_a_step_that_was_not_taken_is_refused(run: Path, step: int, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        again(run, step)


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_begun_from_another_needs_its_beginning(run: Path, tmp_path: Path) -> None:
    other = copy(run, tmp_path / "other")
    source = other / "checkpoints" / "step-00000015"
    job = mlp(tmp_path / "next", task={"args": {"dropout": 0.1}}, length={"steps": 22}, resume={"mode": str(source)})
    directory = run_here(job).directory
    found = again(directory, 17)
    assert str(source) in found.start
    assert found.holds
    with pytest.raises(RecipeError, match="steps 16 to 22"):
        again(directory, 15)
    source.rename(other / "elsewhere")
    with pytest.raises(CheckpointError, match="bring that checkpoint back"):
        again(directory, 17)
