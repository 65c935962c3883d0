"""Measures what a rank holds from step to step, by purpose; activations come on top."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.distributed.parameter_info import held_bytes, local
from finetune.distributed.strategies.strategy import Runtime, Strategy


@dataclass(frozen=True)
class Memory:
    """Bytes that this rank holds from step to step, wherever they rest."""

    frozen: int
    """Weights that are not trained, with the scales of packed ones, and buffers."""
    trained: int
    """Weights that are trained, and their fp32 master weights where these are apart."""
    gradients: int
    """Gradients at their largest: while a step's micro-batches add up."""
    optimizer: int
    """Optimiser state, as one step on a trial tensor shows."""

    def line(self) -> str:
        """Returns one line for people."""
        weights = self.frozen + self.trained
        unit, size = ("GiB", 2**30) if weights + self.gradients + self.optimizer >= 2**30 else ("MiB", 2**20)
        held = {"weights": weights, "gradients": self.gradients, "optimiser": self.optimizer}
        shown = ", ".join(f"{name} {number / size:.3g}" for name, number in held.items())
        return f"{shown} {unit} a rank"


def measure_memory(
    strategy: Strategy, runtime: Runtime, model: nn.Module, state_bytes: float, frozen: Sequence[nn.Module] = ()
) -> Memory:
    """Adds up what the prepared objects hold, with so many bytes of state that the optimiser keeps for an element.

    Of `frozen` networks nothing is trained.
    """
    networks = nn.ModuleList([model, *frozen])
    parameters = list(networks.parameters())
    trained = [p for p in parameters if p.requires_grad]
    held, elements = strategy.held_weights(model, trained)
    # Until their last micro-batch.
    whole = runtime.launch.holds_whole_gradients(runtime.accumulation)
    return Memory(
        frozen=sum(held_bytes(p) for p in parameters if not p.requires_grad)
        + sum(local(b).nbytes for b in networks.buffers())
        + sum(t.nbytes for m in networks.modules() for t in _scales(getattr(m, "quant_state", None))),
        trained=held,
        gradients=4 * (sum(int(getattr(p, "ds_numel", p.numel())) for p in trained) if whole else elements),
        optimizer=round(state_bytes * elements),
    )


def _scales(state: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors beside quantized weights; see bitsandbytes' `QuantState`."""
    if state is not None:
        yield from (t for t in (state.absmax, state.code, state.offset) if t is not None)
        yield from _scales(state.state2)
