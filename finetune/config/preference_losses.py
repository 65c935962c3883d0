"""Losses of preferences by name, and the hyperparameters that each takes. Torch is not imported."""

import math
from collections.abc import Mapping
from typing import Any

SORTED_LOSSES = ("aot", "aot_unpaired")
"""Losses that need values of the whole global batch."""
_OF_SCORES = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "discopop", "sft")
_OF_RATIOS = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", *SORTED_LOSSES)
LOSSES = {
    "dpo": (*_OF_SCORES, *_OF_RATIOS),
    "kto": ("kto", "apo_zero_unpaired"),
    "cpo": ("sigmoid", "hinge", "ipo"),
}
"""Losses of each task that has several, by TRL's names; the first is the default."""
_SMOOTHED = {"dpo": ("robust", "exo_pair", *SORTED_LOSSES), "cpo": ("sigmoid",)}
# The least and the largest value of each key.
_ABOVE_0 = (math.ulp(0), 1e9, "a number above 0")
_NOT_NEGATIVE = (0.0, 1e9, "a number from 0 on")
_RANGES = {
    "beta": _ABOVE_0,
    "label_smoothing": (0.0, 0.5 - 1e-9, "from 0 to below 0.5, the share of labels that are taken to be wrong"),
    "f_alpha": (-1e9, 1e9, "a number"),
    "discopop_tau": (math.ulp(0), 1 - 1e-9, "above 0 and below 1: from there on discopop has no bound"),
    "ld_alpha": (0.0, 1.0, "from 0 to 1, the weight of tokens beyond the shorter answer's length"),
    **dict.fromkeys(("desirable_weight", "undesirable_weight", "centering"), _ABOVE_0),
    **dict.fromkeys(("gamma", "sft_weight"), _NOT_NEGATIVE),
}


def problems(task: str, keys: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the recipe's section `preference`, a sentence or two each.

    Args:
        task: `task.name`.
        keys: The section's keys without those that have their default.
    """
    found = [
        f"preference.{key} is {keys[key]}; it is {allowed}"
        for key, (least, most, allowed) in _RANGES.items()
        if key in keys and not least <= keys[key] <= most
    ]
    known = LOSSES.get(task, ())
    losses = list(keys.get("loss", known[:1]))
    if unknown := [name for name in losses if name not in known]:
        allowed = f"has {', '.join(known)}" if known else "has one loss, and no such key"
        found.append(f"preference.loss names {', '.join(unknown)}; task {task} {allowed}")
    own = {"centering", "ranking"} if task == "reward" else keys.keys() - {"centering"}
    found += [f"preference.{key} is no key of task {task}; remove it" for key in keys if key not in {*own, "loss"}]
    if known and len({*losses}) != max(len(losses), 1):
        found.append(f"preference.loss is {losses}; it names at least one loss, and each once")
    weights = list(keys.get("loss_weights", [1.0] * len(losses)))
    if len(weights) != len(losses) or not all(0 < weight < math.inf for weight in weights):
        found.append(f"preference.loss_weights is {weights}; it has a number above 0 for each of {losses}")
    if smoothing := keys.get("label_smoothing"):
        smoothed = _SMOOTHED.get(task, ())
        if task != "simpo" and not {*losses} & {*smoothed}:
            which = f"of the losses of {task}, {', '.join(smoothed)} do" if smoothed else f"{task} has no such loss"
            found.append(
                f"preference.label_smoothing is {smoothing}, and {', '.join(losses) or task} does not take it: {which}."
                " Remove the key, or name another loss"
            )
    elif "exo_pair" in losses:
        found.append("preference.label_smoothing is 0, of which exo_pair takes the logarithm; its authors take 0.001")
    divergence = keys.get("f_divergence", "reverse_kl")
    if divergence != "reverse_kl" and (others := [name for name in losses if name in _OF_RATIOS]):
        found.append(
            f"preference.f_divergence is {divergence}, and {', '.join(others)} has reverse_kl alone: other divergences "
            f"leave a term that cancels in differences of rewards only. {', '.join(_OF_SCORES)} take them"
        )
    return found
