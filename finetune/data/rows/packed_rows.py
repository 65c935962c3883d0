"""Documents to rows, of which only lengths are looked at, and rows to batches, straight from the token file.

The token file is one stream. A document of `n` tokens has `n - 1` pairs of an input and its target, the token
behind it. A segment is a run of pairs: `start` in the stream, and `length`. A row is one or more segments,
and holds at most T pairs.

Shapes: B rows, T tokens a row (`sequence_length`), L tokens of the longest row of a batch.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from finetune.data.tokenization.memmap import Int64s, MaskFile, map_array
from finetune.data.tokenization.token_files import Tokens
from finetune.data.tokenization.tokenizer import Wrapping, truncate_pair

LongDocuments = Literal["split", "truncate", "drop"]

ROW_TARGETS = "targets.npy"
_ARRAYS = ("starts", "lengths", "row_starts")
IGNORED = -100
"""The target where there is nothing to predict."""

_MULTIPLE = 8
_NOTHING_LEFT_OUT = dict.fromkeys(("empty", "over_long", "truncated", "dropped", "remainder_rows"), 0)


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
    return PackedRows(starts, lengths, row_starts, {**_NOTHING_LEFT_OUT, **counts})


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


def pad_pairs(offsets: Int64s, firsts: Int64s, room: tuple[int, int], *, drop: bool) -> PackedRows:
    """Two segments a row, a source and its target, in the order of the documents. Lengths are tokens, not pairs.

    Args:
        offsets: Where each document starts in the stream, and the end: (documents + 1,).
        firsts: Tokens of each source, (documents,); the rest of the document is its target.
        room: The most tokens of a source and of a target.
        drop: Leaves out documents of which either is too long; else both lose their end.
    """
    sizes = np.stack([firsts, np.diff(offsets) - firsts], axis=1)
    starts = np.stack([offsets[:-1], offsets[:-1] + firsts], axis=1)
    empty, long = (sizes < 1).any(1), (sizes > np.array(room)).any(1)
    kept = ~empty & ~(long & drop)
    over_long = int((long & ~empty).sum())
    lengths = np.minimum(sizes[kept], np.array(room))
    counts = {"empty": int(empty.sum()), "over_long": over_long, "dropped" if drop else "truncated": over_long}
    return _of_segments(starts[kept], lengths, 2, **counts)


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


def save_rows(
    packed: PackedRows,
    folder: Path,
    mask: MaskFile | None = None,
    token_labels: npt.NDArray[np.int32] | None = None,
) -> dict[str, Any]:
    """Writes the arrays to a folder and returns the rest as JSON-able facts for reports.

    With a mask or with labels of tokens, how many targets each row has is written too: a step must know before it
    reads.
    """
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(packed, name), allow_pickle=False)
    pairs = targets = int(packed.lengths.sum())
    labelled, of_segments = 0, None
    if mask is not None:
        of_segments = mask.counts(packed.starts, packed.lengths)
    elif token_labels is not None:
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(token_labels >= 0, dtype=np.int64)])
        labelled, of_segments = int(before[-1]), before[packed.starts + packed.lengths] - before[packed.starts]
    if of_segments is not None:
        of_rows = np.add.reduceat(of_segments, packed.row_starts[:-1]) if packed.num_rows else of_segments
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


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of tokens, read by position. Reading neither changes nor copies anything but the batch."""

    tokens: Tokens
    packed: PackedRows
    row_length: int
    """T."""
    padding_id: int
    restarts: bool
    """True if documents share rows and each counts its positions from 0."""
    fixed: bool
    """True if batches are always T wide; else they are as wide as their longest row, in steps of 8."""
    wrapping: Wrapping
    """Tokens around each document of a classifier or each source, and between the two texts of a pair."""
    target_wrapping: Wrapping | None = None
    """Tokens around each target, where a row is a source and its target: two segments; None for other rows."""
    classes: Int64s | npt.NDArray[np.float32] | None = None
    """The class or number of each row, which is one document: (rows,). None for language modelling."""
    pairs: Int64s | None = None
    """Tokens of both texts of each row, (rows, 2); None where a document is one text."""
    class_weights: npt.NDArray[np.float32] | None = None
    """Factor of the losses of each class, (C,); None where none is weighted."""
    mask: MaskFile | None = None
    """True for tokens that are targets; None where all are."""
    row_targets: Int64s | None = None
    """Targets of each row, (rows,), where there is a mask, or tokens have labels."""
    token_labels: npt.NDArray[np.int32] | None = None
    """Position in the list of labels of each token of the token file, -1 where it has none; None for other tasks."""
    label_classes: Int64s | None = None
    """Class number of each label in that list, and at the end `IGNORED`, for -1."""

    def __len__(self) -> int:
        return self.packed.num_rows

    def num_targets(self, rows: npt.NDArray[np.integer]) -> int:
        """Targets that `batch(rows)` holds, without reading it."""
        if self.classes is not None:
            return int(rows.size)
        if self.target_wrapping is not None:
            return int(self.packed.lengths[2 * rows + 1].sum()) + self.target_wrapping.size * int(rows.size)
        if self.row_targets is not None:
            return int(self.row_targets[rows].sum())
        return int(self._widths[rows].sum())

    def num_computed(self, rows: npt.NDArray[np.integer]) -> int:
        """Tokens that a network computes for `batch(rows)`, without padding."""
        around = self.wrapping.size + (self.target_wrapping.size if self.target_wrapping is not None else 0)
        return int(self._widths[rows].sum()) + around * int(rows.size)

    def batch(self, rows: npt.NDArray[np.integer]) -> dict[str, torch.Tensor]:
        """Reads rows.

        Args:
            rows: Row numbers, (B,).

        Returns:
            For language modelling `input_ids` and `targets`, both (B, T) or (B, L) int64: the target is the
            token that follows the input, -100 where there is none or it is not learned. Where documents share rows also
            `position_ids`, which restart at each document and at the padding, and `cu_seqlens`: where they do in
            the batch read row by row, and its end, (D + 1,) int32 for D documents. There is no attention mask: it
            would make models look across documents.
            For classification `input_ids` and `attention_mask`, (B, L) int64, and `targets`, (B,) int64, or fp32 for
            numbers; where classes are weighted also `weights`, (B,) fp32; of pairs also `token_type_ids`, (B, L) int64,
            if the tokenizer gives them. Where tokens have labels, `targets` and `weights` are (B, L): -100 and 0 at
            tokens that have none.
            For sources and targets `input_ids` and `attention_mask`, (B, L) int64, of the sources, and `targets`, (B,
            M) int64 for the M tokens of the longest target, -100 behind the end of the others.
        """
        if self.target_wrapping is not None:
            return self._source_batch(rows, self.target_wrapping)
        if self.classes is None and self.label_classes is None:
            return self._language_batch(rows)
        return self._class_batch(rows)

    def class_counts(self, num_classes: int) -> Int64s:
        """Targets of each class: (C,)."""
        if self.classes is not None:
            return np.bincount(self.classes.astype(np.int64), minlength=num_classes)
        assert self.label_classes is not None
        assert self.token_labels is not None
        token_classes = self.label_classes[self.token_labels[_ranges(self.packed.starts, self.packed.lengths)]]
        return np.bincount(token_classes[token_classes != IGNORED], minlength=num_classes)

    def _language_batch(self, rows: npt.NDArray[np.integer]) -> dict[str, torch.Tensor]:
        widths = self._widths[rows]
        width = self.row_length if self.fixed else min(self.row_length, _round_up(int(widths.max(initial=1))))
        # All pairs of the batch at once: a Python step for each document would cost more than the reading.
        first = self.packed.row_starts[rows]
        segments = _ranges(first, self.packed.row_starts[rows + 1] - first)
        lengths = self.packed.lengths[segments]
        within = _ranges(np.full_like(lengths, 0), lengths)
        source = np.repeat(self.packed.starts[segments], lengths) + within
        destination = _ranges(np.arange(rows.size, dtype=np.int64) * width, widths)
        inputs = np.full(rows.size * width, self.padding_id, np.int64)
        targets = np.full(rows.size * width, IGNORED, np.int64)
        inputs[destination] = self.tokens[source]
        targets[destination] = self.tokens[source + 1]
        if self.mask is not None:
            targets[destination[~self.mask[source + 1]]] = IGNORED
        batch = {"input_ids": inputs, "targets": targets}
        if self.restarts:
            batch["position_ids"] = (np.arange(width) - widths[:, None]).ravel()
            batch["position_ids"][destination] = within
        tensors = {name: torch.from_numpy(values).view(rows.size, width) for name, values in batch.items()}
        if self.restarts:
            cu_seqlens = np.append(np.flatnonzero(batch["position_ids"] == 0), rows.size * width)
            tensors["cu_seqlens"] = torch.from_numpy(cu_seqlens.astype(np.int32))
        return tensors

    def _class_batch(self, rows: npt.NDArray[np.integer]) -> dict[str, torch.Tensor]:
        around = self.wrapping
        width = min(self.row_length, _round_up(int(self._widths[rows].max(initial=1)) + around.size))
        inputs = np.full((rows.size, width), self.padding_id, np.int64)
        mask, types = (np.full((rows.size, width), 0, np.int64) for _ in range(2))
        targets: Any = np.full((rows.size, width), IGNORED) if self.classes is None else self.classes[rows]
        for line, row in enumerate(rows.tolist()):
            # A row is one document here.
            start, length = int(self.packed.starts[row]), int(self.packed.lengths[row])
            if self.pairs is None:
                ids = [*around.before, *self.tokens[start : start + length].tolist(), *around.behind]
            else:
                first, second = self.pairs[row].tolist()
                kept, then = truncate_pair(first, second, self.row_length - around.size)
                parts = self.tokens[start : start + kept], self.tokens[start + first : start + first + then]
                ids = [*around.before, *parts[0].tolist(), *around.between, *parts[1].tolist(), *around.behind]
                if around.types is not None:
                    each = [1] * len(around.before), kept, [1] * len(around.between), then, [1] * len(around.behind)
                    types[line, : len(ids)] = np.repeat(around.types, np.hstack(each))
            inputs[line, : len(ids)] = ids
            mask[line, : len(ids)] = 1
            if self.label_classes is not None and self.token_labels is not None:
                first = len(around.before)
                targets[line, first : first + length] = self.label_classes[self.token_labels[start : start + length]]
        batch: dict[str, npt.NDArray[Any]] = {"input_ids": inputs, "attention_mask": mask, "targets": targets}
        if around.types is not None:
            batch["token_type_ids"] = types
        if self.class_weights is not None:
            batch["weights"] = np.append(self.class_weights, np.float32(0))[np.maximum(targets, -1)]
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _source_batch(self, rows: npt.NDArray[np.integer], around_targets: Wrapping) -> dict[str, torch.Tensor]:
        padded: list[tuple[npt.NDArray[np.int64], Int64s]] = []
        for side, (around, fill) in enumerate(((self.wrapping, self.padding_id), (around_targets, IGNORED))):
            segments = 2 * rows + side
            starts, lengths = self.packed.starts[segments], self.packed.lengths[segments] + around.size
            width = min(self.row_length, _round_up(int(lengths.max(initial=1))))
            values = np.full((rows.size, width), fill, np.int64)
            for line, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
                text = self.tokens[start : start + length - around.size].tolist()
                values[line, :length] = [*around.before, *text, *around.behind]
            padded.append((values, lengths))
        (inputs, lengths), (targets, _) = padded
        mask = (np.arange(inputs.shape[1]) < lengths[:, None]).astype(np.int64)
        batch = {"input_ids": inputs, "attention_mask": mask, "targets": targets}
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def longest(self) -> Int64s:
        """All row numbers, those with the most tokens first."""
        return np.argsort(-self._widths, kind="stable")

    @cached_property
    def _widths(self) -> Int64s:
        """Pairs (tokens for classification) of each row: (rows,)."""
        return np.add.reduceat(self.packed.lengths, self.packed.row_starts[:-1])


def _ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """`start`, `start + 1`, ... for `length` numbers each, one range after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - ends + lengths, lengths)


def _round_up(width: int) -> int:
    return -(-width // _MULTIPLE) * _MULTIPLE
