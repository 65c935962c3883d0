"""Writes what `metrics.jsonl` and `machines.jsonl` have for TensorBoard, Trackio and Weights & Biases, below the run
directory."""

import html
import json
import math
import os
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from finetune.utils import json_files
from finetune.utils.atomic_files import read_whole_lines, remove_path, write_text

_PROJECT = "finetune"


# Each tracker has `add`, which writes lines of `metrics.jsonl` (numbers as scalars, samples as text, at their step and
# time), and `close`, which writes what waits, and ends.


class _TensorBoard:
    """Event files."""

    def __init__(self, folder: Path, name: str, run_id: str, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Step 0 is purged: a TensorBoard that has read files of an earlier start forgets them.
        self._writer: Any = SummaryWriter(str(folder), purge_step=0)
        for key, value in config.items():
            text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
            self._writer.add_text(key, "".join(f"    {line}\n" for line in text.splitlines()), 0)

    def add(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            for key, value in _numbers(line).items():
                self._writer.add_scalar(key, value, line["step"], walltime=line["time"])
            for key, text in _texts(line).items():
                self._writer.add_text(key, text, line["step"], walltime=line["time"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    """A SQLite file, written as lines come. `trackio.init` would ask the hub for the user's name, and write later."""

    def __init__(self, folder: Path, name: str, run_id: str, config: dict[str, Any]) -> None:
        from trackio import sqlite_storage

        if "TRACKIO_DIR" not in os.environ:
            sqlite_storage.TRACKIO_DIR = folder
        self._storage = sqlite_storage.SQLiteStorage
        self._run = {"project": _PROJECT, "run": name, "run_id": run_id}
        self._config: dict[str, Any] | None = {**config, "_Created": datetime.now(UTC).isoformat()}
        self._storage.delete_run(**self._run)

    def add(self, lines: list[dict[str, Any]]) -> None:
        self._storage.bulk_log(
            metrics_list=[_numbers(line) | _texts(line) for line in lines],
            steps=[line["step"] for line in lines],
            timestamps=[datetime.fromtimestamp(line["time"], UTC).isoformat() for line in lines],
            config=self._config,
            **self._run,
        )
        self._config = None

    def close(self) -> None:
        """Every line is on the disk."""


class _Wandb:
    """An offline run for `wandb sync`, or with WANDB_MODE=online one on the server."""

    def __init__(self, folder: Path, name: str, run_id: str, config: dict[str, Any]) -> None:
        for kind in ("CACHE", "CONFIG", "DATA"):  # which are in the home directory otherwise
            os.environ.setdefault(f"WANDB_{kind}_DIR", str(folder / kind.lower()))
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        # A page of a sample that is opened by itself would load a style sheet.
        self._html: Any = partial(wandb.Html, inject=False)
        # The machine, the command line, installed packages and what is printed are left out.
        options = dict.fromkeys(("disable_code", "disable_git", "disable_job_creation", "silent"), True)
        options |= dict.fromkeys(("x_disable_machine_info", "x_disable_meta", "x_disable_stats"), True)
        options |= dict.fromkeys(("save_code", "x_save_requirements"), False)
        settings = wandb.Settings(console="off", **options)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=name,
            id=run_id,
            dir=str(folder),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=config,
            settings=settings,
        )
        self._known = self._run.starting_step if mode == "online" else 0

    def add(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["step"] >= self._known:  # the server has the earlier ones
                texts = {key: self._html(f"<pre>{html.escape(text)}</pre>") for key, text in _texts(line).items()}
                self._run.log({**_numbers(line), **texts, "_timestamp": line["time"]}, step=line["step"])

    def close(self) -> None:
        self._run.finish()


_Tracker = _TensorBoard | _Trackio | _Wandb
_KINDS: dict[str, type[_Tracker]] = {"tensorboard": _TensorBoard, "trackio": _Trackio, "wandb": _Wandb}


class Trackers:
    """The trackers of a run, on rank 0.

    Each start writes them anew, from the lines of `metrics.jsonl` that still hold: steps that are taken again come
    once, and what a killed process had not yet written is there.
    """

    def __init__(self, names: tuple[str, ...], directory: Path, config: dict[str, Any]) -> None:
        """`config` has `recipe` and `launch` of the run, as plain values."""
        self._names, self._directory, self._open = names, directory, dict[str, _Tracker]()
        self._config: dict[str, Any] = json.loads(json.dumps(config, default=str))

    def open(self) -> list[str]:
        """Begins with the lines that there are; returns what failed, to be said."""
        folder, metrics = self._directory / "trackers", self._directory / "metrics.jsonl"
        machines = self._directory / "machines.jsonl"
        file = folder / "run_id"

        def begin(name: str) -> None:
            if not file.exists():
                folder.mkdir(exist_ok=True)
                write_text(file, uuid.uuid4().hex[:12])
            remove_path(folder / name)
            run_id = file.read_text(encoding="utf-8")
            self._open[name] = _KINDS[name](folder / name, self._directory.resolve().name, run_id, self._config)
            if metrics.exists() and (lines := read_whole_lines(metrics).whole):
                samples = read_whole_lines(machines, _is_sample).whole if machines.exists() else []
                self._open[name].add(list(_add_samples(lines, samples)))

        return self._each(self._names, begin)

    def add(self, line: dict[str, Any]) -> list[str]:
        """Writes a line with its `step` and `time`; returns what failed, to be said."""
        return self._each(tuple(self._open), lambda name: self._open[name].add([line]))

    def close(self) -> list[str]:
        """Writes what waits, and ends; returns what failed, to be said."""
        return self._each(tuple(self._open), lambda name: self._open.pop(name).close())

    def _each(self, names: tuple[str, ...], act: Callable[[str], None]) -> list[str]:
        problems = []
        for name in names:
            try:
                act(name)
            except Exception as error:  # whatever a library raises: training does not depend on it
                self._open.pop(name, None)
                problems.append(
                    f"log.trackers: {name} failed and is left out from here on: {' '.join(str(error).split())[:300]}. "
                    "metrics.jsonl goes on, and the next start of this run writes all of it again."
                )
        return problems


def add_samples(line: dict[str, Any], samples: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns a line of metrics with the figures of machines, of which the later ones count.

    They are called `machine/0/cpu_percent`, those of the machine's second GPU `machine/0/gpu/1/power_w`.
    """
    for sample in samples:
        gpus = {f"gpu/{number}/": gpu for number, gpu in enumerate(sample.get("gpus", ()))}
        for prefix, data in {"": sample, **gpus}.items():
            line = line | {f"machine/{sample['machine']}/{prefix}{key}": value for key, value in _numbers(data).items()}
    return line


def _add_samples(lines: list[dict[str, Any]], samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields lines of metrics, each with the samples since the line before it."""
    samples = sorted(samples, key=lambda sample: sample["time"])
    for line in lines:
        count = bisect_right(samples, line.get("time") or 0.0, key=lambda sample: sample["time"])
        yield add_samples(line, samples[:count])
        samples = samples[count:]


def _is_sample(line: dict[str, Any]) -> bool:
    return json_files.shape_mismatch(line, {"machine": int, "time": float, "gpus": [dict]}, ("machine", "time")) is None


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and math.isfinite(value)}
    return {key: value for key, value in numbers.items() if key not in ("step", "time", "machine")}


def _texts(line: dict[str, Any]) -> dict[str, str]:
    return {key: value for key, value in line.items() if isinstance(value, str)}
