"""The run directory: used by one run at a time, refused if it holds another one; `run.json`."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import torch

from finetune.checkpoint import run_facts, trusted_code
from finetune.checkpoint.checkpoint_store import CheckpointStore, name_of, open_store
from finetune.config.recipe import dump_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.backend import Backend
from finetune.distributed.rendezvous_names import attempt_number
from finetune.utils import atomic_files, json_files
from finetune.utils.compat.library_versions import PROVEN, installed
from finetune.utils.errors import CheckpointError, RecipeError
from finetune.utils.quoting import to_stderr

_LIBRARIES = (*PROVEN, "numpy", "safetensors", "tokenizers", "torchao")

# What a run leaves in its directory, and what `output.overwrite` deletes. `run.json` comes last: a deletion that is cut
# short leaves a directory that is still a run's.
_JOURNALS = ("metrics.jsonl", "ledger.jsonl", "incidents.jsonl")
_LEFT = (
    *_JOURNALS,
    *(f"{name}.damaged" for name in _JOURNALS),
    run_facts.MACHINES,
    "predictions.jsonl",
    run_facts.EXAMPLES,
    "model",
    "checkpoints",
    "exports",
    "harness.json",
    "profile",
    "report",
    "trackers",
    "run.json",
)

# What else has a fixed name there.
_MORE = ("recipe.yaml", ".lock", ".trials")

# How long to wait for a run that is just ending: its launcher may be gone before its workers are.
_LOCK_PATIENCE_S = 30.0


@dataclass
class RunDirectory:
    """Folder of a run's files: `recipe.yaml`, `run.json`, `metrics.jsonl`, `checkpoints/`, `model/` and so on."""

    path: Path
    previous: dict[str, Any] | None
    """`run.json` as an earlier start of the run left it; None in a fresh directory, or one to be overwritten."""
    _overwrite: bool
    _lock: filelock.BaseFileLock | None = field(repr=False)
    _device: int = field(repr=False)
    _lock_file: os.stat_result | None = field(repr=False)
    _written: dict[str, str] = field(default_factory=dict, repr=False)
    """The texts of `recipe.yaml` and `run.json`, on rank 0 and once it has written them."""

    @property
    def checkpoints(self) -> CheckpointStore:
        return open_store(self.path)

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
        advice = "Choose a folder that this user may write to."
        with CheckpointError.explaining(f"output.dir: cannot write to {path}", advice, OSError):
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        # They could lead what a run writes and deletes to other places.
        for name in (*_LEFT, *_MORE):
            for file in (path / name, path / f"{name}.staging"):
                if file.is_symlink():
                    raise RecipeError(
                        f"output.dir: {file} is a symbolic link, and links in a run directory are not followed. "
                        "Remove it, or choose another output.dir; that itself may be a link, to a larger disk for "
                        "example."
                    )
        # Workers that a launcher has started again after a failure mean the run that they have begun.
        again = attempt_number() > 0
        overwrite = recipe.output.overwrite and not again
        mode = "auto" if again and recipe.resume.mode == "never" else recipe.resume.mode
        previous = _find_previous(path, mode, overwrite)
        lock = None
        if os.environ.get("RANK", "0") == "0":
            lock = _hold(path)
            previous = _find_previous(path, mode, overwrite)  # whoever held it until now may have changed it
        held = Path(lock.lock_file).stat() if lock is not None else None
        return cls(path, previous, overwrite, lock, atomic_files.device_of(path), held)

    def had_checkpoints(self) -> bool:
        """Returns whether the run that the directory holds has written a checkpoint, be it there or not."""
        before = self.previous or {}
        steps = [start["from_step"] for start in before.get("starts", [])]
        if not steps:
            return (self.path / "ledger.jsonl").exists()  # `run.json` is gone, which is older than this
        return "first_checkpoint" in before or "stopped" in before or max(steps) > steps[0]

    def note_checkpoint(self, step: int) -> None:
        """Writes into `run.json` that there is a checkpoint, and which code lies in it; rank 0 calls it.

        Raises:
            OSError: If it cannot be written.
        """
        facts = run_facts.read_facts(self.path)
        known = {"first_checkpoint": step, **facts}
        if trusted_code.SHIPPED in facts.get("code", {}):
            weights = self.checkpoints.local_folder(name_of(step)) / "model"
            known["code"] = trusted_code.sign_weights(facts["code"], weights)
        if known != facts:
            self._put("run.json", atomic_files.json_text(known))

    def make_again(self, backend: Backend) -> bool:
        """Makes the directory again, with what a run needs there, if somebody has deleted it; every rank calls it.

        Where its disk is away, nothing is made: it may come back.

        Returns:
            Whether something was missing.

        Raises:
            CheckpointError: On every rank, if another run has begun in its place.
        """
        missing: list[str] | None = []
        if backend.is_main:
            # If it fails, what is written next fails as well, and says why.
            with suppress(OSError, ValueError):
                missing = self._make_again()
        missing = backend.broadcast_object(missing)
        if missing is None:
            raise CheckpointError(
                f"output.dir: {self.path} was deleted while this run was under way, and another run has begun there. "
                "Nothing more can be saved. Give each run an output.dir of its own, and start this one again."
            )
        if missing and backend.is_main:
            to_stderr(
                f"output.dir: {self.path} has lost {', '.join(missing)} while this run was under way: somebody has "
                "deleted them. They are made again, and the run goes on; checkpoints that were there are lost."
            )
        return bool(missing)

    def _make_again(self) -> list[str] | None:
        """Makes it on rank 0; returns what was missing, and None if another run has begun there."""
        missing = [name for name in (*self._written, "checkpoints") if not (self.path / name).exists()]
        assert self._lock is not None
        assert self._lock_file is not None
        file = Path(self._lock.lock_file)
        locked = file.exists() and os.path.samestat(file.stat(), self._lock_file)
        if (locked and not missing) or atomic_files.device_of(self.path) != self._device:
            return []
        self.path.mkdir(parents=True, exist_ok=True)
        if not locked:
            # The lock that is held is that of a file which is gone.
            lock = filelock.FileLock(file)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                return None
            self._lock, self._lock_file = lock, file.stat()
        ours = json_files.parse(self._written["run.json"])["starts"]
        if "run.json" not in missing and run_facts.read_facts(self.path)["starts"] != ours:
            return None
        (self.path / "checkpoints").mkdir(exist_ok=True)
        for name, text in self._written.items():
            if name in missing:
                atomic_files.write_text(self.path / name, text)
        return missing

    def _put(self, name: str, text: str) -> None:
        atomic_files.write_text(self.path / name, text)
        self._written[name] = text

    def create(
        self,
        backend: Backend,
        recipe: Recipe,
        facts: dict[str, Any],
        *,
        begin: dict[str, Any],
        examples: Callable[[], list[Any]] = list,
    ) -> None:
        """Writes what is about to run. Every rank calls it; rank 0 writes.

        Args:
            facts: What `run.json` says beside this start.
            begin: `from_step`, how many steps are taken already, and what else is to be said of this start.
            examples: Returns lines about the first training examples, on rank 0; without any, no file is written.

        Raises:
            CheckpointError: On every rank, if it cannot be written.
        """
        backend.barrier()

        def write() -> None:
            self._write(backend.world_size, recipe, facts, begin)
            if lines := examples():
                atomic_files.write_text(self.path / run_facts.EXAMPLES, json.dumps(lines, ensure_ascii=False) + "\n")

        self.on_main(backend, write)
        # Each rank writes its part of a checkpoint there.
        blind = torch.tensor([float(not (self.path / "run.json").exists())], device=backend.device)
        if backend.all_reduce_sum(blind).item():
            raise CheckpointError(
                f"output.dir: {self.path} is not the same folder on all machines. Put it on a file system that they "
                "share."
            )

    def _write(self, processes: int, recipe: Recipe, facts: dict[str, Any], begin: dict[str, Any]) -> None:
        before, starts = self.previous or {}, []
        if self._overwrite:
            for name in _LEFT:
                if name == "run.json":
                    # What is left if this ends here is a run's by this folder.
                    (self.path / "checkpoints").mkdir(exist_ok=True)
                atomic_files.remove_path(self.path / name)
        elif self.previous is not None:
            starts = self._rewind(begin["from_step"])
        (self.path / "checkpoints").mkdir(exist_ok=True)
        self._put("recipe.yaml", dump_recipe(recipe))
        now = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": processes,
            **begin,
        }
        commit = None  # of the working directory, marked if files differ from it; None outside a repository
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
            commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        versions = {"python": sys.version.split()[0], **{name: installed(name) for name in _LIBRARIES}}
        known: dict[str, Any] = {"command": sys.argv, "versions": versions, "git_commit": commit or None}
        if "first_checkpoint" in before:
            known["first_checkpoint"] = before["first_checkpoint"]
        if code := trusted_code.sign_code(self.path, recipe):
            known["code"] = code
        self._put("run.json", atomic_files.json_text({"starts": [*starts, now], **facts, **known}))

    def finish(self, backend: Backend, results: dict[str, Any], **more: Any) -> None:
        """Adds the results and more to `run.json`, on rank 0, and lets go of the directory.

        Raises:
            CheckpointError: On every rank, if it cannot be written.
        """

        def write() -> None:
            facts = run_facts.read_facts(self.path) | more
            if "code" in facts:
                facts["code"] = trusted_code.sign_weights(facts["code"], self.path / "model")
            facts["results"] = {key: value for key, value in results.items() if not key.startswith("_")}
            facts["stopped" if "stopped" in results else "finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._put("run.json", atomic_files.json_text(facts))

        self.on_main(backend, write)
        self.release()

    def release(self) -> None:
        """Lets go of the directory."""
        if self._lock is not None:
            self._lock.release()

    def on_main(self, backend: Backend, write: Callable[[], None]) -> None:
        """Writes on rank 0; all ranks learn how that went, and none waits for one that has ended.

        Raises:
            CheckpointError: On every rank, if it cannot be written.
        """
        problem: str | None = None
        if backend.is_main:
            try:
                write()
            except OSError as error:
                prefix = f"{Path(error.filename).name}: " if error.filename else ""
                problem = f"output.dir: cannot write to {self.path}: {prefix}{error.strerror or error}."
        problem = backend.broadcast_object(problem)
        if problem is not None:
            raise CheckpointError(f"{problem} Make room or mend the file system, and start the same command again.")

    def _rewind(self, step: int) -> list[dict[str, Any]]:
        """Takes back the metrics and incidents of steps that will be taken again, and sets damaged lines aside.

        Returns:
            The starts so far, the last with how far it came, which the lines tell.
        """
        before = self.previous or {}
        starts: list[dict[str, Any]] = before.get("starts", [])
        readers = {run_facts.METRICS: run_facts.read_metrics, run_facts.INCIDENTS: run_facts.read_incidents}
        for name, read in readers.items():
            file = self.path / name
            if file.exists():
                lines = read(self.path)
                last = lines.whole[-1] if lines.whole else {"step": -1}
                if starts and name == run_facts.METRICS and last["step"] >= starts[-1]["from_step"]:
                    ended = before.get("finished", before.get("stopped"))
                    reached = {"to_step": last["step"], "last_logged": last.get("time"), "ended": ended}
                    starts = [*starts[:-1], {**starts[-1], **reached}]
                if (moved := atomic_files.set_damaged_lines_aside(file, lines)) is not None:
                    to_stderr(f"{moved}. The run is resumed without them: what they said is missing from reports.")
                atomic_files.rewrite_lines(file, [line for line in lines.whole if line["step"] <= step])
        return starts


def _find_previous(path: Path, mode: str, overwrite: bool) -> dict[str, Any] | None:
    """Returns `run.json` of the run that the directory holds and that may be gone on with."""
    left = (run_facts.RUN, "ledger.jsonl", "checkpoints")
    if (path / "recipe.yaml").exists() and not any((path / name).exists() for name in left):
        raise RecipeError(
            f"output.dir: {path} has a recipe.yaml, but no run of this toolkit, and a run writes its full recipe to "
            "that name. Choose another output.dir, such as runs/NAME, so that yours is not replaced."
        )
    if overwrite:
        if mode not in ("auto", "never"):
            raise RecipeError(
                f"output.overwrite deletes what {path} holds, but resume is '{mode}'. Take one of the two out."
            )
        # Only what a run of this toolkit has left may be overwritten.
        names = [name for name in _LEFT if (path / name).is_file() or any((path / name).glob("*"))]
        if names and not _is_run(path):
            raise RecipeError(
                f"output.overwrite: {path} holds {', '.join(names)}, but no run.json or ledger.jsonl of this toolkit, "
                "so nothing in it is deleted. Choose another output.dir, or remove these yourself."
            )
        return None
    previous = _read(path)
    if previous is None and (path / "model").exists():
        raise RecipeError(
            f"output.dir: {path} has a folder 'model', but no run of this toolkit. Choose another output.dir, so that "
            "nothing is replaced."
        )
    if previous is not None and mode == "never":
        raise RecipeError(
            f"output.dir: {path} already holds a run, and resume=never. Choose another output.dir, remove it, set "
            "output.overwrite=true to delete it, or resume=auto to resume it."
        )
    return previous


def _read(path: Path) -> dict[str, Any] | None:
    if not (path / run_facts.RUN).exists():
        # Checkpoints or a ledger are a run's, whatever became of the file beside them.
        return {} if (path / "checkpoints").is_dir() or (path / "ledger.jsonl").exists() else None
    try:
        return run_facts.read_facts(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Or choose another output.dir and begin from the checkpoint by resume={path}."
        ) from error


def _is_run(path: Path) -> bool:
    """Returns whether a directory holds a run, by a file that only runs write."""
    for name, key in (("run.json", "starts"), ("ledger.jsonl", "start")):
        with suppress(OSError, ValueError), (path / name).open("rb") as file:
            facts = json_files.parse(file.readline() if name.endswith("l") else file.read())
            if isinstance(facts, dict) and key in facts:
                return True
    return False


def _hold(path: Path) -> filelock.BaseFileLock:
    """Takes the directory for this process; the system gives it back when the process ends."""
    with CheckpointError.explaining(f"output.dir: {path} cannot be locked", "", OSError):
        file, reason = atomic_files.lock_file(path, ".lock")
    if reason is not None:
        to_stderr(
            f"output.dir: the file system of {path} has no locks (flock: {reason}). {file} is locked instead, which "
            "keeps a second run out on this machine only: start no run with this output.dir on another machine "
            "meanwhile, and export from it only while no run is under way, since a checkpoint may be deleted while it "
            "is read. Mount the file system with locks (`-o flock` for Lustre) to have both again."
        )
    lock = filelock.FileLock(file)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        starts = (_read(path) or {}).get("starts", [{}])[-1]
        who = f"process {starts['pid']} on {starts['host']}" if "pid" in starts else "another process"
        to_stderr(f"Waiting for {who}, which holds {path}.")
        try:
            lock.acquire(timeout=_LOCK_PATIENCE_S)
        except filelock.Timeout as error:
            raise RecipeError(
                f"output.dir: {path} is in use by {who}. Wait until that run has ended, or choose another output.dir."
            ) from error
    return lock
