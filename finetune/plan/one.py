"""A recipe under a launch as they are, on one device."""

from collections.abc import Callable, Sequence

import torch

from finetune.backend import Device, Launch
from finetune.errors import RecipeError
from finetune.gpus import Gpu
from finetune.plan import networks
from finetune.plan.cells import Cell, Setting, cell, state_bytes_of
from finetune.recipe import Recipe


def cells(recipe: Recipe, launch: Launch, room: int) -> Callable[[int], Cell] | None:
    """What a micro-batch of so many rows takes here; None if the network cannot be counted without its weights.

    Args:
        room: Bytes that a rank can have.
    """
    kind = networks.kind_of(recipe)
    try:
        variant = networks.variants(recipe, kinds=[kind])[kind]
    except RecipeError:
        return None
    assert not isinstance(variant, str)
    gpu = Gpu("this one", "", room / 2**30, 0.0, 0.0, 0.0, 0.0)
    state_bytes, checkpointed = state_bytes_of(recipe), recipe.model.gradient_checkpointing is True
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda rows: cell("", launch, variant, Setting(rows, checkpointed), gpu, state_bytes, device=device)


def largest(recipe: Recipe, launch: Launch, sizes: Sequence[int], room: int) -> int:
    """The largest micro-batch that fits; the smallest where nothing can be said.

    Args:
        sizes: In rows; all of them come out even.
        room: Bytes that a rank can have.
    """
    of = cells(recipe, launch, room)
    fits = [size for size in sizes if of(size).verdict == "fits"] if of is not None else []
    return max(fits, default=min(sizes))
