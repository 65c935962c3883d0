"""The learning rate as a pure function of the step."""

import math
from typing import Any

from finetune.config.recipe_schema import Recipe
from finetune.utils.exact import exact_product


def peak_lr(recipe: Recipe) -> float:
    """The highest learning rate, scaled for the global batch if the recipe asks for it.

    Source: Goyal et al. 2017 (linear); Hoffer et al. 2017 (square root).
    """
    optim = recipe.optim
    if optim.lr_scaling is None or optim.reference_batch is None:
        return optim.lr
    ratio = recipe.batch.global_size / optim.reference_batch
    return optim.lr * (ratio if optim.lr_scaling == "linear" else math.sqrt(ratio))


def lr_at(step: int, num_steps: int, recipe: Recipe) -> float:
    """The learning rate of optimiser step `step` (from 0): a pure function, so there is no state to resume.

    Warm-up ends exactly at the peak. The decay would reach `floor` one step after the last, so that no step is taken
    at a rate of 0.
    """
    schedule, peak = recipe.schedule, peak_lr(recipe)
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = round(exact_product(schedule.warmup_fraction or 0.0, num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.name == "constant":
        return peak
    start = warmup
    if schedule.name == "wsd":
        start = max(warmup, num_steps - round(exact_product(schedule.decay_fraction, num_steps)))
        if step < start:
            return peak
    progress = (step - start + 1) / (num_steps - start + 1)
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
    return peak * (schedule.floor + (1.0 - schedule.floor) * shape)


def set_learning_rates(optimizer: Any, step: int, num_steps: int, recipe: Recipe) -> float:
    """Sets the learning rates of a step, and returns that of the recipe.

    A group that an optimiser gave another rate when it was made keeps its ratio to the peak.
    """
    lr, peak = lr_at(step, num_steps, recipe), peak_lr(recipe)
    for group in optimizer.param_groups:
        group["lr"] = lr if group["initial_lr"] == peak else group["initial_lr"] * (lr / peak)
    return lr
