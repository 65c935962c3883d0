"""Reads the DeepSpeed config that a launch file names. Loads neither torch nor DeepSpeed, which need not be installed.

DeepSpeed's own models of a config can be imported with torch alone, and have no key of its top level: it passes over
those that it does not know. So its keys are listed in `deepspeed_keys.yaml`; a test compares them.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config import config_files
from finetune.config.provenance import flat, place_of, places
from finetune.config.recipe import hint
from finetune.utils import json_files
from finetune.utils.errors import BackendError
from finetune.utils.file_formats import read_text
from finetune.utils.yaml_files import FAST_LOADER, check_length, parse

_FILE = Path(__file__).with_name("deepspeed_keys.yaml")
TABLE: dict[str, dict[str, Any]] = parse(_FILE.read_text("utf-8"), FAST_LOADER)
"""What is known of DeepSpeed's keys; the file says what each part means."""

MEANINGS: Mapping[str, tuple[str, str]] = {key: (meaning, unit) for key, (meaning, unit) in TABLE["meanings"].items()}
"""The keys whose values matter here, dotted: meaning and unit."""


def read_deepspeed_file(path: str, file: str | None) -> tuple[str, dict[str, Any]]:
    """Reads the config that a launch file, or the environment, names; returns where it is, and its keys and values.

    It lies beside the launch file, in the folder above it, as in a checkout, or where we are. Keys have the names of
    DeepSpeed's documentation, whichever are written.

    Raises:
        BackendError: If there is none, it cannot be read, or it holds keys that DeepSpeed does not know.
    """
    ds_path = find_deepspeed_file(path, file)
    with BackendError.explaining(f"The DeepSpeed config {ds_path} cannot be read as JSON", ""):
        check_length(text := read_text(ds_path))
        config = json_files.parse(text, pairs=_each_once)
    if not isinstance(config, dict):
        raise BackendError(f"The DeepSpeed config {ds_path} must hold keys and values, not {type(config).__name__}.")
    if (other := config_files.other_kind(config, config_files.DEEPSPEED)) is not None:
        raise BackendError(f"{ds_path}: {other}")
    problems = [*_rename(config), *_unknown(config)]
    problems += [(key, f"deprecated; write {new}") for key, new in TABLE["deprecated"].items() if key in flat(config)]
    problems += [
        (key, f"is not read here: {reason}. Take it out")
        for key, reason in TABLE["refused"].items()
        if _acts(key, _value_of(config, key))
    ]
    if problems:
        lines = places(ds_path)
        reported = [f"{place_of(key, ds_path, lines)}: {key}: {what}" for key, what in problems]
        raise BackendError.of(f"The DeepSpeed config {ds_path}", reported)
    zero = config.get("zero_optimization")
    for section in zero.values() if isinstance(zero, dict) else ():
        if isinstance(section, dict) and isinstance(folder := section.get("nvme_path"), str):
            section["nvme_path"] = os.path.expanduser(folder)
    return str(ds_path), config


def find_deepspeed_file(path: str, file: str | None) -> Path:
    """Returns the DeepSpeed config that a launch file names; see `read_deepspeed_file`.

    Raises:
        BackendError: If there is none.
    """
    beside = [] if file is None else [Path(file).parent, Path(file).parent / ".."]
    looked = [Path(os.path.normpath(folder / os.path.expanduser(path))) for folder in (*beside, Path())]
    if (candidate := next((candidate for candidate in looked if candidate.is_file()), None)) is not None:
        return candidate
    where = ", ".join(dict.fromkeys(os.path.abspath(candidate.parent) for candidate in looked))
    raise BackendError(f"{file or 'The environment'} names the DeepSpeed config {path}, and there is none in {where}.")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key '{next(name for name in names if names.count(name) > 1)}' is given twice")
    return mapping


def known_keys(section: str) -> list[str]:
    """Returns the keys of a section, "" being the top; none where what is below it is not looked at."""
    prefix = f"{section}." if section else ""
    below = (
        key.removeprefix(prefix)
        for key in (*MEANINGS, *TABLE["refused"], *TABLE["passed_on"])
        if key and key.startswith(prefix)
    )
    return list(dict.fromkeys([*(key.split(".")[0] for key in below), *TABLE["passed_on"].get(section, "").split()]))


def _rename(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Gives keys with several names the one of DeepSpeed's documentation, in place; those given twice are problems."""
    zero, known = config.get("zero_optimization"), known_keys("zero_optimization")
    names = [(config, "", "bfloat16", "bf16")]
    if isinstance(zero, dict):
        names += [(zero, "zero_optimization.", n, f"stage3_{n}") for n in zero if f"stage3_{n}" in known]
    for section, prefix, old, new in names:
        if old in section and new in section:
            yield f"{prefix}{old}", f"the same as {new}; take one out"
        if old in section:
            section[new] = section.pop(old)


def _unknown(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yields the keys of a section that DeepSpeed does not know, dotted, each with what is wrong."""
    known = known_keys(section)
    for name, value in tree.items():
        key = f"{section}.{name}".removeprefix(".")
        if key in TABLE["removed"]:
            yield key, "; ".join(filter(None, ("DeepSpeed has removed it, so take it out", TABLE["removed"][key])))
        elif name not in known:
            yield key, f"unknown key{hint(name, known) or ' (allowed: ' + ', '.join(known) + ')'}"
        elif known_keys(key) and isinstance(value, dict):
            yield from _unknown(value, key)
        elif known_keys(key) and value is not None:
            yield key, f"must hold keys and values, not {json.dumps(value)}"


def _value_of(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _acts(key: str, value: Any) -> bool:
    """Tells if a value changes what DeepSpeed does; of a section, if any value of it would."""
    if isinstance(value, dict):
        return value.get("enabled") is not False and any(_acts("", each) for each in value.values())
    if key in TABLE["defaults"]:
        return value not in (None, TABLE["defaults"][key])
    # A group of one rank, and a ratio of 1, are none.
    return value is True or value not in (None, False, 0, 1)
