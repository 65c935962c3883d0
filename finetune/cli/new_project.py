"""Writes a small project that runs as it is: a recipe, the launch files that fit this machine, and what to do next."""

import json
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from finetune.config import recipe_paths
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.launch.launch_environment import launch_of_file
from finetune.models.model_config import resolve_model_config
from finetune.planning import recommendations
from finetune.planning.planner import make
from finetune.planning.step_time import Machines
from finetune.utils.errors import RecipeError
from finetune.utils.shipped_files import LAUNCH_FILES, shipped

TASKS = ("lm", "chat", "classify", "custom")


@dataclass(frozen=True)
class Project:
    """What a new project is to hold."""

    task: str = "lm"
    """One of `TASKS`."""
    model: str | None = None
    """A directory or a name on the hub; None for a small network that is trained from nothing."""
    data: str | None = None
    """A file, a glob or a directory; None for the built-in data."""
    adapters: str | None = None
    """"lora", "qlora", or None to train all weights."""


def write_project(folder: Path, project: Project) -> list[str]:
    """Writes the files of a new project.

    Returns:
        What was written and what to do next, a line each.

    Raises:
        FinetuneError: If the options contradict each other, a path leads nowhere, or a file is there already; nothing
            is written then.
    """
    _check_options(project)
    length = _row_length(project)
    recipe = validate_recipe(yaml.safe_load(_recipe(project, length)))
    recipe_paths.check(recipe)
    text = _recipe(_seen_from(folder, project), length)
    files = {}
    if project.task == "custom":
        files["task.py"] = _TASK
    launches, chosen, reason, changes = _choose_launch(recipe, custom=project.task == "custom")
    files |= launches
    command = " ".join(["finetune", "launch", "--config_file", chosen, "recipe.yaml", *changes])
    files["recipe.yaml"] = f"# {command}\n#\n# {chosen}: {reason}.\n{text}"
    files["README.md"] = _readme(project, command, recipe.output.dir)
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
    """The launch files that fit, the name of the one to take, why, and what to change of the recipe with it."""
    machines = this_machine()
    if custom:
        names = ("ddp", "fsdp") if machines.ranks > 1 else ()
        launches = {name: launch_of_file(shipped(LAUNCH_FILES) / f"{name}.yaml", machines.ranks, 1) for name in names}
        files = {name: recommendations.written(launch, 1) for name, launch in launches.items()}
        chosen = "ddp" if machines.ranks > 1 else "single"
        return _in_folder(files), chosen, "the simplest that uses this machine; a custom task is not planned", ()
    plan = make(recipe, machines, shipped(LAUNCH_FILES))
    if plan.advice.candidate is None:
        raise RecipeError(f"On this machine ({machines.gpus} x {machines.gpu.memory_gib:.0f} GiB) {plan.advice.reason}")
    chosen, reason = plan.advice.candidate.name, plan.advice.reason
    fitting = [name for name in plan.launches if plan.candidates[name, plan.kind].verdict == "fits"]
    near = [name for name in fitting if plan.launches[name].offload_params == "none"]
    files = {name: recommendations.written(plan.launches[name], 1) for name in {*(near or fitting), chosen}}
    return _in_folder(files), chosen, reason, plan.advice.changes


def _in_folder(launch_files: dict[str, str]) -> dict[str, str]:
    """Launch files, `single` among them, and the DeepSpeed configs that they name, by their place in the project."""
    files = {"single": (shipped(LAUNCH_FILES) / "single.yaml").read_text(encoding="utf-8"), **launch_files}
    found = {}
    for name, text in sorted(files.items()):
        config = (yaml.safe_load(text).get("deepspeed_config") or {}).get("deepspeed_config_file")
        if config is not None:
            place = f"ds_configs/{Path(config).name}"
            text = text.replace(str(config), place)
            found[place] = (shipped("ds_configs") / Path(config).name).read_text(encoding="utf-8")
        found[f"{LAUNCH_FILES}/{name}.yaml"] = text
    return found


def this_machine() -> Machines:
    """This machine as a plan takes it: its GPUs, or two processes that share a CPU and its memory."""
    import torch

    # Speeds matter for times, of which none is shown.
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        return Machines(Gpu("this machine's", "", memory, 100.0, 32.0, 300.0), torch.cuda.device_count(), 1, 50.0, 0.4)
    import psutil

    processes = min(2, os.cpu_count() or 1)
    memory = psutil.virtual_memory().total / 2**30 / processes
    return Machines(Gpu("this machine's share", "", memory, 1.0, 1.0, 100.0), processes, 1, 1.0, 0.4)


def _check_options(project: Project) -> None:
    """Raises `RecipeError` if the options contradict each other."""
    if project.adapters is not None and (project.model is None or project.task == "custom"):
        raise RecipeError(f"--{project.adapters} trains adapters of a pretrained model: name one with --model.")
    if project.task == "custom" and (project.model is not None or project.data is not None):
        raise RecipeError("--task custom builds its own model and data, in task.py: leave --model and --data out.")


def _seen_from(folder: Path, project: Project) -> Project:
    """The same with relative paths as they are written in the folder, where its commands are given."""

    def seen(path: str) -> str:
        apart = folder.resolve() != Path.cwd() and not Path(path).is_absolute()
        return os.path.relpath(path, folder.resolve()) if apart else path

    model, data = project.model, project.data
    # A name without a directory of that name is the hub's.
    return replace(
        project,
        model=seen(model) if model is not None and Path(model).is_dir() else model,
        data=seen(data) if data is not None else None,
    )


