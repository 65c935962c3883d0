"""What is due at parts of an epoch, and the mean loss of an epoch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import read_lines
from inside import Done, mlp, run_here, stop_after

from finetune.config.recipe import validate_recipe
from finetune.utils.errors import RecipeError

# 200 points, 48 a step in 3 micro-batches: epochs end at steps 5, 9 and, as 12 steps are all that 600 points fill, 12.
UNEVEN: dict[str, Any] = {"batch": {"global_size": 48, "micro_size": 16}, "length": {"steps": None, "epochs": 3}}


def epochs_of(done: Done) -> list[dict[str, Any]]:
    lines = read_lines(done.directory / "metrics.jsonl")
    return [{key: line[key] for key in ("step", "epoch", "epoch_loss")} for line in lines if "epoch_loss" in line]


def evaluated(done: Done) -> list[int]:
    return [line["step"] for line in read_lines(done.directory / "metrics.jsonl") if "validation_loss" in line]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Done:
    kept = {"every_steps": None, "per_epoch": 0.5, "keep": 9, "keep_best_by": None}
    return run_here(mlp(tmp_path_factory.mktemp("epochs") / "run", **UNEVEN, eval={"per_epoch": 2}, checkpoint=kept))


def test_parts_of_uneven_epochs(uneven: Done) -> None:
    """The first step that has read a part is the one at which something is due."""
    assert evaluated(uneven) == [3, 5, 7, 9, 11, 12]
    assert uneven.checkpoints == ["step-00000009", "step-00000012"]


def test_an_epoch_ends_with_its_mean_loss(uneven: Done) -> None:
    ends = epochs_of(uneven)
    assert [(line["step"], line["epoch"]) for line in ends] == [(5, 1.0), (9, 2.0), (12, 3.0)]
    means = [np.mean(uneven.losses[first:last]) for first, last in ((0, 5), (5, 9), (9, 12))]
    np.testing.assert_allclose([line["epoch_loss"] for line in ends], means, rtol=1e-6)
    assert f"step 5: epoch 1 ends, mean loss {means[0]:.4f} over 240 targets" in uneven.said


def test_a_resumed_run_has_the_same_parts_and_means(uneven: Done, tmp_path: Path) -> None:
    tree = mlp(tmp_path / "run", **UNEVEN, eval={"per_epoch": 2})
    for step in (3, 7):
        run_here(tree, stop_after(step))
    done = run_here(tree)
    assert epochs_of(done) == epochs_of(uneven)
    assert evaluated(done) == evaluated(uneven)


@pytest.mark.parametrize(
    ("per_epoch", "steps"), [(1, [4, 8, 12, 16]), (0.333, [12, 16]), (0.5, [8, 16]), (1.5, [3, 6, 8, 11, 14, 16])]
)
def test_epochs_that_drop_their_rest(per_epoch: float, steps: list[int], tmp_path: Path) -> None:
    """4 steps an epoch."""
    tree = mlp(tmp_path / "run", **UNEVEN, data={"last_batch": "drop"}, eval={"per_epoch": per_epoch})
    done = run_here({**tree, "length": {"epochs": 4}})
    assert evaluated(done) == steps
    assert [line["step"] for line in epochs_of(done)] == [4, 8, 12, 16]


def test_skipped_steps_count_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without a finite loss, which each epoch reads once."""
    monkeypatch.setenv("TROUBLE", json.dumps({"loss": {"5": "nan"}}))
    done = run_here(mlp(tmp_path / "run", task={"name": "troubled_task:mlp"}, **UNEVEN))
    taken = [loss for loss in done.losses[:5] if loss is not None]
    assert len(taken) == 4
    assert epochs_of(done)[0]["epoch_loss"] == pytest.approx(np.mean(taken), rel=1e-6)
    assert "over 192 targets" in done.said


def test_steps_and_parts_exclude_each_other() -> None:
    tree = mlp(Path("run"), eval={"every_steps": 2, "per_epoch": 1})
    with pytest.raises(RecipeError, match=r"eval: give `every_steps` or `per_epoch`, not both"):
        validate_recipe(tree)
