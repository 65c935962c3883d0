"""Samples of machines: what is measured, how samples come to rank 0, and that nothing of it disturbs a run."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from inside import mlp, run_here

from finetune.config.recipe_schema import GuardSection
from finetune.distributed.rank_notes import RankNotes
from finetune.monitoring import machine_sampler
from finetune.monitoring.machine_sampler import MachineMeter, sample_machines
from finetune.monitoring.metrics import Reporter
from finetune.monitoring.trackers import Trackers
from finetune.training.built_run import BuiltRun
from finetune.utils.atomic_files import read_whole_lines

MIB = 2**20
OWN = {"pid": os.getpid(), "gpu": None}


class Machine:
    """Counters of a machine: two cards, its loopback, and a disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.bytes = 100.0, 0
        self.disks: Any = SimpleNamespace(read_bytes=0, write_bytes=0)
        card = {"eth0": "up,running", "eth1": "up", "lo": "up,loopback,running"}
        memory = SimpleNamespace(total=64 << 30, available=16 << 30)
        for name, answer in {
            "net_if_stats": lambda: {one: SimpleNamespace(flags=flags) for one, flags in card.items()},
            "net_io_counters": lambda pernic: {
                one: SimpleNamespace(bytes_recv=self.bytes, bytes_sent=2 * self.bytes) for one in card
            },
            "disk_io_counters": lambda: self.disks,
            "disk_usage": lambda path: SimpleNamespace(free=7 << 30),
            "virtual_memory": lambda: memory,
            "cpu_percent": lambda: 37.5,
        }.items():
            patch.setattr(psutil, name, answer)
        patch.setattr(machine_sampler, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_figures_of_a_machine(machine: Machine, tmp_path: Path) -> None:
    meter = MachineMeter(tmp_path)
    machine.now, machine.bytes = 104.0, 8 * MIB
    machine.disks = SimpleNamespace(read_bytes=4 * MIB, write_bytes=6 * MIB)
    sample = meter.read([OWN, {"pid": 2**22 + 1, "gpu": None}])
    resident = sample.pop("processes_gib")
    assert 0 < resident < 64
    assert sample == {
        "cpu_percent": 37.5,
        "memory_used_gib": 48.0,
        "memory_total_gib": 64.0,
        "received_mib_s": 4.0,
        "sent_mib_s": 8.0,
        "disk_read_mib_s": 1.0,
        "disk_written_mib_s": 1.5,
        "disk_free_gib": 7.0,
    }
    # A card that was taken out, and disks that are no longer counted.
    machine.now, machine.bytes, machine.disks = 105.0, 0, None
    sample = meter.read([OWN])
    assert (sample["received_mib_s"], "disk_read_mib_s" in sample) == (0.0, False)


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, NotImplementedError, RuntimeError])
def test_what_a_container_hides_is_left_out(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def hidden(*_: Any, **__: Any) -> Any:
        raise error

    for name in ("net_io_counters", "disk_io_counters"):
        monkeypatch.setattr(psutil, name, hidden)
    sample = MachineMeter(tmp_path).read([])
    assert sample.keys() == {"cpu_percent", "memory_used_gib", "memory_total_gib", "processes_gib", "disk_free_gib"}


# ---------------------------------------------------------------- GPUs


class NVMLError(Exception):
    pass


def fake_nvml(**answers: Any) -> Any:
    """The module of NVIDIA's driver with one GPU, `GPU-a`, which tells these figures only."""

    def refuse(*_: Any) -> Any:
        raise NVMLError

    def handle(uuid: str) -> str:
        return uuid if uuid == "GPU-a" else refuse()

    names = ("UtilizationRates", "MemoryInfo", "Temperature", "PowerUsage", "ClockInfo", "CurrentClocksEventReasons")
    told = {f"nvmlDeviceGet{name}": lambda *_, name=name: answers[name] for name in names if name in answers}
    closed: list[bool] = []
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        closed=closed,
        nvmlDeviceGetHandleByUUID=handle,
        **{f"nvmlDeviceGet{name}": refuse for name in names} | told,
    )


def gpus(folder: Path, *uuids: str | None) -> list[dict[str, Any]] | None:
    meter = MachineMeter(folder)
    sample = meter.read([{**OWN, "gpu": uuid} for uuid in uuids])
    meter.close()
    return sample.get("gpus")


