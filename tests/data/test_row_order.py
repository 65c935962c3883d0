"""The order of rows: a permutation each epoch, from (seed, position) alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.rows.row_order import rows_at

FROZEN = [3, 0, 4, 1, 2, 6, 7, 5, 8, 9, 6, 2]


@settings(max_examples=200, deadline=None)
@given(num_rows=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_reads_every_row_once(num_rows: int, seed: int, epoch: int) -> None:
    positions = np.arange(num_rows) + epoch * num_rows
    rows = rows_at(positions, num_rows=num_rows, seed=seed)
    assert rows.dtype == np.int64
    assert sorted(rows.tolist()) == list(range(num_rows))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 500), st.data())
def test_short_epochs_read_different_rows(num_rows: int, data: st.DataObject) -> None:
    epoch_rows = data.draw(st.integers(1, num_rows))
    rows = rows_at(np.arange(3 * epoch_rows), num_rows=num_rows, seed=1, epoch_rows=epoch_rows)
    for epoch in rows.reshape(3, epoch_rows):
        assert len(set(epoch.tolist())) == epoch_rows


def test_any_part_can_be_asked_for_alone() -> None:
    whole = rows_at(np.arange(2500), num_rows=1000, seed=3)
    scattered = np.array([2499, 0, 999, 1000, 1234])
    assert rows_at(scattered, num_rows=1000, seed=3).tolist() == whole[scattered].tolist()
    assert rows_at(np.arange(2500).reshape(50, 50), num_rows=1000, seed=3).shape == (50, 50)
    assert rows_at(np.array([], np.int64), num_rows=1000, seed=3).size == 0


def test_the_order_never_changes_between_releases() -> None:
    assert rows_at(np.arange(12), num_rows=10, seed=0).tolist() == FROZEN


def test_epochs_and_seeds_differ() -> None:
    two = rows_at(np.arange(2000), num_rows=1000, seed=0).reshape(2, 1000)
    other = rows_at(np.arange(1000), num_rows=1000, seed=1)
    # Two random permutations agree at one place on average.
    assert (two[0] == two[1]).sum() < 10
    assert (two[0] == other).sum() < 10
    # The second epoch of one seed must not be the first epoch of the next.
    assert (two[1] == other).sum() < 10


@pytest.mark.parametrize("size", [10, 64, 77])
def test_the_order_looks_random(size: int) -> None:
    epochs = 4000
    rows = rows_at(np.arange(size * epochs), num_rows=size, seed=5).reshape(epochs, size)
    # Each row at each place equally often: (size - 1)^2 degrees of freedom, six standard deviations allowed.
    table = np.stack([np.bincount(rows[:, place], minlength=size) for place in range(size)])
    chi_square = ((table - epochs / size) ** 2 / (epochs / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)
    # Each pair of neighbours equally often.
    pairs = np.bincount((rows[:, :-1] * size + rows[:, 1:]).ravel(), minlength=size * size)
    expected = epochs * (size - 1) / (size * (size - 1))
    off_diagonal = pairs.reshape(size, size)[~np.eye(size, dtype=bool)]
    chi_square = ((off_diagonal - expected) ** 2 / expected).sum()
    assert abs(chi_square - off_diagonal.size) < 6 * np.sqrt(2 * off_diagonal.size)


def test_a_huge_data_set_costs_no_memory() -> None:
    rows = rows_at(np.arange(1000), num_rows=10**15, seed=0)
    assert rows.min() >= 0
    assert rows.max() < 10**15
    assert len(set(rows.tolist())) == 1000


@pytest.mark.parametrize(("num_rows", "epoch_rows"), [(0, None), (5, 6), (5, 0)])
def test_impossible_sizes_are_refused(num_rows: int, epoch_rows: int | None) -> None:
    with pytest.raises(ValueError, match="epoch_rows must be 1 to num_rows"):
        rows_at(np.arange(3), num_rows=num_rows, seed=0, epoch_rows=epoch_rows)


def test_negative_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="count from 0, got -1"):
        rows_at(np.array([-1]), num_rows=3, seed=0)
