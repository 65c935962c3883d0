"""Checks the paths that a recipe names, and tells what is at a path, before anything slow is imported.

An error about a wrong path says what it is, and what to use instead.
"""

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from finetune.config.recipe import hint
from finetune.config.recipe_schema import Recipe
from finetune.utils import json_files
from finetune.utils.errors import CheckpointError, DataError, FinetuneError, RecipeError
from finetune.utils.file_formats import GGUF, HTML, PARQUET, format_of, holds_text

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
DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".parquet", ".csv", ".tsv", ".conll", ".conllu")
"""Endings of files that hold documents."""
_SAVED = "a directory written by `datasets`' save_to_disk"
_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz", ".lz4": "lz4", ".zip": "zip"}
_SHARD = re.compile(r"(?:^|/)(\w+)-\d{5}-of-\d{5}[^/]*$")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
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
        inner = kind_of(path / "model")
        to = " --to FOLDER" if kind == "checkpoint" else ""
        adapter = ", which puts its adapter into the base" if inner == "adapter" else ""
        advice = f"Run `finetune export {path} --as merged{to}`{adapter}, and name the folder that it writes."
        if inner == "model":
            advice = f"Its weights as a model are in {path / 'model'}: name that, or what `finetune export` writes."
    elif (known := _ADVICE[wanted].get("run" if kind == "checkpoint" else kind)) is not None:
        advice = known.format(model=path / "model")
    else:
        return None
    return f"{path} {_NAMES[kind]}, and no {wanted}. {advice}".rstrip()


def place_of_model(name: str) -> str:
    """Returns the name of a model as it is understood from everywhere: a folder's whole path, else the hub's name."""
    return os.path.abspath(name) if os.path.isdir(name) else name


