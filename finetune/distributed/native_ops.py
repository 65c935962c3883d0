"""DeepSpeed's native ops: built ahead of a run, once a machine, with progress.

DeepSpeed's own builders compile. Left to them, every rank would compile inside the run, and a killed build would leave
a lock on which torch waits for ever.
"""

import functools
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from finetune.distributed.launch.launch_config import Launch
from finetune.utils.atomic_files import why_unlockable
from finetune.utils.compat.library_versions import installed, require_installed
from finetune.utils.console import plain_console, progress_bar
from finetune.utils.errors import BackendError
from finetune.utils.temporary_folders import temporary_folder

# Between taking torch's lock and starting ninja a builder is at work without a process in the folder.
GRACE_S = 30.0
POLL_S = 0.2

# Two buffers of 1 MiB and two of 32 MiB, a process.
# Source: deepspeed 0.19.8, `allreduce_workspace` in `ops/csrc/cpu/comm/shm.cpp`.
_SHARED_BYTES = 66 * 2**20

# Builds an op as DeepSpeed does when it loads one. Verbose, because ninja's own count is what the progress reads.
_SCRIPT = """
import sys
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder(sys.argv[1]).load(verbose=True)
"""
COMPILE = [sys.executable, "-P", "-c", _SCRIPT]


@dataclass(frozen=True)
class _Spec:
    """Facts about one op."""

    name: str
    """DeepSpeed's name: of the folder and of the library in it."""
    builder: str
    """The class in `deepspeed.ops.op_builder`."""
    used_by: str
    build_s: float
    """Seconds that the build took on 2 cores, as a hint for whoever waits."""


OPS = {
    "shm_comm": _Spec("deepspeed_shm_comm", "ShareMemCommBuilder", "DeepSpeed on a CPU", 26),
    "cpu_adam": _Spec("cpu_adam", "CPUAdamBuilder", "optimizer offload to the CPU", 38),
    "pin_memory": _Spec("pin_memory", "PinMemoryBuilder", "NVMe offload", 25),
    "async_io": _Spec("async_io", "AsyncIOBuilder", "NVMe offload", 162),
}
"""The ops that a launch config can need; DeepSpeed loads, hence builds, pin_memory before async_io."""


def needed_ops(launch: Launch) -> list[str]:
    """Returns the native ops that a launch needs."""
    if not launch.uses_deepspeed:
        return []
    names = ["shm_comm"] if _accelerator() == "cpu" else []
    if launch.offload_optimizer != "none":
        names.append("cpu_adam")
    if "nvme" in (launch.offload_params, launch.offload_optimizer):
        names += ["pin_memory", "async_io"]
    return names


def shared_bytes(launch: Launch | None, local: int) -> int:
    """Returns the bytes of shared memory that the collectives of `local` processes map, as far as it is known."""
    needs = launch is not None and "shm_comm" in needed_ops(launch)
    return _SHARED_BYTES * local if needs else 0


def ops_to_inspect(launch: Launch | None) -> list[str]:
    """Returns the ops that a launch needs, or, without one, all that any could need; none without DeepSpeed."""
    if installed("deepspeed") is None:
        return []
    prepare_environment()
    return [*OPS] if launch is None else needed_ops(launch)


def ensure_built(names: Sequence[str], *, quiet: bool) -> None:
    """Returns once every op in `names` is built and no stale lock is left to wait on.

    Call it in every process of a machine before DeepSpeed starts: one builds, the others wait, and the first of a
    launch shows the progress unless `quiet`. It changes the environment, as `prepare_environment` says.

    Raises:
        BackendError: If a tool or header to build with is missing, or the build fails.
    """
    if not names:
        return
    prepare_environment()
    # Even for what is built: DeepSpeed asks for the tools, and for libaio's header, at each load.
    for op in names:
        if (lacking := find_missing(op)) is not None:
            what, install = lacking
            raise BackendError(
                f"DeepSpeed's native op {op}, for {OPS[op].used_by}, is compiled on the machine that runs it, but "
                f"{what}. Install what is missing (`{install}`), or choose a launch config that does without this op."
            )
    quiet = quiet or os.environ.get("LOCAL_RANK", "0") != "0"
    for op in names:
        if came_with_deepspeed(op) or (is_built(op) and not is_locked(op)):
            continue
        with _progress(op, quiet) as show:
            while not _try_to_build(op, show):
                if not is_built(op):
                    show("Waiting for", ": another process builds it")


def build_all() -> None:
    """Builds every op that a launch config can need on this machine, with progress.

    Raises:
        BackendError: If an op could not be built; the others are built all the same.
    """
    prepare_environment()
    problems: list[str] = []
    for op in OPS:
        if op == "shm_comm" and _accelerator() != "cpu":
            continue
        if is_built(op):
            _console().print(f"{op} ({OPS[op].used_by}): built already")
        try:
            ensure_built([op], quiet=False)
        except BackendError as error:
            problems.append(str(error))
    if problems:
        raise BackendError(" ".join(dict.fromkeys(problems)))


