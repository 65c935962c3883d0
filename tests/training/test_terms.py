"""Losses of several terms and of the whole global batch, and recorded figures: the same however a batch is split."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import terms_task
import torch
from harness import Launcher, assert_same_path, read_lines
from inside import run_here, stop_after
from recipes_for_tests import SGD
from safetensors.torch import load_file

from finetune.checkpoint.run_history import read_run
from finetune.config.recipe import validate_recipe
from finetune.data.rows.row_order import rows_at
from finetune.diagnostics import replay
from finetune.diagnostics.run_report.charts import charts_of
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.tasks import Term
from finetune.tasks.build_task import check_counts, check_losses
from finetune.tasks.evaluate_rows import OneProcess, evaluate_rows
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import RecipeError

FIGURES = ("loss", *(term.name for term in terms_task.TERMS), "inside/mean")
VALIDATION = ("loss", *(term.name for term in terms_task.TERMS), "output", "largest", "places", "whole")


def job(micro_size: int, dropout: float = 0.0, **sections: Any) -> dict[str, Any]:
    """Twelve steps of eight rows, more than an epoch of ten; 21 rows are evaluated in windows of eight."""
    return {
        "task": {"name": "terms_task:several", "args": {"dropout": dropout}},
        "batch": {"global_size": 8, "micro_size": micro_size},
        "length": {"steps": 12},
        "optim": {**SGD, "lr": 0.1},
        "log": {"every_steps": 1},
        "eval": {"every_steps": 6, "micro_size": 3},
        "checkpoint": {"keep_best_by": "validation_above", "every_steps": 6},
        "precision": "fp32",
        "seed": 3,
        **sections,
    }


SPLITS = {"single": (8, 4, 1), "ddp": (4, 1), "fsdp": (4, 2), "zero3": (4, 2)}
LAUNCHED_RUNS = {
    config: {f"terms_{size}": job(size) for size in sizes} | ({"dropped": job(2, 0.3)} if config != "zero3" else {})
    for config, sizes in SPLITS.items()
}


@pytest.mark.parametrize("config", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SPLITS])
def test_a_batch_may_be_split_in_any_way(launcher: Launcher, config: str) -> None:
    """Ranks, micro-batches and accumulation change neither terms nor what depends on the whole batch."""
    whole = launcher.many("single", LAUNCHED_RUNS["single"])["terms_8"].check()
    for size in SPLITS[config]:
        other = launcher.many(config, LAUNCHED_RUNS[config])[f"terms_{size}"]
        assert_same_path(whole, other, 1e-5)
        for name in FIGURES:
            np.testing.assert_allclose(other.series(name), whole.series(name), rtol=1e-4, atol=1e-5)
        for name in VALIDATION:
            assert other.validation(f"validation_{name}") == pytest.approx(
                whole.validation(f"validation_{name}"), rel=1e-4, abs=1e-5
            )
        # Each forward pass once, and no pass over the window.
        assert (other.series("inside/passes") == 8 / size).all()
        assert "never" not in other.steps[0]


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("ddp", "fsdp")]
)
def test_the_pass_over_the_window_has_the_dropout_of_the_step(launcher: Launcher, config: str) -> None:
    single, other = (launcher.many(name, LAUNCHED_RUNS[name])["dropped"].check() for name in ("single", config))
    assert_same_path(single, other, 1e-5)
    for run in (single, other):
        assert (run.series("drift") == 0).all()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(local(tmp_path_factory.mktemp("terms") / "run")).directory


def local(directory: Path, **sections: Any) -> dict[str, Any]:
    return {**job(2, **sections), "output": {"dir": str(directory)}}


def test_figures_are_those_of_a_plain_loop(here: Path) -> None:
    """Of the first step, from the whole batch at once."""
    recipe, task = validate_recipe(local(here)), terms_task.several()
    network, rows = task.build_model(recipe, None), terms_task.Series(80, 1)
    batch = rows.batch(rows_at(np.arange(8), num_rows=80, seed=3, epoch_rows=80))
    outputs = network(batch["inputs"])
    value = terms_task.row_values(outputs, batch).detach()
    batch |= {"window": torch.stack((value, torch.ones(8)), 1), "window_rows": torch.arange(8)}
    sums, targets = terms_task.sums_of(outputs, batch), int(batch["known"].sum())
    means = [total / count for total, count in zip(sums, (targets, 8, 8, 8, 8, 8), strict=True)]
    loss = means[0] + 0.5 * means[1] + 0.25 * means[2]
    first = read_lines(here / "metrics.jsonl")[0]
    for name, expected in zip(FIGURES, (loss, *means), strict=False):
        assert first[name] == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert first["tokens"] == targets


def test_the_mean_loss_of_an_epoch_divides_each_term_by_its_own_count(here: Path) -> None:
    lines = read_lines(here / "metrics.jsonl")
    (epoch,) = [line["epoch_loss"] for line in lines if "epoch_loss" in line]
    error, above, ranked, tokens = (
        np.array([line[name] for line in lines if "grad_norm" in line][:10])
        for name in ("error", "above", "ranked", "tokens")
    )
    mean = np.average(error, weights=np.diff(tokens, prepend=0)) + 0.5 * above.mean() + 0.25 * ranked.mean()
    assert epoch == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("micro_size", [1, 8, 21])
def test_one_process_evaluates_alike(here: Path, micro_size: int) -> None:
    """As files are evaluated: rows in windows of eight, the last of which has five."""
    task = terms_task.several()
    network = task.build_model(validate_recipe(local(here)), None)
    network.load_state_dict(load_file(here / "model" / "model.safetensors"))
    rows, alone = task.build_data(validate_recipe(local(here)), True).validation, OneProcess(torch.device("cpu"))
    found = evaluate_rows(alone, ForwardWrapper(network), task, rows, micro_size, [], window_size=8)
    assert found is not None
    figures, values = found
    assert values is not None
    assert values[:, 1].tolist() == [row % 8 for row in range(21)]
    last = [line for line in read_lines(here / "metrics.jsonl") if "validation_loss" in line][-1]
    for name in VALIDATION:
        assert figures.whole[name] == pytest.approx(last[f"validation_{name}"], rel=1e-5, abs=1e-6)


def test_it_goes_on_where_it_was_stopped(here: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, whose mean loss is one of several terms; and a step of it can be repeated."""
    run_here(local(tmp_path / "run"), stop_after(7))
    again = run_here(local(tmp_path / "run")).directory
    keys = (*FIGURES, "epoch_loss", "validation_whole")
    one, other = (
        [{key: line[key] for key in keys if key in line} for line in read_lines(place / "metrics.jsonl")]
        for place in (here, again)
    )
    assert one == other
    assert sum("epoch_loss" in line for line in one) >= 1
    found = replay.replay_step(here, 8)
    assert found.differences == []
    assert found.now == found.then


