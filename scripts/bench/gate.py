"""The end of the line in an arm's process: its loop is held at a step's boundary until it is its turn.

Between two turns a process waits in a read from a socket, which takes no time of the processor. What is measured is
from one boundary to another, so that all that a loop does beside its steps (logging, reading ahead) is in it.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Counter(TorchDispatchMode):
    """Counts reads of the device by the host, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.collectives = 0
        self.steps: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        elif func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.collectives += 1
        return func(*args, **(kwargs or {}))

    def end_step(self) -> None:
        """Notes what was counted since it was called last."""
        self.steps.append((self.reads, self.collectives))
        self.reads = self.collectives = 0


_MOST = 4096
"""Micro-batches of a turn."""


class Gate:
    """Lets the loop pass step by step, and says afterwards what a turn took."""

    def __init__(self, address: str, arm: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._lines: IO[bytes] = self._socket.makefile("rb")
        self._arm, self._rank, self._left = arm, rank, 0
        self._began: tuple[float, float] | None = None
        self._counter: Counter | None = None
        self._baseline = memory("VmRSS")
        # Numbers are copied into memory that is there: kept one by one, small tensors would sit at the end of the
        # heap, which then could not shrink between steps.
        self._losses, self._norms = torch.zeros(_MOST, dtype=torch.float64), torch.zeros(_MOST, dtype=torch.float64)
        self._steps: list[int] = []
        self._step = self._targets = self._num_norms = 0

    def before_step(self) -> None:
        """Returns when the step may be taken; ends the process when there are no more turns."""
        if self._counter is not None:
            self._counter.end_step()
        if not self._left:
            if self._began is None:
                Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            else:
                self._report(self._began)
            order = self._wait()
            if order["count"]:
                self._counter = Counter()
                self._counter.__enter__()
            self._left = order["steps"]
            self._began = time.perf_counter(), time.process_time()
        self._left -= 1
        self._step += 1

    def add(self, loss_sum: Any, targets: int) -> None:
        """Notes a part of the step's loss, summed over its targets; it is read when the turn is over."""
        self._losses[len(self._steps)] = loss_sum.detach()
        self._steps.append(self._step)
        self._targets += targets

    def norm(self, value: Any) -> None:
        """Notes the step's gradient norm."""
        self._norms[self._num_norms] = value
        self._num_norms += 1

    def _wait(self) -> dict[str, Any]:
        hello = {"arm": self._arm, "rank": self._rank, "pid": os.getpid()}
        self._send(hello if self._began is None else {"ready": True})
        order: dict[str, Any] = json.loads(self._lines.readline() or b'{"steps": 0}')
        if not order["steps"]:
            sys.stdout.flush()
            os._exit(0)
        return order

    def _report(self, began: tuple[float, float]) -> None:
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        counted = None
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            counted = self._counter.steps
            self._counter = None
        sums: dict[int, float] = {}
        for step, loss in zip(self._steps, self._losses.tolist(), strict=False):
            sums[step] = sums.get(step, 0.0) + loss
        self._send(
            {
                "wall_s": wall,
                "cpu_s": cpu,
                "loss_sums": [sums[step] for step in sorted(sums)],
                "norms": self._norms[: self._num_norms].tolist(),
                "targets": self._targets,
                "counted": counted,
                "peak_mib": memory("VmHWM"),
                "baseline_mib": self._baseline,
            }
        )
        self._steps, self._targets, self._num_norms = [], 0, 0

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def memory(field: str) -> float:
    """A field of this process's status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}")
