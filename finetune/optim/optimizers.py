"""Optimisers by name, their parameter groups, and which of them a launch can run."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from finetune.config.recipe import hint
from finetune.config.recipe_schema import OptimSection, Recipe
from finetune.distributed.parameter_info import local
from finetune.optim.lr_schedule import peak_lr
from finetune.utils.compat.library_versions import require_installed
from finetune.utils.errors import RecipeError
from finetune.utils.import_object import import_object

# Of torch's, those that treat each element alone: a first step on a trial would import a compiler, which takes seconds.
ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]

# Where a trial cuts matrices of 48 elements in two.
_CUT = 19


def build_optimizer(model: nn.Module, recipe: Recipe, *, whole: bool = False) -> Optimizer:
    """The optimiser over the model's trainable parameters; build it before a backend wraps the model.

    `whole` says that tensors stay so, which fused kernels, which skip a step without asking the host, may need.

    Raises:
        RecipeError: If there is no such optimiser, or it refuses its arguments.
    """
    groups = parameter_groups(model, recipe.optim.weight_decay)
    if not groups:
        raise RecipeError("The model has no trainable parameters: everything is frozen.")
    arguments = _arguments(recipe.optim, peak_lr(recipe))
    if whole and recipe.optim.name == "SGD" and "foreach" not in arguments:
        arguments.setdefault("fused", True)
    optimizer = _made(recipe.optim, groups, arguments)
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    return optimizer


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


def check_optimizer(optim: OptimSection, *, cut: bool, flat: bool) -> None:
    """Refuses an optimiser that cannot run here, before anything is read.

    Args:
        cut: True if the launch cuts tensors or their state among ranks.
        flat: True if what is cut loses its shape as well: parts are vectors.

    Raises:
        RecipeError: If there is no such optimiser, or it cannot run here.
    """
    name, fused, optimizer_class = optim.name, bool(optim.args.get("fused")), _find(optim.name)
    launch = "on one process or with accelerate_configs/ddp.yaml"
    if optimizer_class.__module__.startswith("bitsandbytes"):
        if cut:
            raise RecipeError(
                f"optim.name: {name} of bitsandbytes keeps its state in blocks of whole tensors, which this launch "
                "cuts among processes: on another number of them the blocks would be others. Take AdamW, or launch "
                f"{launch}."
            )
        if name.startswith("Paged") and not torch.cuda.is_available():
            same = name.removeprefix("Paged").removesuffix("32bit")
            offered = {**_classes(torch.optim), **_of_bitsandbytes()}
            other = f"{same}, which is the same without pages" if same in offered else "AdamW8bit"
            raise RecipeError(
                f"optim.name: {name} pages its state out of a GPU's memory, and this machine has no GPU. Take {other}."
            )
        return
    # A class that says `needs_whole_tensors` is believed; of any other, a trial shows what it does. The trial is
    # made under every launch, since it also refuses what cannot take a step at all.
    alone = optimizer_class in (getattr(torch.optim, known) for known in ELEMENTWISE) or (
        not getattr(optimizer_class, "needs_whole_tensors", False) and _trials_agree(optim)
    )
    if not cut or (not flat and getattr(optimizer_class, "reads_dtensors", False)):
        return
    if not alone:
        others = "AdamW" if flat else "AdamW (or LARS or LAMB, which add norms up over processes)"
        raise RecipeError(
            f"optim.name: the update of {name} depends on whole tensors (their norms, rows or matrices), which this "
            "launch cuts among processes: each would compute another update of its part than one process does. "
            f"Launch {launch}, which keep tensors whole, or take an optimiser that treats each element alone, such as "
            f"{others}."
        )
    if not flat and (name == "Rprop" or (fused and name in ("SGD", "Adagrad"))):
        kernel = "args.fused: the fused kernel of" if fused else "name:"
        raise RecipeError(
            f"optim.{kernel} {name} cannot work on tensors that are sharded, as they are under this launch. Launch "
            f"{launch}, which keep tensors whole, or {'leave args.fused out' if fused else 'take AdamW'}."
        )


def _trials_agree(optim: OptimSection) -> bool:
    """Compares three steps on whole tensors with those on parts, each of which has an optimiser as on a rank."""
    whole = _trial(optim, slice(None))
    try:
        # Of different sizes, and with their border inside of a row.
        parts = torch.cat([_trial(optim, slice(None, _CUT)), _trial(optim, slice(_CUT, None))], dim=-1)
    except RecipeError:
        return False  # what takes a matrix, but no part of one as a vector
    return bool((whole - parts).norm() <= 1e-4 * whole.norm())


def _trial(optim: OptimSection, cut_to: slice) -> torch.Tensor:
    """Returns what three steps add to two matrices, or to a part of each as a vector: (2, elements)."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 2, 6, 8, generator=generator)

    def cut(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.clone() if cut_to == slice(None) else matrix.flatten()[cut_to].clone()

    weights = [nn.Parameter(cut(matrix)) for matrix in start]
    # A large rate: what is compared must not drown in rounding.
    optimizer = _made(optim, [{"params": weights}], _arguments(optim, 1.0))
    for matrices in gradients:
        _step(optim, optimizer, weights, [cut(matrix) for matrix in matrices])
    return torch.stack(
        [(weight.detach() - cut(matrix)).flatten() for weight, matrix in zip(weights, start, strict=True)]
    )


def state_bytes(optim: OptimSection) -> float:
    """Returns the bytes of state that the optimiser keeps for an element of a parameter, as a step on a trial shows."""
    trial = nn.Parameter(torch.zeros(64, 256))
    optimizer = _made(optim, [{"params": [trial]}], _arguments(optim, optim.lr))
    _step(optim, optimizer, [trial], [torch.zeros_like(trial)])
    state = [value for value in optimizer.state[trial].values() if isinstance(value, torch.Tensor) and value.ndim]
    return sum(value.nbytes for value in state) / trial.numel()


def _made(optim: OptimSection, parameters: Any, arguments: dict[str, Any]) -> Optimizer:
    what = f"optim: {optim.name} refuses its arguments {arguments}"
    with RecipeError.explaining(what, "", TypeError, ValueError):
        return _find(optim.name)(parameters, **arguments)


def _step(
    optim: OptimSection, optimizer: Any, weights: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]
) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    what = f"optim.name: {optim.name} cannot take a step with dense gradients and nothing else"
    with RecipeError.explaining(
        what, "Take another one, such as AdamW.", TypeError, ValueError, RuntimeError, IndexError
    ):
        optimizer.step()


