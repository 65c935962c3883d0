"""The network interface by which this machine reaches another one, found without sending anything. Loads no torch."""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from finetune.utils.errors import BackendError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that tell gloo and NCCL which interface to take."""


@dataclass(frozen=True)
class NetworkInterface:
    """An interface of this machine."""

    name: str
    """Name of the interface, such as eth0; "" if no interface has the address, as behind some container networks."""
    address: str
    """Its address, by which other machines reach this one."""
    peer: str
    """Address of the machine that it reaches."""

    @property
    def reaches_itself(self) -> bool:
        """True if the other machine is this one."""
        return self.peer == self.address or self.peer in own_addresses()


def own_addresses() -> dict[str, str]:
    """Returns the addresses of this machine that others may reach, each with the name of its interface."""
    interfaces = {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    kinds = {text: ipaddress.ip_address(text) for text in interfaces}
    return {text: interfaces[text] for text, kind in kinds.items() if not (kind.is_loopback or kind.is_link_local)}


def bare_host(host: str) -> str:
    """Returns a host without the brackets that IPv6 addresses have in front of a port."""
    return host.removeprefix("[").removesuffix("]")


def find_interface(host: str) -> NetworkInterface:
    """Returns the interface by which this machine reaches a host.

    A UDP socket is connected, which sends no packet: the kernel picks the route, and with it the socket's own address.

    Raises:
        socket.gaierror: If the host has no address, which may come later where names are those of containers.
        BackendError: If its address is that of each machine itself, or there is no route to it.
    """
    resolved = socket.getaddrinfo(bare_host(host), 9, type=socket.SOCK_DGRAM)
    entries = [entry for entry in resolved if not ipaddress.ip_address(entry[4][0]).is_loopback]
    own = ", ".join(f"{address} ({name})" for address, name in own_addresses().items()) or "none"
    if not entries:
        raise BackendError(
            f"main_process_ip is {host}, which is {resolved[0][4][0]} here: the machine itself, to each machine. Give "
            "--main_process_ip an address by which the others reach machine 0, the same on all, or correct the name in "
            f"/etc/hosts. Addresses of this machine: {own}."
        )
    reasons = []
    for family, _, _, _, sockaddr in entries:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(sockaddr)
                address = probe.getsockname()[0].partition("%")[0]
        except OSError as error:
            reasons.append(f"{sockaddr[0]}: {error.strerror}")
            continue
        return NetworkInterface(own_addresses().get(address, ""), address, str(sockaddr[0]))
    raise BackendError(
        f"main_process_ip is {host}, to which this machine has no route ({'; '.join(reasons)}). Give --main_process_ip "
        f"an address of machine 0 in a network that all machines are in. Addresses of this machine: {own}."
    )


def named_interface(default: NetworkInterface, env: Mapping[str, str]) -> NetworkInterface:
    """Returns the interface that the environment names for gloo, if it does, else the one that was found.

    Raises:
        BackendError: If the named one is not there.
    """
    check_named(env)
    name = env.get(VARIABLES[0], "").split(",")[0]
    if not name:
        return default
    there = psutil.net_if_addrs()
    family = socket.AF_INET6 if ":" in default.address else socket.AF_INET
    addresses = [entry.address.partition("%")[0] for entry in there.get(name, []) if entry.family == family]
    if not addresses:
        raise BackendError(
            f"{VARIABLES[0]} is {name}, an interface that has no address of the kind of main_process_ip. Correct "
            f"it, or unset it: the interface that reaches machine 0 is found ({default.name or default.address})."
        )
    return NetworkInterface(name, addresses[0], default.peer)


def check_named(env: Mapping[str, str]) -> None:
    """Raises a `BackendError` if the environment names an interface for gloo that this machine does not have."""
    there = psutil.net_if_addrs()
    for name in filter(None, env.get(VARIABLES[0], "").split(",")):
        if name not in there:
            raise BackendError(
                f"{VARIABLES[0]} is {name}, an interface that this machine does not have. There are "
                f"{', '.join(sorted(there))}. Correct it, or unset it: the interface that reaches machine 0 is found."
            )


def interface_variables(interface: NetworkInterface, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that tell gloo and NCCL to take an interface, of those that are not set."""
    # NCCL takes a name as the beginning of one, unless `=` stands before it.
    values = {VARIABLES[0]: interface.name, VARIABLES[1]: f"={interface.name}"}
    return {name: value for name, value in values.items() if interface.name and name not in env}
