"""`finetune doctor`: every check can fail, says what to do, and leaves nothing behind."""

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from filelock import FileLock
from forkserver import ForkServer
from harness import ROOT
from ranks import Place, free_port, lines

from finetune.cli.main import main
from finetune.config.recipe import load_recipe
from finetune.diagnostics.doctor import doctor, machine_checks, network_checks
from finetune.diagnostics.doctor.check_result import Asked, CheckResult, run_probe
from finetune.distributed import native_ops
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.utils import hub_access

Patch = pytest.MonkeyPatch
VERSION = "importlib.metadata.version"
# What a case puts in place of this machine's, and what is asked for.
Case = tuple[Callable[[Asked], Any], str, str, Callable[[Patch, Place], Asked]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Patch, fork_server: ForkServer) -> Place:
    monkeypatch.chdir(ROOT)
    return Place(tmp_path, fork_server)


def asking(
    patches: dict[str, Any] | None = None,
    *,
    overrides: Sequence[str] | None = None,
    launch: str | None = None,
    env: dict[str, str] | None = None,
    **changes: Any,
) -> Callable[[Patch, Place], Asked]:
    """What is asked for, on a machine with patches.

    Args:
        patches: Values by their place; that of a check begins with its module.
        overrides: Of a recipe; None with no launch either: none is named.
        launch: A shipped launch file, which gets `changes`.
    """

    def setup(patch: Patch, place: Place) -> Asked:
        for path, value in (patches or {}).items():
            prefix = "finetune.diagnostics.doctor." if path.split(".")[0].endswith("_checks") else ""
            patch.setattr(f"{prefix}{path}", value)
        named = launch is not None or overrides is not None
        recipe = load_recipe(place.recipe(), overrides or ()) if named else None
        file = str(place.launch_file(launch, **changes)) if launch is not None else None
        return Asked(recipe, file and predict_environment(file, {}, env or {}), env or {})

    return setup


def installed(**others: str | None) -> Callable[[str], str]:
    truly = metadata.version

    def version(name: str) -> str:
        if name in others and others[name] is None:
            raise metadata.PackageNotFoundError(name)
        return others.get(name) or truly(name)

    return version


def free(gib: float) -> Callable[[Any], Any]:
    return lambda folder: SimpleNamespace(free=int(gib * 2**30))


def one_op(**facts: Any) -> dict[str, Callable[[Any], Any]]:
    """Replacements of the functions that look at ops: one is needed, and all is well but for `facts`."""
    found = {"ops_to_inspect": ["async_io"], "find_missing": None, "is_locked": False, "is_built": True, **facts}
    return {f"finetune.distributed.native_ops.{name}": lambda _, fact=fact: fact for name, fact in found.items()}


def of_gpus(number: int) -> Callable[[], int]:
    return lambda: number


def little_processor(patch: Patch, place: Place) -> Asked:
    patch.setattr(machine_checks, "QUOTA", place.write("file", "50000 100000\n"))
    return Asked(env={})


def half_of_bf16(dtype: str, device: str) -> float:
    return 8.0 if dtype == "float32" else float("nan")


