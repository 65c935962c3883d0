"""Writes checkpoints: every rank its share, in the background, whole or not at all.

A save has two parts. The step waits for the first: each rank copies its pieces to host memory. The second runs in a
thread: tensors are put together one at a time, and go to files in a staging folder, and to the disk. When every rank
has written, which the ranks learn from the all-reduce of a later step, rank 0 writes the manifest and renames.
"""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import integrity
from finetune.checkpoint.snapshot import Files, Snapshot
from finetune.config.recipe_schema import ranking
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import warn
from finetune.utils import json_files
from finetune.utils.atomic_files import remove, sync

_INDEX = "model.safetensors.index.json"
NOT_FINITE = "a tensor holds numbers that are not finite"
# How libraries in Rust tell the system's number for an error.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on every rank."""

    step: int
    error: str | None
    """None if the checkpoint is there."""


class CheckpointWriter:
    """Saves a run's state, one checkpoint at a time. Its methods are called by all ranks alike."""

    def __init__(
        self,
        root: Path,
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
            root: The folder of the checkpoints.
            describe: Writes what belongs beside the weights (configuration, tokenizer) into a folder, on rank 0.
            broken: Names of folders whose content was found damaged.
            infinite: Buffers that may hold infinities, such as causal masks.
        """
        self._root, self._backend, self._describe = root, backend, describe
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
        """Whether a save has been started and its outcome is not known yet; the same on every rank."""
        return self._step is not None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank could not write."""
        return self._error is not None

    def newest(self) -> Path | None:
        """The newest checkpoint, as far as is known without reading it."""
        return integrity.newest(self._root, self._broken)

    def start(self, network: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """Copies everything to host memory and starts to write. Nothing may be active.

        Args:
            network: The network inside the prepared model.
            state: Goes into `state.json`; `step` names the folder, and pruning reads what begins with `validation_`.
        """
        assert not self.active
        self._step, self._state = int(state["step"]), state
        self._snapshot.take(network, optimizer)
        self._run(lambda: self._snapshot.write(self._staging, self._part(self._backend.rank)))

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
            failures = self._backend.sum(torch.tensor([float(self.failed)], device=self._backend.device))
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
    def _staging(self) -> Path:
        return self._target.with_name(self._target.name + integrity.STAGING)

    @property
    def _target(self) -> Path:
        assert self._step is not None
        return self._root / integrity.name_of(self._step)

    def _part(self, rank: int) -> Path:
        return self._staging / f"part-{rank}.json"

    def _seal(self) -> None:
        """What belongs to all ranks' tensors, the manifest, and the rename; on rank 0."""
        staging, model = self._staging, self._staging / "model"
        parts = [self._part(rank) for rank in range(self._backend.world)]
        files: Files = {}
        tensors: dict[str, Any] = {}
        for part in parts:
            content = json_files.read(part)
            files |= content["files"]
            tensors |= content["tensors"]
        self._describe(model)
        weights = {t["name"]: Path(t["file"]).name for t in tensors.values() if t["file"].startswith("model/")}
        if len(set(weights.values())) > 1:
            index = {"metadata": {}, "weight_map": weights}
            (model / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        state = staging / integrity.STATE
        state.write_text(
            json.dumps({**self._state, "tensors": tensors}, indent=1, default=str) + "\n", encoding="utf-8"
        )
        for path in (state, *(path for path in sorted(model.rglob("*")) if path.is_file())):
            if path.relative_to(staging).as_posix() not in files:
                files |= integrity.describe_file(staging, path)
        for part in parts:
            part.unlink()
        sync(model)
        facts = {key: value for key, value in self._state.items() if key == "step" or key.startswith("validation_")}
        integrity.seal(staging, self._target, files, facts)
        self._broken.discard(self._target.name)
        try:
            prune(self._root, keep=self._keep_newest, best_by=self._best_by, broken=self._broken)
        except OSError as error:
            # The new checkpoint is whole; that an old one could not be deleted is no reason to say otherwise.
            warn(f"An old checkpoint cannot be deleted: {error}")

    def _end(self, failed: bool) -> SaveOutcome:
        assert self._step is not None
        if failed and self._backend.is_main:
            # Before the ranks agree on the reason: after that, another may have begun to write the next one.
            clean(self._root)
        error = self._reason() if failed else None
        outcome = SaveOutcome(self._step, error)
        self._step, self._sealing, self._error, self._thread = None, False, None, None
        return outcome

    def _reason(self) -> str:
        """Why a rank failed, in the same words on every rank; the system's number for it is what travels."""
        if self._error is not None and self._error.errno in (None, errno.EDOM):
            warn(f"rank {self._backend.rank}: {self._error}")
        number = (self._error.errno or errno.EIO) if self._error is not None else 0
        worst = int(self._backend.max(torch.tensor([float(number)], device=self._backend.device)).item())
        return NOT_FINITE if worst == errno.EDOM else os.strerror(worst)


def prune(root: Path, *, keep: int, best_by: str | None, broken: Collection[str] = ()) -> None:
    """Deletes all checkpoints but the newest `keep` and, if asked, the one that is best by an evaluation's value.

    Only complete ones count and only complete ones are deleted; one that is being read stays until the next time.
    Call it from one process, after a checkpoint was sealed.

    Args:
        best_by: As `checkpoint.keep_best_by` has it.
        broken: Names of folders whose content was found damaged: they do not count either.

    Raises:
        OSError: If a folder cannot be deleted.
    """
    whole = list(integrity.list_complete(root, broken))
    staying = {folder for folder, _ in whole[:keep]}
    if best_by is not None:
        key, sign = ranking(best_by)
        scored = [(sign * m[key], folder) for folder, m in whole if m.get(key) is not None and math.isfinite(m[key])]
        staying |= {max(scored, key=lambda pair: pair[0])[1]} if scored else set()
    for folder, _ in whole:
        if folder not in staying:
            _delete(folder)


def _delete(folder: Path) -> None:
    doomed = folder.with_name(folder.name + integrity.DOOMED)
    # Open for writing: over NFS, only such files can be locked against others.
    with os.fdopen(integrity.open_manifest(folder, os.O_RDWR), "r+b") as opened:
        try:
            integrity.lock(opened.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
        folder.rename(doomed)
    shutil.rmtree(doomed)


def clean(root: Path) -> None:
    """Removes what a run that was cut short left half written or half deleted."""
    for path in root.glob("step-*"):
        if path.suffix in (integrity.STAGING, integrity.DOOMED):
            with suppress(OSError):
                remove(path)
