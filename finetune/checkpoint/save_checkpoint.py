"""Writes checkpoints when they are due: every rank its share, in the background, whole or not at all.

A save has two parts. The step waits for the first: each rank copies its pieces to host memory. The second runs in a
thread: tensors are put together one at a time, and go to files of an unsealed checkpoint. When every rank has written,
which the ranks learn from the all-reduce of a later step, rank 0 writes the manifest, seals it, and deletes older ones.
"""

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import integrity, row_ledger, run_facts
from finetune.checkpoint.best_evaluation import rank_of
from finetune.checkpoint.checkpoint_store import UNSEALED, CheckpointStore, name_of, sealed_name, step_of
from finetune.checkpoint.integrity import Files, put_file
from finetune.checkpoint.run_directory import RunDirectory
from finetune.checkpoint.snapshot import Snapshot
from finetune.config.recipe_schema import CheckpointSection
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import Reporter
from finetune.monitoring.step_all_reduce import StepSync
from finetune.utils import json_files
from finetune.utils.atomic_files import Journal, json_text
from finetune.utils.errors import CheckpointError
from finetune.utils.quoting import to_stderr
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
        section: CheckpointSection,
        snapshot: Snapshot,
        describe: Callable[[Path], None],
        *,
        broken: Collection[str] = (),
    ) -> None:
        """
        Args:
            describe: Writes what belongs beside the weights (configuration, tokenizer) into a folder, on rank 0.
            broken: Names of checkpoints whose content was found damaged.
        """
        self._store, self._backend, self._section = store, backend, section
        self._snapshot, self._describe = snapshot, describe
        self.broken = set(broken)
        self._thread: threading.Thread | None = None
        self._sealing = False
        self._step: int | None = None
        self._name = ""
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

    def start(self, network: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """Copies everything to host memory and starts to write. Nothing may be active.

        Args:
            network: The network inside the prepared model.
            state: Goes into `state.json`; `step` names it, and pruning reads what begins with `validation_`.
        """
        assert not self.active
        self._step, self._state = int(state["step"]), state
        self._name = name_of(self._step) + UNSEALED
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
        if self._fault is not None:
            raise self._fault
        if not self.active or busy:
            return None
        self.join_writer()
        if not failed and not self._sealing:
            self._sealing = True
            if self._backend.is_main:
                self._run(self._seal)
            return None
        assert self._step is not None
        outcome = SaveOutcome(self._step, self._give_up() if failed else None)
        self._step, self._sealing, self._error, self._thread = None, False, None, None
        return outcome

    def finish(self) -> SaveOutcome | None:
        """Waits until the save under way has ended; None if there is none."""
        outcome: SaveOutcome | None = None
        while self.active and outcome is None:
            self.join_writer()
            failures = self._backend.all_reduce_sum(torch.tensor([float(self.failed)], device=self._backend.device))
            outcome = self.settle(busy=False, failed=failures.item() > 0)
        return outcome

    def join_writer(self) -> None:
        """Waits until this rank writes nothing."""
        if self._thread is not None:
            self._thread.join()

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

    def _write(self) -> None:
        content = json_text(self._snapshot.write(self._store, self._name))
        put_file(self._store, self._name, f"part-{self._backend.rank}.json", content.encode())

    def _seal(self) -> None:
        """Writes what belongs to all ranks' tensors, and the manifest; on rank 0."""
        store, name = self._store, self._name
        files: Files = {}
        tensors: dict[str, Any] = {}
        manifests = [f"part-{rank}.json" for rank in range(self._backend.world_size)]
        for manifest in manifests:
            with store.open_file(name, manifest) as opened:
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
        for manifest in manifests:
            store.delete_file(name, manifest)
        facts = {key: value for key, value in self._state.items() if key == "step" or key.startswith("validation_")}
        integrity.seal_checkpoint(store, name, files, facts)
        self.broken.discard(sealed_name(name))
        keep, best_by = self._section.keep, self._section.keep_best_by
        try:
            best = (self._state.get("best") or {}).get("step")
            prune_checkpoints(store, keep=keep, best_by=best_by, best_step=best, broken=self.broken)
        except OSError as error:
            # The new checkpoint is whole; that an old one could not be deleted is no reason to say otherwise.
            to_stderr(f"An old checkpoint cannot be deleted: {error}")

    def _give_up(self) -> str:
        """Deletes what is half written; returns why a rank failed, in the same words on every rank."""
        if self._backend.is_main:
            # Before the ranks agree on the reason: after that, another may have begun to write the next one.
            self._store.delete_remains()
        if self._error is not None and self._error.errno in (None, errno.EDOM):
            to_stderr(f"rank {self._backend.rank}: {self._error}")
        # The system's number for the error is what travels.
        number = (self._error.errno or errno.EIO) if self._error is not None else 0
        worst = int(self._backend.all_reduce_max(torch.tensor([float(number)], device=self._backend.device)).item())
        return NOT_FINITE if worst == errno.EDOM else os.strerror(worst)


def prune_checkpoints(
    store: CheckpointStore,
    *,
    keep: int,
    best_by: str | None,
    best_step: int | None = None,
    broken: Collection[str] = (),
) -> None:
    """Deletes all checkpoints but the newest `keep` and, if asked, the one that is best by an evaluation's value.

    Only complete ones count and only complete ones are deleted; one that is being read stays until the next time.
    Call it from one process, after a checkpoint was sealed.

    Args:
        best_by: As `checkpoint.keep_best_by` has it.
        best_step: Step of the best evaluation, which stays too: it may have been evaluated once it was saved.
        broken: Names of checkpoints whose content was found damaged: they do not count either.

    Raises:
        OSError: If one cannot be deleted.
    """
    whole = list(integrity.list_whole(store, broken))
    staying = {name for name, _ in whole[:keep]}
    if best_by is not None:
        scored = [(rank, name) for name, facts in whole if (rank := rank_of(best_by, facts)) is not None]
        # Of equals the first one: a later evaluation has to be better to be the best.
        staying |= {max(reversed(scored), key=lambda pair: pair[0])[1]} if scored else set()
        staying |= {name_of(best_step)} if best_step is not None else set()
    for name, _ in whole:
        if name not in staying:
            store.delete(name)


class CheckpointManager:
    """Saves checkpoints when they are due, and keeps the ledger of rows and the journal of incidents.

    All ranks call its methods alike; rank 0 writes the journals.
    """

    def __init__(
        self,
        section: CheckpointSection,
        backend: Backend,
        directory: RunDirectory,
        reporter: Reporter,
        snapshot: Snapshot,
        describe: Callable[[Path], None],
        *,
        step: int,
    ) -> None:
        """
        Args:
            describe: Writes what belongs beside the weights into a folder.
            step: Where the run begins. Checkpoints of later steps are those that were refused.
        """
        self._section, self._backend, self._reporter = section, backend, reporter
        self._directory, store = directory, directory.checkpoints
        if backend.is_main:
            store.delete_remains()
        broken = [name for name in store.list_names() if (step_of(name) or 0) > step]
        self._saver = CheckpointWriter(store, backend, section, snapshot, describe, broken=broken)
        self._ledger = Journal(directory.path / row_ledger.LEDGER)
        self._incidents = Journal(directory.path / run_facts.INCIDENTS)
        self._skipped = row_ledger.read_skipped(directory.path) if backend.is_main else []
        self._saved_at = time.monotonic()

    def note_start(self, step: int, order: dict[str, Any]) -> None:
        """Notes a start of the run in the ledger: the next step, and the order of rows, as `Feed.describe` has it."""
        if self._backend.is_main:
            try:
                for line in row_ledger.mend_ledger(self._directory.path, step) if step else ():
                    self._reporter.warn(line)
            except CheckpointError as error:
                self._reporter.warn(f"{error} The run goes on; `finetune audit` will say the same.")
            except OSError as error:
                self._reporter.warn(f"{self._directory.path / row_ledger.LEDGER}: {error.strerror or error}.")
            self._warn(self._ledger.write({"start": step, **order}))

    def sync_flags(self) -> dict[str, float]:
        """Returns what this rank has to tell the others at the beginning of a step."""
        minutes = self._section.every_minutes
        late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return {
            "busy": float(self._saver.busy),
            "failed": float(self._saver.failed),
            "save": float(late and self._backend.is_main),
        }

    def step_taken(self, step: int, sync: StepSync) -> None:
        """Notes a step in the ledger, and brings a save under way forward."""
        if self._backend.is_main:
            # Written at the latest before a checkpoint of the step exists.
            self._ledger.add({"step": step, "rows": int(sync.rows)})
            if self._ledger.failing:
                # Not only when the next checkpoint is due: the last one may be there although its steps were not.
                self._ledger.flush(to_disk=True)
        self._report(self._saver.settle(busy=sync.busy > 0, failed=sync.failed > 0))

    def save(self, network: nn.Module, optimizer: Any, state: dict[str, Any], *, must: bool = False) -> None:
        """Starts a checkpoint, behind the training unless the recipe says otherwise.

        Args:
            network: The network inside the prepared model.
            state: Goes into `state.json`.
            must: Return only once it is there.

        Raises:
            CheckpointError: If it must be there and cannot be written.
        """
        self._report(self._saver.finish())
        self._directory.make_again(self._backend)
        if self._backend.is_main:
            self._warn(self._ledger.flush(to_disk=True))
        self._saved_at = time.monotonic()
        self._saver.start(network, optimizer, state)
        if self._section.asynchronous and not must:
            return
        outcome = self._saver.finish()
        if must and outcome is not None and outcome.error is not None and self._directory.make_again(self._backend):
            # It was deleted while the checkpoint was written.
            self._saver.start(network, optimizer, state)
            outcome = self._saver.finish()
        assert outcome is not None
        if must and outcome.error is not None:
            advice = "Make room or mend the file system, and start the same command again."
            if outcome.error == NOT_FINITE:
                advice = (
                    "The warning above names the tensor. Take a lower optim.lr or optim.clip_norm, or more precision; "
                    "from the same weights the same command fails again."
                )
            raise CheckpointError(
                f"The checkpoint of step {outcome.step} cannot be written below "
                f"{self._directory.checkpoints.address()}: {outcome.error}. Older checkpoints are untouched. {advice}"
            )
        self._report(outcome)

    def finish(self) -> None:
        """Waits for a save under way, and puts the journals on the disk."""
        self._report(self._saver.finish())
        self._directory.make_again(self._backend)
        for journal in (self._ledger, self._incidents) if self._backend.is_main else ():
            if (reason := journal.close()) is not None:
                self._reporter.warn(reason)

    def join_writer(self) -> None:
        """Waits until this rank writes nothing, without a word to the others: what a run that fails does last."""
        self._saver.join_writer()

    def note_incident(self, incident: dict[str, Any]) -> None:
        """Writes down a step that was skipped."""
        if self._backend.is_main:
            self._warn(self._incidents.write(incident))
            self._skipped.append(run_facts.Incident.from_line(incident))

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """The steps skipped so far, over all starts of the run, with their rows; on rank 0."""
        return [{"step": one.step, "kind": one.kind, "rows": list(one.rows)} for one in self._skipped]

    def newest_address(self) -> str | None:
        """Returns the address of the newest checkpoint that is not known to be damaged; None without any."""
        return integrity.newest_address(self._directory.checkpoints, self._saver.broken)

    def _warn(self, reason: str | None) -> None:
        if reason is not None:
            self._reporter.warn_unwritten(reason)

    def _report(self, outcome: SaveOutcome | None) -> None:
        if outcome is None or not self._backend.is_main:
            return
        if outcome.error is None:
            self._reporter.say(f"step {outcome.step}: checkpoint written")
            try:
                self._directory.note_checkpoint(outcome.step)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                self._reporter.warn_unwritten(
                    f"Cannot write run.json: {reason}. It is tried again with the next checkpoint."
                )
            return
        newest = self.newest_address()
        kept = f"{newest} stays" if newest is not None else "there is no older one"
        self._reporter.warn_unwritten(
            f"The checkpoint of step {outcome.step} cannot be written: {outcome.error}. Training continues, {kept}, "
            "and the next one is tried when it is due."
        )
