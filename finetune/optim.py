"""Parameter groups, optimisers, and the learning rate as a function of the step."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from finetune.errors import RecipeError
from finetune.recipe import Recipe, hint


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
        warmup = round((schedule.warmup_fraction or 0.0) * num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.name == "constant":
        return peak
    start = warmup
    if schedule.name == "wsd":
        start = max(warmup, num_steps - round(schedule.decay_fraction * num_steps))
        if step < start:
            return peak
    progress = (step - start + 1) / (num_steps - start + 1)
    if schedule.name == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        shape = 1.0 - progress
    return peak * (schedule.floor + (1.0 - schedule.floor) * shape)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: decayed, and not (norms, biases, embeddings, DoRA's lengths).

    Without decay in one: backends that cut an optimiser's state send each group for itself.

    Decided by the module that owns a parameter, not by its name or shape, both of which backends change.
    A weight that an embedding shares with the head counts as an embedding.
    """
    plain: dict[int, nn.Parameter] = {}
    decayed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        kind = type(module).__name__.lower()
        # DoRA's columns have the lengths of pretrained ones: decay would pull them to 0 instead of there.
        spared = isinstance(module, nn.Embedding) or "norm" in kind or kind.startswith("dora")
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                (plain if spared or name.endswith("bias") else decayed)[id(parameter)] = parameter
    decayed = {key: p for key, p in decayed.items() if key not in plain}
    if not weight_decay:
        plain, decayed = {**decayed, **plain}, {}
    groups = [
        {"params": list(decayed.values()), "weight_decay": weight_decay},
        {"params": list(plain.values()), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimiser over the model's trainable parameters; build it before a backend wraps the model.

    Raises:
        RecipeError: If there is no such optimiser, or it refuses its arguments.
    """
    optim = recipe.optim
    cls, arguments = _find(optim.name), _arguments(recipe)
    groups = parameter_groups(model, optim.weight_decay)
    if not groups:
        raise RecipeError("The model has no trainable parameters: everything is frozen.")
    try:
        optimizer = cls(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"optim: {optim.name} refuses its arguments {arguments}: {error}.") from error
    return optimizer


def check(recipe: Recipe, *, cut: bool) -> None:
    """Refuses an optimiser that cannot run here, before anything is read.

    Args:
        cut: Whether the launch cuts tensors or their state among ranks.

    Raises:
        RecipeError: If there is no such optimiser, or it cannot run here.
    """
    name = recipe.optim.name
    module = _find(name).__module__
    if not module.startswith("bitsandbytes"):
        return
    if cut:
        raise RecipeError(
            f"optim.name: {name} of bitsandbytes keeps its state in blocks of whole tensors, which this launch cuts "
            "among processes: on another number of them the blocks would be others. Take AdamW, or launch on one "
            "process or with accelerate_configs/ddp.yaml."
        )
    if name.startswith("Paged") and not torch.cuda.is_available():
        same = name.removeprefix("Paged").removesuffix("32bit")
        offered = {**_classes(torch.optim), **_of_bitsandbytes()}
        other = f"{same}, which is the same without pages" if same in offered else "AdamW8bit"
        raise RecipeError(
            f"optim.name: {name} pages its state out of a GPU's memory, and this machine has no GPU. Take {other}."
        )


def state_bytes(recipe: Recipe) -> float:
    """Bytes of state that the optimiser keeps for an element of a parameter, as one step on a trial shows."""
    trial = nn.Parameter(torch.zeros(64, 256))
    optimizer = _find(recipe.optim.name)([trial], **_arguments(recipe))
    trial.grad = torch.zeros_like(trial)
    optimizer.step()
    state = [value for value in optimizer.state[trial].values() if isinstance(value, torch.Tensor) and value.ndim]
    return sum(value.nbytes for value in state) / trial.numel()


def _arguments(recipe: Recipe) -> dict[str, Any]:
    arguments: dict[str, Any] = {"lr": peak_lr(recipe), **recipe.optim.args}
    if recipe.optim.name in ("Adam", "AdamW") and "foreach" not in arguments:
        arguments.setdefault("fused", True)
    if isinstance(arguments.get("betas"), list):
        arguments["betas"] = tuple(arguments["betas"])
    return arguments


def _find(name: str) -> Callable[..., torch.optim.Optimizer]:
    if ":" in name:
        found = import_object(name, "optim.name")
    else:
        found = getattr(torch.optim, name, None) or _of_bitsandbytes().get(name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        offered, more = _classes(torch.optim), _of_bitsandbytes()
        raise RecipeError(
            f"optim.name: '{name}' is no optimiser{hint(name, [*offered, *more]) or '.'} torch.optim has "
            f"{', '.join(sorted(offered))}; bitsandbytes has {', '.join(sorted(more))}; your own is named "
            "package.module:Class."
        )
    return found


def _of_bitsandbytes() -> dict[str, type]:
    """Its optimisers with state of 8 bits or in pages, by name; the others are torch's."""
    import bitsandbytes

    return {name: c for name, c in _classes(bitsandbytes.optim).items() if "8bit" in name or name.startswith("Paged")}


def _classes(module: Any) -> dict[str, type]:
    found = {name: c for name, c in vars(module).items() if isinstance(c, type)}
    return {n: c for n, c in found.items() if issubclass(c, torch.optim.Optimizer) and n != "Optimizer"}


def import_object(path: str, key: str) -> Any:
    """The object at `package.module:name`.

    Raises:
        RecipeError: If it cannot be imported, naming the recipe's `key`.
    """
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"{key}: cannot import '{path}': {error}. It is read as package.module:object, from the working directory "
            "and the installed packages."
        ) from error
    return found
