"""Steps whose loss or gradient is not finite: skipped on all ranks, counted, and reported."""

import math
from typing import Any

import torch

from finetune.distributed.backend import Backend
from finetune.monitoring.step_all_reduce import StepOutput
from finetune.utils.errors import DivergedError

# Loss scaling halves the scale at each overflow: from 2**16 it is below 1 after 17, and nothing can help after 40.
_MAX_OVERFLOWS = 40


def spread_nonfinite(sums: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The sum of `sums * scale`, whose gradient is not finite wherever one of the sums is not.

    The derivative of a loss may be finite where the loss is not. Spoiled here, every rank sees it in the gradient norm.

    Args:
        sums: A scalar, or (K,).
        scale: Of the terms that are learned, which come first: (at most K,).
    """
    learned = sums.reshape(-1)[: len(scale)]
    return (learned * (scale + 0 * learned.detach())).sum()


class NonFiniteGuard:
    """Looks at each step one step later, when its numbers are there, and counts those that were skipped.

    Every rank sees the same gradient norm, so every rank comes to the same answer.
    """

    def __init__(self, backend: Backend, max_skipped: int, before: dict[str, dict[str, int]] | None = None) -> None:
        """`before` is the `state` in the checkpoint that the run resumes from."""
        self._backend, self._max_skipped = backend, max_skipped
        self._last: StepOutput | None = None
        before = before or {}
        none = dict.fromkeys(("nonfinite", "overflow"), 0)
        self._in_a_row: dict[str, int] = none | before.get("in_a_row", {})
        self.counts: dict[str, int] = none | before.get("counts", {})
        """Skipped steps so far: because a loss or gradient was not finite, or the loss scale was too large."""

    @property
    def state(self) -> dict[str, dict[str, int]]:
        """The counts, for a checkpoint: a restart in the middle of a series must not begin them anew."""
        return {"counts": dict(self.counts), "in_a_row": dict(self._in_a_row)}

    @property
    def total(self) -> int:
        """Steps that were skipped so far."""
        return sum(self.counts.values())

    def check(self, output: StepOutput | None) -> dict[str, Any] | None:
        """Takes in the newest step, or None at the end, and returns the incident of the one before if it was skipped.

        It is `fatal` if too many steps in a row were skipped: `diverged` is what to raise. Every rank must call it.
        """
        before, self._last = self._last, output
        if before is None:
            return None
        norm = before.norm.read()[0]
        if math.isfinite(norm):
            self._in_a_row = dict.fromkeys(self._in_a_row, 0)
            return None
        backend, mesh = self._backend, self._backend.mesh
        accumulation, micro = len(before.rows), len(before.rows[0])
        losses = torch.zeros(accumulation, mesh.data_size, dtype=torch.float64, device=backend.device)
        if mesh.counts_loss:
            losses[:, mesh.data_rank] = before.losses.double()
        rows = torch.zeros(accumulation, mesh.data_size, micro, dtype=torch.int64, device=backend.device)
        for index, own in enumerate(before.rows if mesh.counts_rows else []):
            rows[index, mesh.data_rank] = torch.as_tensor(own, device=backend.device)
        seen, ids = backend.all_reduce_sum(losses).tolist(), backend.all_reduce_sum(rows).tolist()
        finite = all(math.isfinite(loss) for per_rank in seen for loss in per_rank)
        # Where losses are scaled, gradients may overflow now and then.
        kind = "overflow" if finite and backend.precision == "fp16" else "nonfinite"
        self.counts[kind] += 1
        self._in_a_row[kind] += 1
        incident = {
            "step": before.step + 1,
            "kind": kind,
            "in_a_row": self._in_a_row[kind],
            "grad_norm": repr(norm),
            "micro_batches": [
                {"rank": rank, "rows": ids[index][rank], "loss_sum": repr(loss)}
                for index, per_rank in enumerate(seen)
                for rank, loss in enumerate(per_rank)
            ],
        }
        limit = {"nonfinite": self._max_skipped, "overflow": _MAX_OVERFLOWS}[kind]
        return {**incident, "fatal": self._in_a_row[kind] >= limit}

    def diverged(self, incident: dict[str, Any], checkpoint: str | None, *, nothing: bool) -> DivergedError:
        """The error to stop with after a fatal incident; `nothing` if there was no other step, and so no model."""
        what = "a loss or gradient that is not finite" if incident["kind"] == "nonfinite" else "an overflow"
        if nothing:
            which, more = f"Each of the run's {incident['step']} steps had", ""
            keep = "Nothing was learned, and no model is written."
        else:
            which = f"{incident['in_a_row']} steps in a row, up to step {incident['step']}, had"
            keep = f"The last good checkpoint is {checkpoint}." if checkpoint else "There is no checkpoint yet."
            more = ", or raise guard.max_skipped_steps"
        return DivergedError(
            f"{which} {what}; none of them changed the weights. incidents.jsonl lists their rows and losses. {keep} "
            f"Lower optim.lr, look at those rows{more}."
        )
