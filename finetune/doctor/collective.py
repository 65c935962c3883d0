"""Two processes that really add up a tensor."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from finetune.backend.devices import of_torch
from finetune.doctor.finding import Asked, Finding, failure, ok

# Two of torch's imports on a slow disk fit; a collective that hangs does not hold up the report for longer.
LIMIT_S = 120.0

# They meet by a file, so that a port which is taken is another check's finding.
SCRIPT = """
import datetime, sys, torch
backend, rank, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
torch.distributed.init_process_group(
    backend, init_method=f"file://{file}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
values = torch.full((1024,), rank + 1.0, device=device)
torch.distributed.all_reduce(values)
assert values.eq(3.0).all(), f"1 + 2 is {values[0].item()}"
torch.distributed.destroy_process_group()
"""


def all_reduce(asked: Asked) -> Iterable[Finding]:
    """An all-reduce over two processes of this machine."""
    backend = "nccl" if of_torch().gpus > 1 else "gloo"
    start = time.monotonic()
    problem = pair(SCRIPT, backend, asked.env, LIMIT_S)
    if problem is None:
        yield ok(
            "all-reduce", f"two processes agree by {backend}, in {time.monotonic() - start:.1f} s with their start"
        )
    else:
        advice = (
            "look at hostname, interfaces and firewall; GLOO_SOCKET_IFNAME=lo (NCCL_SOCKET_IFNAME) takes the local one"
        )
        yield failure("all-reduce", f"two processes do not agree by {backend}: {problem}", advice)


def pair(script: str, backend: str, env: Mapping[str, str], limit_s: float) -> str | None:
    """Runs a script as two ranks; what went wrong, or None. None of them is left when it returns."""
    # What a launcher has put there would start something else.
    own = {name: value for name, value in env.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.log") for rank in (0, 1)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                words = [sys.executable, "-c", script, backend, str(rank), str(Path(folder, "meet"))]
                with log.open("wb") as output:
                    # A group of its own, so that whatever it starts ends with it.
                    started = subprocess.Popen(words, env=own, stdout=output, stderr=output, start_new_session=True)
                ranks.append(started)
            return _wait(ranks, logs, time.monotonic() + limit_s, limit_s)
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(ranks: list["subprocess.Popen[bytes]"], logs: list[Path], deadline: float, limit_s: float) -> str | None:
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.returncode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
        if process.poll() not in (None, 0):
            lines = log.read_text(errors="replace").strip().splitlines()
            return f"rank {rank} ended with {process.returncode}: {lines[-1] if lines else 'it said nothing'}"
    waiting = [str(rank) for rank, process in enumerate(ranks) if process.returncode is None]
    return f"rank {' and '.join(waiting)} had not ended after {limit_s:.0f} s" if waiting else None
