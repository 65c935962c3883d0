"""A run that was stopped and resumed is the run that was not stopped, on the same backend and on any other."""

import pytest
from harness import Launcher
from matrix import KINDS, TOLERANCE, backends, distance, resumed, straight

# Neighbours share launches: two workers would wait for each other.
pytestmark = pytest.mark.xdist_group("resume")


@pytest.mark.parametrize(("kind", "target"), [(kind, target) for kind in KINDS for target in backends(kind)])
def test_a_stop_changes_nothing(launcher: Launcher, kind: str, target: str) -> None:
    names = backends(kind)
    before = names[names.index(target) - 1]
    found = resumed(launcher, target, [target, before])
    own = distance(straight(launcher, target)[kind].check(), found[target, kind])
    assert own.bits, f"same backend: {own}"
    other = distance(straight(launcher, "single")[kind].check(), found[before, kind])
    assert other.loss <= TOLERANCE, f"from {before}: {other}"
    assert other.weights <= TOLERANCE, f"from {before}: {other}"
