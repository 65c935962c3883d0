"""DeepSpeed's native ops: built ahead of a run, once a machine, with progress."""

import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn, Self

import psutil
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from finetune.distributed.native_ops import toolchain
from finetune.utils.atomic_files import unlockable
from finetune.utils.errors import BackendError


def console() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


class Report(AbstractContextManager["Report"]):
    """What the user sees of one op: a line at the start and at the end, on a terminal a bar between them."""

    def __init__(self, op: str, used_by: str, build_s: float, log: Path, *, quiet: bool) -> None:
        """Reports on the build of `op`, which writes to `log` and took `build_s` seconds on 2 cores."""
        self.op = op
        self.used_by = used_by
        self.build_s = build_s
        self.log = log
        self.quiet = quiet
        self.console = console()
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.said: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def building(self) -> None:
        self._show(f"Building DeepSpeed's native op {self.op} ({self.used_by})")

    def waiting(self, why: str) -> None:
        self._show(f"Waiting for DeepSpeed's native op {self.op} ({self.used_by}): {why}")
        self.progress()

    def progress(self) -> None:
        """Reads how far the build is from its log, so that a process that waits can show it too."""
        if self.bar is None or self.task is None:
            return
        with suppress(OSError):
            steps = re.findall(r"^\[(\d+)/(\d+)\] ", self.log.read_text(errors="replace"), re.MULTILINE)
            if steps:
                done, total = map(int, steps[-1])
                self.bar.update(self.task, completed=done, total=total, steps=f"{done} of {total} steps")

    def done(self, seconds: float) -> None:
        if not self.quiet:
            self.console.print(f"Built {self.op} in {duration(seconds)}")

    def _show(self, text: str) -> None:
        if self.quiet or text in self.said:
            return
        self.said.add(text)
        self.console.print(f"{text}; usually about {duration(self.build_s)} on 2 cores")
        if self.console.is_terminal and self.bar is None:
            columns = BarColumn(bar_width=30), TextColumn("{task.fields[steps]}"), TimeElapsedColumn()
            self.bar = Progress(TextColumn(f"  {self.op}"), *columns, console=self.console, transient=True)
            self.task = self.bar.add_task("", total=None, steps="")
            self.bar.start()


Op = Literal["shm_comm", "cpu_adam", "pin_memory", "async_io"]
"""The ops that a launch config can need: collectives in shared memory (every DeepSpeed run on a CPU), Adam on
the host (optimiser offload), page-locked memory and asynchronous file access (both for NVMe offload)."""

# Between taking torch's lock and starting ninja a builder is at work without a process in the folder.
GRACE_S = 30.0
POLL_S = 0.2


@dataclass(frozen=True)
class _Spec:
    """What is known of one op."""

    name: str
    """DeepSpeed's name: of the folder and of the library in it."""
    builder: str
    """The class in `deepspeed.ops.op_builder`."""
    used_by: str
    build_s: float
    """Seconds the build took on 2 cores; a hint for whoever waits, nothing else."""
    first: tuple[Op, ...] = ()
    """Ops that DeepSpeed loads, hence builds, before this one."""


OPS: dict[Op, _Spec] = {
    "shm_comm": _Spec("deepspeed_shm_comm", "ShareMemCommBuilder", "DeepSpeed on a CPU", 26),
    "cpu_adam": _Spec("cpu_adam", "CPUAdamBuilder", "optimizer offload to the CPU", 38),
    "pin_memory": _Spec("pin_memory", "PinMemoryBuilder", "NVMe offload", 25),
    "async_io": _Spec("async_io", "AsyncIOBuilder", "NVMe offload", 162, first=("pin_memory",)),
}


def ensure(names: Sequence[Op], *, quiet: bool) -> None:
    """Returns once every op in `names` is built and no stale lock is left to wait on.

    Call it in every process of a machine before DeepSpeed starts: one builds, the others wait, and those that
    are not quiet show the progress. It also puts this environment's `ninja` first on the PATH of this process
    and its children; see `toolchain.own_tools_first`.

    Args:
        quiet: Show no progress. A removed lock is named all the same.

    Raises:
        BackendError: If a tool or header to build with is missing, or the build fails.
    """
    if not names:
        return
    toolchain.own_tools_first()
    toolchain.own_folder()
    toolchain.look_once_at_the_processor()
    needed = dict.fromkeys(op for name in names for op in (*OPS[name].first, name))
    ops = [op for op in needed if not came_with_deepspeed(op)]
    # Even for what is built: DeepSpeed asks for the tools, and for libaio's header, at each load.
    for op in ops:
        _check_tools(op)
    for op in ops:
        _ensure(op, quiet)


