"""Everything that the mathematics of a run depend on, as flat keys and plain values.

A checkpoint carries it. With other values it would be another run, so differences are named and refused,
unless the recipe allows them. Processes, sharding, logging and the number of steps are no part of it. Neither is the
size of micro-batches, unless the network has dropout or batch norms.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from finetune.config import recipe_paths
from finetune.config.provenance import flat
from finetune.config.recipe import hint
from finetune.config.recipe_schema import ModelSection, Recipe
from finetune.data.rows.row_order import RowOrder
from finetune.utils import json_files
from finetune.utils.atomic_files import digest_of, file_digest, file_state, write_json
from finetune.utils.compat import torch_private
from finetune.utils.errors import RecipeError

# Of `model`: those that change where weights come from or what the network computes.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "pytorch_model*.bin")

MICRO_SIZE = "batch.micro_size"

# How long a file must have been left alone for its digest to be remembered. A second change within a tick of the file
# system's clock (2 s at the coarsest) leaves its times as they were.
_SETTLED_NS = 5 * 10**9


def depends_on_micro_size(network: nn.Module) -> bool:
    """Returns whether training depends on which rows share a forward pass.

    A micro-batch's dropout masks are drawn from one stream of random numbers, and batch norms see all of its rows.
    """
    config: Any = getattr(network, "config", None)
    settings = [config.to_dict()] if hasattr(config, "to_dict") else []
    for module in network.modules():
        if isinstance(module, torch_private.BatchNorm) or (isinstance(module, torch_private.Dropout) and module.p):
            return True
        settings.append(vars(module))
    # Rates of dropout, and of the noise that experts are chosen with.
    rates = [rate for values in settings for name, rate in values.items() if "drop" in name or "jitter" in name]
    return any(isinstance(rate, int | float) and not isinstance(rate, bool) and rate for rate in rates)


def identity_of(
    recipe: Recipe, order: RowOrder, base: dict[str, Any] | None, frozen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the identity of a run.

    Args:
        order: Order of the training rows.
        base: The pretrained model, as `base_of` gives it.
        frozen: The same of second models, by the recipe's keys that name them.
    """
    tree = recipe.model_dump(mode="json")
    scaling = ("rope_scaling",) if recipe.model.rope_scaling is not None else ()
    given = (name for name in ("preference", "embedding", "distillation") if tree[name] is not None)
    facts = flat({name: tree[name] for name in ("task", "optim", "schedule", "lora", *given)})
    for key, model in (frozen or {}).items():
        # By its content, as the recipe's own model.
        facts |= {f"{key}.name": model["digest"], f"{key}.revision": None}
    of_model = ("config", "freeze", "quantization", "double_quantization", "fp8", "neftune_alpha", *scaling)
    facts |= flat({name: tree["model"][name] for name in of_model}, "model.")
    if base is not None:
        # Not its name: on another machine the same model lies elsewhere.
        facts["model.name"] = base["digest"]
    facts |= {
        "batch.global_size": recipe.batch.global_size,
        "precision": recipe.precision,
        "seed": recipe.seed,
        "data": digest_of([order.data, order.num_rows, order.epoch_rows]),
    }
    return facts


def base_of(recipe: Recipe, files: dict[str, str] | None = None) -> dict[str, Any] | None:
    """Returns name, revision and digest of the pretrained model that a run starts from; None without one.

    A model on the hub is told by its commit, a directory by its content: `files` are those of `base_files`, if read.
    """
    section = recipe.model
    if section.name is None:
        return None
    if Path(section.name).is_dir():
        contents = base_files(recipe) if files is None else files
        return {"name": recipe_paths.place_of_model(section.name), "revision": None, "digest": digest_of(contents)}
    # The commit is the name of the folder in the local cache; configurations do not say it.
    commit = folder.name if (folder := base_folder(section)) is not None else f"{section.name}@{section.revision}"
    return {"name": section.name, "revision": section.revision, "digest": commit}


def base_files(recipe: Recipe) -> dict[str, str]:
    """Returns the digest of each file of the pretrained model; none without one, or without its files on this machine.

    Digests are remembered in `data.cache_dir`. Files that cannot be read raise a `RecipeError`.
    """
    if (folder := base_folder(recipe.model)) is None:
        return {}
    with RecipeError.explaining(f"model.name: {folder} cannot be read", "", OSError):
        files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
        return {file.name: _digest(file, Path(recipe.data.cache_dir) / "digests") for file in files}


def base_folder(section: ModelSection) -> Path | None:
    """Returns the folder of the pretrained model, for one on the hub that in the local cache; None if there is none."""
    if section.name is None or Path(section.name).is_dir():
        return None if section.name is None else Path(section.name)
    from huggingface_hub import try_to_load_from_cache

    cached_file = try_to_load_from_cache(section.name, "config.json", revision=section.revision)
    return Path(cached_file).parent if isinstance(cached_file, str) else None


def _digest(file: Path, cache: Path) -> str:
    """Returns a file's digest, remembered from an earlier start if the file has not changed since."""
    kept = cache / f"{digest_of(str(file.resolve()))}.json"
    before = file_state(file)
    with suppress(OSError, ValueError, LookupError, TypeError):
        known = json_files.read(kept)
        if known["facts"] == before:
            return str(known["digest"])
    digest = file_digest(file)
    settled = time.time_ns() - max(before[-2:]) > _SETTLED_NS
    if settled and file_state(file) == before:
        with suppress(OSError):  # the next start reads the file again
            cache.mkdir(parents=True, exist_ok=True)
            write_json(kept, {"file": str(file), "facts": before, "digest": digest})
    return digest


def compare_identities(saved: dict[str, Any], now: dict[str, Any], allowed: Iterable[str], *, place: str) -> list[str]:
    """Returns the keys that differ and may.

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
            close = hint(name, sorted(sections))
            raise RecipeError.of("", [f"resume.allow: '{name}' is nothing that can differ between two runs{close}"])
    different = [key for key in known if saved.get(key) != now.get(key)]
    permitted = [key for key in different if any(key == name or key.startswith(name + ".") for name in allowed)]
    refused = [key for key in different if key not in permitted]
    if refused:
        changes = []
        for key in refused:
            there, here = (repr(facts[key]) if key in facts else "absent" for facts in (saved, now))
            why = " (the network has dropout, whose masks depend on it, or batch norms)" if key == MICRO_SIZE else ""
            content = key in ("data", "model.name", "preference.reference.name", "distillation.teacher.name")
            changes.append(f"{key}: other content" if content else f"{key}: {there} there, {here} here{why}")
        raise RecipeError(
            f"{place} holds a run whose mathematics differ from this recipe's: {'; '.join(changes)}. Choose another "
            f"output.dir for a new run, or resume with the change by resume.allow=[{', '.join(refused)}]."
        )
    return permitted
