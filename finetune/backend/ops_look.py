"""What a launch needs of DeepSpeed's native ops, looked at and left as it is."""

from dataclasses import dataclass

from finetune.backend import ops, start, toolchain
from finetune.backend.launch import Launch

# Two buffers of 1 MiB and two of 32 MiB, a process.
# Source: deepspeed 0.19.8, `allreduce_workspace` in `ops/csrc/cpu/comm/shm.cpp`.
_SHARED_BYTES = 66 * 2**20


@dataclass(frozen=True)
class Op:
    """A native op, as it is found."""

    name: str
    used_by: str
    build_s: float
    built: bool
    locked: bool
    """Whether somebody builds it, or a killed build left its lock behind."""
    lacking: tuple[str, str] | None
    """What is missing to compile it, and the command that installs that."""


def look(launch: Launch | None) -> list[Op]:
    """The ops that a launch needs, or, without one, all that any launch could need here."""
    toolchain.own_tools_first()
    toolchain.own_folder()
    names: list[ops.Op] = [*ops._OPS] if launch is None else start.needed_ops(launch)
    found = []
    for name in dict.fromkeys(op for one in names for op in (*ops._OPS[one].first, one)):
        spec = ops._OPS[name]
        lacking = None if ops._came_with_deepspeed(name) else toolchain.lacking(libaio=name == "async_io")
        locked = (ops._folder(name) / "lock").exists()
        found.append(Op(name, spec.used_by, spec.build_s, ops.is_built(name), locked, lacking))
    return found


def shared_bytes(launch: Launch | None, local: int) -> int:
    """Bytes of shared memory that the collectives of `local` processes map, as far as it is known."""
    needs = launch is not None and "shm_comm" in start.needed_ops(launch)
    return _SHARED_BYTES * local if needs else 0
