"""What is saved is the state of its step, whatever training does meanwhile; a save that fails is tried again."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import read_lines
from inside import Done, at_step, mlp, run_here, stop_after
from safetensors import safe_open

from finetune.checkpoint import integrity, save_checkpoint, snapshot
from finetune.checkpoint.checkpoint_store import sealed_name, step_of
from finetune.checkpoint.integrity import NewFile
from finetune.checkpoint.save_checkpoint import CheckpointWriter
from finetune.models.forward_wrapper import unwrap
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import CheckpointError

pytestmark = pytest.mark.timeout(120)

ALL = {"every_steps": 5, "keep": 9}


def content(directory: Path) -> dict[str, Any]:
    """Every tensor of every checkpoint, bit by bit, and what else each says that training decides."""
    found: dict[str, Any] = {}
    for folder in sorted((directory / "checkpoints").iterdir()):
        for file in folder.rglob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                tensors = {name: opened.get_tensor(name).numpy().tobytes() for name in opened.keys()}  # noqa: SIM118
            found |= {f"{folder.name}/{file.name}/{name}": value for name, value in tensors.items()}
        state = json.loads((folder / "state.json").read_text())
        found[folder.name] = {key: state[key] for key in ("step", "position", "tokens", "results", "tensors")}
    return found


class Writer:
    """Stands in for `TensorFile`: holds each save back until it may go on, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may = threading.Event(), threading.Event()
        self.errors: dict[int, BaseException] = {}
        self.make = snapshot.TensorFile
        monkeypatch.setattr(snapshot, "TensorFile", self)

    def __call__(self, file: NewFile, tensors: Any) -> Any:
        self.began.set()
        assert self.may.wait(60)
        step = step_of(sealed_name(file.name))
        if step in self.errors:
            raise self.errors[step]
        return self.make(file, tensors)


def written(run: BuiltRun) -> None:
    """Waits for what has been let go on; the next step's agreement then brings the save forward."""
    thread = run.checkpoints._saver._thread
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()


def both(*acts: Callable[[BuiltRun], None]) -> Callable[[BuiltRun], None]:
    def meddle(run: BuiltRun) -> None:
        for act in acts:
            act(run)

    return meddle


def test_what_is_written_behind_the_training_is_what_a_pause_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 5's copy lies in memory while steps 6 to 9 change the weights, and is written only then; likewise on."""
    calm = run_here(mlp(tmp_path / "calm", checkpoint={**ALL, "asynchronous": False}))
    writer = Writer(monkeypatch)
    seen: list[list[str]] = []

    def look(run: BuiltRun) -> None:
        assert writer.began.wait(60)
        seen.append([path.name for path in (run.directory.path / "checkpoints").iterdir() if path.suffix == ""])
        writer.may.set()

    def hold(run: BuiltRun) -> None:
        written(run)
        writer.may.clear()
        writer.began.clear()

    acts = [at_step(step, look) for step in (9, 14, 19)] + [at_step(step, hold) for step in (5, 10, 15)]
    busy = run_here(mlp(tmp_path / "busy", checkpoint=ALL), both(*acts))
    # A save that was not yet written is no checkpoint.
    assert [len(names) for names in seen] == [0, 1, 2]
    assert content(busy.directory) == content(calm.directory)
    assert len(content(calm.directory)) == 4 * (1 + 6 + 6 * 3)
    torch.testing.assert_close(busy.weights, calm.weights, rtol=0, atol=0)


def test_a_save_that_is_due_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(monkeypatch)
    finish, waited = CheckpointWriter.finish, []

    def watched(saver: CheckpointWriter) -> Any:
        if saver.active:
            waited.append((saver._step, saver.busy))
            writer.may.set()
        return finish(saver)

    monkeypatch.setattr(CheckpointWriter, "finish", watched)
    tree = mlp(tmp_path / "run", checkpoint={"every_steps": 1, "keep": 9}, length={"steps": 4})
    done = run_here(tree, lambda run: writer.may.clear())
    assert waited[0] == (1, True)
    assert done.checkpoints == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    assert done.said.count("checkpoint written") == 4


FULL = os.strerror(errno.ENOSPC)
FAILURES = {
    "full": (OSError(errno.ENOSPC, FULL), FULL),
    "without a number": (OSError("the storage sulks"), "the storage sulks"),
    "another library": (Exception(f"{FULL} (os error 28)"), FULL),
}


def undisturbed(done: Done, straight: Done) -> None:
    assert done.losses == straight.losses
    assert done.steps == list(range(1, 21))
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "asynchronous"), [*((name, True) for name in FAILURES), ("full", False)])
def test_a_save_that_fails_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Done, name: str, asynchronous: bool
) -> None:
    error, reason = FAILURES[name]
    writer = Writer(monkeypatch)
    writer.may.set()
    writer.errors[10] = error
    done = run_here(mlp(tmp_path / "run", checkpoint={**ALL, "asynchronous": asynchronous}))
    undisturbed(done, straight)
    assert "The checkpoint of step 10 cannot be written" in done.said
    assert reason in done.said
    assert f"{tmp_path}/run/checkpoints/step-00000005 stays" in done.said
    assert done.checkpoints == ["step-00000005", "step-00000015", "step-00000020"]


