"""A wire that delays and loses frames, for kernels without netem: `slow_link.py DELAY_S LOSS IF_A IF_B`.

It joins two network interfaces, and waits each frame for DELAY_S on its way; LOSS of them, from 0 to 1, never come. It
prints `up` once it carries frames. Whoever sends must complete checksums and segments itself: `slow_link.py plain IF`
has an interface's driver do so.
"""

import array
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import sys
import time

_ANY_PROTOCOL = 0x0003
# Source: Linux, `ethtool.h` and `sockios.h`: checksums, and segments that are cut or joined.
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"tx": 0x17, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}
_BURST = 64


def send_plain_frames(interface: str) -> None:
    """Turns off what a driver leaves to hardware, as `ethtool -K INTERFACE tx off tso off gso off gro off` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFFLOADS.values():
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), value.buffer_info()[0]))


def carry(delay_s: float, loss: float, interfaces: list[str]) -> None:
    """Carries frames between two interfaces until it is killed."""
    ends = []
    for name in interfaces:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ANY_PROTOCOL))
        end.bind((name, 0))
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        ends.append(end)
    print("up", flush=True)
    under_way: list[tuple[float, int, socket.socket, bytes]] = []
    number, dice = itertools.count(), random.Random(0)
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait)[0]:
            for _ in range(_BURST):
                try:
                    frame, where = end.recvfrom(65536)
                except BlockingIOError:
                    break
                except OSError:  # the interface is gone
                    return
                # What it has sent itself is seen as well.
                if where[2] != socket.PACKET_OUTGOING and dice.random() >= loss:
                    other = ends[1 - ends.index(end)]
                    heapq.heappush(under_way, (time.monotonic() + delay_s, next(number), other, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(under_way)
            try:
                other.send(frame)
            except OSError:  # an interface that is gone, as a wire that ends nowhere
                continue


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        send_plain_frames(sys.argv[2])
    else:
        carry(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:5])
