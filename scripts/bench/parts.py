"""What cannot be held at a step's boundary: whole processes, one after the other, A B C A B C.

`raw text` is an epoch from text to the last step; `start` is from the command, a launcher's, to the end of the first
step, with tokenised data ready.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import material
from bench.cases import Case
from bench.turns import ROOT, ArmError, environment, free_port, last_words

LIMIT_S = 900.0


@dataclass(frozen=True)
class Parts:
    """A row whose arms are whole processes."""

    name: str
    shape: str
    kind: str
    """`raw` or `start`."""
    arms: tuple[str, ...]
    stories: int
    precision: str = "fp32"
    length: int = 1024
    packed_rows: int = 2
    """Rows a step of the arms that pack."""
    padded_rows: int = 8
    threads: int = 1
    launch: str = "single"
    """The launch file of both launchers, where `kind` is `start`."""


@dataclass
class PartsMeasured:
    """What the arms of such a row took: of each arm, of each figure, a number a round."""

    parts: Parts
    rounds: int
    load: tuple[float, float] = (0.0, 0.0)
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def parts() -> list[Parts]:
    """All of them."""
    packed = ("ours", "trainer", "trl-best")
    return [
        Parts("raw TinyStories, 1M fp32", "1M", "raw", packed, stories=320),
        Parts("raw TinyStories, 15M fp32", "15M", "raw", packed, stories=64),
        Parts("raw TinyStories, 15M bf16", "15M", "raw", packed, stories=96, precision="bf16"),
        Parts("start, 15M fp32", "15M", "start", ("ours", "trainer"), stories=200, length=256),
        Parts("start, 15M fp32, 2 x fsdp", "15M", "start", ("ours", "trainer"), stories=200, length=256, launch="fsdp"),
    ]


def tiny() -> list[Parts]:
    """What the tests run."""
    return [
        Parts("tiny raw", "tiny", "raw", ("ours", "trainer"), stories=24, length=256, padded_rows=4),
        Parts("tiny start", "tiny", "start", ("ours", "trainer"), stories=24, length=128, launch="fsdp"),
    ]


def measure(parts: Parts, rounds: int, folder: Path, file: Path | None, say: Callable[[str], None]) -> PartsMeasured:
    """Runs the arms of such a row, each in a new process and a new folder every time."""
    found = PartsMeasured(parts, rounds, figures={arm: {} for arm in parts.arms})
    model = material.model_folder(folder, Case(parts.name, parts.shape, parts.arms), file)
    stories = folder / f"stories-{parts.stories}.jsonl"
    stories.write_text("".join(json.dumps({"text": text}) + "\n" for text in material.texts(file, parts.stories)))
    tokens = material.tokens_folder(folder, model, stories, parts.length) if parts.kind == "start" else folder
    before = os.getloadavg()[0]
    # The first round of starts prepares the data of `ours`, warms the file cache and is dropped.
    for number, arm in itertools.product(range(rounds + (parts.kind == "start")), parts.arms):
        if arm in found.problems:
            continue
        say(f"{parts.name}: round {number + 1}, {arm}")
        place = Path(tempfile.mkdtemp(prefix=f"{parts.kind}-{arm}-", dir=folder))
        spec = {
            "arm": arm,
            "model": str(model),
            "stories": str(stories),
            "folder": str(place),
            "tokens": str(tokens),
            "length": parts.length,
            "precision": parts.precision,
            "packed_rows": parts.packed_rows,
            "padded_rows": parts.padded_rows,
            "mark": str(place / "run" / "metrics.jsonl" if arm == "ours" else place / "mark"),
        }
        (place / "spec.json").write_text(json.dumps(spec))
        try:
            figures = (_raw if parts.kind == "raw" else _start)(parts, spec, place)
        except ArmError as error:
            found.problems[arm] = str(error)
            continue
        if parts.kind == "start" and number == 0:
            continue
        for name, value in figures.items():
            found.figures[arm].setdefault(name, []).append(value)
    found.load = (before, os.getloadavg()[0])
    return found


def _raw(parts: Parts, spec: dict[str, Any], place: Path) -> dict[str, float]:
    """Lets an arm tokenise, pack and train."""
    log = place / "log"
    words = [sys.executable, str(ROOT / "scripts" / "bench" / "arms" / "raw.py"), str(place / "spec.json")]
    with log.open("wb") as errors:
        env = _environment(parts, spec, place)
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=errors, env=env, timeout=LIMIT_S, check=False)
    lines = done.stdout.decode().strip().splitlines()
    if done.returncode or not lines:
        raise ArmError(last_words(log))
    figures: dict[str, float] = json.loads(lines[-1])
    return figures | {"useful_per_s": figures["useful"] / figures["total_s"]}


def _start(parts: Parts, spec: dict[str, Any], place: Path) -> dict[str, float]:
    """Waits until an arm has taken its first step, and ends it."""
    config = str(ROOT / "accelerate_configs" / f"{parts.launch}.yaml")
    if spec["arm"] == "ours":
        words = ["-m", "finetune", "launch", "--config_file", config, str(_recipe(parts, spec, place))]
    else:
        script = ROOT / "scripts" / "bench" / "arms" / "first_step.py"
        words = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config]
        words += ["--main_process_port", str(free_port()), str(script), str(place / "spec.json")]
    log, mark = place / "log", Path(spec["mark"])
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=output, stderr=output, env=_environment(parts, spec, place), cwd=ROOT
        )
    try:
        while not (mark.exists() and mark.read_text()):
            if process.poll() is not None or time.perf_counter() - began > LIMIT_S:
                raise ArmError(last_words(log))
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        first = psutil.Process(process.pid)
        tree = [first, *first.children(recursive=True)]
        # Of those that have ended by now their parent has the times.
        return {"start_s": seconds, "cpu_s": sum(sum(one.cpu_times()[:4]) for one in tree)}
    finally:
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for one in tree:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def _recipe(parts: Parts, spec: dict[str, Any], place: Path) -> Path:
    """The recipe that a user would write for what `first_step.py` does; JSON is YAML too."""
    path = place / "recipe.yaml"
    tree = {
        "model": {"name": spec["model"]},
        "data": {
            "train": [{"path": spec["stories"]}],
            "sequence_length": parts.length,
            "packing": "padded",
            "cache_dir": spec["tokens"] + "-ours",
        },
        "batch": {"global_size": 4, "micro_size": 4 // (2 if parts.launch == "fsdp" else 1)},
        "length": {"steps": 100},
        "optim": {"lr": 1e-3},
        "precision": parts.precision,
        "output": {"dir": spec["folder"] + "/run"},
    }
    path.write_text(json.dumps(tree))
    return path


def _environment(parts: Parts, spec: dict[str, Any], place: Path) -> dict[str, str]:
    """Nothing is found in a cache that an earlier part has filled."""
    env = environment(spec["arm"], parts.threads)
    del env["TOKENIZERS_PARALLELISM"]  # here tokenising is part of what is measured
    return env | {"HF_HOME": str(place / "hf"), "HF_DATASETS_OFFLINE": "1"}
