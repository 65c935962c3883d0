"""A key-value store for the ranks of a launch before they form a process group."""

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from finetune.distributed.launch import machine_facts
from finetune.distributed.launch.machine_facts import MachineFacts
from finetune.distributed.rank_notes import AGENT, connect, failures_in, failures_told, raise_failure
from finetune.distributed.rendezvous_names import TRIAL, attempt_name, machine_name, rank_name
from finetune.utils import errors, orphan_watch

_numbers = itertools.count()

# Places, and names of each, that a message lists.
_SHOWN = 4


class RendezvousStore:
    """Notes by name, as JSON has them, read within `patience`, in the store of the launch."""

    def __init__(self, rank: int, world: int, patience: timedelta) -> None:
        distributed: Any = torch.distributed
        self.number = next(_numbers)
        """Number of this store among those of this process; the same on every rank."""
        self._rank, self._patience = rank, patience
        if world == 1:
            self._store: Any = distributed.HashStore()
            return
        store = connect(rank, patience)
        self._store = distributed.PrefixStore(f"finetune/board-{attempt_name()}-{self.number}", store)
        self._failures = failures_in(store)

    def write(self, name: str, note: Any) -> None:
        """Leaves a note."""
        self._store.set(name, json.dumps(note))

    def has(self, name: str) -> bool:
        """Returns True if somebody has left a note."""
        return bool(self._store.check([name]))

    def read(self, name: str) -> Any:
        """Returns a note, for which it waits.

        Raises:
            BackendError: If it does not come within `patience`.
            FinetuneError, LostRankError: If another rank has failed meanwhile; see `raise_failure`.
        """
        began = time.monotonic()
        while not self.has(name):
            raise_failure(self._failures, self._rank)
            waited_s = time.monotonic() - began
            if waited_s > self._patience.total_seconds():
                raise errors.BackendError(
                    f"{rank_name(self._rank)} has waited for other ranks for {waited_s:.0f} s, and they neither came "
                    "nor failed. Look at what their machines do, such as a file system that does not answer."
                )
            time.sleep(min(1.0, 0.02 + waited_s / 8))
        return json.loads(self._store.get(name))


def from_main(make: Callable[[], Any], patience: timedelta) -> Any:
    """Returns what rank 0 makes, as JSON has it; every rank must call it, and the others do not call `make`.

    Args:
        patience: How long ranks wait for each other.

    Raises:
        FinetuneError, LostRankError: As `make` does on rank 0, on every rank.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return make()
    notes = RendezvousStore(rank, world, patience)
    if rank == 0:
        with failures_told():
            note = make()
        notes.write("made", note)
        for other in range(1, world):
            notes.read(f"read by {other}")  # the notes may end with this process
    else:
        note = notes.read("made")
        notes.write(f"read by {rank}", True)
    return note


def gather_notes(note: Any, patience: timedelta) -> list[Any]:
    """Returns what each rank has noted, as JSON has it, in their order; every rank calls it.

    Args:
        patience: How long ranks wait for each other.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    notes = RendezvousStore(rank, world, patience)
    notes.write(str(rank), note)
    return [notes.read(str(other)) for other in range(world)]


def check_machines(recipe: Mapping[str, Any], patience: timedelta) -> None:
    """Refuses machines that differ in recipe, code or versions; every rank must call it.

    Launchers compare that too, where all machines are started by `finetune launch` and their number is fixed.

    Args:
        recipe: Recipe with all overrides, as JSON has it.
        patience: How long ranks wait for each other.

    Raises:
        BackendError: On every rank, with what differs.
    """
    if not orphan_watch.on_several_machines():
        return
    named = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    rank, world, machine, machines = (int(os.environ[name]) for name in named)
    notes = RendezvousStore(rank, world, patience)
    if os.environ["LOCAL_RANK"] == "0":
        facts = MachineFacts.of_here(recipe, rank=machine, num_machines=machines, num_processes=world, verb="launch")
        notes.write(f"machine {machine}", facts.to_json())

    def compare() -> None:
        found = [MachineFacts.from_json(notes.read(f"machine {number}")) for number in range(machines)]
        if said := machine_facts.find_differences(found):
            raise errors.BackendError(f"The machines cannot train together, and nothing was trained. {' '.join(said)}")

    from_main(compare, patience)


def meet(patience: timedelta) -> None:
    """Connects to the store of the launch, through which the other ranks hear of an error from then on."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        connect(int(os.environ.get("RANK", "0")), patience)


def check_inputs(inputs: dict[str, dict[str, Any]], patience: timedelta) -> dict[str, dict[str, Any]]:
    """Refuses ranks that do not start from the same inputs; every rank must call it.

    Args:
        inputs: What must be the same, by names for messages. A section that a rank leaves out is compared between the
            others: what is read once a machine.
        patience: How long ranks wait for each other.

    Returns:
        Those of rank 0.

    Raises:
        BackendError: On every rank, with the ranks or machines that differ from rank 0, and in what.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    notes = RendezvousStore(rank, world, patience)
    notes.write(str(rank), [machine_name() if orphan_watch.on_several_machines() else rank_name(rank), inputs])

    def compare() -> dict[str, dict[str, Any]]:
        here, ours = notes.read("0")
        apart: dict[str, dict[str, None]] = {}
        for place, theirs in (notes.read(str(other)) for other in range(1, world)):
            for section in (name for name in ours if name in theirs):
                for name, _ in machine_facts.unequal(ours[section], theirs[section]):
                    apart.setdefault(place, {})[name] = None
        if apart:
            found = [
                f"{place} has other content than {here} in {', '.join([*names][:_SHOWN])}"
                + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
                for place, names in apart.items()
            ]
            raise errors.BackendError(
                f"The ranks do not start from the same inputs, and nothing was trained: {'; '.join(found[:_SHOWN])}. "
                "Copy the same files to every machine, and let nothing change them while a run starts."
            )
        return dict(ours)

    return dict(from_main(compare, patience))


def environment_apart(name: str) -> dict[str, str]:
    """Returns the environment of a process that a rank starts, and that meets those of other ranks, not the ranks."""
    env = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_ERROR_FILE"}
    # The store is there already.
    return env | {TRIAL: name, AGENT: "True"}
