"""What the system allows: cores, threads, open files."""

import os
import resource
from collections.abc import Iterable
from pathlib import Path

from finetune.backend.devices import of_torch
from finetune.doctor.finding import Asked, Finding, failure, ok, warning

# Of open files. A process needs some hundred: libraries, sockets to every other, files of data.
FEW, PLENTY = 256, 4096
# Where a container's share of the processors is written: version 2 of cgroups.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def threads(asked: Asked) -> Iterable[Finding]:
    """Whether processes and their threads fit the cores."""
    cores, allowed, said = len(os.sched_getaffinity(0)), quota(), asked.env.get("OMP_NUM_THREADS")
    if said is not None and not (said.isdecimal() and int(said)):
        yield failure("threads", f"OMP_NUM_THREADS is '{said}'", "set it to a number, or unset it")
        return
    # With GPUs, processes keep to the one thread that Accelerate gives them.
    fair = 1 if of_torch().gpus else max(1, cores // asked.local)
    each = int(said) if said else fair
    found = f"{asked.local} process(es) x {each} thread(s) on {cores} core(s)"
    if allowed is not None and allowed < min(cores, asked.local * each):
        advice = f"set OMP_NUM_THREADS={max(1, int(allowed) // asked.local)}"
        yield warning("threads", f"{found}, of which this container may use {allowed:.1f}", advice)
    elif asked.local > cores:
        yield warning("threads", f"{found}: processes wait for each other", "start fewer, or take a larger machine")
    elif asked.local * each > cores:
        yield warning("threads", f"{found}: they wait for each other", f"set OMP_NUM_THREADS={fair}")
    else:
        yield ok("threads", found)


def quota() -> float | None:
    """The processors that a container may use at a time; None if that is not limited."""
    try:
        most, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) / int(period)


def files(asked: Asked) -> Iterable[Finding]:
    """How many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found, advice = f"{soft} open files a process", f"ulimit -n {max(PLENTY, soft)}"
    if hard != resource.RLIM_INFINITY and hard < PLENTY:
        advice += f" (the system allows {hard}: raise it in /etc/security/limits.conf)"
    if soft != resource.RLIM_INFINITY and soft < FEW:
        yield failure("files", found, advice)
    elif soft != resource.RLIM_INFINITY and soft < PLENTY // 4:
        yield warning("files", found, advice)
    else:
        yield ok("files", found)
