"""A disk that is full, read-only or gone while a run saves: it says so, trains on, and loses nothing that was there.

The output folder lies on a small file system in memory, which the tests fill, remount and take away.
"""

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from external_commands import require
from forkserver import ForkServer
from harness import environment, read_lines
from inside import Done, alone, at_step, mlp, run_here
from ranks import PARAGRAPH
from safetensors.torch import load_file

from finetune.checkpoint import integrity, row_ledger
from finetune.checkpoint.checkpoint_store import open_store, step_of
from finetune.checkpoint.save_checkpoint import CheckpointWriter
from finetune.training import entry_point, loop
from finetune.training.built_run import BuiltRun
from finetune.utils.atomic_files import Journal
from finetune.utils.errors import CheckpointError

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("full_disk")]

FULL, READ_ONLY, GONE = (os.strerror(number) for number in (errno.ENOSPC, errno.EROFS, errno.ENOENT))
WIDE = {"name": "own_task:mlp", "args": {"width": 64}}


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True, text=True)


class Disk:
    """A small file system. `place` is where runs see it, and `itself` is the same, always there."""

    def __init__(self, folder: Path) -> None:
        self.itself, self.place = folder / "itself", folder / "place"
        self._filler = self.itself / "filler"
        for path in (self.itself, self.place):
            path.mkdir()

    def fill(self, room: int = 0) -> None:
        """Fills it but for so many bytes."""
        free = os.statvfs(self.itself).f_bavail * os.statvfs(self.itself).f_frsize
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - room)

    def free(self) -> None:
        self._filler.unlink()

    def vanish(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.place)], check=True)

    def come(self) -> None:
        mount("--bind", self.itself, self.place)

    def remount(self, how: str) -> None:
        mount("-o", f"remount,{how}", self.itself)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    require("mount", "umount")
    made = Disk(tmp_path)
    try:
        mount("-t", "tmpfs", "-o", "size=2m", "none", made.itself)
        made.come()
    except (OSError, subprocess.CalledProcessError) as error:
        subprocess.run(["umount", str(made.itself)], check=False, capture_output=True)
        pytest.skip(f"a file system cannot be mounted here: {getattr(error, 'stderr', None) or error}")
    yield made
    for path in (made.place, made.itself):
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The run that nothing happens to."""
    return run_here(mlp(tmp_path_factory.mktemp("calm") / "run", task=WIDE))


def acts(**at: Callable[[], Any]) -> Callable[[BuiltRun], None]:
    """Does things at the ends of steps, when no save is under way: `after_8=...`."""

    def meddle(run: BuiltRun) -> None:
        for name, act in at.items():
            at_step(int(name.partition("_")[2]), lambda run, act=act: (run.checkpoints.finish(), act()))(run)

    return meddle


def undisturbed(done: Done, calm: Done) -> None:
    """Training took the same path, and no line of the journals is missing or twice."""
    assert done.steps == list(range(1, 21))
    assert done.losses == calm.losses
    torch.testing.assert_close(done.weights, calm.weights, rtol=0, atol=0)
    found = row_ledger.audit_ledger(done.directory)
    assert found.holds, found.lines()
    assert (found.first, found.num_steps) == (1, 20)
    store = open_store(done.directory)
    for name in store.list_names():
        integrity.verify_checkpoint(store, name)


def whole(directory: Path) -> list[int]:
    """The steps of the checkpoints, each verified; there is nothing else beside them."""
    store = open_store(directory)
    found = store.list_names()
    for name in found:
        integrity.verify_checkpoint(store, name)
    assert len(found) == len(list((directory / "checkpoints").iterdir()))
    return sorted(step_of(name) or 0 for name in found)


# ---------------------------------------------------------------- full


@pytest.mark.parametrize(
    ("room", "asynchronous"), [*((room, True) for room in (0, 4, 16, 40, 60, 120)), (0, False), (40, False)]
)
def test_a_disk_that_fills(disk: Disk, calm: Done, asynchronous: bool, room: int) -> None:
    """However far the save at step 10 comes: it is whole or said to be none, and the next one succeeds."""
    tree = mlp(disk.place / "run", task=WIDE, checkpoint={"keep": 9, "asynchronous": asynchronous})
    done = run_here(tree, acts(after_8=lambda: disk.fill(room << 10), after_14=disk.free))
    undisturbed(done, calm)
    failed = "The checkpoint of step 10 cannot be written" in done.said
    assert failed == (room < 120)
    assert whole(done.directory) == ([5, 15, 20] if failed else [5, 10, 15, 20])
    if failed:
        assert f"cannot be written: {FULL}. Training continues, {done.directory}/checkpoints/step-00000005 stays" in (
            done.said
        )
    if room == 0:
        assert done.said.count(f"metrics.jsonl: {FULL}. It is kept in memory, and tried again.") == 1


def test_the_one_before_is_gone_on_from(disk: Disk, calm: Done) -> None:
    """The last save finds no room: the run fails, and started again it ends as if nothing had been."""
    tree = mlp(disk.place / "run", task=WIDE)
    with pytest.raises(CheckpointError, match=rf"step 20 cannot be written below .*: {FULL}\. Older .* start the same"):
        run_here(tree, acts(after_12=disk.fill))
    assert whole(disk.place / "run") == [5, 10]
    # As long as the disk is full, nothing can begin, and nothing is spoilt.
    before = {name: (disk.place / "run" / name).read_bytes() for name in ("recipe.yaml", "run.json")}
    with pytest.raises(CheckpointError, match=rf"cannot write to {disk.place}/run: {FULL}\. Make room"):
        run_here(tree)
    assert before == {name: (disk.place / "run" / name).read_bytes() for name in before}
    assert not list((disk.place / "run").glob("*.staging"))
    disk.free()
    done = run_here(tree)
    assert "resumed at step 10 from" in done.said
    undisturbed(done, calm)


def test_it_ends_with_a_code_and_one_paragraph(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    take = loop.train
    for section, says in (
        ({"checkpoint": {"every_steps": 5}}, f"The checkpoint of step 20 cannot be written below .*: {FULL}"),
        ({"checkpoint": {"at_end": False}}, f"The trained model cannot be written to .*{FULL}"),
    ):
        recipe.write_text(yaml.safe_dump(mlp(disk.place / "run", task=WIDE, output={"overwrite": True}, **section)))
        monkeypatch.setattr(loop, "train", lambda run: (acts(after_19=disk.fill)(run), take(run))[1])
        with alone():
            assert entry_point.train_main([str(recipe), "--quiet"]) == 2
        said = capsys.readouterr().err
        assert len(PARAGRAPH.findall(said)) == 1, said
        assert "Traceback" not in said
        assert re.search(says, said), said
        disk.free()


def test_results_that_cannot_be_written(disk: Disk) -> None:
    """All is saved; only `run.json` could not say so. Started again, it does."""
    tree = mlp(disk.place / "run", task=WIDE)

    def fill(run: BuiltRun) -> None:
        finish = run.checkpoints.finish
        run.checkpoints.finish = lambda: (finish(), disk.fill())  # type: ignore[func-returns-value,method-assign,assign]

    tree["output"]["save_model"] = False
    with pytest.raises(CheckpointError, match=rf"cannot write to .*/run: {FULL}\. Make room"):
        run_here(tree, fill)
    assert "finished" not in (disk.place / "run" / "run.json").read_text()
    disk.free()
    done = run_here(tree)
    assert "finished" in done.facts
    assert whole(done.directory) == [15, 20]


# ---------------------------------------------------------------- read-only, gone


def test_a_disk_that_is_read_only_for_a_while(disk: Disk, calm: Done) -> None:
    def meddle(run: BuiltRun) -> None:
        lock = run.directory._lock
        assert lock is not None
        # Linux refuses to remount what holds a file that is open for writing, which is the lock's.
        acts(after_8=lambda: (lock.release(), disk.remount("ro")), after_14=lambda: disk.remount("rw"))(run)

    done = run_here(mlp(disk.place / "run", task=WIDE, checkpoint={"keep": 9}), meddle)
    undisturbed(done, calm)
    assert f"The checkpoint of step 10 cannot be written: {READ_ONLY}. Training continues" in done.said
    assert whole(done.directory) == [5, 15, 20]
    assert done.said.count(f"metrics.jsonl: {READ_ONLY}. It is kept in memory") == 1


@pytest.mark.parametrize("folder", ["run", "."])
def test_a_mount_that_vanishes_and_comes_back(disk: Disk, calm: Done, folder: str) -> None:
    """Nothing lands on the disk below, not even where the mount point is the output folder itself."""
    below: list[list[Path]] = []

    def come() -> None:
        below.append(list(disk.place.rglob("*")))
        disk.come()

    tree = mlp(disk.place / folder, task=WIDE, checkpoint={"keep": 9})
    done = run_here(tree, acts(after_8=disk.vanish, after_14=come))
    undisturbed(done, calm)
    assert below == [[]]
    assert (
        f"The checkpoint of step 10 cannot be written: {GONE}. Training continues, there is no older one" in done.said
    )
    assert whole(done.directory) == [5, 15, 20]


@pytest.mark.parametrize(("folder", "at_end"), [("run", True), (".", True), ("run", False)])
def test_a_mount_that_stays_away(disk: Disk, calm: Done, folder: str, at_end: bool) -> None:
    tree = mlp(disk.place / folder, task=WIDE, checkpoint={"at_end": at_end})
    with pytest.raises(CheckpointError, match=GONE):
        run_here(tree, acts(after_12=disk.vanish))
    assert list(disk.place.rglob("*")) == []
    disk.come()
    done = run_here(tree)
    assert "resumed at step 10 from" in done.said
    undisturbed(done, calm)


def test_a_journal_begun_late_waits_for_its_disk(disk: Disk) -> None:
    """Incidents have no file until there is one; it must not be made on the disk below."""
    journal = Journal(disk.place / "incidents.jsonl")
    disk.vanish()
    assert journal.write({"step": 1}) is not None
    assert journal.write({"step": 2}) is None  # said once
    assert list(disk.place.iterdir()) == []
    disk.come()
    assert journal.write({"step": 3}) is None
    assert [line["step"] for line in read_lines(disk.place / "incidents.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_journal_in_whose_place_something_else_lies_goes_on_beside_it(tmp_path: Path, kind: str) -> None:
    file, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    journal = Journal(file)
    assert journal.write({"step": 1}) is None
    other.mkdir() if kind == "folder" else other.write_text("not ours")
    file.unlink()
    file.symlink_to(other) if kind == "link" else other.rename(file)
    said = journal.write({"step": 2})
    beside = tmp_path / "metrics.jsonl.1"
    assert said == f"Another file lies in the place of {file}: all lines of this run go to {beside} from now on."
    assert journal.write({"step": 3}) is None
    assert journal.close() is None
    assert [line["step"] for line in read_lines(beside)] == [1, 2, 3]
    assert file.is_dir() if kind == "folder" else file.read_text() == "not ours"


# ---------------------------------------------------------------- deleted


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def delete(folder: Path, what: str) -> None:
    """As `rm -rf` does it."""
    for path in folder.glob(what) if what != "." else [folder]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


DELETED = {
    ".": "recipe.yaml, run.json, checkpoints",
    "*": "recipe.yaml, run.json, checkpoints",
    "checkpoints": "checkpoints",
    "run.json": "run.json",
    "*.jsonl": None,
}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("what", DELETED)
def test_what_somebody_deletes_is_made_again(tmp_path: Path, calm: Done, what: str, asynchronous: bool) -> None:
    """The next save finds it gone; only older checkpoints are lost, and the run ends as if nothing had been."""
    place = tmp_path / "run"
    tree = mlp(place, task=WIDE, checkpoint={"keep": 9, "asynchronous": asynchronous})
    done = run_here(tree, acts(after_8=lambda: delete(place, what)))
    undisturbed(done, calm)
    assert whole(place) == ([5, 10, 15, 20] if what in ("run.json", "*.jsonl") else [10, 15, 20])
    assert names(place) == names(calm.directory)
    assert {**done.facts, "starts": 0, "results": 0}.keys() == calm.facts.keys()
    assert done.facts["first_checkpoint"] in (5, 10)
    assert yaml.safe_load((place / "recipe.yaml").read_text())["output"]["dir"] == str(place)
    said = [line for line in done.said.splitlines() if "somebody has deleted" in line]
    assert len(said) == (DELETED[what] is not None)
    assert all(f"{place} has lost {DELETED[what]} while" in line for line in said)


@pytest.mark.parametrize(("at", "kept"), [(12, True), (19, False)])
def test_a_run_that_is_deleted_and_stopped_is_gone_on_with(tmp_path: Path, calm: Done, at: int, kept: bool) -> None:
    """The request to stop comes when nothing is there any more; and the last step when there is no save behind it."""
    place = tmp_path / "run"
    tree = mlp(place, task=WIDE, checkpoint={"at_end": kept})

    def stop(run: BuiltRun) -> None:
        at_step(at, lambda run: (run.checkpoints.finish(), delete(place, ".")))(run)
        if kept:
            at_step(at + 1, lambda run: setattr(run.shutdown, "reason", "asked to"))(run)

    done = run_here(tree, stop)
    if kept:
        assert done.facts["results"]["stopped"] == "asked to"
        done = run_here(tree)
    assert "finished" in done.facts
    assert (place / "model" / "model.safetensors").exists()
    undisturbed(done, calm)


def test_a_directory_that_is_deleted_while_the_last_checkpoint_is_written(
    tmp_path: Path, calm: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run"
    seal, left = CheckpointWriter._seal, ["once"]

    def delete_first(self: CheckpointWriter) -> None:
        if self._step == 20 and left:
            left.pop()
            delete(place, ".")
        seal(self)

    monkeypatch.setattr(CheckpointWriter, "_seal", delete_first)
    done = run_here(mlp(place, task=WIDE))
    undisturbed(done, calm)
    assert whole(place) == [20]
    assert names(place) == names(calm.directory)


def test_another_run_in_the_place_of_a_deleted_one_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "run"
    theirs = {"starts": [{"pid": 1, "host": "elsewhere"}]}

    def replace() -> None:
        delete(place, ".")
        (place / "checkpoints").mkdir(parents=True)
        for name, text in (("recipe.yaml", "theirs"), ("run.json", json.dumps(theirs))):
            (place / name).write_text(text)

    with pytest.raises(CheckpointError, match=r"was deleted while .* and another run has begun there"):
        run_here(mlp(place, task=WIDE), acts(after_8=replace))
    assert json.loads((place / "run.json").read_text()) == theirs
    assert list((place / "checkpoints").iterdir()) == []


# ---------------------------------------------------------------- two ranks

TASK = """
import os
import shutil
from dataclasses import replace
import own_task
from finetune.tasks import TaskData