@pytest.mark.parametrize("where", ["describe", "seal", "prune"])
def test_so_is_what_fails_later(tmp_path: Path, straight: Done, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Beside the weights, at the manifest, or at an old one; the last is no reason to lose the new one."""
    calls: list[Any] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise Exception(f"{FULL} (os error 28)") if where == "describe" else OSError(errno.ENOSPC, FULL)
        right(*args, **kwargs)

    def describe(run: BuiltRun) -> None:
        run.checkpoints._saver._describe = fail

    right: Callable[..., None] = lambda folder: None  # noqa: E731
    if where != "describe":
        module, name = {"seal": (integrity, "seal_checkpoint"), "prune": (save_checkpoint, "prune_checkpoints")}[where]
        right = getattr(module, name)
        monkeypatch.setattr(module, name, fail)
    done = run_here(mlp(tmp_path / "run", checkpoint=ALL), describe if where == "describe" else None)
    undisturbed(done, straight)
    assert len(calls) == 4
    assert FULL in done.said
    if where == "prune":
        assert "An old checkpoint cannot be deleted" in done.said
        assert len(done.checkpoints) == 4
    else:
        assert "The checkpoint of step 10 cannot be written" in done.said
        assert done.checkpoints == ["step-00000005", "step-00000015", "step-00000020"]


def test_the_last_one_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(monkeypatch)
    writer.may.set()
    writer.errors = {step: OSError(errno.ENOSPC, FULL) for step in (15, 20)}
    tree = mlp(tmp_path / "run")
    with pytest.raises(CheckpointError, match=rf"step 20 cannot be written below .*: {FULL}\. Older.* start the same"):
        run_here(tree)
    assert not (tmp_path / "run" / "model").exists()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000005",
        "step-00000010",
    ]
    writer.errors = {}
    done = run_here(tree)
    assert "resumed at step 10 from" in done.said
    assert done.steps == list(range(1, 21))


@pytest.mark.parametrize("place", ["write", "seal"])
def test_a_fault_of_the_program_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def wrong(*args: Any, **kwargs: Any) -> None:
        raise TypeError("a slip")

    monkeypatch.setattr(*((snapshot, "TensorFile") if place == "write" else (integrity, "seal_checkpoint")), wrong)
    with pytest.raises(TypeError, match="a slip"):
        run_here(mlp(tmp_path / "run"))
    assert [path.suffix for path in (tmp_path / "run" / "checkpoints").iterdir()] == [".staging"]


def test_numbers_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    """The guard keeps them out of the weights. Were it to fail, they would not reach a checkpoint."""

    def spoil(run: BuiltRun) -> None:
        with torch.no_grad():
            next(run.model.parameters()).view(-1)[0] = float("nan")

    with pytest.raises(
        CheckpointError, match=r"step 20 cannot be written below .*: a tensor holds numbers that are not"
    ):
        run_here(mlp(tmp_path / "run"), at_step(20, spoil))
    lines = read_lines(tmp_path / "run" / "ledger.jsonl")
    assert lines[-1]["step"] == 19


MASKED = {"name": "own_task:mlp", "args": {"masked": True}}


def test_buffers_may_hold_infinities_if_they_always_did(tmp_path: Path) -> None:
    """Such as causal masks, which some networks keep among their weights."""
    whole = run_here(mlp(tmp_path / "whole", task=MASKED))
    mask = whole.weights["mask"]
    assert mask.isinf().sum() == 6
    assert whole.checkpoints
    part = run_here(mlp(tmp_path / "part", task=MASKED), stop_after(10))
    assert part.checkpoints
    assert torch.equal(run_here(mlp(tmp_path / "part", task=MASKED)).weights["0.weight"], whole.weights["0.weight"])


@pytest.mark.parametrize(("name", "value"), [("mask", torch.nan), ("scale", torch.inf)])
def test_a_buffer_that_breaks_is_not_saved(tmp_path: Path, name: str, value: float) -> None:
    def spoil(run: BuiltRun) -> None:
        dict(unwrap(run.model).named_buffers())[name].fill_(value)

    tree = mlp(tmp_path, task=MASKED, checkpoint={"every_steps": 5, "at_end": True})
    with pytest.raises(CheckpointError, match="numbers that are not finite") as caught:
        run_here(tree, at_step(3, spoil))
    assert "mend the file system" not in str(caught.value)
    assert "Take a lower optim.lr" in str(caught.value)
