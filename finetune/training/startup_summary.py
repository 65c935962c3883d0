"""Lines that a run prints as it starts; all else that is known of it is in `run.json`."""

from finetune.checkpoint.resume_point import ResumePoint
from finetune.config.recipe_schema import Recipe
from finetune.distributed.backend import Backend
from finetune.distributed.held_memory import Memory
from finetune.distributed.verify_launch import RuntimeReport
from finetune.tasks.task import TaskData
from finetune.tasks.task_data import without_validation
from finetune.tasks.training_length import Length

# Of the labels, so that what they say is aligned.
_WIDTH = 10


def startup_summary(
    recipe: Recipe,
    backend: Backend,
    data: TaskData,
    length: Length,
    runtime: RuntimeReport,
    memory: Memory,
    resume: ResumePoint,
) -> list[str]:
    """Returns at most eight lines for a terminal of 80 columns, but for names and paths that are long."""
    offload = runtime.offload()
    lines = {
        "model": _model(recipe, runtime),
        "data": "\n".join([*data.report_lines, *without_validation(recipe, data)]),
        "steps": _steps(recipe, length, backend),
        "launch": f"{runtime.line()}, {backend.precision}" + (f", {offload}" if offload else ""),
        "memory": memory.line(),
        "directory": recipe.output.dir,
        "resume": "\n".join(resume.lines()),
    }
    found = []
    for label, text in lines.items():
        for line in filter(None, text.split("\n")):
            found.append(f"{label:<{_WIDTH}}{line}")
            label = ""
    return found


def _model(recipe: Recipe, runtime: RuntimeReport) -> str:
    name = recipe.model.name or (recipe.model.config or {}).get("model_type") or recipe.task.name
    how = [part for part in (recipe.model.quantization, "LoRA" if recipe.lora is not None else None) if part]
    free = runtime.num_trained
    share = (
        "all trained"
        if free == runtime.num_parameters
        else f"{_count(free)} trained ({free / runtime.num_parameters:.1%})"
    )
    return ", ".join([str(name), f"{_count(runtime.num_parameters)} parameters", share, *how])


def _count(number: int) -> str:
    """A number of parameters, short: 8.03 B."""
    for size, unit in ((10**9, " B"), (10**6, " M")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,}"


def _steps(recipe: Recipe, length: Length, backend: Backend) -> str:
    if not length.num_steps:
        return "none, evaluation only"
    batch, accumulation = recipe.batch, backend.accumulation
    ranks = f"{backend.world_size} process{'es' if backend.world_size != 1 else ''}"
    if backend.mesh.data_size != backend.world_size:
        ranks = f"{backend.mesh.data_size} group{'s' if backend.mesh.data_size != 1 else ''} of processes"
    split = f"{ranks} x {batch.micro_size} rows x {accumulation} micro-batch{'es' if accumulation != 1 else ''}"
    epochs = length.num_steps * batch.global_size / max(1, length.epoch_rows)
    return f"{length.num_steps:,} of {batch.global_size} rows = {split}; {epochs:.3g} epochs"