def adapter_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of an adapter; a `CheckpointError` if it cannot be read."""
    file = folder / "adapter_config.json"
    text = (str, type(None))
    shape: json_files.Shape = {"base_model_name_or_path": text, "revision": text, "task_type": text}
    with CheckpointError.explaining(f"{file} cannot be read", "Take an intact copy of the adapter."):
        config: dict[str, Any] = json_files.read(file, shape)
    return config


def _about_adapter(path: Path) -> str:
    try:
        base = adapter_config(path).get("base_model_name_or_path")
    except CheckpointError as error:
        return str(error)
    of = f" for {base}" if base else ""
    named = base or "its base"
    run = _run_of(path)
    merge = (
        "put it into its base by `AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()."
        "save_pretrained(NEW_FOLDER)` of peft, and name that folder"
    )
    further = ""
    if run is not None:
        merge = f"run `finetune export {run} --as merged`, and name the folder that it writes"
        further = f" To train this adapter further, keep model.name: {named} and the `lora` section, with resume={run}."
    return (
        f"{path} is a LoRA adapter{of}, and no whole model (adapter_config.json, and no weights of a network). To "
        f"begin from what it has learned, {merge}.{further} For a new adapter on the same base, name {named}."
    )


def _run_of(path: Path) -> Path | None:
    """Returns the run that a checkpoint, or a folder inside a run, belongs to."""
    parents = Path(os.path.abspath(path)).parents[:3]
    run = next((parent for parent in parents if kind_of(parent) == "run"), None)
    return None if run is None else Path(os.path.relpath(run)) if not path.is_absolute() else run


def check_paths(recipe: Recipe) -> None:
    """Checks that the data files and model directories that a recipe names are there.

    Names on the hub are not looked up. A custom task may mean something else by these keys,
    so nothing is checked for it.

    Raises:
        FinetuneError: With everything that is missing: `DataError` if that is data only.
    """
    if ":" in recipe.task.name:
        return
    problems: list[FinetuneError] = []
    named: dict[str, Any] = {"model": recipe.model, "tokenizer": recipe.tokenizer, **recipe.frozen_models}
    for key, section in named.items():
        wanted: Wanted = "tokenizer" if key == "tokenizer" else "model"
        name, folder = section.name, Path(section.name or "")
        if section.revision is not None and (name is None or folder.is_dir()):
            where = f"{name} is a folder on this machine" if name else f"{key}.name is not given"
            problems.append(RecipeError(f"{key}.revision is of a name on the hub, and {where}; remove it."))
        if name is None:
            continue
        # A name on the hub is `name` or `organisation/name`.
        is_path = name.startswith(("/", "./", "../")) or name in (".", "..") or name.rstrip("/").count("/") > 1
        if is_path and not folder.is_dir() and kind_of(folder) is None:
            what = "a file" if folder.exists() else "not there"
            problem = (
                f"{key}.name is written as a path, {name}, and that is {what}{_nearest(folder)} (looked "
                f"from {Path.cwd()}). Name a directory, or a model on the hub as `name` or `organisation/name`."
            )
            problems.append(RecipeError(problem))
        elif (wrong := why_not(folder, wanted)) is not None:
            problems.append(RecipeError(f"{key}.name: {wrong}"))
        if folder.is_dir() and _same(folder, recipe.output.dir):
            problem = (
                f"output.dir: {recipe.output.dir} is the folder of {key}.name, which would be a run's directory "
                "from then on. Choose another one, such as runs/NAME."
            )
            problems.append(RecipeError(problem))
    for source in (*recipe.data.train, *recipe.data.validation):
        if source.path is not None:
            try:
                find_files(source.path, source.split)
            except DataError as error:
                problems.append(error)
            if _reads(source.path, Path(recipe.output.dir) / "ledger.jsonl"):
                problem = (
                    f"output.dir: what a run writes to {recipe.output.dir} would be read as data by the path "
                    f"{source.path}, the next time that it starts. Choose an output.dir elsewhere, or name the files "
                    "of data more precisely."
                )
                problems.append(RecipeError(problem))
    if problems:
        kind = DataError if all(isinstance(problem, DataError) for problem in problems) else RecipeError
        raise kind(" ".join(map(str, problems)))


def _same(one: Path, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _reads(given: str, file: Path) -> bool:
    """Tells if a source's `path` would name a file, once there is one."""
    path = Path(os.path.realpath(file.parent)) / file.name
    if os.path.isdir(given):
        below = os.path.realpath(given)
        return path.is_relative_to(below) and not any(name.startswith(".") for name in path.relative_to(below).parts)
    if os.path.lexists(given):
        return False
    pattern = Path(os.path.abspath(given)).parts
    return any(_matches(pattern, one.parts) for one in (path, Path(os.path.abspath(file))))


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Tells if a glob matches a path, part by part, as `glob.glob` does."""
    if not pattern or not parts:
        return not parts and all(name == "**" for name in pattern)
    first, *others = pattern
    hidden = parts[0].startswith(".") and not first.startswith(".")
    if first == "**":
        return _matches(others, parts) or (not hidden and _matches(pattern, parts[1:]))
    return fnmatch.fnmatchcase(parts[0], first) and not hidden and _matches(others, parts[1:])


def find_files(given: str, split: str | None = None) -> list[Path]:
    """Returns what a source's `path` names: a file, a saved data set, or the files of a directory or glob, by name.

    Links are followed. A file that is reached by several names is taken once.

    Args:
        split: The split whose files are wanted, which are named as `datasets` knows them; None if there are none.

    Raises:
        DataError: If there is nothing, something that is neither a file nor a directory, a file whose name is of no
            format that is read, or not that split.
    """
    if (scheme := re.match(r"([a-z][a-z0-9+.-]+)://(datasets/([^/@]+/[^/@]+))?", given)) is not None:
        hub = f", or name the hub's data set as `hub`: {scheme[3]}" if scheme[1] == "hf" and scheme[3] else ""
        raise DataError(
            f"{given} is an address ({scheme[1]}), and `path` is a place on this machine, since files are read several "
            f"times. Download it and name the file{hub}."
        )
    # A name with brackets in it is first of all a name.
    names = [given] if os.path.lexists(given) else glob.glob(given, recursive=True)
    if names and all(map(os.path.isdir, names)) and (len(names) > 1 or kind_of(Path(names[0])) is None):
        for name in names:
            if (wrong := why_not(Path(name), "data")) is not None:
                raise DataError(wrong)
        found_below = [path for name in names for path in data_files_below(Path(name))[0]]
        if not found_below:
            raise DataError(
                f"{given} holds no file that can be read, nor do the folders in it. Allowed are "
                f"{', '.join(DATA_SUFFIXES)}, or {_SAVED}."
            )
        names = list(map(str, found_below))
    if not names:
        raise DataError(
            f"There is no file {given}{_nearest(Path(given))} (looked from {Path.cwd()}). Relative paths count from "
            "the working directory; correct the path, or the glob so that it matches."
        )
    # A link to a directory above itself has every file below it match many times: the shortest name stays.
    unique_paths: dict[str, Path] = {}
    for path in sorted(map(Path, names), key=lambda path: (len(path.parts), path)):
        unique_paths.setdefault(os.path.realpath(path), path)
    files = [path for path in sorted(unique_paths.values()) if not path.is_dir() or len(unique_paths) == 1]
    for path in files:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            link = f"is a link to {os.readlink(path)}, which" if path.is_symlink() else "is there, but"
            raise DataError(
                f"{path} {link} cannot be opened: {error.strerror or error}. Check data.train and data.validation."
            ) from error
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe blocks, and a device never ends
            kind = "named pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
            raise DataError(
                f"{path} is a {kind}, and data is read from files, several times. Write it to a file and name that."
            )
        if (wrong := why_not(path, "data")) is not None:
            raise DataError(wrong)
        if path.suffix.lower() not in DATA_SUFFIXES and stat.S_ISREG(mode):
            check_format(path)
    if files[0].is_dir():
        return files
    above = Path(os.path.commonpath([path.parent for path in files]))
    splits = {path: split_of(path.relative_to(above)) for path in files}
    check_split(given, split, {name for name in splits.values() if name is not None})
    return [path for path in files if split in (None, splits[path])]


def check_format(path: Path) -> None:
    """Raises a `DataError` for a file that no source reads, by its first bytes and its name."""
    suffix, allowed = path.suffix.lower(), f"Allowed are {', '.join(DATA_SUFFIXES)}, or {_SAVED}."
    with DataError.explaining(f"{path} cannot be read", "Check data.train and data.validation.", OSError):
        file_format = format_of(path)
        if file_format == HTML and suffix == ".txt":
            file_format = None  # a text like any other
        if file_format is not None and not (file_format == PARQUET and suffix == ".parquet"):
            though = f", though its name ends in {path.suffix}" if suffix in DATA_SUFFIXES else ""
            raise DataError(f"{path} is {file_format.name}{though}. {file_format.advice} {allowed}")
        if suffix in (".parquet", *_COMPRESSED) and file_format is None and holds_text(path):
            raise DataError(
                f"{path} is not a readable {_COMPRESSED.get(suffix, 'Parquet')} file: it holds text. Give it a name "
                f"that says what it is. {allowed}"
            )
    if suffix not in DATA_SUFFIXES:
        raise DataError(
            f"{path} ends in '{path.suffix}', which is no format that can be read. Convert the file. {allowed}"
        )


def split_of(name: Path) -> str | None:
    """Returns the split that a file is of by its name or a folder's; None if these name none.

    Source: `datasets.data_files` (its default patterns).
    """
    text = name.as_posix().lower()
    if (sharded := _SHARD.search(text)) is not None:
        return sharded[1]
    words = re.split("[^a-z]+", text.removesuffix(name.suffix.lower()))
    return next((split for word in words for split, names in _SPLITS.items() if word in names), None)


def check_split(given: str, split: str | None, splits: Collection[str]) -> None:
    """Raises a `DataError` if a path has other splits, or several of which none is wanted."""
    names = ", ".join(sorted(splits))
    if split is None and len(splits) > 1:
        raise DataError(
            f"{given} holds the splits {names}, which would be read as one. Name one of them as the source's `split`, "
            "or in its `path`."
        )
    if split is not None and split not in splits:
        has = f"its splits are {names}. Name one of them as" if splits else "nor any other. Remove"
        raise DataError(f"{given} has no split '{split}'; {has} the source's `split`.")


def data_files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the files in a folder and in those below it that a source reads, and those that it leaves out, by name.

    Those that hold something other than text are among the first, for their reader to refuse. Hidden ones are left out
    without a word.
    """

    def is_read(path: Path) -> bool:
        with suppress(OSError):
            return path.suffix.lower() in DATA_SUFFIXES or not path.is_file() or format_of(path) is not None
        return True

    paths = (folder / name for name in sorted(glob.glob("**", root_dir=folder, recursive=True)))
    files = {path: is_read(path) for path in paths if not path.is_dir()}
    return [path for path, read in files.items() if read], [path for path, read in files.items() if not read]


def _nearest(path: Path) -> str:
    """Returns a hint at a similar name beside the path, or beside the first folder that is missing."""
    if glob.has_magic(str(path)):
        return ""
    while not path.parent.is_dir() and path.parent != path:
        path = path.parent
    with suppress(OSError):
        return hint(path.name, os.listdir(path.parent))
    return ""
