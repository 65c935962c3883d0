"""What makes a run the run that it is: everything that its mathematics depend on, as flat keys and plain values.

A checkpoint carries it. Going on with other values would be another run, so differences are named and refused,
unless the recipe allows them. Processes, sharding, micro-batches, logging and the number of steps are no part of it.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.files import digest, digest_of
from finetune.length import Length
from finetune.recipe import Recipe
from finetune.tasks import TaskData

# Of `model`: those that change where weights come from or what the network computes.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "pytorch_model*.bin")


def identify(recipe: Recipe, data: TaskData, length: Length) -> dict[str, Any]:
    """The identity of a run.

    Raises:
        RecipeError: If the base model's files cannot be read.
    """
    tree = recipe.model_dump(mode="json")
    facts: dict[str, Any] = {}
    for name in ("task", "optim", "schedule", "lora"):
        facts |= _flatten(name, tree.get(name))
    facts |= _flatten("model.config", tree["model"]["config"])
    facts |= {f"model.{key}": tree["model"][key] for key in ("freeze", "quantization", "double_quantization", "fp8")}
    base = base_of(recipe)
    if base is not None:
        # Not its name: on another machine the same model lies elsewhere.
        facts["model.name"] = base["digest"]
    facts |= {
        "batch.global_size": recipe.batch.global_size,
        "precision": recipe.precision,
        "seed": recipe.seed,
        "data": digest_of([data.digest, len(data.train) if data.train is not None else 0, length.epoch_rows]),
    }
    return facts


def base_of(recipe: Recipe) -> dict[str, Any] | None:
    """Name, revision and digest of the pretrained model that a run starts from; None if it starts from nothing.

    A model on the hub is told by its commit, a directory by its content.

    Raises:
        RecipeError: If a directory's files cannot be read.
    """
    section = recipe.model
    if section.name is None:
        return None
    folder = Path(section.name)
    if not folder.is_dir():
        return {"name": section.name, "revision": section.revision, "digest": _commit(recipe)}
    try:
        files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
        contents = {file.name: digest(file) for file in files}
    except OSError as error:
        raise RecipeError(f"model.name: {folder} cannot be read: {error.strerror or error}.") from error
    return {"name": section.name, "revision": None, "digest": digest_of(contents)}


def _commit(recipe: Recipe) -> str:
    from transformers import AutoConfig

    section = recipe.model
    config = AutoConfig.from_pretrained(
        section.name, revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    return str(getattr(config, "_commit_hash", None) or f"{section.name}@{section.revision}")


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for name, part in value.items() for key, leaf in _flatten(f"{prefix}.{name}", part).items()}
    return {prefix: value}


def compare(saved: dict[str, Any], now: dict[str, Any], allowed: Iterable[str], *, place: str) -> list[str]:
    """The keys that differ and may.

    Args:
        allowed: Keys, or sections such as `optim`, that may differ.
        place: Where `saved` comes from, for the message.

    Raises:
        RecipeError: With every other difference; or if an allowed name is none of a key or section.
    """
    known = sorted(saved.keys() | now.keys())
    sections = {key.rsplit(".", depth)[0] for key in known for depth in range(key.count(".") + 1)}
    for name in allowed:
        if name not in sections:
            close = difflib.get_close_matches(name, sorted(sections), n=1, cutoff=0.5)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise RecipeError(f"resume.allow: '{name}' is nothing that can differ between two runs.{hint}")
    different = [key for key in known if saved.get(key) != now.get(key)]
    permitted = [key for key in different if any(key == name or key.startswith(name + ".") for name in allowed)]
    refused = [key for key in different if key not in permitted]
    if refused:
        listing = "; ".join(_difference(key, saved, now) for key in refused)
        raise RecipeError(
            f"{place} holds a run whose mathematics differ from this recipe's: {listing}. Choose another output.dir "
            f"for a new run, or go on with the change by resume.allow=[{', '.join(refused)}]."
        )
    return permitted


def _difference(key: str, saved: dict[str, Any], now: dict[str, Any]) -> str:
    if key in ("data", "model.name"):
        return f"{key}: other content"
    there, here = (repr(facts[key]) if key in facts else "absent" for facts in (saved, now))
    return f"{key}: {there} there, {here} here"
