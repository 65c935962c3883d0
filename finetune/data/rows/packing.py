"""Documents to rows. Only lengths are looked at; tokens stay where they are.

The token file is one stream. A document of `n` tokens has `n - 1` pairs of an input and its target, the token
behind it. A segment is a run of pairs: `start` in the stream, and `length`. A row is one or more segments,
and holds at most T pairs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from finetune.data.tokenization.memmap import Int64s, MaskFile, map_array

LongDocuments = Literal["split", "truncate", "drop"]

ROW_TARGETS = "targets.npy"
_ARRAYS = ("starts", "lengths", "row_starts")
_COUNTS = ("empty", "over_long", "truncated", "dropped", "remainder_rows")


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of segments, and what was left out to make them."""

    starts: Int64s
    """First pair of each segment, in the stream; the segments of a row are neighbours."""
    lengths: Int64s
    """Pairs of each segment."""
    row_starts: Int64s
    """First segment of each row, and at the end the number of segments: (rows + 1,)."""
    empty: int = 0
    """Documents without a pair."""
    over_long: int = 0
    """Documents of more than T pairs."""
    truncated: int = 0
    """Documents that lost their end."""
    dropped: int = 0
    """Documents left out because they are over-long."""
    remainder_rows: int = 0
    """Rows left out because they are incomplete."""

    @property
    def num_rows(self) -> int:
        """Rows that were made."""
        return self.row_starts.size - 1


def wrap_stream(num_tokens: int, row_length: int, *, keep_remainder: bool) -> PackedRows:
    """Cuts the stream every `row_length` pairs, through documents."""
    pairs = max(0, num_tokens - 1)
    rows, rest = divmod(pairs, row_length)
    lengths = np.full(rows, row_length, np.int64)
    if rest and keep_remainder:
        lengths = np.append(lengths, rest)
    return PackedRows(
        starts=np.arange(lengths.size, dtype=np.int64) * row_length,
        lengths=lengths,
        row_starts=np.arange(lengths.size + 1, dtype=np.int64),
        remainder_rows=int(rest > 0 and not keep_remainder),
    )


def pad_documents(
    offsets: Int64s, row_length: int, long_documents: LongDocuments, *, with_targets: bool = True
) -> PackedRows:
    """One segment a row, in the order of the documents.

    Args:
        offsets: Where each document starts in the stream, and the end: (documents + 1,).
        row_length: T.
        long_documents: What to do with documents of more than T pairs.
        with_targets: False for classifiers: lengths are tokens then, not pairs.
    """
    starts, pairs = offsets[:-1], np.diff(offsets) - int(with_targets)
    empty = int((pairs < 1).sum())
    starts, pairs = starts[pairs >= 1], pairs[pairs >= 1]
    long = pairs > row_length
    over_long = int(long.sum())
    if long_documents == "split":
        parts = -(-pairs // row_length)
        # The number of each part within its document.
        part = np.arange(int(parts.sum()), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = np.repeat(starts, parts) + part * row_length
        pairs = np.minimum(np.repeat(pairs, parts) - part * row_length, row_length)
    elif long_documents == "truncate":
        pairs = np.minimum(pairs, row_length)
    else:
        starts, pairs = starts[~long], pairs[~long]
    return PackedRows(
        starts=np.ascontiguousarray(starts, np.int64),
        lengths=np.ascontiguousarray(pairs, np.int64),
        row_starts=np.arange(pairs.size + 1, dtype=np.int64),
        empty=empty,
        over_long=over_long,
        truncated=over_long if long_documents == "truncate" else 0,
        dropped=over_long if long_documents == "drop" else 0,
    )


def pack_documents(offsets: Int64s, row_length: int, long_documents: LongDocuments) -> PackedRows:
    """Whole documents, best-fit decreasing: the longest first, each into the fullest row that still has room.

    For the arguments see `pad_documents`. Time is linear in the documents plus the number of pairs (length, room)
    that occur, because documents of one length are placed together.

    Source: Johnson, "Near-optimal bin packing algorithms", 1973; for rows of text Ding et al., "Fewer
    Truncations Improve Language Modeling", 2024.
    """
    loose = pad_documents(offsets, row_length, long_documents)
    rows = best_fit_decreasing(loose.lengths, row_length)
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=int(rows.max()) + 1 if rows.size else 0)
    row_starts = np.concatenate([np.array([0], np.int64), np.cumsum(counts, dtype=np.int64)])
    return replace(loose, starts=loose.starts[order], lengths=loose.lengths[order], row_starts=row_starts)


def save_rows(packed: PackedRows, folder: Path, mask: MaskFile | None = None) -> dict[str, Any]:
    """Writes the arrays to a folder and returns the rest as JSON-able facts for reports.

    With a mask, how many targets each row has is written too: a step must know before it reads.
    """
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(packed, name), allow_pickle=False)
    counts = {name: getattr(packed, name) for name in _COUNTS}
    pairs = targets = int(packed.lengths.sum())
    if mask is not None:
        of_segments = mask.counts(packed.starts, packed.lengths)
        of_rows = np.add.reduceat(of_segments, packed.row_starts[:-1]) if packed.num_rows else of_segments
        np.save(folder / ROW_TARGETS, of_rows, allow_pickle=False)
        targets = int(of_rows.sum())
    return {"rows": packed.num_rows, "pairs": pairs, "targets": targets, **counts}


def load_rows(folder: Path) -> PackedRows:
    """Opens the rows that `save_rows` has written, memory-mapped, without what was counted."""
    starts, lengths, row_starts = (map_array(folder / f"{name}.npy") for name in _ARRAYS)
    return PackedRows(starts, lengths, row_starts)


def best_fit_decreasing(lengths: Int64s, room: int) -> Int64s:
    """The row of each item.

    Args:
        lengths: Of the items, 1 to `room`.
        room: Of a row.

    Returns:
        Row numbers from 0 without gaps, one for each item. Items of one length go in their given order.
    """
    # NumPy sorts small numbers with less time and memory.
    items = np.argsort((room - lengths).astype(np.min_scalar_type(room)), kind="stable")
    rows = np.empty(lengths.size, np.int64)
    # Open rows by the room that they have left. Bit r is set where there are any with room r: the next ones from a size
    # upwards are found in one operation.
    shelves: list[list[Int64s]] = [[] for _ in range(room + 1)]
    present = num_rows = begin = 0
    counts = np.bincount(lengths, minlength=1)
    for size in np.flatnonzero(counts)[::-1].tolist():
        end = begin + int(counts[size])
        while begin < end:
            count = end - begin
            if above := present >> size:
                free = size + (above & -above).bit_length() - 1
                taken = shelves[free].pop()
                if not shelves[free]:
                    present ^= 1 << free
            else:
                free, new = room, max(1, count // (room // size))
                taken = np.arange(num_rows, num_rows + new, dtype=np.int64)
                num_rows += new
            # What fits the fullest row best goes on fitting it best until that row is full.
            each = min(free // size, count)
            taken, rest = taken[: count // each], taken[count // each :]
            for part, left in ((rest, free), (taken, free - each * size)):
                if part.size and left:
                    shelves[left].append(part)
                    present |= 1 << left
            rows[items[begin : begin + taken.size * each]] = np.repeat(taken, each)
            begin += taken.size * each
    return rows
