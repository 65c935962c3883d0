"""The launch file that fits a recipe on this machine, as `finetune plan` recommends it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetune.config.recipe_schema import Recipe
from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.launch.launch_file import read_launch_file
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.errors import RecipeError
from finetune.utils.shipped_files import launch_file

if TYPE_CHECKING:
    from finetune.planning.step_time import Machines

UNPLANNED = "the simplest that uses this machine; a custom task is not planned"
"""Reason for the launch of a task that a plan cannot count."""

# Keys that change memory and speed.
_NOT_LEARNED = ("batch.micro_size=", "model.gradient_checkpointing=")


@dataclass(frozen=True)
class LaunchChoice:
    """A launch file for a run on this machine."""

    file: str
    name: str
    num_processes: int
    differs: bool
    """True if the file says another number of processes."""
    changes: tuple[str, ...]
    """Overrides that make it fit, and change nothing that is learned."""
    reason: str

    def line(self) -> str:
        """Returns a line for people."""
        processes = f"{self.num_processes} process{'es' if self.num_processes != 1 else ''}"
        more = f" With {' '.join(self.changes)} it fits." if self.changes else ""
        return f"{self.name} on {processes}: {self.reason}.{more} (--config_file takes another.)"


def choose_launch(recipe: Recipe, machines: "Machines") -> LaunchChoice:
    """Returns the simplest launch that fits.

    Raises:
        FinetuneError: If none does, or only with changes to what is learned.
    """
    from finetune.planning.planner import make_plan

    planned = ":" not in recipe.task.name and recipe.length.steps != 0
    if planned:
        task, known = recipe.task, BUILT_IN.get(recipe.task.name)
        if known is not None and known.rows.labels in ("class", "tag") and task.num_labels is None:
            # Nobody has counted the classes yet, and the size of a head decides nothing.
            task = task.model_copy(update={"num_labels": 2})
        plan = make_plan(recipe.model_copy(update={"task": task}), machines)
        reason, changes, candidate = plan.advice.reason, plan.advice.changes, plan.advice.candidate
        here = f"On this machine ({machines.gpus} x {machines.gpu.memory_gib:.0f} GiB)"
        if candidate is None:
            raise RecipeError(f"{here} {reason}")
        if learned := [change for change in changes if not change.startswith(_NOT_LEARNED)]:
            raise RecipeError(
                f"{here} {reason}. That learns something else ({', '.join(learned)}), so it is not done unasked: add "
                f"{' '.join(changes)} to the command, or name a launch file by --config_file."
            )
        name, file = candidate.name, str(candidate.launch.file)
    else:
        name = "ddp" if machines.ranks > 1 else "single"
        file, reason, changes = launch_file(name), UNPLANNED, ()
    written = read_launch_file(file)
    if written.num_machines > 1:
        raise RecipeError(
            f"{file} is for {written.num_machines} machines, and not started unasked: --config_file {name}."
        )
    differs = name != "single" and written.num_processes != machines.ranks
    return LaunchChoice(file, name, machines.ranks, differs, changes, reason)


def choose_for_command(recipe: Recipe, options: Mapping[str, str]) -> LaunchChoice:
    """Returns the simplest launch that fits on this machine, or on as many of its processes as the command asks for.

    Args:
        options: The launcher's options that were given.

    Raises:
        FinetuneError: As `choose_launch`, or if the options are of a run on several machines.
    """
    if several := [name for name in ("machine_rank", "main_process_ip") if name in options]:
        raise RecipeError(
            f"--{several[0]} is for a run on several machines, whose launch file is not chosen here. Name one by "
            "--config_file; `finetune plan RECIPE --nodes N --write FILE` writes it."
        )
    asked = options.get("num_processes")
    if asked is None:
        return choose_launch(recipe, sharing(this_machine(), recipe.batch.global_size))
    if not asked.isdecimal() or int(asked) < 1:
        raise RecipeError(f"--num_processes takes a whole number from 1, got {asked or 'nothing'}.")
    return choose_launch(recipe, replace(this_machine(), gpus=int(asked)))


def sharing(machines: "Machines", rows: int) -> "Machines":
    """Returns as many of a machine's processes as share a global batch evenly."""
    return replace(machines, gpus=max(number for number in range(1, machines.gpus + 1) if rows % number == 0))


def this_machine() -> "Machines":
    """Returns this machine as a plan takes it: its GPUs, or two processes that share a CPU and its memory."""
    import torch

    from finetune.planning.step_time import Machines

    # Speeds are placeholders: no times are shown.
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        return Machines(Gpu("this machine's", "", memory, 100.0, 32.0, 300.0), torch.cuda.device_count(), 1, 50.0, 0.4)
    import psutil

    processes = min(2, os.cpu_count() or 1)
    memory = psutil.virtual_memory().total / 2**30 / processes
    return Machines(Gpu("this machine's share", "", memory, 1.0, 1.0, 100.0), processes, 1, 1.0, 0.4)
