"""Origins of values: default, file, command line or environment, and what each overrides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from finetune.config.recipe_schema import Recipe, section_in
from finetune.utils.yaml_files import FAST_LOADER

Layer = Literal["default", "recipe file", "command line", "environment", "launch file", "ds_config", "derived"]


@dataclass(frozen=True)
class Setting:
    """Value of a key in one layer."""

    layer: Layer
    place: str
    """File and line, the words of the command line, a variable's name, or what it was derived from."""
    value: Any


@dataclass(frozen=True)
class Value:
    """A key, with its values in all layers."""

    key: str
    section: str
    settings: tuple[Setting, ...]
    """Layers that give the key; the last one wins. Empty: the key is not in force."""
    meaning: str
    unit: str = ""

    @property
    def overridden(self) -> tuple[Setting, ...]:
        """Settings with another value that the last one overrides, the latest first."""
        return tuple(setting for setting in self.settings[-2::-1] if setting.value != self.settings[-1].value)

    @property
    def is_default(self) -> bool:
        return all(setting.layer == "default" for setting in self.settings)


@dataclass(frozen=True)
class Origin:
    """Origin of a recipe's values, so that problems can name the place."""

    path: str | Path
    tree: Mapping[str, Any]
    """Keys and values of the file alone."""
    overrides: Sequence[str] = ()

    def of(self, key: str, problem: str, in_file: Sequence[str]) -> str:
        """Returns the place of a key that has a problem: an override, or the file and its line.

        Args:
            in_file: Problems that the file has without the overrides.
        """
        for override in reversed(self.overrides):
            if concerns_key(override, key):
                return f"{printable(override)} (command line)"
        if problem not in in_file and self.overrides:
            # A conflict between a key of the file and one that was overridden.
            named = [text for text in self.overrides if text.partition("=")[0].rpartition(".")[2] in problem]
            return f"{' '.join(map(printable, named or self.overrides))} (command line)"
        return place_of(key, self.path, places(self.path))


def printable(override: str) -> str:
    """Returns an override without what may be a secret: who is told of a run."""
    name, _, value = override.partition("=")
    return f"{name}=…" if concerns_key(override, "guard.alert") and "alert" in name + value else override


def concerns_key(override: str, key: str) -> bool:
    """Tells if an override sets a key, or one above or below it."""
    name, _, value = override.partition("=")
    field = Recipe.model_fields.get(name)
    section = section_in(field.annotation) if field is not None else None
    if section is not None and section.short_for is not None and not value.lstrip().startswith("{"):
        name = f"{name}.{section.short_for}"
    return name == key or key.startswith(f"{name}.") or name.startswith(f"{key}.")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted keys and their values; items of a list of mappings are numbered: `data.train.0.path`."""
    flattened: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{key}.")
        else:
            flattened[key] = value
    return flattened


def places(file: str | Path) -> dict[str, int]:
    """Returns the line, from 1, of each dotted key in a YAML or JSON file; empty if it cannot be parsed."""
    try:
        root = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=FAST_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return _lines(root, "")


def place_of(key: str, file: str | Path, lines: Mapping[str, int]) -> str:
    """Returns `file:line` of a key, or of the nearest one above it; the file alone if it gives neither."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{file}:{lines[key]}" if key else str(file)


def _lines(node: yaml.Node | None, prefix: str) -> dict[str, int]:
    line_numbers: dict[str, int] = {}
    items: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(str(name.value), name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(number), value, value) for number, value in enumerate(node.value)]
    for name, key_node, value in items:
        if name == "<<":  # keys that are merged in do not override those beside it
            line_numbers = {**_lines(value, prefix), **line_numbers}
        else:
            line_numbers |= {f"{prefix}{name}": key_node.start_mark.line + 1, **_lines(value, f"{prefix}{name}.")}
    return line_numbers
