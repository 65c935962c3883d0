"""Environment variables that say something else than the files."""

from collections.abc import Iterable

import psutil

from finetune.backend.meanings import PREFIXES
from finetune.doctor.finding import Asked, Finding, failure, ok, warning

# They only say more.
TALK = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


def overriding(asked: Asked) -> Iterable[Finding]:
    """Variables that act on a run beside launch file and recipe."""
    clean = True
    exported = asked.foreseen.exported if asked.foreseen else {}
    for name in sorted(asked.env):
        if not name.startswith(tuple(PREFIXES)) or name in (*TALK, *exported):
            continue  # what the launcher exports takes the place of what was there
        clean = False
        beside = "beside the launch file" if asked.foreseen else "on every run"
        yield warning("variables", f"{name}={asked.env[name]} acts {beside}", f"unset {name}, unless it is meant")
    if clean:
        yield ok("variables", "none overrides a file")


def interfaces(asked: Asked) -> Iterable[Finding]:
    """Whether the network interfaces that variables name are there."""
    there = sorted(psutil.net_if_addrs())
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = asked.env.get(name, "")
        if not value or value.startswith("^"):  # NCCL: all but these
            continue
        exact = value.startswith("=") or not name.startswith("NCCL")
        words = value.removeprefix("=").split(",")
        if not any(here == word if exact else here.startswith(word) for word in words for here in there):
            yield failure(
                "interfaces", f"{name} is {value}, but there are {', '.join(there)}", f"correct or unset {name}"
            )
            return
    yield ok("interfaces", ", ".join(there))
