"""Trains a few steps of a recipe and tells the most bytes that torch's allocator had given out: what a worker runs.

    accelerate launch … scripts/measure_peak.py RECIPE FOLDER

Writes `FOLDER/RANK.json`. torch itself keeps the sum of what its CPU allocator has given out, and its profiler notes
that sum at each allocation, from before the model is built: what `torch.cuda.max_memory_allocated` says on a GPU. In it
are weights, gradients, optimiser, activations, buffers, and what kernels ask torch for; not in it are the interpreter,
libraries, and what is mapped from files.

So that the figure is that of the program, not of the processor: collectives are waited for where they are started
(`wait_at_once`), and products of bf16 are computed by NumPy (`multiply_by_numpy`).
"""

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

# The first makes the optimiser's state; the others are alike.
STEPS = 5
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


# What torch.distributed calls for the collectives of Python code. DDP calls C++, and gloo sums its buckets in place.
_COLLECTIVES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)


def wait_at_once() -> None:
    """Has every collective end before the call that starts it returns.

    gloo copies what it gathers on threads of its own. How many of these copies there are at a time depends on how fast
    the processor computes meanwhile, and on how far the other rank is: one of ZeRO-3's steps took up to 1.15 of what
    another of the same run took.
    """

    def waiting(start: Any) -> Any:
        def collective(*arguments: Any, **options: Any) -> Any:
            work = start(*arguments, **options)
            work.wait()
            return work

        return collective

    for name in _COLLECTIVES:
        setattr(torch.distributed.ProcessGroup, name, waiting(getattr(torch.distributed.ProcessGroup, name)))


def multiply_by_numpy() -> torch.library.Library:
    """Has NumPy compute products of bf16 on the CPU, into the same tensors; lasts as long as what it returns.

    torch's kernels for them, and what these allocate, depend on the processor's instructions: without AVX-512 they take
    minutes for a step.
    """
    library = torch.library.Library("aten", "IMPL")

    def product(left: torch.Tensor, right: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        shape = (*left.shape[:-1], right.shape[-1])
        made = torch.empty(shape, dtype=left.dtype)
        if left.dtype != torch.bfloat16:
            kernel = torch.mm if left.ndim == 2 else torch.bmm
            kernel(left, right, out=made)
            return made if plus is None else made.add_(plus)
        values = _floats(left) @ _floats(right)
        values += 0 if plus is None else _floats(plus)
        # To the nearest: half of what is cut off is added first.
        rounded = (values.view(np.uint32) + np.uint32(0x8000)) >> 16
        made.view(torch.int16).numpy()[...] = rounded.astype(np.uint16).view(np.int16)
        return made

    def addmm(plus: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        assert beta == alpha == 1, (beta, alpha)
        return product(left, right, plus)

    library.impl("mm", product, "CPU")
    library.impl("bmm", product, "CPU")
    library.impl("addmm", addmm, "CPU")
    return library


def _floats(tensor: torch.Tensor) -> Any:
    """The values of a tensor of bf16, in memory of NumPy's own."""
    return (tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)


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
    from finetune.config.recipe import load_recipe
    from finetune.training.build_run import build_run
    from finetune.training.loop import train_step
    from finetune.utils import exit_codes
    from finetune.utils.errors import FinetuneError
    from finetune.utils.library_imports import silence_libraries

    silence_libraries()
    wait_at_once()
    products = multiply_by_numpy()
    try:
        with watched() as profiler:
            run = build_run(load_recipe(path), quiet=True)
            for step in range(STEPS):
                with record_function(MARK):
                    train_step(run, step)
    except FinetuneError as error:
        exit_codes.print_error(error)
        exit_codes.exit_with(exit_codes.USER_ERROR)
    del products
    first, *others = peaks(profiler)
    # A thread of gloo's may let go of a tensor late; nothing makes a step take less.
    least = min(others, key=lambda peak: peak.size)
    found = {
        "first": first.size,
        "others": [peak.size for peak in others],
        "peak": least.size,
        "inside": least.inside,
        "live": made_of(least),
    }
    (Path(folder) / f"{run.backend.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    run.backend.close()
    exit_codes.exit_with(0)


if __name__ == "__main__":
    # The project beside this folder.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(*sys.argv[1:])
