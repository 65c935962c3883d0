"""Tasks say what they are: one that lies outside the package is as one of the package's own."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from exports import exported, opened_here
from harness import ROOT
from inside import mlp, run_here, stop_after
from recipes_for_tests import ARCHITECTURES, MODEL, base
from safetensors.torch import load_file

from finetune.cli.main import main
from finetune.config.recipe import dump_recipe, validate_recipe
from finetune.distributed.gpu_specs import find_gpu
from finetune.export import verify_export
from finetune.planning import planner
from finetune.planning.step_time import Machines
from finetune.planning.trace import trace_step
from finetune.tasks import classification
from finetune.tasks.task_lookup import BUILT_IN, find_task, named_task
from finetune.training.dry_run import describe
from finetune.utils.errors import RecipeError

JOBS: dict[str, dict[str, Any]] = {
    "bert": {"model": ARCHITECTURES["bert"]["model"]},
    "qlora": {"model": {"name": MODEL, "quantization": "nf4"}, "tokenizer": {}, "lora": {"rank": 4}},
}


def job(name: str, task: str, directory: Path) -> dict[str, Any]:
    """Four steps, evaluated by a metric too, and a checkpoint after every second."""
    return {
        **base(
            task={"name": task},
            data={**ARCHITECTURES["bert"]["data"], "train": [{"sample": 120}]},
            length={"steps": 4},
            checkpoint={"every_steps": 2},
            eval={"metrics": ["f1_macro"]},
            output={"dir": str(directory)},
        ),
        **JOBS[name],
    }


@pytest.fixture
def outside(tmp_path: Path) -> str:
    """The classifier's module, as a user may have it beside a recipe."""
    file = tmp_path / "my_classifier.py"
    shutil.copy(classification.__file__, file)
    return f"{file}:SEQUENCE_CLASSIFICATION"


@pytest.mark.parametrize("name", JOBS)
def test_outside_the_package_it_is_the_same(
    tmp_path: Path, outside: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, evaluation, weights, a resume, what is exported and its card."""
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    one = run_here(job(name, classification.NAME, tmp_path / "one"))
    built_in = dict(BUILT_IN)
    del BUILT_IN[classification.NAME]
    try:
        run_here(job(name, outside, tmp_path / "other"), stop_after(2))
        other = run_here(job(name, outside, tmp_path / "other"))
    finally:
        # In the order in which they were, which says whose a model is whose head fits two.
        BUILT_IN.clear()
        BUILT_IN.update(built_in)
    assert other.losses == one.losses
    assert len(one.losses) == 4
    same = ("validation_loss", "validation_accuracy", "validation_recall_macro", "validation_f1_macro", "classes")
    assert {key: other.results[key] for key in same} == {key: one.results[key] for key in same}
    folders = [exported(run.directory, "merged", tmp_path / "out" / run.directory.name)[0] for run in (one, other)]
    if name == "qlora":
        folders += [
            exported(run.directory, "adapter", tmp_path / "out" / run.directory.name)[0] for run in (one, other)
        ]
    for ours, theirs in zip(folders[::2], folders[1::2], strict=True):
        (file,) = [path.name for path in ours.glob("*.safetensors")]
        tensors, found = load_file(ours / file), load_file(theirs / file)
        assert tensors.keys() == found.keys()
        assert all(torch.equal(tensors[key], found[key]) for key in tensors)
        cards = [(folder / "README.md").read_text().partition("\n# ")[0] for folder in (ours, theirs)]
        assert cards[0] == cards[1]
        assert "pipeline_tag: text-classification" in cards[0]


@pytest.mark.parametrize("name", JOBS)
def test_outside_the_package_it_is_planned_the_same(
    tmp_path: Path, outside: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes, said = [], []
    for task in (classification.NAME, outside):
        recipe = validate_recipe(job(name, task, tmp_path / "run") | {"task": {"name": task, "num_labels": 7}})
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
        assert main(["data", str(tmp_path / "recipe.yaml"), "--show", "2"]) == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if not line.startswith("data: ")])
        said[-1] += describe(recipe).replace(task, "task").splitlines()
        recipes.append(recipe)
    assert [line.split() for line in said[0]] == [line.split() for line in said[1]]
    machines = Machines(find_gpu("h100-80gb"), 2, 1, 50.0, 0.4)
    plans = [planner.make_plan(recipe, machines, stored="bf16") for recipe in recipes]
    assert repr(plans[0].candidates) == repr(plans[1].candidates).replace(outside, classification.NAME)
    batches = [trace_step.meta_batch(recipe) for recipe in recipes]
    assert {k: v.shape for k, v in batches[0].items()} == {k: v.shape for k, v in batches[1].items()}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"train": [{"sample": 3}]}}, "data.packing: .*my_classifier.py.* reads one document a row; set `pad"),
        ({"sample": {"prompt": "Once"}}, "sample: a classifier writes no text"),
        ({"chat": {"template": "plain"}}, "chat: a classifier reads no conversations"),
        ({"eval": {"metrics": ["f1_macro"], "prompts": [{"sample": 2}]}}, "eval.prompts: a classifier writes no text"),
        ({"model": {}}, "model: give `name`"),
    ],
)
def test_outside_the_package_it_refuses_the_same(
    tmp_path: Path, outside: str, sections: dict[str, Any], says: str
) -> None:
    recipe = validate_recipe(job("bert", outside, tmp_path / "run") | sections)
    with pytest.raises(RecipeError, match=says):
        find_task(recipe)


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("model.quantization", {"model": {"quantization": "nf4"}, "lora": {}}),
        ("model.freeze", {"model": {"freeze": "0"}}),
        ("model.gradient_checkpointing", {"model": {"gradient_checkpointing": True}}),
        ("model.compile", {"model": {"compile": True}}),
        ("data.packing", {"data": {"packing": "wrapped"}}),
        ("chat", {"chat": {}}),
        ("sample", {"sample": {"prompt": "Once"}}),
        ("eval.prompts", {"eval": {"metrics": ["f1"], "prompts": [{"sample": 2}]}}),
    ],
)
def test_a_key_that_a_custom_task_cannot_use_is_refused(tmp_path: Path, key: str, sections: dict[str, Any]) -> None:
    recipe = validate_recipe(mlp(tmp_path / "run", **sections))
    machines = Machines(find_gpu("h100-80gb"), 2, 1, 50.0, 0.4)
    for use in (find_task, describe, lambda recipe: planner.make_plan(recipe, machines)):
        with pytest.raises(RecipeError, match=f"{key}: the task own_task:mlp .*; remove it"):
            use(recipe)


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_recipes_are_checked_for_is_what_tasks_say(name: str) -> None:
    teacher = {"distillation": {"teacher": {"name": "t"}}} if name == "distill" else {}
    task = named_task(validate_recipe(base(task={"name": name}, **teacher)))
    assert BUILT_IN[name].rows is task.rows


def test_the_example_of_the_page_gives_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    code, recipe = (
        re.search(rf"`{name}`.*?```\w+\n(.*?)```", page, re.DOTALL) for name in ("curve_task.py", "curve.yaml")
    )
    assert code is not None
    assert recipe is not None
    (tmp_path / "curve_task.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = run_here(yaml.safe_load(recipe[1]))
    figures = re.search(r"losses \(([\d., ]+) in `metrics.jsonl`\) and the same validation loss \(([\d.]+)\)", page)
    assert figures is not None
    assert figures[1] == ", ".join(f"{loss:.4f}" for loss in done.losses)
    assert figures[2] == f"{done.results['validation_loss']:.4f}"
