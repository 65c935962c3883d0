"""Averages of trained weights, which an optimiser keeps beside its own state: evaluated and written in their place."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finetune.distributed.parameter_info import local

AVERAGE = "average"
"""Name of the state that holds a parameter's average."""

EachMaster = Callable[[Callable[[Any, dict[str, Any]], None], bool], None]
"""Calls a function with each tensor that the optimiser steps, this rank's part, and its state; with True, the network
computes with what it makes of these tensors afterwards."""


class WeightAverage:
    """An exponential moving average: average = decay x average + (1 - decay) x weights, first the weights."""

    def __init__(self, each_master: EachMaster, decay: float, every_steps: int, *, stateless: bool) -> None:
        """`stateless` says that the optimiser keeps nothing of its own."""
        self._each_master, self._share, self._every_steps = each_master, 1 - decay, every_steps
        self._stateless = stateless
        # Weights from before the steps, by position, until the optimiser has made its state, which it does where it
        # finds none: that of a tensor without gradients may come late.
        self._first: list[Any] = []
        each_master(lambda p, state: self._first.append(None if AVERAGE in state else p.clone()), False)

    @torch.no_grad()
    def update(self, norm: torch.Tensor, step: int) -> None:
        """Averages after a step, counted from 0, unless its gradient norm was not finite and it was not taken."""
        due = (step + 1) % self._every_steps == 0
        if not due and all(tensor is None for tensor in self._first):
            return
        share, position = norm.isfinite() * self._share, itertools.count()

        def change(p: Any, state: dict[str, Any]) -> None:
            index = next(position)
            if self._first[index] is not None and (state or self._stateless):
                state[AVERAGE], self._first[index] = self._first[index], None
            if due and AVERAGE in state:
                here = local(p)
                local(state[AVERAGE]).lerp_(here, share.to(here.device, here.dtype))

        self._each_master(change, False)


@contextmanager
def averages_in_place(each_master: EachMaster) -> Iterator[None]:
    """Has the network hold the averages within, and its own weights again afterwards, to the bit.

    The weights' copies take as much memory as gradients do, which are not there then.
    """
    kept: list[Any] = []

    @torch.no_grad()
    def put(p: Any, state: dict[str, Any]) -> None:
        average = state.get(AVERAGE)
        kept.append(None if average is None else p.clone())
        if average is not None:
            p.copy_(average)

    @torch.no_grad()
    def restore(p: Any, state: dict[str, Any]) -> None:
        if (weights := kept.pop(0)) is not None:
            p.copy_(weights)

    each_master(put, True)
    yield
    each_master(restore, True)
