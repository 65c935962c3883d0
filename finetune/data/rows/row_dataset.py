"""Batches by position, straight from the memory-mapped token file. The only file here that builds tensors.

Shapes: B rows, T tokens a row (`sequence_length`), L tokens of the longest row of a batch.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from finetune.data.rows.packing import PackedRows
from finetune.data.tokenization.build_tokenizer import Wrapping
from finetune.data.tokenization.memmap import Int64s, MaskFile
from finetune.data.tokenization.token_files import Tokens

IGNORED = -100
"""The target where there is nothing to predict."""

_MULTIPLE = 8


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
    """Tokens around each document of a classifier."""
    classes: Int64s | None = None
    """The class of each row, which is one document: (rows,). None for language modelling."""
    mask: MaskFile | None = None
    """True for tokens that are targets; None where all are."""
    row_targets: Int64s | None = None
    """Targets of each row, (rows,), where there is a mask."""

    def __len__(self) -> int:
        return self.packed.num_rows

    def num_targets(self, rows: npt.NDArray[np.integer]) -> int:
        """Targets that `batch(rows)` holds, without reading it."""
        if self.classes is not None:
            return int(rows.size)
        if self.row_targets is not None:
            return int(self.row_targets[rows].sum())
        return int(self._widths[rows].sum())

    def num_computed(self, rows: npt.NDArray[np.integer]) -> int:
        """Tokens that a network computes for `batch(rows)`, without padding."""
        return int(self._widths[rows].sum()) + sum(map(len, self.wrapping)) * int(rows.size)

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
            For classification `input_ids` and `attention_mask`, (B, L) int64, and `targets`, (B,) int64.
        """
        return self._language_batch(rows) if self.classes is None else self._class_batch(rows, self.classes[rows])

    def _language_batch(self, rows: npt.NDArray[np.integer]) -> dict[str, torch.Tensor]:
        widths = self._widths[rows]
        width = self.row_length if self.fixed else min(self.row_length, _round_up(int(widths.max(initial=1))))
        # All pairs of the batch at once: a Python step for each document would cost more than the reading.
        first = self.packed.row_starts[rows]
        segments = _ranges(first, self.packed.row_starts[rows + 1] - first)
        lengths = self.packed.lengths[segments]
        within = _ranges(np.full_like(lengths, 0), lengths)
        source = np.repeat(self.packed.starts[segments], lengths) + within
        place = _ranges(np.arange(rows.size, dtype=np.int64) * width, widths)
        inputs = np.full(rows.size * width, self.padding_id, np.int64)
        targets = np.full(rows.size * width, IGNORED, np.int64)
        inputs[place] = self.tokens[source]
        targets[place] = self.tokens[source + 1]
        if self.mask is not None:
            targets[place[~self.mask[source + 1]]] = IGNORED
        batch = {"input_ids": inputs, "targets": targets}
        if self.restarts:
            batch["position_ids"] = (np.arange(width) - widths[:, None]).ravel()
            batch["position_ids"][place] = within
        found = {name: torch.from_numpy(values).view(rows.size, width) for name, values in batch.items()}
        if self.restarts:
            cu_seqlens = np.append(np.flatnonzero(batch["position_ids"] == 0), rows.size * width)
            found["cu_seqlens"] = torch.from_numpy(cu_seqlens.astype(np.int32))
        return found

    def _class_batch(self, rows: npt.NDArray[np.integer], targets: Int64s) -> dict[str, torch.Tensor]:
        before, behind = self.wrapping
        longest = int(self._widths[rows].max(initial=1)) + len(before) + len(behind)
        width = min(self.row_length, _round_up(longest))
        inputs = np.full((rows.size, width), self.padding_id, np.int64)
        mask = np.full((rows.size, width), 0, np.int64)
        for line, row in enumerate(rows.tolist()):
            # A row is one document here.
            start, length = int(self.packed.starts[row]), int(self.packed.lengths[row])
            ids = [*before, *self.tokens[start : start + length].tolist(), *behind]
            inputs[line, : len(ids)] = ids
            mask[line, : len(ids)] = 1
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
