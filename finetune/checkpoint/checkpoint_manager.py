"""Saves checkpoints when they are due, and keeps the ledger of rows and the journal of incidents."""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import nn

from finetune.checkpoint import row_ledger, run_facts, save_checkpoint
from finetune.checkpoint.checkpoint_store import step_of
from finetune.checkpoint.run_directory import RunDirectory
from finetune.checkpoint.save_checkpoint import CheckpointWriter, SaveOutcome
from finetune.config.recipe_schema import CheckpointSection
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import Reporter
from finetune.monitoring.step_all_reduce import StepSync
from finetune.utils.atomic_files import Journal
from finetune.utils.errors import CheckpointError


class CheckpointManager:
    """All ranks call its methods alike; rank 0 writes the journals."""

    def __init__(
        self,
        section: CheckpointSection,
        backend: Backend,
        directory: RunDirectory,
        reporter: Reporter,
        *,
        step: int,
        adapter_keys: dict[str, str] | None,
        describe: Callable[[Path], None],
        infinite: Collection[str] = (),
    ) -> None:
        """
        Args:
            step: Where the run begins. Checkpoints of later steps are those that were refused.
            adapter_keys: The names that an adapter's file gives to parameters; None without adapters.
            describe: Writes what belongs beside the weights into a folder.
            infinite: Buffers that may hold infinities, such as causal masks.
        """
        self._section, self._backend, self._reporter = section, backend, reporter
        self._directory, store = directory, directory.checkpoints
        if backend.is_main:
            store.delete_remains()
        self._saver = CheckpointWriter(
            store,
            backend,
            adapter_keys=adapter_keys,
            describe=describe,
            keep=section.keep,
            best_by=section.keep_best_by,
            broken=[name for name in store.list_names() if (step_of(name) or 0) > step],
            infinite=infinite,
        )
        self._ledger = Journal(directory.path / row_ledger.LEDGER)
        self._incidents = Journal(directory.path / run_facts.INCIDENTS)
        self._skipped = row_ledger.read_skipped(directory.path) if backend.is_main else []
        self._saved_at = time.monotonic()

    def open(self, step: int, order: dict[str, Any]) -> None:
        """Notes a start of the run in the ledger: the next step, the position of its first row, and how rows follow.

        Args:
            order: `Feed.describe` of that step.
        """
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

    def due(self, done: int, last: int, sync: StepSync) -> bool:
        """Returns whether a checkpoint is due after `done` of `last` steps."""
        every = self._section.every_steps
        on_time = sync.save > 0 or (every is not None and done % every == 0)
        return self._section.at_end if done == last else on_time

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
        assert outcome is not None
        if must and outcome.error is not None and self._directory.make_again(self._backend):
            # It was deleted while the checkpoint was written.
            self._saver.start(network, optimizer, state)
            outcome = self._saver.finish()
            assert outcome is not None
        if must and outcome.error is not None:
            advice = "Make room or mend the file system, and start the same command again."
            if outcome.error == save_checkpoint.NOT_FINITE:
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
                self._reporter.warn(f"Cannot write {reason}. Its last lines are lost.")

    def incident(self, incident: dict[str, Any]) -> None:
        """Writes down a step that was skipped."""
        if self._backend.is_main:
            self._warn(self._incidents.write(incident))
            self._skipped.append(run_facts.Incident.from_line(incident))

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """The steps skipped so far, over all starts of the run, with their rows; on rank 0."""
        return [{"step": one.step, "kind": one.kind, "rows": list(one.rows)} for one in self._skipped]

    def newest(self) -> str | None:
        """Address of the newest checkpoint."""
        return self._saver.newest()

    def _warn(self, reason: str | None) -> None:
        if reason is not None:
            self._reporter.warn(f"Cannot write {reason}. It is kept in memory, and tried again.")

    def _report(self, outcome: SaveOutcome | None) -> None:
        if outcome is None or not self._backend.is_main:
            return
        if outcome.error is None:
            self._reporter.say(f"step {outcome.step}: checkpoint written")
            try:
                self._directory.note_checkpoint(outcome.step)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                self._reporter.warn(f"Cannot write run.json: {reason}. It is tried again with the next checkpoint.")
            return
        newest = self.newest()
        kept = f"{newest} stays" if newest is not None else "there is no older one"
        self._reporter.warn(
            f"The checkpoint of step {outcome.step} cannot be written: {outcome.error}. Training continues, {kept}, "
            "and the next one is tried when it is due."
        )
