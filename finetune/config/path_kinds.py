"""Kinds of files and folders, so that an error about a wrong path says what it is, and what to use instead."""

import os
from pathlib import Path
from typing import Any, Literal

from finetune.utils import json_files
from finetune.utils.errors import CheckpointError

Kind = Literal["run", "checkpoint", "adapter", "gguf", "dataset", "tokenizer", "model"]

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_STEP = "step-"


def kind_of(path: Path) -> Kind | None:
    """Returns the kind of a file or folder; None if it is none of these, or nothing is there.

    A folder of several kinds is the first of them that fits: a model beside which an adapter lies is a model.
    """
    if path.is_file():
        return "gguf" if path.suffix.lower() == ".gguf" or _begins_as_gguf(path) else None
    if not path.is_dir():
        return None

    def has(*names: str) -> bool:
        return any((path / name).is_file() for name in names)

    if has("manifest.json") and (has("state.json") or path.name.startswith(_STEP)):
        return "checkpoint"
    if has("recipe.yaml") and (has("run.json") or (path / "checkpoints").is_dir()):
        return "run"
    weights = any(name.stem != "adapter_model" for pattern in _WEIGHTS for name in path.glob(pattern))
    if has("adapter_config.json") and not weights:
        return "adapter"
    if has("config.json") and weights:
        return "model"
    if any(path.glob("*.gguf")):
        return "gguf"
    if has("dataset_dict.json", "dataset_info.json") or (has("state.json") and any(path.glob("*.arrow"))):
        return "dataset"
    if has("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model") and not has("config.json"):
        return "tokenizer"
    return "model" if has("config.json") else None


def not_a_model(path: Path) -> str | None:
    """Returns why a path cannot be a model, and what to name instead; None if nothing is known against it."""
    kind = kind_of(path)
    if kind in ("run", "checkpoint"):
        return f"{_said(path)}, and no model. {_weights_of(path)}"
    if kind == "adapter":
        return _about_adapter(path)
    if kind == "gguf":
        return (
            f"{path} is GGUF, the format of llama.cpp, whose weights are mostly quantised: nothing is trained or "
            "opened in it. Name the model that it was made from, as safetensors. If there is only this file, "
            f"`AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(NEW_FOLDER)` of "
            "transformers turns it into one, and `AutoTokenizer` likewise."
        )
    if kind == "dataset":
        return f"{path} is a data set that `datasets` has saved, and no model. Name it as data.train's path."
    if kind == "tokenizer":
        return (
            f"{path} holds a tokenizer and no model: it has no config.json. Name it as tokenizer.name, and a model "
            "with its weights, or give the network's sizes in model.config."
        )
    return None


def not_a_tokenizer(path: Path) -> str | None:
    """Returns why a path cannot be a tokenizer, and what to name instead; None if nothing is known against it."""
    kind = kind_of(path)
    if kind in ("run", "checkpoint"):
        return f"{_said(path)}. Name the folder with its tokenizer: {path / 'model'}."
    if kind == "gguf":
        return f"{path} is GGUF, the format of llama.cpp. Name the tokenizer of the model that it was made from."
    if kind == "dataset":
        return f"{path} is a data set that `datasets` has saved, and no tokenizer. Name it as data.train's path."
    return None


def not_data(path: Path) -> str | None:
    """Returns why a path cannot be data, and what to name instead; None if nothing is known against it."""
    kind = kind_of(path)
    if kind in ("run", "checkpoint"):
        return f"{_said(path)}, and no data. Name the files that it was to learn from."
    if kind == "adapter":
        return f"{path} holds a LoRA adapter, and no data. Name files of documents."
    if kind == "gguf":
        return f"{path} is GGUF, a model in the format of llama.cpp, and no data. Name files of documents."
    if kind in ("model", "tokenizer"):
        return f"{path} holds a {kind}, and no data. Name files of documents; the {kind} is named as {kind}.name."
    return None


def not_a_run(path: Path) -> str | None:
    """Returns why a path cannot be a run, and what to name instead; None if nothing is known against it."""
    kind = kind_of(path)
    if kind == "checkpoint":
        return f"{_said(path)}. Name its run: {_run_of(path)}."
    if kind == "adapter":
        return f"{path} holds a LoRA adapter, not a run. {_run_beside(path)}".rstrip()
    if kind in ("model", "tokenizer", "dataset", "gguf"):
        what = {"gguf": "is GGUF, the format of llama.cpp", "dataset": "is a data set"}.get(kind, f"holds a {kind}")
        return f"{path} {what}, and is no run. {_run_beside(path)}".rstrip()
    return None


def adapter_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of an adapter.

    Raises:
        CheckpointError: If it cannot be read.
    """
    file = folder / "adapter_config.json"
    text = (str, type(None))
    shape: json_files.Shape = {"base_model_name_or_path": text, "revision": text, "task_type": text}
    try:
        found: dict[str, Any] = json_files.read(file, shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Take an intact copy of the adapter.") from error
    return found


def _about_adapter(path: Path) -> str:
    try:
        base = adapter_config(path).get("base_model_name_or_path")
    except CheckpointError as error:
        return str(error)
    of = f" for {base}" if base else ""
    named = base or "its base"
    run = _run_of(path)
    if run is None:
        merge = (
            "put it into its base by `AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()."
            "save_pretrained(NEW_FOLDER)` of peft, and name that folder"
        )
        further = ""
    else:
        merge = f"run `finetune export {run} --as merged`, and name the folder that it writes"
        further = f" To train this adapter further, keep model.name: {named} and the `lora` section, with resume={run}."
    return (
        f"{path} is a LoRA adapter{of}, and no whole model (adapter_config.json, and no weights of a network). To "
        f"begin from what it has learned, {merge}.{further} For a new adapter on the same base, name {named}."
    )


def _said(path: Path) -> str:
    return f"{path} is a {'checkpoint' if kind_of(path) == 'checkpoint' else 'run directory'} of this toolkit"


def _weights_of(path: Path) -> str:
    inner = path / "model"
    if kind_of(inner) == "model":
        return f"Its weights as a model are in {inner}: name that, or what `finetune export` writes."
    to = " --to FOLDER" if kind_of(path) == "checkpoint" else ""
    adapter = ", which puts its adapter into the base" if kind_of(inner) == "adapter" else ""
    return f"Run `finetune export {path} --as merged{to}`{adapter}, and name the folder that it writes."


def _run_of(path: Path) -> Path | None:
    """Returns the run that a checkpoint, or a folder inside a run, belongs to."""
    parents = Path(os.path.abspath(path)).parents[:3]
    found = next((parent for parent in parents if kind_of(parent) == "run"), None)
    return None if found is None else Path(os.path.relpath(found)) if not path.is_absolute() else found


def _run_beside(path: Path) -> str:
    run = _run_of(path)
    return "" if run is None else f"Its run is {run}."


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
