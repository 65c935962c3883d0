"""A run's history, read from its directory: metrics over restarts, starts, checkpoints, samples, incidents, status.

Everything that looks back at a run, finished or under way, reads it here. No torch: this starts at once.
"""

import re
import socket
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import psutil

from finetune.checkpoint.best_evaluation import BestEvaluation
from finetune.checkpoint.checkpoint_store import open_store, step_of
from finetune.checkpoint.run_facts import (
    FIGURE_NAME,
    INCIDENTS,
    MACHINES,
    METRICS,
    RUN,
    STEP_NUMBERS,
    Incident,
    read_facts,
    read_incidents,
)
from finetune.config.recipe_schema import ranking
from finetune.utils import json_files, yaml_files
from finetune.utils.errors import CheckpointError

Status = Literal["running", "finished", "stopped", "diverged", "lost"]
Series = npt.NDArray[np.float64]

STATUSES: dict[Status, str] = {
    "running": "its process is at work",
    "finished": "it came to its last step",
    "stopped": "it was asked to stop, and saved a checkpoint",
    "diverged": "too many steps in a row were not finite",
    "lost": "its process is gone, and did not say why: killed, crashed, or its machine went down",
}
"""Meanings of statuses."""

_PHASES = ("data_s", "forward_backward_s", "optimizer_s")
TRAINING = ("step", "epoch", *STEP_NUMBERS, *_PHASES, "peak_memory_gib", "mfu", "skipped_steps", "overflows")
EVALUATION = ("step", "validation_loss", "validation_perplexity", "validation_accuracy", "validation_targets", "time")
"""Keys of an evaluation; those of metrics, which begin with `validation_` too, follow where there are some."""

SAMPLED = (
    *("time", "cpu_percent", "memory_used_gib", "memory_total_gib", "processes_gib", "received_mib_s", "sent_mib_s"),
    *("disk_read_mib_s", "disk_written_mib_s", "disk_free_gib"),
)
"""Keys of a sample of a machine."""
# Of the GPUs of a machine, the one that is worst off; power is that of all.
_OF_GPUS: dict[str, Callable[[list[float]], float]] = {
    "percent": min,
    "memory_used_gib": max,
    "temperature_c": max,
    "power_w": sum,
    "sm_clock_mhz": min,
}
SAMPLED_GPUS = tuple(f"gpu_{key}" for key in _OF_GPUS)
"""Keys of a sample of a machine's GPUs."""

# What may stand in names of files and on a page.
_METRIC = re.compile(f"validation_{FIGURE_NAME.pattern}")

# A run on another machine counts as running while it has written something within this time, or within so many
# times what it takes between two lines.
_QUIET_S = 600.0
_QUIET_LINES = 5

# A clock that was set meanwhile, and the second that `starts` is rounded to.
_CLOCK_S = 5.0


@dataclass(frozen=True)
class Sample:
    """A text that the model wrote in training."""

    step: int
    text: str


@dataclass(frozen=True)
class Start:
    """A start of the run: its first one, or a restart."""

    time: float
    """Seconds since 1970."""
    end: float | None
    """When it ended, as far as is known: for one that was killed, when it last wrote. None while it runs."""
    host: str
    pid: int
    processes: int
    from_step: int
    to_step: int
    """The last step that is known of it."""
    resumed_from: str | None

    def seconds(self, now: float) -> float:
        """Returns how long it has held its processes."""
        return max(0.0, (now if self.end is None else self.end) - self.time)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is there."""

    step: int
    time: float
    """When it was written; seconds since 1970."""
    path: Path


@dataclass(frozen=True)
class MachineHistory:
    """Samples of a machine, as `machines.jsonl` has them."""

    number: int
    host: str
    samples: dict[str, Series]
    """The keys of `SAMPLED` and `SAMPLED_GPUS`, a value a sample; NaN where there is none. `gpu_power_w` is that of all
    its GPUs, others are of the one that is worst off: least busy, slowest, hottest, fullest."""
    throttled: dict[str, int]
    """Samples in which a GPU's clock was held back, by reason."""

    @property
    def name(self) -> str:
        """Number and host."""
        return f"{self.number} {self.host}"

    @property
    def has_gpus(self) -> bool:
        """True if the driver told something of its GPUs."""
        return any(np.isfinite(self.samples[key]).any() for key in SAMPLED_GPUS)


