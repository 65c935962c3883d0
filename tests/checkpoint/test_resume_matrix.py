"""A run that was stopped and resumed is the run that was not stopped, on the same backend and on any other."""

import pytest
from harness import Launcher
from matrix import BACKENDS, KINDS, TOLERANCE, distance, resumed, straight

NAMES = list(BACKENDS)


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_changes_nothing(launcher: Launcher, target: str, kind: str) -> None:
    before = NAMES[NAMES.index(target) - 1]
    found = resumed(launcher, target, [target, before])
    own = distance(straight(launcher, target)[kind].check(), found[target, kind])
    assert own.bits, f"same backend: {own}"
    other = distance(straight(launcher, "single")[kind].check(), found[before, kind])
    assert other.loss <= TOLERANCE, f"from {before}: {other}"
    assert other.weights <= TOLERANCE, f"from {before}: {other}"
