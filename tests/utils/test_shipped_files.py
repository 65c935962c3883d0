"""Files that ship: found by name from anywhere, and the wheel holds them as they are."""

import re
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from harness import ROOT
from hatchling.builders.wheel import WheelBuilder

from finetune.utils import shipped_files


def test_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp").mkdir()  # an output folder, say
    assert Path(shipped_files.launch_file("fsdp")) == ROOT / "accelerate_configs" / "fsdp.yaml"
    assert Path(shipped_files.recipe_file("sample")) == ROOT / "recipes" / "sample.yaml"


def test_a_project_of_ones_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accelerate_configs").mkdir()
    (tmp_path / "accelerate_configs" / "fsdp.yaml").write_text("")
    assert shipped_files.launch_file("fsdp") == "accelerate_configs/fsdp.yaml"
    assert shipped_files.launch_folder() == Path("accelerate_configs")
    assert Path(shipped_files.launch_file("ddp")).parent == ROOT / "accelerate_configs"


@pytest.mark.parametrize("word", ["fsdp.yaml", "my/fsdp", "./fsdp", "nonesuch", "fsdp"])
def test_a_path_stays_as_it_is(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if word == "fsdp":
        (tmp_path / "fsdp").write_text("a file of that name")
    assert shipped_files.launch_file(word) == word


def test_the_wheel_holds_them_as_they_are(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        for folder, ending in (("accelerate_configs", "yaml"), ("ds_configs", "json"), ("recipes", "yaml")):
            files = sorted((ROOT / folder).glob(f"*.{ending}"))
            assert files
            inside = [name for name in archive.namelist() if name.startswith(f"finetune/{folder}/")]
            assert sorted(Path(name).name for name in inside) == [file.name for file in files]
            for file in files:
                assert archive.read(f"finetune/{folder}/{file.name}") == file.read_bytes()
        assert archive.read("finetune/constraints.txt") == (ROOT / "constraints.txt").read_bytes()
        package = {
            str(file.relative_to(ROOT))
            for file in (ROOT / "finetune").rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }
        assert {"finetune/py.typed", "finetune/config/recipe.schema.json"} <= package <= set(archive.namelist())
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        extras = set(Parser().parsestr(archive.read(metadata).decode()).get_all("Provides-Extra", []))
    named = set()
    for folder, ending in ((".", "md"), ("docs", "md"), ("finetune", "py")):
        for file in (ROOT / folder).glob(f"*.{ending}") if folder == "." else (ROOT / folder).rglob(f"*.{ending}"):
            for words in re.findall(r"(?:finetune|\.whl)\[([a-z0-9, ]+)\]", file.read_text(encoding="utf-8")):
                named |= {word.strip() for word in words.split(",")}
    assert {"report", "tensorboard", "trackio", "wandb"} <= named <= extras
