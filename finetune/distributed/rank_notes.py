"""Notes that ranks leave each other beside their collectives: where they are, and that one has failed."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from finetune.distributed.rendezvous_names import attempt_name, rank_name
from finetune.utils import errors
from finetune.utils.errors import FinetuneError
from finetune.utils.exit_codes import LostRankError, lost_peer

AGENT = "TORCHELASTIC_USE_AGENT_STORE"

_connected: list[Any] = []
"""This process's first connection to the store of its launch, kept to its end: rank 0 may host that, and ranks that are
ahead may ask it for the process group already."""

_TIMEOUT = timedelta(seconds=20)

# So long one that fails waits for the others to hear of it, or to fail as well: the notes may end with it.
_HEARD_S = 5.0


class RankNotes:
    """Notes by name, as JSON has them, in the store of the launch, which must be there.

    The connection is its own: that of the process group is held by whoever waits for a note there. One thread at a time
    may use it. Methods raise a `RuntimeError` once the store is gone, or is not reached for 20 s.
    """

    def __init__(self, rank: int, world_size: int, board: str = "notes", patience: timedelta = _TIMEOUT) -> None:
        """
        Args:
            board: Ranks read the notes on the same board only.
            patience: How long ranks wait for each other.
        """
        self.rank, self.world_size, self.board, self._patience = rank, world_size, board, patience
        distributed: Any = torch.distributed
        store = distributed.HashStore() if world_size == 1 else connect(rank, patience)
        self._store: Any = distributed.PrefixStore(f"finetune/{board}-{attempt_name()}", store)
        self._failures = _failures_in(store)

    def write(self, name: str, note: Any) -> None:
        """Leaves a note, in the place of an older one."""
        self._store.set(name, json.dumps(note))

    def write_first(self, name: str, note: Any) -> Any:
        """Leaves a note unless there is one; returns the one that is there now."""
        return json.loads(self._store.compare_set(name, "", json.dumps(note)))

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns those of some notes that are there; does not wait for any."""
        there = list(names) if self._store.check(list(names)) else [name for name in names if self._store.check([name])]
        return {name: json.loads(value) for name, value in zip(there, self._store.multi_get(there), strict=True)}

    def wait_for(self, name: str) -> Any:
        """Returns a note once it is there.

        Raises:
            BackendError: If it does not come within `patience`.
            FinetuneError, LostRankError: If another rank has failed meanwhile; see `read_failure`.
        """
        began = time.monotonic()
        while not (notes := self.read([name])):
            if (failure := self.read_failure()) is not None:
                self._failures.set(f"left/{self.rank}", "")
                raise failure
            waited_s = time.monotonic() - began
            if waited_s > self._patience.total_seconds():
                raise errors.BackendError(
                    f"{rank_name(self.rank)} has waited for other ranks for {waited_s:.0f} s, and they neither came "
                    "nor failed. Look at what their machines do, such as a file system that does not answer."
                )
            time.sleep(min(1.0, 0.02 + waited_s / 8))
        return notes[name]

    def read_failure(self) -> FinetuneError | LostRankError | None:
        """Returns the error of another rank that has failed: its own if that is one of a user; None without any."""
        note: dict[str, Any] = json.loads(self._failures.get("first")) if self._failures.check(["first"]) else {}
        if not note or note["rank"] == self.rank:
            return None
        kind: type[FinetuneError] | None = getattr(errors, note["error"], None)
        return LostRankError(f"{note['place']} has failed: {note['text']}") if kind is None else kind(note["text"])


def _failures_in(store: Any) -> Any:
    """Returns the part of a launch's store in which ranks say that they have failed."""
    distributed: Any = torch.distributed
    return distributed.PrefixStore(f"finetune/failures-{attempt_name()}", store)


@contextmanager
def failures_told() -> Iterator[None]:
    """Tells the other ranks of an error inside, whatever they wait for."""
    try:
        yield
    except Exception as error:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        # Who has not met the others yet is seen by the launcher alone.
        if world > 1 and _connected and not lost_peer(error):
            with suppress(RuntimeError):
                _tell(_failures_in(_connected[0]), error, rank, world)
        raise


def _tell(failures: Any, error: Exception, rank: int, world: int) -> None:
    known = isinstance(error, FinetuneError)
    text = str(error) if known else " ".join(f"{type(error).__name__}: {error}".split())[:200]
    note = {"rank": rank, "place": rank_name(rank), "error": type(error).__name__ if known else "", "text": text}
    failures.compare_set("first", "", json.dumps(note))
    failures.set(f"left/{rank}", "")
    end = time.monotonic() + (0 if torch.distributed.is_initialized() else _HEARD_S)
    # The rank that keeps the store goes last: torch prints a trace of each question that is left without an answer.
    for what in ("left", "gone") if _hosts_store(rank) else ("left",):
        while time.monotonic() < end and not failures.check([f"{what}/{o}" for o in range(world) if o != rank]):
            time.sleep(0.05)
    failures.set(f"gone/{rank}", "")


def _hosts_store(rank: int) -> bool:
    return os.environ.get(AGENT) != "True" and rank == 0


def connect(rank: int, timeout: timedelta) -> Any:
    """Returns the store of the launch: the launcher keeps it where it can, else rank 0."""
    distributed: Any = torch.distributed
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = _hosts_store(rank)
    # `multi_tenant`: the process group of this very process shares the port later on.
    store = distributed.TCPStore(*address, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=hosts)
    if not _connected:
        _connected.append(store)
    return store
