"""Finds the largest micro-batch that fits, for `batch.micro_size: auto`.

A plan says where to begin. Each size is then tried in processes of its own, which every rank starts beside itself:
whatever they run into, nothing of it is left. What was found is kept for the next run of its kind.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.config.recipe import divisors, dump_recipe, validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed import device_selection, rendezvous_store
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.rank_notes import RankNotes
from finetune.distributed.resolve_config import micro_rows
from finetune.planning.planner import largest_micro_size
from finetune.utils import json_files
from finetune.utils.atomic_files import digest_of, write_json
from finetune.utils.errors import BackendError, MemoryFullError
from finetune.utils.quoting import to_stderr
from finetune.utils.temporary_folders import temporary_folder

# The share of a rank's memory that a trial may take: evaluation, checkpoints and allocators' gaps come on top.
FULL = 0.92

# What a trial's process exits with when memory was not enough.
OUT_OF_MEMORY = 3

# Seconds between two looks at whether another rank's process has failed.
_EVERY_S = 0.2

# Sections that memory depends on.
_MATTERS = ("model", "lora", "task", "tokenizer", "optim", "precision", "chat")


@dataclass(frozen=True)
class MicroBatchChoice:
    """The size of micro-batches that a run takes."""

    recipe: Recipe
    """With a number of rows that comes out even."""
    facts: dict[str, Any] | None
    """For `run.json`; None where it is the number that the recipe gives."""
    lines: tuple[str, ...] = ()


def resolve_micro_size(
    recipe: Recipe, launch: Launch, digest: str, *, begun: int | None, quiet: bool
) -> MicroBatchChoice:
    """Settles `batch.micro_size`: the largest number up to it that comes out even, or for `auto` that fits.

    It is the same on every rank; every rank calls it.

    Args:
        digest: Of the training rows.
        begun: The number that a run that resumes has to keep.

    Raises:
        MemoryFullError: If not even one row fits.
        BackendError: If a trial fails otherwise.
    """
    asked = recipe.batch.micro_size
    if begun is not None:
        why = "as this run began: its network has dropout or batch norms"
    elif asked != "auto":
        begun = asked
        why = f"the largest up to it that divides the {recipe.batch.global_size // launch.data_ranks} rows of a process"
    if begun is not None:
        rows = micro_rows(recipe.with_micro_size(begun), launch.data_ranks)
        return MicroBatchChoice(recipe, None) if rows == asked else _choose(recipe, {"rows": rows}, why)
    notes = rendezvous_store.open_board()
    rank = notes.rank
    sizes, room = divisors(recipe.batch.global_size // launch.data_ranks), device_selection.available_memory()
    kept = _kept(recipe, launch, digest)
    begin = rendezvous_store.from_main(
        lambda: _read(kept, room) or {"first": largest_micro_size(recipe, launch, sizes, room), "room": room}
    )
    if "rows" in begin:
        return _choose(recipe, {**begin, "known": True}, "as found before")
    tried: dict[int, float | None] = {}
    trials = Path(recipe.output.dir) / ".trials"
    try:
        while (size := next_size(sizes, int(begin["first"]), tried)) is not None:
            if rank == 0 and not quiet:
                to_stderr(f"batch.micro_size: auto: trying {size} row(s) a forward pass")
            tried[size] = _try(_trial_of(recipe, size, launch.data_ranks, trials / str(size)), launch, notes, rank)
    finally:
        if rank == 0:
            shutil.rmtree(trials, ignore_errors=True)
    fits = [size for size, share in tried.items() if share is not None and share <= FULL]
    if not fits:
        gib = begin["room"] / 2**30
        raise MemoryFullError(
            f"batch.micro_size: auto: not even {min(sizes)} row(s) a forward pass fit into {gib:.2f} GiB of memory "
            f"for each process. Set model.gradient_checkpointing: true, lower data.sequence_length, "
            "train adapters (lora), or take a launch file of accelerate_configs/ that shards or offloads more."
        )
    choice = {"rows": max(fits), "room": begin["room"], "tried": {str(size): share for size, share in tried.items()}}
    if rank == 0:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, choice)
        except OSError as error:
            to_stderr(f"batch.micro_size: what was found is not kept for the next run: {kept}: {error.strerror}.")
    return _choose(recipe, {**choice, "known": False}, f"{len(tried)} trial" + ("s" if len(tried) > 1 else ""))


def next_size(sizes: Sequence[int], first: int, tried: Mapping[int, float | None]) -> int | None:
    """The size to try next, None if the largest that fits is known.

    Args:
        sizes: All that come out even, ascending.
        tried: The share of the memory that each took; None if it was not enough.
    """
    if not tried:
        return first
    measured = {size: share for size, share in tried.items() if share is not None}
    best = max((size for size, share in measured.items() if share <= FULL), default=0)
    over = min((size for size in tried if size > best), default=sizes[-1] + 1)
    between = [size for size in sizes if best < size < over]
    if not between:
        return None
    if not best:
        return max((size for size in between if 2 * size <= over), default=between[0])
    # Memory grows with the rows on top of what does not: by two measurements a line, by one at most in proportion.
    base, slope = 0.0, measured[best] / best
    if len(measured) > 1:
        low, high = sorted(measured)[-2:]
        slope = max(0.0, (measured[high] - measured[low]) / (high - low))
        base = measured[high] - slope * high
    within = [size for size in between if base + slope * size <= FULL]
    if within:
        return within[-1]
    return between[0] if len(measured) == 1 else None


def _try(recipe: Recipe, launch: Launch, notes: RankNotes, rank: int) -> float | None:
    """Trains two steps in a process of its own beside each rank.

    Returns the largest share of a rank's memory that was held; None if memory was not enough on some rank.
    """
    name = f"trial-{notes.board}-{recipe.batch.rows}"
    with temporary_folder() as folder:
        file, report, log = (folder / name for name in ("recipe.yaml", "report.json", "output.txt"))
        file.write_text(dump_recipe(recipe), encoding="utf-8")
        words = [sys.executable, "-m", "finetune.training.micro_batch_trial", str(file), str(report)]
        env = rendezvous_store.environment_apart(name)
        if launch.num_threads is not None:
            env["OMP_NUM_THREADS"] = str(launch.num_threads)
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        own: int | None = None
        try:
            while own is None:
                with suppress(subprocess.TimeoutExpired):
                    own = process.wait(_EVERY_S)
                if own is None and notes.read([f"{name}/over"]):
                    break  # it is of no use any more, because another rank's has failed
        finally:
            process.kill()
            process.wait()
        note: dict[str, Any] = {"code": own}
        if own == 0:
            note |= json_files.read(report)
        elif own is not None:
            note["output"] = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-600:]
            notes.write(f"{name}/over", rank)
    ended = rendezvous_store.gather_notes(note)
    if all(note["code"] == 0 for note in ended):
        return float(max(note["share"] for note in ended))
    # A host that runs out of memory kills.
    if any(note["code"] in (OUT_OF_MEMORY, -9) for note in ended):
        return None
    first = next(note for note in ended if note["code"])
    raise BackendError(
        f"batch.micro_size: auto: a trial with {recipe.batch.micro_size} row(s) failed with exit code {first['code']}: "
        f"{first['output']} Mend that, or give a number, with which nothing is tried."
    )


def _trial_of(recipe: Recipe, size: int, world: int, folder: Path) -> Recipe:
    """The recipe, cut down to what decides memory: two steps of at most two micro-batches."""
    micro_batches = min(2, recipe.batch.global_size // (size * world))
    tree = recipe.model_dump(mode="json")
    tree["batch"] |= {"micro_size": size, "global_size": size * world * micro_batches}
    tree |= {"length": {"steps": 2}, "sample": None, "eval": {}, "log": {}, "checkpoint": {}}
    tree |= {"resume": {"mode": "never"}, "output": {"dir": str(folder), "overwrite": True}}
    return validate_recipe(tree)


def _choose(recipe: Recipe, found: dict[str, Any], why: str) -> MicroBatchChoice:
    rows = found["rows"]
    if "tried" in found:
        share = found["tried"][str(rows)]
        why = f"with {share:.0%} of {found['room'] / 2**30:,.2f} GiB of memory ({why})"
    asked = recipe.batch.micro_size
    line = f"batch.micro_size: {asked} is {rows}, {why}"
    return MicroBatchChoice(recipe.with_micro_size(rows), {"asked": asked, **found}, (line,))


def _kept(recipe: Recipe, launch: Launch, digest: str) -> Path:
    """Returns the file that keeps what was found for such a model, launch and device."""
    section = recipe.model
    config = Path(section.name or "") / "config.json"
    facts = {
        "recipe": {name: recipe.model_dump(mode="json")[name] for name in _MATTERS},
        "sizes": [recipe.data.packing, recipe.data.sequence_length, recipe.batch.global_size],
        # Rows of different lengths: the longest decide.
        "rows": digest if recipe.data.packing == "padded" else None,
        "config": config.read_text(encoding="utf-8") if section.name and config.is_file() else None,
        "launch": {**asdict(launch), "file": None, "ds_place": None},
        "here": device_selection.device_identity(),
    }
    return Path(recipe.data.cache_dir) / "micro_size" / f"{digest_of(facts)[:16]}.json"


def _read(file: Path, room: int) -> dict[str, Any] | None:
    """Returns what was found before, if it fits the room that there is now: a host's changes."""
    try:
        choice: dict[str, Any] = json_files.read(file)
        fits = choice["tried"][str(int(choice["rows"]))] * choice["room"] <= FULL * room
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None  # nothing yet, or nothing that can be read: it is tried again
    return choice if fits else None
