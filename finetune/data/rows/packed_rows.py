"""Documents to rows, of which only lengths are looked at.

The token file is one stream. A document of `n` tokens has `n - 1` pairs of an input and its target, the token
behind it. A segment is a run of pairs: `start` in the stream, and `length`. A row is one or more segments,
and holds at most T pairs, where T is the recipe's `sequence_length`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from finetune.data.tokenization.memmap import Int64s, map_array

LongDocuments = Literal["split", "truncate", "drop"]

ROW_TARGETS = "targets.npy"
_ARRAYS = ("starts", "lengths", "row_starts")
IGNORED = -100
"""The target where there is nothing to predict."""

_MULTIPLE = 8
NOTHING_LEFT_OUT = dict.fromkeys(("empty", "over_long", "truncated", "dropped", "remainder_rows"), 0)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of segments, and what was left out to make them."""

    starts: Int64s
    """First pair of each segment, in the stream; the segments of a row are neighbours."""
    lengths: Int64s
    """Pairs of each segment."""
    row_starts: Int64s
    """First segment of each row, and at the end the number of segments: (rows + 1,)."""
    counts: dict[str, int] = field(default_factory=dict)
    """Documents and rows that were changed or left out, by the names that `SplitReport` has for them."""

    @property
    def num_rows(self) -> int:
        """Rows that were made."""
        return self.row_starts.size - 1

    def sums(self, of_segments: Int64s) -> Int64s:
        """Sums numbers of segments over those of each row: (rows,)."""
        return np.add.reduceat(of_segments, self.row_starts[:-1]) if self.num_rows else of_segments


def wrap_stream(num_tokens: int, row_length: int, *, keep_remainder: bool) -> PackedRows:
    """Cuts the stream every `row_length` pairs, through documents."""
    pairs = max(0, num_tokens - 1)
    rows, rest = divmod(pairs, row_length)
    lengths = np.full(rows, row_length, np.int64)
    if rest and keep_remainder:
        lengths = np.append(lengths, rest)
    left_out = int(rest > 0 and not keep_remainder)
    return _of_segments(np.arange(lengths.size) * row_length, lengths, remainder_rows=left_out)


def _of_segments(starts: Int64s, lengths: Int64s, each: int = 1, **counts: int) -> PackedRows:
    """Rows of so many segments each."""
    starts, lengths = (np.ascontiguousarray(values.ravel(), np.int64) for values in (starts, lengths))
    row_starts = np.arange(0, lengths.size + 1, each, dtype=np.int64)
    return PackedRows(starts, lengths, row_starts, {**NOTHING_LEFT_OUT, **counts})


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
    counts = {"empty": int((pairs < 1).sum())}
    starts, pairs = starts[pairs >= 1], pairs[pairs >= 1]
    long = pairs > row_length
    counts["over_long"] = int(long.sum())
    if long_documents == "split":
        parts = -(-pairs // row_length)
        # The number of each part within its document.
        part_index = np.arange(int(parts.sum()), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = np.repeat(starts, parts) + part_index * row_length
        pairs = np.minimum(np.repeat(pairs, parts) - part_index * row_length, row_length)
    elif long_documents == "truncate":
        pairs, counts["truncated"] = np.minimum(pairs, row_length), counts["over_long"]
    else:
        starts, pairs, counts["dropped"] = starts[~long], pairs[~long], counts["over_long"]
    return _of_segments(starts, pairs, **counts)


def pad_pairs(offsets: Int64s, firsts: Int64s, room: Sequence[int], *, drop: bool) -> PackedRows:
    """Two segments a row, a source and its target, of which `firsts`, (documents,), are tokens of the source.

    The rest of the document is its target. For the other arguments see `pad_texts`.
    """
    return pad_texts(offsets, np.stack([firsts, np.diff(offsets) - firsts], axis=1), room, drop=drop)


def pad_texts(offsets: Int64s, sizes: Int64s, room: Sequence[int], *, drop: bool) -> PackedRows:
    """A row for each document, a segment for each of its texts. Lengths are tokens, not pairs.

    Args:
        offsets: Where each document starts in the stream, and the end: (documents + 1,).
        sizes: Tokens of each text of a document, (documents, texts).
        room: The most tokens of each text, or of any.
        drop: Leaves out documents of which a text is too long; else all lose their end.
    """
    starts = offsets[:-1, None] + np.cumsum(sizes, axis=1) - sizes
    empty, long = (sizes < 1).any(1), (sizes > np.array(room)).any(1)
    kept = ~empty & ~(long & drop)
    over_long = int((long & ~empty).sum())
    lengths = np.minimum(sizes[kept], np.array(room))
    counts = {"empty": int(empty.sum()), "over_long": over_long, "dropped" if drop else "truncated": over_long}
    return _of_segments(starts[kept], lengths, sizes.shape[1], **counts)


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


def save_rows(packed: PackedRows, folder: Path, of_segments: Int64s | None, labelled: int) -> dict[str, Any]:
    """Writes the arrays to a folder and returns the rest as JSON-able facts for reports.

    Args:
        of_segments: Targets of each segment, which are written for each row: a step must know before it reads. None
            where their lengths say it.
        labelled: Targets that the documents have.
    """
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(packed, name), allow_pickle=False)
    pairs = targets = int(packed.lengths.sum())
    if of_segments is not None:
        of_rows = packed.sums(of_segments)
        np.save(folder / ROW_TARGETS, of_rows, allow_pickle=False)
        targets = int(of_rows.sum())
    cut = max(0, labelled - targets)
    return {"rows": packed.num_rows, "pairs": pairs, "targets": targets, "labels_cut": cut, **packed.counts}


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
            for row_numbers, left in ((rest, free), (taken, free - each * size)):
                if row_numbers.size and left:
                    shelves[left].append(row_numbers)
                    present |= 1 << left
            rows[items[begin : begin + taken.size * each]] = np.repeat(taken, each)
            begin += taken.size * each
    return rows


def ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """`start`, `start + 1`, ... for `length` numbers each, one range after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - ends + lengths, lengths)


def round_up(width: int) -> int:
    return -(-width // _MULTIPLE) * _MULTIPLE
