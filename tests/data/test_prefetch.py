"""Batches are read one ahead, the same batches, and what goes wrong there is told here."""

import threading

import numpy as np
import pytest

from finetune.data.rows.feed import Prefetcher


def test_the_next_batch_is_read_behind_the_loops_back() -> None:
    here, readers, read_ahead = threading.get_ident(), [], threading.Event()

    def read(rows: np.ndarray) -> dict[str, int]:
        readers.append((int(rows[0]), threading.get_ident() == here))
        if rows[0] == 2:
            read_ahead.set()
        return {"first": int(rows[0])}

    ahead = Prefetcher(read)
    assert ahead.batch(np.array([1]), np.array([2])) == {"first": 1}
    assert read_ahead.wait(60), "nobody reads ahead"
    assert ahead.batch(np.array([2]), None) == {"first": 2}
    assert readers == [(1, True), (2, False)]


def test_what_was_not_foreseen_is_read_when_it_is_asked_for() -> None:
    ahead = Prefetcher(lambda rows: {"rows": rows.tolist()})
    ahead.batch(np.array([1]), np.array([2]))
    assert ahead.batch(np.array([3, 4]), np.array([5])) == {"rows": [3, 4]}
    assert ahead.batch(np.array([5]), None) == {"rows": [5]}


def test_an_error_is_raised_where_the_batch_is_asked_for() -> None:
    def read(rows: np.ndarray) -> dict[str, int]:
        if rows[0] == 2:
            raise OSError("the disk is gone")
        return {}

    ahead = Prefetcher(read)
    ahead.batch(np.array([1]), np.array([2]))
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.batch(np.array([2]), None)
