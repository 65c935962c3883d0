"""Trains a few steps of a recipe and tells the most bytes that torch's allocator had given out: what a worker runs.

    accelerate launch … scripts/measure_peak.py RECIPE FOLDER

Writes `FOLDER/RANK.json`. torch itself keeps the sum of what its CPU allocator has given out, and its profiler notes
that sum at each allocation, from before the model is built: what `torch.cuda.max_memory_allocated` says on a GPU. In it
are weights, gradients, optimiser, activations, buffers, and what kernels ask torch for; not in it are the interpreter,
libraries, what oneDNN takes for itself, and what is mapped from files.
"""

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# The first makes the optimiser's state. The others are alike but for what gloo happens to have on its way when a step
# is fullest (ZeRO-3: up to a fifth of a small model's peak); of so many, one met the worst in each run looked at.
STEPS = 12
MARK = "measured step"


@dataclass(frozen=True)
class Change:
    """An allocation or, if it is negative, a release."""

    at: int
    size: int
    total: int
    """All that is allocated then, by whatever thread."""
    pointer: int
    inside: tuple[str, ...]
    """The operations that it happened in, innermost first."""


@dataclass(frozen=True)
class Peak:
    """The fullest moment."""

    size: int
    inside: tuple[str, ...]
    """What was allocated for last."""
    live: tuple[Change, ...]
    """What it is made of; also what other threads have released, since they tell only the sum."""


def watched() -> profile:
    """A profiler that notes memory.

    Raises:
        RuntimeError: If this torch has no such flag.
    """
    # Else only threads that are profiled add to the sum and take from it, and gloo's release tensors too.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    except ValueError as error:
        raise RuntimeError(f"torch {torch.__version__} cannot be told to count on all threads: {error}") from error
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def peaks(profiler: profile, mark: str = MARK) -> list[Peak]:
    """The fullest moment within each range of a name."""
    own: Any = profiler.profiler
    events = list(_all(own.kineto_results.experimental_event_tree()))
    changes = sorted((_change(event) for event in events if event.name == "[memory]"), key=lambda change: change.at)
    ranges = sorted((event.start_time_ns, event.end_time_ns) for event in events if event.name == mark)
    return [_peak(changes, start, end) for start, end in ranges]


def _peak(changes: list[Change], start: int, end: int) -> Peak:
    within = [index for index, change in enumerate(changes) if start <= change.at <= end]
    fullest = max(within, key=lambda index: changes[index].total)
    live: dict[int, Change] = {}
    for change in changes[: fullest + 1]:
        if change.size > 0:
            live[change.pointer] = change
        else:
            live.pop(change.pointer, None)
    return Peak(changes[fullest].total, changes[fullest].inside, tuple(live.values()))


def _change(event: Any) -> Change:
    fields = event.extra_fields
    names = tuple(_names(event.parent))
    return Change(event.start_time_ns, fields.alloc_size, fields.total_allocated, fields.ptr, names)


def _all(events: list[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def _names(event: Any) -> Iterator[str]:
    while event is not None:
        yield event.name
        event = event.parent


def made_of(peak: Peak) -> list[tuple[str, int]]:
    """What a peak is made of, by size and operation: bytes, the most first."""
    found: Counter[str] = Counter()
    for change in peak.live:
        found[f"{change.size:>12,} {' < '.join(change.inside[:4])}"] += change.size
    return found.most_common()


def main(path: str, folder: str) -> None:
    from finetune import exits
    from finetune.errors import FinetuneError
    from finetune.quiet import silence_libraries
    from finetune.recipe import load
    from finetune.run import build
    from finetune.train import train_step

    silence_libraries()
    try:
        with watched() as profiler:
            run = build(load(path), quiet=True)
            for step in range(STEPS):
                with record_function(MARK):
                    train_step(run, step)
    except FinetuneError as error:
        exits.report(error)
        exits.exit_with(exits.USER_ERROR)
    first, *others = peaks(profiler)
    fullest = max(others, key=lambda peak: peak.size)
    found = {
        "first": first.size,
        "others": [peak.size for peak in others],
        "inside": fullest.inside,
        "live": made_of(fullest),
    }
    (Path(folder) / f"{run.backend.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    run.backend.close()
    exits.exit_with(0)


if __name__ == "__main__":
    # The project beside this folder.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(*sys.argv[1:])
