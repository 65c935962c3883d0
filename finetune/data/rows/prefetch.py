"""Batches read one ahead of the loop, in a thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

Read = Callable[[npt.NDArray[np.integer]], dict[str, Any]]


class Prefetcher:
    """Reads what is asked for, and then, behind the loop's back, what will be asked for next."""

    def __init__(self, read: Read) -> None:
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
