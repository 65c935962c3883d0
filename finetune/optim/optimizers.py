"""Optimisers by name, LARS, LAMB and Muon among them, and which of them a launch can run."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from finetune.config.recipe import hint
from finetune.config.recipe_schema import OptimSection, Recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.parameter_info import DTYPES, local
from finetune.distributed.state.weight_average import AVERAGE
from finetune.optim.lr_schedule import peak_lr
from finetune.optim.parameter_groups import parameter_groups
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
    groups, peak = parameter_groups(model, recipe.optim), peak_lr(recipe)
    if not groups:
        raise RecipeError("The model has no trainable parameters: everything is frozen.")
    for group in groups:
        group["lr"] = peak * group.pop("lr_factor")
    arguments = _arguments(recipe.optim, peak)
    if whole and recipe.optim.name == "SGD" and "foreach" not in arguments:
        arguments.setdefault("fused", True)
    optimizer = _made(recipe.optim, groups, arguments)
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    return optimizer


def check_optimizer(optim: OptimSection, launch: Launch) -> None:
    """Refuses an optimiser that cannot run here, before anything is read.

    Raises:
        RecipeError: If there is no such optimiser, or it cannot run here.
    """
    cut, flat = launch.cuts_state, launch.flattens
    name, fused, optimizer_class = optim.name, bool(optim.args.get("fused")), _find(optim.name)
    alone_or_ddp = "on one process or with accelerate_configs/ddp.yaml"
    if optimizer_class.__module__.startswith("bitsandbytes"):
        if cut:
            raise RecipeError(
                f"optim.name: {name} of bitsandbytes keeps its state in blocks of whole tensors, which this launch "
                "cuts among processes: on another number of them the blocks would be others. Take AdamW, or launch "
                f"{alone_or_ddp}."
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
    # What ranks that share layers have of a matrix is no DTensor.
    reads = getattr(optimizer_class, "reads_dtensors", False) and not flat and launch.tensor == 1
    if not cut or reads:
        return
    if not alone:
        others = "AdamW"
        if not flat and launch.tensor == 1:
            others = "AdamW (or LARS, LAMB or Muon, which read whole tensors over processes)"
        raise RecipeError(
            f"optim.name: the update of {name} depends on whole tensors (their norms, rows or matrices), which this "
            "launch cuts among processes: each would compute another update of its part than one process does. "
            f"Launch {alone_or_ddp}, which keep tensors whole, or take an optimiser that treats each element alone, "
            f"such as {others}."
        )
    if not flat and (name == "Rprop" or (fused and name in ("SGD", "Adagrad"))):
        kernel = "args.fused: the fused kernel of" if fused else "name:"
        raise RecipeError(
            f"optim.{kernel} {name} cannot work on tensors that are sharded, as they are under this launch. Launch "
            f"{alone_or_ddp}, which keep tensors whole, or {'leave args.fused out' if fused else 'take AdamW'}."
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


def state_bytes(optim: OptimSection, groups: Iterable[dict[str, Any]] = ({"params": ()},)) -> float:
    """Returns the bytes of state that the optimiser keeps for an element of a parameter, as a step on a trial shows.

    Muon keeps less of matrices than of others: then it is the average over all elements of `groups`. Averages of
    weights are counted.
    """
    sizes: Counter[bool] = Counter()
    for group in groups:
        elements = sum(int(getattr(p, "ds_numel", p.numel())) for p in group["params"])
        sizes[group.get("matrix", True)] += max(1, elements)
    total = 0.0 if optim.ema_decay is None else 4.0 * sizes.total()
    for matrix, elements in sizes.items():
        trial = nn.Parameter(torch.zeros(64, 256))
        optimizer = _made(optim, [{"params": [trial], "matrix": matrix}], _arguments(optim, optim.lr))
        _step(optim, optimizer, [trial], [torch.zeros_like(trial)])
        state = [value for value in optimizer.state[trial].values() if isinstance(value, torch.Tensor) and value.ndim]
        total += elements * sum(value.nbytes for value in state) / trial.numel()
    return total / sizes.total()


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
        optimizer_class = _OWN.get(name) or getattr(torch.optim, name, None) or _of_bitsandbytes().get(name)
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
            _make_adamw_update(self, p, group, go)
        for (p, group), (weight, update) in zip(taken, _norms([p for p, _ in taken]), strict=True):
            local(p).sub_(local(p.grad) * (go * group["lr"] * _where_scaled(p, weight, update, weight / update)))


class Muon(Optimizer):
    """Orthogonalised momentum for matrices of layers; AdamW for all other parameters.

    A matrix that is sharded is gathered once its momentum is added up, one at a time. Each rank orthogonalises all of
    it, and takes its own rows.

    Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), and torch.optim.Muon, whose arguments these
    are; Liu et al. 2025 (https://arxiv.org/abs/2502.16982), section 2.2, for `match_rms_adamw`.
    """

    reads_dtensors = True
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        ns_dtype: str = "fp32",
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """`betas` and `eps` are AdamW's."""
        if ns_dtype not in ("fp32", "bf16") or adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError("ns_dtype is fp32 or bf16, and adjust_lr_fn is match_rms_adamw or original")
        of_matrices = {"matrix": True, "momentum": momentum, "ns_steps": ns_steps}
        ways = {"ns_dtype": ns_dtype, "adjust_lr_fn": adjust_lr_fn}
        of_others = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": True}
        super().__init__(params, {"lr": lr, **of_matrices, **ways, **of_others})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step. There is no closure."""
        go, taken = _open_step(self)
        for p, group in taken:
            if group["matrix"] and p.ndim == 2:
                self._make_update(p, group, go)
            else:
                _make_adamw_update(self, p, group, go)
            local(p).sub_(local(p.grad) * (go * group["lr"]))

    def _make_update(self, p: Any, group: dict[str, Any], go: torch.Tensor) -> None:
        """Writes a matrix's update, before it is multiplied with the rate, in place of its gradient."""
        g, velocity = local(p.grad), _state(self, p, "momentum_buffer")
        velocity.lerp_(g, (1 - group["momentum"]) * go)
        g.lerp_(velocity, group["momentum"])  # as Nesterov's
        whole, sharded = p.grad, hasattr(p, "device_mesh")
        if sharded:
            # Gradients that rest in host memory are gathered where the process group is.
            whole = whole.to(p.device_mesh.device_type).full_tensor()
        rows, columns = p.shape
        scale = 0.2 * math.sqrt(max(rows, columns))
        if group["adjust_lr_fn"] == "original":
            scale = math.sqrt(max(1, rows / columns))
        update: Any = _orthogonalize(whole, group) * scale
        if sharded:
            update = DTensor.from_local(update, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
            update = local(update.redistribute(placements=p.placements))
        g.copy_(update).add_(local(p), alpha=group["weight_decay"])


def _orthogonalize(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Returns a matrix with singular values near 1 in place of its own, by Newton and Schulz's iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if tall else matrix).to(DTYPES[group["ns_dtype"]])
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), wide, beta=3.4445)
    return (wide.T if tall else wide).to(matrix.dtype).contiguous()


def _make_adamw_update(optimizer: Optimizer, p: Any, group: dict[str, Any], go: torch.Tensor) -> None:
    """Writes AdamW's update, with weight decay and before it is multiplied with the rate, in place of a gradient."""
    w, g, (beta1, beta2) = local(p), local(p.grad), group["betas"]
    first, second = _state(optimizer, p, "exp_avg"), _state(optimizer, p, "exp_avg_sq")
    count = optimizer.state[p].setdefault("step", torch.zeros((), device=w.device)).add_(go)
    first.lerp_(g, (1 - beta1) * go)
    second.lerp_(g.square(), (1 - beta2) * go)
    # At least 1: a first step that is skipped would divide by 0. In fp32, 1 - beta would lose four digits.
    begun = count.clamp(min=1).double()
    root = (second / (1 - beta2**begun)).sqrt_().add_(group["eps"])
    g.copy_(first).div_(1 - beta1**begun).div_(root).add_(w, alpha=group["weight_decay"])


class ScheduleFreeAdamW(Optimizer):
    """AdamW without a decay of its rate: gradients are taken between its own path `z` and the average of that.

    A parameter is y = (1 - beta1) z + beta1 x, with x, the state `average`, the mean of all z, each weighted by
    step^r x lr^weight_lr_power. x is what is evaluated and written. The reference keeps y and z alone, and changes y to
    x and back by rounding; with x kept an evaluation changes no bit of y, for 4 more bytes an element.

    Source: Defazio et al. 2024 (https://arxiv.org/abs/2405.15682), algorithm 1, and its reference AdamWScheduleFree.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        weights = {"r": r, "weight_lr_power": weight_lr_power}
        more = {"eps": eps, "weight_decay": weight_decay, "capturable": True}
        super().__init__(params, {"lr": lr, "betas": betas, **more, **weights})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step. There is no closure."""
        go, taken = _open_step(self)
        for p, group in taken:
            w, g, lr, (beta1, beta2) = local(p), local(p.grad), group["lr"], group["betas"]
            state, nothing = self.state[p], torch.zeros((), device=w.device)
            z, average = (_state(self, p, name, begins_as_weights=True) for name in ("z", AVERAGE))
            begun = state.setdefault("step", nothing.clone()).add_(go).clamp(min=1).double()
            weight = go * (begun ** group["r"] * lr ** group["weight_lr_power"]).float()
            share = weight / state.setdefault("weight_sum", nothing).add_(weight).clamp(min=1e-38)
            second = _state(self, p, "exp_avg_sq").lerp_(g.square(), (1 - beta2) * go)
            g.div_((second / (1 - beta2**begun)).sqrt_().add_(group["eps"])).add_(w, alpha=group["weight_decay"])
            z.sub_(g * (go * lr))
            average.lerp_(z, share)
            w.copy_(z.lerp(average, beta1))


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


def _state(optimizer: Optimizer, p: nn.Parameter, name: str, *, begins_as_weights: bool = False) -> torch.Tensor:
    """Returns this rank's part of a state of a parameter, which begins with zeros, or as the parameter."""
    state = optimizer.state[p]
    if name not in state:
        state[name] = p.detach().clone() if begins_as_weights else torch.zeros_like(p)
    return local(state[name])


_OWN = {"LAMB": LAMB, "LARS": LARS, "Muon": Muon, "ScheduleFreeAdamW": ScheduleFreeAdamW}
