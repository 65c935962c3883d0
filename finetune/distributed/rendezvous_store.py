"""What the ranks of a launch tell each other before they form a process group."""

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from finetune.distributed.launch import machine_facts
from finetune.distributed.launch.machine_facts import MachineFacts
from finetune.distributed.rank_notes import AGENT, RankNotes, connect, failures_told
from finetune.distributed.rendezvous_names import TRIAL, machine_name, rank_name
from finetune.utils import errors, orphan_watch

_numbers = itertools.count()

# How long ranks wait for each other: some start later, one reads the base's files or counts the network for all, or
# still tries a micro-batch, and large models load slowly.
_PATIENCE = timedelta(hours=2)

# Places, and names of each, that a message lists.
_SHOWN = 4


def open_board() -> RankNotes:
    """Returns a board of its own for what ranks tell each other next; every rank must call it."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return RankNotes(rank, world, f"board-{next(_numbers)}", _PATIENCE)


def from_main(make: Callable[[], Any]) -> Any:
    """Returns what rank 0 makes, as JSON has it; every rank must call it, and the others do not call `make`.

    Raises:
        FinetuneError, LostRankError: As `make` does on rank 0, on every rank.
    """
    notes = open_board()
    if notes.rank == 0:
        with failures_told():
            note = make()
        notes.write("made", note)
        for other in range(1, notes.world_size):
            notes.wait_for(f"read by {other}")  # the notes may end with this process
    else:
        note = notes.wait_for("made")
        notes.write(f"read by {notes.rank}", True)
    return note


def gather_notes(note: Any) -> list[Any]:
    """Returns what each rank has noted, as JSON has it, in their order; every rank calls it."""
    notes = open_board()
    notes.write(str(notes.rank), note)
    return [notes.wait_for(str(other)) for other in range(notes.world_size)]


def check_machines(recipe: Mapping[str, Any]) -> None:
    """Raises a `BackendError` on every rank if machines differ in recipe, code or versions; every rank must call it.

    Launchers compare that too, where all machines are started by `finetune launch` and their number is fixed.
    """
    if not orphan_watch.on_several_machines():
        return
    machine, machines = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    notes = open_board()
    if os.environ["LOCAL_RANK"] == "0":
        sizes = {"num_machines": machines, "num_processes": notes.world_size}
        notes.write(f"machine {machine}", asdict(MachineFacts.of_here(recipe, rank=machine, verb="launch", **sizes)))

    def compare() -> None:
        facts = [MachineFacts.from_json(notes.wait_for(f"machine {number}")) for number in range(machines)]
        if differences := machine_facts.find_differences(facts):
            text = f"The machines cannot train together, and nothing was trained. {' '.join(differences)}"
            raise errors.BackendError(text)

    from_main(compare)


def meet() -> None:
    """Connects to the store of the launch, through which the other ranks hear of an error from then on."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        connect(int(os.environ.get("RANK", "0")), _PATIENCE)


def check_inputs(inputs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns rank 0's inputs, by names for messages, if all ranks start from the same; every rank must call it.

    A section that a rank leaves out is compared between the others: what is read once a machine.

    Raises:
        BackendError: On every rank, with the ranks or machines that differ from rank 0, and in what.
    """
    notes = open_board()
    peer_name = machine_name() if orphan_watch.on_several_machines() else rank_name(notes.rank)
    notes.write(str(notes.rank), [peer_name, inputs])

    def compare() -> dict[str, dict[str, Any]]:
        here, ours = notes.wait_for("0")
        apart: dict[str, dict[str, None]] = {}
        for peer, theirs in (notes.wait_for(str(other)) for other in range(1, notes.world_size)):
            for section in (name for name in ours if name in theirs):
                for name, _ in machine_facts.unequal(ours[section], theirs[section]):
                    apart.setdefault(peer, {})[name] = None
        if apart:
            reports = [
                f"{peer} has other content than {here} in {', '.join([*names][:_SHOWN])}"
                + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
                for peer, names in apart.items()
            ]
            raise errors.BackendError(
                f"The ranks do not start from the same inputs, and nothing was trained: {'; '.join(reports[:_SHOWN])}. "
                "Copy the same files to every machine, and let nothing change them while a run starts."
            )
        return dict(ours)

    return dict(from_main(compare))


def environment_apart(name: str) -> dict[str, str]:
    """Returns the environment of a process that a rank starts, and that meets those of other ranks, not the ranks."""
    env = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_ERROR_FILE"}
    # The store is there already.
    return env | {TRIAL: name, AGENT: "True"}
