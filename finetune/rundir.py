"""The run directory: held by one run at a time, refused if it holds another, and told what ran."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock
import torch

from finetune import recipe as recipes
from finetune.backend import Backend
from finetune.errors import CheckpointError, RecipeError
from finetune.files import read_lines, rewrite_lines, write_json, write_text
from finetune.recipe import Recipe

_LIBRARIES = (
    "torch",
    "accelerate",
    "transformers",
    "datasets",
    "tokenizers",
    "peft",
    "bitsandbytes",
    "torchao",
    "deepspeed",
    "safetensors",
    "numpy",
)

# How long to wait for a run that is just ending: its launcher may be gone before its workers are.
_LOCK_PATIENCE_S = 30.0


@dataclass(frozen=True)
class RunDirectory:
    """Where a run's files go: `recipe.yaml`, `run.json`, `metrics.jsonl`, `checkpoints/`, `model/` and so on."""

    path: Path
    previous: dict[str, Any] | None
    """`run.json` as an earlier start of the run left it; None in a fresh directory, or one to be overwritten."""
    _overwrite: bool
    _lock: filelock.BaseFileLock | None = field(repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def check(cls, recipe: Recipe) -> "RunDirectory":
        """Makes sure that the directory can be used, without writing a run into it yet.

        Every rank calls it before any of them writes, so that all come to the same answer. Rank 0 then holds the
        directory until the process ends, by whatever means.

        Raises:
            RecipeError: If it holds a run that must not be continued, or is in use.
            CheckpointError: If it cannot be written or read.
        """
        path = Path(recipe.output.dir)
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise CheckpointError(
                f"output.dir: cannot write to {path}: {error.strerror or error}. Choose a folder that this user may "
                "write to."
            ) from error
        previous = cls._look(recipe)
        lock = None
        if os.environ.get("RANK", "0") == "0":
            lock = _hold(path)
            previous = cls._look(recipe)  # whoever held it until now may have changed it
        return cls(path, previous, _overwrites(recipe), lock)

    @staticmethod
    def _look(recipe: Recipe) -> dict[str, Any] | None:
        """The run that the directory holds and that may be gone on with."""
        path, mode, overwrite = Path(recipe.output.dir), recipe.resume.mode, _overwrites(recipe)
        if overwrite and mode not in ("auto", "never"):
            raise RecipeError(
                f"output.overwrite deletes what {path} holds, but resume is '{mode}'. Take one of the two out."
            )
        previous = None if overwrite else _read(path)
        if previous is None and not overwrite and (path / "model").exists():
            raise RecipeError(
                f"output.dir: {path} has a folder 'model', but no run of this toolkit. Choose another output.dir, so "
                "that nothing is replaced."
            )
        if previous is not None and mode == "never" and not _started_again():
            raise RecipeError(
                f"output.dir: {path} already holds a run, and resume=never. Choose another output.dir, remove it, set "
                "output.overwrite=true to delete it, or resume=auto to go on with it."
            )
        return previous

    def agreed(self, backend: Backend) -> dict[str, Any] | None:
        """`previous` as rank 0 has read it, on every rank: it alone holds the directory. Every rank must call it."""
        previous: dict[str, Any] | None = backend.tell(self.previous)
        return previous

    def create(self, backend: Backend, recipe: Recipe, facts: dict[str, Any], *, begin: dict[str, Any]) -> None:
        """Writes what is about to run. Every rank calls it; rank 0 writes.

        Args:
            facts: What `run.json` says beside this start.
            begin: `from_step`, how many steps are taken already, and what else is to be said of this start.

        Raises:
            CheckpointError: On every rank, if it cannot be written.
        """
        backend.wait()
        self._on_main(backend, lambda: self._write(backend.world, recipe, facts, begin))
        self._check_shared(backend)

    def _write(self, processes: int, recipe: Recipe, facts: dict[str, Any], begin: dict[str, Any]) -> None:
        if self._overwrite:
            self._wipe()
        elif self.previous is not None:
            self._rewind(begin["from_step"])
        self.checkpoints.mkdir(exist_ok=True)
        write_text(self.path / "recipe.yaml", recipes.dump(recipe))
        starts = (self.previous or {}).get("starts", [])
        now = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": processes,
            **begin,
        }
        known = {"command": sys.argv, "versions": _versions(), "git_commit": _git_commit()}
        write_json(self.path / "run.json", {"starts": [*starts, now], **facts, **known})

    def finish(self, backend: Backend, results: dict[str, Any], **more: Any) -> None:
        """Adds the results and more to `run.json`, on rank 0, and lets go of the directory.

        Raises:
            CheckpointError: On every rank, if it cannot be written.
        """

        def write() -> None:
            facts = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            facts |= more
            facts["results"] = {key: value for key, value in results.items() if not key.startswith("_")}
            facts["stopped" if "stopped" in results else "finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            write_json(self.path / "run.json", facts)

        self._on_main(backend, write)
        if self._lock is not None:
            self._lock.release()

    def _on_main(self, backend: Backend, write: Callable[[], None]) -> None:
        """Writes on rank 0; all ranks learn how that went, and none waits for one that has ended."""
        problem: str | None = None
        if backend.is_main:
            try:
                write()
            except OSError as error:
                place = f"{Path(error.filename).name}: " if error.filename else ""
                problem = f"output.dir: cannot write to {self.path}: {place}{error.strerror or error}."
        problem = backend.tell(problem)
        if problem is not None:
            raise CheckpointError(f"{problem} Make room or mend the file system, and start the same command again.")

    def _wipe(self) -> None:
        for name in ("metrics.jsonl", "ledger.jsonl", "incidents.jsonl", "run.json"):
            (self.path / name).unlink(missing_ok=True)
        for name in ("model", "checkpoints"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def _rewind(self, step: int) -> None:
        """Takes back the metrics and incidents of steps that will be taken again."""
        for file in (self.path / "metrics.jsonl", self.path / "incidents.jsonl"):
            if file.exists():
                rewrite_lines(file, [line for line in read_lines(file) if line["step"] <= step])

    def _check_shared(self, backend: Backend) -> None:
        """All machines must see the same folder, since each rank writes its part of a checkpoint there."""
        blind = torch.tensor([float(not (self.path / "run.json").exists())], device=backend.device)
        if backend.sum(blind).item():
            raise CheckpointError(
                f"output.dir: {self.path} is not the same folder on all machines. Put it on a file system that they "
                "share."
            )


def _started_again() -> bool:
    """Whether a launcher has started workers again after a failure: it means the run that they have begun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _overwrites(recipe: Recipe) -> bool:
    return recipe.output.overwrite and not _started_again()


def _read(path: Path) -> dict[str, Any] | None:
    file = path / "run.json"
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        # Checkpoints are a run, whatever became of the file beside them.
        return {} if (path / "checkpoints").is_dir() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. Restore it, or choose another output.dir and begin from the checkpoint "
            f"by resume={path}."
        ) from error
    return facts


def _hold(path: Path) -> filelock.BaseFileLock:
    """Takes the directory for this process; the system gives it back when the process ends."""
    lock = filelock.FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        starts = (_read(path) or {}).get("starts", [{}])[-1]
        who = f"process {starts['pid']} on {starts['host']}" if "pid" in starts else "another process"
        print(f"Waiting for {who}, which holds {path}.", file=sys.stderr, flush=True)
        try:
            lock.acquire(timeout=_LOCK_PATIENCE_S)
        except filelock.Timeout as error:
            raise RecipeError(
                f"output.dir: {path} is in use by {who}. Wait until that run has ended, or choose another output.dir."
            ) from error
    return lock


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _git_commit() -> str | None:
    """The commit of the working directory, with a mark if files differ from it; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
