"""`eval.patience` and `checkpoint.keep_best_by`: where a run ends, stopped or not, and what is kept of it."""

import io
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import Crash, Done, at_step, copy, crash_after, early_stopping, run_here, stop_after
from rich.console import Console
from safetensors.torch import load_file

from finetune.checkpoint import integrity
from finetune.checkpoint.best_evaluation import BestEvaluation, early_stop_sentence, still_ended
from finetune.checkpoint.checkpoint_store import open_store
from finetune.checkpoint.run_history import read_run
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.diagnostics import watch_and_list
from finetune.diagnostics.run_report import charts, run_summary
from finetune.diagnostics.watch_and_list import list_runs, runs_table
from finetune.export import find_weights
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import CheckpointError, RecipeError

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
        best.note(step, {"validation_rouge1": value, "validation_loss": float(step)})
        counts.append(best.evaluations)
    assert counts == [0, 0, 1, 2, 3, 0, 1]
    assert (best.step, best.value) == (5, 0.31)
    best.note(9, {"validation_loss": 0.0})
    assert best.evaluations == 2


def test_of_equal_evaluations_the_one_with_the_lower_loss_is_better() -> None:
    values = [(0.5, 3.0), (0.5, 2.0), (0.5, math.nan), (0.5, 2.0), (0.4, 1.0), (0.5, None), (0.5, 1.9)]
    evaluated = [{"validation_accuracy": value, "validation_loss": loss} for value, loss in values]
    best, steps = BestEvaluation("validation_accuracy"), []
    for step, found in enumerate(evaluated):
        best.note(step, {key: value for key, value in found.items() if value is not None})
        best = BestEvaluation(**json.loads(json.dumps(asdict(best))))
        steps.append(best.step)
    assert steps == [0, 1, 1, 1, 1, 1, 6]
    # What a checkpoint of before has kept.
    old = BestEvaluation("validation_accuracy", 0, 0.5, 0)
    old.note(1, {"validation_accuracy": 0.5, "validation_loss": 9.0})
    assert old.step == 1


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
    best = {"by": "validation_loss", "step": BEST, "value": min(losses), "evaluations": PATIENCE, "loss": min(losses)}
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


# ---------------------------------------------------------------- the best model


def best_model(directory: Path, **sections: Any) -> dict[str, Any]:
    """The run of `early_stopping`, whose best step is none of its checkpoints'."""
    return early_stopping(directory, output={"model": "best"}, checkpoint={"every_steps": 5}, **sections)


def test_the_best_model_is_written(tmp_path: Path, ended: Done) -> None:
    done = run_here(best_model(tmp_path / "run"))
    assert done.losses == ended.losses
    assert done.checkpoints == [f"step-{BEST:08d}", f"step-{END:08d}"]
    saved = load_file(done.directory / "checkpoints" / done.checkpoints[0] / "model" / "model.safetensors")
    torch.testing.assert_close(done.weights, saved, rtol=0, atol=0)
    torch.testing.assert_close(saved, at_best(ended), rtol=0, atol=0)
    assert not torch.equal(done.weights["0.weight"], ended.weights["0.weight"])
    assert (done.results["model_step"], ended.results["model_step"]) == (BEST, END)
    assert (
        f"model written to {done.directory / 'model'}, of step 8, the best evaluation by validation_loss" in done.said
    )
    assert find_weights.find_weights(done.directory).step == BEST
    assert find_weights.find_weights(ended.directory).step == END
    assert f"- validation_loss: {min(evaluated(done)):.5g}" in (done.directory / "model" / "README.md").read_text()


def at_best(done: Done) -> dict[str, torch.Tensor]:
    return load_file(done.directory / "checkpoints" / f"step-{BEST:08d}" / "model" / "model.safetensors")


def evaluated(done: Done) -> list[float]:
    return [line["validation_loss"] for line in lines(done) if "validation_loss" in line]


# Where the best evaluation is cut off by the stop, it is made once the run resumes, and its checkpoint stays.
@pytest.mark.parametrize("step", [3, 8, 9, 13, 14])
@pytest.mark.parametrize("how", [crash_after, stop_after])
def test_a_resumed_run_writes_the_same_model(tmp_path: Path, ended: Done, step: int, how: Any) -> None:
    tree = best_model(tmp_path / "run")
    if how is crash_after:
        with pytest.raises(Crash):
            run_here(tree, crash_after(step))
    else:
        run_here(tree, stop_after(step))
    done = run_here(tree)
    assert (done.losses, done.results["model_step"]) == (ended.losses, BEST)
    torch.testing.assert_close(done.weights, at_best(ended), rtol=0, atol=0)


def test_a_run_that_goes_on_elsewhere_has_the_best_of_before(tmp_path: Path, ended: Done) -> None:
    run_here(best_model(tmp_path / "one"), stop_after(9))
    done = run_here(best_model(tmp_path / "two", resume={"mode": str(tmp_path / "one")}))
    assert (done.losses[-5:], done.results["model_step"]) == (ended.losses[-5:], BEST)
    torch.testing.assert_close(done.weights, at_best(ended), rtol=0, atol=0)


def test_a_longer_run_goes_on_from_the_last_step(tmp_path: Path, ended: Done) -> None:
    run_here(best_model(tmp_path / "run"))
    done = run_here(best_model(tmp_path / "run", eval={"patience": 5}))
    straight = run_here(early_stopping(tmp_path / "straight", eval={"patience": 5}))
    assert done.losses == straight.losses
    assert done.results["model_step"] == straight.results["ended_early"]["best"]["step"]


def test_a_best_model_that_is_gone_is_refused(tmp_path: Path) -> None:
    def gone(run: BuiltRun) -> None:
        shutil.rmtree(run.directory.path / "checkpoints" / f"step-{BEST:08d}")

    with pytest.raises(CheckpointError, match=r"the checkpoint of step 8 is not there, by validation_loss.*--step"):
        run_here(best_model(tmp_path / "run"), at_step(13, gone))
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"checkpoint": {"keep_best_by": None}, "eval": {"patience": None}},
            "output.model: checkpoint.keep_best_by is",
        ),
        ({"eval": {"patience": None, "every_steps": None}}, "output.model: nothing is evaluated before the end"),
        ({"output": {"dir": "run", "save_model": False}}, "output.model: output.save_model is false"),
    ],
)
def test_a_best_model_without_what_it_needs_is_refused(sections: dict[str, Any], says: str) -> None:
    tree = best_model(Path("run"))
    for name, values in sections.items():
        tree[name] = {**tree[name], **values}
    with pytest.raises(RecipeError, match=says):
        validate_recipe(tree)


def test_patience_without_what_it_looks_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"keep_best_by: evaluations of this recipe have no 'validation_rouge1'"):
        run_here(early_stopping(tmp_path / "run", checkpoint={"keep_best_by": "validation_rouge1"}))


def test_the_report_says_so(ended: Done) -> None:
    run = read_run(ended.directory)
    said = run_summary.status_line(run)
    assert said == early_stop_sentence(ended.results["ended_early"])
    (loss, *_) = charts.charts_of([("run", run)])
    assert [(mark.label, mark.sign, mark.step) for mark in loss.marks] == [("best validation loss", "★", BEST)]
    assert f"step {BEST}" in str(run_summary.main_figures(run, None))
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
