"""The peak memory that a plan predicts for a run."""

from dataclasses import fields
from textwrap import shorten

from finetune.checkpoint.run_history import RunHistory
from finetune.checkpoint.trusted_code import NAMED, SHIPPED, check_code
from finetune.config.recipe import load_recipe
from finetune.utils.errors import FinetuneError, RecipeError


def predicted_peak(run: RunHistory) -> int | str:
    """Returns the peak in bytes, as written by the run or computed now, or why it is not known."""
    written = (run.facts.get("peak_memory") or {}).get("predicted")
    return int(written) if written else predict_peak(run)


def predict_peak(run: RunHistory) -> int | str:
    """Returns the bytes of the fullest rank, by the recipe and launch of the run, or why that is not known."""
    launch = run.facts.get("launch")
    if not isinstance(launch, dict) or not launch.get("kind"):
        return "run.json does not say under what it was launched."
    try:
        recipe = load_recipe(run.directory / "recipe.yaml")
    except FinetuneError as error:
        return f"its recipe cannot be read: {_shortened(error)}"
    try:
        check_code(run.directory, recipe, (SHIPPED, *NAMED))
    except RecipeError:
        return (
            "its recipe leads to Python code, which is not run unasked, since no record says that this user started "
            f"the run on this machine. Where you trust it, `finetune plan {run.directory / 'recipe.yaml'}` predicts it."
        )
    micro = run.facts.get("micro_size")
    rows = micro.get("rows") if isinstance(micro, dict) else micro
    if not isinstance(rows, int):
        return "the size of its micro-batches is not known yet."
    # From here on torch is there, which takes seconds.
    from finetune.distributed.launch.launch_config import Launch
    from finetune.planning.planner import candidates_of
    from finetune.utils.library_imports import silence_libraries

    silence_libraries()
    if isinstance(run.facts.get("ds_config"), dict):
        launch = {**launch, "ds_config": run.facts["ds_config"]}
    known = {field.name for field in fields(Launch)}
    try:
        of = candidates_of(recipe, Launch(**{key: launch[key] for key in launch.keys() & known}), 1 << 50)
        found = of(rows) if of is not None else None
    except (FinetuneError, OSError, ValueError) as error:
        return f"the plan refuses it: {_shortened(error)}"
    if found is None:
        return "its network cannot be counted without its weights."
    if found.parts is None or found.reason:
        return f"{found.reason or 'the plan does not count it'}."
    return found.peak + (found.host if run.facts.get("runs", {}).get("device") == "cpu" else 0)


def _shortened(error: Exception) -> str:
    return shorten(str(error), 200, placeholder="…")