def prepare_environment() -> None:
    """Sets what DeepSpeed and torch read when they load an op, for this process and its children.

    - This environment's `ninja` comes first on the PATH, where torch looks it up. The system's, if it is of another
      version, discards the log of ours and compiles everything again inside the run.
    - Compiled ops are kept in the virtual environment, unless told where. In torch's own default, one folder for all
      environments of a user, two would overwrite each other's libraries.
    - TORCH_CUDA_ARCH_LIST loses suffixes such as that of `9.0a`, of which DeepSpeed fails to make a number.
    - py-cpuinfo keeps its answer, which takes more than a second of every rank's processor. DeepSpeed asks it twice
      each time that it loads an op.
    """
    from cpuinfo import cpuinfo

    folders = [os.path.dirname(sys.executable)]
    with suppress(ImportError):
        import ninja

        folders.append(ninja.BIN_DIR)
    folders += os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(dict.fromkeys(folders))
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
    if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(?<=\d)[a-z]", "", archs)
    if not hasattr(cpuinfo.get_cpu_info_json, "cache_clear"):
        cpuinfo.get_cpu_info_json = functools.cache(cpuinfo.get_cpu_info_json)


def find_missing(op: str) -> tuple[str, str] | None:
    """Returns what is missing to compile an op with, and the command that installs it; None if nothing is."""
    if came_with_deepspeed(op):
        return None
    if shutil.which(_compiler()) is None:
        return f"there is no C++ compiler ({_compiler()})", "apt-get install g++"
    if shutil.which("ninja") is None:
        return "there is no ninja", f"{sys.executable} -m pip install ninja"
    if not Path(_python_headers(), "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Python's headers are not in {_python_headers()}", f"apt-get install python{version}-dev"
    if op == "async_io" and not has_libaio():
        return "libaio and its header libaio.h were not found", "apt-get install libaio-dev"
    return None


def has_libaio() -> bool:
    """Returns True if a program that uses libaio compiles and links, which DeepSpeed tries at each load."""
    program = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
    flags = shlex.split(f"{os.environ.get('CFLAGS', '')} {os.environ.get('LDFLAGS', '')}")
    with temporary_folder() as scratch:
        command = [_compiler(), *flags, "-x", "c++", "-", "-laio", "-o", str(scratch / "probe")]
        return subprocess.run(command, input=program, capture_output=True, text=True).returncode == 0


def _compiler() -> str:
    # torch's rule; it passes the value on as one word.
    return os.environ.get("CXX", "c++")


def _python_headers() -> str:
    # The scheme that torch passes to the compiler.
    return sysconfig.get_path("include", scheme="posix_prefix")


def is_built(op: str) -> bool:
    """Returns True if DeepSpeed would load `op` without compiling. Neither builds nor loads it.

    torch decides it alike: the library is there, and ninja finds nothing to do for the build file, which names this
    environment's torch and Python and the compiler of today.
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
    mine = (include_paths()[0], _python_headers(), f"cxx = {_compiler()}\n")
    if not (folder / f"{OPS[op].name}.so").is_file() or any(text not in build for text in mine):
        return False
    dry = subprocess.run(["ninja", "-n"], cwd=folder, capture_output=True, text=True)
    return dry.returncode == 0 and "no work to do" in dry.stdout


def is_locked(op: str) -> bool:
    """Returns True if somebody builds `op` or, before torch 2.14, a killed build left torch's lock behind."""
    from finetune.utils.compat.torch_private import builds_under_flock

    lock = build_folder(op) / "lock"
    if not lock.exists() or not builds_under_flock():
        return lock.exists()
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def remove_stale_lock(op: str) -> bool:
    """Removes torch's lock on the build of `op` if nobody builds it any more, and says so on stderr.

    A lock is stale when no living process works in the build folder, where torch starts ninja, and it is older than
    `GRACE_S`. Processes of other machines are not seen: hold `_lock`. From torch 2.14 on the kernel frees the lock.

    Returns:
        True if there is no lock now.
    """
    from finetune.utils.compat.torch_private import builds_under_flock

    if builds_under_flock():
        return not is_locked(op)
    folder = build_folder(op)
    lock = folder / "lock"
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return True
    # A time stamp from the future (a clock that was set back) is not a young lock.
    if 0 <= age < GRACE_S or _has_builder(folder):
        return False
    lock.unlink(missing_ok=True)
    _console().print(
        f"Removed the stale build lock of {op}, {lock}: no process builds there, and the lock is {age:.0f} s old. "
        "Every run that needs this op would have waited for it for ever."
    )
    return True


def _has_builder(folder: Path) -> bool:
    """Returns True if a living process works in the folder, other than this one and its ancestors (a shell)."""
    own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    # None for zombies, and for other users' processes.
    places = {process.info["cwd"] for process in psutil.process_iter(["cwd"]) if process.pid not in own}
    return os.path.realpath(folder) in places


def _try_to_build(op: str, show: Callable[..., None]) -> bool:
    """Builds an op unless it is built; returns False while another process holds `_lock`."""
    with suppress(Timeout), _lock(op).acquire(timeout=POLL_S):
        while not remove_stale_lock(op):
            # A run that loads what is built holds the lock for a moment, too.
            if not is_built(op):
                show("Waiting for", ": another run builds it, or has just been killed")
            time.sleep(POLL_S)
        if not is_built(op):
            _build(op, show)
        return True
    return False


def _build(op: str, show: Callable[..., None]) -> None:
    """Compiles in a child process, so that this one can show progress, and clean up after Ctrl-C."""
    start, log = time.monotonic(), _log(op)
    # In the build folder, so that `remove_stale_lock` knows it for a builder for as long as it lives. In a session of
    # its own, so that a terminal's Ctrl-C ends it here alone.
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*COMPILE, OPS[op].builder],
            cwd=build_folder(op),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as child,
    ):
        try:
            while child.poll() is None:
                show("Building")
                time.sleep(POLL_S)
        except BaseException:
            # As an exception it passes torch's `finally`, which removes the lock; ninja ends its compilers. Left to
            # itself, torch would kill ninja, which then leaves them.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
            child.wait()
            raise
    if child.returncode != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror:", line)]
        reason = (errors or lines[-1:] or ["no output"])[0]
        raise BackendError(
            f"DeepSpeed's native op {op}, for {OPS[op].used_by}, could not be built "
            f"(exit {child.returncode}): {reason[:400].rstrip('.')}. The whole output is in {log}."
        )
    show("Built", f" in {time.monotonic() - start:.0f} s")