@dataclass(frozen=True)
class RunHistory:
    """Contents of a run's directory."""

    directory: Path
    facts: dict[str, Any]
    """`run.json`."""
    recipe: dict[str, Any]
    """`recipe.yaml`, as it ran; empty if it is missing."""
    training: dict[str, Series]
    """The keys of `TRAINING`, and those of terms and recorded figures, a value a logged step; NaN where there is
    none."""
    evaluations: dict[str, Series]
    """The keys of `EVALUATION` and those of metrics, a value an evaluation; NaN where there is none."""
    samples: tuple[Sample, ...]
    incidents: tuple[Incident, ...]
    starts: tuple[Start, ...]
    checkpoints: tuple[SavedCheckpoint, ...]
    """Checkpoints in the order of steps."""
    machines: tuple[MachineHistory, ...]
    """Machines in the order of their numbers; none where `log.system_every_s` took no sample."""
    status: Status
    damaged_lines: int
    """Lines of `metrics.jsonl`, `incidents.jsonl` and `machines.jsonl` that cannot be read, but for a last one that is
    being written."""
    read_at: float

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.resolve().name

    @property
    def step(self) -> int:
        """The last step that is known."""
        known = [int(self.training["step"][-1])] if len(self.training["step"]) else [0]
        known += [start.from_step for start in self.starts[-1:]] + [saved.step for saved in self.checkpoints[-1:]]
        return max(known)

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run."""
        steps: int | None = self.facts.get("length", {}).get("num_steps")
        return steps

    @property
    def metrics(self) -> tuple[str, ...]:
        """The keys of `evaluations` that have a value, beyond loss, perplexity and what counts."""
        return tuple(
            key
            for key, values in self.evaluations.items()
            if (key not in EVALUATION or key == "validation_accuracy") and np.isfinite(values).any()
        )

    @property
    def ended_early(self) -> dict[str, Any] | None:
        """Step and best evaluation of a run that `eval.patience` ended, as `run.json` has them."""
        early_stop: dict[str, Any] | None = self.facts.get("results", {}).get("ended_early")
        return early_stop if self.status == "finished" else None

    @property
    def best_by(self) -> str:
        """Key that tells the best evaluation: `checkpoint.keep_best_by`, or the loss where no evaluation has that."""
        named = (self.recipe.get("checkpoint") or {}).get("keep_best_by")
        return named if isinstance(named, str) and ranking(named)[0] in self.evaluations else "validation_loss"

    @property
    def best_name(self) -> str:
        """The key of the best evaluation, in words."""
        return ranking(self.best_by)[0].replace("_", " ")

    @property
    def best_evaluation(self) -> tuple[int, float] | None:
        """Step and value of the best evaluation."""
        return self.best(self.best_by)

    def best(self, best_by: str) -> tuple[int, float] | None:
        """Step and value of the evaluation that is best by a key; None if no evaluation has it."""
        best = BestEvaluation(best_by)
        keys = {ranking(best_by)[0], "validation_loss"} & self.evaluations.keys()
        for n, step in enumerate(self.evaluations["step"].tolist()):
            best.note(int(step), {key: float(self.evaluations[key][n]) for key in keys})
        return (best.step, best.value) if best.step is not None and best.value is not None else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second over all logged steps but the first of each start, which pays for what comes once."""
        seconds, tokens = self._between(self.training["tokens"])
        return tokens / seconds if seconds > 0 else None

    def _between(self, counts: Series) -> tuple[float, float]:
        """Seconds in training, and what was counted meanwhile, but for first steps."""
        steps = self.training["step"]
        if len(steps) < 2:
            return 0.0, 0.0
        taken = np.diff(steps)
        seconds = taken * self.training["step_s"][1:]
        first = np.isin(steps[1:], [start.from_step + 1 for start in self.starts])
        kept = np.isfinite(seconds) & np.isfinite(np.diff(counts)) & ~first
        return float(seconds[kept].sum()), float(np.diff(counts)[kept].sum())

    @property
    def seconds_left(self) -> float | None:
        """Seconds of training, at its mean speed; None if that is not known."""
        seconds, steps = self._between(self.training["step"])
        if steps <= 0 or self.num_steps is None:
            return None
        return max(0, self.num_steps - self.step) * seconds / steps

    @property
    def training_seconds(self) -> Series:
        """Seconds in training up to each logged step; evaluations, samples and lost steps are not counted."""
        steps = self.training["step"]
        taken = np.diff(steps, prepend=0.0)
        return np.cumsum(np.nan_to_num(taken * self.training["step_s"]))

    @property
    def duration(self) -> float:
        """Seconds from start to end, of all starts together, pauses left out."""
        return sum(start.seconds(self.read_at) for start in self.starts)

    @property
    def process_hours(self) -> float:
        """Hours x processes that all starts have held."""
        return sum(start.processes * start.seconds(self.read_at) for start in self.starts) / 3600

    @property
    def launch(self) -> str:
        """Kind of launch and number of processes: `ddp x 8`."""
        launch, runs = self.facts.get("launch", {}), self.facts.get("runs", {})
        kind = runs.get("kind") or launch.get("kind") or "?"
        world = runs.get("world_size") or launch.get("num_processes")
        return f"{kind} x {world}" if world and world != 1 else str(kind)


