"""Which rows a rank reads in which step, a pure function of seed and step; and reading them one batch ahead."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.rows.row_order import rows_at


@dataclass(frozen=True)
class RowSampler:
    """The micro-batches of one rank."""

    num_rows: int
    epoch_rows: int
    """Rows of an epoch that are used."""
    seed: int
    first_step: int
    """Where this start of the run begins, and the position of the first row that it reads."""
    first_position: int
    num_steps: int
    """Steps of the whole run."""
    global_size: int
    micro_size: int
    accumulation: int
    """Micro-batches of a rank in a step."""
    world: int
    """Ranks, or groups of ranks that share rows, and this one's number among them."""
    rank: int

    def position(self, step: int) -> int:
        """The first position that a step reads."""
        return self.first_position + (step - self.first_step) * self.global_size

    def micro_batches(self, step: int) -> list[npt.NDArray[np.int64]]:
        """This rank's micro-batches of a step, as row numbers, (micro_size,) each."""
        first = self.position(step)
        positions = np.arange(first, first + self.global_size)
        rows = rows_at(positions, num_rows=self.num_rows, seed=self.seed, epoch_rows=self.epoch_rows)
        # (micro-batch, rank, row): with equal micro-batches, the same rows make a forward pass on any number of ranks.
        grid = rows.reshape(self.accumulation, self.world, self.micro_size)
        return list(grid[:, self.rank])

    def first_after(self, step: int) -> npt.NDArray[np.int64] | None:
        """The first micro-batch of the next step; None after the last one."""
        return self.micro_batches(step + 1)[0] if step + 1 < self.num_steps else None


class Prefetcher:
    """Reads the batch that is requested and then, in a thread, the one that comes next."""

    def __init__(self, read: Callable[[npt.NDArray[np.integer]], dict[str, Any]]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._next: tuple[bytes, Future[dict[str, Any]]] | None = None

    def batch(self, rows: npt.NDArray[np.integer], then: npt.NDArray[np.integer] | None) -> dict[str, Any]:
        """The batch of some rows.

        Args:
            rows: Row numbers, (B,).
            then: The rows of the batch after this one; None if there is none.

        Raises:
            Exception: What reading raises, in the thread or here.
        """
        read, self._next = self._next, None
        batch = read[1].result() if read is not None and read[0] == rows.tobytes() else self._read(rows)
        if then is not None:
            self._next = (then.tobytes(), self._thread.submit(self._read, then))
        return batch
