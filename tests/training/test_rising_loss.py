"""A run whose loss ends above where it began says so, and no other does."""

import json
from pathlib import Path

import pytest
from inside import mlp, run_here

from finetune.training.finish_run import rising_loss


@pytest.mark.parametrize(
    ("losses", "rose"),
    [
        ([5.7, 2.8e6, 5.70, 5922.7, 411.0], True),  # what a rate of 30 gave
        ([6.0, 1211.0, 142.0], True),
        ([6.0, 5.0, 4.0, 3.0, 2.0, 2.1], False),
        ([2.0, 2.3, 2.31, 2.35, 2.29, 2.32], True),  # all of them, by more than they differ
        ([2.0, 2.1, 2.02, 2.2, 2.01, 2.05], False),  # the first may be the luckiest of six
        ([2.0, 2.1, 1.95, 2.2, 1.99, 2.05], False),  # batches that differ
        ([2.0, 2.6, 1.9, 2.7, 2.8, 2.5], True),
        ([2.0, 2.6, 2.7, 2.8, 2.5, 1.9], False),  # it came back
        ([2.0, 2.2], False),
        ([2.0, 2.5], True),
        ([2.0], False),
        ([2.0, float("nan"), float("nan")], False),  # the guard's
    ],
)
def test_what_counts_as_risen(losses: list[float], rose: bool) -> None:
    recent = list(zip([1, *range(22 - len(losses), 21)], losses, strict=True))[-5:]
    assert (rising_loss(losses[0], recent) is not None) == rose
    # A few steps say nothing, whatever their losses.
    assert rising_loss(losses[0], [(step - 1, loss) for step, loss in recent if step > 1]) is None
    assert rising_loss(None, recent) is None


@pytest.mark.parametrize(("lr", "rose"), [(1e-2, False), (30.0, True)])
def test_a_run_says_so(tmp_path: Path, lr: float, rose: bool) -> None:
    done = run_here(mlp(tmp_path / "run", optim={"lr": lr, "clip_norm": None}))
    assert ("above the" in done.said and "Lower optim.lr" in done.said) == rose
    facts = json.loads((done.directory / "run.json").read_text())
    assert facts["results"].get("loss_rose", False) == rose
