"""Where every value of a recipe comes from, and its unit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from finetune.config import recipe as recipe_module
from finetune.config.provenance import Setting, Value, concerns, flat, places
from finetune.config.recipe import section_in
from finetune.config.recipe_schema import Recipe, Section


def values(
    recipe: Recipe,
    file: str,
    overrides: Sequence[str],
    trees: Sequence[Mapping[str, Any]],
    derived: Mapping[str, Setting],
) -> list[Value]:
    """Every effective value of a recipe.

    Args:
        trees: Its `recipes.layers`.
        derived: What became of keys that say `auto`.
    """
    lines, stages = places(file), [flat(recipe_module.long(tree)) for tree in trees]
    found = []
    for key, value in flat(recipe.model_dump(mode="json")).items():
        settings = _settings(key, file, lines, overrides, stages)
        if settings[-1].layer != "default":
            # As the recipe reads it: 1 may be 1.0.
            settings[-1] = Setting(settings[-1].layer, settings[-1].place, value)
        settings += [derived[key]] if key in derived else []
        found.append(Value(key, _section_of(key), tuple(settings), _meaning(key), _unit(key)))
    for name in _optional_sections():
        # A section that may be left out is a value of its own: `chat: {}` is all that it takes.
        if getattr(recipe, name) is not None:
            settings = _settings(name, file, lines, overrides, [{**s, **_given(s, name)} for s in stages])
            found.append(Value(name, name, tuple(settings), _meaning(name)))
    order = list(Recipe.model_fields)
    return sorted(found, key=lambda value: (order.index(value.key.split(".")[0]), "." in value.key))


def off(key: str) -> Value | None:
    """A key of the recipe that is not in force; None if there is no such key."""
    facts = _field(key)
    return None if facts is None else Value(key, _section_of(key), (), _meaning(key), _unit(key))


def all_keys() -> list[str]:
    """Every key that a recipe can have; those of sources once, as `data.train.0.path`."""
    return list(_keys(Recipe, ""))


def _keys(section: type[Section], prefix: str) -> Iterator[str]:
    for name, facts in section.model_fields.items():
        inner = section_in(facts.annotation)
        yield f"{prefix}{name}"
        if inner is not None:
            number = "" if isinstance(facts.annotation, type) or facts.default is None else "0."
            yield from _keys(inner, f"{prefix}{name}.{number}")


def _settings(
    key: str, file: str, lines: Mapping[str, int], overrides: Sequence[str], stages: Sequence[Mapping[str, Any]]
) -> list[Setting]:
    """All that was said on a key, in order.

    Args:
        stages: The keys that are given: by the file, and then after each override.
    """
    facts = _field(key)
    settings = [] if facts is None else [Setting("default", "", _default(facts))]
    if key in stages[0]:
        line = next((lines[name] for name in (key, *_above(key)) if name in lines), None)
        settings.append(Setting("recipe file", f"{file}:{line}" if line else file, stages[0][key]))
    for override, before, after in zip(overrides, stages, stages[1:], strict=False):
        if concerns(override, key) and (key in before or key in after):
            fallback = settings[0].value if facts is not None else None
            settings.append(Setting("command line", override, after.get(key, fallback)))
    return settings


def _above(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _given(stage: Mapping[str, Any], section: str) -> dict[str, str]:
    given = any(key.startswith(f"{section}.") or (key == section and value is not None) for key, value in stage.items())
    return {section: "given"} if given else {}


def _optional_sections() -> list[str]:
    fields = Recipe.model_fields.items()
    return [name for name, facts in fields if facts.default is None and section_in(facts.annotation) is not None]


def _walk(key: str) -> tuple[type[Section], FieldInfo, list[str]] | None:
    """The section that holds a key, its field there, and what of the key lies below the field."""
    section: type[Section] = Recipe
    parts = [part for part in key.split(".") if not part.isdecimal()]
    for depth, part in enumerate(parts):
        facts = section.model_fields.get(part)
        if facts is None:
            return None
        inner, below = section_in(facts.annotation), parts[depth + 1 :]
        if inner is None or not below:
            return section, facts, below
        section = inner
    return None


def _field(key: str) -> FieldInfo | None:
    """The field that a key is; None if it is none, or one of the free keys in one, as `optim.args.eps`."""
    found = _walk(key)
    return found[1] if found is not None and not found[2] else None


def _default(facts: FieldInfo) -> Any:
    if facts.is_required():
        return None
    value = facts.get_default(call_default_factory=True, validated_data={})
    return list(value) if isinstance(value, tuple) else value


def _section_of(key: str) -> str:
    name = key.split(".")[0]
    return name if section_in(Recipe.model_fields[name].annotation) else "recipe"


def _meaning(key: str) -> str:
    found = _walk(key)
    assert found is not None, key
    _, facts, _ = found
    inner = section_in(facts.annotation)
    texts = [inner.__doc__ if inner is not None else None, facts.description]
    return " ".join(" ".join(text.split()) for text in texts if text)


def _unit(key: str) -> str:
    found = _walk(key)
    assert found is not None, key
    section, _, _ = found
    return UNITS.get(f"{section.__name__}.{key.rsplit('.', 1)[-1]}", "")


UNITS = {
    "LoraSection.rank": "columns",
    "LoraSection.alpha": "factor",
    "LoraSection.dropout": "share",
    "TokenizerSection.vocab_size": "pieces",
    "Source.sample": "stories",
    "Source.weight": "times an epoch",
    "Source.limit": "documents",
    "DataSection.validation_fraction": "share of the documents",
    "DataSection.sequence_length": "tokens",
    "DataSection.num_workers": "processes",
    "ChecksSection.max_broken": "share of the conversations",
    "ChecksSection.max_unsupervised": "share of the conversations",
    "ChecksSection.max_too_long": "share of the documents",
    "ChecksSection.max_overlap": "share of the documents",
    "ChecksSection.min_supervised": "share of the tokens",
    "ChecksSection.min_ended": "share of the documents",
    "ChecksSection.max_lossy": "share of the documents",
    "ChecksSection.max_mojibake": "share of the documents",
    "ChecksSection.max_nul": "share of the documents",
    "ChecksSection.max_duplicate_keys": "share of the records",
    "TaskSection.num_labels": "classes",
    "BatchSection.global_size": "rows an optimiser step",
    "BatchSection.micro_size": "rows a forward pass and process",
    "LengthSection.steps": "optimiser steps",
    "LengthSection.epochs": "passes over the rows",
    "LengthSection.tokens": "tokens",
    "OptimSection.lr": "rate",
    "OptimSection.weight_decay": "share of the rate",
    "OptimSection.clip_norm": "norm",
    "OptimSection.reference_batch": "rows",
    "ScheduleSection.warmup_steps": "optimiser steps",
    "ScheduleSection.warmup_fraction": "share of the steps",
    "ScheduleSection.floor": "share of the peak",
    "ScheduleSection.decay_fraction": "share of the steps",
    "EvalSection.every_steps": "optimiser steps",
    "EvalSection.micro_size": "rows a forward pass and process",
    "SampleSection.every_steps": "optimiser steps",
    "SampleSection.max_new_tokens": "tokens",
    "SampleSection.temperature": "factor",
    "SampleSection.top_k": "tokens",
    "LogSection.every_steps": "optimiser steps",
    "LogSection.profile": "optimiser steps",
    "CheckpointSection.every_steps": "optimiser steps",
    "CheckpointSection.every_minutes": "minutes",
    "CheckpointSection.keep": "checkpoints",
    "GuardSection.max_skipped_steps": "optimiser steps",
    "GuardSection.grace_s": "seconds",
    "Recipe.seed": "number",
}
