"""Runs that several tests look at, once for each module."""

from pathlib import Path

import pytest
from inside import Done, mlp, run_here, stop_after


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The run that was never stopped."""
    return run_here(mlp(tmp_path_factory.mktemp("straight") / "run", checkpoint={"every_steps": 5, "keep": 9}))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after 12 of its 20 steps; a copy of it is for each test to resume."""
    tree = mlp(tmp_path_factory.mktemp("stopped") / "run", checkpoint={"every_steps": 5, "keep": 9})
    return run_here(tree, stop_after(12)).directory
