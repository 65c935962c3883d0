"""Explains every value of a recipe: who set it, what it means, and its unit."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from finetune.config.provenance import Setting, Value, concerns_key, flat, place_of, places
from finetune.config.recipe import RECIPE_FIELDS
from finetune.config.recipe_schema import Recipe, section_in


def recipe_values(
    recipe: Recipe,
    file: str,
    overrides: Sequence[str],
    trees: Sequence[Mapping[str, Any]],
    derived: Mapping[str, Setting],
) -> list[Value]:
    """Returns every effective value of a recipe.

    Args:
        trees: Its `recipe_layers`.
        derived: Settings that replace `auto`.
    """
    lines, stages = places(file), [flat(tree) for tree in trees]
    found = []
    for key, value in flat(recipe.model_dump(mode="json")).items():
        settings = _settings(key, file, lines, overrides, stages)
        if settings[-1].layer != "default":
            # As the recipe reads it: 1 may be 1.0.
            settings[-1] = Setting(settings[-1].layer, settings[-1].place, value)
        settings += [derived[key]] if key in derived else []
        found.append(_value(key, settings))
    for name, field in Recipe.model_fields.items():
        # A section that may be left out is a value of its own: `chat: {}` is all that it takes.
        if field.default is None and getattr(recipe, name) is not None:
            found.append(_value(name, _settings(name, file, lines, overrides, [_given(s, name) for s in stages])))
    order = list(Recipe.model_fields)
    return sorted(found, key=lambda value: (order.index(value.key.split(".")[0]), "." in value.key))


def value_not_in_force(key: str) -> Value | None:
    """Returns a key of the recipe without settings, since its section is left out; None if there is no such key."""
    return None if _field_of(key) is None else _value(key, [])


def _value(key: str, settings: Sequence[Setting]) -> Value:
    top, place = key.split(".")[0], key
    while (field := _field_of(place)) is None:
        place = place.rpartition(".")[0]  # a free key in a field, as `optim.args.eps`
    inner = section_in(field.annotation)
    texts = [inner.__doc__ if inner is not None else None, field.description]
    meaning = " ".join(" ".join(text.split()) for text in texts if text)
    unit = next((text for text in field.metadata if isinstance(text, str)), "")
    section = top if section_in(Recipe.model_fields[top].annotation) else "recipe"
    return Value(key, section, tuple(settings), meaning, unit)


def _settings(
    key: str, file: str, lines: Mapping[str, int], overrides: Sequence[str], stages: Sequence[Mapping[str, Any]]
) -> list[Setting]:
    """Returns every layer that gives a key, in order.

    Args:
        stages: The keys that are given: by the file, and then after each override.
    """
    field = _field_of(key)
    settings = [] if field is None else [Setting("default", "", _default(field))]
    if key in stages[0]:
        settings.append(Setting("recipe file", place_of(key, file, lines), stages[0][key]))
    for override, before, after in zip(overrides, stages, stages[1:], strict=False):
        if concerns_key(override, key) and (key in before or key in after):
            fallback = settings[0].value if field is not None else None
            settings.append(Setting("command line", override, after.get(key, fallback)))
    return settings


def _given(stage: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Returns a stage in which a section that is given is a key of its own."""
    given = stage.get(section) is not None or any(key.startswith(f"{section}.") for key in stage)
    return {**stage, section: "given"} if given else stage


def _field_of(key: str) -> FieldInfo | None:
    """Returns the field of a key; None if there is none, or it is one of the free keys in a field."""
    return RECIPE_FIELDS.get(re.sub(r"\.\d+(?=\.|$)", ".0", key).removesuffix(".0"))


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True, validated_data={})
    return list(value) if isinstance(value, tuple) else value