def not_there(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


NO_GPU = {"machine_checks.visible_gpus": of_gpus(0), "network_checks.visible_gpus": of_gpus(0)}
ONE_GPU = {"machine_checks.visible_gpus": of_gpus(1), "torch.cuda.get_device_name": lambda index: "H100"}
NO_ADDRESS = {"network_checks.host_addresses": lambda name: []}
LOOPBACK = {**NO_GPU, "network_checks.host_addresses": lambda name: ["127.0.1.1"]}
ELSEWHERE = {
    "network_checks.host_addresses": lambda name: ["10.0.0.1"],
    "network_checks.own_addresses": lambda: {"10.0.0.2"},
}
HERE = {**ELSEWHERE, "network_checks.own_addresses": lambda: {"10.0.0.1"}}
TAKEN = {"network_checks.is_free": lambda number: False}
UNSYNCHRONISED = {"network_checks.is_synchronised": lambda: False}
PORT = {"launch": "ddp", "main_process_port": 29511}
TWO: dict[str, Any] = {"launch": "ddp", "num_machines": 2, "main_process_ip": "first"}
BROKEN = {"machine_checks.run_probe": lambda *words, **options: ("", "Illegal instruction")}
NO_AIO = one_op(find_missing=("libaio is not there", "apt-get install libaio-dev"))
NO_COMPILER = one_op(find_missing=("there is no C++ compiler", "apt-get install g++"))
LITTLE_SHARED = {"shutil.disk_usage": free(0.0625), "torch.cuda.is_available": lambda: False}

CASES: list[Case] = [
    (machine_checks.python, "failure", "3.8.1, needed is >=3.11", asking({"sys.version_info": (3, 8, 1)})),
    (machine_checks.packages, "failure", "peft is not installed", asking({VERSION: installed(peft=None)})),
    (machine_checks.packages, "failure", "torch 2.1.0, needed", asking({VERSION: installed(torch="2.1.0")})),
    (machine_checks.packages, "failure", "numpy 1.9, needed is >=2", asking({VERSION: installed(numpy="1.9")})),
    (machine_checks.packages, "warning", r"torch 99\.0 \(tested: 2", asking({VERSION: installed(torch="99.0")})),
    (
        machine_checks.packages,
        "warning",
        "deepspeed is not installed; ZeRO",
        asking({VERSION: installed(deepspeed=None)}),
    ),
    (
        machine_checks.packages,
        "failure",
        "deepspeed is not installed; ZeRO",
        asking({VERSION: installed(deepspeed=None)}, launch="zero2"),
    ),
    (
        machine_checks.packages,
        "failure",
        "bitsandbytes is not installed; model.quantization",
        asking({VERSION: installed(bitsandbytes=None)}, overrides=["model.quantization=nf4", "lora.rank=2"]),
    ),
    (machine_checks.gpus, "failure", "with 1 GPU", asking(ONE_GPU, launch="ddp")),
    (machine_checks.gpus, "warning", "sees no GPU", asking({**NO_GPU, "machine_checks.DRIVER": Path(__file__)})),
    (machine_checks.dtypes, "failure", "bfloat16 fails", asking({"machine_checks.product_of_ones": half_of_bf16})),
    (
        machine_checks.dtypes,
        "warning",
        "no instructions for bf16",
        asking({"torch.ops.mkldnn._is_mkldnn_bf16_supported": lambda: False}, overrides=["precision=bf16"]),
    ),
    (machine_checks.agreement, "failure", "not a multiple of", asking(launch="ddp", num_processes=3)),
    (
        machine_checks.agreement,
        "failure",
        "wandb is not installed",
        asking({"importlib.metadata.version": not_there}, overrides=["log.trackers=[wandb]"]),
    ),
    (machine_checks.agreement, "failure", "is no optimiser", asking(overrides=["optim.name=Adamm"])),
    (machine_checks.ops, "failure", "libaio", asking(NO_AIO, launch="zero3_nvme")),
    (machine_checks.ops, "warning", "cannot be compiled", asking(NO_COMPILER)),
    (machine_checks.ops, "warning", "build lock", asking(one_op(is_locked=True))),
    (machine_checks.ops, "warning", "not compiled yet", asking(one_op(is_built=False))),
    (machine_checks.kernels, "warning", "Illegal", asking(BROKEN)),
    (
        machine_checks.kernels,
        "failure",
        "the recipe needs it",
        asking(BROKEN, overrides=["model.quantization=nf4", "lora={}"]),
    ),
    (machine_checks.folders, "failure", "0.1 GiB free", asking({"shutil.disk_usage": free(0.1)})),
    (machine_checks.folders, "warning", "5.0 GiB free", asking({"shutil.disk_usage": free(5)})),
    (machine_checks.folders, "failure", "may not write", asking({"os.access": lambda folder, mode: False})),
    (
        machine_checks.folders,
        "failure",
        r"nvme_path: .*0.1 GiB",
        asking({"shutil.disk_usage": free(0.1)}, launch="zero3_nvme"),
    ),
    (machine_checks.shared_memory, "warning", "0.06 GiB", asking({"shutil.disk_usage": free(0.0625)})),
    (machine_checks.shared_memory, "failure", "this launch maps 0.13 GiB", asking(LITTLE_SHARED, launch="zero2")),
    (machine_checks.shared_memory, "failure", "there is no", asking({"machine_checks.SHARED": Path("/nowhere")})),
    (network_checks.port, "warning", "29511 is taken", asking(TAKEN, **PORT)),
    (network_checks.port, "failure", "29511 is taken", asking(TAKEN, **PORT | TWO)),
    (network_checks.port, "failure", "no port", asking(TAKEN)),
    (network_checks.hostname, "warning", "has no address", asking(NO_ADDRESS)),
    (network_checks.hostname, "warning", "other machines do not reach", asking(LOOPBACK, **TWO)),
    (network_checks.first_machine, "failure", "main_process_ip is first, which has no", asking(NO_ADDRESS, **TWO)),
    (network_checks.first_machine, "failure", "each machine itself", asking(LOOPBACK, **TWO)),
    (network_checks.first_machine, "failure", "machine 0, .* is no address of", asking(ELSEWHERE, **TWO)),
    (network_checks.first_machine, "failure", "machine 1, .* is an address of", asking(HERE, **TWO, machine_rank=1)),
    (network_checks.clock, "warning", "before its files were written", asking({"time.time": lambda: 0.0})),
    (network_checks.clock, "warning", "synchronised", asking(UNSYNCHRONISED, **TWO)),
    (network_checks.reach, "warning", "the hub is not asked", asking(env={"HF_HUB_OFFLINE": "1"})),
    (
        network_checks.reach,
        "warning",
        "huggingface.co cannot be reached",
        asking({"finetune.utils.hub_access.accepts_connections": lambda address: False}),
    ),
    (
        network_checks.reach,
        "failure",
        "not in the cache: gpt3",
        asking(overrides=["model={name: gpt3}"], env={"HF_HUB_OFFLINE": "1", "HF_HOME": "nowhere"}),
    ),
    (machine_checks.threads, "failure", "OMP_NUM_THREADS is 'many'", asking(env={"OMP_NUM_THREADS": "many"})),
    (machine_checks.threads, "warning", "wait for each other", asking(env={"OMP_NUM_THREADS": "100000"})),
    (
        machine_checks.threads,
        "warning",
        "processes wait",
        asking({**NO_GPU, "os.sched_getaffinity": lambda pid: {0}}, launch="ddp"),
    ),
    (machine_checks.threads, "warning", "may use 0.5", little_processor),
    (machine_checks.files, "failure", "100 open files", asking({"resource.getrlimit": lambda which: (100, 100)})),
    (machine_checks.files, "warning", "512 open files", asking({"resource.getrlimit": lambda which: (512, 1 << 20)})),
    (
        machine_checks.overriding,
        "warning",
        "NCCL_P2P_DISABLE=1 acts on every run",
        asking(env={"NCCL_P2P_DISABLE": "1"}),
    ),
    (
        machine_checks.overriding,
        "warning",
        "ACCELERATE_DYNAMO_MODE=reduce-overhead acts beside the launch file",
        asking(launch="fsdp", env={"ACCELERATE_DYNAMO_MODE": "reduce-overhead"}),
    ),
    (network_checks.interfaces, "failure", "NCCL_SOCKET_IFNAME is ib7", asking(env={"NCCL_SOCKET_IFNAME": "ib7"})),
    (network_checks.interfaces, "failure", "GLOO_SOCKET_IFNAME is l", asking(env={"GLOO_SOCKET_IFNAME": "l"})),
    (
        network_checks.all_reduce,
        "failure",
        "exit code 3",
        asking(
            {
                "network_checks.SCRIPT": network_checks.SCRIPT.replace(
                    "values =", "if rank: raise SystemExit(3)\n    values ="
                )
            }
        ),
    ),
]


@pytest.mark.parametrize(("check", "status", "says", "setup"), CASES, ids=[f"{c[0].__name__}: {c[2]}" for c in CASES])
def test_every_check_can_fail(
    check: Any, status: str, says: str, setup: Callable[[Patch, Place], Asked], place: Place, monkeypatch: Patch
) -> None:
    asked = setup(monkeypatch, place)
    monkeypatch.setattr(doctor, "CHECKS", [check])
    found = [finding for finding in doctor.run_checks(asked, lambda what: None) if finding.status != "ok"]
    assert {finding.status for finding in found if re.search(says, finding.found)} == {status}, found
    assert all(finding.advice or "." in finding.found for finding in found)


def test_no_check_is_left_out() -> None:
    assert {case[0] for case in CASES} == set(doctor.CHECKS)


SOUND = {
    "importlib.metadata.version": installed(),
    "shutil.disk_usage": free(100),
    **one_op(),
    "finetune.diagnostics.doctor.machine_checks.DRIVER": Path("/nowhere"),
    "finetune.diagnostics.doctor.machine_checks.run_probe": lambda *words, **options: ("1.0", ""),
    "finetune.diagnostics.doctor.network_checks.is_free": lambda number: True,
    "finetune.diagnostics.doctor.network_checks.host_addresses": lambda name: ["10.0.0.1"],
    "finetune.utils.hub_access.accepts_connections": lambda address: True,
    "finetune.diagnostics.doctor.machine_checks.QUOTA": Path("/nowhere"),
    "resource.getrlimit": lambda which: (1 << 16, 1 << 20),
    "os.sched_getaffinity": lambda pid: set(range(8)),
    "finetune.diagnostics.doctor.network_checks.run_probe": lambda *words, **options: ("", ""),
}


@pytest.fixture
def sound(monkeypatch: Patch) -> None:
    """A machine that has everything, whatever this one has."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    pinned = {name: version for name, _, version in (line.partition("==") for line in lines)}
    monkeypatch.setattr(metadata, "version", lambda name: pinned[name.lower()])
    for path, value in SOUND.items():
        monkeypatch.setattr(path, value)
    for name in [name for name in os.environ if name.startswith(("NCCL_", "ACCELERATE_", "FSDP_", "HF_", "GLOO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("sound")
def test_a_sound_machine(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.write("train.jsonl", lines(8))
    words = ["doctor", "--recipe", str(place.recipe()), "--config_file", "accelerate_configs/ddp.yaml"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert {line.split()[0] for line in shown.out.splitlines()} == {"ok"}
    assert shown.err == ""  # quiet without a terminal
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in rows} == {"ok"}
    assert len({row["check"] for row in rows}) == len(doctor.CHECKS)


@pytest.mark.usefixtures("sound")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config_file", "nowhere.yaml"], "launch file: Cannot read the launch file nowhere.yaml"),
        (["--recipe", "nowhere.yaml"], "recipe: Cannot read the recipe nowhere.yaml"),
        (["recipes/sample.yaml"], "recipe: got recipes/sample.yaml, but no recipe"),
        (["--recipe", "recipes/sample.yaml", "--", "optim.lrr=1"], "recipe: .*did you mean 'lr'"),
        (["--recipe", "recipes/sample.yaml", "--", "data.train=/none.txt"], "recipe: There is no file /none.txt"),
    ],
)
def test_what_cannot_be_read_is_a_finding(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(ROOT)
    assert main(["doctor", *words]) == 1
    shown = capsys.readouterr().out
    assert re.search(f"^FAILURE  {says}", shown)
    # The rest is looked at all the same.
    assert "all-reduce" in shown


def test_warnings_alone_do_not_fail(sound: None, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", free(5))
    assert main(["doctor"]) == 0
    assert "warning" in capsys.readouterr().out


def test_without_torch_it_says_so(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "CHECKS", [machine_checks.gpus])
    (found,) = doctor.run_checks(Asked(env={}), lambda what: None)
    assert (found.status, found.advice) == ("failure", "install it: `make setup`")


# ---------------------------------------------------------------- the probes themselves


def test_a_free_port_and_a_taken_one() -> None:
    number = free_port()
    assert network_checks.is_free(number)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", number))
        assert not network_checks.is_free(number)


def test_connections() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        assert not hub_access.accepts_connections(server.getsockname())
        server.listen()
        assert hub_access.accepts_connections(server.getsockname())


def test_the_hubs_cache(tmp_path: Path) -> None:
    asked = Asked(env={"HF_HOME": str(tmp_path)})
    assert not hub_access.is_cached(asked.env, "models", "owner/name")
    (tmp_path / "hub/models--owner--name/snapshots/abc").mkdir(parents=True)
    assert hub_access.is_cached(asked.env, "models", "owner/name")
    assert not hub_access.is_cached(asked.env, "datasets", "owner/name")


def test_a_dtype_that_torch_cannot_multiply() -> None:
    assert machine_checks.product_of_ones("float32", "cpu") == 8.0
    assert machine_checks.product_of_ones("bool", "cpu") != 8.0


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import sys; print(sys.argv[1])", ("cpu", "")),
        ("raise ValueError('why')", ("", "ValueError: why")),
        ("import os; os.abort()", ("", "it ended with -6")),
        ("import signal; signal.pause()", ("", "no answer within 1 s")),
    ],
)
def test_what_a_probe_complains_of(script: str, found: tuple[str, str]) -> None:
    assert run_probe(script, "cpu", env=os.environ, limit_s=1.0 if "pause" in script else 60.0) == found


def test_two_processes_agree() -> None:
    (found,) = network_checks.all_reduce(Asked())
    assert found.status == "ok", found


def test_nothing_is_left_of_processes_that_hang(tmp_path: Path) -> None:
    # Deaf to all but SIGKILL, with a child that would outlive it.
    script = """
import os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
file = pathlib.Path(sys.argv[1] + ".part")
file.write_text(f"{os.getpid()} {child.pid}")
file.rename(sys.argv[1])
signal.pause()
"""
    file = tmp_path / "pids"
    limit_s = 2.0
    while not file.exists():
        assert run_probe(script, str(file), env=os.environ, limit_s=limit_s) == (
            "",
            f"no answer within {limit_s:.0f} s",
        )
        limit_s *= 2
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 2
    while any(map(is_alive, pids)):  # a signal that is sent takes a moment
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one whose parent is gone stays a zombie until init takes it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None)], ids=["max", "1.5", "empty"]
)
def test_a_containers_quota(tmp_path: Path, monkeypatch: Patch, text: str, quota: float | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    monkeypatch.setattr(machine_checks, "QUOTA", file)
    assert machine_checks.container_cores() == quota


def test_what_a_launch_shares() -> None:
    deep = Launch(kind="zero2", num_processes=4)
    assert native_ops.shared_bytes(Launch(kind="ddp", num_processes=4), 4) == 0
    assert native_ops.shared_bytes(deep, 4) == (0 if torch.cuda.is_available() else 4 * 66 * 2**20)


def test_looking_at_ops_builds_none(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # looking changes it; this puts it back
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = native_ops.ops_to_inspect(None)
    assert set(found) == {"shm_comm", "cpu_adam", "pin_memory", "async_io"}
    assert not any(native_ops.is_built(op) or native_ops.is_locked(op) for op in found)
    lacking = ("there is no C++ compiler (no-such-compiler)", "apt-get install g++")
    assert all(native_ops.find_missing(op) == lacking for op in found)
    # A file is the lock up to torch 2.13, from 2.14 on it must be held.
    with FileLock(next(tmp_path.rglob("cpu_adam")) / "lock"):
        assert [op for op in found if native_ops.is_locked(op)] == ["cpu_adam"]
    assert native_ops.ops_to_inspect(Launch(kind="fsdp", num_processes=2)) == []


def test_findings_as_text() -> None:
    assert doctor.result_as_text(CheckResult("disk", "much")) == "ok       disk: much"
    text = doctor.result_as_text(CheckResult("disk", "a\n b", "make room", status="failure"))
    assert text == "FAILURE  disk: a b\n         -> make room"
