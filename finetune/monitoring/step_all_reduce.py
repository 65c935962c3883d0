"""Values that ranks sum in a step, and outputs of a step."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from finetune.utils.recorded_figures import Totals


class AsyncScalar:
    """Numbers on the device that the host reads a step later, without waiting for work that was queued since."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: Any = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._values = values.detach().clone()

    def read(self) -> list[float]:
        """Returns the numbers; waits until the device has come to where this was made."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


@dataclass(frozen=True)
class StepSync:
    """Values that the ranks sum at the beginning of a step."""

    targets: float = 0.0
    """Targets in the step's batch."""
    rows: float = 0.0
    """Checksum of the rows read."""
    stop: float = 0.0
    """Ranks that are asked to stop."""
    busy: float = 0.0
    """Ranks that are writing a checkpoint."""
    failed: float = 0.0
    """Ranks that could not write it."""
    save: float = 0.0
    """1 if it is time for a checkpoint by rank 0's clock."""
    computed: float = 0.0
    """Tokens that are computed in this step, learned or not, without padding."""


@dataclass(frozen=True)
class StepOutput:
    """Outputs of a step, to be read later."""

    step: int
    sync: AsyncScalar
    """Sums over the ranks: those of `StepSync`, and behind them what each of the task's terms is divided by, (K,)."""
    norm: AsyncScalar
    """The global gradient norm; not finite if the step was skipped."""
    losses: torch.Tensor
    """This rank's loss sum of each micro-batch: of several terms, of all that are learned."""
    rows: list[Any]
    """This rank's rows of each micro-batch."""
    sums: torch.Tensor
    """This rank's sum of each term, (K,) in fp64."""
    recorded: Totals
    """What this rank has recorded."""

    def read_sync(self) -> tuple[StepSync, list[float]]:
        """Returns the sums over the ranks, and what each term is divided by."""
        numbers, size = self.sync.read(), len(fields(StepSync))
        return StepSync(*numbers[:size]), numbers[size:]