def build_all(quiet: bool = False) -> None:
    """Builds every op that a launch config can need on this machine, with progress unless `quiet`.

    Raises:
        BackendError: If an op could not be built; the others are built all the same.
    """
    terminal = console()
    toolchain.own_tools_first()
    toolchain.own_folder()
    problems: list[str] = []
    wanted: list[Op] = ["cpu_adam", "async_io"]
    if _accelerator() == "cpu":
        wanted.insert(0, "shm_comm")
    for op in wanted:
        before = is_built(op)
        try:
            ensure([op], quiet=quiet)
        except BackendError as error:
            problems.append(str(error))
        else:
            if before and not quiet:
                terminal.print(f"{op} ({OPS[op].used_by}): built already")
    if problems:
        raise BackendError(" ".join(dict.fromkeys(problems)))


def is_built(op: Op) -> bool:
    """Whether DeepSpeed would load `op` without compiling. Neither builds nor loads it.

    As torch decides it: the library is there, and ninja finds nothing to do for the build file, which names
    this environment's torch and Python and the compiler of today.
    """
    if came_with_deepspeed(op):
        return True
    from torch.utils.cpp_extension import include_paths

    folder = build_folder(op)
    try:
        build = (folder / "build.ninja").read_text()
    except OSError:
        return False
    # Another environment's build has other paths in its commands, and ninja would start over.
    mine = (include_paths()[0], toolchain.python_headers(), f"cxx = {toolchain.compiler()}\n")
    if not (folder / f"{OPS[op].name}.so").is_file() or any(text not in build for text in mine):
        return False
    try:
        dry = subprocess.run(["ninja", "-n"], cwd=folder, env=toolchain.environment(), capture_output=True, text=True)
    except OSError:
        return False
    return dry.returncode == 0 and "no work to do" in dry.stdout


def clear_stale_lock(op: Op) -> bool:
    """Removes torch's lock on the build of `op` if nobody builds it any more, and says so on stderr.

    A lock is stale when no living process works in the build folder, where torch starts ninja, and it is
    older than `GRACE_S`. Processes of other machines that share the folder are not seen; our own lock covers
    those that came through here.

    Returns:
        Whether a lock was removed.
    """
    lock = _lock(op)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    try:
        return _clear(op)
    finally:
        lock.release()


def _ensure(op: Op, quiet: bool) -> None:
    torch_lock = build_folder(op) / "lock"
    if not torch_lock.exists() and is_built(op):
        return
    spec = OPS[op]
    with Report(op, spec.used_by, spec.build_s, _log(op), quiet=quiet) as report:
        lock = _lock(op)
        while True:
            try:
                lock.acquire(timeout=0)
                break
            except Timeout:
                report.waiting("another process builds it")
            time.sleep(POLL_S)
        try:
            while torch_lock.exists() and not _clear(op):
                report.waiting(f"another run builds it, {_who(op)}")
                time.sleep(POLL_S)
            if not is_built(op):
                _build(op, report)
        finally:
            lock.release()


