"""Measures collectives between the processes of a launch, and compares them with what a ring could do.

Definitions are those of nccl-tests (doc/PERFORMANCE.md): `algbw` is a collective's bytes by its time, `busbw` is that
times what a ring's links must carry for each of those bytes. Letters: `n` processes.
"""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from finetune.distributed.link_speeds import RINGS, Line, Ring
from finetune.utils.atomic_files import write_json
from finetune.utils.compat import torch_private
from finetune.utils.errors import BackendError, RecipeError

# What `--json` writes; changes with what its keys mean.
FORMAT = 1

# How long a size is repeated, and how often at least.
_LEAST_S, _LEAST_TIMES, _WARMUPS = 0.2, 3, 2


def fit_link(measured: Sequence[tuple[Ring, int, float]], processes: int) -> Line:
    """Returns the link with which rings come nearest to what was measured (bytes, seconds), in relative squares.

    A latency below zero, which noise can give, becomes zero, and the bandwidth is fitted alone.
    """
    # Each row divided by its time: sizes count alike, whether they take microseconds or seconds.
    rows = np.array([(ring.hops(processes) / s, ring.share(processes) * size / s) for ring, size, s in measured])
    ones, weights = np.ones(len(rows)), np.linalg.norm(rows, axis=0)
    # Columns of one norm: hops and bytes are many orders of magnitude apart.
    (latency, per_byte), _, rank, _ = np.linalg.lstsq(rows / weights, ones, rcond=1e-6)
    if rank < 2 or min(latency, per_byte) <= 0:
        return Line(0.0, float(rows[:, 1] @ rows[:, 1] / rows[:, 1].sum()))
    return Line(float(latency / weights[0]), float(weights[1] / per_byte))


def message_sizes(first: int, last: int, factor: int, processes: int) -> list[int]:
    """Returns sizes in bytes, each `factor` times the one before, made to divide by ranks and fp32 numbers.

    Raises:
        RecipeError: If there are none.
    """
    if not (0 < first <= last and factor > 1):
        raise RecipeError(
            f"Sizes from {first} to {last} bytes by factors of {factor}: --min-bytes must be 1 at least, --max-bytes "
            "no fewer, and --factor 2 at least."
        )
    unit, sizes = 4 * processes, []
    while first <= last:
        sizes.append(max(unit, first // unit * unit))
        first *= factor
    return sorted(set(sizes))


def _measure(name: str, size: int, device: torch.device) -> float:
    """Returns the seconds of one call of a collective, on the rank where it takes longest; every rank calls it."""
    processes = distributed.get_world_size()
    # Sums of zeros stay what they are, however often.
    whole, received, shard = (torch.zeros(n, device=device) for n in (size // 4, size // 4, size // 4 // processes))
    call: Callable[[], Any] = {
        "broadcast": lambda: distributed.broadcast(whole, src=0),
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, shard),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(shard, whole),
        "all_to_all": lambda: distributed.all_to_all_single(received, whole),
        "reduce": lambda: distributed.reduce(whole, dst=0),
        "send": lambda: _send(whole, received),
    }[name]
    for _ in range(_WARMUPS):
        call()
    # Alike on all ranks.
    times = max(_LEAST_TIMES, int(_LEAST_S / _slowest(call, 1, device)))
    return _slowest(call, times, device) / times


def _send(given: torch.Tensor, received: torch.Tensor) -> None:
    """Sends to the next rank, and receives what the one before sends."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    sent = distributed.P2POp(distributed.isend, given, (rank + 1) % processes)
    come = distributed.P2POp(distributed.irecv, received, (rank - 1) % processes)
    for work in distributed.batch_isend_irecv([sent, come]):
        work.wait()


def _slowest(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Returns the seconds of so many calls in a row, begun by all ranks together, on the rank that takes longest."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    distributed.barrier()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
    distributed.all_reduce(seconds, op=distributed.ReduceOp.MAX)
    return seconds.item()


def run_measurement(wanted: tuple[int, int | None, int], file: Path | None) -> list[str] | None:
    """Measures on the processes that this one was launched with; returns what people read on rank 0, elsewhere None.

    Args:
        wanted: Smallest and largest size in bytes (None: what suits the device), and the factor between sizes.
        file: Where rank 0 writes the result as JSON.

    Raises:
        BackendError: If there is one process only, or they cannot meet.
        RecipeError: If there are no such sizes, or the file cannot be written.
    """
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
    if world < 2:
        raise BackendError("A single process has nobody to talk to. Take two at least, such as `--processes 2`.")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu and local >= torch.cuda.device_count():
        raise BackendError(
            f"Process {local} of this machine has no GPU of its own. Take --processes {torch.cuda.device_count()}."
        )
    first, last, factor = wanted
    asked = message_sizes(first, last or (2**30 if gpu else 2**24), factor, world)
    if gpu:
        torch.cuda.set_device(device)
    torch_private.start_gloo_with_one_worker()
    distributed.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=5))
    try:
        timings = {name: [(ring, size, _measure(name, size, device)) for size in asked] for name, ring in RINGS.items()}
        name = int.from_bytes(hashlib.sha256(platform.node().encode()).digest()[:7], "big")
        names = torch.zeros(world, dtype=torch.int64, device=device)
        distributed.all_gather_into_tensor(names, torch.tensor([name], device=device))
        machines = len(set(names.tolist()))
        if distributed.get_rank():
            return None
        result = _describe(timings, world, machines, device)
        if file is not None:
            with RecipeError.explaining(f"--json: cannot write {file}", "", OSError):
                write_json(file, result)
        return list(report_lines(result))
    finally:
        distributed.destroy_process_group()


def _describe(
    measured: dict[str, list[tuple[Ring, int, float]]], processes: int, machines: int, device: torch.device
) -> dict[str, Any]:
    """Returns measurements (bytes, seconds) and what fits them, as docs/comms.md says."""
    gpu = device.type == "cuda"
    return {
        "format": FORMAT,
        "backend": "nccl" if gpu else "gloo",
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "processes": processes,
        "machines": machines,
        "link": vars(fit_link([row for rows in measured.values() for row in rows], processes)),
        "collectives": {
            name: {
                **vars(fit_link(rows, processes)),
                "sizes": [
                    {"bytes": size, "seconds": s, "algbw": size / s, "busbw": size / s * ring.share(processes)}
                    for ring, size, s in rows
                ],
            }
            for name, rows in measured.items()
        },
    }


def report_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yields lines for people: each size, and what a ring of the fitted links would take."""
    processes, link = result["processes"], Line(**result["link"])
    yield f"{result['backend']} on {processes} processes, {result['machines']} machine(s), {result['device']}; float32"
    heads = ("bytes", "time us", "algbw GB/s", "busbw GB/s", "ring us", "of ring")
    yield f"{'collective':<15}" + "".join(f"{head:>13}" for head in heads)
    for name, rows in result["collectives"].items():
        for row in rows["sizes"]:
            ring = link.seconds(RINGS[name], processes, row["bytes"])
            yield (
                f"{name:<15}{row['bytes']:>13,}{row['seconds'] * 1e6:>13,.1f}{row['algbw'] / 1e9:>13.3f}"
                f"{row['busbw'] / 1e9:>13.3f}{ring * 1e6:>13,.1f}{ring / row['seconds']:>13.0%}"
            )
        yield f"{name:<15}fits {rows['latency_s'] * 1e6:,.1f} us a hop and {rows['bandwidth'] / 1e9:.3f} GB/s"
    yield f"ring: links of {link.latency_s * 1e6:,.1f} us a hop and {link.bandwidth / 1e9:.3f} GB/s, which fit best"
