"""`finetune explain`: shows for every value in force who set it, what it replaced, and what it means.

Imports no torch, so that it answers at once. Contradictions are errors here as in a run, found by the same functions.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from rich.console import Group, RenderableType

from finetune.config.provenance import Origin, Setting, Value, concerns_key, flat, place_of, places
from finetune.config.recipe import RECIPE_FIELDS, hint, read_recipe, recipe_layers, validate_recipe
from finetune.config.recipe_schema import Recipe, section_in
from finetune.distributed import device_selection
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.distributed.launch_settings import launch_settings, resolved_precision
from finetune.distributed.resolve_config import resolve_for_devices
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.console import plain_table
from finetune.utils.errors import RecipeError

# Longer values are cut in the table; a key's own page has them whole.
_WIDEST = 36
_IN_FILE = ("recipe file", "launch file", "ds_config")
# Columns of a path that is shortened, and of a terminal with room for units.
_LONG_PATH, _WITH_UNITS = 24, 120


def explain_values(
    recipe_file: str,
    overrides: Sequence[str],
    config_file: str | None,
    options: Mapping[str, str],
    env: Mapping[str, str],
) -> list[Value]:
    """Returns every effective value of both planes, for the launcher's options and the environment of a launch.

    Raises:
        FinetuneError: As a run would.
    """
    trees = recipe_layers(read_recipe(recipe_file), overrides, recipe_file)
    recipe = validate_recipe(trees[-1], Origin(recipe_file, trees[0], overrides), BUILT_IN)
    foreseen, gpus = predict_environment(config_file, options, env), device_selection.driver_gpus()
    settled = resolve_for_devices(recipe, foreseen.launch, gpus, foreseen.env)
    derived = {"precision": resolved_precision(settled, gpus)} if recipe.precision == "auto" else {}
    return [
        *recipe_values(recipe, recipe_file, overrides, trees, derived),
        *launch_settings(recipe, foreseen, settled, gpus, env),
    ]


def select_values(values: Sequence[Value], key: str) -> list[Value]:
    """Returns the values that a key names: one, or those of a section; one that is not in force, without settings.

    Raises:
        RecipeError: If there is no such key, with the nearest.
    """
    selected = [value for value in values if value.key == key or value.key.startswith(f"{key}.")]
    # Sections that are no key, such as `derived`.
    selected = selected or [value for value in values if value.section == key]
    if not selected and _field_of(key) is not None:
        selected = [_explained(key, [])]
    if not selected:
        known = list(dict.fromkeys([*(value.key for value in values), *RECIPE_FIELDS]))
        same = [name for name in known if name.rsplit(".", 1)[-1] == key]
        near = f", did you mean {' or '.join(same)}?" if same else hint(key, known)
        raise RecipeError(f"There is no key '{key}'{near or '.'} `finetune explain RECIPE --all` lists all.")
    return selected


def recipe_values(
    recipe: Recipe,
    file: str,
    overrides: Sequence[str],
    trees: Sequence[Mapping[str, Any]],
    derived: Mapping[str, Setting],
) -> list[Value]:
    """Returns every effective value of a recipe with these `recipe_layers`; `derived` settings replace `auto`."""
    fields, lines, values = Recipe.model_fields, places(file), []
    # A section that may be left out is a value of its own: `chat: {}` is all that it takes.
    optional = [name for name, field in fields.items() if field.default is None]
    in_force = [name for name in optional if getattr(recipe, name) is not None]
    # Keys that are given: by the file, and then after each override.
    stages = [flat(tree) for tree in trees]
    for stage in stages:
        sections = {key.split(".")[0] for key, value in stage.items() if value is not None or "." in key}
        stage |= {name: "given" for name in optional if name in sections}
    for key, value in {**flat(recipe.model_dump(mode="json")), **dict.fromkeys(in_force, "given")}.items():
        settings, default = [], None
        if (field := _field_of(key)) is not None:
            default = field.get_default(call_default_factory=True, validated_data={})
            settings.append(Setting("default", "", list(default) if isinstance(default, tuple) else default))
        if key in stages[0]:
            settings.append(Setting("recipe file", place_of(key, file, lines), stages[0][key]))
        for override, before, after in zip(overrides, stages, stages[1:], strict=False):
            # A key that it excludes is taken out, with those below it.
            gone = key not in after and any(f"{name}.".startswith(f"{key}.") for name in before)
            if gone or (concerns_key(override, key) and (key in before or key in after)):
                settings.append(Setting("command line", override, after.get(key, default)))
        if settings[-1].layer != "default":
            # As the recipe reads it: 1 may be 1.0.
            settings[-1] = Setting(settings[-1].layer, settings[-1].place, value)
        values.append(_explained(key, [*settings, derived[key]] if key in derived else settings))
    order = list(fields)
    return sorted(values, key=lambda value: (order.index(value.key.split(".")[0]), "." in value.key))


def _explained(key: str, settings: Sequence[Setting]) -> Value:
    top, field_key = key.split(".")[0], key
    while (field := _field_of(field_key)) is None:
        field_key = field_key.rpartition(".")[0]  # a free key in a field, as `optim.args.eps`
    inner = section_in(field.annotation)
    texts = [inner.__doc__ if inner is not None else None, field.description]
    meaning = " ".join(" ".join(text.split()) for text in texts if text)
    unit = next((text for text in field.metadata if isinstance(text, str)), "")
    section = top if section_in(Recipe.model_fields[top].annotation) else "recipe"
    return Value(key, section, tuple(settings), meaning, unit)


def _field_of(key: str) -> FieldInfo | None:
    """Returns the field of a key; None if there is none, or it is one of the free keys in a field."""
    return RECIPE_FIELDS.get(re.sub(r"\.\d+(?=\.|$)", ".0", key).removesuffix(".0"))


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
        head = f"{value.key} = {_in_words(value.settings[-1].value)}"
        rows.add_row("  set by", _setter(value.settings[-1]))
        for number, setting in enumerate(value.overridden):
            rows.add_row("" if number else "  instead of", f"{_in_words(setting.value)}, {_setter(setting)}")
    if value.unit:
        rows.add_row("  unit", value.unit)
    rows.add_row("  meaning", value.meaning or "-")
    return Group(head, rows)


def values_table(values: Sequence[Value], width: int) -> Group:
    """Returns tables by section: key, value, who set it, and what that replaced; and paths that are shortened.

    In a terminal of few columns, units are left to a key's own page.
    """
    shown = [value for value in values if value.settings]
    setters = [value.settings[-1] for value in shown]
    in_file = [setter.place for setter in setters if setter.layer in _IN_FILE and setter.place]
    paths = list(dict.fromkeys(location.rpartition(":")[0] for location in in_file))
    last = [Path(path).name for path in paths]
    # Of a long path the last part, where no other file has that name.
    files = {p: n if len(p) > _LONG_PATH and last.count(n) == 1 else p for p, n in zip(paths, last, strict=True)}
    parts: list[RenderableType] = [f"{name} is {path}" for path, name in files.items() if name != path]
    for section in dict.fromkeys(value.section for value in shown):
        rows = plain_table("", "", "")
        rows.add_row(section)
        for value in shown:
            if value.section == section:
                rows.add_row(*_table_row(value, files, units=width >= _WITH_UNITS))
        parts += ["", rows] if parts else [rows]
    return Group(*parts)


def _table_row(value: Value, files: Mapping[str, str], *, units: bool) -> tuple[str, ...]:
    last = value.settings[-1]
    path, _, line = last.place.rpartition(":")
    where = last.layer if last.layer == "derived" and not units else _setter(last)
    where = f"{files[path]}:{line}" if path in files else where
    # A value of None was not given.
    before = [f"{_shortened(_in_words(s.value))} ({s.layer})" for s in value.overridden if s.value is not None]
    return (
        f"  {value.key}",
        _shortened(_in_words(last.value)) + (f" [{value.unit}]" if value.unit and units else ""),
        f"{where}, instead of {', '.join(before)}" if before else where,
    )


def _setter(setting: Setting) -> str:
    return f"{setting.layer}: {setting.place}" if setting.place else setting.layer


def _in_words(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
