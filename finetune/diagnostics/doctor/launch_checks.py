"""Whether recipe, launch file, environment variables and this machine agree."""

from collections.abc import Iterable

import psutil

from finetune.diagnostics.doctor.finding import Asked, Finding, failure, ok, warning
from finetune.distributed import device_selection
from finetune.distributed.launch.launch_environment import read_launch_environment
from finetune.distributed.launch.launch_key_docs import PREFIXES
from finetune.distributed.resolve_config import agree, check_trackers


def agreement(asked: Asked) -> Iterable[Finding]:
    """Recipe and launch; what contradicts is raised, as a run raises it."""
    if asked.recipe is None:
        yield ok("agreement", "not looked at; name a recipe with --recipe")
        return
    from finetune.optim import optimizers

    foreseen = asked.foreseen or read_launch_environment(None, {}, asked.env)
    settled = agree(asked.recipe, foreseen.launch, device_selection.of_torch(), foreseen.env)
    check_trackers(asked.recipe)
    optimizers.check_optimizer(asked.recipe, cut=foreseen.launch.cuts_state, flat=foreseen.launch.flattens)
    what = f"{foreseen.launch.kind} on {foreseen.launch.num_processes} process(es) in {settled.precision}"
    yield ok("agreement", f"{what}, {settled.accumulation} micro-batch(es) a step and process")


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
