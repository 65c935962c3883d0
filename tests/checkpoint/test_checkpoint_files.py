"""A checkpoint folder is whole or refused by name, whatever was done to it; the one before is used then."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import OneRank, copy, forge, forge_state, mlp, run_here

from finetune.checkpoint import resume_point
from finetune.checkpoint.checkpoint_store import CheckpointStore
from finetune.utils.errors import CheckpointError

# A reader that opens a pipe would wait for ever.
pytestmark = pytest.mark.timeout(120)

FILES = ("manifest.json", "state.json", "model/model.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with whole checkpoints at steps 10, 15 and 20."""
    directory = tmp_path_factory.mktemp("pristine") / "run"
    run_here(mlp(directory, checkpoint={"every_steps": 5, "keep": 3}))
    return directory


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """Its checkpoints, to spoil."""
    return copy(pristine, tmp_path / "run") / "checkpoints"


def refusal(folder: Path) -> str:
    """Why a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        resume_point.verify_on_all_ranks(CheckpointStore(folder.parent), folder.name, OneRank())  # type: ignore[arg-type]
    return str(caught.value)


def found(root: Path) -> Path:
    """The checkpoint that a run resumes from."""
    got = resume_point.find_newest(CheckpointStore(root), OneRank())  # type: ignore[arg-type]
    assert got is not None
    got.held.close()
    return Path(got.address)


# ---------------------------------------------------------------- what is damaged


@settings(max_examples=150)
@given(data=st.data())
def test_no_byte_of_any_file_can_change(pristine: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = pristine / "checkpoints" / "step-00000020"
    name = data.draw(st.sampled_from(FILES))
    content = (folder / name).read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    bits = data.draw(st.integers(1, 255))
    spoilt = copy(folder, tmp_path_factory.mktemp("flipped") / folder.name)
    (spoilt / name).write_bytes(content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :])
    try:
        said = refusal(spoilt)
        assert str(spoilt / name) in said
    except pytest.fail.Exception:
        # White space between the words of the manifest: what it says is the same.
        assert name == "manifest.json"
        assert json.loads((spoilt / name).read_bytes()) == json.loads(content)
    finally:
        shutil.rmtree(spoilt.parent)


@settings(max_examples=60)
@given(data=st.data())
def test_no_file_can_be_cut_short(pristine: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = pristine / "checkpoints" / "step-00000020"
    name = data.draw(st.sampled_from(FILES))
    content = (folder / name).read_bytes()
    length = data.draw(st.integers(0, len(content) - 2))
    spoilt = copy(folder, tmp_path_factory.mktemp("cut") / folder.name)
    (spoilt / name).write_bytes(content[:length])
    said = refusal(spoilt)
    assert str(spoilt / name) in said
    if name != "manifest.json":
        assert f"has {length:,} bytes instead of {len(content):,}" in said
    shutil.rmtree(spoilt.parent)


def replace(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Puts something else in a file's place."""

    def spoil(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            path.rename(folder.parent / "elsewhere")
        else:
            shutil.copy(path, folder.parent / "elsewhere")
            path.unlink()
        make(path)

    return spoil


def link(path: Path) -> None:
    path.symlink_to(path.parents[path.parts[::-1].index("checkpoints") - 1] / "elsewhere")


def lie(**facts: Any) -> Callable[[Path], None]:
    """Changes what the manifest says of the optimiser's file."""
    return lambda folder: forge(folder, lambda m: m["files"]["optimizer.safetensors"].update(facts))


def forget(folder: Path) -> None:
    """The manifest no longer lists a file that tensors need, which is gone."""
    (folder / "optimizer.safetensors").unlink()
    forge(folder, lambda m: m["files"].pop("optimizer.safetensors"))


def outside(folder: Path) -> None:
    """The manifest lists a file of another checkpoint."""
    other = "../step-00000015/optimizer.safetensors"
    (folder / "optimizer.safetensors").unlink()
    forge(folder, lambda m: m["files"].update({other: m["files"].pop("optimizer.safetensors")}))


def text(content: str | bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def tensor(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes what `state.json` says of where one tensor is."""
    return lambda folder: forge_state(folder, lambda state: change(state["tensors"]["exp_avg/0.weight"]))


def state(**values: Any) -> Callable[[Path], None]:
    return lambda folder: forge_state(folder, lambda saved: saved.update(values))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "missing shard": (replace("optimizer.safetensors", lambda _: None), "optimizer.safetensors", "is missing"),
    "missing state": (replace("state.json", lambda _: None), "state.json", "is missing"),
    "extra shard": (
        lambda f: text("x")(f / "model/model-00001.safetensors"),
        "model/model-00001",
        "not in its manifest",
    ),
    "extra folder": (lambda f: (f / "more").mkdir() or text("x")(f / "more/a"), "more/a", "not in its manifest"),
    "no manifest": (replace("manifest.json", lambda _: None), "", "has no manifest.json, so it was never finished"),
    "empty manifest": (replace("manifest.json", text("")), "manifest.json", "it is empty"),
    "manifest no JSON": (replace("manifest.json", text("step: 20")), "manifest.json", "it is no JSON"),
    "manifest no text": (replace("manifest.json", text(b"\xff\xfe{}")), "manifest.json", "it is no JSON"),
    "manifest nested": (replace("manifest.json", text("[" * 100_000)), "manifest.json", "it is nested too deeply"),
    "manifest nested as deep as it can be read": (
        replace("manifest.json", text('{"files": {}, "step": ' + "[" * 900 + "]" * 900 + "}")),
        "manifest.json",
        "it is nested too deeply",
    ),
    "manifest with a byte order mark": (
        lambda f: text(b"\xef\xbb\xbf" + (f / "manifest.json").read_bytes())(f / "manifest.json"),
        "manifest.json",
        "it is no JSON: Unexpected UTF-8 BOM",
    ),
    "manifest with zeros": (replace("manifest.json", text(b"\0" * 400)), "manifest.json", "it is no JSON"),
    "manifest with a number of 5,000 digits": (
        replace("manifest.json", text("1" * 5000)),
        "manifest.json",
        "cannot be read",
    ),
    "manifest a list": (replace("manifest.json", text("[]")), "manifest.json", "it is a list, not an object"),
    "manifest without files": (replace("manifest.json", text("{}")), "manifest.json", "it has no format, step, files"),
    "another format": (lambda f: forge(f, lambda m: m.update(format=2)), "manifest.json", "has format 2"),
    "a manifest of another step": (lambda f: forge(f, lambda m: m.update(step=15)), "manifest.json", "of step 15"),
    "a lie about the size": (lie(bytes=3), "optimizer.safetensors", "bytes instead of 3"),
    "a lie about the digest": (lie(xxh3_128="0" * 32), "optimizer.safetensors", "its digest does not match"),
    "a size in words": (lie(bytes="12"), "manifest.json", "has no size and digest for optimizer.safetensors"),
    "a digest of no kind": (lie(xxh3_128=None), "manifest.json", "has no size and digest for optimizer.safetensors"),
    "no size at all": (
        lambda f: forge(f, lambda m: m["files"].update({"state.json": "here"})),
        "manifest.json",
        "has no size and digest for state.json",
    ),
    "a lie without its own digest": (
        lambda f: text((f / "manifest.json").read_text().replace('"step": 20', '"step": 21'))(f / "manifest.json"),
        "manifest.json",
        "its own digest does not match",
    ),
    "state not listed": (
        lambda f: forge(f, lambda m: m["files"].pop("state.json")),
        "manifest.json",
        "does not list state.json",
    ),
    "a file that tensors need is not listed": (forget, "state.json", "needs optimizer.safetensors"),
    "a file outside": (outside, "manifest.json", "../step-00000015/optimizer.safetensors"),
    "state a list": (lambda f: forge_state(f, lambda s: [s]), "state.json", "it is a list, not an object"),
    "state without a position": (
        lambda f: forge_state(f, lambda s: s.pop("position") and None),
        "state.json",
        "positi",
    ),
    "state of another step": (state(step=19), "state.json", "speaks of step 19"),
    "state without tensors": (state(tensors=[]), "state.json", "tensors is a list, not an object"),
    "a tensor nowhere": (tensor(lambda place: place.pop("file") and None), "state.json", "exp_avg/0.weight"),
    "a pipe for a manifest": (replace("manifest.json", os.mkfifo), "manifest.json", "is a pipe, not a file"),
    "a pipe for a file": (
        replace("optimizer.safetensors", os.mkfifo),
        "optimizer.safetensors",
        "is a pipe, not a file",
    ),
    "a folder for a manifest": (replace("manifest.json", Path.mkdir), "manifest.json", "is a folder, not a file"),
    "a folder for a file": (replace("state.json", Path.mkdir), "state.json", "is a folder, not a file"),
    "a link for a manifest": (replace("manifest.json", link), "manifest.json", "is a symbolic link, not a file"),
    "a link for a file": (replace("model/model.safetensors", link), "model.safetensors", "is a symbolic link, not a"),
    "a link for a folder": (replace("model", link), "model", "is a symbolic link, not a folder"),
    "a file for a checkpoint": (
        lambda f: shutil.rmtree(f) or text("x")(f),
        "step-00000020/manifest.json",
        "Not a directory",
    ),
    "renamed": (lambda f: f.rename(f.with_name("step-00000030")), "step-00000030/manifest.json", "speaks of step 20"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_by_name_and_the_one_before_is_used(
    root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil, file, reason = DAMAGES[name]
    spoil(root / "step-00000020")
    assert found(root) == root / "step-00000015"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"Checkpoint refused: {root}/step-000000")
    assert file in said[0]
    assert reason in said[0]
    assert said[0].endswith(". Trying an older one.")


def test_none_is_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in root.iterdir():
        (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"No checkpoint below .* is whole.*choose another output\.dir"):
        found(root)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_there_is_none(tmp_path: Path) -> None:
    nowhere = CheckpointStore(tmp_path / "nowhere")
    assert resume_point.find_newest(nowhere, OneRank()) is None  # type: ignore[arg-type]
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-00000012.staging").mkdir()
    assert resume_point.find_newest(CheckpointStore(tmp_path), OneRank()) is None  # type: ignore[arg-type]


def test_what_a_file_system_leaves_is_no_damage(root: Path) -> None:
    """NFS gives a file that was deleted while open a name of its own; desktops leave theirs."""
    for name in (".nfs0001", "model/.DS_Store"):
        (root / "step-00000020" / name).write_text("x")
    assert found(root) == root / "step-00000020"


def test_half_written_and_half_deleted_ones_are_no_checkpoints_and_go(root: Path) -> None:
    whole = root / "step-00000020"
    copy(whole, root / "step-00000025.staging")
    copy(whole, root / "step-00000005.doomed")
    copy(whole, root / "step-00000021.broken")
    (root / "step-00000026.staging").write_text("a file")
    (root / "notes.txt").write_text("mine")
    assert found(root) == whole
    CheckpointStore(root).delete_remains()
    left = sorted(path.name for path in root.iterdir())
    assert left == ["notes.txt", "step-00000010", "step-00000015", "step-00000020", "step-00000021.broken"]


def test_a_run_uses_the_one_before_and_mends_the_newer_one(pristine: Path, tmp_path: Path) -> None:
    """To the same end, and the spoilt folder is put aside where a whole one takes its name."""
    directory = copy(pristine, tmp_path / "run")
    spoilt = directory / "checkpoints" / "step-00000020" / "optimizer.safetensors"
    spoilt.write_bytes(bytes(100))
    facts = json.loads((directory / "run.json").read_text())
    del facts["finished"]
    (directory / "run.json").write_text(json.dumps(facts))
    done = run_here(mlp(directory, checkpoint={"every_steps": 5, "keep": 3}))
    assert f"Checkpoint refused: {spoilt} has 100 bytes instead of" in done.said
    assert f"resumed at step 15 from {directory}/checkpoints/step-00000015" in done.said
    assert done.steps == list(range(1, 21))
    before = (pristine / "model" / "model.safetensors").read_bytes()
    assert (directory / "model" / "model.safetensors").read_bytes() == before
    assert "step-00000020.broken" in done.checkpoints
    assert found(directory / "checkpoints") == directory / "checkpoints" / "step-00000020"
