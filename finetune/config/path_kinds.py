"""Kinds of files and folders, so that an error about a wrong path says what it is, and what to use instead."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from finetune.utils import json_files
from finetune.utils.errors import CheckpointError
from finetune.utils.file_formats import GGUF, format_of

Kind = Literal["run", "checkpoint", "adapter", "gguf", "dataset", "tokenizer", "model"]
Wanted = Literal["run", "model", "tokenizer", "data"]

_NAMES: dict[Kind, str] = {
    "run": "is a run directory of this toolkit",
    "checkpoint": "is a checkpoint of this toolkit",
    "adapter": "holds a LoRA adapter",
    "gguf": "is GGUF, the format of llama.cpp",
    "dataset": "is a data set that `datasets` has saved",
    "tokenizer": "holds a tokenizer",
    "model": "holds a model",
}
_ADVICE: dict[Wanted, dict[Kind, str]] = {
    "model": {
        "gguf": "Its weights are mostly quantised: nothing is trained or opened in it. Name the model that it was made "
        "from, as safetensors. If there is only this file, "
        "`AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(NEW_FOLDER)` of transformers "
        "turns it into one, and `AutoTokenizer` likewise.",
        "dataset": "Name it as data.train's path.",
        "tokenizer": "Name it as tokenizer.name, and a model with its weights, or give the network's sizes in "
        "model.config.",
    },
    "tokenizer": {
        "run": "Name the folder with its tokenizer: {model}.",
        "gguf": "Name the tokenizer of the model that it was made from.",
        "dataset": "Name it as data.train's path.",
    },
    "data": {
        "run": "Name the files that it was to learn from.",
        "adapter": "Name files of documents.",
        "gguf": "Name files of documents.",
        "model": "Name files of documents. The model is named as model.name.",
        "tokenizer": "Name files of documents. The tokenizer is named as tokenizer.name.",
    },
}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def kind_of(path: Path) -> Kind | None:
    """Returns the kind of a file or folder; None if it is none of these, or nothing is there.

    A folder of several kinds is the first of them that fits: a model beside which an adapter lies is a model.
    """
    if path.is_file():
        with suppress(OSError):
            return "gguf" if path.suffix.lower() == ".gguf" or format_of(path) == GGUF else None
        return None
    if not path.is_dir():
        return None

    def has(*names: str) -> bool:
        return any((path / name).is_file() for name in names)

    if has("manifest.json") and (has("state.json") or path.name.startswith("step-")):
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


def why_not(path: Path, wanted: Wanted) -> str | None:
    """Returns why a path cannot be what is wanted, and what to name instead; None if nothing is known against it."""
    kind = kind_of(path)
    if kind is None or kind == wanted:
        return None
    if (wanted, kind) == ("model", "adapter"):
        return _about_adapter(path)
    if wanted == "run":
        run = _run_of(path)
        advice = "" if run is None else f"Its run is {run}."
    elif wanted == "model" and kind in ("run", "checkpoint"):
        advice = _weights_of(path)
    elif (known := _ADVICE[wanted].get("run" if kind == "checkpoint" else kind)) is not None:
        advice = known.format(model=path / "model")
    else:
        return None
    return f"{path} {_NAMES[kind]}, and no {wanted}. {advice}".rstrip()


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
