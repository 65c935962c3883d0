"""What a run directory may lose, hold and lead to: nothing is started again, deleted or followed by accident."""

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from inside import Crash, Done, alone, copy, crash_after, forge, forge_state, mlp, run_here, stop_after
from ranks import CONFIG

from finetune.checkpoint import run_directory
from finetune.data.prepared_cache import Cache
from finetune.diagnostics.replay import replay_step
from finetune.distributed import native_ops
from finetune.export import export_weights
from finetune.utils import atomic_files
from finetune.utils.atomic_files import file_digest
from finetune.utils.errors import BackendError, CheckpointError, DataError, RecipeError

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("run_directory")]


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed after 8 steps: all that tells of its checkpoint is what it wrote while it ran."""
    directory = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.raises(Crash):
        run_here(mlp(directory), crash_after(8))
    return directory


def content(directory: Path) -> dict[str, tuple[Any, int]]:
    """All that lies in a folder, links as links."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.name == ".lock":
            continue
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(directory))] = (what, path.lstat().st_mtime_ns)
    return found


def same_end(done: Done, straight: Done) -> None:
    assert done.steps == list(range(1, 21))
    assert done.losses == straight.losses
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)


# ---------------------------------------------------------------- checkpoints that are gone


def half_written(root: Path) -> None:
    """Only a staging folder is left, of a save that was cut short."""
    newest = max(root.glob("step-*"))
    newest.rename(newest.with_name(newest.name + ".staging"))
    (root / (newest.name + ".staging") / "manifest.json").unlink()
    for path in root.glob("step-????????"):
        shutil.rmtree(path)


VANISH: dict[str, Callable[[Path], Any]] = {
    "the folder is gone": shutil.rmtree,
    "the folder is empty": lambda root: [shutil.rmtree(path) for path in root.iterdir()],
    "a half-written one is left": half_written,
    "run.json is gone, too": lambda root: shutil.rmtree(root) or (root.parent / "run.json").unlink(),
}


