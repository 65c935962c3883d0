"""Ranks forked from a process that has imported everything, so that a start costs a second and not ten.

They get the environment that torchrun and Accelerate give, and run what `scripts/train.py` runs. What a launcher
does is no part of this: tests of it start a real one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import LIMIT_S, ROOT, environment
from ranks import exported, free_port


class Nursery:
    """The process that forks ranks. Its ranks see it as their launcher."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._exported: dict[str, dict[str, str]] = {}

    def ask(self, **what: Any) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                cwd=ROOT,
                env=environment(DS_ACCELERATOR="cpu", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def start(self, config: str, folder: Path, *words: str, env: Mapping[str, str] | None = None) -> Iterator["Ranks"]:
        """The ranks of a shipped launch file, which are gone afterwards.

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
                ranks.add(self.ask(do="fork", words=[str(w) for w in words], env=variables, folder=str(own)))
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

    def add(self, pid: int) -> None:
        self.pids.append(pid)

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal, to all if none is named; those that have ended are passed over."""
        for rank in ranks or range(len(self.pids)):
            if self.code(rank) is None:
                os.kill(self.pids[rank], number)

    def code(self, rank: int) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        pid = self.pids[rank]
        if pid not in self._codes:
            code = self._nursery.ask(do="poll", pid=pid)
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
                self._nursery.ask(do="reap", pid=pid)


def until(true: Callable[[], bool], limit_s: float, what: Callable[[], str] | str) -> None:
    """Returns once something is true; fails if that takes too long."""
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.005)


def _serve() -> None:
    import accelerate.commands.launch  # noqa: F401
    import deepspeed  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401

    import finetune.run
    import finetune.train  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "fork":
            answer: int | None = os.fork()
            if answer == 0:
                _become_rank(asked)
        else:
            pid, status = os.waitpid(asked["pid"], 0 if asked["do"] == "reap" else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)


def _become_rank(asked: dict[str, Any]) -> None:
    code = 70
    try:
        os.setsid()
        # Like the end of a terminal: what a rank prints must not depend on where this process's output goes.
        for number, name in ((0, None), (1, "out"), (2, "err")):
            path = os.devnull if name is None else os.path.join(asked["folder"], name)
            flags = os.O_RDONLY if name is None else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(path, flags, 0o644), number)
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv = ["scripts/train.py", *asked["words"]]
        from finetune import parent

        parent.note()
        from finetune.cli import exit_with, train_main

        exit_with(train_main(asked["words"]))
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
