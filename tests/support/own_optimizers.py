"""Optimisers of a user's own. Recipes in tests name them as `own_optimizers:NAME`."""

from typing import Any

import torch
from torch import nn
from torch.optim import SGD


class TwoRates(torch.optim.AdamW):
    """The last tensor of each group learns at a tenth of the rate."""

    def __init__(self, params: Any, lr: float, **arguments: Any) -> None:
        split = []
        for group in params:
            *most, last = group["params"]
            split += [{**group, "params": most}] if most else []
            split += [{**group, "params": [last], "lr": lr / 10}]
        super().__init__(split, lr=lr, **arguments)
        self.seen: list[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append([group["lr"] for group in self.param_groups])
        return super().step(closure)


class Normed(SGD):
    """Steps of a length that does not depend on the gradient's, which nothing but its steps tells of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Says(SGD):
    """Acts on each element alone so far, but says that it needs more."""

    needs_whole_tensors = True


def reference(name: str, weights: list[nn.Parameter], gradients: list[torch.Tensor], state: dict[str, Any]) -> None:
    """A step of LARS or LAMB as their papers have it, in float64 and without a thought for memory.

    Source: You et al. 2017, algorithm 1 (eta 0.001, m 0.9); You et al. 2020, algorithm 2 (phi the identity).
    """
    lr, decay = state["lr"], state["decay"]
    state["t"] = state.get("t", 0) + 1
    for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        w, g = weight.data, gradient.double()
        scaled = w.ndim > 1
        if name == "LARS":
            rate = 0.001 * w.norm() / (g.norm() + decay * w.norm()) if scaled and w.norm() > 0 else 1.0
            v = state.setdefault(("v", index), torch.zeros_like(w))
            state["v", index] = v = 0.9 * v + lr * rate * (g + decay * w)
            weight.data = w - v
        else:
            m = 0.9 * state.get(("m", index), 0.0) + 0.1 * g
            v = 0.999 * state.get(("v", index), 0.0) + 0.001 * g * g
            state["m", index], state["v", index] = m, v
            root = (v / (1 - 0.999 ** state["t"])).sqrt() + 1e-6
            update = m / (1 - 0.9 ** state["t"]) / root + decay * w
            ratio = w.norm() / update.norm() if scaled and w.norm() > 0 else 1.0
            weight.data = w - lr * ratio * update
