"""How far a run has come: what the loop counts, and what a checkpoint stores of it."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class LastLog:
    """Where the last line of metrics was written; the next one's rates count from here."""

    step: int
    tokens: float
    computed: float = 0.0


@dataclass
class TrainState:
    """What changes from step to step, beside weights and optimiser state."""

    step: int
    """Optimiser steps taken."""
    tokens: torch.Tensor
    """Targets trained on over all ranks; (1,), float64, on the device."""
    last_log: LastLog
    computed: float = 0.0
    """Tokens that all ranks have computed since this process began, learned or not, without padding."""
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    """`step` and `loss` of the last evaluation of this process; empty before the first one."""

    @classmethod
    def at(cls, step: int, tokens: int, device: torch.device) -> "TrainState":
        """The state after some steps of an earlier process, or of none."""
        counted = torch.full((1,), float(tokens), dtype=torch.float64, device=device)
        return cls(step, counted, LastLog(step, float(tokens)))

    def log_here(self) -> None:
        """Has the next rates count from this step; waits for the device."""
        self.last_log = LastLog(self.step, self.tokens.item(), self.computed)

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint stores; waits for the device."""
        evaluated = self.last_evaluation.get("step") == self.step
        return {
            "step": self.step,
            "tokens": int(self.tokens.item()),
            # By which the best checkpoint is kept.
            "validation_loss": self.last_evaluation["loss"] if evaluated else None,
        }
