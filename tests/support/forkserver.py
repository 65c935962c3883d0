"""Python processes and ranks as forks of a process that has imported everything: a start takes 20 ms, not 5 s.

It is multiprocessing's own fork server, which has loaded `preloaded.py`, and each fork runs a script as `python` would.
`ForkServer.start` starts a launch file's ranks with the environment that `accelerate launch` gives them, without the
launcher; `test_forkserver.py` compares what such ranks compute with a real `accelerate launch` of every kind of launch
file, to the bit. What is about launching itself starts real processes (`harness.run`).

Two things differ from a real start. Ranks have one seed for Python's hashes, so that a set's order on which they must
agree shows in a real launch only. And variables that libraries read when they are imported (OMP_NUM_THREADS, HF_HOME,
…) are those of `harness.environment`: a test of them needs a real process.
"""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from external_commands import require_ops
from harness import ROOT, RUN_S, environment
from ranks import exported, free_port, launch_file, needed_ops

KILLED = 124
"""The exit code of what took too long and was killed, as `timeout` has it."""


def _by_spawning() -> bool:
    """Where there is a GPU: DeepSpeed looks at it as it is imported, and a fork could not use it any more."""
    return torch.cuda.is_available()


def become(words: list[str], env: dict[str, str], cwd: str, out: str, err: str, *, spawned: bool) -> None:
    """Does what `python WORDS` does once it has imported what it needs.

    Args:
        env: The whole environment. Variables that libraries read when they are imported have no effect any more.
        out: A file that takes standard output; it is emptied first.
        err: Likewise for standard error; the same file for both is fine.
        spawned: It is no fork; the environment may hide the GPU that was the reason.
    """
    import preloaded

    assert spawned or os.getppid() == preloaded.LOADED_BY, "the fork server has not loaded `preloaded`"
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # undoes `ignores_hangups`
    # What it prints must not depend on where the tests' output goes.
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND),
        (2, err, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(name, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    # multiprocessing has opened another one.
    sys.stdin.reconfigure(errors=sys.stdout.errors, write_through=sys.stdout.write_through)
    run_program(words, env, cwd)


def run_program(words: list[str], env: dict[str, str], cwd: str) -> None:
    """Runs a script, or `-m` and a module, in this process, which becomes what Python would be for it.

    Args:
        env: The whole environment.
    """
    import numpy as np
    import preloaded

    from finetune.utils import orphan_watch

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({**preloaded.SET_BY_IMPORTS, **env})
    # As imports leave them; Python's own is seeded anew in every fork.
    np.random.seed()
    torch.seed()
    orphan_watch.record_parent()
    path = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    if words[0] == "-m":
        sys.argv, sys.path[:1] = words[1:], [cwd, *path]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:1] = words, [str(Path(words[0]).resolve().parent), *path]
        # Not `runpy.run_path`: it gives `sys.argv[0]` the whole path too.
        main = ModuleType("__main__")
        main.__file__ = str(Path(words[0]).resolve())
        sys.modules["__main__"] = main
        exec(compile(Path(words[0]).read_bytes(), main.__file__, "exec"), main.__dict__)


class ForkServer:
    """Starts Python processes and ranks. The process that they are forks of is started with the first one."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("spawn" if _by_spawning() else "forkserver")
        self._context.set_forkserver_preload(["ignores_hangups", "preloaded", __name__])
        self._exported: dict[tuple[str, int | None], dict[str, str]] = {}

    def python(
        self, words: list[str], env: Mapping[str, str], out: Path, err: Path, cwd: Path = ROOT
    ) -> ForkServerProcess:
        """Starts `python WORDS`; `WORDS` is a script or `-m` and a module, with arguments."""
        spawned = _by_spawning()
        process = self._context.Process(
            target=become,
            args=(list(map(str, words)), dict(env), str(cwd), str(out), str(err)),
            kwargs={"spawned": spawned},
        )
        if spawned:
            theirs = dict(env)  # CUDA is asked for devices while the process imports, before `become` sets these
        else:
            # The server has the environment of whoever starts it, which the first process does.
            # Arrow's allocator would start a thread, which a fork does not have.
            theirs = environment(JE_ARROW_MALLOC_CONF="background_thread:false", DS_ACCELERATOR="cpu")
        with mock.patch.dict(os.environ, theirs, clear=True):
            process.start()
        return process

    def run(self, words: list[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Runs `python WORDS` to its end; returns its exit code and everything that it printed."""
        with tempfile.NamedTemporaryFile() as printed:
            output = Path(printed.name)
            ranks = Ranks([self.python(words, env or environment(), output, output, cwd)], [output])
            code = ranks.finish()
            return code, output.read_text(errors="replace")

    @contextmanager
    def start(
        self,
        config: str | Path,
        folder: Path,
        *words: object,
        script: str = "scripts/train.py",
        processes: int | None = None,
        env: Mapping[str, str] | None = None,
        in_turn: bool = False,
    ) -> Iterator["Ranks"]:
        """The ranks of a launch file, each with its own exit code; when the block ends they are gone.

        Args:
            config: A shipped launch file by name, or any by path.
            folder: For what they print; a new one, or one that other ranks have left.
            words: The script's arguments: the recipe, and what of it is overridden.
            processes: As many instead of what the launch file says.
            in_turn: Start the last rank first, and each of the others once the one before has ended.
        """
        key = (str(config), processes)
        if key not in self._exported:
            require_ops(needed_ops(config))
            self._exported[key] = exported(config, processes)
        common, tree = self._exported[key], launch_file(config)
        world = processes or tree["num_processes"]
        port, started = str(free_port()), {}
        try:
            for rank in reversed(range(world)) if in_turn else range(world):
                own = folder / "elastic" / "attempt_0" / str(rank)
                own.mkdir(parents=True, exist_ok=True)
                # Whoever reads what it prints may come before it, and finds nothing of the ranks before.
                (own / "out").write_bytes(b"")
                (own / "err").touch()
                place = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
                }
                variables = environment(**common, **({} if tree["distributed_type"] == "NO" else place), **(env or {}))
                line = [script, *map(str, words)]
                started[rank] = self.python(line, variables, own / "out", own / "err")
                if in_turn:
                    started[rank].join(RUN_S)
            for note in folder.glob("elastic/said-*"):
                note.unlink()
            yield Ranks(
                [started[rank] for rank in range(world)],
                [folder / "elastic" / "attempt_0" / str(rank) for rank in range(world)],
            )
        finally:
            Ranks(list(started.values()), []).end()

    def launch(
        self,
        config: str | Path,
        *words: object,
        script: str = "scripts/train.py",
        processes: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Runs the ranks of a launch file to their end, as `start` starts them.

        Returns:
            The exit code of the first rank that failed, or 0; and all that they printed.
        """
        with (
            tempfile.TemporaryDirectory() as folder,
            self.start(config, Path(folder), *words, script=script, processes=processes, env=env) as ranks,
        ):
            # A recipe takes a few seconds alone.
            code = ranks.finish(RUN_S + 10 * len(words))
            return code, ranks.output()

    def found(self, script: str, processes: int) -> list[dict[str, Any]]:
        """What ranks have found: `SCRIPT FOLDER` writes JSON into a file of the rank's number."""
        with tempfile.TemporaryDirectory() as folder:
            code, output = self.launch("ddp", folder, script=script, processes=processes)
            assert code == 0, output
            return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(processes)]


