"""A run that was stopped and resumed is the run that was not stopped, on the same backend and on any other."""

import pytest
from harness import Launcher
from matrix import BACKENDS, KINDS, TOLERANCE, distance, most_telling, resumed, straight

# Neighbours share launches: two workers would wait for each other.
pytestmark = pytest.mark.xdist_group("resume")

NAMES = list(BACKENDS)


@pytest.mark.parametrize(
    ("kind", "target"), [(kind, target) for target in NAMES for kind in KINDS if kind in most_telling(target)]
)
def test_a_stop_changes_nothing(launcher: Launcher, kind: str, target: str) -> None:
    before = NAMES[NAMES.index(target) - 1]
    found = resumed(launcher, target, [target, before], most_telling)
    own = distance(straight(launcher, target, most_telling)[kind].check(), found[target, kind])
    assert own.bits, f"same backend: {own}"
    if kind in most_telling(before):
        other = distance(straight(launcher, "single", most_telling)[kind].check(), found[before, kind])
        assert other.loss <= TOLERANCE, f"from {before}: {other}"
        assert other.weights <= TOLERANCE, f"from {before}: {other}"
