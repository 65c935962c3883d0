"""Repeats one step of a run on one process: the same rows, the same random numbers, the same weights.

The order of rows is a function of seed and position, and randomness one of seed, step and micro-batch, so that the
weights are all that has to be restored: from the nearest checkpoint before the step, and by the steps from there.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from finetune.checkpoint import integrity, row_ledger, run_facts, trusted_code
from finetune.checkpoint.checkpoint_store import find_checkpoint, open_store, step_of
from finetune.config.recipe import load_recipe
from finetune.config.recipe_schema import CheckpointSection, EvalSection
from finetune.diagnostics.parity.compare import relative_difference, tolerance_between
from finetune.models.forward_wrapper import without_training
from finetune.monitoring.step_all_reduce import StepOutput
from finetune.optim import lr_schedule
from finetune.tasks.evaluate_rows import with_window
from finetune.tasks.task import Batch, mean_figures
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun
from finetune.training.loop import train_step
from finetune.utils.console import plain_table
from finetune.utils.errors import CheckpointError, RecipeError
from finetune.utils.temporary_folders import temporary_folder
from finetune.utils.to_device import batch_to_device

# Keys whose code a step runs; those of metrics are left out.
_RUNS = (trusted_code.SHIPPED, "task.name", "task.loss", "optim.name")

# Characters of a row's text that are shown.
_SHOWN = 100


@dataclass(frozen=True)
class ReplayedRow:
    """A row of the batch."""

    number: int
    targets: int
    loss: float
    """Sum over its targets, computed alone and without dropout, before the step."""
    text: str


@dataclass(frozen=True)
class Replayed:
    """A repeated step."""

    step: int
    """Counted from 1."""
    start: str
    """Source of the weights."""
    position: int
    micro_batches: list[tuple[str, float, list[ReplayedRow]]]
    """Place of each, its loss sum, and its rows."""
    now: dict[str, float | None]
    """`loss`, `grad_norm`, `lr` and `tokens`; None for what is not finite."""
    then: dict[str, float | None] | None
    """The same values as the run has written them down; None if that step was not logged."""
    incident: run_facts.Incident | None
    """Set if the run skipped the step."""
    differences: list[str]
    """Differences from the step that the run took."""

    @property
    def holds(self) -> bool:
        return not self.differences

    def print_to(self, console: Console) -> None:
        """Prints it for people."""
        console.print(f"step {self.step}, positions from {self.position}; weights: {self.start}")
        for index, (where, loss, rows) in enumerate(self.micro_batches):
            targets = sum(row.targets for row in rows)
            console.print(f"micro-batch {index + 1} ({where}): loss sum {loss:.4f} over {targets:,} targets")
            for row in rows:
                mean = row.loss / max(1, row.targets)
                figures = f"{row.targets:,} targets, {mean:.4f} each without dropout"
                console.print(f"  row {row.number}: {figures}: {row.text}")
        table = plain_table("", "now", "then", "apart", right=("now", "then", "apart"))
        for key, value in self.now.items():
            before = ["not logged"]
            if self.then is not None:
                before = [_in_words(self.then[key]), f"{relative_difference(self.then[key], value):.0e}"]
            table.add_row(key, _in_words(value), *before)
        console.print(table)
        if self.incident is not None:
            console.print(f"the run skipped this step, and wrote why into incidents.jsonl: {self.incident.kind}")
        for difference in self.differences:
            console.print(f"DRIFT: {difference}")
        if self.holds:
            console.print("this is the step that the run took")


def _in_words(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.7g}"


def replay_step(directory: Path, number: int, *, trust_remote_code: bool = False) -> Replayed:
    """Takes step `number` of a run, counted from 1, again. Nothing in the run's directory changes.

    With `trust_remote_code`, Python code that it names or brings may run, though this user did not start it here.

    Raises:
        RecipeError: If there is no such run or step, or the recipe would read other data or another model by now.
        CheckpointError: If its files cannot be read, or no checkpoint before the step is left of a run that did not
            begin from nothing.
    """
    facts = run_facts.read_facts(directory)
    ran = load_recipe(directory / "recipe.yaml")
    if not trust_remote_code:
        trusted_code.check_code(directory, ran, _RUNS)
    entry = _ledger_entry(directory, number)
    start = _nearest_checkpoint(directory, facts, number - 1)
    with temporary_folder() as folder:
        changed = {
            "output": ran.output.model_copy(update={"dir": str(folder), "overwrite": False}),
            # Differences are looked for afterwards, and reported in words of replay.
            "resume": ran.resume.model_copy(update={"mode": start or "never", "allow": tuple(facts["identity"])}),
            "log": ran.log.model_copy(update={"trackers": ()}),
            "guard": ran.guard.model_copy(update={"alert": None}),
            "sample": None,
            "eval": EvalSection(),
            "checkpoint": CheckpointSection(),
            # What `precision: auto` came to.
            "precision": facts["precision"],
        }
        run = build_run(ran.model_copy(update=changed), quiet=True)
        then, now = facts["identity"], run.identity
        if different := [key for key in then if key != "precision" and then[key] != now.get(key)]:
            raise RecipeError(
                f"{directory} cannot be replayed: its recipe.yaml now gives another {', '.join(different)}. Bring back "
                "the files that the run read, and start where it was started, since their paths count from there."
            )
        for step in range(run.resume.step, number - 1):
            _take_step(run, step)
        replayed = _compare_step(run, directory, facts, start or "the first ones", entry)
        run.backend.close()
    return replayed


def _ledger_entry(directory: Path, number: int) -> row_ledger.Used:
    first = last = 0
    for entry in row_ledger.used_rows(directory):
        last = entry.step + 1
        first = first or last
        if last == number:
            return entry
    if first < number < last:
        raise CheckpointError(
            f"--step {number}: {directory / row_ledger.LEDGER} has no line for this step that can be read, so nothing "
            "says what it read. Replay another step."
        )
    raise RecipeError(f"--step {number}: {directory} has taken steps {first} to {last}. Give one of them.")


def _nearest_checkpoint(directory: Path, facts: dict[str, Any], most: int) -> str | None:
    """Returns the newest whole checkpoint of at most so many steps, or None for the beginning of the run."""
    store = open_store(directory)
    for name in store.list_names():
        if (step_of(name) or 0) <= most:
            with suppress(CheckpointError):
                integrity.verify_checkpoint(store, name)
                return store.address(name)
    begun = facts["starts"][0]
    if not begun["from_step"]:
        return None
    if begun["from_step"] <= most and find_checkpoint(Path(begun["resumed_from"]))[1] is not None:
        return str(begun["resumed_from"])
    raise CheckpointError(
        f"{directory} began at step {begun['from_step']} from {begun['resumed_from']}, and no whole checkpoint of at "
        f"most {most} steps is left. Replay a later step, or bring that checkpoint back."
    )


def _take_step(run: BuiltRun, step: int) -> StepOutput:
    lr_schedule.set_learning_rates(run.optimizer, step, run.length.num_steps, run.recipe)
    return train_step(run, step)


def _compare_step(
    run: BuiltRun, directory: Path, facts: dict[str, Any], start: str, entry: row_ledger.Used
) -> Replayed:
    """Takes the step of a line of the ledger, and compares it with what the run has written down."""
    step, number = entry.step, entry.step + 1
    source = run.data.train
    assert source is not None
    task, terms = run.task, run.task.terms
    given = [(np.array([place]), source.batch(np.array([row]))) for place, row in enumerate(entry.rows)]
    with without_training(run.model):

        def sent(batches: Iterable[dict[str, torch.Tensor]]) -> Iterator[Batch]:
            return (run.join(batch_to_device(batch, run.backend.device)) for batch in batches)

        batches = [batch for _, batch in with_window(run.backend, run.model, task, given, len(given), sent)]
        rows = [
            ReplayedRow(
                int(row),
                source.num_targets(np.array([row])),
                sums.reshape(-1)[: task.num_weighted].sum().item(),
                _text(run, batch),
            )
            for row, (_, batch), sums in zip(
                entry.rows, given, run.backend.evaluate_batches(run.model, task.loss_sum, sent(batches)), strict=True
            )
        ]
    taken = _take_step(run, step)
    losses = taken.losses.double()
    values = {
        "loss": mean_figures(terms, taken.sums.tolist(), taken.read_sync()[1])["loss"],
        "grad_norm": taken.norm.read()[0],
        "lr": lr_schedule.lr_at(step, run.length.num_steps, run.recipe),
        "tokens": run.state.tokens.item(),
    }
    now = {key: value if math.isfinite(value) else None for key, value in values.items()}
    logged = {line["step"]: line for line in run_facts.read_metrics(directory).whole if "grad_norm" in line}
    then = {key: logged[number][key] for key in now} if number in logged else None
    incident = {skipped.step: skipped for skipped in row_ledger.read_skipped(directory)}.get(number)
    differences = []
    if not entry.proved or not np.array_equal(np.concatenate(taken.rows), entry.rows):
        differences.append("the ledger's checksum is not that of these rows: the run has read others")
    allowed = tolerance_between(facts, facts)
    limits = {"loss": allowed.loss, "grad_norm": allowed.norm, "lr": 1e-12, "tokens": 0.0}
    for key, before in (then or {}).items():
        if not relative_difference(before, now[key]) <= limits[key]:
            change = f"{key} is {_in_words(now[key])}, and was {_in_words(before)}"
            differences.append(f"{change} ({limits[key]:.0e} allowed)")
    if (incident is not None) != (now["grad_norm"] is None):
        differences.append("the gradient is finite, and was not" if incident else "the gradient is not finite")
    begun = next(s for s in reversed(facts["starts"]) if s["from_step"] <= step)
    # Of ranks that shared rows or layers, one read them; runs of older versions had none.
    ranks = begun.get("data_ranks", begun["processes"])
    size = run.recipe.batch.rows
    parts = [
        (f"rank {index % ranks} of {ranks}, its number {index // ranks + 1}", loss, rows[index * size :][:size])
        for index, loss in enumerate(losses.tolist())
    ]
    return Replayed(number, start, entry.position, parts, now, then, incident, differences)


def _text(run: BuiltRun, batch: dict[str, torch.Tensor]) -> str:
    """Returns a row in characters where it has some, shortened; else the shapes of its tensors."""
    if run.data.tokenizer is None or "input_ids" not in batch:
        return ", ".join(f"{name} {list(values.shape[1:])}" for name, values in batch.items())
    text = " ".join(run.data.tokenizer.decode(batch["input_ids"][0].tolist()).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