class Ranks:
    """Processes that run."""

    def __init__(self, processes: list[ForkServerProcess], outputs: list[Path]) -> None:
        """
        Args:
            outputs: Where each prints: a file, or a folder with the files `out` and `err`.
        """
        self._processes, self._outputs = processes, outputs

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal, to all if none is named; those that have ended are passed over."""
        for rank in ranks or range(len(self._processes)):
            # The fork server has reaped a process before its exit code is known here.
            with suppress(ProcessLookupError):
                if self.code(rank) is None:
                    os.kill(self.pids[rank], number)

    def code(self, rank: int) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._processes[rank].exitcode

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def wait(self, limit_s: float = RUN_S) -> list[int]:
        """All exit codes, once all have ended."""
        end = time.monotonic() + limit_s
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = self.codes
        assert None not in codes, f"not all ended within {limit_s:g} s: {codes}\n{self.output()}"
        return [code for code in codes if code is not None]

    def finish(self, limit_s: float = RUN_S) -> int:
        """Waits as a launcher does: the first failure ends all, whom it would leave waiting; returns its exit code."""
        end = time.monotonic() + limit_s
        running = {process.sentinel: process for process in self._processes}
        while running:
            ended = connection.wait(list(running), max(0.0, end - time.monotonic()))
            codes = [running.pop(sentinel).exitcode or 0 for sentinel in ended if isinstance(sentinel, int)]
            failed = [code for code in codes if code] if ended else [KILLED]
            if failed:
                self.end()
                return failed[0]
        return 0

    def output(self, *ranks: int) -> str:
        """What ranks have printed, one after the other."""
        places = [self._outputs[rank] for rank in ranks or range(len(self._outputs))]
        files = [file for place in places for file in ((place / "out", place / "err") if place.is_dir() else (place,))]
        return "".join(file.read_text(errors="replace") for file in files)

    def end(self) -> None:
        """Kills what is left, and all that it has started."""
        for process in self._processes:
            # Each leads a session, so that this reaches its own children too.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            if process.exitcode is None:
                process.kill()
            process.join()


def until(true: Callable[[], bool], limit_s: float, what: Callable[[], str] | str) -> None:
    """Returns once something is true; fails if that takes too long."""
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.005)
