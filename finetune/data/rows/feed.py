"""A feed of rows: what a rank computes in each step of training. A file of tokens is one; its rows are read ahead."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from finetune.data.rows.row_order import RowOrder, row_checksum


class Rows(Protocol):
    """Rows of known number, read by position."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The given rows as CPU tensors, first dimension `B`."""

    def num_targets(self, rows: np.ndarray) -> int:
        """The number of targets that `loss_sum` sums over for these rows; must be known before the forward pass."""

    # Rows may also have `num_computed(rows)`: how many tokens the network computes, learned or not, without padding;
    # and `counts(rows)`: by name how many there are of what terms count beside `targets`; and of `targets` the sum of
    # weights, where a batch has `weights` that losses are multiplied by.


def counts_of(rows: Rows, numbers: npt.NDArray[np.int64]) -> dict[str, float]:
    """Returns by name how much some rows hold of what terms count."""
    others = getattr(rows, "counts", None)
    return {"targets": rows.num_targets(numbers), **(others(numbers) if others is not None else {})}


@dataclass(frozen=True)
class Window:
    """The part of a step's global batch that a rank computes."""

    batches: Iterator[dict[str, torch.Tensor]]
    """The micro-batches, as tensors of the host. Each is read by the time that it is asked for, in order and once."""
    rows: list[npt.NDArray[np.int64]]
    """The numbers of each micro-batch's rows, (micro_size,)."""
    counts: dict[str, float]
    """How much they hold of what terms count: `targets`, or the sum of their weights, and others by name."""
    num_targets: int
    """Targets, whatever their weights."""
    num_computed: int
    """Tokens that are computed, learned or not, without padding."""
    checksum: int
    """The sum of the rows' checksums; see `row_checksum`."""


class Feed(Protocol):
    """Source of a rank's training rows. How many there are may be unknown, and rows may be read in their order only.

    Steps are counted from 0 and asked for in order, from the one that the feed was made for.
    """

    def step(self, step: int) -> Window:
        """Returns what this rank computes in a step."""

    def epoch(self, step: int) -> Fraction | None:
        """Epochs that all ranks have read before a step; None where nobody knows how many rows an epoch has."""

    def state_dict(self, step: int) -> dict[str, Any]:
        """State that a checkpoint keeps to go on with a step that was not asked for yet; `position` is in it."""

    def describe(self, step: int) -> dict[str, Any]:
        """Line of the ledger for a start at a step: `position`, and how rows follow from it."""


@dataclass(frozen=True, eq=False)
class TokenFileFeed:
    """Rows that are counted and read by position, in an order that is a pure function of seed and position."""

    rows: Rows | None
    """None if the run takes no step."""
    order: RowOrder
    first_step: int
    """The step that this start of the run begins with."""
    first_position: int
    """The position of the first row of that step."""
    num_steps: int
    """Steps of the whole run."""
    micro_size: int
    data_size: int
    """Ranks, or groups of ranks that share rows."""
    data_rank: int
    """The number of this rank, or of its group, among them."""
    _ahead: dict[bytes, Future[dict[str, torch.Tensor]]] = field(default_factory=dict, init=False)
    """The micro-batch that is being read ahead, by its rows."""
    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "reader"), init=False)

    def step(self, step: int) -> Window:
        """Returns what this rank computes in a step, any of the run's."""
        assert self.rows is not None
        micro_batches = self.micro_batches(step)
        num_computed = getattr(self.rows, "num_computed", self.rows.num_targets)
        counts = [counts_of(self.rows, rows) for rows in micro_batches]
        return Window(
            self._read(step, micro_batches),
            micro_batches,
            counts={name: sum(each[name] for each in counts) for name in counts[0]},
            num_targets=sum(map(self.rows.num_targets, micro_batches)),
            num_computed=sum(map(num_computed, micro_batches)),
            checksum=sum(map(row_checksum, micro_batches)),
        )

    def epoch(self, step: int) -> Fraction:
        """Epochs that all ranks have read before a step."""
        return Fraction(self._position(step), max(1, self.order.epoch_rows))

    def state_dict(self, step: int) -> dict[str, Any]:
        """The first position that a step reads."""
        return {"position": self._position(step)}

    def describe(self, step: int) -> dict[str, Any]:
        """The first position that a step reads, and how positions map to rows."""
        return {**self.state_dict(step), **asdict(self.order)}

    def micro_batches(self, step: int) -> list[npt.NDArray[np.int64]]:
        """This rank's micro-batches of a step, as row numbers, (micro_size,) each."""
        rows = self.order.step_rows(self._position(step))
        # (micro-batch, rank, row): with equal micro-batches, the same rows make a forward pass on any number of ranks.
        return list(rows.reshape(-1, self.data_size, self.micro_size)[:, self.data_rank])

    def _position(self, step: int) -> int:
        return self.first_position + (step - self.first_step) * self.order.global_size

    def _read(self, step: int, micro_batches: list[npt.NDArray[np.int64]]) -> Iterator[dict[str, torch.Tensor]]:
        """Reads each micro-batch when it is asked for, and then, in a thread, the one that comes next."""
        assert self.rows is not None
        for index, rows in enumerate(micro_batches):
            ahead = self._ahead.pop(rows.tobytes(), None)
            self._ahead.clear()  # what was foreseen, and is not asked for
            batch = ahead.result() if ahead is not None else self.rows.batch(rows)
            last = index + 1 == len(micro_batches)
            if not last or step + 1 < self.num_steps:
                then = self.micro_batches(step + 1)[0] if last else micro_batches[index + 1]
                self._ahead[then.tobytes()] = self._thread.submit(self.rows.batch, then)
            yield batch


def evaluation_batches(
    rows: Rows, among: range, micro_size: int, *, data_size: int = 1, data_rank: int = 0
) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, torch.Tensor]]]:
    """Each row once over all ranks: row numbers, and their batch.

    Each rank gets as many batches. One whose share is used up gets no numbers, and a row that counts for nothing.

    Args:
        among: Numbers of the rows.
        micro_size: Rows in a batch, at most.
    """
    first = data_rank * micro_size
    for start in range(among.start + first, among.stop + first, data_size * micro_size):
        share = np.arange(start, min(start + micro_size, among.stop))
        yield share, rows.batch(share if share.size else np.arange(1))
