"""Notes that ranks leave each other while they train, beside their collectives."""

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from finetune.distributed.rendezvous_names import attempt_name

_TIMEOUT = timedelta(seconds=20)


class RankNotes:
    """Notes by name, as JSON has them, in the store of the process group, which must exist.

    The connection is its own: that of the process group is held by whoever waits for a note there. One thread at a time
    may use it. Methods raise a `RuntimeError` once the store is gone, or is not reached for 20 s.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        distributed: Any = torch.distributed
        if world_size == 1:
            self._store: Any = distributed.HashStore()
            return
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(*place, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
        self._store = distributed.PrefixStore(f"finetune/notes-{attempt_name()}", store)

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
