"""Tasks and losses of preferences by name, and the keys that each reads. Torch is not imported."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.config.recipe_schema import Recipe

TASKS = ("dpo", "kto", "orpo", "simpo", "cpo", "reward")
"""Tasks that learn preferences; the first is the default of new recipes."""
SORTED_LOSSES = ("aot", "aot_unpaired")
"""Losses that need values of the whole global batch."""
_OF_SCORES = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "discopop")
_OF_RATIOS = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", *SORTED_LOSSES)
LOSSES = {
    "dpo": (*_OF_SCORES, "sft", *_OF_RATIOS),
    "kto": ("kto", "apo_zero_unpaired"),
    "cpo": ("sigmoid", "hinge", "ipo"),
}
"""Losses of each task that has several, by TRL's names; the first is the default."""
_ALL: tuple[str, ...] = ()
_PAIRS = dict.fromkeys(("dpo", "cpo", "simpo", "orpo"), _ALL)
READ_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "loss": dict.fromkeys(LOSSES, _ALL),
    "loss_weights": dict.fromkeys(LOSSES, _ALL),
    "beta": {**_PAIRS, "kto": _ALL},
    "label_smoothing": {"dpo": ("robust", "exo_pair", *SORTED_LOSSES), "cpo": ("sigmoid",), "simpo": _ALL},
    "f_divergence": {"dpo": _OF_SCORES},
    "f_alpha": {"dpo": _OF_SCORES},
    "discopop_tau": {"dpo": ("discopop",)},
    "ld_alpha": {"dpo": _ALL},
    "use_weighting": {"dpo": (*_OF_SCORES, *_OF_RATIOS)},
    "reference": {"dpo": _ALL, "kto": _ALL},
    "ranking": {**_PAIRS, "reward": _ALL},
    "gamma": {"simpo": _ALL},
    "sft_weight": dict.fromkeys(("cpo", "simpo", "orpo"), _ALL),
    "desirable_weight": {"kto": _ALL},
    "undesirable_weight": {"kto": _ALL},
    "centering": {"reward": _ALL},
}
"""The tasks that read each key of the recipe's section `preference`, and the losses of each that do; () for all."""
CACHED = (
    "Leave the key out: the reference is then the model as training begins, whose scores are computed once and cached"
)
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


def base_problem(recipe: "Recipe") -> str:
    """Returns why a recipe's model without its adapters is not the one that training began with; empty if it is."""
    lora = recipe.lora
    if lora is None:
        return "the recipe has no `lora` section, so that there is no base without adapters"
    if lora.save_modules:
        return f"lora.save_modules trains {', '.join(lora.save_modules)} as well, without which there is no base"
    return "lora.init `pissa` takes singular vectors out of the base, which adapters put back" * (lora.init == "pissa")


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
        others = {name: [other for other, names in LOSSES.items() if name in names] for name in unknown}
        elsewhere = "".join(f"; {name} is one of task {' and '.join(of)}" for name, of in others.items() if of)
        allowed = f"has {', '.join(known)}" if known else "has one loss, and no such key"
        found.append(f"preference.loss names {', '.join(unknown)}; task {task} {allowed}{elsewhere}")
    found += unread(task, keys).values()
    if known and len({*losses}) != max(len(losses), 1):
        found.append(f"preference.loss is {losses}; it names at least one loss, and each once")
    weights = list(keys.get("loss_weights", [1.0] * len(losses)))
    if known and (len(weights) != len(losses) or not all(0 < weight < math.inf for weight in weights)):
        found.append(f"preference.loss_weights is {weights}; it has a number above 0 for each of {losses}")
    if keys.get("use_weighting") and {*losses} & {*SORTED_LOSSES}:
        found.append(
            "preference.use_weighting is true, and aot compares pairs with those of the same rank; remove the key, or "
            "take other losses"
        )
    if "exo_pair" in losses and not keys.get("label_smoothing"):
        found.append("preference.label_smoothing is 0, of which exo_pair takes the logarithm; its authors take 0.001")
    return found


def unread(task: str, keys: Mapping[str, Any]) -> dict[str, str]:
    """Returns a sentence or two on each key that the task, or the losses that are named, do not read; see `problems`.

    Names of losses are left to that.
    """
    losses = list(keys.get("loss", LOSSES.get(task, ())[:1]))
    sentences = {key: _why_unread(task, key, keys, losses) for key in keys if key != "loss"}
    return {key: sentence for key, sentence in sentences.items() if sentence}


def _why_unread(task: str, key: str, keys: Mapping[str, Any], losses: list[str]) -> str:
    read, divergence = READ_BY[key], keys.get("f_divergence", "reverse_kl")
    if task not in read:
        return f"preference.{key} is no key of task {task}; it is one of {', '.join(read)}. Remove it"
    if key == "f_divergence" and (others := [name for name in losses if name in _OF_RATIOS]):
        return (
            f"preference.f_divergence is {divergence}, and {', '.join(others)} has reverse_kl alone: other divergences "
            f"leave a term that cancels in differences of rewards only. {', '.join(_OF_SCORES)} take them"
        )
    which, readers, of = losses, read[task], f"of the losses of {task}, "
    if key == "f_alpha" and divergence != "alpha_divergence":
        which, readers, of = [f"f_divergence {divergence}"], ("alpha_divergence",), ""
    if not readers or not which or {*which} & {*readers}:
        return ""
    why = f"{of}{', '.join(readers)} do" if len(readers) > 1 else f"{of}{readers[0]} does"
    if key == "label_smoothing" and "sigmoid" in losses:
        why += " (older TRL and LLaMA-Factory smooth `sigmoid`, cDPO; `robust` is its unbiased form)"
    does = "does" if len(which) == 1 else "do"
    return (
        f"preference.{key} is {keys[key]}, and {', '.join(which)} {does} not take it: {why}. Remove the key, or name "
        "another loss"
    )
