"""The model hub, or a cache that makes up for it."""

from collections.abc import Iterable
from pathlib import Path

from finetune.doctor.finding import Asked, Finding, failure, ok, warning
from finetune.hub import is_cached, unreachable
from finetune.recipe import Recipe


def reach(asked: Asked) -> Iterable[Finding]:
    """Whether what the recipe names on the hub can be had: from there, or from the cache."""
    problem = unreachable(asked.env)
    wanted = list(dict.fromkeys(_names(asked.recipe))) if asked.recipe else []
    missing = [name for kind, name in wanted if not is_cached(asked.env, kind, name)]
    names = ", ".join(name for _, name in wanted)
    advice = "let it be reached, or fill HF_HOME on another machine and bring it here, or name local directories"
    if problem is None:
        yield ok("hub", f"it can be reached{f', for {names}' if names else ''}")
    elif missing:
        yield failure("hub", f"{problem}, and not in the cache: {', '.join(missing)}", advice)
    elif asked.recipe is None:
        yield warning("hub", f"{problem}: names on it must be in the cache", advice)
    else:
        yield ok(
            "hub", f"{problem}; the recipe needs nothing of it" + (f" but {names}, which is cached" if names else "")
        )


def _names(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """What a recipe names on the hub: a kind, as the cache's folders have it, and a name."""
    for name in (recipe.model.name, recipe.tokenizer.name):
        if name is not None and not Path(name).exists():
            yield "models", name
    for source in (*recipe.data.train, *recipe.data.validation):
        if source.hub is not None:
            yield "datasets", source.hub
