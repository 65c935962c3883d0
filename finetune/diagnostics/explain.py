"""`finetune explain`: says of every effective value of both planes who set it, what that overrode, what it means.

Imports no torch: it answers at once. What contradicts itself is an error here as in a run, by the same functions.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group

from finetune.config.provenance import Origin, Setting, Value
from finetune.config.recipe import hint, recipe_layers, validate_recipe
from finetune.diagnostics import explain_recipe
from finetune.distributed import device_selection
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.distributed.launch_values import launch_values, resolved_precision
from finetune.distributed.resolve_config import resolve_for_devices
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.console import plain_table
from finetune.utils.errors import RecipeError

if TYPE_CHECKING:
    from rich.table import Table


def explain_values(
    recipe_file: str,
    overrides: Sequence[str],
    config_file: str | None,
    options: Mapping[str, str],
    env: Mapping[str, str],
) -> list[Value]:
    """Returns every effective value of both planes.

    Args:
        options: Options of the launcher that differ from the launch file.
        env: Environment in which the launch would be started.

    Raises:
        FinetuneError: As a run would.
    """
    trees = recipe_layers(recipe_file, overrides)
    recipe = validate_recipe(trees[-1], Origin(recipe_file, trees[0], overrides), BUILT_IN)
    foreseen, here = predict_environment(config_file, options, env), device_selection.of_driver()
    settled = resolve_for_devices(recipe, foreseen.launch, here, foreseen.env)
    derived = {"precision": resolved_precision(settled, here)} if recipe.precision == "auto" else {}
    return [
        *explain_recipe.recipe_values(recipe, recipe_file, overrides, trees, derived),
        *launch_values(recipe, foreseen, settled, here, env),
    ]


def select_values(values: Sequence[Value], key: str) -> list[Value]:
    """Returns the values that a key names: one, or those of a section; one that is not in force, without settings.

    Raises:
        RecipeError: If there is no such key, with the nearest.
    """
    found = [value for value in values if value.key == key or value.key.startswith(f"{key}.")]
    # Sections that are no key, such as `derived`.
    found = found or [value for value in values if value.section == key]
    if not found and (off := explain_recipe.value_not_in_force(key)) is not None:
        found = [off]
    if not found:
        known = list(dict.fromkeys([*(value.key for value in values), *explain_recipe.RECIPE_FIELDS]))
        same = [name for name in known if name.rsplit(".", 1)[-1] == key]
        near = f", did you mean {' or '.join(same)}?" if same else hint(key, known)
        raise RecipeError(f"There is no key '{key}'{near or '.'} `finetune explain RECIPE --all` lists all.")
    return found


# Longer values are cut in the table; a key's own page has them whole.
_WIDEST = 36
# Columns of a path that is shortened, and of a terminal with room for units.
_LONG_PATH, _WITH_UNITS = 24, 120


def value_as_json(value: Value) -> dict[str, Any]:
    """Returns a key as an object for programs."""
    last = vars(value.settings[-1]) if value.settings else {}
    return {
        "key": value.key,
        "section": value.section,
        **{name: last.get(name) for name in ("value", "layer", "place")},
        "overrode": [vars(setting) for setting in reversed(value.overridden)],
        "unit": value.unit or None,
        "meaning": value.meaning,
    }


def value_page(value: Value) -> Group:
    """Returns everything about one key."""
    rows = plain_table("", "")
    head = f"{value.key} is not in force: its section is left out"
    if value.settings:
        head = f"{value.key} = {_plain(value.settings[-1].value)}"
        rows.add_row("  set by", _who(value.settings[-1]))
        for number, setting in enumerate(value.overridden):
            rows.add_row("" if number else "  instead of", f"{_plain(setting.value)}, {_who(setting)}")
    if value.unit:
        rows.add_row("  unit", value.unit)
    rows.add_row("  meaning", value.meaning or "-")
    return Group(head, rows)


def values_table(values: Sequence[Value], width: int) -> Group:
    """Returns tables by section: key, value, who set it, and what that overrode; and which files these are.

    Args:
        width: Columns of the terminal. In a narrow one, units are left to a key's own page.
    """
    said = [value for value in values if value.settings]
    files = _short_names(value.settings[-1] for value in said)
    parts: list[Table | str] = [f"{name} is {path}" for path, name in files.items() if name != path]
    for section in dict.fromkeys(value.section for value in said):
        rows = plain_table("", "", "")
        rows.add_row(section)
        for value in said:
            if value.section == section:
                rows.add_row(*_cells(value, files, units=width >= _WITH_UNITS))
        parts += ["", rows] if parts else [rows]
    return Group(*parts)


def _short_names(settings: Iterable[Setting]) -> dict[str, str]:
    """Returns names of the files that set keys, by path; a long path is said once, and then its last part."""
    paths = list(dict.fromkeys(setting.place.rpartition(":")[0] for setting in settings if _in_file(setting)))
    last = [Path(path).name for path in paths]
    return {p: n if len(p) > _LONG_PATH and last.count(n) == 1 else p for p, n in zip(paths, last, strict=True)}


def _in_file(setting: Setting) -> bool:
    return setting.layer in ("recipe file", "launch file", "ds_config") and bool(setting.place)


def _cells(value: Value, files: Mapping[str, str], *, units: bool) -> tuple[str, ...]:
    last = value.settings[-1]
    if _in_file(last):
        path, _, line = last.place.rpartition(":")
        where = f"{files[path]}:{line}"
    else:
        where = last.layer if last.layer == "derived" and not units else _who(last)
    # That nothing was given before is no news.
    before = [f"{_cut(_plain(s.value))} ({s.layer})" for s in value.overridden if s.value is not None]
    return (
        f"  {value.key}",
        f"{_cut(_plain(last.value))} [{value.unit}]" if value.unit and units else _cut(_plain(last.value)),
        f"{where}, instead of {', '.join(before)}" if before else where,
    )


def _who(setting: Setting) -> str:
    return f"{setting.layer}: {setting.place}" if setting.place else setting.layer


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
