"""Where the value of a key comes from: who gave it, one layer over the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

# libyaml where PyYAML was built with it: ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Layer = Literal["default", "recipe file", "command line", "environment", "launch file", "ds_config", "derived"]


@dataclass(frozen=True)
class Setting:
    """One layer's say on a key."""

    layer: Layer
    place: str
    """File and line, the words of the command line, a variable's name, or what it was derived from."""
    value: Any


@dataclass(frozen=True)
class Value:
    """A key, and all that was said on it."""

    key: str
    section: str
    settings: tuple[Setting, ...]
    """Every layer that gives it, the one that holds last. Empty: the key is not in force."""
    meaning: str
    unit: str = ""

    @property
    def is_default(self) -> bool:
        return all(setting.layer == "default" for setting in self.settings)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values; items of a list of mappings are numbered: `data.train.0.path`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def places(file: str | Path) -> dict[str, int]:
    """The line, from 1, at which a YAML or JSON file gives each dotted key; empty if it cannot be told."""
    try:
        root = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return _lines(root, "")


def _lines(node: yaml.Node | None, prefix: str) -> dict[str, int]:
    found: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == "<<":  # what is merged in counts less than what stands beside it
                found = {**_lines(value, prefix), **found}
                continue
            key = f"{prefix}{name.value}"
            found |= {key: name.start_mark.line + 1, **_lines(value, f"{key}.")}
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            key = f"{prefix}{number}"
            found |= {key: value.start_mark.line + 1, **_lines(value, f"{key}.")}
    return found