def test_a_run_is_read_back_with_its_figures(here: Path) -> None:
    run = read_run(here)
    assert len(run.training["inside/mean"]) == len(run.training["ranked"]) == 12
    assert {"validation_ranked", "validation_output", "validation_places"} <= {*run.metrics}
    shown = {chart.key: chart for chart in charts_of([("run", run)])}
    assert {"ranked", "inside-mean"} <= {*shown}
    assert len(shown["ranked"].curves) == 2, "of steps and of evaluations"


@pytest.mark.parametrize(
    "terms",
    [
        (Term("one", weight=0.0), Term("two")),
        (Term("one", weight=0.0),),
        (Term("one"), Term("one")),
        (Term("loss"), Term("other")),
        (Term("loss", weight=2.0),),
        (),
    ],
)
def test_terms_that_are_refused(terms: tuple[Term, ...]) -> None:
    with pytest.raises(RecipeError, match="first those with a weight"):
        check_losses(replace(terms_task.several(), terms=terms))


def test_what_terms_must_return_is_said(tmp_path: Path) -> None:
    task = check_losses(replace(terms_task.several(), terms=terms_task.TERMS[:2]))
    data = task.build_data(validate_recipe(local(tmp_path)), True)
    batch = {**data.train.batch(np.arange(2)), "window": torch.ones(2, 2), "window_rows": torch.arange(2)}
    network = task.build_model(validate_recipe(local(tmp_path)), data)
    with pytest.raises(RecipeError, match=r"shape \(6,\)\. It has to return the sums of its terms, .* shape \(2,\)"):
        task.loss_sum(network, batch)
    flat = check_losses(replace(task, window=lambda network, batch: torch.ones(2)))
    with pytest.raises(RecipeError, match=r"the task's window returned a tensor of shape \(2,\).* \(rows, any\)"):
        flat.window(network, batch)
    uncounted = replace(task, terms=(Term("one", "pairs"),))
    with pytest.raises(RecipeError, match="'one' is divided by 'pairs', and its rows count targets, rows"):
        check_counts(uncounted, data.train, data.validation)


@pytest.mark.parametrize("name", ["lr", "error", "with space", "loss"])
def test_a_name_that_metrics_have_is_refused(tmp_path: Path, name: str) -> None:
    tree = local(tmp_path / "run")
    tree["task"]["args"]["names"] = [name]
    with pytest.raises(RecipeError, match=f"recorded figure is called '{name}'"):
        run_here(tree)


def test_ranks_that_record_other_names_are_refused(tmp_path: Path) -> None:
    def as_with_another(run: BuiltRun) -> None:
        whole, size = run.backend.all_reduce_sum, len(terms_task.TERMS) + 2

        def summed(values: torch.Tensor) -> torch.Tensor:
            # As where another rank has another number.
            return values + torch.eye(size)[-1] if values.shape == (size,) else whole(values)

        run.backend.all_reduce_sum = summed  # type: ignore[method-assign]

    with pytest.raises(RecipeError, match="Ranks record other figures in step 1; this one records inside/mean"):
        run_here(local(tmp_path / "run"), as_with_another)
