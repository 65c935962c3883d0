"""A path that is something else than its key wants is called by what it is, with what to name instead."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from finetune.config import recipe_paths
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_paths import Kind, kind_of
from finetune.data.tokenization.tokenizer import load_tokenizer
from finetune.export.find_weights import find_weights
from finetune.export.load_model import load_model
from finetune.models.model_config import resolve_model_config
from finetune.utils.errors import FinetuneError, RecipeError


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """One of each kind, as far as names tell it."""
    run = write(tmp_path / "run", recipe__yaml="model: {}", run__json='{"starts": []}')
    adapter = {"adapter_config__json": json.dumps({"base_model_name_or_path": "some/base"})}
    adapter["adapter_model__safetensors"] = adapter["tokenizer__json"] = "x"
    write(run / "model", **adapter)
    full = write(tmp_path / "full", recipe__yaml="model: {}", run__json='{"starts": []}')
    write(full / "model", config__json="{}", model__safetensors="x")
    (tmp_path / "bare").write_bytes(b"GGUF\3\0\0\0")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    return {
        "run": run,
        "full run": full,
        "checkpoint": write(run / "checkpoints/step-00000002", manifest__json="{}", state__json="{}"),
        "run's adapter": run / "model",
        "adapter": write(tmp_path / "adapter", **adapter),
        "gguf folder": write(tmp_path / "gguf", **{"a-q4__gguf": "GGUF", "config__json": "{}"}),
        "gguf file": tmp_path / "gguf/a-q4.gguf",
        "gguf without its name": tmp_path / "bare",
        "saved": tmp_path / "saved",
        "tokenizer": write(tmp_path / "tokenizer", tokenizer__json="{}"),
        "model": full / "model",
        "model and adapter": write(tmp_path / "both", config__json="{}", model__safetensors="x", **adapter),
        "texts": write(tmp_path / "texts", a__jsonl="{}"),
    }


KINDS: dict[str, Kind | None] = {
    "run": "run",
    "full run": "run",
    "checkpoint": "checkpoint",
    "run's adapter": "adapter",
    "adapter": "adapter",
    "gguf folder": "gguf",
    "gguf file": "gguf",
    "gguf without its name": "gguf",
    "saved": "dataset",
    "tokenizer": "tokenizer",
    "model": "model",
    "model and adapter": "model",
    "texts": None,
}
AS_MODEL = {
    "run": "is a run directory of this toolkit, and no model. Run `finetune export {run} --as merged`, which puts its",
    "full run": "is a run directory of this toolkit, and no model. Its weights as a model are in {full run}/model",
    "checkpoint": "is a checkpoint of this toolkit, and no model. Run `finetune export {checkpoint} --as merged --to",
    "run's adapter": "is a LoRA adapter for some/base, and no whole model",
    "adapter": "of peft, and name that folder. For a new adapter on the same base, name some/base",
    "gguf folder": "is GGUF, the format of llama.cpp",
    "gguf file": "is GGUF, the format of llama.cpp",
    "gguf without its name": "is GGUF, the format of llama.cpp",
    "saved": "is a data set that `datasets` has saved, and no model",
    "tokenizer": "holds a tokenizer, and no model",
}
AS_TOKENIZER = {
    "run": "is a run directory of this toolkit, and no tokenizer. Name the folder with its tokenizer: {run}/model",
    "checkpoint": "toolkit, and no tokenizer. Name the folder with its tokenizer: {checkpoint}/model",
    "gguf file": "is GGUF",
    "saved": "and no tokenizer",
}
AS_DATA = {
    "run": "is a run directory of this toolkit, and no data",
    "checkpoint": "is a checkpoint of this toolkit, and no data",
    "run's adapter": "holds a LoRA adapter, and no data",
    "gguf file": "is GGUF, the format of llama.cpp, and no data",
    "model": "holds a model, and no data",
    "tokenizer": "holds a tokenizer, and no data",
}


def recipe_of(**sections: Any) -> Any:
    tree = {"model": {"config": {"model_type": "llama"}}, "tokenizer": {"vocab_size": 300}, "length": {"steps": 1}}
    return validate_recipe({**tree, "data": {"train": [{"sample": 9}]}, **sections})


def said(act: Any) -> str:
    with pytest.raises(FinetuneError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_is_known(places: dict[str, Path]) -> None:
    assert {name: kind_of(path) for name, path in places.items()} == KINDS


@pytest.mark.parametrize("name", AS_MODEL)
def test_as_a_model(places: dict[str, Path], name: str) -> None:
    """Before anything slow, and where a configuration is read by whoever has not looked."""
    path, expected = str(places[name]), AS_MODEL[name].format_map(places)
    recipe = recipe_of(model={"name": path}, tokenizer={})
    for act in (lambda: recipe_paths.check_paths(recipe), lambda: resolve_model_config(recipe)):
        text = said(act)
        assert text.startswith("model.name: ")
        assert expected in text
    if kind_of(places[name]) not in ("run", "checkpoint", "adapter"):
        assert expected in said(lambda: load_model(path))


def test_an_adapter_of_a_run_can_be_trained_further(places: dict[str, Path]) -> None:
    text = said(lambda: recipe_paths.check_paths(recipe_of(model={"name": str(places["run's adapter"])}, tokenizer={})))
    assert f"run `finetune export {places['run']} --as merged`" in text
    assert f"keep model.name: some/base and the `lora` section, with resume={places['run']}" in text


@pytest.mark.parametrize("name", AS_TOKENIZER)
def test_as_a_tokenizer(places: dict[str, Path], name: str) -> None:
    recipe = recipe_of(tokenizer={"name": str(places[name])})
    for act in (lambda: recipe_paths.check_paths(recipe), lambda: load_tokenizer(recipe)):
        assert AS_TOKENIZER[name].format_map(places) in said(act)


@pytest.mark.parametrize("name", AS_DATA)
def test_as_data(places: dict[str, Path], name: str) -> None:
    recipe = recipe_of(data={"train": [{"path": str(places[name])}]})
    assert AS_DATA[name] in said(lambda: recipe_paths.check_paths(recipe))


def test_as_a_run(places: dict[str, Path]) -> None:
    assert f"holds a LoRA adapter, and no run. Its run is {places['run']}." in said(
        lambda: find_weights(places["run's adapter"])
    )
    assert "is GGUF, the format of llama.cpp, and no run" in said(lambda: find_weights(places["gguf folder"]))
    assert "holds a tokenizer, and no run" in said(lambda: find_weights(places["tokenizer"]))


OUTPUTS = {
    "base": ({"model": {"name": "base"}, "tokenizer": {}}, "./base", "is the folder of model.name"),
    "link to the base": ({"model": {"name": "link"}, "tokenizer": {}}, "base", "is the folder of model.name"),
    "tokenizer": ({"tokenizer": {"name": "words"}}, "words", "is the folder of tokenizer.name"),
    "folder of data": ({"data": {"train": [{"path": "texts"}]}}, "texts", "read as data by the path texts"),
    "below it": ({"data": {"train": [{"path": "."}]}}, "runs/one", "read as data by the path ."),
    "glob": ({"data": {"train": [{"path": "texts/*.jsonl"}]}}, "texts", r"read as data by the path texts/\*.jsonl"),
    "glob below": ({"data": {"train": [{"path": "**/*.jsonl"}]}}, "runs/a/b", "read as data"),
    "all below": ({"data": {"train": [{"path": "texts/**"}]}}, "texts/runs/a", "read as data"),
    "validation": (
        {"data": {"train": [{"sample": 9}], "validation": [{"path": "texts/*.jsonl"}]}},
        "texts",
        "read as data",
    ),
    "beside the base": ({"model": {"name": "base"}, "tokenizer": {}}, "runs/base", None),
    "in the base": ({"model": {"name": "base"}, "tokenizer": {}}, "base/run", None),
    "beside the data": ({"data": {"train": [{"path": "texts"}]}}, "runs/texts", None),
    "one file": ({"data": {"train": [{"path": "texts/a.jsonl"}]}}, "texts", None),
    "other names": ({"data": {"train": [{"path": "texts/a*.jsonl"}]}}, "texts", None),
    "folder above": ({"data": {"train": [{"path": "texts/*.jsonl"}]}}, "texts/run", None),
    "hidden": ({"data": {"train": [{"path": "."}]}}, ".runs/one", None),
    "hidden from a glob": ({"data": {"train": [{"path": "**/*.jsonl"}]}}, ".runs/one", None),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_run_does_not_write_where_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The base would be no model from then on, and the ledger would be a file of documents at the next start."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "base", config__json="{}", model__safetensors="x")
    (tmp_path / "link").symlink_to("base")
    write(tmp_path / "words", tokenizer__json="{}")
    write(tmp_path / "texts", a__jsonl="{}")
    sections, output, says = OUTPUTS[name]
    recipe = recipe_of(**sections, output={"dir": output})
    if says is None:
        recipe_paths.check_paths(recipe)
    else:
        with pytest.raises(RecipeError, match=rf"output\.dir: .*{says}"):
            recipe_paths.check_paths(recipe)


def test_what_is_right_is_not_refused(places: dict[str, Path]) -> None:
    for sections in (
        {"model": {"name": str(places["model"])}, "tokenizer": {}},
        {"model": {"name": str(places["model and adapter"])}, "tokenizer": {}},
        {"tokenizer": {"name": str(places["tokenizer"])}},
        {"tokenizer": {"name": str(places["run's adapter"])}},
        {"data": {"train": [{"path": str(places["saved"])}]}},
        {"data": {"train": [{"path": f"{places['texts']}/*.jsonl"}]}},
    ):
        recipe_paths.check_paths(recipe_of(**sections))
