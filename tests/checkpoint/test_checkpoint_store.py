"""Runs save, resume and prune through the interface of a store alone: bytes by keys in memory do as well as folders."""

from pathlib import Path

import pytest
import torch
from inside import Crash, Done, crash_after, mlp, run_here, stop_after
from memory_store import MemoryCheckpointStore

from finetune.checkpoint import checkpoint_store, integrity, row_ledger
from finetune.checkpoint.checkpoint_store import CheckpointStore, open_store
from finetune.checkpoint.run_history import read_run
from finetune.checkpoint.save_checkpoint import prune_checkpoints

pytestmark = pytest.mark.timeout(120)

ALL = {"every_steps": 5, "keep": 9}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryCheckpointStore:
    """The store of whatever run follows."""
    made = MemoryCheckpointStore()
    monkeypatch.setattr(checkpoint_store, "CheckpointStore", lambda root: made)
    return made


def all_files(store: CheckpointStore) -> dict[str, bytes]:
    """All files but those that say when and where a run was."""
    found = {}
    for name in store.list_names():
        for file, size in store.list_files(name).items():
            if isinstance(size, int) and file not in (integrity.STATE, checkpoint_store.MANIFEST):
                with store.open_file(name, file) as opened:
                    found[f"{name}/{file}"] = opened.read()
                assert len(found[f"{name}/{file}"]) == size
    return found


def test_a_run_is_saved_listed_and_resumed(tmp_path: Path, straight: Done, memory: MemoryCheckpointStore) -> None:
    tree = mlp(tmp_path / "run", checkpoint=ALL)
    first = run_here(tree, stop_after(12))
    assert memory.list_names() == [f"step-000000{step}" for step in ("12", "10", "05")]
    assert "saved in memory:/step-00000012" in first.said
    assert [saved.step for saved in read_run(tmp_path / "run").checkpoints] == [5, 10, 12]
    with pytest.raises(Crash):
        run_here(tree, crash_after(17))
    assert memory.list_names()[0] == "step-00000015"
    done = run_here(tree)
    assert "resumed at step 15 from memory:/step-00000015" in done.said
    assert done.facts["starts"][-1]["resumed_from"] == "memory:/step-00000015"
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)
    assert done.losses == straight.losses
    assert row_ledger.audit_ledger(done.directory).holds
    # Nothing of it was written elsewhere, and what was written is what a folder holds.
    assert done.checkpoints == []
    for name in memory.list_names():
        integrity.verify_checkpoint(memory, name)
    saved = all_files(memory)
    folders = all_files(checkpoint_store_of(straight))
    assert {key: saved[key] for key in folders} == folders


def checkpoint_store_of(run: Done) -> CheckpointStore:
    """The folders of a run that knew no other store."""
    return _Local(run.directory / "checkpoints")


_Local = checkpoint_store.CheckpointStore


def test_what_is_damaged_is_refused_and_replaced(tmp_path: Path, memory: MemoryCheckpointStore) -> None:
    tree = mlp(tmp_path / "run", checkpoint=ALL)
    run_here(tree, stop_after(12))
    key = "step-00000012/optimizer.safetensors"
    memory.objects[key] = memory.objects[key][:-1] + bytes([memory.objects[key][-1] ^ 1])
    # One that has no manifest is no checkpoint.
    del memory.objects["step-00000010/manifest.json"]
    done = run_here(tree, stop_after(12))
    assert "Checkpoint refused: memory:/step-00000012/optimizer.safetensors was changed after" in done.said
    assert "resumed at step 5 from memory:/step-00000005" in done.said
    assert memory.list_names() == [f"step-000000{step}" for step in ("12", "10", "05")]
    integrity.verify_checkpoint(memory, "step-00000012")


def test_old_ones_go_unless_they_are_read(tmp_path: Path, memory: MemoryCheckpointStore) -> None:
    run_here(mlp(tmp_path / "run", checkpoint={"every_steps": 5, "keep": 3, "keep_best_by": None}))
    names = [f"step-000000{step}" for step in (20, 15, 10)]
    assert memory.list_names() == names
    with memory.hold(names[2]):
        prune_checkpoints(open_store(tmp_path / "run"), keep=1, best_by=None)
        assert memory.list_names() == [names[0], names[2]]
    prune_checkpoints(memory, keep=1, best_by=None)
    assert memory.list_names() == names[:1]
    assert {key.partition("/")[0] for key in memory.objects} == {names[0]}
