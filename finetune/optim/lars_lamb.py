"""LARS and LAMB: optimisers for large global batches, which scale the step of each tensor by that tensor's norms.

The norms are those of whole tensors. Where tensors are sharded (DTensors), the squares are summed over the ranks that
share them, all in one collective a step. Biases and the weights of norms (one dimension) are not scaled: their norms
say little, and those of new biases are 0.

As with torch's fused optimisers, nothing is read from the device: `found_inf`, where it is set, makes a step leave
weights and state as they are. The gradients are used as scratch space.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from finetune.distributed.tensor_facts import local


class LARS(Optimizer):
    """SGD with momentum and a learning rate for each tensor.

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
        go, taken = _gate(self), _taken(self)
        for (p, group), (weight, gradient) in zip(taken, _norms([(p, p.grad) for p, _ in taken]), strict=True):
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
        go, taken = _gate(self), _taken(self)
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
        for (p, group), (weight, update) in zip(taken, _norms([(p, p.grad) for p, _ in taken]), strict=True):
            local(p).sub_(local(p.grad) * (go * group["lr"] * _where_scaled(p, weight, update, weight / update)))


def _taken(optimizer: Optimizer) -> list[tuple[Any, dict[str, Any]]]:
    return [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _gate(optimizer: Optimizer) -> torch.Tensor:
    """1 on the device if the step is to be taken, 0 if not; gradients are unscaled and, where it is 0, made finite."""
    taken = _taken(optimizer)
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    device = local(taken[0][0]).device if taken else None
    go = torch.ones((), device=device)
    if found is not None:
        # Weights may rest on the host while the norm is on the device.
        go = (found == 0).to(device, torch.float32).reshape(())
    for p, _ in taken:
        gradient = local(p.grad)
        if scale is not None:
            gradient.div_(scale)
        if found is not None:
            gradient.copy_(torch.where(go > 0, gradient, 0.0))
    return go


def _norms(pairs: Sequence[tuple[Any, Any]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The norms of pairs of tensors, which are whole or sharded alike."""
    shared: dict[tuple[Any, ...], list[int]] = {}
    for index, (one, _) in enumerate(pairs):
        shared.setdefault(_groups(one), []).append(index)
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for groups, indices in shared.items():
        squares = torch.stack([local(tensor).norm() for index in indices for tensor in pairs[index]]).square_()
        if groups:
            there = squares.to(pairs[indices[0]][0].device_mesh.device_type)
            for group in groups:
                distributed.all_reduce(there, group=group)
            squares = there.to(squares.device)
        found |= dict(zip(indices, squares.sqrt_().view(-1, 2).unbind(), strict=True))  # type: ignore[arg-type]
    return (found[index] for index in range(len(pairs)))


def _groups(tensor: Any) -> tuple[Any, ...]:
    """The process groups that a tensor is sharded over; none if each rank has all of it."""
    if not hasattr(tensor, "device_mesh"):
        return ()
    places = enumerate(tensor.placements)
    return tuple(tensor.device_mesh.get_group(index) for index, place in places if place.is_shard())


def _where_scaled(p: nn.Parameter, one: torch.Tensor, other: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """A tensor's ratio; 1 for those of one dimension, and where one of both norms is 0."""
    return torch.where((one > 0) & (other > 0), ratio, 1.0) if p.ndim > 1 else torch.ones_like(ratio)


def _state(optimizer: Optimizer, p: nn.Parameter, name: str) -> torch.Tensor:
    """Returns this rank's part of a state of a parameter, which begins with zeros."""
    state = optimizer.state[p]
    if name not in state:
        state[name] = torch.zeros_like(p)
    return local(state[name])
