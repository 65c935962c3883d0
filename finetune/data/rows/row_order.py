"""The order of rows as a pure function of (seed, position): nothing to save, nothing to replay.

A Feistel network over the smallest even number of bits that holds `num_rows`, walked until it lands inside
(Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). Written out here rather than taken from a
random generator, so that a library update cannot change what an old run would have read next.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_ROUND_KEYS = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN

UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RowOrder:
    """Rows by their positions in a run. The ledger keeps it with each start."""

    seed: int
    num_rows: int
    """Rows that there are."""
    epoch_rows: int
    """Rows of an epoch that are used."""
    global_size: int
    """Rows of a step, over all ranks."""
    data: str
    """The digest of the rows."""

    def step_rows(self, position: int) -> npt.NDArray[np.int64]:
        """The rows of the step that begins at a position, over all ranks: (global_size,)."""
        positions = np.arange(position, position + self.global_size)
        return rows_at(positions, num_rows=self.num_rows, seed=self.seed, epoch_rows=self.epoch_rows)


def row_checksum(rows: npt.NDArray[np.integer]) -> int:
    """32 mixed bits a row, added up. Sums over ranks stay exact in float64 for up to 2 million rows a step."""
    return int((splitmix64(np.asarray(rows).astype(np.uint64).ravel()) >> np.uint64(32)).sum())


def rows_at(
    positions: npt.NDArray[np.integer], *, num_rows: int, seed: int, epoch_rows: int | None = None
) -> npt.NDArray[np.int64]:
    """The rows to read at some positions of the run.

    Position `p` lies in epoch `p // epoch_rows` at index `p % epoch_rows`; each epoch reads `epoch_rows`
    different rows in an order of its own. Time and memory are linear in `positions`, whatever `num_rows` is.

    Args:
        positions: Positions over the whole run, counted from 0, any shape.
        num_rows: Rows that there are.
        seed: Of the order; any integer.
        epoch_rows: Rows that make an epoch, at most `num_rows` (fewer where an incomplete batch is left out).

    Returns:
        Row numbers in `[0, num_rows)`, shaped like `positions`.

    Raises:
        ValueError: If `num_rows` or `epoch_rows` is out of range, or a position is negative.
    """
    epoch_rows = num_rows if epoch_rows is None else epoch_rows
    if not 1 <= epoch_rows <= num_rows:
        raise ValueError(f"epoch_rows must be 1 to num_rows, got epoch_rows={epoch_rows}, num_rows={num_rows}.")
    where = np.asarray(positions)
    if where.size and int(where.min()) < 0:
        raise ValueError(f"Positions count from 0, got {int(where.min())}.")
    where = where.astype(np.uint64)
    epochs, index = np.divmod(where, np.uint64(epoch_rows))
    keys = splitmix64(epochs + splitmix64(np.array([seed & _MASK], np.uint64))[0])
    half_bits = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    rows = _permute(index, keys, half_bits)
    outside = rows >= num_rows
    while outside.any():
        rows[outside] = _permute(rows[outside], keys[outside], half_bits)
        outside = rows >= num_rows
    return rows.astype(np.int64)


def _permute(values: UInt64s, keys: UInt64s, half_bits: int) -> UInt64s:
    """A bijection of `[0, 4**half_bits)` for each key."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    # The keys of all rounds at once: for few values a call of NumPy costs more than what it computes.
    for key in splitmix64(keys[None] ^ _ROUND_KEYS.reshape(-1, *[1] * keys.ndim)):
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return (left << bits) | right


def splitmix64(values: UInt64s) -> UInt64s:
    """Mixes bits: every output bit depends on every input bit (Steele, Lea and Flood 2014)."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