def _recipe(project: Project, row_length: int) -> str:
    """The text of the recipe."""
    if project.task == "custom":
        return "\n".join([_CUSTOM, _batch(), ""])
    pretrained = project.model is not None
    sections = [_model(project)]
    if not pretrained:
        sections.append("tokenizer:\n  vocab_size: 1024  # a byte-level BPE, trained on the data")
    source = f"path: {json.dumps(project.data)}" if project.data is not None else "sample: 4000"
    about = "" if project.data is not None else "  # built in; for your own: {path: FILE}"
    packing = "padded" if project.task == "classify" else "documents"
    sections.append(
        f"data:\n  train:\n    - {{{source}}}{about}\n  validation_fraction: 0.02\n"
        f"  sequence_length: {row_length}\n  packing: {packing}"
    )
    if project.task == "chat":
        sections.append("chat:\n  template: plain  # leave it out for a model that brings its own")
    if project.task == "classify":
        # The built-in stories are of 7 kinds.
        sections.insert(0, "task:\n  name: sequence_classification\n  num_labels: 7")
    rate = "2.0e-4" if project.adapters else "2.0e-5" if pretrained else "1.0e-3"
    sections += [
        _batch(),
        "length:\n  epochs: 1",
        f"optim:\n  lr: {rate}",
        "schedule:\n  name: cosine\n  warmup_fraction: 0.05",
        "eval:\n  every_steps: 50",
    ]
    if project.task == "lm":
        sections.append("sample:\n  prompt: Once upon a time\n  max_new_tokens: 60")
    return "\n".join([*sections, f"output:\n  dir: runs/{project.task}", ""])


def _batch() -> str:
    """Sixteen rows a step, or twice the processes where they do not share sixteen evenly."""
    ranks = this_machine().ranks
    rows = 16 if 16 % ranks == 0 else 2 * ranks
    return (
        f"batch:\n  global_size: {rows}  # rows of an optimiser step, over all processes\n"
        f"  micro_size: {min(4, rows // ranks)}"
    )


def _row_length(project: Project) -> int:
    """Tokens a row: 256 for a small network from nothing, else 1,024, or as many as the model knows positions."""
    if project.model is None:
        return 256
    data = {"train": [{"sample": 1}], "sequence_length": 2}
    least = validate_recipe({"model": {"name": project.model}, "data": data, "length": {"steps": 1}})
    config = resolve_model_config(least, num_labels=2 if project.task == "classify" else None)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(1024, positions) if positions is not None and positions > 0 else 1024


def _model(project: Project) -> str:
    if project.model is None:
        # 4 layers and a width of 128: a minute or two on two cores.
        kind = "bert" if project.task == "classify" else "llama"
        return (
            f"model:\n  config:\n    model_type: {kind}\n    hidden_size: 128\n    intermediate_size: 352\n"
            "    num_hidden_layers: 4\n    num_attention_heads: 4"
        )
    lines = ["model:", f"  name: {json.dumps(project.model)}"]
    lines += ["  quantization: nf4"] * (project.adapters == "qlora")
    lines += ["  gradient_checkpointing: true"]
    return "\n".join([*lines, *(["lora:", "  rank: 16"] if project.adapters else [])])


_CUSTOM = """task:
  name: task:build
  args: {width: 64}
length:
  epochs: 2
optim:
  lr: 1.0e-3
output:
  dir: runs/custom"""

_TASK = '''"""What the network is trained to do: to fit a function of eight numbers. Put your own task in its place."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from finetune.tasks import Batch, Task, TaskData


class Points:
    """Rows by number: made here; as well read from a file."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 8, generator=generator)
        self.targets = self.inputs.sin().sum(-1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: np.ndarray) -> Batch:
        return {"inputs": self.inputs[rows], "targets": self.targets[rows]}

    def num_targets(self, rows: np.ndarray) -> int:
        """How many terms `loss_sum` adds up for these rows."""
        return len(rows)


def build(width: int) -> Task:
    """The task; `task.args` of the recipe are the arguments."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def build_data(recipe, quiet):
        return TaskData(train=Points(2000, seed=1), validation=Points(200, seed=2))

    def build_model(recipe, data):
        torch.manual_seed(recipe.seed)
        return network()

    def build_skeleton(recipe, data):
        with torch.device("meta"):
            return network()

    def loss_sum(network, batch):
        predicted = network(batch["inputs"]).float()
        return functional.mse_loss(predicted, batch["targets"], reduction="sum")

    return Task(build_data=build_data, build_model=build_model, loss_sum=loss_sum, build_skeleton=build_skeleton)
'''


def _readme(project: Project, command: str, run: str) -> str:
    if project.task in ("lm", "chat"):
        prompt = "--chat --prompt 'Who are you?'" if project.task == "chat" else "--prompt 'Once upon a time'"
        then = f"    finetune generate {run} {prompt}"
    else:
        then = f"    finetune audit {run}                  # was each row used exactly once?"
    if project.adapters is not None:
        last = f"    finetune export {run} --as merged-16bit"
    else:
        last = "    finetune parity recipe.yaml --on single,ddp   # do two launch files follow one trajectory?"
    return f"""# A model, fine-tuned with finetune

`recipe.yaml` says what is learned, a file of `accelerate_configs/` says where it runs. Edit the recipe, then:

    {command}
{then}
{last}

The first command again resumes a run that was interrupted. `finetune plan recipe.yaml` says which launch files fit a
machine, `finetune explain recipe.yaml KEY` what a key means.
"""
