"""Which checkpoints stay: the newest and the best of the whole ones, and never less than one."""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, WAIT_S, environment
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import OneRank, mlp, run_here, stop_after

from finetune.checkpoint import integrity, resume_point
from finetune.checkpoint.checkpoint_store import UNSEALED, CheckpointStore, name_of, step_of
from finetune.checkpoint.save_checkpoint import prune_checkpoints
from finetune.utils.errors import CheckpointError


def make(root: Path, step: int, loss: float | None = None) -> Path:
    """A small whole checkpoint."""
    root.mkdir(exist_ok=True)
    store, name = CheckpointStore(root), name_of(step) + UNSEALED
    state = {key: kind() for key, kind in integrity._STATE_SHAPE.items()} | {
        "step": step,
        "tensors": {},
        "validation_loss": loss,
    }
    files = integrity.put_file(store, name, "state.json", json.dumps(state).encode())
    evaluated = dict.fromkeys(("validation_loss", "validation_wer", "validation_f1"), loss)
    integrity.seal_checkpoint(store, name, files, {"step": step, **evaluated})
    return root / name_of(step)


def left(root: Path) -> list[int]:
    return [step_of(name) or 0 for name in CheckpointStore(root).list_names()]


@settings(max_examples=60)
@given(
    losses=st.lists(st.none() | st.floats(0, 9) | st.sampled_from([1.0, math.nan]), min_size=1, max_size=6),
    keep=st.integers(1, 4),
    best_by=st.sampled_from([None, "validation_loss", "-validation_wer", "validation_f1"]),
)
def test_the_newest_and_the_best_stay(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float | None], keep: int, best_by: str | None
) -> None:
    root = tmp_path_factory.mktemp("rotation")
    for number, loss in enumerate(losses, start=1):
        make(root, number, loss)
    prune_checkpoints(CheckpointStore(root), keep=keep, best_by=best_by)
    numbers = range(1, len(losses) + 1)
    staying = set(numbers[-keep:])
    scored = {n: loss for n, loss in zip(numbers, losses, strict=True) if loss is not None and not math.isnan(loss)}
    if best_by is not None and scored:
        wanted = (max if best_by == "validation_f1" else min)(scored.values())
        # Of equal ones the first, which everything else calls the best.
        staying.add(min(n for n in scored if scored[n] == wanted))
    assert left(root) == sorted(staying, reverse=True)
    assert len(list(root.iterdir())) == len(staying)
    shutil.rmtree(root)


def test_one_that_is_cut_short_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step, 5.0 - step)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-00000003" / "state.json", 5)
    prune_checkpoints(CheckpointStore(tmp_path), keep=1, best_by="validation_loss")
    assert left(tmp_path) == [4, 3, 2]
    assert integrity.newest_address(CheckpointStore(tmp_path)) == f"{tmp_path}/step-00000002"


def test_one_that_was_found_damaged_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step, 5.0 - step)
    prune_checkpoints(CheckpointStore(tmp_path), keep=1, best_by="validation_loss", broken={"step-00000003"})
    assert left(tmp_path) == [3, 2]
    store = CheckpointStore(tmp_path)
    assert integrity.newest_address(store, {"step-00000003"}) == f"{tmp_path}/step-00000002"


@pytest.mark.parametrize("every", [7, 6])
def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path, every: int) -> None:
    """The newest one is damaged inside. With keep=1 it must not push out the one that was saved after it was refused.

    In the second case a save takes the damaged one's place.
    """
    tree = mlp(tmp_path / "run", length={"steps": 30}, checkpoint={"every_steps": 6, "keep": 2, "keep_best_by": None})
    run_here(tree, stop_after(18))
    root = tmp_path / "run" / "checkpoints"
    assert left(root) == [18, 12]
    spoilt = root / "step-00000018" / "optimizer.safetensors"
    content = spoilt.read_bytes()
    spoilt.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    tree["checkpoint"] = {"every_steps": every, "keep": 1, "keep_best_by": None}
    done = run_here(tree, stop_after(14 if every == 7 else 18))
    assert "Checkpoint refused" in done.said
    assert left(root) == ([18, 14] if every == 7 else [18])
    done = run_here(tree, stop_after(20))
    assert f"resumed at step {14 if every == 7 else 18} from" in done.said


READER = """
import sys
from pathlib import Path
from finetune.checkpoint.checkpoint_store import CheckpointStore
place = Path(sys.argv[1])
with CheckpointStore(place.parent).hold(place.name):
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_one_that_another_process_reads_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    read = str(tmp_path / "step-00000001")
    words = [sys.executable, "-c", READER, read]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, env=environment(), **pipes) as reader:
        try:
            assert reader.stdout.readline() == "reading\n"
            prune_checkpoints(CheckpointStore(tmp_path), keep=1, best_by=None)
            assert left(tmp_path) == [3, 1]
            reader.communicate(timeout=WAIT_S)
        finally:
            reader.kill()
    prune_checkpoints(CheckpointStore(tmp_path), keep=1, best_by=None)
    assert left(tmp_path) == [3]


def test_it_is_held_from_the_first_look_until_it_is_restored(tmp_path: Path) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    store = CheckpointStore(tmp_path)
    got = resume_point.verify_on_all_ranks(store, "step-00000001", OneRank())  # type: ignore[arg-type]
    prune_checkpoints(CheckpointStore(tmp_path), keep=1, best_by=None)
    assert left(tmp_path) == [2, 1]
    got.held.close()
    prune_checkpoints(CheckpointStore(tmp_path), keep=1, best_by=None)
    assert left(tmp_path) == [2]


def test_one_that_is_refused_is_let_go(tmp_path: Path) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    file = tmp_path / "step-00000001" / "state.json"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"0", b"1"))
    with pytest.raises(CheckpointError, match=r"state.json was changed"):
        resume_point.verify_on_all_ranks(CheckpointStore(tmp_path), "step-00000001", OneRank())  # type: ignore[arg-type]
    prune_checkpoints(CheckpointStore(tmp_path), keep=1, best_by=None)
    assert left(tmp_path) == [2]


def test_a_reader_that_comes_too_late_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has opened the manifest, and the folder goes before it holds the lock."""
    for step in (1, 2):
        make(tmp_path, step)
    flock = fcntl.flock

    def late(handle: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        prune_checkpoints(CheckpointStore(tmp_path), keep=1, best_by=None)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        pytest.raises(CheckpointError, match="step-00000001 was deleted meanwhile"),
        CheckpointStore(tmp_path).hold("step-00000001"),
    ):
        pass


def test_a_deletion_that_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on and says so; what is left of the old one is nobody's checkpoint, and goes at the next start."""
    rmtree, calls = shutil.rmtree, []

    def half(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith(".doomed") and not calls:
            calls.append(path)
            (Path(path) / "state.json").unlink()
            raise OSError(5, "Input/output error", str(path))
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", half)
    tree = mlp(tmp_path / "run", checkpoint={"every_steps": 5, "keep": 1, "keep_best_by": None}, length={"steps": 20})
    done = run_here(tree)
    assert done.said.count("An old checkpoint cannot be deleted: ") == 1
    assert done.checkpoints == ["step-00000005.doomed", "step-00000020"]
    assert left(tmp_path / "run" / "checkpoints") == [20]
    tree["length"] = {"steps": 25}
    assert run_here(tree).checkpoints == ["step-00000025"]
