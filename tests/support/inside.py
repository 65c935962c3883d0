"""Runs recipes inside this process, one after the other, where starting up would take most of a test's time."""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from harness import read_lines
from safetensors.torch import load_file

from finetune.checkpoint import run_directory
from finetune.config.recipe import validate_recipe
from finetune.distributed.mesh import ONE_RANK
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun
from finetune.training.loop import train
from finetune.utils.atomic_files import digest_of


def mlp(directory: Path, **sections: Any) -> dict[str, Any]:
    """A run of 20 steps that takes a fifth of a second: 200 points, 8 a step, a checkpoint every 5 steps."""
    tree: dict[str, Any] = {
        "task": {"name": "own_task:mlp"},
        "batch": {"global_size": 8, "micro_size": 2},
        "length": {"steps": 20},
        "optim": {"lr": 1e-2},
        "schedule": {"name": "cosine", "warmup_steps": 3},
        "log": {"every_steps": 1},
        "checkpoint": {"every_steps": 5},
        "output": {"dir": str(directory)},
        "precision": "fp32",
        "seed": 3,
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return tree


def early_stopping(directory: Path, **sections: Any) -> dict[str, Any]:
    """A run of 60 steps whose validation loss is lowest at step 8: with its patience of 3 evaluations it ends at 14."""
    tree = mlp(
        directory,
        length={"steps": 60},
        optim={"lr": 0.1},
        schedule={"name": "constant", "warmup_steps": 0},
        eval={"every_steps": 2, "patience": 3},
        checkpoint={"every_steps": 4, "keep": 1},
    )
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


@dataclass(frozen=True)
class Done:
    """What a run left behind."""

    directory: Path
    results: dict[str, Any]
    said: str

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "model" / "model.safetensors")

    @property
    def steps(self) -> list[int]:
        """The steps in `metrics.jsonl`, as they stand there."""
        return [line["step"] for line in read_lines(self.directory / "metrics.jsonl") if "grad_norm" in line]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in read_lines(self.directory / "metrics.jsonl") if "grad_norm" in line]

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.directory / "run.json").read_text())

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "checkpoints").iterdir())


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Undoes what a run leaves in its process, however it ends: Accelerate's state, and the lock on its folder."""
    locks, hold, words = [], run_directory._hold, sys.argv

    def remember(path: Path) -> Any:
        locks.append(hold(path))
        return locks[-1]

    run_directory._hold, sys.argv = remember, ["test"]
    try:
        yield
    finally:
        run_directory._hold, sys.argv = hold, words
        for lock in locks:
            lock.release()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run_here(tree: dict[str, Any], meddle: Callable[[BuiltRun], None] | None = None) -> Done:
    """Runs a recipe in this process, on one rank.

    Args:
        meddle: Called with the run that was built, before its first step.
    """
    said = io.StringIO()
    with alone(), contextlib.redirect_stderr(said):
        run = build_run(validate_recipe(tree))
        if meddle is not None:
            meddle(run)
        results = train(run)
    return Done(run.directory.path, results, said.getvalue())


def stop_after(step: int) -> Callable[[BuiltRun], None]:
    """Asks a run to stop, so that it saves after this step and ends."""

    def ask(run: BuiltRun) -> None:
        run.shutdown.reason = "a test"

    # Ranks tell each other as a step begins.
    return at_step(step - 1, ask) if step > 1 else ask


def at_step(step: int, act: Callable[[BuiltRun], None]) -> Callable[[BuiltRun], None]:
    """Does something at the end of a step, counted from 1, before anything is saved after it."""

    def meddle(run: BuiltRun) -> None:
        took = run.checkpoints.step_taken

        def then(number: int, sync: Any) -> None:
            took(number, sync)
            if number + 1 == step:
                act(run)

        run.checkpoints.step_taken = then  # type: ignore[method-assign]

    return meddle


class Crash(Exception):
    """Ends a run at once, with nothing saved."""


def crash_after(step: int) -> Callable[[BuiltRun], None]:
    def crash(run: BuiltRun) -> None:
        run.checkpoints.finish()
        raise Crash

    return at_step(step, crash)


def copy(run: Path, target: Path) -> Path:
    """A copy of a run to spoil."""
    return Path(shutil.copytree(run, target, symlinks=True))


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a checkpoint's manifest, and makes its own digest right again."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["digest"]
    change(manifest)
    file.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))


def forge_state(folder: Path, change: Callable[[Any], Any]) -> None:
    """Changes a checkpoint's `state.json`, and makes the manifest's figures of it right again."""
    from finetune.utils.atomic_files import file_digest

    file = folder / "state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(change(state) or state))
    facts = {"bytes": file.stat().st_size, "xxh3_128": file_digest(file)}
    forge(folder, lambda manifest: manifest["files"].update({"state.json": facts}))


def evaluate_batches(model: Any, function: Any, batches: Any) -> Iterator[Any]:
    """`Backend.evaluate_batches`, for what stands in for one."""
    return (model(function, batch) for batch in batches)


class OneRank:
    """The part of a backend that checkpoints need, on one rank, without Accelerate."""

    rank, world_size, is_main, device = 0, 1, True, torch.device("cpu")
    mesh = ONE_RANK
    averages = False

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    all_reduce_max = broadcast = all_reduce_sum
    evaluate_batches = staticmethod(evaluate_batches)

    def share_buffers(self, network: Any) -> None:
        """There is no other rank."""

    def broadcast_object(self, value: Any) -> Any:
        return value
