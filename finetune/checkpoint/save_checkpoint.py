"""Writes checkpoints: every rank its share, in the background, whole or not at all.

A save has two parts. The step waits for the first: each rank copies its pieces to host memory. The second runs in a
thread: tensors are put together one at a time, and go to files of an unsealed checkpoint. When every rank has written,
which the ranks learn from the all-reduce of a later step, rank 0 writes the manifest and seals it.
"""

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import integrity, retention
from finetune.checkpoint.checkpoint_store import UNSEALED, CheckpointStore, name_of, sealed_name
from finetune.checkpoint.integrity import Files, put_file
from finetune.checkpoint.snapshot import Snapshot
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import warn
from finetune.utils import json_files
from finetune.utils.atomic_files import json_text
from finetune.utils.temporary_folders import temporary_folder

_INDEX = "model.safetensors.index.json"
NOT_FINITE = "a tensor holds numbers that are not finite"
# How libraries in Rust tell the system's number for an error.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a save, the same on every rank."""

    step: int
    error: str | None
    """None if the checkpoint is there."""


class CheckpointWriter:
    """Saves a run's state, one checkpoint at a time. Its methods are called by all ranks alike."""

    def __init__(
        self,
        store: CheckpointStore,
        backend: Backend,
        *,
        adapter_keys: dict[str, str] | None,
        describe: Callable[[Path], None],
        keep: int,
        best_by: str | None,
        broken: Collection[str] = (),
        infinite: Collection[str] = (),
    ) -> None:
        """
        Args:
            describe: Writes what belongs beside the weights (configuration, tokenizer) into a folder, on rank 0.
            broken: Names of checkpoints whose content was found damaged.
            infinite: Buffers that may hold infinities, such as causal masks.
        """
        self._store, self._backend, self._describe = store, backend, describe
        self._keep_newest, self._best_by = keep, best_by
        self._snapshot = Snapshot(backend, adapter_keys, infinite)
        self._broken = set(broken)
        self._thread: threading.Thread | None = None
        self._sealing = False
        self._step: int | None = None
        self._state: dict[str, Any] = {}
        self._error: OSError | None = None
        self._fault: BaseException | None = None

    @property
    def active(self) -> bool:
        """True while the outcome of a save is not known; the same on every rank."""
        return self._step is not None

    @property
    def busy(self) -> bool:
        """True while this rank is writing."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True if this rank could not write."""
        return self._error is not None

    def newest(self) -> str | None:
        """Address of the newest checkpoint, as far as is known without reading it."""
        return integrity.newest_address(self._store, self._broken)

    def start(self, network: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """Copies everything to host memory and starts to write. Nothing may be active.

        Args:
            network: The network inside the prepared model.
            state: Goes into `state.json`; `step` names it, and pruning reads what begins with `validation_`.
        """
        assert not self.active
        self._step, self._state = int(state["step"]), state
        self._snapshot.take(network, optimizer)
        self._run(self._write)

    def settle(self, *, busy: bool, failed: bool) -> SaveOutcome | None:
        """Takes the next step towards a whole checkpoint, if all ranks are ready for it.

        Args:
            busy: Whether any rank was still writing.
            failed: Whether any rank has failed. Both as agreed by all ranks.

        Returns:
            How the save ended, once it has.
        """
        self._raise_fault()
        if not self.active or busy:
            return None
        if self._thread is not None:
            self._thread.join()
        if not failed and not self._sealing:
            self._sealing = True
            if self._backend.is_main:
                self._run(self._seal)
            return None
        return self._end(failed)

    def finish(self) -> SaveOutcome | None:
        """Waits until the save under way has ended; None if there is none."""
        outcome: SaveOutcome | None = None
        while self.active and outcome is None:
            if self._thread is not None:
                self._thread.join()
            self._raise_fault()
            failures = self._backend.all_reduce_sum(torch.tensor([float(self.failed)], device=self._backend.device))
            outcome = self.settle(busy=False, failed=failures.item() > 0)
        return outcome

    def _run(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except OSError as error:
                self._error = error
            except BaseException as error:
                number = _OS_ERROR.search(str(error))
                if number is not None:
                    self._error = OSError(int(number[1]), str(error))
                else:
                    self._fault = error

        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    @property
    def _name(self) -> str:
        assert self._step is not None
        return name_of(self._step) + UNSEALED

    def _write(self) -> None:
        content = json_text(self._snapshot.write(self._store, self._name))
        put_file(self._store, self._name, f"part-{self._backend.rank}.json", content.encode())

    def _seal(self) -> None:
        """Writes what belongs to all ranks' tensors, and the manifest; on rank 0."""
        store, name = self._store, self._name
        files: Files = {}
        tensors: dict[str, Any] = {}
        parts = [f"part-{rank}.json" for rank in range(self._backend.world_size)]
        for part in parts:
            with store.open_file(name, part) as opened:
                content = json_files.parse(opened.read())
            files |= content["files"]
            tensors |= content["tensors"]
        with temporary_folder() as folder:
            self._describe(folder)
            weights = {t["name"]: Path(t["file"]).name for t in tensors.values() if t["file"].startswith("model/")}
            if len(set(weights.values())) > 1:
                index = {"metadata": {}, "weight_map": weights}
                (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
            state = json.dumps({**self._state, "tensors": tensors}, indent=1, default=str) + "\n"
            files |= put_file(store, name, integrity.STATE, state.encode())
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                files |= put_file(store, name, f"model/{path.relative_to(folder).as_posix()}", path.read_bytes())
        for part in parts:
            store.delete_file(name, part)
        facts = {key: value for key, value in self._state.items() if key == "step" or key.startswith("validation_")}
        integrity.seal_checkpoint(store, name, files, facts)
        self._broken.discard(sealed_name(name))
        try:
            retention.prune_checkpoints(store, keep=self._keep_newest, best_by=self._best_by, broken=self._broken)
        except OSError as error:
            # The new checkpoint is whole; that an old one could not be deleted is no reason to say otherwise.
            warn(f"An old checkpoint cannot be deleted: {error}")

    def _end(self, failed: bool) -> SaveOutcome:
        assert self._step is not None
        if failed and self._backend.is_main:
            # Before the ranks agree on the reason: after that, another may have begun to write the next one.
            self._store.delete_remains()
        error = self._reason() if failed else None
        outcome = SaveOutcome(self._step, error)
        self._step, self._sealing, self._error, self._thread = None, False, None, None
        return outcome

    def _reason(self) -> str:
        """Returns why a rank failed, in the same words on every rank; the system's number for it is what travels."""
        if self._error is not None and self._error.errno in (None, errno.EDOM):
            warn(f"rank {self._backend.rank}: {self._error}")
        number = (self._error.errno or errno.EIO) if self._error is not None else 0
        worst = int(self._backend.all_reduce_max(torch.tensor([float(number)], device=self._backend.device)).item())
        return NOT_FINITE if worst == errno.EDOM else os.strerror(worst)
