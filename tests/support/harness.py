"""Launches runs for tests as a user would, and shares each between all tests that look at it."""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
# Seconds after which a wait has failed, also on a machine that has twice as much else to do: a hung collective must not
# hang the suite.
WAIT_S = 60.0
"""For what a process that runs does next."""
RUN_S = 120.0
"""For a process that starts, imports what a run needs, and takes a few steps: alone it takes 15."""
LIMIT_S = 240.0
"""For a command that starts several processes, one after the other."""


@dataclass(frozen=True)
class Result:
    """What a launched run left behind."""

    code: int
    output: str
    directory: Path

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "metrics.jsonl")

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [m for m in self.metrics if "grad_norm" in m]

    def series(self, key: str) -> np.ndarray:
        return np.array([m[key] for m in self.steps])

    def validation(self, key: str = "validation_loss") -> float:
        return [m[key] for m in self.metrics if key in m][-1]

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.directory / "run.json").read_text(encoding="utf-8"))

    @functools.cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        files = sorted((self.directory / "model").glob("*.safetensors"))
        return {k: v for f in files for k, v in load_file(f).items()}

    def check(self) -> "Result":
        assert self.code == 0, self.output[-6000:]
        return self


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def environment(**extra: str) -> dict[str, str]:
    """What tests run under: one thread, no network, the tests' own tasks importable."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PYTEST_"))}
    env |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [f"{ROOT}:{ROOT}/tests/support", os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
    }
    return env | extra


def command(
    config: str | Path,
    *arguments: str,
    script: str = "scripts/train.py",
    processes: int | None = None,
    python: str = sys.executable,
) -> list[str]:
    """`accelerate launch` of a shipped launch file by name, or of any by path."""
    path = config if isinstance(config, Path) else Path("accelerate_configs") / f"{config}.yaml"
    words = [python, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    words += ["--config_file", str(path)]
    if processes is not None:
        words += ["--num_processes", str(processes)]
    return [*words, script, *arguments]


def run(words: list[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs a command to its end; returns its exit code and everything that it printed."""
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=env or environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return 124, output + f"\nkilled after {LIMIT_S:g} s"
    return process.returncode, output


def launch_really(
    config: str | Path, *words: str, script: str, processes: int | None = None, env: dict[str, str] | None = None
) -> tuple[int, str]:
    """A real `accelerate launch`, as `forkserver.ForkServer.launch` has it."""
    return run(command(config, *words, script=script, processes=processes), env=environment(**(env or {})))


