"""Runs from Python: `load_recipe`, `train`, `start`, `launch`, and `Run`, which reads back what a run left.

A custom task, loss or optimiser is handed over as it is; the recipe of the run then has its name. Data is handed over
as records, which are written into the cache, so that the recipe names a file.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from pydantic import TypeAdapter

from finetune.checkpoint.run_history import RunHistory, Sample, SavedCheckpoint, Series, Status, read_run
from finetune.config import recipe_paths
from finetune.config.recipe import dump_recipe, read_recipe, recipe_layers, validate_recipe, write_out
from finetune.config.recipe_schema import DataSection, Recipe, Section
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils import signals
from finetune.utils.atomic_files import write_text
from finetune.utils.errors import DataError, LaunchError, RecipeError
from finetune.utils.exit_codes import REQUEUE
from finetune.utils.import_object import HANDED_OVER, handed_over, refuse_while_importing
from finetune.utils.shipped_files import launch_file, recipe_file
from finetune.utils.temporary_folders import temporary_folder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.export.load_model import LoadedModel
    from finetune.tasks.metrics import Metric
    from finetune.tasks.task import Batch, Task
    from finetune.training.built_run import BuiltRun
    from finetune.training.loop import Step

    Loss = Callable[[nn.Module, Batch], torch.Tensor]

Source = str | Path | Mapping[str, Any] | Recipe
Records = Iterable[Mapping[str, Any] | str]


class Objects(TypedDict, total=False):
    """Objects that a run can be handed over instead of naming them in its recipe."""

    task: "Task | Callable[..., Task]"
    """A `Task`, or a function of the recipe's `task.args` that returns one."""
    loss: "Loss"
    """A loss in place of the task's: of network and batch, the sum over the batch's targets; see `task.loss`."""
    optimizer: "type[torch.optim.Optimizer]"
    """A class of optimisers; the recipe's `optim` gives its arguments."""
    train_data: Records | Callable[[], Records]
    """Documents, or what returns them: texts, or mappings such as those of a `datasets.Dataset`."""
    validation_data: Records | Callable[[], Records]
    prompts: Records | Callable[[], Records]
    """Prompts with references, in place of `eval.prompts`."""
    metrics: "Sequence[Metric]"
    """Functions or callable objects, beside what `eval.metrics` names."""


# The recipe's keys for objects that it names, and for records, which are written into files that it names.
_NAMED = {"task": "task.name", "loss": "task.loss", "optimizer": "optim.name"}
_WRITTEN = {"train_data": "data.train", "validation_data": "data.validation", "prompts": "eval.prompts"}


def load_recipe(source: Source = "", *overrides: str, **sections: Section | Mapping[str, Any] | Any) -> Recipe:
    """A recipe: a file's, one that ships, or one made here.

    Args:
        source: A YAML file, the name of a recipe that ships (`sample`), plain keys and values, or a recipe; left out:
            the sections alone.
        overrides: As on the command line: `"optim.lr=1e-3"`.
        sections: Keys that change, by section: `optim={"lr": 1e-3}`, `optim=OptimSection(lr=1e-3)`, `seed=1`.

    Raises:
        RecipeError: With every problem that was found, each with its key.
    """
    tree, origin = _tree_of(source, overrides, sections)
    return validate_recipe(tree, origin, BUILT_IN)


def _tree_of(
    source: Source, overrides: Sequence[str], sections: Mapping[str, Any], *, quiet: bool = False
) -> tuple[dict[str, Any], str | None]:
    """Returns the keys and values that are given, and the file that they come from."""
    origin = None
    if isinstance(source, Recipe):
        tree = source.model_dump(mode="json")
    elif isinstance(source, Mapping):
        tree = write_out(_plain(source))
    elif source:
        origin = recipe_file(str(source))
        tree = read_recipe(origin)
    else:
        tree = {}
    above = write_out(_plain(sections))
    return recipe_layers(tree, overrides, origin, sections=above, quiet=quiet)[-1], origin


def _plain(value: Any) -> Any:
    """Keys and values as YAML has them; of sections, those that were given."""
    return TypeAdapter(Any).dump_python(value, mode="json", exclude_unset=True)


def train(recipe: Source, *overrides: str, quiet: bool = False, **objects: Unpack[Objects]) -> "Run":
    """Trains in this process, as one of a launch if it was started by one, else alone.

    Args:
        recipe: What `load_recipe` takes.
        quiet: Whether to print errors only.

    Returns:
        The run, finished; or stopped, if it was asked to.

    Raises:
        FinetuneError: With what is wrong.
    """
    run = start(recipe, *overrides, quiet=quiet, **objects)
    for _ in run.steps():
        pass
    return Run.open(run.directory)


