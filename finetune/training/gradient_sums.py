"""Settles when the gradients of a step's micro-batches are summed over ranks, where the launch leaves it open."""

from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from finetune.config.recipe_schema import Recipe
from finetune.distributed import device_selection, rendezvous_store
from finetune.distributed.launch.launch_config import Launch
from finetune.planning.planner import candidates_of
from finetune.utils.compat import torch_private

# How long ranks wait for rank 0 to count the network, and for those that start later.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class GradientSums:
    """When gradients of a step's micro-batches are summed over ranks."""

    each: bool
    """After each of them, with which a rank holds its shards alone; else after the last."""
    needed: int | None
    """Bytes that a rank would need to hold them whole, as a plan forecasts them; None if the launch decides, or if
    the network cannot be counted."""
    room: int
    """Bytes that a rank can have."""


def choose_gradient_sums(recipe: Recipe, launch: Launch, accumulation: int) -> GradientSums | None:
    """Chooses the same on every rank, before these form a process group; every rank must call it.

    What decides is the same at every start on a machine, so that a run that resumes takes the same path to the bit.

    Returns:
        None where there is nothing to choose.
    """
    if not launch.defers(accumulation):
        chosen = launch.sync_each_batch if accumulation > 1 else None
        return None if chosen is None else GradientSums(chosen, None, 0)
    room = min(rendezvous_store.gather_notes(device_selection.total_memory(), _PATIENCE))
    return GradientSums(**rendezvous_store.from_main(partial(_forecast, recipe, launch, room), _PATIENCE))


def _forecast(recipe: Recipe, launch: Launch, room: int) -> dict[str, Any]:
    """Returns the fields of `GradientSums`: whole gradients send less, so they are held where they fit."""
    if not torch_private.reduces_unused_gradients():
        return asdict(GradientSums(False, None, room))
    candidate_of = candidates_of(recipe, replace(launch, sync_each_batch=False), room)
    whole = candidate_of(recipe.batch.rows) if candidate_of is not None else None
    if whole is None or whole.memory is None:
        return asdict(GradientSums(True, None, room))
    return asdict(GradientSums(whole.verdict != "fits", whole.needed, room))
