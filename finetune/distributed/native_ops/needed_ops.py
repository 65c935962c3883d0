"""The native ops that a launch needs, and whether they are built."""

from dataclasses import dataclass

import torch

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.native_ops import native_ops, toolchain


def needed_ops(launch: Launch) -> list[native_ops.Op]:
    """The native DeepSpeed ops that a launch needs."""
    if not launch.uses_deepspeed:
        return []
    names: list[native_ops.Op] = [] if torch.cuda.is_available() else ["shm_comm"]
    if launch.offload_optimizer != "none":
        names.append("cpu_adam")
    if "nvme" in (launch.offload_params, launch.offload_optimizer):
        names.append("async_io")
    return names


# Two buffers of 1 MiB and two of 32 MiB, a process.
# Source: deepspeed 0.19.8, `allreduce_workspace` in `ops/csrc/cpu/comm/shm.cpp`.
_SHARED_BYTES = 66 * 2**20


@dataclass(frozen=True)
class NeededOp:
    """A native op, as it is found."""

    name: str
    used_by: str
    build_s: float
    built: bool
    locked: bool
    """Whether somebody builds it, or a killed build left its lock behind."""
    lacking: tuple[str, str] | None
    """What is missing to compile it, and the command that installs that."""


def look(launch: Launch | None) -> list[NeededOp]:
    """The ops that a launch needs, or, without one, all that any launch could need here."""
    toolchain.own_tools_first()
    toolchain.own_folder()
    names: list[native_ops.Op] = [*native_ops.OPS] if launch is None else needed_ops(launch)
    found = []
    for name in dict.fromkeys(op for one in names for op in (*native_ops.OPS[one].first, one)):
        spec = native_ops.OPS[name]
        lacking = None if native_ops.came_with_deepspeed(name) else toolchain.lacking(libaio=name == "async_io")
        locked = (native_ops.build_folder(name) / "lock").exists()
        found.append(NeededOp(name, spec.used_by, spec.build_s, native_ops.is_built(name), locked, lacking))
    return found


def shared_bytes(launch: Launch | None, local: int) -> int:
    """Bytes of shared memory that the collectives of `local` processes map, as far as it is known."""
    needs = launch is not None and "shm_comm" in needed_ops(launch)
    return _SHARED_BYTES * local if needs else 0