def python(*words: str) -> tuple[str, str]:
    """Runs Python on a program that must not fail; returns its standard output and error."""
    done = subprocess.run(
        [sys.executable, *words], env=environment(), text=True, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def commands(folder: Path, python: str) -> Path:
    """A folder for PATH: `finetune` and `accelerate` as they are in this checkout, and the `python` that has them."""
    made = folder / "bin"
    made.mkdir()
    accelerate = "-m accelerate.commands.accelerate_cli"
    for name, words in (("finetune", "-m finetune"), ("accelerate", accelerate), ("python", "")):
        (made / name).write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n')
        (made / name).chmod(0o755)
    return made


MARK = "\x1e"
"""Begins the line that `many.py` prints before each run."""

Recipes = dict[str, dict[str, Any]]


class Launcher:
    """Launches recipes; a recipe runs once a session under a launch file, whichever tests and workers ask.

    The first test that asks for a run under a launch file has all runs launched that the session's tests read under it,
    in one launch: starting up is most of a short run's time. Such a run is named in `LAUNCHED_RUNS` of the test's
    module: recipes by launch file and name, or a function of this launcher that returns them.

    Args:
        shared: A folder for what the runs leave.
        launch: Runs a launch to its end: `launch_really`, or `forkserver.ForkServer.launch`, which is quicker.
        modules: The modules of the session's tests.
    """

    def __init__(self, shared: Path, launch: Callable[..., tuple[int, str]], modules: Iterable[Any] = ()) -> None:
        self.shared, self.launch, self.modules = shared, launch, modules
        shared.mkdir(parents=True, exist_ok=True)

    @functools.cached_property
    def atlas(self) -> dict[str, Recipes]:
        """All runs of the session's tests, by launch file and by `NAME-DIGEST`."""
        found: dict[str, Recipes] = {}
        for module in self.modules:
            runs = getattr(module, "LAUNCHED_RUNS", {})
            for config, jobs in (runs(self) if callable(runs) else runs).items():
                found.setdefault(config, {}).update({self._key(name, recipe): recipe for name, recipe in jobs.items()})
        return found

    def many(
        self,
        config: str | Path,
        jobs: Recipes,
        *,
        processes: int | None = None,
        env: dict[str, str] | None = None,
    ) -> dict[str, Result]:
        """Runs several recipes, one after the other, in one launch.

        A run that fails ends its launch; those after it are launched again.
        """
        place = self._place(config, processes, env)
        wanted = {self._key(name, recipe): recipe for name, recipe in jobs.items()}
        shared_by_all = place.name in self.atlas
        if shared_by_all and place.name != "single" and "single" in self.atlas:
            # What the others are compared with, and resume from.
            self.many("single", {})
        with FileLock(f"{place}.lock"):
            if shared_by_all and not (place / "atlas").exists():
                self._launch(config, place, {**self.atlas[place.name], **wanted}, processes, env)
                (place / "atlas").touch()
            else:
                self._launch(config, place, wanted, processes, env)
        return {name: self._result(place / self._key(name, recipe)) for name, recipe in jobs.items()}

    def everything(self, config: str) -> dict[str, Result]:
        """All runs of the session's tests under a launch file that came to their end, by `NAME-DIGEST`."""
        self.many(config, {})
        place = self._place(config, None, None)
        return {key: run for key in self.atlas[config] if (run := self._result(place / key)).code == 0}

    def one(self, config: str | Path, recipe: dict[str, Any], **options: Any) -> Result:
        """Runs one recipe."""
        return self.many(config, {"run": recipe}, **options)["run"]

    def directory(self, config: str, name: str, recipe: dict[str, Any]) -> Path:
        """The run directory that a recipe of `LAUNCHED_RUNS` has or will have."""
        return self._place(config, None, None) / self._key(name, recipe) / name

    def _place(self, config: str | Path, processes: int | None, env: dict[str, str] | None) -> Path:
        if isinstance(config, str) and processes is None and env is None:
            return self.shared / config
        text = Path(config).read_text() if isinstance(config, Path) else ""
        identity = json.dumps([str(config), text, processes, env], sort_keys=True)
        return self.shared / f"{Path(config).stem}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    @staticmethod
    def _key(name: str, recipe: dict[str, Any]) -> str:
        text = json.dumps(recipe, sort_keys=True, default=str)
        return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @staticmethod
    def _result(folder: Path) -> Result:
        code, output = json.loads((folder / "done.json").read_text())
        return Result(code, output, folder / folder.name.rpartition("-")[0])

    def _launch(
        self, config: str | Path, place: Path, runs: Recipes, processes: int | None, env: dict[str, str] | None
    ) -> None:
        """Launches what has not run yet."""
        while missing := [place / key for key in runs if not (place / key / "done.json").exists()]:
            files = [self._write(folder, runs[folder.name]) for folder in missing]
            code, output = self.launch(config, *files, script="tests/support/many.py", processes=processes, env=env)
            printed = _by_run(output)
            for folder in missing:
                ended = code == 0 or (folder / "ended").exists()
                said = printed.get(folder.name, "")
                text = json.dumps([0, said] if ended else [code, said or output])
                (folder / "done.json").write_text(text)
                if not ended:
                    break

    def _write(self, folder: Path, recipe: dict[str, Any]) -> str:
        """Writes a recipe whose run directory is in the folder; returns its file."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        name = folder.name.rpartition("-")[0]
        recipe = {**recipe, "output": {**recipe.get("output", {}), "dir": str(folder / name)}}
        if ":" not in recipe.get("task", {}).get("name", ""):
            recipe["data"] = {"cache_dir": str(self.shared / "cache"), **recipe.get("data", {})}
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return str(file)


def _by_run(output: str) -> dict[str, str]:
    """What was printed of each run, by the name of its folder; ranks print one after the other."""
    printed: dict[str, str] = {}
    for part in output.split(MARK)[1:]:
        name, _, text = part.partition("\n")
        printed[name] = printed.get(name, "") + text
    return printed


def assert_same_path(one: Result, other: Result, tolerance: float, *, weights: float | None = None) -> None:
    """Losses, gradient norms and final weights agree, relatively, at every step."""
    one.check()
    other.check()
    for key in ("loss", "grad_norm"):
        left, right = one.series(key), other.series(key)
        assert len(left) == len(right) > 0
        worst = np.abs(left - right) / np.abs(left)
        assert worst.max() <= tolerance, f"{key} differs by {worst.max():.2e} at step {worst.argmax() + 1}"
    epochs, others = ([line["epoch_loss"] for line in run.metrics if "epoch_loss" in line] for run in (one, other))
    np.testing.assert_allclose(epochs, others, rtol=tolerance, atol=0)
    assert one.series("lr").tolist() == other.series("lr").tolist()
    assert one.series("tokens").tolist() == other.series("tokens").tolist()
    assert weight_difference(one, other) <= (tolerance if weights is None else weights)


def assert_same_path_in_bf16(one: Result, other: Result, *, other_shapes: bool = False) -> None:
    """Losses, weights and, at the median, gradient norms agree.

    Sums of fp32 in another order (1e-7) round to another neighbour in bf16 (4e-3 away) now and then, and from there two
    runs part as two first weights would. Of 31 pairs of one process and two, with other seeds and ways to compute
    attention and loss, the largest difference of a gradient norm in 30 steps was 1.6e-3 to 2.4e-2, at one or two
    steps; for one seed, with the same mask made by two libraries, 6.8e-3 and 1.5e-2. The loss never differed by more
    than 8e-5.

    Args:
        other_shapes: Whether products have other shapes, because rows or layers are split. Kernels add up other parts
            of them before they round to bf16: the first gradient norm was 1.9e-5 apart for split rows and 2.6e-5 for
            split layers, and that of one process with micro-batches of 1 and 4 rows 1.0e-5 and 2.2e-5 from that of 2.
            Of the same shapes it was 1e-7.
    """
    one.check()
    other.check()
    assert np.max(np.abs(one.series("loss") / other.series("loss") - 1)) <= 1e-3
    apart = np.abs(one.series("grad_norm") / other.series("grad_norm") - 1)
    assert apart[0] <= (2e-4 if other_shapes else 1e-5), "nothing has parted the runs before the first step"
    assert np.median(apart) <= 2e-3
    assert apart.max() <= 3e-2
    assert one.series("lr").tolist() == other.series("lr").tolist()
    assert one.series("tokens").tolist() == other.series("tokens").tolist()
    assert weight_difference(one, other) <= 1e-2


def assert_near_in_bf16(one: Result, other: Result) -> None:
    """The same for adapters in bf16, as far as it can be said of them.

    Sums of fp32 in another order (1e-7) now and then round to another neighbour in bf16 (4e-3 away): from layer to
    layer a difference of d grows to sqrt(4e-3 d), and five layers down gradients differ by 2 to 4e-3. `B` begins at
    zero, so that all of it is such updates: one process with micro-batches of 1, 2 and 4 rows differs from itself by
    1.6e-3 in the loss, 2.7e-2 in later gradient norms and 9.6e-2 in `B`. The first gradient has no history yet.
    """
    one.check()
    other.check()
    np.testing.assert_allclose(other.series("loss"), one.series("loss"), rtol=5e-3)
    np.testing.assert_allclose(other.series("grad_norm")[0], one.series("grad_norm")[0], rtol=1e-3)
    np.testing.assert_allclose(other.series("grad_norm"), one.series("grad_norm"), rtol=0.1)
    assert weight_difference(one, other) <= 0.2


def weight_difference(one: Result, other: Result) -> float:
    """The largest relative difference (norm of the difference by norm) of any tensor.

    Elements below 1e-3 on average count as that large: biases whose gradient is zero but for rounding, such as
    those of attention's keys, hold nothing but noise.
    """
    assert one.weights.keys() == other.weights.keys()
    apart = []
    for name in one.weights:
        left, right = (
            side if side.is_floating_point() else side.cfloat() for side in (one.weights[name], other.weights[name])
        )
        size = max(left.norm().item(), 1e-3 * max(1, left.numel()) ** 0.5)
        apart.append((left - right).norm().item() / size)
    # numpy's maximum is NaN where any is; Python's may pass it over.
    return float(np.max(apart))
