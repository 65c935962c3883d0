"""A profile says where a step's time goes, on every rank, and leaves the run as it is."""

import gzip
import json
from pathlib import Path

import pytest
from harness import Launcher, assert_same_path
from inside import mlp, run_here
from recipes_for_tests import base

from finetune.training import profiler
from finetune.utils.errors import RecipeError

_SHORT = {"length": {"steps": 8}, "eval": {"at_end": False}}
JOBS = {"plain": base(**_SHORT), "profiled": base(**_SHORT, log={"every_steps": 1, "profile": 2})}
LAUNCHED_RUNS = {"ddp": JOBS}


@pytest.mark.xdist_group("ddp")
def test_every_rank_writes_a_trace_and_a_table(launcher: Launcher) -> None:
    runs = launcher.many("ddp", JOBS)
    assert_same_path(runs["plain"], runs["profiled"], 0.0)
    folder = runs["profiled"].directory / "profile"
    for rank in (0, 1):
        found = json.loads((folder / f"rank-{rank}.table.json").read_text())
        assert found["steps"] == 2
        assert list(found["phases_ms"]) == list(profiler.PHASES)
        assert all(value > 0 for value in found["phases_ms"].values())
        assert found["communication_ms"] > 0
        assert "aten::mm" in found["operations_ms"]
        with gzip.open(folder / f"rank-{rank}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        # Of one micro-batch or more in each of two steps.
        accumulation = runs["profiled"].facts["runs"]["accumulation"]
        assert names.count("finetune: backward") >= 2 * accumulation
    said = runs["profiled"].output
    assert "profile of 2 steps" in said
    assert "communication (within these)" in said


def test_a_run_that_is_too_short_is_refused_before_it_writes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"log\.profile: 6 steps, .* are more than the 8 that are left"):
        run_here(mlp(tmp_path / "run", length={"steps": 8}, log={"profile": 6}))
    assert not (tmp_path / "run" / "run.json").exists()
    assert run_here(mlp(tmp_path / "run", length={"steps": 8}, log={"profile": 5})).steps == list(range(1, 9))


def test_table_is_for_people() -> None:
    found = {
        "steps": 1,
        "phases_ms": {"forward": 30.0, "backward": 60.0, "optimizer": 10.0},
        "communication_ms": 25.0,
        "operations_ms": {"aten::mm": 80.0},
    }
    text = profiler.phase_table(found)
    assert "60.0%" in text
    assert "25.0%" in text
    assert "aten::mm" in text