class RunReader:
    """Reads a run again and again while it goes; each time only what is new of its metrics."""

    def __init__(self, directory: Path, *, only_outcome: bool = False) -> None:
        """With `only_outcome`, reads evaluations, the training line before each, and the newest one: fast for all."""
        self._directory, self._only_outcome = directory, only_outcome
        self._metrics_file, self._machines_file = _GrowingFile(directory / METRICS), _GrowingFile(directory / MACHINES)
        # By number: the host, its samples, and how many of them are throttled, by reason.
        self._machines: dict[int, tuple[str, _Columns, Counter[str]]] = {}

    def read(self) -> RunHistory:
        """Returns the run as it is now.

        Raises:
            RecipeError: If there is none.
            CheckpointError: If it cannot be read.
        """
        directory, now = self._directory, time.time()
        facts = read_facts(directory)
        with CheckpointError.explaining(f"{directory}: its metrics cannot be read", "", OSError):
            self._metrics_file.read(self._begin_metrics, self._add_metrics, only_outcome=self._only_outcome)
            if not self._only_outcome:
                self._machines_file.read(self._machines.clear, self._add_sample)
            journal = read_incidents(directory)
        incidents: list[Incident] = []
        for line in journal.whole:
            _drop_from(incidents, line["step"])
            incidents.append(Incident.from_line(line))
        training = self._training.arrays()
        written: list[float] = []
        checkpoints: list[SavedCheckpoint] = []
        recipe: Any = None
        for name in (METRICS, MACHINES, "ledger.jsonl", INCIDENTS, RUN, "checkpoints"):
            with suppress(OSError):
                written.append((directory / name).stat().st_mtime)
        store = open_store(directory)
        for name in reversed(store.list_names()):
            with suppress(OSError):  # without a manifest it is none
                at = store.written_at(name)
                checkpoints.append(SavedCheckpoint(step_of(name) or 0, at, Path(store.address(name))))
        with suppress(OSError, ValueError):
            recipe = yaml_files.parse((directory / "recipe.yaml").read_text(encoding="utf-8"))
        last_written = max(written, default=0.0)
        status = _status(facts, incidents, training["time"], now - last_written)
        return RunHistory(
            directory=directory,
            facts=facts,
            recipe=recipe if isinstance(recipe, dict) else {},
            training=training,
            evaluations=self._evaluations.arrays(),
            samples=tuple(self._samples),
            incidents=tuple(incidents),
            starts=_starts(facts, training, status, last_written),
            checkpoints=tuple(checkpoints),
            machines=tuple(
                MachineHistory(number, host, columns.arrays(), dict(throttled))
                for number, (host, columns, throttled) in sorted(self._machines.items())
            ),
            status=status,
            damaged_lines=self._metrics_file.damaged + self._machines_file.damaged + len(journal.damaged),
            read_at=now,
        )

    def _begin_metrics(self) -> None:
        """Forgets all lines: a restart replaces the file by one without the steps that are taken again."""
        self._training, self._evaluations = _Columns(TRAINING), _Columns(EVALUATION)
        self._samples: list[Sample] = []

    def _add_metrics(self, line: dict[str, Any]) -> None:
        """Takes in a line. Where a restart logs steps again, the later lines count."""
        step = line["step"]
        if type(step) is not int:
            raise ValueError
        if "grad_norm" in line:
            self._training.drop_from(step)
            self._evaluations.drop_from(step)
            _drop_from(self._samples, step)
            # Terms of the loss, and figures that were recorded.
            self._training.add(line, [key for key in line if key not in TRAINING and FIGURE_NAME.fullmatch(key)])
        elif keys := [key for key in line if _METRIC.fullmatch(key)]:
            self._evaluations.drop_from(step)
            self._evaluations.add(line, keys)
        elif "sample" in line:
            _drop_from(self._samples, step)
            self._samples.append(Sample(step, str(line["sample"])))

    def _add_sample(self, line: dict[str, Any]) -> None:
        number, host, gpus = line["machine"], str(line["host"]), line.get("gpus", [])
        if type(number) is not int:
            raise ValueError
        known = {key: [float(gpu[key]) for gpu in gpus if key in gpu] for key in _OF_GPUS}
        worst = {f"gpu_{key}": choose(known[key]) for key, choose in _OF_GPUS.items() if known[key]}
        reasons = {str(reason) for gpu in gpus for reason in gpu.get("throttled", [])}
        _, columns, throttled = self._machines.get(number, ("", _Columns((*SAMPLED, *SAMPLED_GPUS)), Counter[str]()))
        columns.add({"time": line["time"], **line, **worst})
        throttled.update(reasons)
        self._machines[number] = host, columns, throttled