@contextmanager
def _progress(op: str, quiet: bool) -> Iterator[Callable[..., None]]:
    """Shows a build to whoever builds or waits: a line whenever something else happens, and on a terminal a bar."""
    console, spec, shown = _console(), OPS[op], [""]
    columns, hidden = (TextColumn(f"  {op}"), MofNCompleteColumn()), quiet or not console.is_terminal
    bar = progress_bar(console, *columns, transient=True, disable=hidden)
    task = bar.add_task("", total=None)

    def show(what: str, how: str = "") -> None:
        line = f"{what} DeepSpeed's native op {op} ({spec.used_by}){how}"
        if not quiet and line != shown[-1]:
            shown.append(line)
            console.print(line if what == "Built" else f"{line}; usually about {spec.build_s:.0f} s on 2 cores")
        with suppress(OSError):
            # ninja's own count.
            if steps := re.findall(r"^\[(\d+)/(\d+)\] ", _log(op).read_text(errors="replace"), re.MULTILINE):
                done, total = map(int, steps[-1])
                bar.update(task, completed=done, total=total)

    with bar:
        yield show


def _console() -> Console:
    return plain_console(stderr=True, soft_wrap=True)


def build_folder(op: str) -> Path:
    """Returns torch's build folder of `op`, which is made if it is not there."""
    from finetune.utils.compat.torch_private import build_directory

    try:
        return Path(build_directory(OPS[op].name)).absolute()
    except OSError as error:
        raise BackendError(
            f"torch's folder for compiled extensions cannot be made ({error}). Set TORCH_EXTENSIONS_DIR to a "
            "folder that you can write to, the same for every run."
        ) from error


def _lock(op: str) -> FileLock:
    # flock: the kernel frees it when its process ends, however that ends.
    folder = build_folder(op)
    if (reason := why_unlockable(folder.parent)) is not None:
        raise BackendError(
            f"torch's folder for compiled extensions, {folder.parent}, lies on a file system that has no locks (flock: "
            f"{reason}), and processes that compile the same op need one. Set TORCH_EXTENSIONS_DIR to a folder on "
            "another file system, such as a local disk."
        )
    return FileLock(f"{folder}.build.lock")


def _log(op: str) -> Path:
    return Path(f"{build_folder(op)}.build.log")


def _accelerator() -> str:
    """Returns DeepSpeed's name for this machine's device, by its rule for the two that this toolkit runs on."""
    import torch

    return os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")


def came_with_deepspeed(op: str) -> bool:
    """Returns True if DeepSpeed was installed with this op compiled (DS_BUILD_OPS=1), for the device that is here."""
    require_installed("deepspeed", f"The native op {op}, which is DeepSpeed's,")
    facts = metadata.distribution("deepspeed").locate_file("deepspeed/git_version_info_installed.py")
    # Run by itself: importing it would import all of DeepSpeed.
    values = runpy.run_path(str(facts)) if os.path.isfile(str(facts)) else {}
    return bool(values.get("installed_ops", {}).get(OPS[op].name)) and values["accelerator_name"] == _accelerator()
