"""Saves checkpoints when they are due, and keeps the ledger of rows and the journal of incidents."""

import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from finetune.checkpoint import integrity, retention, save_checkpoint
from finetune.checkpoint.row_ledger import INCIDENTS, Ledger, Skipped, skipped
from finetune.checkpoint.save_checkpoint import CheckpointWriter, SaveOutcome
from finetune.config.recipe_schema import Recipe
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import Reporter, warn
from finetune.monitoring.step_sync import StepSync
from finetune.utils.atomic_files import Journal


class CheckpointManager:
    """All ranks call its methods alike; rank 0 writes the journals."""

    def __init__(
        self,
        recipe: Recipe,
        backend: Backend,
        directory: Path,
        reporter: Reporter,
        *,
        step: int,
        adapter_keys: dict[str, str] | None,
        describe: Callable[[Path], None],
        note: Callable[[int], None],
        infinite: Collection[str] = (),
    ) -> None:
        """
        Args:
            step: Where the run begins. Checkpoints of later steps are those that were refused.
            adapter_keys: The names that an adapter's file gives to parameters; None without adapters.
            describe: Writes what belongs beside the weights into a folder.
            note: Is told the step of each checkpoint that was written, on rank 0.
            infinite: Buffers that may hold infinities, such as causal masks.
        """
        section = recipe.checkpoint
        self._section, self._backend, self._reporter, self._note = section, backend, reporter, note
        self._root = directory / "checkpoints"
        if backend.is_main:
            retention.clean(self._root)
        refused = [
            folder.name for folder in integrity.list_checkpoints(self._root) if (integrity.step_of(folder) or 0) > step
        ]
        self._saver = CheckpointWriter(
            self._root,
            backend,
            adapter_keys=adapter_keys,
            describe=describe,
            keep=section.keep,
            keep_best=section.keep_best,
            warn=warn,
            broken=refused,
            infinite=infinite,
        )
        self._ledger = Ledger(directory)
        self._incidents = Journal(directory / INCIDENTS)
        self._skipped = skipped(directory) if backend.is_main else []
        self._saved_at = time.monotonic()

    def open(self, *, step: int, position: int, order: dict[str, Any]) -> None:
        """A start of the run, for the ledger; see `Ledger.open`."""
        if self._backend.is_main:
            self._warn(self._ledger.open(step=step, position=position, order=order))

    def sync_flags(self) -> dict[str, float]:
        """What this rank has to tell the others at the beginning of a step."""
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
            self._ledger.step(step, int(sync.rows))
        self._report(self._saver.settle(busy=sync.busy > 0, failed=sync.failed > 0))

    def due(self, done: int, last: int, sync: StepSync) -> bool:
        """Whether a checkpoint is due after `done` of `last` steps."""
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
        if self._backend.is_main:
            self._warn(self._ledger.flush())
        self._saved_at = time.monotonic()
        self._saver.start(network, optimizer, state)
        if must or not self._section.asynchronous:
            outcome = self._saver.finish()
            if must:
                save_checkpoint.require_saved(outcome, self._root)
            self._report(outcome)

    def finish(self) -> None:
        """Waits for a save under way, and puts the journals on the disk."""
        self._report(self._saver.finish())
        for journal in (self._ledger, self._incidents) if self._backend.is_main else ():
            if (reason := journal.close()) is not None:
                self._reporter.warn(f"Cannot write {reason}. Its last lines are lost.")

    def incident(self, incident: dict[str, Any]) -> None:
        """Writes down a step that was skipped."""
        if self._backend.is_main:
            self._warn(self._incidents.write(incident))
            self._skipped.append(Skipped.of(incident))

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """The steps skipped so far, over all starts of the run, with their rows; on rank 0."""
        return [asdict(step) for step in self._skipped]

    def newest(self) -> Path | None:
        """The newest checkpoint."""
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
                self._note(outcome.step)
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
