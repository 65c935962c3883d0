"""Where a run resumes, and when it refuses to; that nothing is done twice, and that a folder has one run at a time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_task
import pytest
import torch
import yaml
from harness import ROOT, environment, read_lines
from inside import Crash, Done, copy, crash_after, forge, forge_state, mlp, run_here, stop_after

from finetune.checkpoint import run_directory
from finetune.checkpoint.run_history import read_run
from finetune.diagnostics.parity.compare import compare_runs, read_finished
from finetune.diagnostics.watch_and_list import list_runs
from finetune.export import find_weights
from finetune.utils.errors import CheckpointError, RecipeError

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("resume")]


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    """All that a run has written."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def same_end(done: Done, straight: Done, first: int = 1) -> None:
    assert done.steps == list(range(first, 21))
    assert done.losses == straight.losses[first - 1 :]
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)


# ---------------------------------------------------------------- the modes


@pytest.mark.parametrize("mode", ["auto", "never"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_fresh_folder_starts(tmp_path: Path, straight: Done, mode: str, empty: bool) -> None:
    if empty:
        (tmp_path / "run").mkdir()
    done = run_here(mlp(tmp_path / "run", resume={"mode": mode}))
    same_end(done, straight)
    assert [start["resumed_from"] for start in done.facts["starts"]] == [None]


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_a_stopped_run_goes_on(stopped: Path, tmp_path: Path, straight: Done, mode: str) -> None:
    directory = copy(stopped, tmp_path / "run")
    done = run_here(mlp(directory, resume={"mode": mode}))
    same_end(done, straight)
    assert "resumed at step 12 from" in done.said
    assert [start["from_step"] for start in done.facts["starts"]] == [0, 12]
    assert "stopped" not in done.facts


def test_modes_that_refuse(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for mode, folder, says in (
        ("must", tmp_path / "empty", r"resume=must, but .*empty holds no checkpoint"),
        ("must", tmp_path / "nowhere", r"resume=must, but .*nowhere holds no checkpoint"),
        ("never", stopped, r"already holds a run, and resume=never"),
        (str(tmp_path / "nowhere"), tmp_path / "run", r"there is no checkpoint, and no run with one"),
        (str(tmp_path / "empty"), tmp_path / "run", r"there is no checkpoint, and no run with one"),
        (str(stopped / "run.json"), tmp_path / "run", r"there is no checkpoint, and no run with one"),
        (str(stopped / "checkpoints"), tmp_path / "run", r"there is no checkpoint, and no run with one"),
        ("atuo", tmp_path / "run", r"resume=atuo: there is no checkpoint"),
    ):
        before = content(stopped)
        with pytest.raises(RecipeError, match=says):
            run_here(mlp(folder, resume={"mode": mode}))
        assert content(stopped) == before


@pytest.mark.parametrize("at_end", [True, False])
def test_a_finished_run_has_nothing_to_do(tmp_path: Path, straight: Done, at_end: bool) -> None:
    """Also where its last checkpoint is not of the last step."""
    tree = mlp(tmp_path / "run", checkpoint={"every_steps": 8, "at_end": at_end})
    first = run_here(tree)
    before = content(first.directory)
    again = run_here(tree)
    assert "Nothing is left to do: this run ended at step 20" in again.said
    assert content(first.directory) == before
    assert again.results["validation_loss"] == first.results["validation_loss"]
    # A longer one goes on.
    longer = run_here({**tree, "length": {"steps": 24}})
    assert longer.steps == list(range(1, 25))
    assert longer.losses[:16] == straight.losses[:16]


@pytest.mark.parametrize("steps", [0, 20])
def test_one_that_left_no_checkpoint(tmp_path: Path, steps: int) -> None:
    tree = mlp(tmp_path / "run", checkpoint={"every_steps": None, "at_end": False}, length={"steps": steps})
    before = content(run_here(tree).directory)
    assert f"this run ended at step {steps}" in run_here(tree).said
    tree["resume"] = {"allow": ["data"]}  # an evaluation has no epochs
    with pytest.raises(RecipeError, match="has ended and left no checkpoint to resume from"):
        run_here({**tree, "length": {"steps": 24}})
    assert content(tmp_path / "run") == before


def test_a_shorter_length_than_was_trained_is_refused(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"is at step 12, but this recipe ends at step 11\. Raise"):
        run_here(mlp(copy(stopped, tmp_path / "run"), length={"steps": 11}))


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("inside", ["", "checkpoints/step-00000010", "checkpoints/step-00000012"])
def test_a_path_begins_a_new_run(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Done, relative: bool, inside: str
) -> None:
    begin = 10 if inside.endswith("10") else 12
    monkeypatch.chdir(tmp_path)
    source = os.path.relpath(stopped, tmp_path) if relative else str(stopped)
    before = content(stopped)
    tree = mlp(Path("new" if relative else tmp_path / "new"), resume={"mode": f"{source}/{inside}"})
    with pytest.raises(Crash):
        run_here(tree, crash_after(13))  # before its own first checkpoint: it begins there again
    assert f"resumed at step {begin} from" in run_here(tree, stop_after(17)).said
    # The same command resumes from its own checkpoints; so does another way to say it.
    tree["resume"]["mode"] = str(stopped) if not inside else tree["resume"]["mode"]
    done = run_here(tree)
    assert "resumed at step 17 from" in done.said
    same_end(done, straight, begin + 1)
    assert content(stopped) == before
    assert "Nothing is left to do" in run_here(tree).said


def test_a_path_into_the_own_folder(stopped: Path, tmp_path: Path, straight: Done) -> None:
    directory = copy(stopped, tmp_path / "run")
    tree = mlp(directory, resume={"mode": str(directory / "checkpoints" / "step-00000010")})
    with pytest.raises(RecipeError, match="holds newer checkpoints, which would be overtaken"):
        run_here(tree)
    tree["resume"]["mode"] = str(directory / "checkpoints" / "step-00000012")
    same_end(run_here(tree), straight)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_path_where_another_run_lies(stopped: Path, tmp_path: Path, checkpoint: bool) -> None:
    """Whether that has a checkpoint by now or not: its metrics and ledger are another run's."""
    with pytest.raises(Crash):
        run_here(mlp(tmp_path / "run"), crash_after(7 if checkpoint else 3))
    before = content(tmp_path / "run")
    with pytest.raises(RecipeError, match="already holds a run, which was not begun from"):
        run_here(mlp(tmp_path / "run", resume={"mode": str(stopped)}))
    assert content(tmp_path / "run") == before


# ---------------------------------------------------------------- other mathematics


@pytest.mark.parametrize("by_path", [True, False])
def test_differences_are_listed_and_allowed_by_name(stopped: Path, tmp_path: Path, by_path: bool) -> None:
    directory = copy(stopped, tmp_path / "run")
    tree = mlp(tmp_path / "new" if by_path else directory, optim={"lr": 0.5, "weight_decay": 0.0}, seed=4)
    tree["resume"] = {"mode": str(directory) if by_path else "auto"}
    before = content(directory)
    listing = r"optim\.lr: 0\.01 there, 0\.5 here; optim\.weight_decay: 0\.1 there, 0\.0 here; seed: 3 there, 4 here\."
    with pytest.raises(RecipeError, match=rf"mathematics differ .*: {listing}.*\[optim\.lr, optim\.weight_decay, seed"):
        run_here(tree)
    tree["resume"]["allow"] = ["optim"]
    with pytest.raises(RecipeError, match=r"recipe's: seed: 3 there, 4 here\. .*resume\.allow=\[seed\]"):
        run_here(tree)
    assert content(directory) == before
    tree["resume"]["allow"] = ["optim", "seed"]
    said = run_here(tree).said
    assert "changed since then, as resume.allow says: optim.lr, optim.weight_decay, seed" in said


def test_another_optimiser_starts_without_a_memory(stopped: Path, tmp_path: Path) -> None:
    tree = mlp(copy(stopped, tmp_path / "run"), optim={"name": "SGD", "lr": 0.001}, resume={"allow": ["optim"]})
    done = run_here(tree)
    assert "optim.name differs: the optimiser starts without its state" in done.said
    assert done.steps == list(range(1, 21))


def test_what_is_no_mathematics_may_change(stopped: Path, tmp_path: Path, straight: Done) -> None:
    """All at once; where no rounding changes, the path is the same to the bit."""
    tree = mlp(
        copy(stopped, tmp_path / "run"),
        log={"every_steps": 1},
        eval={"every_steps": 3, "micro_size": 5},
        checkpoint={"every_steps": 3, "keep": 1, "keep_best_by": None, "asynchronous": False},
        guard={"grace_s": 5.0},
        precision="fp32",
    )
    same_end(run_here(tree), straight)
    other = run_here(mlp(copy(stopped, tmp_path / "other"), batch={"micro_size": 4}))
    assert other.steps == list(range(1, 21))
    torch.testing.assert_close(other.weights, straight.weights, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- nothing twice, nothing again


def test_metrics_have_no_step_twice(tmp_path: Path, straight: Done) -> None:
    """After crashes between checkpoints, with evaluations that will be made again."""
    tree = mlp(tmp_path / "run", eval={"every_steps": 3})
    for step in (9, 8, 14, 19):
        with pytest.raises(Crash):
            run_here(tree, crash_after(step))
    done = run_here(tree)
    same_end(done, straight)
    lines = read_lines(done.directory / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6, 9, 12, 15, 18, 20]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)


def test_no_loader_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step ten million, three steps read the rows of three steps and of the rehearsal that each start makes."""
    tree = mlp(tmp_path / "run", eval={"at_end": False})
    counted: list[int] = []
    batch = own_task.Points.batch
    monkeypatch.setattr(own_task.Points, "batch", lambda self, rows: (counted.append(len(rows)), batch(self, rows))[1])
    run_here(tree, stop_after(3))
    fresh, ahead, near = sum(counted), counted[-1], tmp_path / "run" / "checkpoints" / "step-00000003"
    counted.clear()
    far = near.with_name("step-10000000")
    near.rename(far)
    places = {"step": 10_000_000, "position": 80_000_000, "tokens": 80_000_000}
    forge_state(far, lambda state: state.update(places))
    forge(far, lambda manifest: manifest.update(step=10_000_000))
    done = run_here({**tree, "length": {"steps": 10_000_003}})
    assert "resumed at step 10000000 from" in done.said
    # The one that was stopped may have read a micro-batch ahead.
    assert fresh - ahead <= sum(counted) <= fresh
    assert done.steps[-3:] == [10_000_001, 10_000_002, 10_000_003]


def test_the_best_stays_over_stops(tmp_path: Path) -> None:
    """Training that gets worse: the lowest validation loss is an early one, which no later save pushes out."""
    tree = mlp(
        tmp_path / "run",
        optim={"lr": 30.0},
        schedule={"name": "constant", "warmup_steps": 20},
        eval={"every_steps": 5},
        checkpoint={"every_steps": 5, "keep": 1},
    )
    for step in (7, 12, 18, 20):
        done = run_here(tree, stop_after(step) if step < 20 else None)
        losses = {
            line["step"]: line["validation_loss"]
            for line in read_lines(done.directory / "metrics.jsonl")
            if "validation_loss" in line
        }
        best = min(losses, key=lambda step: losses[step])
        assert done.checkpoints == [f"step-{number:08d}" for number in sorted({best, step})]
    assert best == 5


# ---------------------------------------------------------------- one run at a time

HOLD = """
import sys
from finetune.checkpoint.run_directory import RunDirectory
from finetune.config.recipe import load_recipe
directory = RunDirectory.check(load_recipe(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_start_is_refused(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process holds the folder, by name; once it has ended, by whatever means, the run goes on."""
    directory = copy(stopped, tmp_path / "run")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(mlp(directory)))
    before = content(directory)
    monkeypatch.setattr(run_directory, "_LOCK_PATIENCE_S", 0.1)
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(recipe)], cwd=ROOT, env=environment(), **pipes) as other:
        try:
            assert other.stdout.readline() == "held\n"
            holder = f"process {os.getpid()} on "  # who started last, as `run.json` says
            with pytest.raises(RecipeError, match=rf"{directory} is in use by {holder}.*Wait until that run has ended"):
                run_here(mlp(directory))
            assert content(directory) == before
        finally:
            other.kill()
    assert "resumed at step 12" in run_here(mlp(directory)).said


@pytest.mark.parametrize("done_meanwhile", [True, False])
def test_who_waited_sees_what_was_done_meanwhile(
    tmp_path: Path, straight: Done, stopped: Path, monkeypatch: pytest.MonkeyPatch, done_meanwhile: bool
) -> None:
    """The folder was empty when this start looked first; the other run has gone far before it let the folder go."""
    directory, hold = tmp_path / "run", run_directory._hold

    def late(path: Path) -> Any:
        lock = hold(path)
        shutil.copytree(straight.directory if done_meanwhile else stopped, directory, dirs_exist_ok=True)
        monkeypatch.setattr(run_directory, "_hold", hold)
        return lock

    monkeypatch.setattr(run_directory, "_hold", late)
    done = run_here(mlp(directory))
    assert ("Nothing is left to do" if done_meanwhile else "resumed at step 12") in done.said
    same_end(done, straight)


@pytest.mark.parametrize(
    "damage", [b"{nonsense", b"\0" * 300, b"[" * 100_000, b"[1]", b'{"step": "4"}', b"\xff\xfe", b'{"step": 1e999}']
)
def test_damaged_metrics_are_set_aside(stopped: Path, tmp_path: Path, straight: Done, damage: bytes) -> None:
    """In the place of step 5's line: all others stay, and every reader goes on."""
    directory = copy(stopped, tmp_path / "run")
    file = directory / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b'"step":5,' in line and b"grad_norm" in line)
    file.write_bytes(b"".join([*lines[:place], damage + b"\n", *lines[place + 1 :]]))
    before = read_run(directory)
    assert before.damaged_lines == 1
    done = run_here(mlp(directory))
    assert f"{file}: damaged lines, 1 in all and the first of them line {place + 1}, were moved to" in " ".join(
        done.said.split()
    )
    assert (directory / "metrics.jsonl.damaged").read_bytes() == damage + b"\n"
    assert done.steps == [step for step in range(1, 21) if step != 5]
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)
    assert read_run(directory).damaged_lines == 0
    # A run that has ended stays as it is: what compares it says what it leaves out.
    with file.open("ab") as opened:
        opened.write(damage + b"\n")
    found = read_finished(directory)
    assert found.damaged["metrics.jsonl"] == 1
    assert any("1 damaged line(s)" in note for note in compare_runs(read_finished(straight.directory), found).notes)
    # The list looks at evaluations and the last lines only, and at what is no object.
    assert list_runs(directory)[0].damaged_lines == (0 if damage.startswith(b'{"step"') else 1)


RUN_FILES = {
    "nested": b"[" * 100_000,
    "a list": b"[]",
    "no text": b"\xff\xfe",
    "zeros": b"\0" * 90,
    "starts of another kind": b'{"starts": [3]}',
    "a step in words": b'{"starts": [{"from_step": "0"}]}',
    "a length without steps": b'{"starts": [], "length": {"num_steps": null}}',
    "no starts": b"{}",
}


@pytest.mark.parametrize("name", RUN_FILES)
def test_every_reader_refuses_a_damaged_run_json(stopped: Path, tmp_path: Path, name: str) -> None:
    directory = copy(stopped, tmp_path / "run")
    (directory / "run.json").write_bytes(RUN_FILES[name])
    for use in (read_run, read_finished, find_weights.find_weights, lambda place: run_here(mlp(place))):
        with pytest.raises(CheckpointError, match=r"run\.json cannot be read: "):
            use(directory)
    assert list_runs(directory)[0].status == "unreadable"
