"""What `plan` says that a rank holds from step to step is what real runs read back, to the byte."""

from dataclasses import asdict
from typing import Any

import pytest
from harness import ROOT, Launcher, Result
from recipes_for_tests import ADAPTERS, ADAPTERS_EVERYWHERE, ARCHITECTURES, PARITY, SPLIT_LAYERS

from finetune.config.recipe import load_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.distributed.resolve_config import derive_accumulation
from finetune.distributed.strategies.strategy import strategy_of
from finetune.planning import model_shapes
from finetune.planning.launch_candidates import state_memory

LAUNCHES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4, "zero1": 2, "zero2": 2, "zero3": 2, "tp": 2, "fsdp_tp": 4}
# What a plan cannot count: a network that no recipe describes.
_OWN = {"mlp", "mlp_from_meta"}
_NETWORKS = {name: recipe for name, recipe in ARCHITECTURES.items() if name not in _OWN}
LAUNCHED_RUNS: dict[str, dict[str, Any]] = {
    **{key: {**_NETWORKS, **ADAPTERS} for key in ("single", "ddp", "fsdp", "zero2", "zero3")},
    **{key: {**ADAPTERS_EVERYWHERE, "adamw": PARITY["adamw"]} for key in ("hsdp", "zero1")},
    "tp": SPLIT_LAYERS,
    "fsdp_tp": {"sgd": PARITY["sgd"]},
}
THREE = {"uneven": {**ARCHITECTURES["uneven"], "batch": {"global_size": 6, "micro_size": 2}}}


def recipe_of(run: Result) -> Recipe:
    return load_recipe(run.directory.with_suffix(".yaml"))


def described(recipe: Recipe) -> bool:
    """Whether a recipe alone says what the network is: no task of its own, no number of classes that data decide."""
    own, classes = recipe.task.name.startswith("own_task:"), recipe.task.name.endswith("classification")
    return not own and not (classes and recipe.task.num_labels is None)


def difference(run: Result, name: str, processes: int) -> dict[str, tuple[int, int]]:
    """What is foreseen of a run and what it has read back, where these are not equal."""
    recipe = recipe_of(run)
    launch = launch_of_file(ROOT / "accelerate_configs" / f"{name}.yaml", processes)
    kind = model_shapes.kind_of(recipe)
    variant = model_shapes.read_variants(recipe, kinds=(kind,))[kind]
    assert isinstance(variant, model_shapes.Variant)
    specs = model_shapes.part_of(variant, launch.tensor).specs if launch.tensor > 1 else variant.specs
    share = strategy_of(launch).predict_share(launch, specs, derive_accumulation(recipe, launch.data_ranks))
    predicted = asdict(state_memory(share, variant.state_bytes))
    read = run.check().facts["memory"]
    return {key: (value, read[key]) for key, value in predicted.items() if value != read[key]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in LAUNCHES])
def test_state_is_exact_to_the_byte(launcher: Launcher, name: str) -> None:
    """Of the runs that this module names, and of all others of the session that were launched with them."""
    runs = {**launcher.everything(name), **launcher.many(name, LAUNCHED_RUNS[name])}
    countable = {job: run for job, run in runs.items() if described(recipe_of(run))}
    wrong = {job: difference(run, name, LAUNCHES[name]) for job, run in countable.items()}
    assert not {job: found for job, found in wrong.items() if found}, "(predicted, read back)"
    assert len(countable) >= len(LAUNCHED_RUNS[name])


@pytest.mark.parametrize("name", ["zero1", "zero3"])
@pytest.mark.xdist_group("three_processes")
def test_state_of_three_processes_is_exact_to_the_byte(launcher: Launcher, name: str) -> None:
    assert difference(launcher.many(name, THREE, processes=3)["uneven"], name, 3) == {}