class _GrowingFile:
    """A file of lines that grows, or is replaced, while it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Device and number of the file, and how much of it is read: of no file yet.
        self._file: tuple[int, int] | None = (0, 0)
        self._offset = self.damaged = 0

    def read(
        self, begin: Callable[[], None], add: Callable[[dict[str, Any]], None], *, only_outcome: bool = False
    ) -> None:
        """Takes in the whole lines since the last time, or all of them if the file is another one.

        Args:
            begin: Called before the first line of a file.
            add: Takes in a line; what it raises makes the line a damaged one.
            only_outcome: Take in what `_outcome` leaves.
        """
        identity, size = None, 0
        with suppress(FileNotFoundError):
            facts = self._path.stat()
            identity, size = (facts.st_dev, facts.st_ino), facts.st_size
        if identity != self._file or size < self._offset:
            self._file, self._offset, self.damaged = identity, 0, 0
            begin()
        if identity is None:
            return
        with self._path.open("rb") as handle:
            handle.seek(self._offset)
            # A line that is being written is left for the next time.
            content, end, _ = handle.read().rpartition(b"\n")
        self._offset += len(content) + len(end)
        lines = content.split(b"\n") if end else []
        for line in _outcome(lines) if only_outcome else lines:
            try:
                add(json_files.parse(line))
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
                self.damaged += 1


def read_run(directory: Path, *, only_outcome: bool = False) -> RunHistory:
    """Returns a run as its directory has it now; see `RunReader`."""
    return RunReader(directory, only_outcome=only_outcome).read()


def loss_curves(run: RunHistory) -> list[tuple[str, Series, Series]]:
    """Returns names, steps and values of the training and the validation losses that are numbers."""
    curves = (("training loss", run.training, "loss"), ("validation loss", run.evaluations, "validation_loss"))
    known = [(name, series, series[key], np.isfinite(series[key])) for name, series, key in curves]
    return [(name, series["step"][finite], losses[finite]) for name, series, losses, finite in known]


def _outcome(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields evaluations, and the newest training line before each of them and at the end."""
    newest: list[bytes] = []
    for line in lines:
        if b'"validation_' in line:
            yield from (*newest, line)
            newest = []
        elif not (line.startswith(b"{") and line.endswith(b"}")):
            yield line  # damaged, and counted as that
        elif b'"grad_norm"' in line:
            newest = [line]
    yield from newest