def start(recipe: Source, *overrides: str, quiet: bool = False, **objects: Unpack[Objects]) -> "Training":
    """As `train`, up to the first step; `steps` of what is returned takes them.

    Raises:
        FinetuneError: With what is wrong.
    """
    from finetune.distributed.backend import Backend
    from finetune.training.build_run import build_run
    from finetune.utils.library_imports import silence_libraries

    silence_libraries()
    signals.outlive_readers()
    with _with_objects(recipe, overrides, objects, quiet=quiet) as (named, _):
        recipe_paths.check_paths(named)
        try:
            return Training(build_run(named, quiet=quiet))
        except BaseException:
            Backend.forget()
            raise


class Training:
    """A run that is under way in this process."""

    def __init__(self, run: "BuiltRun") -> None:
        self._run = run
        self.recipe: Recipe = run.recipe
        self.directory: Path = run.directory.path
        self.num_steps: int = run.length.num_steps
        """Steps of the whole run."""
        self.results: dict[str, Any] = run.results
        """Results so far; `stopped` says why a run ended early."""

    @property
    def model(self) -> "nn.Module":
        """The network that is trained; on a sharded backend, this rank's part of it."""
        from finetune.models.forward_wrapper import unwrap

        return unwrap(self._run.model)

    def stop(self, reason: str = "stopped by its program") -> None:
        """Asks the run to stop, on all ranks: the step that follows is its last, and a checkpoint is saved."""
        self._run.shutdown.reason = self._run.shutdown.reason or reason

    def steps(self) -> Iterator["Step"]:
        """Takes the steps that are left, and yields each; evaluation, checkpoints and saving are part of it.

        Leaving the loop early, by `break` or an exception, is `stop()`. On several ranks, all must loop; it is enough
        that one of them leaves.

        Raises:
            FinetuneError: If the run cannot go on.
        """
        from finetune.training.loop import steps

        taken = steps(self._run)
        try:
            try:
                for step in taken:  # noqa: UP028 - `yield from` would end `taken` where the caller leaves
                    yield step
            except GeneratorExit:
                self.stop()
                for _ in taken:
                    pass
            self._run.backend.close()
        finally:
            # After an error too: another run in this process may take the directory next.
            self._run.checkpoints.join_writer()
            self._run.directory.release()
            self._run.backend.forget()


def launch(
    recipe: Source,
    config: str | Path,
    *overrides: str,
    quiet: bool = False,
    options: Mapping[str, Any] | None = None,
    **objects: Unpack[Objects],
) -> "Run":
    """Trains in processes of their own, as `finetune launch` does, and waits for them.

    A program that calls this must do so behind `if __name__ == "__main__":` if it hands over functions of its own: the
    processes import it to find them.

    Args:
        recipe: What `load_recipe` takes.
        config: A launch file, or the name of one that ships, such as `ddp`.
        options: Of `finetune launch`, such as `{"num_processes": 4}`.

    Returns:
        The run, finished; or stopped, if it was asked to.

    Raises:
        LaunchError: If it failed, with its last words.
        RecipeError: If an object has no name by which the processes can import it.
    """
    with _with_objects(recipe, overrides, objects, quiet=quiet) as (named, names):
        for purpose, name in names.items():
            if name.startswith(HANDED_OVER):
                raise RecipeError(
                    f"{purpose}: this object has no name ({name}) that the processes of a launch could import. Define "
                    "it at the top level of a file, as a function or class, and hand that over; a task as a function "
                    "that returns it. Or run in this process, by `train`."
                )
    with temporary_folder() as folder:
        file = folder / "recipe.yaml"
        write_text(file, dump_recipe(named))
        words = [f"--{name}={value}" for name, value in (options or {}).items()]
        command = [sys.executable, "-m", "finetune", "launch", f"--config_file={launch_file(str(config))}", *words]
        if quiet:
            command.append("--quiet")
        code, message = _run_command([*command, str(file)], quiet=quiet)
    if code not in (0, REQUEUE):
        raise LaunchError(message or f"The run ended with exit code {code}; the reason is printed above.")
    return Run.open(named.output.dir)


