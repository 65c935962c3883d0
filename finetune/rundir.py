"""The run directory: refused if it holds another run, and told what ran."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from finetune import recipe as recipes
from finetune.backend import Backend, Launch, Proof
from finetune.errors import CheckpointError, RecipeError
from finetune.recipe import Recipe
from finetune.tasks import TaskData

_LIBRARIES = (
    "torch",
    "accelerate",
    "transformers",
    "datasets",
    "tokenizers",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "safetensors",
    "numpy",
)


@dataclass(frozen=True)
class RunDirectory:
    """Where a run's files go: `recipe.yaml`, `run.json`, `metrics.jsonl` and `model/`."""

    path: Path

    @classmethod
    def check(cls, recipe: Recipe) -> "RunDirectory":
        """Makes sure that the directory can be used, without writing a run into it yet.

        Every rank calls it before any of them writes, so that all come to the same answer.

        Raises:
            RecipeError: If it holds a run.
            CheckpointError: If it cannot be written.
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
        if (path / "run.json").exists() and not recipe.output.overwrite:
            raise RecipeError(
                f"output.dir: {path} already holds a run, and nothing is overwritten unasked. Choose another "
                "output.dir, remove it, or set output.overwrite=true."
            )
        return cls(path)

    def create(
        self, backend: Backend, recipe: Recipe, launch: Launch, proof: Proof, data: TaskData, length: Any
    ) -> None:
        """Writes what is about to run. Every rank calls it; rank 0 writes."""
        backend.wait()
        if backend.is_main:
            for name in ("metrics.jsonl", "run.json"):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / "model", ignore_errors=True)
            (self.path / "recipe.yaml").write_text(recipes.dump(recipe), encoding="utf-8")
            self._write(
                {
                    "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    "command": sys.argv,
                    "launch": {k: v for k, v in asdict(launch).items() if k != "ds_config"},
                    "ds_config": getattr(backend.accelerator, "deepspeed_config", None),
                    "precision": backend.precision,
                    "runs": proof.to_dict(),
                    "length": asdict(length),
                    "data": {"digest": data.digest, **data.report},
                    "versions": _versions(),
                    "git_commit": _git_commit(),
                }
            )
        backend.wait()

    def finish(self, backend: Backend, results: dict[str, Any]) -> None:
        """Adds the results to `run.json`, on rank 0."""
        if backend.is_main:
            facts = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            facts["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            facts["results"] = {key: value for key, value in results.items() if not key.startswith("_")}
            self._write(facts)
        backend.wait()

    def _write(self, facts: dict[str, Any]) -> None:
        staging = self.path / "run.json.staging"
        staging.write_text(json.dumps(facts, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(staging, self.path / "run.json")


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