class Rows(own_task.Points):
    read = 0
    def batch(self, rows):
        # One micro-batch is rehearsed, then come two a step.
        self.read += 1
        act = self.acts.get(str(self.read - 2)) if os.environ["RANK"] == "0" else None
        if act == "delete":
            shutil.rmtree(self.place)
        elif act == "free":
            os.unlink(self.filler)
        elif act == "fill":
            with open(self.filler, "wb") as file:
                space = os.statvfs(os.path.dirname(self.filler))
                os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize)
        return super().batch(rows)

def mlp(filler, acts, place):
    rows = Rows(200, 1)
    rows.filler, rows.acts, rows.place = filler, acts, place
    return replace(own_task.mlp(width=64), build_data=lambda recipe, quiet: TaskData(train=rows))
"""


def test_two_ranks_agree(fork_server: ForkServer, disk: Disk, tmp_path: Path) -> None:
    """Four runs in one launch: undisturbed, deleted, on a disk that fills for a while, and on one that stays full."""
    (tmp_path / "disk_task.py").write_text(TASK)
    filler, recipes = str(disk.itself / "filler"), []
    runs = {"calm": {}, "gone": {16: "delete"}, "full": {16: "fill", 28: "free"}, "last": {36: "fill"}}
    for name, doings in runs.items():
        keep = {"every_steps": 5, "keep": 9, "asynchronous": name != "last"}
        args = {"filler": filler, "acts": {str(at): act for at, act in doings.items()}, "place": str(disk.place / name)}
        recipes.append(tmp_path / f"{name}.yaml")
        task = {"name": "disk_task:mlp", "args": args}
        recipes[-1].write_text(yaml.safe_dump(mlp(disk.place / name, task=task, checkpoint=keep)))
    env = {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{tmp_path}"}
    code, output = fork_server.launch("ddp", *recipes, script="tests/support/many.py", env=env)
    assert code != 0, output
    # The second is said, by one rank, and nothing comes of it. The save of step 5 may still have been under way.
    failed = re.findall(rf"The checkpoint of step (5|10) cannot be written: {FULL}\. Training continues", output)
    assert failed in (["10"], ["5"], ["5", "10"]), output[-4000:]
    assert whole(disk.place / "full") == [step for step in (5, 10, 15, 20) if str(step) not in failed]
    assert set(whole(disk.place / "gone")) >= {15, 20}
    assert output.count(f"{disk.place}/gone has lost recipe.yaml, run.json, checkpoints") == 1
    calm, *others = (load_file(disk.place / name / "model" / "model.safetensors") for name in ("calm", "gone", "full"))
    for other in others:
        torch.testing.assert_close(other, calm, rtol=0, atol=0)
    lines: list[list[Any]] = [
        [(line["step"], line.get("loss")) for line in read_lines(disk.place / name / "metrics.jsonl")]
        for name in ("calm", "gone", "full")
    ]
    assert lines[0] == lines[1] == lines[2]
    assert [step for step, _ in lines[0]] == list(range(1, 21))
    assert row_ledger.audit_ledger(disk.place / "gone").holds
    assert row_ledger.audit_ledger(disk.place / "full").holds
    # The third ends on both ranks, which say one paragraph.
    assert whole(disk.place / "last") == [5, 10, 15]
    assert len(PARAGRAPH.findall(output)) == 1, output[-4000:]
    assert f"The checkpoint of step 20 cannot be written below {disk.place}/last/checkpoints: {FULL}" in output
    assert "Traceback" not in output.partition("Error: ")[0]
