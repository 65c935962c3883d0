"""The environment that a launch file gives its workers, computed without starting one and without torch.

`accelerate launch` tells its workers by environment variables. What it would export for a launch file is worked out
here; from there on it is what a worker does: `launch_config.check_file`, `launch_config.of_environment`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.distributed.launch import launch_config, launch_file, launch_key_docs
from finetune.distributed.launch.launch_config import Launch
from finetune.utils.errors import BackendError


@dataclass(frozen=True)
class LaunchEnvironment:
    """What a launch would ask for."""

    launch: Launch
    env: dict[str, str]
    """The environment of a worker."""
    exported: dict[str, str]
    """The part of it that the launcher sets."""
    written: dict[str, Any]
    """The launch file, by dotted keys."""
    options: dict[str, Any]
    """The launcher's options."""
    local: int
    """Processes on this machine."""

    def get(self, key: str) -> Any:
        """The value of a key outside the sections: option, file or default."""
        return self.options.get(key, self.written.get(key, launch_key_docs.KNOWN[key].default))


def read_launch_environment(
    config_file: str | None, options: Mapping[str, str], env: Mapping[str, str]
) -> LaunchEnvironment:
    """Works out what a launch would ask of its workers.

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
        world, local = (launch_config.number_of(env, name, 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        launch = launch_config.of_environment(env, world, None, launch_config.threads_each(env, local))
        return LaunchEnvironment(launch, dict(env), {}, {}, {}, local)
    written, chosen = launch_file.read(config_file), _typed(options)
    values = {**written, **chosen}
    kind = str(written["distributed_type"])
    requested = values.get("num_processes", 1 if kind == "NO" else None)
    if requested is None:
        raise BackendError(f"{config_file} names no num_processes. Write it there, or give --num_processes.")
    world = launch_config.number_of(env, "WORLD_SIZE", 1) if kind == "NO" else requested
    launch_config.check_file(config_file, values, world)
    local = requested // values.get("num_machines", 1)
    exported = launch_file.exported(kind, written)
    set_by_file = frozenset(exported)
    if kind != "NO":
        exported |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": "0"}
    worker = {**env, **exported}
    threads = launch_config.threads_each(env, local)
    launch = launch_config.of_environment(worker, world, config_file, threads, set_by_file)
    return LaunchEnvironment(launch, worker, exported, written, chosen, local)


# The key of hybrid shard's copies.
_COPIES = "parallelism_config.parallelism_config_dp_replicate_size"


def copies_and_parts(file: Path) -> tuple[int, int]:
    """What a launch file has ranks divided into.

    Returns:
        Copies of the model, each cut among ranks of its own; and ranks that share rows, whether they split these or
        layers.

    Raises:
        BackendError: If it is no launch file.
    """
    written = launch_file.read(str(file))
    sizes = (written.get(f"parallelism_config.parallelism_config_{name}_size", 1) for name in ("sp", "tp"))
    return int(written.get(_COPIES, 1)), math.prod(map(int, sizes))


def launch_of_file(file: Path, processes: int, replicate: int | None = None) -> Launch:
    """What a launch file asks for on any number of processes, whatever this machine and its environment are.

    Args:
        processes: Instead of the file's.
        replicate: Hybrid shard: copies of the model, instead of the file's.

    Raises:
        BackendError: If it is no launch file, or asks for what is not offered.
    """
    written = launch_file.read(str(file))
    kind = str(written["distributed_type"])
    if int(written.get(_COPIES, 1)) > 1:
        written[_COPIES] = replicate or written[_COPIES]
        written[_COPIES.replace("replicate", "shard")] = processes // int(written[_COPIES])
    exported = launch_file.exported(kind, written)
    return launch_config.of_environment(exported, processes, str(file), exported=frozenset(exported))


def _typed(options: Mapping[str, str]) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for name, value in options.items():
        least = launch_key_docs.KNOWN[name].least
        if least is not None and not (value.isdecimal() and int(value) >= least):
            raise BackendError(f"--{name} takes a whole number from {least}, got {value or 'nothing'}.")
        typed[name] = value if least is None else int(value)
    return typed
