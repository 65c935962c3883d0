"""Batches are read one ahead, the same batches, and what goes wrong there is told here."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from finetune.data.rows.feed import TokenFileFeed, evaluation_batches
from finetune.data.rows.row_order import RowOrder, row_checksum


class Numbers:
    """Rows that are their numbers."""

    def __init__(self, note: Callable[[int], None] = lambda row: None, count: int = 8) -> None:
        self.note, self.count = note, count

    def __len__(self) -> int:
        return self.count

    def batch(self, rows: np.ndarray) -> dict[str, Any]:
        self.note(int(rows[0]))
        return {"rows": rows.tolist()}

    def num_targets(self, rows: np.ndarray) -> int:
        return 3 * len(rows)


def feed_of(rows: Numbers, **changes: int) -> TokenFileFeed:
    """Steps of two micro-batches of a row."""
    sizes = {"num_steps": 4, "micro_size": 1, "data_size": 1, "data_rank": 0, **changes}
    order = RowOrder(seed=1, num_rows=8, epoch_rows=8, global_size=2 * sizes["data_size"], data="digest")
    return TokenFileFeed(rows, order, first_step=0, first_position=0, **sizes)


def test_the_next_batch_is_read_behind_the_loops_back() -> None:
    here, readers, read_ahead = threading.get_ident(), [], threading.Event()

    def note(row: int) -> None:
        readers.append((row, threading.get_ident() == here))
        if len(readers) == 3:
            read_ahead.set()

    feed = feed_of(Numbers(note), num_steps=2)
    numbers = [int(row[0]) for step in (0, 1) for row in feed.step(step).rows]
    window = feed.step(0)
    assert readers == []
    assert [next(window.batches)["rows"], next(window.batches)["rows"]] == [[numbers[0]], [numbers[1]]]
    assert read_ahead.wait(60), "nobody reads the next step's first micro-batch"
    assert [batch["rows"] for batch in feed.step(1).batches] == [[row] for row in numbers[2:]]
    assert readers == [(numbers[0], True), *((row, False) for row in numbers[1:])]


def test_what_was_not_foreseen_is_read_when_it_is_asked_for() -> None:
    feed = feed_of(Numbers())
    next(feed.step(0).batches)
    for step in (2, 1, 1):
        window = feed.step(step)
        assert [batch["rows"] for batch in window.batches] == [rows.tolist() for rows in window.rows]


def test_an_error_is_raised_where_the_batch_is_asked_for() -> None:
    feed = feed_of(Numbers())
    broken = int(feed.step(0).rows[1][0])

    def note(row: int) -> None:
        if row == broken:
            raise OSError("the disk is gone")

    batches = feed_of(Numbers(note)).step(0).batches
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_read_the_steps_rows_between_them(world: int) -> None:
    feeds = [feed_of(Numbers(), micro_size=2 // min(2, world), data_size=world, data_rank=n) for n in range(world)]
    windows = [feed.step(1) for feed in feeds]
    order, rows = feeds[0].order, np.concatenate([np.concatenate(window.rows) for window in windows])
    expected = order.step_rows(order.global_size)
    assert sorted(rows.tolist()) == sorted(expected.tolist())
    assert sum(window.checksum for window in windows) == row_checksum(expected)
    assert sum(window.counts["targets"] for window in windows) == 3 * order.global_size
    assert feeds[0].state_dict(1) == {"position": order.global_size}
    assert feeds[0].epoch(4) == order.global_size / 2


@pytest.mark.parametrize(("count", "micro", "world"), [(10, 4, 1), (10, 4, 2), (1, 4, 3), (7, 1, 4)])
def test_each_row_is_evaluated_once_in_as_many_passes(count: int, micro: int, world: int) -> None:
    passes = [
        list(evaluation_batches(Numbers(count=count), range(count), micro, data_size=world, data_rank=rank))
        for rank in range(world)
    ]
    assert len({len(found) for found in passes}) == 1
    assert sorted(row for found in passes for share, _ in found for row in share.tolist()) == list(range(count))
    assert all(batch["rows"] == (share.tolist() or [0]) for found in passes for share, batch in found)
