"""An elastic launcher whose store does not answer ends; one that stood still itself does not."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from forkserver import until

from finetune.distributed.launch import elastic

SETTINGS = SimpleNamespace(keep_alive_interval=timedelta(seconds=5), keep_alive_max_attempt=3)


class Clock:
    """Goes on when it is told to; the watch looks at it once for each time that it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept, self.let_go = 100.0, 0, threading.Semaphore(0)
        monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.slept += 1
        self.let_go.acquire()

    def look(self) -> None:
        """Returns once the watch has looked at the time, and sleeps again."""
        until(lambda: self.slept > 0, 60.0, "nobody looks")
        self.slept = 0
        self.let_go.release()
        until(lambda: self.slept > 0, 60.0, "nobody looks again")


def test_a_store_that_does_not_answer_ends_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ended = Clock(monkeypatch), threading.Event()

    def ask() -> int:
        clock.look()
        clock.now += 16
        clock.look()
        assert not ended.is_set()
        clock.let_go.release()
        assert ended.wait(60.0)
        return 0

    elastic._bounded(ask, SETTINGS, ended.set)()


def test_a_launcher_that_stood_still_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer was there in time, but its watch wakes first."""
    clock, ended = Clock(monkeypatch), threading.Event()

    def ask() -> int:
        clock.look()
        clock.now += 16
        clock.look()
        return 3

    bounded = elastic._bounded(ask, SETTINGS, ended.set)
    for _ in range(3):
        assert bounded() == 3
        clock.look()
        clock.now += 1000
        clock.look()
    assert not ended.is_set()
