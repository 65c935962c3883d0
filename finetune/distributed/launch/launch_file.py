"""Reads a launch file, and refuses what Accelerate would ignore. Loads no torch."""

import re
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finetune.config import config_files
from finetune.config.provenance import place_of, places
from finetune.config.recipe import hint, read_keys
from finetune.distributed.launch.launch_schema import (
    FROM_COMMAND_LINE,
    KEYS,
    SECTIONS,
    SECTIONS_OF,
    LaunchFile,
    full_name,
    least_of,
)
from finetune.utils.errors import BackendError


def launch_files_in(folder: Path) -> dict[str, Path]:
    """Returns the launch files of a folder by name; a `BackendError` without any."""
    if files := {file.stem: file for file in sorted(folder.glob("*.yaml"))}:
        return files
    raise BackendError(
        f"There are no launch files in {folder}. Start from a checkout, or name a folder: --configs accelerate_configs."
    )


def read_launch_file(file: str) -> LaunchFile:
    """Reads a launch file.

    Raises:
        BackendError: If it is no launch file, or says what nothing would read.
    """
    tree = read_keys(Path(file), config_files.LAUNCH, BackendError)
    problems, kind = [], str(tree.get("distributed_type"))
    for name in SECTIONS:
        if tree.get(name) and kind in SECTIONS_OF and name not in SECTIONS_OF[kind]:
            problems.append((name, f"distributed_type {kind} does not read this section; take it out"))
            del tree[name]
    for name in FROM_COMMAND_LINE:
        if name in tree:
            problems.append((name, f"Accelerate does not take it from the file; give --{name}"))
    try:
        launch_file = LaunchFile.model_validate(tree)
    except ValidationError as error:
        problems += map(_problem, error.errors(include_url=False))
    if problems:
        lines = key_lines(file)
        reported = [f"{place_of(key, file, lines)}: {key}: {what}" for key, what in problems]
        raise BackendError.of(f"The launch file {file}", reported)
    return launch_file


def key_lines(file: str) -> dict[str, int]:
    """Returns the line, from 1, at which a launch file gives each dotted key, by the key's full name."""
    section = "fsdp_config."
    return {
        f"{section}{full_name(key.removeprefix(section))}" if key.startswith(section) else key: line
        for key, line in places(file).items()
    }


def _problem(error: ErrorDetails) -> tuple[str, str]:
    """Returns the key of one of pydantic's errors, and what is wrong.

    Accelerate takes what YAML makes of a value as it is: a text "2" is no number to it, and a text "false" is true.
    """
    key, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
    section, _, name = key.rpartition(".")
    if kind in ("extra_forbidden", "invalid_key"):
        level = SECTIONS.get(section, LaunchFile)
        if name in level.not_read:
            return key, f"is not read here: {level.not_read[name]}. Take it out"
        known = [key for key in level.model_fields if key not in FROM_COMMAND_LINE]
        return key, f"unknown key{hint(name, known) or ' (allowed: ' + ', '.join(known) + ')'}"
    if kind == "missing":
        return key, f"missing; give one of {', '.join(SECTIONS_OF)}, NO in quotes"
    got, text = "null" if value is None else repr(value), isinstance(value, str)
    if kind == "model_type":
        return key, f"must hold keys and values, got {got}"
    if key == "compute_environment":
        return key, f"{value}, and only LOCAL_MACHINE is offered"
    if key == "distributed_type":
        if value is False:
            return key, "false, which is what YAML makes of NO without quotes; write 'NO'"
        return key, (
            f"{value}, which is not offered; use {', '.join(SECTIONS_OF)} (without a GPU these run on gloo, so "
            "MULTI_CPU is not needed)"
        )
    if kind == "string_type":
        made = " (which YAML makes of yes, no, on and off)" if isinstance(value, bool) else ""
        return key, f"must be a text, got {got}{made}; put it in quotes"
    least, quoted = least_of(KEYS[key]), ", which is a text: take its quotes off"
    if kind == "literal_error":
        allowed = error["ctx"]["expected"]
        return key, f"must be {allowed}, got {got}{hint(str(value), re.findall('[A-Za-z_]+', allowed))}"
    expected = "true or false" if least is None else f"a number from {least}"
    if value is None:
        return key, f"must be {expected}, got null; give a value, or take the key out"
    if least is not None:
        return key, f"must be {expected}, got {got}{quoted if text and value.strip().isdecimal() else ''}"
    meant = str(value).lower() in ("true", "false", "yes", "no", "on", "off")
    near = quoted if meant else hint(str(value).lower(), ["true", "false"])
    return key, f"must be {expected}, got {got}{near}"
