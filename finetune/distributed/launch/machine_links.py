"""Connections between machines, each to each: whether they can be made, how far clocks are apart, how fast they are.

gloo and NCCL connect every machine with others at ports that the system picks, so that a firewall which lets the port
of the rendezvous through stops them later. Loads no torch.
"""

import socket
import statistics
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
_PIECE = bytes(1 << 20)
# What follows the token: an echo, or bytes to swallow.
_ECHO, _SWALLOW = b"e", b"s"


@dataclass(frozen=True)
class Link:
    """A connection that was tried, from this machine to another."""

    problem: str = ""
    """Why it could not be made; "" if it was."""
    clock_s: float = 0.0
    """Seconds that the other's clock is ahead."""
    latency_s: float = 0.0
    """Seconds from one machine to the other and back, at the median."""
    bytes_per_s: float = 0.0
    """Bandwidth of one TCP connection; 0 if it was not measured."""


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
        with connection, suppress(OSError, struct.error):
            connection.settimeout(4 * CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            token = _read(connection, _TOKEN)
            connection.sendall(token + struct.pack("!i", self._rank))
            while (asked := connection.recv(1)) != b"":
                if asked == _ECHO:
                    connection.sendall(struct.pack("!d", time.time()))
                    continue
                (left,) = struct.unpack("!q", _read(connection, 8))
                while left:
                    left -= len(connection.recv(min(left, len(_PIECE))) or _gone())
                connection.sendall(_SWALLOW)


def _read(connection: socket.socket, number: int) -> bytes:
    found = b""
    while len(found) < number:
        found += connection.recv(number - len(found)) or _gone()
    return found


def _gone() -> bytes:
    raise ConnectionResetError("the other side has closed the connection")


def try_link(address: str, port: int, rank: int, token: bytes, *, measure_s: float = 0.0) -> Link:
    """Connects to the listener of another machine.

    Args:
        rank: The number of that machine.
        token: 16 bytes that it must repeat.
        measure_s: Seconds to measure its bandwidth for; 0 leaves that out.
    """
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            answer = _read(connection, _TOKEN + 4)
            if answer != token + struct.pack("!i", rank):
                return Link(f"something else answers at {address} port {port}")
            trips, clocks = [], []
            for _ in range(20 if measure_s else 3):
                asked, started = time.time(), time.perf_counter()
                connection.sendall(_ECHO)
                (clock,) = struct.unpack("!d", _read(connection, 8))
                trips.append(time.perf_counter() - started)
                clocks.append(clock - asked - trips[-1] / 2)
            speed = _bandwidth(connection, measure_s) if measure_s else 0.0
            return Link("", statistics.median(clocks), statistics.median(trips), speed)
    except TimeoutError:
        return Link(f"no answer from {address} port {port} within {CONNECT_S:g} s")
    except OSError as error:
        return Link(f"{address} port {port}: {error.strerror or error}")


def _bandwidth(connection: socket.socket, seconds: float) -> float:
    """Returns bytes a second, counted when the other side has all of them; pieces double until they take so long."""
    connection.settimeout(6 * CONNECT_S)  # a slow link is a finding
    pieces = 1
    while True:
        started = time.perf_counter()
        connection.sendall(_SWALLOW + struct.pack("!q", pieces * len(_PIECE)))
        for _ in range(pieces):
            connection.sendall(_PIECE)
        _read(connection, 1)
        took = time.perf_counter() - started
        if took >= seconds / 2 or pieces >= 1 << 16:
            return pieces * len(_PIECE) / took
        pieces *= 2


def try_links(places: Mapping[int, tuple[str, int]], token: bytes) -> dict[int, Link]:
    """Connects to the listeners of several machines, given by rank as address and port, at once."""
    with ThreadPoolExecutor(min(32, len(places) or 1)) as pool:
        made = {rank: pool.submit(try_link, *place, rank, token) for rank, place in places.items()}
        return {rank: link.result() for rank, link in made.items()}


def rounds(number: int) -> list[list[tuple[int, int]]]:
    """Returns every pair of `number` machines once, in rounds in which no machine has two; the circle method."""
    places = [*range(number), *([-1] if number % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places), strict=False)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return found