class _Columns(dict[str, "array[float]"]):
    def __init__(self, keys: Iterable[str]) -> None:
        super().__init__((key, array("d")) for key in keys)

    def add(self, line: dict[str, Any], more: Iterable[str] = ()) -> None:
        """Adds a line's values; of `more` keys too, which are columns from now on."""
        # All of them first: a line that is damaged must leave no column longer than another.
        values = {key: float("nan") if line.get(key) is None else float(line[key]) for key in {*self, *more}}
        for key in more:
            self.setdefault(key, array("d", [float("nan")] * len(self["step"])))
        for key, column in self.items():
            column.append(values[key])

    def drop_from(self, step: int) -> None:
        """Takes back what was logged of this step and of later ones."""
        steps = self["step"]
        while steps and steps[-1] >= step:
            for column in self.values():
                column.pop()

    def arrays(self) -> dict[str, Series]:
        return {key: np.array(column, dtype=np.float64) for key, column in self.items()}


def _drop_from(found: list[Sample] | list[Incident], step: int) -> None:
    while found and found[-1].step >= step:
        found.pop()


def _status(facts: dict[str, Any], incidents: list[Incident], times: Series, quiet_s: float) -> Status:
    if "finished" in facts:
        return "finished"
    if "stopped" in facts:
        return "stopped"
    if incidents and incidents[-1].fatal:
        return "diverged"
    start = facts["starts"][-1] if facts["starts"] else {}
    if start.get("host") == socket.gethostname():
        return "running" if _is_alive(start) else "lost"
    newest = times[np.isfinite(times)][-20:]
    between = float(np.median(np.diff(newest))) if len(newest) > 1 else 0.0
    return "running" if quiet_s <= max(_QUIET_S, _QUIET_LINES * between) else "lost"


def _is_alive(start: dict[str, Any]) -> bool:
    """Returns whether the process of a start on this machine is at work, and its number not another one's by now."""
    begun = _seconds(start.get("time"))
    try:
        process = psutil.Process(int(start["pid"]))
        came_later = begun is not None and process.create_time() > begun + _CLOCK_S
        return process.status() != psutil.STATUS_ZOMBIE and not came_later
    except (psutil.Error, LookupError, TypeError, ValueError):
        return False


def _starts(
    facts: dict[str, Any], training: dict[str, Series], status: Status, last_written: float
) -> tuple[Start, ...]:
    records: list[dict[str, Any]] = facts["starts"]
    steps, times = training["step"], training["time"]
    starts = []
    for start, following in zip(records, [*records[1:], None], strict=True):
        begun, from_step = _seconds(start.get("time")) or 0.0, int(start.get("from_step", 0))
        if following is None:
            logged, ended = _latest(times), _seconds(facts.get("finished", facts.get("stopped")))
            # Whole seconds, and so before the last line that was written in the same.
            end = max(ended, logged or ended) if ended else logged or last_written
            to_step = int(steps[-1]) if len(steps) else 0
        else:
            # One that was killed has said nothing after its last line.
            until = _seconds(following.get("time")) or np.inf
            end = start.get("last_logged") or _latest(times[(times >= begun) & (times <= until)]) or begun
            end = max(end, _seconds(start.get("ended")) or end)
            # Its last step need not be one that is logged.
            to_step = max(start.get("to_step") or 0, following.get("from_step", 0))
        starts.append(
            Start(
                time=begun,
                end=None if following is None and status == "running" else max(begun, float(end)),
                host=str(start.get("host", "?")),
                pid=int(start.get("pid", 0)),
                processes=int(start.get("processes", 1)),
                from_step=from_step,
                to_step=max(from_step, to_step),
                resumed_from=start.get("resumed_from"),
            )
        )
    return tuple(starts)


def _latest(times: Series) -> float | None:
    known = times[np.isfinite(times)]
    return float(known.max()) if len(known) else None


def _seconds(text: Any) -> float | None:
    """Returns the seconds since 1970 of a local time with its offset, as `run.json` has them."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (TypeError, ValueError):
        return None
