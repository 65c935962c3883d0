"""Python processes forked from one that has imported everything (`forked.py`): a start costs 20 ms, not five seconds.

`Nursery.run` is `harness.run`: it runs `python …` to its end. The process is a fork that sets up what an exec would:
arguments, environment, working directory, open files, session. From there on nothing is imitated. `accelerate launch`
runs torchrun's own agent, which chooses the port, exports the ranks' environment, and ends them if one fails; only
where it would start a Python for a rank it takes a fork, made before it had threads. `test_nursery.py` compares what
such ranks see, and the bits that they compute, with real launches of each kind of launch file.

Two things differ. Ranks have one seed for Python's hashes, so that a set's order on which they must agree shows in a
real launch only. And variables that libraries read when they are imported (OMP_NUM_THREADS, HF_HOME, …) are those of
`harness.environment`: a test of them needs a real one.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from harness import LIMIT_S, ROOT, environment
from ranks import exported, free_port


class Nursery:
    """The process that forks others; it starts when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._exported: dict[str, dict[str, str]] = {}

    def _ask(self, **what: Any) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "forked.py")],
                cwd=ROOT,
                # Arrow's allocator would start a thread.
                env=environment(DS_ACCELERATOR="cpu", JE_ARROW_MALLOC_CONF="background_thread:false"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except BaseException:
            # A test that took too long: an answer may be left, which the next one must not take for its own.
            self.close()
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def fork(self, words: list[str], env: Mapping[str, str], out: Path, err: Path, cwd: Path = ROOT) -> int:
        """Starts `python …`; returns its process id."""
        assert words[0] == sys.executable
        return self._ask(do="fork", words=words[1:], env=dict(env), cwd=str(cwd), out=str(out), err=str(err))

    def code(self, pid: int) -> int | None:
        """The exit code, negative for a signal; None while it runs. Once known, it is not to be asked for again."""
        return self._ask(do="poll", pid=pid)

    def wait(self, pid: int) -> int:
        """The exit code of a process; 124 for one that took too long and was killed, with all below it."""
        if ends(pid, LIMIT_S):
            return self._ask(do="wait", pid=pid)
        for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._ask(do="wait", pid=pid)
        return 124

    def run(self, words: list[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Runs `python …` to its end; returns its exit code and everything that it and its children printed."""
        with tempfile.NamedTemporaryFile() as said:
            output = Path(said.name)
            code = self.wait(self.fork(words, env or environment(), output, output, cwd))
            return code, output.read_text(errors="replace")

    @contextmanager
    def start(self, config: str, folder: Path, *words: str, env: Mapping[str, str] | None = None) -> Iterator["Ranks"]:
        """The ranks of a shipped launch file without a launcher, each with its own exit code; afterwards they are gone.

        Args:
            folder: For what they print; a new one, or one that other ranks have left.
            words: The recipe, and what of it is overridden.
        """
        if config not in self._exported:
            self._exported[config] = {} if config == "single" else exported(config)
        world = 1 if config == "single" else 2
        port, ranks = str(free_port()), Ranks(self, folder)
        try:
            for rank in range(world):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
                own = folder / "elastic" / "attempt_0" / str(rank)
                own.mkdir(parents=True, exist_ok=True)
                meeting = {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
                }
                group = {key: str(value) for key, value in place.items()} | meeting
                variables = environment(**self._exported[config], **(group if world > 1 else {}), **(env or {}))
                line = [sys.executable, "scripts/train.py", *map(str, words)]
                ranks.pids.append(self.fork(line, variables, own / "out", own / "err"))
            for said in folder.glob("elastic/said-*"):
                said.unlink()
            yield ranks
        finally:
            ranks.end()


class Ranks:
    """Ranks that run."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.pids: list[int] = []
        self._codes: dict[int, int] = {}

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal, to all if none is named; those that have ended are passed over."""
        for rank in ranks or range(len(self.pids)):
            if self.code(rank) is None:
                os.kill(self.pids[rank], number)

    def code(self, rank: int) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        pid = self.pids[rank]
        if pid not in self._codes:
            code = self._nursery.code(pid)
            if code is None:
                return None
            self._codes[pid] = code
        return self._codes[pid]

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """All exit codes."""
        until(lambda: None not in self.codes, limit_s, lambda: f"ranks ended: {self.codes}\n{self.said()}")
        return [code for code in self.codes if code is not None]

    @property
    def codes(self) -> list[int | None]:
        return [self.code(rank) for rank in range(len(self.pids))]

    def said(self, *ranks: int) -> str:
        """What ranks have printed, one after the other."""
        own = [self._folder / "elastic" / "attempt_0" / str(r) for r in ranks or range(len(self.pids))]
        return "".join((folder / name).read_text(errors="replace") for folder in own for name in ("out", "err"))

    def end(self) -> None:
        """Kills what is left."""
        self.signal(signal.SIGKILL)
        for pid in self.pids:
            if pid not in self._codes:
                self._nursery.wait(pid)


def ends(pid: int, limit_s: float) -> bool:
    """Whether a process, of whomever, ends within some seconds."""
    watched = os.pidfd_open(pid)
    try:
        return bool(select.select([watched], [], [], limit_s)[0])
    finally:
        os.close(watched)


def until(true: Callable[[], bool], limit_s: float, what: Callable[[], str] | str) -> None:
    """Returns once something is true; fails if that takes too long."""
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.005)
