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

# What Accelerate exports only where the launch file says so, or says anything else than its default.
_IF_WRITTEN = ("deepspeed_config.zero3_init_flag", *launch_key_docs.OWN)
_IF_CHOSEN = ("gpu_ids", "debug")
_NUMBERS = ("num_processes", "machine_rank", "main_process_port", "max_restarts")


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
        world, local = (int(env.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        launch = launch_config.of_environment(env, world, None, launch_config.threads_each(env, local))
        return LaunchEnvironment(launch, dict(env), {}, {}, {}, local)
    written, chosen = launch_file.read(config_file), _typed(options)
    kind = str(written["distributed_type"])
    requested = chosen.get("num_processes", written.get("num_processes", 1 if kind == "NO" else None))
    if requested is None:
        raise BackendError(f"{config_file} names no num_processes. Write it there, or give --num_processes.")
    machines = int(written.get("num_machines") or 1)
    local = 1 if kind == "NO" else int(requested) // machines
    launch_config.check_file(config_file, written, chosen.get("num_processes"), local * machines)
    exported = _exported(kind, written)
    if kind != "NO":
        exported |= {"WORLD_SIZE": str(local * machines), "LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": "0"}
    worker = {**env, **exported}
    launch = launch_config.of_environment(worker, local * machines, config_file, launch_config.threads_each(env, local))
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
    return launch_config.of_environment(_exported(kind, written), processes, str(file))


def _typed(options: Mapping[str, str]) -> dict[str, Any]:
    for name, value in options.items():
        if name in _NUMBERS and not value.isdecimal():
            raise BackendError(f"--{name} takes a whole number, got {value}.")
    return {name: int(value) if name in _NUMBERS else value for name, value in options.items()}


def groups(kind: str, written: Mapping[str, Any]) -> dict[str, launch_key_docs.Key]:
    """The keys that a launch of a kind, in Accelerate's words, listens to."""
    known = dict(launch_key_docs.GENERAL)
    if kind == "FSDP":
        known |= launch_key_docs.FSDP
    if kind == "DEEPSPEED":
        known |= launch_key_docs.DEEPSPEED
    if kind != "NO" and any(key.startswith("parallelism_config.") for key in written):
        known |= launch_key_docs.PARALLELISM
    return known


def _exported(kind: str, written: Mapping[str, Any]) -> dict[str, str]:
    """What `accelerate launch` exports for a launch file.

    Source: accelerate 1.15, `utils/launch.py`, for the variables that this toolkit reads.
    """
    flags = {"FSDP": "ACCELERATE_USE_FSDP", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED"}
    found = {flags[kind]: "true"} if kind in flags else {}
    if kind == "NO":
        found["ACCELERATE_USE_CPU"] = str(bool(written.get("use_cpu", False)))
    if kind != "NO" and any(key.startswith("parallelism_config.") for key in written):
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    for name, key in groups(kind, written).items():
        value = written.get(name, key.default)
        silent = (name in _IF_WRITTEN and name not in written) or (name in _IF_CHOSEN and value == key.default)
        if key.variable is not None and value is not None and not silent:
            found[key.variable] = str(value).lower() if isinstance(value, bool) else str(value)
    return found
