"""A run that was stopped and resumed is the run that was not stopped, on the same backend and on any other."""

from typing import Any

import pytest
from harness import Launcher, Result, assert_same_path
from matrix import BACKENDS, KINDS, SPLITTING, TOLERANCE, distance, kinds, resumed, straight


def LAUNCHED_RUNS(launcher: Launcher) -> dict[str, Any]:
    """What each launch file stops and resumes itself; and of one process, where test_state_transfer.py crosses none."""
    return {
        backend: {kind: KINDS[kind] for kind in kinds(backend)} | resumed(launcher, backend, _sources(backend))
        for backend in BACKENDS
    }


def _sources(backend: str) -> list[str]:
    return [backend, *(["single"] if backend in SPLITTING else [])]


@pytest.fixture(scope="module")
def back_on_one(launcher: Launcher) -> dict[str, Result]:
    """What every backend has saved, resumed by one process."""
    for backend in BACKENDS:
        straight(launcher, backend)
    return launcher.many("single", resumed(launcher, "single", list(BACKENDS)[1:]))


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        pytest.param(kind, target, marks=pytest.mark.xdist_group(target))
        for target in BACKENDS
        for kind in KINDS
        if kind in kinds(target)
    ],
)
def test_a_stop_changes_nothing(launcher: Launcher, kind: str, target: str) -> None:
    found = launcher.many(target, resumed(launcher, target, _sources(target)))
    own = distance(straight(launcher, target)[kind].check(), found[f"{kind}_from_{target}"].check())
    assert own.bits, f"same backend: {own}"
    if kind == "averaged":
        # What a stop compares may be averages on both sides, or on none.
        single, here = (straight(launcher, backend)[kind].check() for backend in ("single", target))
        assert_same_path(single, here, TOLERANCE)
        figures = [run.facts["results"]["validation_loss"] for run in (single, here)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    elif target in SPLITTING:
        other = distance(straight(launcher, "single")[kind].check(), found[f"{kind}_from_single"].check())
        assert max(other.loss, other.weights) <= TOLERANCE, other


@pytest.mark.xdist_group("resume")
@pytest.mark.parametrize(
    ("kind", "source"),
    [(kind, source) for source in list(BACKENDS)[1:] for kind in KINDS if kind in kinds(source)],
)
def test_one_process_resumes_what_others_saved(
    launcher: Launcher, back_on_one: dict[str, Result], kind: str, source: str
) -> None:
    other = distance(straight(launcher, "single")[kind].check(), back_on_one[f"{kind}_from_{source}"].check())
    assert max(other.loss, other.weights) <= TOLERANCE, other
