"""Creates a small project that runs as it is: a recipe, the launch files that fit this machine, and a README.

`finetune sft` makes the same recipe, and keeps it in the run directory.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import yaml
from rich.console import Console
from rich.tree import Tree

from finetune.cli.choose_launch import UNPLANNED, sharing, this_machine
from finetune.cli.recipe_sizes import RecipeSizes, default_sizes, size_recipe
from finetune.config import preference_losses, recipe_paths
from finetune.config.provenance import Origin
from finetune.config.recipe import RecipeLoader, apply_override, dump_tree, recipe_layers, validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.data.class_labels import ClassList
from finetune.data.source_survey import Kind, SourceSurvey, survey_source, token_lengths
from finetune.data.sources.column_names import PREFERENCES
from finetune.data.tokenization.tokenizer import load_tokenizer
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import longest_row, resolve_model_config
from finetune.models.pretrained_classes import pretrained_classes
from finetune.planning import recommendations
from finetune.planning.planner import make_plan
from finetune.planning.step_time import Machines
from finetune.tasks import classification
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.atomic_files import explain_unwritable
from finetune.utils.errors import DataError, RecipeError
from finetune.utils.quoting import shell_command, shell_word
from finetune.utils.shipped_files import LAUNCH_FILES, shipped_path
from finetune.utils.yaml_files import parse

_KINDS: dict[str, Kind] = {"lm": "text", "chat": "conversations", "classify": "labelled"}
_KINDS |= dict.fromkeys(preference_losses.TASKS, "pairs")
_COLUMNS = ("text_field", "label_field", "fields", "split")
# As many times the documents of the smallest class.
_UNEQUAL = 4
_FILES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "project_files"),
    trim_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)


@dataclass(frozen=True)
class Project:
    """Options of a new project, as `finetune init` takes them."""

    task: str | None = None
    """`lm`, `chat`, `classify`, `custom` or a task of preferences; None to find it in the data, or `lm` without any."""
    model: str | None = None
    data: str | None = None
    adapters: str | None = None
    """"lora", "qlora", or None to train all weights."""
    output: str | None = None
    """The run directory; None for one below `runs`."""
    teacher: str | None = None
    """The model that a language model learns from; None to learn from texts alone."""

    @property
    def verb(self) -> str:
        """The command that makes and runs its recipe, and keeps it in the run directory, as VERB.yaml, which the run
        itself does not touch."""
        return "dpo" if self.task in preference_losses.TASKS else "sft"


@dataclass(frozen=True)
class _Draft:
    """A project whose data has been looked at."""

    project: Project
    """With its task and its run directory."""
    machines: Machines
    values: dict[str, Any]
    """Values of the recipe's template beside the project's own."""
    lines: tuple[str, ...]
    """Lines on the data, and warnings."""

    def text(self, project: Project | None = None) -> str:
        """Returns the recipe; `project` has other paths."""
        return _render("recipe.yaml", project or self.project, **self.values)


def write_project(folder: Path, project: Project) -> list[str]:
    """Writes the files of a new project.

    Returns:
        Lines with what was found and written, and the next commands.

    Raises:
        FinetuneError: If the options contradict each other, data cannot be read, or a file is there already; nothing
            is written then.
    """
    draft = _draft_recipe(project)
    project = draft.project
    recipe = validate_recipe(parse(draft.text(), RecipeLoader), "The new recipe", BUILT_IN)
    recipe_paths.check_paths(recipe)
    text = draft.text(_seen_from(folder, project))
    files = {"task.py": _render("task.py", project)} if project.task == "custom" else {}
    launches, chosen, reason, changes = _choose_launch(recipe, draft.machines, custom=project.task == "custom")
    files |= launches
    command = " ".join(["finetune", "launch", "--config_file", chosen, "recipe.yaml", *changes])
    files["recipe.yaml"] = f"# {command}\n#\n# {chosen}: {reason}.\n{text}"
    values = {"prefers": draft.values["prefers"], "command": command, "run": recipe.output.dir}
    files["README.md"] = _render("README.md", project, **values)
    files[".gitignore"] = "runs/\n.cache/\n__pycache__/\n"
    if existing := [name for name in files if (folder / name).exists()]:
        raise RecipeError(
            f"{folder} already holds {', '.join(existing)}, and nothing is overwritten. Name another folder."
        )
    with explain_unwritable(folder):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content, encoding="utf-8")
    enter = [] if folder.resolve() == Path.cwd() else [f"    cd {shell_word(str(folder))}"]
    return [*draft.lines, *_as_tree(folder, files), f"{chosen}: {reason}.", "Next:", *enter, f"    {command}"]


@dataclass(frozen=True)
class KeptRecipe:
    """The recipe of a run that `finetune sft` or `dpo` starts."""

    file: Path
    """Its place in the run directory."""
    text: str
    recipe: Recipe
    lines: tuple[str, ...]
    """Lines on the data, and whether the recipe is there already."""


def make_recipe(project: Project, overrides: Sequence[str], *, quiet: bool = False) -> KeptRecipe:
    """Makes the recipe of a project, or reads the one that the same command has left in the run directory.

    Raises:
        FinetuneError: If data cannot be read, or the directory holds the recipe of another command.
    """
    task = project.task if project.task != project.verb else None
    given = {"task": task, "model": project.model, "data": project.data}
    words = [word for key, value in given.items() if value is not None for word in (f"--{key}", value)]
    words += [f"--{project.adapters}"] if project.adapters else []
    command = shell_command(["finetune", project.verb, *words, *overrides])
    folder = project.output or _run_name(project)
    settings: dict[str, Any] = {"output": {"dir": folder}}
    for override in overrides:
        apply_override(settings, override)
    named = (settings.get("task") or {}).get("name")
    if project.task in preference_losses.TASKS and named in preference_losses.TASKS:
        project = replace(project, task=named)
    file = Path(os.path.expanduser(str(settings["output"]["dir"]))) / f"{project.verb}.yaml"
    if file.exists():
        text, lines = file.read_text(encoding="utf-8"), [f"Recipe: {file}, as it is there."]
        before = text.partition("\n")[0].removeprefix("# ")
        if before != command:
            raise RecipeError(
                f"{file} is the recipe of another command ({before}). Name another folder by --output, or edit it "
                f"and run `finetune train {file}`."
            )
    else:
        draft = _draft_recipe(replace(project, output=folder), settings)
        if draft.project.verb != project.verb:
            raise DataError(f"{project.data}: {PREFERENCES}")
        text, lines = draft.text(), [*draft.lines]
        if overrides:
            trees = recipe_layers(parse(text, RecipeLoader), overrides, "the recipe that is made", quiet=quiet)
            validate_recipe(tree := trees[-1], Origin("The recipe that is made", trees[0], overrides), BUILT_IN)
            text = dump_tree(tree)
        text = f"# {command}\n{text}"
    recipe = validate_recipe(parse(text, RecipeLoader), str(file), BUILT_IN)
    recipe_paths.check_paths(recipe)
    return KeptRecipe(file, text, recipe, tuple(lines))


def _run_name(project: Project) -> str:
    """Returns a run directory named after what is trained on what."""
    model = Path(project.model or "model").resolve()
    # A run's model lies in a folder of that name.
    name = model.parent.name if model.name == "model" else model.name
    words = [name, Path(project.data or "data").stem, project.adapters]
    return "runs/" + "-".join(re.sub(r"[^\w.]+", "-", word).strip("-.") or "data" for word in words if word)


def _as_tree(folder: Path, files: dict[str, str]) -> list[str]:
    tree = Tree(f"Written to {folder}")
    folders: dict[str, Tree] = {}
    for name in sorted(files):
        above, _, last = name.rpartition("/")
        if above not in folders:
            folders[above] = tree.add(above) if above else tree
        folders[above].add(last)
    console = Console(width=1000, highlight=False, markup=False)
    with console.capture() as shown:
        console.print(tree)
    return [line.rstrip() for line in shown.get().splitlines()]


def _draft_recipe(project: Project, given: Mapping[str, Any] | None = None) -> _Draft:
    """Looks at a project's data and model, and sizes its recipe to them, and to the sections that the command gives."""
    if project.adapters is not None and (project.model is None or project.task == "custom"):
        raise RecipeError(f"--{project.adapters} trains adapters of a pretrained model: name one with --model.")
    if project.task == "custom" and (project.model is not None or project.data is not None):
        raise RecipeError("--task custom builds its own model and data, in task.py: leave --model and --data out.")
    machines, survey, given = this_machine(), None, given or {}
    if project.data is not None:
        (source, *_) = (given.get("data") or {}).get("train") or [{}]
        columns = {key: value for key, value in source.items() if key in _COLUMNS}
        survey = survey_source(os.path.expanduser(project.data), _KINDS.get(project.task or ""), columns)
        found = next(task for task, kind in _KINDS.items() if kind == survey.kind)
        project = replace(project, task=project.task if _KINDS.get(project.task or "") == survey.kind else found)
        if survey.single and project.task != "kto":
            raise DataError(
                f"{project.data} holds answers with a label, and {project.task} learns pairs: `chosen` and `rejected` "
                "of each record. Answers with a label are learned with --task kto."
            )
    task = project.task or "lm"
    if project.teacher is not None and task not in ("lm", "chat"):
        raise DataError(
            f"{project.data}: --task distill reads texts or conversations, and these are for --task {task}."
        )
    project = replace(project, task=task, output=project.output or f"runs/{task}")
    prefers = task in preference_losses.TASKS
    turns = survey.turns if survey is not None else prefers or task == "chat"
    values: dict[str, Any] = {"source_keys": survey.keys if survey is not None else {}, "num_labels": 7, "plain": True}
    values |= {"turns": turns, "prefers": prefers}
    sizes = default_sizes(256, machines.ranks)
    least = _least_recipe(project, survey, turns)
    if least is not None:
        # Template and classes are the model's own, if it has them.
        values["plain"] = turns and load_tokenizer(least).chat_template is None
        if values["plain"]:
            least = _least_recipe(project, survey, turns, template="plain")
    usual = 1024 if prefers else {"chat": 1024, "classify": 512}.get(task, 256)
    positions = usual if least is None else _positions(least, task)
    if survey is not None:
        if survey.labels:
            known = pretrained_classes(least, classification.HEAD) if least is not None else None
            named = [classes for classes in (known, survey.classes) if classes is not None]
            values["num_labels"] = ClassList.of([*survey.labels], None, named, survey.places).count
        sizes = _size_to(survey, least, positions, machines.ranks, given)
    elif least is not None:
        sizes = default_sizes(min(1024, positions), machines.ranks)
    summary = [f"Found in {survey.line()}."] if survey is not None else []
    unequal = _unequal_classes(survey.labels) if survey is not None else []
    lines = (*summary, *unequal, *sizes.warnings)
    return _Draft(project, sharing(machines, sizes.rows), {**values, "sizes": sizes}, lines)


