"""The native ops are built once, a killed build is recovered from, and a living one is left alone.

A tiny op of a few lines goes through the real chain: our child process, DeepSpeed's builder, torch, ninja and
the compiler. That is a script which can stop at a named pipe, so that a test knows what runs at each moment.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from external_commands import require
from harness import ROOT, RUN_S, WAIT_S

from finetune.distributed import native_ops
from finetune.utils.compat.torch_private import builds_under_flock
from finetune.utils.errors import BackendError

SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny_op", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_tiny_op() { return PyModule_Create(&module); }
"""

COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
  echo compile >> "$TINY/compiles"
  if [ -p "$TINY/gate" ]; then
    echo at the gate > "$TINY/started"
    # A builtin: a `cat` might start after a test has noted, and killed, the jobs it saw.
    read -r _ < "$TINY/gate"
  fi ;;
esac
exec c++ "$@"
"""

# What a training process does.
RUN = """
import os, sys
from finetune.distributed import native_ops as ops
from finetune.utils import signals
ops.OPS["tiny"] = ops._Spec("tiny_op", "TinyBuilder", "a test", 1)
ops.COMPILE = [sys.executable, os.environ["TINY"] + "/build.py"]
with signals.handle_signals(signals.stop_signals(), signals.interrupter()):
    ops.ensure_built(["tiny"], quiet=False)
assert ops.is_built("tiny")
"""

# What `ops` runs to build, with an op that DeepSpeed does not have.
BUILD = """
import os
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from finetune.distributed import native_ops

class TinyBuilder(OpBuilder):
    def __init__(self):
        super().__init__(name="tiny_op")
    def absolute_name(self):
        return "tiny_op"
    def sources(self):
        return [os.environ["TINY"] + "/tiny.cpp"]

