"""Checks of what processes meet by: ports, names, clocks, the hub, and two processes that really add up a tensor."""

import ctypes
import ipaddress
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from finetune.diagnostics.doctor.check_result import Asked, CheckResult, failure, ok, run_probe, warning
from finetune.distributed.device_selection import visible_gpus
from finetune.utils.hub_access import is_cached, why_unreachable
from finetune.utils.temporary_folders import temporary_folder


def port(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether the port that the launch file names is free."""
    named = asked.foreseen.asked.main_process_port if asked.foreseen else 0
    if asked.machines > 1 and asked.foreseen and asked.foreseen.asked.machine_rank != 0:
        yield ok("port", f"{named} on the first machine; look there")
    elif is_free(named):
        yield ok("port", f"{named} is free" if named else "there are free ones")
    elif named == 0:
        yield failure("port", "no port of this machine can be bound", "look at its firewall, and at `ip link` for lo")
    elif asked.machines > 1:
        yield failure("port", f"{named} is taken", "name another main_process_port, the same on all machines")
    else:
        yield warning("port", f"{named} is taken, and another run may meet there", "give --main_process_port 0")


def is_free(number: int) -> bool:
    """Returns True if a port can be bound; 0 is any."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            return False
    return True


def hostname(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether this machine's name is an address that others reach; gloo tells them that one."""
    name, several = socket.gethostname(), asked.machines > 1
    # Where it matters, `finetune launch` names the interface.
    advice = "add the name with the machine's address to /etc/hosts, or set GLOO_SOCKET_IFNAME to its interface"
    advice += "; `finetune launch` does without"
    addresses = host_addresses(name)
    if not addresses:
        yield warning("hostname", f"{name} has no address", advice)
    elif several and is_only_here(addresses) and "GLOO_SOCKET_IFNAME" not in asked.env:
        yield warning("hostname", f"{name} is {', '.join(addresses)}, which other machines do not reach", advice)
    else:
        yield ok("hostname", f"{name} is {', '.join(addresses)}")


def first_machine(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether the machine where all meet is there, and is the one that it should be."""
    if asked.foreseen is None or asked.machines == 1:
        yield ok("machines", "one")
        return
    named, rank = asked.foreseen.asked.main_process_ip, asked.foreseen.asked.machine_rank
    advice = "give --main_process_ip with an address of the first machine, the same on all"
    addresses = host_addresses(named) if named else []
    ours = bool(set(addresses) & own_addresses())
    if not addresses:
        yield failure("machines", f"main_process_ip is {named}, which has no address", advice)
    elif is_only_here(addresses):
        yield failure("machines", f"main_process_ip is {named}, which is each machine itself", advice)
    elif (rank == 0) != ours:
        mismatch = f"main_process_ip {named} is {'an' if ours else 'no'} address of this machine"
        yield failure("machines", f"this is machine {rank}, but {mismatch}", f"{advice}, or --machine_rank")
    elif ours:
        yield ok("machines", f"{asked.machines}; the first one is this")
    else:
        yield ok("machines", f"{asked.machines}; the first one, {named}, is known; whether it answers shows the start")


def clock(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether this machine's clock can be right; logs of several machines, and certificates, need that."""
    now, newest = time.time(), max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    if now < newest:
        message = f"it says {time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC, before its files were written"
        yield warning("clock", message, "set it; certificates of the hub look invalid else")
    elif asked.machines > 1 and not is_synchronised():
        yield warning("clock", "the kernel does not know it to be synchronised", "run an NTP client on all machines")
    else:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)))


def is_synchronised() -> bool:
    """Returns True if the kernel says that a time server steers the clock.

    Source: adjtimex(2); without modes it only reads, and 5 is TIME_ERROR: not synchronised.
    """
    buffer = ctypes.create_string_buffer(512)
    return bool(ctypes.CDLL(None).adjtimex(buffer) != 5)


def host_addresses(name: str) -> list[str]:
    """Returns the addresses of a host; none if it is not known."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def own_addresses() -> set[str]:
    """Returns the addresses of this machine's interfaces."""
    return {address.address for entries in psutil.net_if_addrs().values() for address in entries}


def is_only_here(addresses: list[str]) -> bool:
    """Returns True if no other machine reaches any of these addresses."""
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def interfaces(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether the network interfaces that variables name are there."""
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


# They meet by a file, so that a port which is taken is another check's finding.
SCRIPT = """
import datetime, sys, torch
from finetune.utils.compat.torch_private import start_gloo_with_one_worker

def meet(rank, backend, folder):
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    limit = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit
    )
    values = torch.full((1024,), rank + 1.0, device=device)
    torch.distributed.all_reduce(values)
    assert values.eq(3.0).all(), f"1 + 2 is {values[0].item()}"
    torch.distributed.destroy_process_group()

start_gloo_with_one_worker()
torch.multiprocessing.start_processes(meet, sys.argv[1:], nprocs=2, start_method="fork")
"""


def all_reduce(asked: Asked) -> Iterable[CheckResult]:
    """Checks an all-reduce over two processes of this machine."""
    backend = "nccl" if visible_gpus() > 1 else "gloo"
    start = time.monotonic()
    with temporary_folder() as folder:
        _, problem = run_probe(SCRIPT, backend, str(folder), env=asked.env)
    advice = "look at hostname, interfaces and firewall; GLOO_SOCKET_IFNAME=lo (NCCL_SOCKET_IFNAME) takes the local one"
    if problem:
        yield failure("all-reduce", f"two processes do not agree by {backend}: {problem}", advice)
    else:
        took_s = time.monotonic() - start
        yield ok("all-reduce", f"two processes agree by {backend}, in {took_s:.1f} s with their start")


def reach(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether what the recipe names on the hub can be had: from there, or from the cache."""
    problem = why_unreachable(asked.env)
    # Names on the hub, each with its kind as the cache's folders call it.
    wanted: dict[str, str] = {}
    if (recipe := asked.recipe) is not None:
        models = (recipe.model.name, recipe.tokenizer.name, *(one.name for one in recipe.frozen_models.values()))
        wanted = {name: "models" for name in models if name is not None and not Path(name).exists()}
        sources = (*recipe.data.train, *recipe.data.validation)
        wanted |= {source.hub: "datasets" for source in sources if source.hub is not None}
    missing = [name for name, kind in wanted.items() if not is_cached(asked.env, kind, name)]
    names = ", ".join(wanted)
    advice = "let it be reached, or fill HF_HOME on another machine and bring it here, or name local directories"
    if problem is None:
        yield ok("hub", f"it can be reached{f', for {names}' if names else ''}")
    elif missing:
        yield failure("hub", f"{problem}, and not in the cache: {', '.join(missing)}", advice)
    elif recipe is None:
        yield warning("hub", f"{problem}: names on it must be in the cache", advice)
    else:
        cached = f" but {names}, which is cached" if names else ""
        yield ok("hub", f"{problem}; the recipe needs nothing of it{cached}")