@pytest.mark.parametrize("how", VANISH)
@pytest.mark.parametrize("end", ["stopped", "crashed"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(
    how: str, end: str, stopped: Path, crashed: Path, tmp_path: Path
) -> None:
    directory = copy(stopped if end == "stopped" else crashed, tmp_path / "run")
    VANISH[how](directory / "checkpoints")
    before = content(directory)
    with pytest.raises(RecipeError, match=r"has written checkpoints, but none is left .*put a checkpoint back there"):
        run_here(mlp(directory))
    assert content(directory) == before
    if "run.json" in how:  # as the message says
        assert run_here(mlp(directory, output={"overwrite": True}, length={"steps": 3})).steps == [1, 2, 3]


def test_neither_does_one_that_began_from_another_runs(stopped: Path, tmp_path: Path) -> None:
    tree = mlp(tmp_path / "run", resume={"mode": str(stopped)})
    with pytest.raises(Crash):
        run_here(tree, crash_after(14))  # none of its own yet: it begins there again
    assert "resumed at step 12" in run_here(tree, stop_after(16)).said
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = content(tmp_path / "run")
    with pytest.raises(RecipeError, match="has written checkpoints, but none is left"):
        run_here(tree)
    assert content(tmp_path / "run") == before


def unname(root: Path, step: int) -> Path:
    """Takes a checkpoint's name, as if its writer had been killed before it gave one."""
    folder = root / f"step-{step:08d}"
    return folder.rename(folder.with_name(folder.name + ".staging"))


@pytest.mark.parametrize("alone", [True, False])
def test_a_whole_one_without_its_name_is_adopted(alone: bool, stopped: Path, tmp_path: Path, straight: Done) -> None:
    directory = copy(stopped, tmp_path / "run")
    root = directory / "checkpoints"
    unname(root, 12)
    if alone:
        shutil.rmtree(root / "step-00000005")
        shutil.rmtree(root / "step-00000010")
    done = run_here(mlp(directory, resume={"mode": "must"}))
    assert f"{root}/step-00000012.staging is whole, though the run ended before it got its name" in done.said
    assert f"resumed at step 12 from {root}/step-00000012, " in done.said
    same_end(done, straight)


def test_a_damaged_one_without_its_name_is_refused(stopped: Path, tmp_path: Path, straight: Done) -> None:
    directory = copy(stopped, tmp_path / "run")
    spoilt = unname(directory / "checkpoints", 12) / "optimizer.safetensors"
    spoilt.write_bytes(bytes(len(spoilt.read_bytes())))
    done = run_here(mlp(directory))
    assert f"Checkpoint refused: {spoilt} was changed after it was written" in done.said
    assert "resumed at step 10 from" in done.said
    same_end(done, straight)


def test_one_without_its_name_takes_that_of_a_damaged_one(stopped: Path, tmp_path: Path, straight: Done) -> None:
    """A save that takes a damaged checkpoint's place is cut short between its manifest and its name."""
    directory = copy(stopped, tmp_path / "run")
    root = directory / "checkpoints"
    copy(root / "step-00000012", root / "step-00000012.staging")
    (root / "step-00000012" / "state.json").write_text("{}")
    done = run_here(mlp(directory))
    assert f"Checkpoint refused: {root}/step-00000012/state.json" in done.said
    assert f"resumed at step 12 from {root}/step-00000012, " in done.said
    assert "step-00000012.broken" in done.checkpoints
    same_end(done, straight)


def test_another_recipe_adopts_nothing(stopped: Path, tmp_path: Path) -> None:
    directory = copy(stopped, tmp_path / "run")
    unname(directory / "checkpoints", 12)
    before = content(directory)
    with pytest.raises(RecipeError, match="mathematics differ"):
        run_here(mlp(directory, seed=4))
    assert content(directory) == before


# ---------------------------------------------------------------- what is overwritten


def test_overwriting_deletes_only_what_a_run_has_left(tmp_path: Path) -> None:
    """A folder of that name may hold somebody's model."""
    directory = tmp_path / "work"
    for name in ("model", "checkpoints", "exports", "profile"):
        (directory / name).mkdir(parents=True)
        (directory / name / "precious").write_text("mine")
        with pytest.raises(
            RecipeError, match=rf"output\.overwrite: {directory} holds .*{name}.* remove these yourself"
        ):
            run_here(mlp(directory, output={"overwrite": True}))
        assert (directory / name / "precious").read_text() == "mine"
    (directory / "run.json").write_text('{"name": "of another tool"}')
    before = content(directory)
    with pytest.raises(RecipeError, match=r"output\.overwrite"):
        run_here(mlp(directory, output={"overwrite": True}))
    assert content(directory) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_users_recipe_is_not_replaced(tmp_path: Path, overwrite: bool) -> None:
    """As that of `finetune init`, where output.dir is the folder that it lies in."""
    (tmp_path / "recipe.yaml").write_text("# mine")
    with pytest.raises(RecipeError, match=rf"output\.dir: {tmp_path} has a recipe\.yaml, but no run of this toolkit"):
        run_here(mlp(tmp_path, output={"overwrite": overwrite}))
    assert (tmp_path / "recipe.yaml").read_text() == "# mine"


def test_overwriting_leaves_nothing_of_the_old_run(stopped: Path, tmp_path: Path) -> None:
    directory = copy(stopped, tmp_path / "run")
    for name in ("exports/merged", "profile", "model"):
        (directory / name).mkdir(parents=True)
        (directory / name / "old").write_text("old")
    (directory / "notes.txt").write_text("mine")
    done = run_here(mlp(directory, output={"overwrite": True, "save_model": False}, length={"steps": 3}))
    assert not list(directory.rglob("old"))
    assert not (directory / "exports").exists()
    assert (directory / "notes.txt").read_text() == "mine"
    assert done.checkpoints == ["step-00000003"]


@pytest.mark.parametrize("last", ["metrics.jsonl", "run.json"])
def test_overwriting_that_was_cut_short_can_be_repeated(
    last: str, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy(stopped, tmp_path / "run")
    remove = atomic_files.remove_path

    def cut(path: Path) -> None:
        remove(path)
        if path.name == last:
            raise Crash

    tree = mlp(directory, output={"overwrite": True}, length={"steps": 3})
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "remove_path", cut)
        with pytest.raises(Crash):
            run_here(tree)
    assert run_here(tree).steps == [1, 2, 3]


# ---------------------------------------------------------------- links, and names that lead elsewhere


@pytest.mark.parametrize("whither", ["nowhere", "another run's"])
def test_a_link_as_newest_checkpoint(whither: str, stopped: Path, tmp_path: Path, straight: Done) -> None:
    """It is refused by name, the one before is used, and the next save of that step takes its place."""
    directory = copy(stopped, tmp_path / "run")
    target = tmp_path / "elsewhere" / "step-00000020"
    if whither != "nowhere":
        copy(straight.directory / "checkpoints" / "step-00000020", target)
    before = content(tmp_path / "elsewhere")
    link = directory / "checkpoints" / "step-00000020"
    link.symlink_to(target)
    done = run_here(mlp(directory, checkpoint={"every_steps": 5, "keep": 1, "keep_best_by": None}))
    assert f"Checkpoint refused: {link} is a symbolic link, not a folder. Trying an older one." in done.said
    assert "resumed at step 12 from" in done.said
    same_end(done, straight)
    assert done.checkpoints == ["step-00000020", "step-00000020.broken"]
    assert not link.is_symlink()
    assert content(tmp_path / "elsewhere") == before


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody has named; afterwards it is as it was."""
    folder = tmp_path / "victim"
    (folder / "step-00000005").mkdir(parents=True)
    (folder / "step-00000005" / "file").write_text("mine")
    (folder / "file").write_text('{"step":1,"mine":true}\n')
    before = content(folder)
    yield folder
    assert content(folder) == before


def link_in_place(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "name",
    [*run_directory._LEFT, *run_directory._MORE, "model.staging", "metrics.jsonl.staging", "run.json.staging"],
)
def test_a_run_directory_with_links_is_not_gone_on_with(name: str, stopped: Path, tmp_path: Path, victim: Path) -> None:
    directory = copy(stopped, tmp_path / "run")
    link_in_place(directory / name, victim / "file" if "." in name.strip(".") and "model" not in name else victim)
    for overwrite in (True, False):
        with pytest.raises(RecipeError, match=rf"{directory / name} is a symbolic link, and links in a run directory"):
            run_here(mlp(directory, output={"overwrite": overwrite}))


@pytest.mark.parametrize("name", ["step-00000010.staging", "step-00000010.doomed"])
def test_leftovers_that_are_links_lead_nowhere(name: str, stopped: Path, tmp_path: Path, victim: Path) -> None:
    directory = copy(stopped, tmp_path / "run")
    (directory / "checkpoints" / name).symlink_to(victim)
    assert name not in run_here(mlp(directory), stop_after(15)).checkpoints


def test_a_run_directory_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large")
    assert run_here(mlp(tmp_path / "run", length={"steps": 3})).steps == [1, 2, 3]
    assert (tmp_path / "large" / "run.json").exists()


def manifest(change: Callable[[dict[str, Any], Path], Any]) -> Callable[[Path, Path], None]:
    return lambda folder, victim: forge(folder, lambda m: change(m["files"], victim))


def facts_of(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "xxh3_128": file_digest(file)}


def tensor_in(name: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    """`state.json` says that a tensor lies in such a file."""

    def spoil(folder: Path, victim: Path) -> None:
        forge_state(folder, lambda state: state["tensors"]["exp_avg/0.weight"].update(file=name(victim)))

    return spoil


def hidden(folder: Path, victim: Path) -> None:
    """Hidden names need not be in the manifest; this one is, and leads elsewhere."""
    (folder / ".cache").symlink_to(victim)
    forge(folder, lambda m: m["files"].update({".cache/file": facts_of(victim / "file")}))


def link_inside(folder: Path, victim: Path) -> None:
    (folder / "model" / "more").symlink_to(victim / "file")
    forge(folder, lambda m: m["files"].update({"model/more": facts_of(victim / "file")}))


STRANGE: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "a name with ..": (
        manifest(lambda files, victim: files.update({"../../../victim/file": facts_of(victim / "file")})),
        "which is not inside the checkpoint",
    ),
    "an absolute name": (
        manifest(lambda files, victim: files.update({str(victim / "file"): facts_of(victim / "file")})),
        "which is not inside the checkpoint",
    ),
    "a name with a zero byte": (
        manifest(lambda files, victim: files.update({"model/a\0b": facts_of(victim / "file")})),
        "embedded null",  # what Python calls it, in words that change with its versions
    ),
    "a name that is no text": (
        manifest(lambda files, victim: files.update({"model/\ud800": facts_of(victim / "file")})),
        "cannot be read: 'utf-8' codec can't encode",
    ),
    "a link for a file": (link_inside, "is a symbolic link, not a file"),
    "a hidden link for a folder": (hidden, "is a symbolic link, not a folder"),
    "a tensor in a file with ..": (tensor_in(lambda _: "../../../victim/file"), "which the manifest does not list"),
    "a tensor in an absolute file": (
        tensor_in(lambda victim: str(victim / "file")),
        "which the manifest does not list",
    ),
    "a tensor in a list": (tensor_in(lambda _: ["state.json"]), "does not say where exp_avg/0.weight is"),
    "a step in words": (
        lambda folder, _: forge_state(folder, lambda state: state.update(position="80; rm -rf /")),
        "position is a text, not a whole number",
    ),
}


@pytest.mark.parametrize(("name", "by"), [*((name, "checkpoint") for name in STRANGE), ("a link for a file", "run")])
def test_a_strangers_checkpoint(
    name: str, by: str, stopped: Path, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `resume=PATH`: nothing outside of it is opened, and it is as it was."""
    spoil, says = STRANGE[name]
    theirs = copy(stopped, tmp_path / "theirs")
    for step in (5, 10):
        shutil.rmtree(theirs / "checkpoints" / f"step-{step:08d}")
    folder = theirs / "checkpoints" / "step-00000012"
    spoil(folder, victim)
    before = content(theirs)
    opened: list[str] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (opened.append(str(self)), real(self, *a, **k))[1])
    with pytest.raises(CheckpointError) as caught:
        run_here(mlp(tmp_path / "run", resume={"mode": str(folder if by == "checkpoint" else theirs)}))
    if by == "checkpoint":
        assert says in str(caught.value)
    assert not [path for path in opened if "victim" in path or path.endswith("more")]
    assert content(theirs) == before


def test_a_strangers_run_whose_checkpoints_lie_elsewhere(stopped: Path, tmp_path: Path) -> None:
    theirs = copy(stopped, tmp_path / "theirs")
    (theirs / "checkpoints").rename(tmp_path / "elsewhere")
    (theirs / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecipeError, match=r"theirs/checkpoints is a symbolic link, and links in a run directory"):
        run_here(mlp(tmp_path / "run", resume={"mode": str(theirs)}))
    # Who names a link means it.
    (tmp_path / "newest").symlink_to(tmp_path / "elsewhere" / "step-00000012")
    done = run_here(mlp(tmp_path / "run", resume={"mode": str(tmp_path / "newest")}), stop_after(13))
    assert "resumed at step 12 from" in done.said


@pytest.mark.parametrize(
    "name", ["recipe.yaml", "run.json", "checkpoints", "model", "model/model.safetensors", "exports"]
)
def test_a_strangers_run_to_export(name: str, straight: Done, tmp_path: Path, victim: Path) -> None:
    """Neither is what is exported read elsewhere, nor is it written elsewhere."""
    theirs = copy(straight.directory, tmp_path / "theirs")
    link_in_place(theirs / name, victim)
    with pytest.raises(CheckpointError, match=rf"{theirs / name} is a symbolic link, and links in a run directory"):
        export_weights.export_weights(theirs, "merged", print)


def test_a_strangers_recipe_names_no_folder_of_mine(stopped: Path, tmp_path: Path, victim: Path) -> None:
    """The recipe that lies in a run's directory says where that run wrote, and that it may delete what is there."""
    theirs = copy(stopped, tmp_path / "theirs")
    recipe = yaml.safe_load((theirs / "recipe.yaml").read_text())
    recipe["output"] |= {"dir": str(victim), "overwrite": True}
    (theirs / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    before = content(theirs)
    with alone():
        assert replay_step(theirs, 7).holds
    run_here(mlp(tmp_path / "run", resume={"mode": str(theirs)}), stop_after(13))
    assert content(theirs) == before


# ---------------------------------------------------------------- modes


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def wrong_modes(directory: Path, umask: int) -> dict[str, str]:
    """What has another mode than a file or folder that a program makes without a thought."""
    found = {}
    for path in (directory, *directory.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != (0o777 if path.is_dir() else 0o666) & ~umask:
            found[str(path.relative_to(directory))] = oct(mode)
    return found


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], indirect=True, ids=oct)
def test_files_follow_the_umask(umask: int, tmp_path: Path) -> None:
    """All that a run writes: others may read the weights where they may read the rest."""
    profile = {"profile": 2} if umask == 0o002 else {}
    done = run_here(mlp(tmp_path / "run", log=profile, length={"steps": 8}))
    assert (done.directory / "model" / "model.safetensors").exists()
    assert (done.directory / "profile").exists() == bool(profile)
    assert wrong_modes(done.directory, umask) == {}


@pytest.mark.parametrize("umask", [0o022], indirect=True, ids=oct)
def test_exports_follow_the_umask(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter and a tokenizer, which libraries write."""
    tree = {
        "model": {"config": CONFIG},
        "lora": {"rank": 2},
        "tokenizer": {"vocab_size": 300},
        "data": {"train": [{"sample": 60}], "sequence_length": 32, "cache_dir": str(tmp_path / "cache")},
        "batch": {"global_size": 2, "micro_size": 2},
        "length": {"steps": 2},
        "output": {"dir": str(tmp_path / "run")},
        "precision": "fp32",
    }
    run_here(tree)
    monkeypatch.setattr(export_weights, "_verify", lambda *_: [])  # not what this is about
    folder = export_weights.export_weights(tmp_path / "run", "merged-16bit", print)
    assert sorted(path.suffix for path in folder.glob("*.safetensors")) == [".safetensors"]
    assert wrong_modes(tmp_path / "run", umask) == {}


# ---------------------------------------------------------------- file systems without locks


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK], ids=["ENOSYS", "ENOLCK"])
def no_locks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`tmp_path` lies on a file system without `flock`; returns what the system says then."""
    flock = fcntl.flock

    def refuse(file: Any, how: int) -> None:
        handle = file if isinstance(file, int) else file.fileno()
        if os.readlink(f"/proc/self/fd/{handle}").startswith(f"{tmp_path}/"):
            raise OSError(request.param, os.strerror(request.param))
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path.parent / f"{tmp_path.name}-tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path.parent / f"{tmp_path.name}-tmp"))
    return os.strerror(request.param)


def test_a_run_where_there_are_no_locks(
    no_locks: str, tmp_path: Path, straight: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is locked instead; a second one of this machine is kept out; old checkpoints are deleted."""
    tree = mlp(tmp_path / "run", checkpoint={"every_steps": 5, "keep": 1, "keep_best_by": None})
    done = run_here(tree, stop_after(12))
    said = rf"file system of {tmp_path}/run has no locks \(flock: {no_locks}\)\. (\S+)/finetune-\S+ is locked instead"
    found = re.search(said, done.said)
    assert found, done.said
    assert found[1] == tempfile.gettempdir()
    assert done.said.count("has no locks") == 1
    assert done.checkpoints == ["step-00000012"]
    assert not (tmp_path / "run" / ".lock").exists()
    held = run_directory._hold(tmp_path / "run")
    monkeypatch.setattr(run_directory, "_LOCK_PATIENCE_S", 0.1)
    with pytest.raises(RecipeError, match=r"run is in use by process"):
        run_here(tree)
    held.release()
    same_end(run_here(tree), straight)


def test_a_cache_where_there_are_no_locks(no_locks: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", quiet=True)
    with pytest.raises(DataError, match=rf"cache cannot be used: its file system has no locks \(flock: {no_locks}\)"):
        cache.entry("rows", lambda folder: {})


def test_ops_where_there_are_no_locks(no_locks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(BackendError, match=rf"no locks \(flock: {no_locks}\).*Set TORCH_EXTENSIONS_DIR"):
        native_ops._lock("cpu_adam")


def test_a_lock_that_fails_otherwise_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Any, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(CheckpointError, match=r"output\.dir: .*run cannot be locked: Input/output error"):
        run_here(mlp(tmp_path / "run"))
