"""The process that has imported everything, and forks others; what `nursery.Nursery` starts, and talks to by pipes."""

import atexit
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import psutil

# What takes longest to import of what a run imports, by then or later.
IMPORTED = (
    "accelerate.commands.launch",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "peft",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.cpp_extension",
    "transformers.models.llama.modeling_llama",
    "finetune.run",
    "finetune.train",
)

_SET_BY_IMPORTS: dict[str, str] = {}


def _serve() -> None:
    _import_everything()
    gc.freeze()  # else every fork copies what its first collection looks at
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "fork":
            # A lock that another thread holds would be held for ever in the fork.
            assert os.listdir("/proc/self/task") == [str(os.getpid())]
            answer: int | None = os.fork()
            if answer == 0:
                os._exit(_exit_code(asked))
        else:
            pid, status = os.waitpid(asked["pid"], 0 if asked["do"] == "wait" else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)


def _exit_code(asked: dict[str, Any]) -> int:
    """Runs what was asked for, and ends it as Python does, but for the teardown: that takes longer than the start."""
    try:
        _become(asked)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _import_everything() -> None:
    before = dict(os.environ)
    # As `finetune.quiet` does: it looks for a kernel to download.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for module in IMPORTED:
        importlib.import_module(module)
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET)
    # DeepSpeed's ops ask for it each time that they are loaded, and it takes a second.
    cpuinfo = importlib.import_module("cpuinfo.cpuinfo")
    cpuinfo.get_cpu_info_json = functools.cache(cpuinfo.get_cpu_info_json)
    cpuinfo.get_cpu_info_json()
    _SET_BY_IMPORTS.update({key: value for key, value in os.environ.items() if before.get(key) != value})


def _become(asked: dict[str, Any]) -> None:
    """Becomes the Python that was asked for."""
    os.setsid()
    # What it prints must not depend on where this process's output goes.
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND),
        (2, asked["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(name, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    words = asked["words"]
    os.chdir(asked["cwd"])
    if words[:3] == ["-m", "accelerate.commands.accelerate_cli", "launch"]:
        _ranks_ahead(words, words[3:])
    elif words[:2] == ["-m", "finetune.launcher"]:
        _ranks_ahead(words, words[2:])
    _run(words, asked["env"])


def _run(words: list[str], env: dict[str, str]) -> None:
    """What `python …` does once it is started."""
    import numpy as np
    import torch

    from finetune import parent

    os.environ.clear()
    os.environ.update({**_SET_BY_IMPORTS, **env})
    # As imports leave them; Python's own is seeded anew in every fork.
    np.random.seed()
    torch.seed()
    parent.note()
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _ranks_ahead(words: list[str], arguments: list[str]) -> None:
    """Forks the ranks that this process, a launcher, is going to start: later it has threads."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    parsed = launch_command_parser().parse_args(arguments)
    waiting: list[tuple[int, int]] = []
    for _ in range(parsed.num_processes or load_config_from_file(parsed.config_file).num_processes):
        hear, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            for _, other in [*waiting, (0, tell)]:
                os.close(other)
            _become_rank(hear, words)
            raise SystemExit(0)
        os.close(hear)
        waiting.append((pid, tell))

    class Forked(subprocess.Popen[Any]):
        def _execute_child(self, args: list[str], *rest: Any) -> None:  # type: ignore[override]
            if args[0] != sys.executable:
                super()._execute_child(args, *rest)  # type: ignore[misc]
                return
            self.pid, tell = waiting.pop(0)
            self._child_created = True
            told = {
                "words": [word for word in args[1:] if word != "-u"],
                "env": dict(rest[5]),
                "session": rest[-2],
                "handled": [n for n in signal.valid_signals() if callable(signal.getsignal(n))],
            }
            with open(tell, "w") as rank:
                json.dump(told, rank)

    subprocess.Popen = subprocess_handler.Popen = Forked  # type: ignore[misc]


def _become_rank(hear: int, launcher: list[str]) -> None:
    """Waits for the launcher to say which rank this is."""
    with open(hear) as told:
        text = told.read()
    if not text:
        os._exit(0)
    asked = json.loads(text)
    if asked["session"]:
        os.setsid()
    # An exec takes back what the launcher handles, also where it was ignored before, as under nohup.
    for number in asked["handled"]:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # The toolkit looks for the launch file in its parent's command line.
    real, line = psutil.Process.cmdline, {os.getppid(): [sys.executable, *launcher]}
    psutil.Process.cmdline = lambda self: line[self.pid] if self.pid in line else real(self)  # type: ignore[method-assign]
    _run(asked["words"], asked["env"])


if __name__ == "__main__":
    _serve()
