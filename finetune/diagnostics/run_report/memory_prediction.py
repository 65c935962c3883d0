"""The peak memory that a plan predicts for a run that has not written it."""

from dataclasses import fields

from finetune.checkpoint.run_history import RunHistory
from finetune.checkpoint.trusted_code import NAMED, SHIPPED, check_code
from finetune.config.recipe import load_recipe
from finetune.utils.errors import FinetuneError, RecipeError


def predict_peak(run: RunHistory) -> int | str:
    """Bytes of the fullest rank, by the recipe and launch that the run has written down; else why that is not known."""
    launch = run.facts.get("launch")
    if not isinstance(launch, dict) or not launch.get("kind"):
        return "run.json does not say under what it was launched."
    try:
        recipe = load_recipe(run.directory / "recipe.yaml")
    except FinetuneError as error:
        return f"its recipe cannot be read: {_short(error)}"
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
    known = {field.name for field in fields(Launch)}
    asked = Launch(**{key: value for key, value in launch.items() if key in known})
    if isinstance(run.facts.get("ds_config"), dict):
        asked = Launch(**{**vars(asked), "ds_config": run.facts["ds_config"]})
    try:
        of = candidates_of(recipe, asked, 1 << 50)
        found = of(rows) if of is not None else None
    except (FinetuneError, OSError, ValueError) as error:
        return f"the plan refuses it: {_short(error)}"
    if found is None:
        return "its network cannot be counted without its weights."
    if found.parts is None or found.reason:
        return f"{found.reason or 'the plan does not count it'}."
    resting = found.host if run.facts.get("runs", {}).get("device") == "cpu" else 0
    return found.peak + resting


def _short(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if len(said) <= 200 else f"{said[:197]}…"