def _run_command(command: Sequence[str], *, quiet: bool) -> tuple[int, str]:
    """Runs a command; returns its exit code, and its last paragraph where it is seen here."""
    paths = [path for path in (sys.path[0], os.environ.get("PYTHONPATH")) if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # A notebook shows what is written to `sys.stderr`, and not what a process writes.
    passes_on = quiet or sys.stderr is not sys.__stderr__
    piped: Any = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if passes_on else {}
    lines: list[str] = []
    with signals.held_back():
        process = subprocess.Popen(command, env=env, **piped)
    with process:
        try:
            for line in process.stdout or ():
                lines.append(line)
                if not quiet:
                    sys.stderr.write(line)
            process.wait()
        except KeyboardInterrupt:
            # The terminal has told it already, unless this program alone was told: within 3 s both are one request.
            process.send_signal(signal.SIGINT)
            process.communicate()  # it stops, once it has saved
            raise
    paragraph = "".join(lines).strip().rpartition("\n\n")[2]
    return process.returncode, paragraph.removeprefix("Error: ")


@contextmanager
def _with_objects(
    source: Source, overrides: Sequence[str], objects: Objects, *, quiet: bool
) -> Iterator[tuple[Recipe, dict[str, str]]]:
    """The recipe with the names of what is handed over, which can be imported meanwhile; and these names."""
    refuse_while_importing()
    unknown = sorted(objects.keys() - Objects.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown: {', '.join(unknown)}; allowed: {', '.join(Objects.__annotations__)}")
    tree, _ = _tree_of(source, overrides, {}, quiet=quiet)
    given: dict[str, Any] = {purpose: thing for purpose, thing in objects.items() if thing is not None}
    own = {f"metrics.{n}:{getattr(m, '__name__', type(m).__name__)}": m for n, m in enumerate(given.get("metrics", ()))}
    cache = Path((tree.get("data") or {}).get("cache_dir") or DataSection().cache_dir)
    with handed_over({purpose: given[purpose] for purpose in _NAMED if purpose in given} | own) as names:
        values: dict[str, Any] = {key: names[purpose] for purpose, key in _NAMED.items() if purpose in given}
        if own:
            listed = (tree.get("eval") or {}).get("metrics") or []
            values["eval.metrics"] = list(dict.fromkeys([*listed, *map(names.__getitem__, own)]))
        for purpose, key in _WRITTEN.items():
            if purpose in given:
                values[key] = [{"path": str(_write_records(given[purpose], cache))}]
        more = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        tree, origin = _tree_of(source, [*overrides, *more], {}, quiet=quiet)
        yield validate_recipe(tree, origin, BUILT_IN), names


def _write_records(given: Records | Callable[[], Records], cache: Path) -> Path:
    """Returns a file in the cache with these documents, named by what it holds."""
    folder = cache / "records"
    folder.mkdir(parents=True, exist_ok=True)
    content = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        temporary = Path(unfinished, "records")
        with temporary.open("wb") as file:
            for number, record in enumerate(given() if callable(given) else given, start=1):
                what = f"Record {number} of what was handed over cannot be written as JSON"
                with DataError.explaining(
                    what, "Give a text, or a mapping of texts, numbers and lists.", TypeError, ValueError
                ):
                    text = json.dumps({"text": record} if isinstance(record, str) else dict(record), ensure_ascii=False)
                line = text.encode() + b"\n"
                content.update(line)
                file.write(line)
        return temporary.replace(folder / f"{content.hexdigest()[:32]}.jsonl")


@dataclass(frozen=True, repr=False)
class Run:
    """A run as its directory shows it, finished or under way."""

    history: RunHistory
    """All of it, as `finetune report` reads it."""
    directory: Path
    status: Status
    """`running`, `finished`, `stopped`, `diverged` or `lost`."""
    results: dict[str, Any]
    """The final figures; empty until the run ends."""
    metrics: dict[str, Series]
    """Figures of training: an array a key of `metrics.jsonl` (`step`, `loss`, `lr`, …), a value a logged step."""
    evaluations: dict[str, Series]
    """An array a key (`step`, `validation_loss`, …), a value an evaluation."""
    samples: tuple[Sample, ...]
    checkpoints: tuple[SavedCheckpoint, ...]
    """Those that are there, in the order of steps."""

    def __repr__(self) -> str:
        best = self.history.best_evaluation
        figure = f", {self.history.best_name} {best[1]:.4g} at step {best[0]}" if best is not None else ""
        return f"Run('{self.directory}', {self.status} at step {self.history.step}{figure})"

    @classmethod
    def open(cls, directory: str | Path) -> "Run":
        """The run in a directory, as it is now.

        Raises:
            RecipeError: If there is none.
            CheckpointError: If it cannot be read.
        """
        history = read_run(Path(directory))
        figures = (dict(history.facts.get("results", {})), history.training, history.evaluations)
        return cls(history, history.directory, history.status, *figures, history.samples, history.checkpoints)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that ran, defaults included."""
        return load_recipe(self.directory / "recipe.yaml")

    @property
    def exports(self) -> tuple[Path, ...]:
        """The folders that `finetune export` has written into the run's directory."""
        folder = self.directory / "exports"
        return tuple(sorted(path for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()

    def load_model(self, *, step: int | None = None, trust_remote_code: bool = False) -> "LoadedModel":
        """The trained model and its tokenizer, for inference; of a checkpoint, if `step` is given.

        Args:
            trust_remote_code: Whether Python code that ships with the model may run, though this user did not start the
                run on this machine.

        Raises:
            FinetuneError: If there is none, or the run trained no causal language model.
        """
        from finetune.export.load_model import load_model

        return load_model(str(self.directory), step=step, trust_remote_code=trust_remote_code)
