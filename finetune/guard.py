"""What a run survives: requests to stop, steps that are not finite, memory that runs out.

Everything that one rank sees alone is agreed by all before anyone acts on it: it rides on the step's all-reduce.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune import parent
from finetune.backend import Backend
from finetune.errors import DivergedError, MemoryFullError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# Launchers pass on the signal that their workers have received already, and ranks are told one after the other.
# Within this time all of it is one request.
_SAME_REQUEST_S = 3.0

# Loss scaling halves the scale at each overflow: from 2**16 it is below 1 after 17, and nothing can help after 40.
_MAX_OVERFLOWS = 40


class Stopper:
    """Turns signals, and the end of the launcher, into a request to stop at a step's boundary."""

    def __init__(self, grace_s: float) -> None:
        """
        Args:
            grace_s: Seconds after a request until the process ends, saved or not.
        """
        self.reason: str | None = None
        """Why this rank wants to stop, or None."""
        self._grace_s = grace_s
        self._since = 0.0
        self._listens = self._ignoring = False

    @property
    def requested(self) -> bool:
        """Whether this rank wants to stop."""
        if self.reason is None and parent.gone():
            # An orphan would go on with nobody to see it, and hold the run directory.
            self._request("the launcher is gone", 128 + signal.SIGTERM)
        return self.reason is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles the signals meanwhile. Python allows that in the main thread only; elsewhere it does nothing."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            yield
            return
        # Python runs handlers between two of the main thread's instructions, which never comes while that waits for
        # another rank. What the system writes to this pipe at once is read by a thread.
        heard, told = os.pipe()
        os.set_blocking(told, False)
        threading.Thread(target=self._listen, args=(heard,), name="signals", daemon=True).start()
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        pipe_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        self._listens = True
        try:
            yield
        finally:
            self._listens = False
            for number, handler in before.items():
                if not self._ignoring:
                    signal.signal(number, handler)
            signal.set_wakeup_fd(pipe_before)
            os.close(told)

    def ignore(self) -> None:
        """From here on signals change nothing: all is saved, and the process is about to end with its own code."""
        self._ignoring = True
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, heard: int) -> None:
        with os.fdopen(heard, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for number in numbers:
                    if number in SIGNALS and not self._ignoring:
                        self._handle(number)

    def _handle(self, number: int) -> None:
        if self.reason is None:
            self._request(signal.Signals(number).name, 128 + number)
        elif time.monotonic() - self._since > _SAME_REQUEST_S:
            os._exit(128 + number)

    def _request(self, reason: str, code: int) -> None:
        self.reason, self._since = reason, time.monotonic()
        timer = threading.Timer(self._grace_s, self._end, (code,))
        timer.daemon = True
        timer.start()

    def _end(self, code: int) -> None:
        if self._ignoring:
            return
        # Not print: the main thread may be in the middle of one.
        text = (
            f"\nError: asked to stop ({self.reason}), but no checkpoint was complete within guard.grace_s = "
            f"{self._grace_s:g} s. Ended; the last whole checkpoint stays.\n"
        )
        os.write(sys.stderr.fileno(), text.encode())
        os._exit(code)


class Later:
    """Numbers on the device that the host reads when they are long there, without waiting for what came after."""

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
        """The numbers; waits for the device to have come as far as where this was made."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


@dataclass(frozen=True)
class Signs:
    """What the ranks tell each other at the beginning of a step; each a sum over ranks."""

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
    """Whether it is time for a checkpoint by rank 0's clock."""
    computed: float = 0.0
    """Tokens that are computed in this step, learned or not, without padding."""


@dataclass(frozen=True)
class Taken:
    """What one step left to be looked at."""

    step: int
    signs: Later
    """What the ranks told each other as it began, as `Signs`."""
    norm: Later
    """The global gradient norm; not finite if the step was skipped."""
    losses: torch.Tensor
    """This rank's loss sum of each micro-batch."""
    rows: list[Any]
    """This rank's rows of each micro-batch."""


class Watch:
    """Looks at each step one step later, when its numbers are there, and counts those that were skipped.

    Every rank sees the same gradient norm, so every rank comes to the same answer.
    """

    def __init__(self, backend: Backend, max_skipped: int, before: dict[str, dict[str, int]] | None = None) -> None:
        """
        Args:
            before: What `state` was when the checkpoint was saved that the run resumes from.
        """
        self._backend, self._max_skipped = backend, max_skipped
        self._taken: Taken | None = None
        before = before or {}
        self._in_a_row: dict[str, int] = {"nonfinite": 0, "overflow": 0, **before.get("in_a_row", {})}
        self.counts: dict[str, int] = {"nonfinite": 0, "overflow": 0, **before.get("counts", {})}
        """Skipped steps so far: because a loss or gradient was not finite, or the loss scale was too large."""

    @property
    def state(self) -> dict[str, dict[str, int]]:
        """The counts, for a checkpoint: a restart in the middle of a series must not begin them anew."""
        return {"counts": dict(self.counts), "in_a_row": dict(self._in_a_row)}

    def look(self, taken: Taken | None) -> dict[str, Any] | None:
        """Takes a step in, and returns what happened in the one before if that was skipped.

        Args:
            taken: The newest step; None looks at the last one now.

        Raises:
            DivergedError: If too many steps in a row were skipped; the incident is its `incident`.
        """
        before, self._taken = self._taken, taken
        if before is None:
            return None
        norm = before.norm.read()[0]
        if norm == norm and abs(norm) != float("inf"):
            self._in_a_row = dict.fromkeys(self._in_a_row, 0)
            return None
        return self._incident(before, norm)

    def _incident(self, taken: Taken, norm: float) -> dict[str, Any]:
        backend = self._backend
        accumulation, micro = len(taken.rows), len(taken.rows[0])
        losses = torch.zeros(accumulation, backend.world, dtype=torch.float64, device=backend.device)
        losses[:, backend.rank] = taken.losses.double()
        rows = torch.zeros(accumulation, backend.world, micro, dtype=torch.int64, device=backend.device)
        for index, own in enumerate(taken.rows):
            rows[index, backend.rank] = torch.as_tensor(own, device=backend.device)
        seen, ids = backend.sum(losses).tolist(), backend.sum(rows).tolist()
        finite = all(abs(loss) < float("inf") for per_rank in seen for loss in per_rank)
        kind = "overflow" if finite and backend.scales_loss else "nonfinite"
        self.counts[kind] += 1
        self._in_a_row[kind] += 1
        incident = {
            "step": taken.step + 1,
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

    def diverged(self, incident: dict[str, Any], checkpoint: Path | None) -> DivergedError:
        """The error to stop with after a fatal incident."""
        what = "a loss or gradient that is not finite" if incident["kind"] == "nonfinite" else "an overflow"
        keep = f"The last good checkpoint is {checkpoint}." if checkpoint else "There is no checkpoint yet."
        return DivergedError(
            f"{incident['in_a_row']} steps in a row, up to step {incident['step']}, had {what}; none of them changed "
            f"the weights. incidents.jsonl lists their rows and losses. {keep} Lower optim.lr, look at those rows, or "
            "raise guard.max_skipped_steps."
        )


def explain_memory(error: BaseException) -> MemoryFullError | None:
    """An out-of-memory error as a paragraph: what was held, and what lowers it; None for any other error."""
    text = str(error)
    full = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )
    if not full:
        return None
    # Beside a GPU the host's memory may run out, too.
    of_host = isinstance(error, MemoryError) or "can't allocate memory" in text
    if torch.cuda.is_available() and not of_host:
        held, most, place = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), "device"
        free, total = torch.cuda.mem_get_info()
    else:
        machine, place = psutil.virtual_memory(), "machine"
        held, most = psutil.Process().memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        free, total = machine.available, machine.total
    gib = [f"{number / 2**30:.2f}" for number in (held, most, total, free)]
    rank, said = os.environ.get("RANK", "0"), " ".join(text.split())[:300]
    return MemoryFullError(
        f"Out of memory on rank {rank}: {said} Held by this process: {gib[0]} GiB, at most {gib[1]}; of the "
        f"{place}'s {gib[2]} GiB {gib[3]} are free. Lower batch.micro_size (the global batch stays), set "
        "model.gradient_checkpointing: true, lower data.sequence_length, train adapters (lora), or take a launch "
        "file of accelerate_configs/ that shards or offloads more."
    )