def _arguments(optim: OptimSection, lr: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {"lr": lr, **optim.args}
    if optim.name in ("Adam", "AdamW") and "foreach" not in arguments:
        arguments.setdefault("fused", True)
    if isinstance(arguments.get("betas"), list):
        arguments["betas"] = tuple(arguments["betas"])
    return arguments


def _find(name: str) -> Callable[..., Optimizer]:
    if ":" in name:
        optimizer_class = import_object(name, "optim.name")
    else:
        optimizer_class = getattr(torch.optim, name, None) or _OWN.get(name) or _of_bitsandbytes().get(name)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        if "8bit" in name or name.startswith("Paged"):
            require_installed("bitsandbytes", f"optim.name {name}")
        offered, more = _classes(torch.optim), _of_bitsandbytes()
        raise RecipeError(
            f"optim.name: '{name}' is no optimiser{hint(name, [*offered, *_OWN, *more]) or '.'} torch.optim has "
            f"{', '.join(sorted(offered))}; finetune has {', '.join(_OWN)}; bitsandbytes has "
            f"{', '.join(sorted(more)) or 'some, once it is installed'}; your own is named package.module:Class."
        )
    return optimizer_class


def _of_bitsandbytes() -> dict[str, type]:
    """Its optimisers with state of 8 bits or in pages, by name; the others are torch's."""
    if find_spec("bitsandbytes") is None:
        return {}
    import bitsandbytes

    return {name: c for name, c in _classes(bitsandbytes.optim).items() if "8bit" in name or name.startswith("Paged")}


def _classes(module: Any) -> dict[str, type]:
    classes = {name: c for name, c in vars(module).items() if isinstance(c, type)}
    return {n: c for n, c in classes.items() if issubclass(c, Optimizer) and n != "Optimizer"}


# LARS and LAMB scale the step of each tensor by that tensor's norms. The norms are those of whole tensors. Where they
# are sharded (DTensors), the squares are summed over the ranks that share them, all in one collective a step. Biases
# and the weights of norms (one dimension) are not scaled: their norms say little, and those of new biases are 0.
#
# As with torch's fused optimisers, nothing is read from the device: `found_inf`, where it is set, makes a step leave
# weights and state as they are. The gradients are used as scratch space.


class LARS(Optimizer):
    """SGD with momentum and a learning rate for each tensor, for large global batches.

    Source: You et al. 2017 (https://arxiv.org/abs/1708.03888), algorithm 1.
    """

    reads_dtensors = True
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
    ) -> None:
        defaults = {"momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step. There is no closure."""
        go, taken = _open_step(self)
        for (p, group), (weight, gradient) in zip(taken, _norms([p for p, _ in taken]), strict=True):
            w, g, decay = local(p), local(p.grad), group["weight_decay"]
            ratio = group["trust_coefficient"] * weight / (gradient + decay * weight)
            velocity = _state(self, p, "momentum_buffer")
            velocity.mul_(1 - go * (1 - group["momentum"]))
            velocity.add_(g.add_(w, alpha=decay).mul_(go * group["lr"] * _where_scaled(p, weight, gradient, ratio)))
            w.sub_(velocity * go)


class LAMB(Optimizer):
    """AdamW whose update is scaled to the norm of its tensor.

    Source: You et al. 2020 (https://arxiv.org/abs/1904.00962), algorithm 2, with the identity as its phi.
    """

    reads_dtensors = True
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        # `capturable` says that the count of steps rests on the device, for whoever restores it.
        defaults = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": True}
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step. There is no closure."""
        go, taken = _open_step(self)
        for p, group in taken:
            w, g, (beta1, beta2) = local(p), local(p.grad), group["betas"]
            first, second = _state(self, p, "exp_avg"), _state(self, p, "exp_avg_sq")
            count = self.state[p].setdefault("step", torch.zeros((), device=w.device)).add_(go)
            first.lerp_(g, (1 - beta1) * go)
            second.lerp_(g.square(), (1 - beta2) * go)
            # At least 1: a first step that is skipped would divide by 0. In fp32, 1 - beta would lose four digits.
            begun = count.clamp(min=1).double()
            root = (second / (1 - beta2**begun)).sqrt_().add_(group["eps"])
            g.copy_(first).div_(1 - beta1**begun).div_(root).add_(w, alpha=group["weight_decay"])
        for (p, group), (weight, update) in zip(taken, _norms([p for p, _ in taken]), strict=True):
            local(p).sub_(local(p.grad) * (go * group["lr"] * _where_scaled(p, weight, update, weight / update)))


def _open_step(optimizer: Optimizer) -> tuple[torch.Tensor, list[tuple[Any, dict[str, Any]]]]:
    """Unscales gradients, and makes them finite where the step is not to be taken.

    Returns:
        1 on the device if the step is to be taken, else 0; and the parameters that have gradients, with their groups.
    """
    taken = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    device = local(taken[0][0]).device if taken else None
    go = torch.ones((), device=device)
    if found_inf is not None:
        # Weights may rest on the host while the norm is on the device.
        go = (found_inf == 0).to(device, torch.float32).reshape(())
    for p, _ in taken:
        gradient = local(p.grad)
        if scale is not None:
            gradient.div_(scale)
        if found_inf is not None:
            gradient.copy_(torch.where(go > 0, gradient, 0.0))
    return go, taken


def _norms(parameters: Sequence[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the norms of each parameter and its gradient, which are whole or sharded alike."""
    shared: dict[tuple[Any, ...], list[Any]] = {}
    for p in parameters:
        shared.setdefault(_groups(p), []).append(p)
    norms: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
    for groups, alike in shared.items():
        squares = torch.stack([local(tensor).norm() for p in alike for tensor in (p, p.grad)]).square_()
        if groups:
            there = squares.to(alike[0].device_mesh.device_type)
            for group in groups:
                distributed.all_reduce(there, group=group)
            squares = there.to(squares.device)
        norms |= dict(zip(alike, squares.sqrt_().view(-1, 2).unbind(), strict=True))
    return (norms[p] for p in parameters)


def _groups(tensor: Any) -> tuple[Any, ...]:
    """The process groups that a tensor is sharded over; none if each rank has all of it."""
    if not hasattr(tensor, "device_mesh"):
        return ()
    places = enumerate(tensor.placements)
    return tuple(tensor.device_mesh.get_group(index) for index, placement in places if placement.is_shard())


def _where_scaled(p: nn.Parameter, one: torch.Tensor, other: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """A tensor's ratio; 1 for those of one dimension, and where one of both norms is 0."""
    return torch.where((one > 0) & (other > 0), ratio, 1.0) if p.ndim > 1 else torch.ones_like(ratio)


def _state(optimizer: Optimizer, p: nn.Parameter, name: str) -> torch.Tensor:
    """Returns this rank's part of a state of a parameter, which begins with zeros."""
    state = optimizer.state[p]
    if name not in state:
        state[name] = torch.zeros_like(p)
    return local(state[name])


_OWN = {"LAMB": LAMB, "LARS": LARS}
