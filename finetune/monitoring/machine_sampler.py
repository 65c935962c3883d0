"""Samples of machines while a run trains: CPU, memory, network, disk, and GPUs as the driver knows them.

A thread takes them. It joins no collective and queues nothing on a device.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.distributed.backend import Backend
from finetune.distributed.rank_notes import RankNotes

# How long the end of a run waits for a sample that is being taken. A driver that hangs does not hold the run.
_LAST_SAMPLE_S = 2.0

# Why a GPU's clock is lower than it could be, but for having nothing to do. Source: nvml.h, nvmlClocksEventReason*.
_THROTTLES = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}


@contextmanager
def sample_machines(
    backend: Backend,
    directory: Path,
    every_s: float | None,
    step: Callable[[], int],
    report: Callable[[dict[str, Any]], None],
) -> Iterator[None]:
    """Samples each machine meanwhile, by its first rank; every rank enters it.

    Args:
        directory: Run directory, of whose disk the free space is measured.
        every_s: Seconds between two samples; None takes none.
        step: Returns the number of steps taken.
        report: Is told of the samples of all machines, on rank 0 and in another thread.
    """
    if every_s is None:
        yield
        return
    own = {"pid": os.getpid(), "gpu": _gpu_uuid(backend.device)}
    over = threading.Event()

    def sample() -> None:
        # The store is gone: the run ends, or is about to, for a reason that others tell.
        with suppress(RuntimeError):
            notes = RankNotes(backend.rank, backend.world_size)
            notes.write(f"process/{backend.rank}", own)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _sample_machine(notes, directory, lambda: over.wait(every_s), step, report)

    thread = threading.Thread(target=sample, name="machine sampler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST_SAMPLE_S)


def _sample_machine(
    notes: RankNotes,
    directory: Path,
    is_over: Callable[[], bool],
    step: Callable[[], int],
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Samples this machine whenever `is_over` returns False, and leaves a note of it; rank 0 reads those of all."""
    # Of torch's launcher, which numbers the ranks of a machine one after the other.
    machine, machines = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    here = range(notes.rank, notes.rank + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    names = [f"machine/{number}" for number in range(machines)]
    meter = MachineMeter(directory)
    seen = notes.read(names)  # of an earlier run of these processes
    try:
        while not is_over():
            processes = notes.read([f"process/{rank}" for rank in here]).values()
            about = {"step": step(), "time": round(time.time(), 3), "machine": machine, "host": socket.gethostname()}
            notes.write(names[machine], {**about, **meter.read(processes)})
            if notes.rank == 0:
                before, seen = seen, notes.read(names)
                for name, sample in seen.items():
                    if sample != before.get(name):
                        report(sample)
    finally:
        meter.close()


class MachineMeter:
    """Meter of this machine. Rates are of the time since the reading before, or since it was made."""

    def __init__(self, directory: Path) -> None:
        """`directory` lies on the disk whose free space is measured."""
        self._directory = directory
        self._nvml: Any = None
        # What a machine sends to itself goes through no network.
        self._loopback = set[str]()
        with suppress(OSError):
            cards = psutil.net_if_stats()
            self._loopback = {name for name, card in cards.items() if "loopback" in card.flags.split(",")}
        psutil.cpu_percent()
        self._read_at, self._counted = time.monotonic(), self._count()

    def read(self, processes: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Returns a sample without what is not known here; `processes` are the run's, with `pid` and UUID of `gpu`."""
        processes = list(processes)
        now, counted, memory = time.monotonic(), self._count(), psutil.virtual_memory()
        resident = 0
        for process in processes:
            with suppress(psutil.Error):  # it has ended
                resident += psutil.Process(process["pid"]).memory_info().rss
        sample: dict[str, Any] = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_used_gib": _gib(memory.total - memory.available),
            "memory_total_gib": _gib(memory.total),
            "processes_gib": _gib(resident),
        }
        for name, count in counted.items():
            if name in self._counted:
                grown = max(0, count - self._counted[name])  # less where a card or disk has been taken out
                sample[name] = round(grown / 2**20 / max(now - self._read_at, 1e-9), 3)
        self._read_at, self._counted = now, counted
        with suppress(OSError):
            sample["disk_free_gib"] = _gib(psutil.disk_usage(str(self._directory)).free)
        # Two processes may share a GPU.
        uuids = dict.fromkeys(process["gpu"] for process in processes if process["gpu"] is not None)
        if gpus := [gpu for uuid in uuids if (gpu := self._read_gpu(uuid)) is not None]:
            sample["gpus"] = gpus
        return sample

    def close(self) -> None:
        """Lets go of the driver."""
        if self._nvml:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _count(self) -> dict[str, int]:
        """Returns the bytes moved since the machine started, by the rate's key; a container may count no disks."""
        counted = {}
        with suppress(OSError, RuntimeError):
            if cards := [n for name, n in psutil.net_io_counters(pernic=True).items() if name not in self._loopback]:
                counted["received_mib_s"] = sum(card.bytes_recv for card in cards)
                counted["sent_mib_s"] = sum(card.bytes_sent for card in cards)
        with suppress(OSError, RuntimeError):
            if (disks := psutil.disk_io_counters()) is not None:
                counted |= {"disk_read_mib_s": disks.read_bytes, "disk_written_mib_s": disks.write_bytes}
        return counted

    def _read_gpu(self, uuid: str) -> dict[str, Any] | None:
        """Returns a sample of a GPU, without what it does not tell; None where the driver does not know it."""
        if self._nvml is None:
            self._nvml = _open_nvml()
        nvml = self._nvml
        if not nvml:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:
            return None

        def ask(what: str, *more: Any, take: Callable[[Any], Any] = lambda answer: answer) -> Any:
            try:
                return take(getattr(nvml, f"nvmlDeviceGet{what}")(handle, *more))
            except nvml.NVMLError:
                return None

        sample = {
            "percent": ask("UtilizationRates", take=lambda busy: busy.gpu),
            "memory_used_gib": ask("MemoryInfo", take=lambda memory: _gib(memory.used)),
            "memory_total_gib": ask("MemoryInfo", take=lambda memory: _gib(memory.total)),
            "power_w": ask("PowerUsage", take=lambda milliwatts: milliwatts / 1000),
            "temperature_c": ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": ask("ClockInfo", nvml.NVML_CLOCK_SM),
            "throttled": ask(
                "CurrentClocksEventReasons", take=lambda bits: [why for bit, why in _THROTTLES.items() if bits & bit]
            ),
        }
        return {key: value for key, value in sample.items() if value is not None}


def _open_nvml() -> Any:
    """Returns the module that asks NVIDIA's driver; False without it or without the driver."""
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return pynvml
    return False


def _gpu_uuid(device: torch.device) -> str | None:
    """Returns a GPU's UUID, by which the driver knows it whatever CUDA_VISIBLE_DEVICES hides; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _gib(size: int) -> float:
    return round(size / 2**30, 3)
