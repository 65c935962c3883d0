"""Connections between machines, each to each: whether they can be made, how far clocks are apart, how late they answer.

gloo and NCCL connect every machine with others at ports that the system picks, so that a firewall which lets the port
of the rendezvous through stops them later. Loads no torch.
"""

import socket
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

CONNECT_S = 5.0
"""Seconds within which a machine must answer."""

_TOKEN = 16
# Behind the token: the machine's rank, and its clock.
_ANSWER = struct.Struct("!id")


@dataclass(frozen=True)
class Link:
    """A connection that was tried, from this machine to another."""

    problem: str = ""
    """Why it could not be made; "" if it was."""
    clock_s: float = 0.0
    """Seconds that the other's clock is ahead."""
    latency_s: float = 0.0
    """Seconds from one machine to the other and back."""


class LinkListener:
    """Answers connections at a port of its own, until it is closed.

    Args:
        address: This machine's.
        rank: This machine's number, which it says, so that no other program is taken for it.
    """

    def __init__(self, address: str, rank: int) -> None:
        self._rank = rank
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="links", daemon=True).start()

    def close(self) -> None:
        """Ends the listening; connections that were made are answered to their end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), name="link", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(4 * CONNECT_S)
            token = connection.makefile("rb").read(_TOKEN)
            connection.sendall(token + _ANSWER.pack(self._rank, time.time()))


def try_link(address: str, port: int, rank: int, token: bytes) -> Link:
    """Connects to the listener of another machine.

    Args:
        rank: The number of that machine.
        token: 16 bytes that it must repeat.
    """
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            asked, started = time.time(), time.perf_counter()
            connection.sendall(token)
            answer = connection.makefile("rb").read(_TOKEN + _ANSWER.size)
            trip_s = time.perf_counter() - started
    except TimeoutError:
        return Link(f"no answer from {address} port {port} within {CONNECT_S:g} s")
    except OSError as error:
        return Link(f"{address} port {port}: {error.strerror or error}")
    there, clock = _ANSWER.unpack(answer[_TOKEN:]) if len(answer) == _TOKEN + _ANSWER.size else (None, 0.0)
    if answer[:_TOKEN] != token or there != rank:
        return Link(f"something else answers at {address} port {port}")
    return Link("", clock - asked - trip_s / 2, trip_s)


def try_links(places: Mapping[int, tuple[str, int]], token: bytes) -> dict[int, Link]:
    """Connects to the listeners of several machines, given by rank as address and port, at once."""
    with ThreadPoolExecutor(min(32, len(places) or 1)) as pool:
        made = {rank: pool.submit(try_link, *address, rank, token) for rank, address in places.items()}
        return {rank: link.result() for rank, link in made.items()}
