"""`eval.patience` and `checkpoint.keep_best_by`: where a run ends, stopped or not, and what is kept of it."""

import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import Crash, Done, copy, crash_after, early_stopping, run_here, stop_after
from rich.console import Console

from finetune.checkpoint import integrity
from finetune.checkpoint.best_evaluation import BestEvaluation, early_stop_sentence, still_ended
from finetune.checkpoint.checkpoint_store import open_store
from finetune.checkpoint.run_history import read_run
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.diagnostics import watch_and_list
from finetune.diagnostics.run_report import charts, one_run
from finetune.diagnostics.watch_and_list import list_runs, runs_table
from finetune.utils.errors import RecipeError

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("early")]

# Of the run that `early_stopping` describes.
PATIENCE, BEST, END = 3, 8, 14


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run_here(early_stopping(tmp_path_factory.mktemp("early") / "run"))


def recipe(**sections: Any) -> Recipe:
    return validate_recipe(early_stopping(Path("run"), **sections))


# ---------------------------------------------------------------- counting


def test_evaluations_without_a_better_one_are_counted() -> None:
    best = BestEvaluation("validation_rouge1")
    counts = []
    for step, value in enumerate([0.2, 0.3, 0.3, math.nan, 0.1, 0.31, 0.2]):
        best.note(step, {"validation_rouge1": value, "validation_loss": -float(step)})
        counts.append(best.evaluations)
    assert counts == [0, 0, 1, 2, 3, 0, 1]
    assert (best.step, best.value) == (5, 0.31)
    best.note(9, {"validation_loss": 0.0})
    assert best.evaluations == 2


@pytest.mark.parametrize(
    ("by", "step"),
    [("validation_loss", 1), ("validation_perplexity", 1), ("validation_wer", 2), ("-validation_wer", 1)],
)
def test_which_way_is_better(by: str, step: int) -> None:
    best = BestEvaluation(by)
    for number, value in enumerate([2.0, 1.0, 3.0]):
        best.note(number, {by.removeprefix("-"): value})
    assert best.step == step


def test_another_key_counts_anew() -> None:
    saved = asdict(BestEvaluation("validation_loss", 4, 0.5, 2))
    assert BestEvaluation.resumed(recipe(), json.loads(json.dumps(saved))).evaluations == 2
    other = recipe(checkpoint={"keep_best_by": "validation_other"})
    assert BestEvaluation.resumed(other, saved) == BestEvaluation("validation_other")
    assert BestEvaluation.resumed(recipe(), None) == BestEvaluation("validation_loss")
    results = {"ended_early": {"step": 6, "best": saved}}
    assert still_ended(recipe(eval={"patience": 2}), results)
    assert not still_ended(recipe(eval={"patience": 3}), results)
    assert not still_ended(recipe(eval={"patience": None}), results)
    assert not still_ended(other, results)
    assert still_ended(recipe(), {})


# ---------------------------------------------------------------- runs


def test_a_run_ends_when_its_patience_does(ended: Done) -> None:
    losses = [line["validation_loss"] for line in lines(ended) if "validation_loss" in line]
    assert losses.index(min(losses)) == BEST // 2 - 1
    assert ended.steps == list(range(1, END + 1))
    assert len(losses) == END // 2
    best = {"by": "validation_loss", "step": BEST, "value": min(losses), "evaluations": PATIENCE}
    assert ended.facts["results"]["ended_early"] == {"step": END, "best": best}
    assert "finished" in ended.facts
    assert (ended.directory / "model").is_dir()
    assert ended.checkpoints == [f"step-{BEST:08d}", f"step-{END:08d}"]
    kept = integrity.read_manifest(open_store(ended.directory), ended.checkpoints[0])
    assert kept["validation_loss"] == min(losses)
    said = (
        f"ended early at step 14: no better validation_loss than {min(losses):.4f} at step 8 in 3 evaluations in a row"
    )
    assert f"This run {said} (eval.patience). The best checkpoint is {ended.directory}" in ended.said


def lines(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]


# Between evaluations, at one, at the best one, at one that is no checkpoint, and at the last.
@pytest.mark.parametrize("step", [3, 5, 8, 9, 10, 12, 13, 14])
@pytest.mark.parametrize("how", [crash_after, stop_after])
def test_a_resumed_run_ends_where_it_would_have_ended(tmp_path: Path, ended: Done, step: int, how: Any) -> None:
    tree = early_stopping(tmp_path / "run")
    if how is crash_after:
        with pytest.raises(Crash):
            run_here(tree, crash_after(step))
    else:
        assert "stopped" in run_here(tree, stop_after(step)).results
    done = run_here(tree)
    assert done.steps == ended.steps
    assert done.losses == ended.losses
    assert done.results["ended_early"] == ended.results["ended_early"]
    torch.testing.assert_close(done.weights, ended.weights, rtol=0, atol=0)
    evaluated = [line["validation_loss"] for line in lines(done) if "validation_loss" in line]
    assert evaluated == [line["validation_loss"] for line in lines(ended) if "validation_loss" in line]


def test_started_again_it_says_why_and_goes_on_with_more_patience(tmp_path: Path, ended: Done) -> None:
    directory = copy(ended.directory, tmp_path / "run")
    before = (directory / "run.json").read_bytes()
    again = run_here(early_stopping(directory))
    assert "Nothing is left to do: this run ended early at step 14: no better validation_loss" in again.said
    assert "Raise eval.patience, or set it to null, to continue it." in again.said
    assert (directory / "run.json").read_bytes() == before
    straight = run_here(early_stopping(tmp_path / "straight", eval={"patience": 5}))
    more = run_here(early_stopping(directory, eval={"patience": 5}))
    assert more.losses == straight.losses
    assert len(more.losses) > END
    assert more.results.get("ended_early") == straight.results.get("ended_early")
    # Longer, but out of patience: it takes no step.
    longer = run_here(early_stopping(copy(ended.directory, tmp_path / "longer"), length={"steps": 80}))
    assert longer.losses == ended.losses
    assert "ended early at step 14" in longer.said


def test_patience_without_what_it_looks_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"keep_best_by: evaluations of this recipe have no 'validation_rouge1'"):
        run_here(early_stopping(tmp_path / "run", checkpoint={"keep_best_by": "validation_rouge1"}))


def test_the_report_says_so(ended: Done) -> None:
    run = read_run(ended.directory)
    said = one_run.status_line(run)
    assert said == early_stop_sentence(ended.results["ended_early"])
    (loss, *_) = charts.charts_of([("run", run)])
    assert [(mark.label, mark.sign, mark.step) for mark in loss.marks] == [("best validation loss", "★", BEST)]
    assert f"step {BEST}" in str(one_run.main_figures(run, None))
    (listed,) = list_runs(ended.directory)
    assert (listed.ended_early, listed.status, listed.best_step, listed.best_by) == (
        True,
        "finished",
        BEST,
        "validation_loss",
    )
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(runs_table([listed]), watch_and_list.run_screen(run, 200))
    said_here = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ended early  14/60" in said_here
    assert f"@{BEST}" in said_here
    assert said in said_here
    assert "validation accuracy" not in said_here