def test_figures_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of two processes once; one that the driver does not know, or that is no GPU, not at all."""
    nvml = fake_nvml(
        UtilizationRates=SimpleNamespace(gpu=97),
        MemoryInfo=SimpleNamespace(used=60 << 30, total=80 << 30),
        Temperature=71,
        PowerUsage=640_500,
        ClockInfo=1755,
        CurrentClocksEventReasons=0x01 | 0x04 | 0x40,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpus(tmp_path, "a", "a", "b", None) == [
        {
            "percent": 97,
            "memory_used_gib": 60.0,
            "memory_total_gib": 80.0,
            "power_w": 640.5,
            "temperature_c": 71,
            "sm_clock_mhz": 1755,
            "throttled": ["power cap", "hardware thermal slowdown"],
        }
    ]
    assert nvml.closed == [True]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(Temperature=50))
    assert gpus(tmp_path, "a") == [{"temperature_c": 50}]


def test_without_the_package_or_the_driver_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus(tmp_path, "a") is None

    def missing() -> None:
        raise NVMLError

    nvml = fake_nvml(Temperature=50)
    nvml.nvmlInit = missing
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpus(tmp_path, "a") is None
    assert nvml.closed == []
    # Nor is the driver asked where no process has a GPU.
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())
    assert gpus(tmp_path, None) is None


def test_a_gpu_is_known_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}"))
    assert machine_sampler._gpu_uuid(torch.device("cuda", 3)) == "u3"
    assert machine_sampler._gpu_uuid(torch.device("cpu")) is None


# ---------------------------------------------------------------- in a run


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "machine sampler"]


def test_a_run_is_sampled(tmp_path: Path) -> None:
    heard, names = threading.Event(), list[str]()

    def meddle(run: BuiltRun) -> None:
        log, taken = run.reporter.log_machine, run.checkpoints.step_taken

        def hear(sample: dict[str, Any]) -> None:
            log(sample)
            if sample["step"] == 5:
                heard.set()

        def wait(number: int, sync: Any) -> None:
            taken(number, sync)
            if number + 1 == 5:
                names.extend(threads())
                assert heard.wait(60)

        run.reporter.log_machine, run.checkpoints.step_taken = hear, wait  # type: ignore[method-assign]

    done = run_here(mlp(tmp_path / "run", log={"every_steps": 1, "system_every_s": 0.01}), meddle)
    samples = read_whole_lines(done.directory / "machines.jsonl").whole
    assert names == ["machine sampler"]
    assert threads() == []
    assert {sample["machine"] for sample in samples} == {0}
    assert {5} <= {sample["step"] for sample in samples} <= set(range(21))
    assert [s["time"] for s in samples] == sorted(s["time"] for s in samples)
    assert all(0 < sample["processes_gib"] < sample["memory_total_gib"] for sample in samples)
    assert done.steps == list(range(1, 21))


def test_no_interval_takes_no_sample(tmp_path: Path) -> None:
    backend: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    with sample_machines(backend, tmp_path, None, lambda: 0, print):
        assert threads() == []


def once(before: Callable[[], None] = lambda: None) -> Callable[[], bool]:
    """Ends the sampling of a machine after one sample, before which something else happens."""
    told = iter([False, True])

    def is_over() -> bool:
        if not (over := next(told)):
            before()
        return over

    return is_over


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a launch of three ranks, two of them on machine 0."""
    distributed: Any = torch.distributed
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    # As a launcher keeps it.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return server


def sample_as(patch: pytest.MonkeyPatch, folder: Path, rank: int, step: int, is_over: Any, report: Any) -> None:
    """Samples the machine of a first rank."""
    notes = RankNotes(rank, 3)
    notes.write(f"process/{rank}", OWN)
    patch.setenv("GROUP_RANK", "0" if rank < 2 else "1")
    patch.setenv("LOCAL_WORLD_SIZE", "2" if rank < 2 else "1")
    machine_sampler._sample_machine(notes, folder, is_over, lambda: step, report)


def test_rank_0_hears_of_all_machines(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []

    def refuse(sample: dict[str, Any]) -> None:
        raise AssertionError("only rank 0 reports")

    def other(step: int) -> None:
        sample_as(monkeypatch, tmp_path, 2, step, once(), refuse)

    other(1)  # of an earlier run of the same processes
    RankNotes(1, 3).write("process/1", OWN)
    sample_as(monkeypatch, tmp_path, 0, 7, once(), heard.append)
    assert [(sample["machine"], sample["step"]) for sample in heard] == [(0, 7)]
    heard.clear()
    sample_as(monkeypatch, tmp_path, 0, 8, once(lambda: other(5)), heard.append)
    assert [(sample["machine"], sample["step"]) for sample in heard] == [(0, 8), (1, 5)]
    # Two processes here, and one there.
    assert heard[0]["processes_gib"] == pytest.approx(2 * heard[1]["processes_gib"], rel=0.2)


def test_a_lost_store_ends_it_quietly(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: RankNotes, name: str, note: Any) -> None:
        raise torch.distributed.DistNetworkError("the store is gone")

    backend: Any = SimpleNamespace(rank=0, world_size=3, device=torch.device("cpu"))
    raised: list[Any] = []
    monkeypatch.setattr(RankNotes, "write", gone)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with sample_machines(backend, tmp_path, 1e-3, lambda: 0, print):
        for thread in threading.enumerate():
            if thread.name == "machine sampler":
                thread.join(60)
        assert threads() == []
    assert raised == []


def test_samples_wait_for_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    backend: Any = SimpleNamespace(is_main=True)
    with Reporter(backend, run, 0, trackers=Trackers((), run, {}), quiet=True, guard=GuardSection()) as reporter:
        run.rmdir()
        for step in (1, 2):
            reporter.log_machine({"step": step})
        run.mkdir()
    assert capsys.readouterr().err.count("machines.jsonl: No such file or directory. It is kept in memory") == 1
    assert [line["step"] for line in read_whole_lines(run / "machines.jsonl").whole] == [1, 2]


def test_trackers_hear_the_newest_sample_with_a_line(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    trackers: Any = SimpleNamespace(open=list, close=list, add=lambda line: heard.append(line) or [])
    backend: Any = SimpleNamespace(is_main=True)
    with Reporter(backend, tmp_path, 0, trackers=trackers, quiet=True, guard=GuardSection()) as reporter:
        for machine, value in ((0, 1.0), (1, 2.0), (0, 3.0)):
            reporter.log_machine({"step": 1, "time": 5.0, "machine": machine, "host": "n", "cpu_percent": value})
        for loss in (0.5, 0.25):
            reporter.log({"step": 2, "loss": loss})
    told = [{key: value for key, value in line.items() if key != "time"} for line in heard]
    both = {"machine/0/cpu_percent": 3.0, "machine/1/cpu_percent": 2.0}
    assert told == [{"step": 2, "loss": 0.5, **both}, {"step": 2, "loss": 0.25}]
    assert all("machine" not in key for line in read_whole_lines(tmp_path / "metrics.jsonl").whole for key in line)
