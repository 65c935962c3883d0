"""The keys that a recipe may have."""

from typing import Any

from finetune.config.recipe_schema import section_in


def keys_of(section: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, facts in section.model_fields.items():
        inner = section_in(facts.annotation)
        if inner is None or prefix in ("data.", "eval."):  # sources are counted once, below
            found.add(prefix + name)
        else:
            found |= keys_of(inner, f"{prefix}{name}.")
    if prefix == "data.":
        found |= keys_of(section_in(section.model_fields["train"].annotation), "source.")
    return found
