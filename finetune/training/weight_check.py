"""Verifies that training trains: what should move moves, what is frozen does not, and ranks hold the same weights.

An adapter that no gradient reaches, experts that an option froze, or ranks that never average their gradients leave a
loss curve that looks like any other. Weights are compared by numbers that are computed on the device
(`finetune.distributed.weight_digests`) and read a step later.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.checkpoint.run_facts import brief_list
from finetune.distributed.backend import Backend
from finetune.distributed.weight_digests import Held
from finetune.monitoring.metrics import Reporter
from finetune.monitoring.step_all_reduce import AsyncScalar
from finetune.utils.errors import BackendError

# Adapters begin with one factor at zero, without which the other has no gradient: it moves from the second step on.
FIRST_STEPS = 3
# With so many steps taken and nothing moved, nothing will.
_PATIENCE_STEPS = 8


@dataclass(frozen=True)
class Movement:
    """Names of weights, by what became of them."""

    step: int
    """The last step that is looked at."""
    taken: int
    """Steps that this process has taken, without those that were skipped."""
    trained: tuple[str, ...]
    unmoved: tuple[str, ...]
    """Trained weights that are what they were."""
    frozen: tuple[str, ...]
    changed: tuple[str, ...]
    """Frozen weights that are not what they were."""
    parted: tuple[str, ...]
    """Weights whose copies on several ranks differ."""
    ranks: int

    def line(self) -> str:
        """For people."""
        moved = len(self.trained) - len(self.unmoved)
        parts = [f"{moved} of {len(self.trained)} trained tensors have moved in {_steps(self.taken)}"]
        if self.frozen:
            parts.append(f"none of {len(self.frozen)} frozen ones has")
        if self.ranks > 1:
            parts.append(f"{self.ranks} ranks agree")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """For `run.json`."""
        return {
            "step": self.step,
            "trained": len(self.trained),
            "unmoved": list(self.unmoved),
            "frozen": len(self.frozen),
            "frozen_changed": len(self.changed),
            "ranks_agree": not self.parted,
        }


class WeightCheck:
    """Compares the weights of this process's first steps, and of its last, with those that it began with."""

    def __init__(self, backend: Backend, network: nn.Module, reporter: Reporter) -> None:
        self._backend, self._network, self._reporter = backend, network, reporter
        self._held: list[Held] = []
        self._places, self._before = torch.empty(0), torch.empty(0)
        self._steps = self._due = 0
        self._waiting: tuple[int, AsyncScalar] | None = None
        self.newest: Movement | None = None

    def open(self) -> None:
        """Looks at the weights that training begins with; every rank must call it."""
        self._held, before = self._backend.weight_digests(self._network)
        places = torch.tensor([held.place for held in self._held], device=self._backend.device)
        self._places = self._backend.gather_numbers(places).cpu()
        self._before = before.cpu()
        self._due = FIRST_STEPS

    def step_taken(self, step: int, skipped: int) -> None:
        """Looks at the weights where that is due, and at what was found a step ago; every rank must call it.

        Args:
            step: Steps of the run.
            skipped: Steps of this process that changed nothing.

        Raises:
            BackendError: If something is wrong with them.
        """
        self._steps += 1
        if self._waiting is not None:
            self._judge(skipped)
        elif self._steps - skipped >= self._due:
            self._look(step)

    def finish(self, step: int, skipped: int) -> None:
        """Looks at the last weights, on every rank; raises a `BackendError` if something is wrong with them."""
        if self._steps > skipped:
            self._look(step)
            self._judge(skipped, last=True)

    def _look(self, step: int) -> None:
        self._waiting = step, AsyncScalar(self._backend.weight_digests(self._network)[1].flatten())

    def _judge(self, skipped: int, *, last: bool = False) -> None:
        assert self._waiting is not None
        (step, numbers), self._waiting = self._waiting, None
        now = torch.tensor(numbers.read(), dtype=torch.int64).view_as(self._before)
        taken = self._steps - skipped - (0 if last else 1)
        report = compare_weights(self._held, self._places, self._before, now, step, taken)
        check_movement(report, nothing_moves=last or taken >= _PATIENCE_STEPS)
        first, self.newest = self.newest is None, report
        if first:
            self._reporter.say(f"weights: {report.line()}")
        if report.unmoved and (first or last):
            why = (
                "They had no gradient (experts that no token reached, parts that the loss does not use), or steps so "
                "small that they are lost in rounding"
            )
            if taken == 1 and all("lora_A" in name for name in report.unmoved):
                why = "They cannot move in the first step, in which the other factor of the adapter is zero"
            self._reporter.warn(
                f"{len(report.unmoved)} of {len(report.trained)} trained tensors have not moved in {_steps(taken)}: "
                f"{brief_list(report.unmoved, 3)}. {why}."
            )
        # Once all have moved, the end is looked at alone.
        self._due = 2 * max(self._due, taken) if report.unmoved else 1 << 62


def compare_weights(
    held: list[Held], places: torch.Tensor, before: torch.Tensor, now: torch.Tensor, step: int, taken: int
) -> Movement:
    """Compares weights by their digests from before and now: (ranks, tensors) each."""
    trained: dict[str, bool] = {}
    frozen: dict[str, bool] = {}
    parted = []
    # A tensor may be held twice, as a master and as the copy that is computed with: both have to move.
    for column, (one, moved) in enumerate(zip(held, (before != now).any(0).tolist(), strict=True)):
        if one.trained:
            trained[one.name] = moved and trained.get(one.name, True)
        else:
            frozen[one.name] = moved or frozen.get(one.name, False)
        copies = set(zip(places[:, column].tolist(), now[:, column].tolist(), strict=True))
        if len(copies) > len({shard for shard, _ in copies}):
            parted.append(one.name)
    return Movement(
        step=step,
        taken=taken,
        trained=tuple(trained),
        unmoved=tuple(name for name, moved in trained.items() if not moved),
        frozen=tuple(frozen),
        changed=tuple(name for name, moved in frozen.items() if moved),
        parted=tuple(dict.fromkeys(parted)),
        ranks=len(before),
    )


def check_movement(found: Movement, *, nothing_moves: bool) -> None:
    """Refuses weights that show that something else is trained than was asked.

    Args:
        nothing_moves: Whether it is an error by now if no tensor has moved.

    Raises:
        BackendError: With what is wrong.
    """
    if found.changed:
        raise BackendError(
            f"{len(found.changed)} of {len(found.frozen)} frozen tensors have changed by step {found.step}: "
            f"{brief_list(found.changed, 3)}. Something writes to weights that are not trained, and what is saved "
            "lacks it. Look for code of your own that changes weights, or for memory that fails."
        )
    if found.parted:
        raise BackendError(
            f"Ranks have come to hold different values of {len(found.parted)} tensors that they share by step "
            f"{found.step}: {brief_list(found.parted, 3)}. Each trains a network of its own, as where gradients are "
            "not averaged. Look for code of your own that changes weights or gradients on some ranks, or for hardware "
            "that computes wrongly, and resume from a checkpoint that was saved before."
        )
    if nothing_moves and len(found.unmoved) == len(found.trained):
        raise BackendError(
            f"None of the {len(found.trained)} trained tensors has moved in {_steps(found.taken)}: nothing is trained. "
            "Either no gradient reaches them, or optim.lr is so small that a step is lost in rounding."
        )


def _steps(count: int) -> str:
    return f"{count} step" + ("s" if count != 1 else "")
