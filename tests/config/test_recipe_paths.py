"""Files and directories that a recipe names: looked for early, and read only where they are files."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from harness import ROOT

from finetune.config import recipe_paths
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Source
from finetune.data.sources.corpus import open_source
from finetune.utils.errors import DataError, FinetuneError, RecipeError

TREE: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "tokenizer": {"vocab_size": 300},
    "data": {"train": [{"path": "storys/train.jsonl"}]},
    "length": {"steps": 1},
}
# Each command in turn, and whether anything heavy was imported for it.
COMMANDS = """
import sys
from finetune.cli.main import main
from finetune.training.entry_point import train_main
file = sys.argv[1]
launch = ["launch", "--config_file", sys.argv[2], file]
for run, words in ((main, ["data", file]), (main, launch), (train_main, [file]),
                   (train_main, [file, "--dry-run"])):
    print(run(words), sorted({"torch", "transformers", "datasets", "accelerate"} & set(sys.modules)))
"""


def texts(path: object, **keys: Any) -> list[str]:
    return [document.text for document in open_source(Source(path=str(path), **keys)).documents()]


def refusal(path: object, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        texts(path, **keys)
    said = str(caught.value)
    assert "\n" not in said
    return said


# ---------------------------------------------------------------- early


def test_a_mistyped_path_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "stories").mkdir()
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(TREE))
    config = str(ROOT / "accelerate_configs" / "single.yaml")
    found = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(file), config],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == ["2 []"] * 4
    assert found.stderr.count("There is no file storys/train.jsonl, did you mean 'stories'?") == 4
    assert "Traceback" not in found.stderr


def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> FinetuneError | None:
    monkeypatch.chdir(tmp_path)
    tree = {**TREE, "data": {"train": [{"sample": 10}]}, **keys}
    try:
        recipe_paths.check_paths(validate_recipe(tree))
    except FinetuneError as error:
        return error
    return None


@pytest.mark.parametrize("name", ["runs/a/modle", "./modle", "../modle", "/tmp/nowhere/modle", "~/nowhere/modle", ".."])
def test_a_model_that_is_written_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    missing = problems(tmp_path, monkeypatch, model={"name": name}, tokenizer={})
    if name == "..":
        assert missing is None  # whether there is a model in it is another question
    else:
        assert isinstance(missing, RecipeError)
        written = os.path.expanduser(name)
        assert f"model.name is written as a path, {written}, and that is not there" in str(missing)
    assert "tokenizer.name is" in str(problems(tmp_path, monkeypatch, tokenizer={"name": f"./{name}/x"}))


@pytest.mark.parametrize("name", ["gpt2", "organisation/name"])
def test_a_name_on_the_hub_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert problems(tmp_path, monkeypatch, model={"name": name}, tokenizer={}) is None


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").write_text("")
    data = {"train": [{"path": "a.jsonl"}], "validation": [{"path": "b*.jsonl"}]}
    found = problems(tmp_path, monkeypatch, model={"name": "./model"}, tokenizer={}, data=data)
    assert isinstance(found, RecipeError)
    for part in ("./model, and that is a file", "no file a.jsonl", "no file b*.jsonl"):
        assert part in str(found)
    assert isinstance(problems(tmp_path, monkeypatch, data=data), DataError)


def test_a_task_of_ones_own_may_mean_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(tmp_path, monkeypatch, **{**TREE, "task": {"name": "mine:task"}}) is None


# ---------------------------------------------------------------- what is no file, or elsewhere


def test_parent_folders_and_absolute_paths_are_read_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.chdir(tmp_path / "inner")
    assert texts("../a.txt") == texts(tmp_path / "a.txt") == texts("../inner/../*.txt") == ["one"]


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to("away/a.txt")
    (tmp_path / "folder").symlink_to("away")
    assert texts(tmp_path / "b.txt") == texts(tmp_path / "folder" / "*.txt") == ["one"]


def test_a_file_that_a_glob_reaches_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "up").symlink_to(".")
    assert texts(tmp_path / "**" / "*.txt") == ["one"]
    (document,) = open_source(Source(path=f"{tmp_path}/**/*.txt")).documents()
    assert document.where == f"{tmp_path}/a.txt, line 1"


@pytest.mark.parametrize("glob", [False, True])
def test_links_that_lead_nowhere(tmp_path: Path, glob: bool) -> None:
    (tmp_path / "a.txt").symlink_to("gone.txt")
    assert "a.txt is a link to gone.txt, which cannot be opened: No such file" in refusal(
        tmp_path / ("*.txt" if glob else "a.txt")
    )
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").symlink_to("a.txt")
    assert "Too many levels" in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize("glob", [False, True])
def test_a_pipe_is_not_waited_for(tmp_path: Path, glob: bool) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert "a.jsonl is a named pipe, and data is read from files" in refusal(
        tmp_path / ("*.jsonl" if glob else "a.jsonl")
    )


def test_a_device_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("/dev/zero")
    assert "a.jsonl is a device" in refusal(tmp_path / "a.jsonl")
    assert "/dev/null is a device" in refusal("/dev/null")


def test_a_socket_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("a.jsonl")
        assert "a.jsonl is a socket" in refusal("a.jsonl")


def saved(folder: Path, text: str) -> Path:
    datasets.Dataset.from_dict({"text": [text]}).save_to_disk(str(folder))
    return folder


def test_a_split_lies_within_its_data_set(tmp_path: Path) -> None:
    secret = saved(tmp_path / "secret", "private")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(str(tmp_path / "set"))
    assert texts(tmp_path / "set") == ["a"]
    for split in ("../secret", str(secret), "train/../../secret", "."):
        assert "its splits are train" in refusal(tmp_path / "set", split=split)


@pytest.mark.parametrize("name", ["../secret/{}", "{folder}/secret/{}", "sub/../../secret/{}"])
def test_a_saved_data_set_reads_its_own_files_only(tmp_path: Path, name: str) -> None:
    """Its list of files may have been written by a stranger."""
    file = next(saved(tmp_path / "secret", "private").glob("*.arrow")).name
    place = saved(tmp_path / "set", "mine")
    (place / "sub").mkdir()
    state = json.loads((place / "state.json").read_text())
    state["_data_files"] = [{"filename": name.format(file, folder=tmp_path)}]
    (place / "state.json").write_text(json.dumps(state))
    assert "which is not a file in that directory" in refusal(place)


@pytest.mark.parametrize("content", ["{", "[]", '{"_data_files": 3}', '{"_data_files": [{}]}', "[" * 100_000])
def test_a_saved_data_set_with_a_damaged_list(tmp_path: Path, content: str) -> None:
    place = saved(tmp_path / "set", "mine")
    (place / "state.json").write_text(content)
    assert "its state.json is damaged" in refusal(place)
    shutil.rmtree(place)


@pytest.mark.parametrize("section", ["model", "tokenizer"])
def test_a_revision_is_of_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    """A folder has none, and it was not looked at."""
    (tmp_path / "base").mkdir()
    own = dict(TREE[section])
    for keys, where in (({"name": "base"}, "base is a folder on this machine"), (own, f"{section}.name is not given")):
        told = problems(tmp_path, monkeypatch, **{section: {**keys, "revision": "v2"}})
        assert f"{section}.revision is of a name on the hub, and {where}; remove it." in str(told)