def _build(op: Op, report: Report) -> None:
    """Compiles in a child process, so that this one can show progress, and clean up after Ctrl-C."""
    report.building()
    start = time.monotonic()
    folder, log = build_folder(op), _log(op)
    with log.open("wb") as output:
        # The working directory makes it a builder by the rule of `clear_stale_lock` for as long as it lives.
        child = subprocess.Popen(
            _command(op),
            cwd=folder,
            env=toolchain.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while child.poll() is None:
                report.progress()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
        except BaseException:
            _stop(child)
            raise
        finally:
            if child.returncode != 0:
                _clear(op, ours=True)
    if child.returncode != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror:", line)]
        reason = (errors or lines[-1:] or ["no output"])[0]
        raise BackendError(
            f"DeepSpeed's native op {op}, for {OPS[op].used_by}, could not be built "
            f"(exit {child.returncode}): {reason[:400].rstrip('.')}. The whole output is in {log}."
        )
    report.done(time.monotonic() - start)


def _stop(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(15)
    except subprocess.TimeoutExpired:
        jobs = psutil.Process(child.pid).children(recursive=True)
        for job in jobs:
            with suppress(psutil.NoSuchProcess):
                job.kill()
        child.kill()
        child.wait()
        psutil.wait_procs(jobs, timeout=5)


def _command(op: Op) -> list[str]:
    # By its path: as a module it would load the whole package, and Accelerate, first.
    script = Path(__file__).with_name("compile_op.py")
    return [sys.executable, "-P", str(script), OPS[op].builder]


def _clear(op: Op, *, ours: bool = False) -> bool:
    """`clear_stale_lock` for the holder of our lock; `ours`: what left it was our build, which has ended."""
    lock = build_folder(op) / "lock"
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return False
    # A time stamp from the future (a clock that was set back) is not a young lock.
    if _builders(op) or (not ours and 0 <= age < GRACE_S):
        return False
    lock.unlink(missing_ok=True)
    if not ours:
        console().print(
            f"Removed the stale build lock of {op}, {lock}: no process builds there, and the lock is "
            f"{duration(age)} old. Every run that needs this op would have waited for it for ever."
        )
    return True


def _builders(op: Op) -> list[psutil.Process]:
    """The living processes that work in the build folder; not this one or its ancestors (a shell)."""
    folder = os.path.realpath(build_folder(op))
    own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid not in own and process.status() != psutil.STATUS_ZOMBIE and process.cwd() == folder:
                found.append(process)
    return found


def _who(op: Op) -> str:
    with suppress(psutil.Error):
        for process in _builders(op):
            return f"process {process.pid} ({process.name()})"
    return "or has just been killed"


def _check_tools(op: Op) -> None:
    if (lacking := toolchain.lacking(libaio=op == "async_io")) is not None:
        _missing(op, *lacking)


def _missing(op: Op, what: str, install: str) -> NoReturn:
    raise BackendError(
        f"DeepSpeed's native op {op}, for {OPS[op].used_by}, is compiled on the machine that runs it, but "
        f"{what}. Install what is missing (`{install}`), or choose a launch config that does without this op."
    )


def build_folder(op: Op) -> Path:
    """torch's build folder of `op`; made if it is not there."""
    from finetune.utils.compat.torch_private import build_directory

    try:
        return Path(build_directory(OPS[op].name)).absolute()
    except OSError as error:
        raise BackendError(
            f"torch's folder for compiled extensions cannot be made ({error}). Set TORCH_EXTENSIONS_DIR to a "
            "folder that you can write to, the same for every run."
        ) from error


def _lock(op: Op) -> FileLock:
    # flock: the kernel frees it when its process ends, however that ends.
    folder = build_folder(op)
    reason = unlockable(folder.parent)
    if reason is not None:
        raise BackendError(
            f"torch's folder for compiled extensions, {folder.parent}, lies on a file system that has no locks (flock: "
            f"{reason}), and processes that compile the same op need one. Set TORCH_EXTENSIONS_DIR to a folder on "
            "another file system, such as a local disk."
        )
    return FileLock(folder.with_name(f"{folder.name}.build.lock"))


def _log(op: Op) -> Path:
    folder = build_folder(op)
    return folder.with_name(f"{folder.name}.build.log")


def _accelerator() -> str:
    """DeepSpeed's name for this machine's device, by its rule for the two that this toolkit runs on."""
    import torch

    return os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")


def came_with_deepspeed(op: Op) -> bool:
    """Whether DeepSpeed was installed with this op compiled (DS_BUILD_OPS=1), for the device that is here."""
    deepspeed = find_spec("deepspeed")
    if deepspeed is None or deepspeed.origin is None:
        return False
    facts = Path(deepspeed.origin).with_name("git_version_info_installed.py")
    # Run by itself: importing it would import all of DeepSpeed.
    values = runpy.run_path(str(facts)) if facts.is_file() else {}
    ops: dict[str, bool] = values.get("installed_ops", {})
    return ops.get(OPS[op].name, False) and values.get("accelerator_name") == _accelerator()
