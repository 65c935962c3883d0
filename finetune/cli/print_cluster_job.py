"""Jobs for clusters, made of a recipe and a launch file: what `finetune launch --print-cluster` prints."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import jinja2

from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.distributed.resolve_config import resolve_for_devices
from finetune.utils.errors import BackendError, RecipeError
from finetune.utils.exit_codes import REQUEUE, USER_ERROR
from finetune.utils.quoting import shell_command, shell_word
from finetune.utils.shipped_files import LAUNCH_FILES, RECIPES, shipped_word

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FunctionLoader(
        lambda name: (Path(__file__).parent / "cluster_jobs" / f"{name}.jinja").read_text(encoding="utf-8")
    ),
    trim_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)

# Where a machine finds its rank, and the first machine's address and port; a launch file's port elsewhere.
_MEETING = {
    "k8s": {"rank": "$JOB_COMPLETION_INDEX"},
    "kubeflow": {"rank": "$PET_NODE_RANK", "first": "$PET_MASTER_ADDR", "port": "$PET_MASTER_PORT"},
}

# What the launch file must hold of options that the job gives each machine.
_PLACEHOLDERS = {"machine_rank": "0", "main_process_ip": "127.0.0.1", "main_process_port": "29500"}


def cluster_job(
    kind: str, recipe: Recipe, files: tuple[str, str], overrides: Sequence[str], options: Mapping[str, str], image: str
) -> str:
    """Returns a job that runs a recipe on a cluster, as the launch file says.

    Args:
        kind: slurm, k8s, kubeflow or sky.
        files: The launch file, and the recipe's file.
        overrides: Values that replace the recipe's, already in `recipe`.
        options: The launcher's options that were given.
        image: The image of the containers; "" if none was named.

    Raises:
        FinetuneError: If recipe, launch file and cluster contradict each other.
    """
    if given := [name for name in _PLACEHOLDERS if name in options]:
        raise BackendError(
            f"--{given[0]} differs from machine to machine or from job to job, and the job that is printed finds it "
            "out by itself. Leave it out."
        )
    if kind == "slurm" and image:
        raise BackendError("--image is for containers, and Slurm's nodes run what is installed on them. Leave it out.")
    if kind != "slurm" and not image:
        raise BackendError(
            f"--print-cluster {kind} prints a job of containers: name their image by --image. The files in docker/ "
            "build one."
        )
    foreseen = predict_environment(files[0], {**options, **_PLACEHOLDERS}, {})
    resolve_for_devices(recipe, foreseen.launch, foreseen.local, foreseen.env)
    words = [shipped_word(folder, file) for folder, file in zip((LAUNCH_FILES, RECIPES), files, strict=True)]
    output = recipe.output.dir
    for what, path in {"The launch file": words[0], "The recipe": words[1], "output.dir": output}.items():
        if kind != "slurm" and (os.path.isabs(path) or ".." in PurePosixPath(path).parts):
            raise RecipeError(
                f"{what} is {path}, which is not below the current folder. That folder is what the containers have, "
                "under another path: name it relative, such as runs/mine or recipe.yaml."
            )
    name = "finetune-" + re.sub("[^a-z0-9]+", "-", Path(words[1]).stem.lower()).strip("-")[:40].strip("-")
    given_options = [word for option, value in options.items() for word in (f"--{option}", value)]
    command = shell_command(["finetune", "launch", "--config_file", words[0], *given_options, words[1], *overrides])
    nodes = foreseen.asked.num_machines
    machines = f"{nodes} machine{'s' if nodes > 1 else ''} of {foreseen.local} GPU{'s' if foreseen.local > 1 else ''}"
    what = f"{shell_word(words[1])} under {shell_word(words[0])}"
    values = {
        "what": f"{what} on {machines}, as `finetune launch --print-cluster {kind}` printed it.",
        "first": f"{name}-0.{name}",
        "port": str(foreseen.written.get("main_process_port") or _PLACEHOLDERS["main_process_port"]),
        **_MEETING.get(kind, {}),
    }
    return _TEMPLATES.get_template(kind).render(
        values,
        kind=kind,
        command=command,
        name=name,
        nodes=nodes,
        local=foreseen.local,
        grace_s=math.ceil(recipe.guard.grace_s),
        image=image,
        output=shell_word(f"output.dir=/outputs/{output}"),
        requeue=REQUEUE,
        user_error=USER_ERROR,
    )
