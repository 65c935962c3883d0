"""Launches the same recipe under one launch config after the other."""

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.config.recipe import dump_recipe, hint, validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.diagnostics.parity import small_model
from finetune.diagnostics.parity.finished_run import FinishedRun, read_finished
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.launcher import launcher_command
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.distributed.resolve_config import derive_accumulation
from finetune.utils import signals
from finetune.utils.atomic_files import write_text
from finetune.utils.errors import BackendError, FinetuneError, RecipeError
from finetune.utils.shipped_files import LAUNCH_FILES, launch_file, shipped_names


def find_launches(names: str) -> dict[str, Launch]:
    """Returns the launches that are named, by the names of their files, the reference first.

    Args:
        names: Names of `accelerate_configs/`, or files, with commas between them.

    Raises:
        RecipeError: If fewer than two are named, or one twice.
        BackendError: If one is no launch file.
    """
    words = [word for word in names.split(",") if word]
    if len(words) < 2:
        raise RecipeError(f"--on {names}: name two launch configs at least, such as `--on single,ddp`.")
    found: dict[str, Launch] = {}
    for word in words:
        file, known = Path(launch_file(word)), shipped_names(LAUNCH_FILES)
        if not file.is_file():
            raise BackendError(
                f"--on: there is no launch config '{word}'{hint(word, known)}. Give a file, or one of "
                f"{', '.join(known)}."
            )
        if file.stem in found:
            raise RecipeError(f"--on {names}: {file.stem} is named twice. Name each launch config once.")
        found[file.stem] = predict_environment(str(file), {}, os.environ).launch
    return found


def write_recipes(
    recipe: Recipe, launches: Mapping[str, Launch], folder: Path, *, steps: int, shrink: bool
) -> dict[str, Path]:
    """Writes the recipe of each run, the same but for the directory; nothing is launched yet.

    Raises:
        RecipeError: If the batch does not fit the processes of a launch config, or the model cannot be shrunk.
    """
    if steps < 1:
        raise RecipeError(f"--steps {steps}: take one step at least.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"--to: cannot make the folder {folder}: {error.strerror or error}. Give another.") from error
    for name in launches:
        if (folder / name).exists():
            raise RecipeError(f"--to: {folder / name} is there already. Give a new folder, or remove it.")
    tree = recipe.model_dump(mode="json")
    if shrink:
        tree = small_model.shrink_model(recipe, tree)
    tree |= {"length": {"steps": steps}, "sample": None, "resume": {"mode": "never"}}
    for section, values in _QUIET.items():
        tree[section] = {**tree[section], **values}
    if "Adam" in recipe.optim.name and ":" not in recipe.optim.name:
        given = recipe.optim.args
        tree["optim"]["args"] = {**given, "eps": max(float(given.get("eps", 0.0)), _LEAST_EPS)}
    written = {}
    for name, launch in launches.items():
        tree["output"] = {"dir": str(folder / name), "overwrite": False, "save_model": True}
        asked = validate_recipe(tree)
        try:
            derive_accumulation(asked, launch.data_ranks)
        except RecipeError as error:
            raise RecipeError(f"{name}: {error}") from error
        written[name] = folder / f"{name}.yaml"
        write_text(written[name], dump_recipe(asked))
    return written


# Logs every step, and leaves out whatever is not compared.
_QUIET: dict[str, dict[str, Any]] = {
    "log": {"every_steps": 1, "trackers": []},
    "eval": {"every_steps": None, "at_end": False, "metrics": [], "prompts": [], "patience": None},
    "checkpoint": {"every_steps": None, "every_minutes": None, "at_end": False, "keep_best_by": None},
}


# Adam divides gradients by their own size, so that a weight whose gradient is zero but for rounding moves by rounding
# alone, on each backend another way. With the usual 1e-8, two such weights of 2,048 put a tensor 1e-4 away.
_LEAST_EPS = 1e-6


def launch_run(
    launch: Launch, recipe: Path, directory: Path, *, fault: str | None, say: Callable[[str], None]
) -> FinishedRun:
    """Launches one run, waits for its end, and reads it.

    Args:
        fault: One of `fault_injection.FAULTS`, planted in its processes.

    Raises:
        BackendError: If it fails; it has said why.
    """
    name, file = directory.name, str(launch.file)
    say(f"\n{name}: {launch.num_processes} process(es), {file}" + (f", with {fault}" if fault else ""))
    module = "finetune.diagnostics.fault_injection" if fault else "finetune.training"
    words = launcher_command(file, [], [*([fault] if fault else []), str(recipe)], module=module)
    with signals.held_back():
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2)
    try:
        code = process.wait()
    finally:
        # If this process is ended, it ends the launcher first.
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise BackendError(
            f"The run under {file} ended with exit code {code}, as it says above, so that there is nothing to "
            f"compare. Its recipe is {recipe}; leave {name} out of --on, or mend what it names."
        )
    try:
        return read_finished(directory)
    except FinetuneError as error:
        raise BackendError(f"The run under {file} left nothing to compare: {error}") from error
