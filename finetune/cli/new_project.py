"""Creates a small project that runs as it is: a recipe, the launch files that fit this machine, and a README."""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import yaml

from finetune.config import path_kinds
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.planning import recommendations
from finetune.planning.planner import make_plan
from finetune.planning.step_time import Machines
from finetune.tasks import classification
from finetune.utils.errors import RecipeError
from finetune.utils.shipped_files import LAUNCH_FILES, shipped_path

TASKS = ("lm", "chat", "classify", "custom")
_FILES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "project_files"),
    trim_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)


@dataclass(frozen=True)
class Project:
    """Options of a new project, as `finetune init` takes them."""

    task: str = "lm"
    """Name among `TASKS`."""
    model: str | None = None
    data: str | None = None
    adapters: str | None = None
    """"lora", "qlora", or None to train all weights."""


def write_project(folder: Path, project: Project) -> list[str]:
    """Writes the files of a new project.

    Returns:
        Lines with the files that were written, and the next commands.

    Raises:
        FinetuneError: If the options contradict each other, a path leads nowhere, or a file is there already; nothing
            is written then.
    """
    if project.adapters is not None and (project.model is None or project.task == "custom"):
        raise RecipeError(f"--{project.adapters} trains adapters of a pretrained model: name one with --model.")
    if project.task == "custom" and (project.model is not None or project.data is not None):
        raise RecipeError("--task custom builds its own model and data, in task.py: leave --model and --data out.")
    length = _row_length(project)
    recipe = validate_recipe(yaml.safe_load(_render("recipe.yaml", project, row_length=length)))
    path_kinds.check_paths(recipe)
    text = _render("recipe.yaml", _seen_from(folder, project), row_length=length)
    files = {"task.py": _render("task.py", project)} if project.task == "custom" else {}
    launches, chosen, reason, changes = _choose_launch(recipe, custom=project.task == "custom")
    files |= launches
    command = " ".join(["finetune", "launch", "--config_file", chosen, "recipe.yaml", *changes])
    files["recipe.yaml"] = f"# {command}\n#\n# {chosen}: {reason}.\n{text}"
    files["README.md"] = _render("README.md", project, command=command, run=recipe.output.dir)
    files[".gitignore"] = "runs/\n.cache/\n__pycache__/\n"
    if existing := [name for name in files if (folder / name).exists()]:
        raise RecipeError(
            f"{folder} already holds {', '.join(existing)}, and nothing is overwritten. Name another folder."
        )
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    enter = [] if folder.resolve() == Path.cwd() else [f"    cd {shlex.quote(str(folder))}"]
    written = f"Written to {folder}: {', '.join(sorted(files))}"
    return [written, f"{chosen}: {reason}.", "Next:", *enter, f"    {command}"]


def _choose_launch(recipe: Recipe, *, custom: bool) -> tuple[dict[str, str], str, str, tuple[str, ...]]:
    """Returns files of launches that fit, the name of the one to take, why, and what to change of the recipe with it.

    The files are launch files, `single` too, and the configs that they name, by their place in the project.
    """
    machines, shipped = this_machine(), shipped_path(LAUNCH_FILES)
    changes: tuple[str, ...] = ()
    if custom:
        names = {"ddp", "fsdp"} if machines.ranks > 1 else set()
        launches = {name: launch_of_file(shipped / f"{name}.yaml", machines.ranks, 1) for name in names}
        chosen = "ddp" if names else "single"
        reason = "the simplest that uses this machine; a custom task is not planned"
    else:
        plan = make_plan(recipe, machines, shipped)
        reason, changes = plan.advice.reason, plan.advice.changes
        if plan.advice.candidate is None:
            raise RecipeError(f"On this machine ({machines.gpus} x {machines.gpu.memory_gib:.0f} GiB) {reason}")
        chosen, launches = plan.advice.candidate.name, plan.launches
        fitting = {name for name in launches if plan.candidates[name, plan.kind].verdict == "fits"}
        near = {name for name in fitting if launches[name].offload_params == "none"}
        names = {*(near or fitting), chosen}
    texts = {name: recommendations.launch_text(launches[name], 1) for name in names}
    found = {}
    for name, text in sorted({"single": (shipped / "single.yaml").read_text(encoding="utf-8"), **texts}.items()):
        config = (yaml.safe_load(text).get("deepspeed_config") or {}).get("deepspeed_config_file")
        if config is not None:
            place = f"ds_configs/{Path(config).name}"
            text = text.replace(str(config), place)
            found[place] = (shipped_path("ds_configs") / Path(config).name).read_text(encoding="utf-8")
        found[f"{LAUNCH_FILES}/{name}.yaml"] = text
    return found, chosen, reason, changes


def this_machine() -> Machines:
    """Returns this machine as a plan takes it: its GPUs, or two processes that share a CPU and its memory."""
    import torch

    # Speeds are placeholders: no times are shown.
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        return Machines(Gpu("this machine's", "", memory, 100.0, 32.0, 300.0), torch.cuda.device_count(), 1, 50.0, 0.4)
    import psutil

    processes = min(2, os.cpu_count() or 1)
    memory = psutil.virtual_memory().total / 2**30 / processes
    return Machines(Gpu("this machine's share", "", memory, 1.0, 1.0, 100.0), processes, 1, 1.0, 0.4)


def _seen_from(folder: Path, project: Project) -> Project:
    """Returns the project with relative paths that count from the folder, where its commands are given."""

    def seen(path: str | None) -> str | None:
        if path is None or Path(path).is_absolute() or folder.resolve() == Path.cwd():
            return path
        return os.path.relpath(path, folder.resolve())

    # A name without a directory of that name is the hub's.
    model = seen(project.model) if Path(project.model or "").is_dir() else project.model
    return replace(project, model=model, data=seen(project.data))


def _render(name: str, project: Project, **values: object) -> str:
    """Returns the text of a file of the project."""
    ranks = this_machine().ranks
    # Sixteen rows a step, or twice the processes where they do not share sixteen evenly.
    rows = 16 if 16 % ranks == 0 else 2 * ranks
    template = _FILES.get_template(f"{name}.jinja")
    sizes = {"rows": rows, "micro_rows": min(4, rows // ranks), "classifier": classification.NAME}
    return template.render(**vars(project), **sizes, **values)


def _row_length(project: Project) -> int:
    """Returns tokens a row: 256 for a small network from nothing, else 1,024 or the positions that the model knows."""
    if project.model is None:
        return 256
    data = {"train": [{"sample": 1}], "sequence_length": 2}
    least: dict[str, Any] = {"model": {"name": project.model}, "data": data, "length": {"steps": 1}}
    head = NEXT_TOKEN
    if project.task == "classify":
        least["task"], head = classification.NAME, classification.HEAD
    config = resolve_model_config(validate_recipe(least), head)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(1024, positions) if positions is not None and positions > 0 else 1024
