"""The environment that a launch file gives its workers, computed without starting one and without torch.

`accelerate launch` tells its workers by environment variables. What it would export for a launch file is worked out
here; from there on it is what a worker does: `check_processes`, `launch_of_environment`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.provenance import flat
from finetune.distributed.launch.launch_config import (
    Launch,
    check_processes,
    check_tasks,
    copies_that_fit,
    launch_of_environment,
    number_of,
    threads_each,
)
from finetune.distributed.launch.launch_file import read_launch_file
from finetune.distributed.launch.launch_schema import KEYS, LaunchFile, least_of
from finetune.utils.errors import BackendError


@dataclass(frozen=True)
class PredictedEnvironment:
    """The launch that a launch file, the launcher's options and its environment would make."""

    launch: Launch
    env: dict[str, str]
    """The environment of a worker."""
    exported: dict[str, str]
    """The part of it that the launcher sets."""
    asked: LaunchFile
    """The launch file, with the launcher's options in place of what it says; the defaults without one."""
    written: dict[str, Any]
    """The keys that the file gives, dotted."""
    options: dict[str, Any]
    """The launcher's options."""
    local: int
    """Processes on this machine."""


def predict_environment(
    config_file: str | None, options: Mapping[str, str], env: Mapping[str, str]
) -> PredictedEnvironment:
    """Works out the launch that workers would be asked for.

    Args:
        config_file: The launch file; None: a plain `python scripts/train.py`, or whatever `env` says.
        options: The launcher's options that differ from the file.
        env: The launcher's environment.

    Raises:
        BackendError: As a run would: the file cannot be used, or contradicts itself or the environment.
    """
    if config_file is None:
        if options:
            raise BackendError(f"--{next(iter(options))} is an option of a launch: name its file by --config_file.")
        world, local = (number_of(env, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        launch = launch_of_environment(env, world, None, threads_each(env, local))
        return PredictedEnvironment(launch, dict(env), {}, LaunchFile(distributed_type="NO"), {}, {}, local)
    file, chosen = read_launch_file(config_file), dict[str, Any]()
    for name, value in options.items():
        least = least_of(KEYS[name])
        if least is not None and not (value.isdecimal() and int(value) >= least):
            raise BackendError(f"--{name} takes a whole number from {least}, got {value or 'nothing'}.")
        chosen[name] = value if least is None else int(value)
    asked = file.model_copy(update=chosen)
    alone = asked.distributed_type == "NO"
    requested = asked.num_processes or (1 if alone else None)
    if requested is None:
        raise BackendError(f"{config_file} names no num_processes. Write it there, or give --num_processes.")
    world = number_of(env, "WORLD_SIZE") if alone else requested
    if asked.nnodes is None:
        check_tasks(env, asked.num_machines)
    local = requested // asked.num_machines
    if not alone and asked.elastic_machines is not None:
        world = asked.elastic_machines[-1] * local
    check_processes(config_file, file, chosen, world)
    by_file = file.exported()
    if asked.nnodes is not None:
        by_file |= copies_that_fit(by_file, world)
    ranks = {} if alone else {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": "0"}
    worker = {**env, **by_file, **ranks}
    launch = launch_of_environment(worker, world, config_file, threads_each(env, local), by_file)
    written = {key: value for key, value in flat(file.model_dump(exclude_unset=True)).items() if value is not None}
    return PredictedEnvironment(launch, worker, by_file | ranks, asked, written, chosen, local)


def elastic_launches(foreseen: PredictedEnvironment) -> Iterator[tuple[int, Launch]]:
    """Yields what an elastic launch may become, by the number of machines that it then has."""
    for machines in foreseen.asked.elastic_machines or ():
        world = machines * foreseen.local
        env = foreseen.env | copies_that_fit(foreseen.env, world)
        yield machines, launch_of_environment(env, world, foreseen.launch.file, exported=foreseen.exported)


def launch_of_file(file: Path, processes: int, replicate: int | None = None) -> Launch:
    """Returns the launch that a file asks for on any number of processes, whatever this machine and its environment.

    Args:
        processes: Instead of the file's.
        replicate: Hybrid shard: copies of the model, instead of the file's.

    Raises:
        BackendError: If it is no launch file, or asks for what is not offered.
    """
    exported = exported_by_file(file, processes, replicate)
    return launch_of_environment(exported, processes, str(file), exported=exported)


def exported_by_file(file: str | Path, processes: int, replicate: int | None) -> dict[str, str]:
    """Returns the variables that a launch of a file sets on any number of processes; see `launch_of_file`."""
    exported, copies = read_launch_file(str(file)).exported(), "PARALLELISM_CONFIG_DP_REPLICATE_SIZE"
    if int(exported.get(copies, 1)) > 1:
        exported[copies] = str(replicate or exported[copies])
        exported["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(processes // int(exported[copies]))
    return exported
