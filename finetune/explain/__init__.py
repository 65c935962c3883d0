"""`finetune explain`: for every effective value of both planes who set it, what that overrode, and what it means.

Imports no torch: it answers at once. What contradicts itself is an error here as in a run, by the same functions.
"""

from collections.abc import Mapping, Sequence

from finetune import recipe as recipes
from finetune.backend import devices, explained
from finetune.backend.foresee import foresee
from finetune.backend.settle import agree
from finetune.errors import RecipeError
from finetune.explain import recipe_plane
from finetune.layers import Origin, Value
from finetune.recipe import hint

__all__ = ["explain", "select"]


def explain(
    recipe_file: str,
    overrides: Sequence[str],
    config_file: str | None,
    options: Mapping[str, str],
    env: Mapping[str, str],
) -> list[Value]:
    """Every effective value of both planes.

    Args:
        options: Options of the launcher that differ from the launch file.
        env: The environment that the launch would be started in.

    Raises:
        FinetuneError: As a run would.
    """
    trees = recipes.layers(recipe_file, overrides)
    recipe = recipes.validate(trees[-1], Origin(recipe_file, trees[0], overrides))
    foreseen, here = foresee(config_file, options, env), devices.of_driver()
    settled = agree(recipe, foreseen.launch, here, foreseen.env)
    derived = {"precision": explained.precision(settled, here)} if recipe.precision == "auto" else {}
    return [
        *recipe_plane.values(recipe, recipe_file, overrides, trees, derived),
        *explained.values(recipe, foreseen, settled, here, env),
    ]


def select(values: Sequence[Value], key: str) -> list[Value]:
    """The values that a key names: one, or those of a section; one that is not in force, without settings.

    Raises:
        RecipeError: If there is no such key, with the nearest.
    """
    found = [value for value in values if value.key == key or value.key.startswith(f"{key}.")]
    # Sections that are no key, such as `derived`.
    found = found or [value for value in values if value.section == key]
    if not found and (off := recipe_plane.off(key)) is not None:
        found = [off]
    if not found:
        known = list(dict.fromkeys([*(value.key for value in values), *recipe_plane.all_keys()]))
        same = [name for name in known if name.rsplit(".", 1)[-1] == key]
        near = f", did you mean {' or '.join(same)}?" if same else hint(key, known)
        raise RecipeError(f"There is no key '{key}'{near or '.'} `finetune explain RECIPE --all` lists all.")
    return found