get_accelerator().create_op_builder = lambda name: TinyBuilder()
exec(native_ops._SCRIPT)
"""


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty extensions folder of torch's for this process and those it starts."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # `ensure` changes it; this puts it back
    return tmp_path / "extensions"


class Tiny:
    """The tiny op, and the processes that want it."""

    def __init__(self, root: Path, extensions: Path) -> None:
        self.root = root
        self.folder = extensions / "tiny_op"
        self.processes: list[subprocess.Popen[str]] = []
        self.jobs: list[psutil.Process] = []
        (root / "tiny.cpp").write_text(SOURCE)
        (root / "build.py").write_text(BUILD)
        compiler = root / "g++"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        os.mkfifo(root / "gate")
        os.mkfifo(root / "started")
        # Without blocking and from now on, so that the script never waits for a reader.
        self.started = os.open(root / "started", os.O_RDONLY | os.O_NONBLOCK)

    def start(self, rank: int = 0) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", RUN],
            env={
                **os.environ,
                "LOCAL_RANK": str(rank),
                "PYTHONPATH": str(ROOT),
            },
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def wait_for_the_compiler(self) -> None:
        ready, _, _ = select.select([self.started], [], [], RUN_S)
        assert ready, "the compiler was not started"
        os.read(self.started, 100)
        self.note_jobs()

    def note_jobs(self) -> None:
        """Remembers the jobs that run: once a parent is killed, its jobs cannot be found through it."""
        for process in self.processes:
            if process.poll() is None:
                self.jobs += psutil.Process(process.pid).children(recursive=True)

    def open_the_gate(self) -> None:
        with (self.root / "gate").open("w"):
            (self.root / "gate").unlink()

    @property
    def compiles(self) -> int:
        return len((self.root / "compiles").read_text().splitlines())


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stderr is not None
    read = ""
    for line in process.stderr:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} was not printed, but: {read}")


def finish(process: "subprocess.Popen[str]") -> str:
    """What it still prints; it must succeed."""
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, errors
    return errors


@pytest.fixture
def tiny(tmp_path: Path, extensions: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiny]:
    require("c++")
    native_ops.prepare_environment()
    tiny = Tiny(tmp_path, extensions)
    monkeypatch.setenv("TINY", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    monkeypatch.setitem(native_ops.OPS, "tiny", native_ops._Spec("tiny_op", "TinyBuilder", "a test", 1))
    yield tiny
    os.close(tiny.started)
    tiny.note_jobs()
    for process in tiny.processes:
        process.kill()
        process.wait()
    for job in tiny.jobs:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.kill()


def old_lock(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (0, lock.stat().st_mtime - 3600))
    return lock


@pytest.mark.skipif(builds_under_flock(), reason="this torch leaves no stale lock")
def test_stale_lock_is_removed_and_named(extensions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = old_lock(extensions / "async_io")
    lock.touch()
    assert not native_ops.remove_stale_lock("async_io"), "it is young"
    lock = old_lock(extensions / "async_io")
    waits = [sys.executable, "-c", "print('here', flush=True); input()"]
    with subprocess.Popen(waits, cwd=lock.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        builder.stdout.readline()
        assert not native_ops.remove_stale_lock("async_io"), "its builder lives"
        assert lock.exists()
        builder.communicate(b"\n")
    assert native_ops.remove_stale_lock("async_io")
    assert not lock.exists()
    printed = capsys.readouterr().err
    assert "async_io" in printed
    assert str(lock) in printed
    assert native_ops.remove_stale_lock("async_io")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("compiler", "command"),
    [("exit 1", "apt-get install libaio-dev"), (None, "apt-get install g++")],
    ids=["libaio", "compiler"],
)
def test_what_is_missing_is_named(
    compiler: str | None, command: str, extensions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "g++"
    if compiler is not None:
        script.write_text(f"#!/bin/sh\n{compiler}\n")
        script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BackendError) as caught:
        native_ops.ensure_built(["async_io"], quiet=True)
    message = str(caught.value)
    assert command in message
    assert "\n" not in message
    assert not extensions.exists(), "nothing is built before all tools are known to be there"


def test_two_processes_build_once(tiny: Tiny) -> None:
    first = tiny.start()
    tiny.wait_for_the_compiler()
    second = tiny.start()
    silent = tiny.start(rank=1)
    read_until(second, "another process builds it")
    tiny.open_the_gate()
    assert "Built DeepSpeed's native op tiny" in finish(first)
    assert "Built" not in finish(second)
    assert not finish(silent), "of a launch, one rank says that it waits"
    assert tiny.compiles == 1
    assert not native_ops.is_locked("tiny")

    assert native_ops.is_built("tiny")
    with (tiny.root / "tiny.cpp").open("a") as source:
        source.write("// changed\n")
    assert not native_ops.is_built("tiny")


def test_killed_build_is_cleared_and_built_again(tiny: Tiny) -> None:
    killed = tiny.start()
    tiny.wait_for_the_compiler()
    tree = [psutil.Process(killed.pid), *tiny.jobs]
    for process in tree:
        process.kill()
    psutil.wait_procs(tree, WAIT_S)
    stale = not builds_under_flock()
    assert native_ops.is_locked("tiny") == stale, "the trap, up to torch 2.13: its lock outlives the build"
    old_lock(tiny.folder)
    assert not native_ops.is_built("tiny")

    again = tiny.start()
    printed = read_until(again, "Building")
    assert ("Removed the stale build lock of tiny" in printed) == stale
    tiny.wait_for_the_compiler()
    tiny.open_the_gate()
    finish(again)
    assert not native_ops.is_locked("tiny")


def test_orphaned_build_is_waited_for(tiny: Tiny) -> None:
    """The process that asked is killed, its build lives on: nobody starts a second one in the same folder."""
    parent = tiny.start()
    tiny.wait_for_the_compiler()
    parent.kill()
    parent.wait()
    old_lock(tiny.folder)

    second = tiny.start()
    read_until(second, "another run builds it")
    tiny.open_the_gate()
    finish(second)
    assert tiny.compiles == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_interrupted_build_leaves_no_lock(tiny: Tiny, number: signal.Signals) -> None:
    process = tiny.start()
    tiny.wait_for_the_compiler()
    assert native_ops.is_locked("tiny")
    # To the process group, as a terminal and torch's launcher do.
    os.killpg(process.pid, number)
    process.communicate(timeout=RUN_S)
    assert process.returncode != 0
    _, alive = psutil.wait_procs(tiny.jobs, WAIT_S)
    assert not alive
    assert not native_ops.is_locked("tiny")


def test_failed_build_shows_the_compilers_error(tiny: Tiny) -> None:
    (tiny.root / "gate").unlink()
    (tiny.root / "tiny.cpp").write_text("#include <no_such_header.h>\n")
    process = tiny.start()
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode != 0
    assert "no_such_header.h" in errors
    assert "tiny_op.build.log" in errors
    assert not native_ops.is_locked("tiny")


@pytest.mark.usefixtures("extensions")
def test_the_processor_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpuinfo import cpuinfo
    from deepspeed.ops.op_builder import CPUAdamBuilder

    asked = []

    def answer() -> str:
        asked.append("")
        return '{"arch": "X86_64", "flags": ["avx2"]}'

    monkeypatch.setattr(cpuinfo, "get_cpu_info_json", answer)
    native_ops.prepare_environment()
    for _ in range(2):
        assert CPUAdamBuilder().cpu_arch() == "-march=native"
        assert CPUAdamBuilder().simd_width() == "-D__AVX256__"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("given", "passed"),
    [("9.0a", "9.0"), ("8.0;9.0a+PTX", "8.0;9.0+PTX"), ("8.6 10.0f 12.0", "8.6 10.0 12.0"), ("9.0+PTX", "9.0+PTX")],
)
def test_architectures_are_numbers_for_deepspeed(given: str, passed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images for Hopper set `9.0a`, and DeepSpeed's builders end in int('0a')."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    class Builder(CUDAOpBuilder):  # type: ignore[misc]
        def absolute_name(self) -> str:
            return "builder"

        def sources(self) -> list[str]:
            return []

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    native_ops.prepare_environment()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == passed
    builder = Builder(name="builder")
    builder.jit_mode = True
    builder.compute_capability_args()
