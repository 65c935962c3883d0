"""Documents to rows: nothing lost, nothing twice, nothing across a boundary."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.rows import packed_rows
from finetune.data.rows.packed_rows import PackedRows

Lengths = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def offsets_of(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def pairs_of(packed: PackedRows) -> list[int]:
    """The stream position of every input, in the order of rows."""
    segments = zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True)
    return [start + i for start, length in segments for i in range(length)]


def row_sizes(packed: PackedRows) -> list[int]:
    row_starts = packed.row_starts.tolist()
    return [int(packed.lengths[a:b].sum()) for a, b in pairwise(row_starts)]


def within_documents(lengths: list[int]) -> list[int]:
    """Every input that has its target in the same document."""
    offsets = offsets_of(lengths).tolist()
    return [i for a, b in pairwise(offsets) for i in range(a, b - 1)]


@settings(max_examples=200, deadline=None)
@given(Lengths, st.integers(1, 40), st.sampled_from([packed_rows.pack_documents, packed_rows.pad_documents]))
def test_split_reads_every_pair_once(lengths: list[int], row_length: int, pack: object) -> None:
    packed = pack(offsets_of(lengths), row_length, "split")  # type: ignore[operator]
    assert sorted(pairs_of(packed)) == within_documents(lengths)
    assert all(0 < size <= row_length for size in row_sizes(packed))
    assert packed.counts["empty"] == sum(length < 2 for length in lengths)
    assert packed.counts["over_long"] == sum(length - 1 > row_length for length in lengths)


@settings(max_examples=100, deadline=None)
@given(Lengths, st.integers(1, 40))
def test_truncate_and_drop(lengths: list[int], row_length: int) -> None:
    offsets = offsets_of(lengths)
    cut = packed_rows.pack_documents(offsets, row_length, "truncate")
    starts = dict(zip(cut.starts.tolist(), cut.lengths.tolist(), strict=True))
    kept = {
        start: min(length - 1, row_length)
        for start, length in zip(offsets.tolist(), lengths, strict=False)
        if length > 1
    }
    assert starts == kept
    assert cut.counts["truncated"] == cut.counts["over_long"]
    dropped = packed_rows.pack_documents(offsets, row_length, "drop")
    assert dropped.counts["dropped"] == dropped.counts["over_long"]
    assert dropped.starts.size == sum(2 <= length <= row_length + 1 for length in lengths)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(1, 40), st.booleans())
def test_wrapped_cuts_the_stream(num_tokens: int, row_length: int, keep: bool) -> None:
    packed = packed_rows.wrap_stream(num_tokens, row_length, keep_remainder=keep)
    rows, rest = divmod(max(0, num_tokens - 1), row_length)
    assert packed.num_rows == rows + (keep and rest > 0)
    assert pairs_of(packed) == list(range(rows * row_length + (rest if keep else 0)))
    assert packed.counts["remainder_rows"] == (rest > 0 and not keep)


def plain_best_fit(lengths: list[int], room: int) -> list[int]:
    """The textbook's version, one item after the other."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        open_rows = [(left, row) for row, left in enumerate(rooms) if left >= length]
        if open_rows:
            rooms[min(open_rows)[1]] -= length
        else:
            rooms.append(room - length)
    return sorted(rooms)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=120), st.integers(30, 64))
def test_counting_is_exactly_best_fit_decreasing(lengths: list[int], room: int) -> None:
    rows = packed_rows.best_fit_decreasing(np.array(lengths, np.int64), room)
    used = np.bincount(rows, weights=lengths) if lengths else np.array([])
    assert sorted((room - used).astype(int).tolist()) == plain_best_fit(lengths, room)


def test_a_million_documents_take_no_time() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.2, 0.5, 1_000_000), 1, 1024).astype(np.int64)
    rows = packed_rows.best_fit_decreasing(lengths, 1024)
    assert np.bincount(rows, weights=lengths).max() <= 1024
    assert lengths.sum() / ((rows.max() + 1) * 1024) > 0.99


@pytest.mark.parametrize("mode", ["split", "truncate", "drop"])
def test_no_documents_make_no_rows(mode: packed_rows.LongDocuments) -> None:
    assert packed_rows.pack_documents(offsets_of([1, 1]), 8, mode).num_rows == 0
