"""The model hub, or a cache that makes up for it."""

import socket
from collections.abc import Iterable
from pathlib import Path

from finetune.doctor.finding import Asked, Finding, failure, ok, warning
from finetune.hub import endpoint
from finetune.recipe import Recipe

LIMIT_S = 5.0


def reach(asked: Asked) -> Iterable[Finding]:
    """Whether what the recipe names on the hub can be had: from there, or from the cache."""
    problem = _problem(asked)
    wanted = list(dict.fromkeys(_names(asked.recipe))) if asked.recipe else []
    missing = [name for kind, name in wanted if not is_cached(asked, kind, name)]
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


def _problem(asked: Asked) -> str | None:
    if asked.env.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    if (address := endpoint(asked.env)) is None:
        return None
    return None if connects(address) else f"{address[0]} cannot be reached"


def connects(address: tuple[str, int]) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection(address, timeout=LIMIT_S).close()
    except OSError:
        return False
    return True


def _names(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """What a recipe names on the hub: a kind, as the cache's folders have it, and a name."""
    for name in (recipe.model.name, recipe.tokenizer.name):
        if name is not None and not Path(name).exists():
            yield "models", name
    for source in (*recipe.data.train, *recipe.data.validation):
        if source.hub is not None:
            yield "datasets", source.hub


def is_cached(asked: Asked, kind: str, name: str) -> bool:
    """Whether the hub's cache holds some revision.

    Source: huggingface_hub's layout, `models--OWNER--NAME/snapshots/COMMIT`.
    """
    home = Path(asked.env.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    folder = Path(asked.env.get("HF_HUB_CACHE", home / "hub"), f"{kind}--{name.replace('/', '--')}", "snapshots")
    return folder.is_dir() and any(folder.iterdir())