def _unequal_classes(labels: Mapping[int | str, int]) -> list[str]:
    """Returns a line where some class is much larger than another."""
    ordered = sorted(labels, key=lambda label: labels[label])
    if not ordered or labels[ordered[-1]] < _UNEQUAL * labels[ordered[0]]:
        return []
    most, least = ordered[-1], ordered[0]
    return [
        f"Class {most} has {labels[most]:,} documents, and {least} {labels[least]:,}: with "
        "task.class_weights=balanced each class counts alike."
    ]


def _size_to(
    survey: SourceSurvey, recipe: Recipe | None, positions: int, ranks: int, given: Mapping[str, Any]
) -> RecipeSizes:
    """Sizes a recipe; without a pretrained model's tokenizer, a token is taken for three bytes."""
    lengths = [len(text.encode()) // 3 + 1 for text in survey.texts]
    if recipe is not None:
        lengths = token_lengths(survey, recipe)
    packing = {"text": "split", "conversations": "documents", "labelled": "padded", "pairs": "pairs"}[survey.kind]
    longest = min(1024 if packing == "split" else 4096, positions)
    return size_recipe(survey.documents, lengths, longest, ranks, packing=packing, most=positions, given=given)


def _least_recipe(
    project: Project, survey: SourceSurvey | None, turns: bool, template: str | None = None
) -> Recipe | None:
    """Returns a recipe that opens the pretrained model, with a template if it writes turns; None without a model."""
    if project.model is None:
        return None
    source = {"sample": 1} if survey is None else {"path": survey.path, **survey.keys}
    data = {"train": [source], "sequence_length": 2}
    least: dict[str, Any] = {"model": {"name": project.model}, "data": data, "length": {"steps": 1}}
    if project.task == "classify" or project.task in preference_losses.TASKS:
        least["task"] = classification.NAME if project.task == "classify" else project.task
    if turns:
        least["chat"] = {"template": template}
    return validate_recipe(least)


def _positions(recipe: Recipe, task: str) -> int:
    """Returns the positions that the model knows; many where it names none."""
    config = resolve_model_config(recipe, classification.HEAD if task == "classify" else NEXT_TOKEN)
    return longest_row(config) or 1 << 20


def _choose_launch(
    recipe: Recipe, machines: Machines, *, custom: bool
) -> tuple[dict[str, str], str, str, tuple[str, ...]]:
    """Returns files of launches that fit, the name of the one to take, why, and what to change of the recipe with it.

    The files are launch files, `single` too, and the configs that they name, by their place in the project.
    """
    shipped = shipped_path(LAUNCH_FILES)
    changes: tuple[str, ...] = ()
    if custom:
        names = {"ddp", "fsdp"} if machines.ranks > 1 else set()
        launches = {name: launch_of_file(shipped / f"{name}.yaml", machines.ranks, 1) for name in names}
        chosen = "ddp" if names else "single"
        reason = UNPLANNED
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
    files = {}
    for name, text in sorted({"single": (shipped / "single.yaml").read_text(encoding="utf-8"), **texts}.items()):
        config = (yaml.safe_load(text).get("deepspeed_config") or {}).get("deepspeed_config_file")
        if config is not None:
            config_path = f"ds_configs/{Path(config).name}"
            text = text.replace(str(config), config_path)
            files[config_path] = (shipped_path("ds_configs") / Path(config).name).read_text(encoding="utf-8")
        files[f"{LAUNCH_FILES}/{name}.yaml"] = text
    return files, chosen, reason, changes


def _seen_from(folder: Path, project: Project) -> Project:
    """Returns the project with relative paths that count from the folder, where its commands are given."""

    def seen(path: str | None) -> str | None:
        if path is None or Path(path).is_absolute() or folder.resolve() == Path.cwd():
            return path
        return os.path.relpath(path, folder.resolve())

    # A name without a directory of that name is the hub's.
    model, teacher = (seen(n) if Path(n or "").is_dir() else n for n in (project.model, project.teacher))
    return replace(project, model=model, teacher=teacher, data=seen(project.data))


def _render(name: str, project: Project, **values: object) -> str:
    return _FILES.get_template(f"{name}.jinja").render(**vars(project), classifier=classification.NAME, **values)
