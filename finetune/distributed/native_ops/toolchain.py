"""The tools that compile native ops: those of this environment first."""

import functools
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from finetune.utils.temporary_folders import temporary_folder


def prepare_environment() -> None:
    """Sets what DeepSpeed and torch read when they load an op, for this process and its children.

    - This environment's `ninja` comes first on the PATH. torch calls it by name, and `.venv/bin/accelerate launch`
      works without activating the environment. The system's, if it is of another version, discards the log of ours
      and compiles everything again inside the run.
    - Compiled ops are kept in the virtual environment, unless told where. torch's own default is one folder for all
      environments of a user. Build commands name the environment, so two would compile each other's ops again and
      again, and overwrite libraries that a run has loaded.
    - py-cpuinfo keeps its answer. DeepSpeed asks it twice each time that it loads an op, and it starts processes and
      measures clocks to answer: more than a second of every rank's processor each time.
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
    if not hasattr(cpuinfo.get_cpu_info_json, "cache_clear"):
        cpuinfo.get_cpu_info_json = functools.cache(cpuinfo.get_cpu_info_json)


def compiler() -> str:
    # torch's rule; it passes the value on as one word.
    return os.environ.get("CXX", "c++")


def python_headers() -> str:
    # The scheme that torch passes to the compiler.
    return sysconfig.get_path("include", scheme="posix_prefix")


def has_libaio() -> bool:
    """Returns True if a program that uses libaio compiles and links, which DeepSpeed tries at each load."""
    program = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
    compile_flags, link_flags = (shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))
    with temporary_folder() as scratch:
        probe = ["-x", "c++", "-", "-laio", "-o", str(scratch / "probe")]
        command = [compiler(), *compile_flags, *link_flags, *probe]
        return subprocess.run(command, input=program, capture_output=True, text=True).returncode == 0


def find_missing(*, libaio: bool) -> tuple[str, str] | None:
    """Returns what is missing to compile an op with, and the command that installs it; None if nothing is.

    Args:
        libaio: Whether the op needs it.
    """
    if shutil.which(compiler()) is None:
        return f"there is no C++ compiler ({compiler()})", "apt-get install g++"
    if shutil.which("ninja") is None:
        return "there is no ninja", f"{sys.executable} -m pip install ninja"
    if not Path(python_headers(), "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Python's headers are not in {python_headers()}", f"apt-get install python{version}-dev"
    if libaio and not has_libaio():
        return "libaio and its header libaio.h were not found", "apt-get install libaio-dev"
    return None
