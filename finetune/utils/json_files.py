"""Reads JSON that another program may have written, cut short or damaged; a `ValueError` names the defect."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

# Far more than any file here is nested, and far fewer than Python recurses: what was read can be written, too.
_DEEPEST = 200

Shape = type | tuple[type, ...] | dict[str, "Shape"] | list["Shape"]
"""Shape of a value: a type, one of several, an object whose keys have shapes, or a list of one shape."""

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def parse(content: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Returns the value of a JSON text, or of its bytes in UTF-8; `pairs` makes an object of its keys and values."""
    if not content.strip():
        raise ValueError("it is empty")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no JSON: byte {error.start + 1} is no UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if text.count("[") + text.count("{") > _DEEPEST:
        level = [value]
        for _ in range(_DEEPEST):
            parts = (container.values() if isinstance(container, dict) else container for container in level)
            level = [inner for container in parts for inner in container if isinstance(inner, (dict, list))]
        if level:
            raise ValueError("it is nested too deeply")
    return value


def read(file: Path, shape: Shape = dict, needed: Collection[str] = ()) -> Any:
    """Returns the value that a JSON file holds, of a shape, whose keys may be absent but for those `needed`."""
    value = parse(file.read_bytes())
    if (problem := shape_mismatch(value, shape, needed)) is not None:
        raise ValueError(problem)
    return value


def shape_mismatch(value: Any, shape: Shape, needed: Collection[str] = (), *, name: str = "it") -> str | None:
    """Returns how a value differs from a shape, or which `needed` key it lacks, by its name; None if it does not."""
    allowed = shape if isinstance(shape, tuple) else (shape if isinstance(shape, type) else type(shape),)
    # A whole number is a number, too; true is none.
    if type(value) not in allowed and not (type(value) is int and float in allowed):
        wanted = " or ".join(_NAMES.get(kind, "null") for kind in allowed)
        return f"{name} is {_NAMES.get(type(value), 'null')}, not {wanted}"
    if missing := [key for key in needed if key not in value]:
        return f"{name} has no {', '.join(missing)}"
    inner: list[tuple[str, Any, Shape]] = []
    if isinstance(shape, dict):
        inner = [(key, value[key], item) for key, item in shape.items() if key in value]
    elif isinstance(shape, list):
        inner = [(f"item {number}", item, shape[0]) for number, item in enumerate(value, start=1)]
    prefix = "" if name == "it" else f"{name}: "
    mismatches = (shape_mismatch(item, wanted, name=f"{prefix}{key}") for key, item, wanted in inner)
    return next((problem for problem in mismatches if problem is not None), None)
