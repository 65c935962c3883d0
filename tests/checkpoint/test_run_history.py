"""A run's history: metrics over restarts, starts, checkpoints, incidents, status."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from harness import ROOT, RUN_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import Crash, copy, crash_after, mlp, run_here, stop_after

from finetune.checkpoint.run_history import RunReader, read_run
from finetune.utils.errors import CheckpointError, DivergedError, RecipeError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crashed in step 7, asked to stop after step 12, and then finished."""
    tree = mlp(tmp_path_factory.mktemp("history") / "run", eval={"every_steps": 5})
    with pytest.raises(Crash):
        run_here(tree, crash_after(7))
    run_here(tree, stop_after(12))
    return run_here(tree).directory


def change(directory: Path, **facts: Any) -> None:
    file = directory / "run.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in {**told, **facts}.items() if value is not None}))


def change_start(directory: Path, **facts: Any) -> None:
    told = json.loads((directory / "run.json").read_text())
    change(directory, finished=None, starts=[*told["starts"][:-1], {**told["starts"][-1], **facts}])


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_restarts_make_one_history(finished: Path) -> None:
    run = read_run(finished)
    assert run.status == "finished"
    assert run.training["step"].tolist() == list(range(1, 21))
    assert np.isfinite(run.training["loss"]).all()
    assert run.evaluations["step"].tolist() == [5, 10, 15, 20]
    assert [(start.from_step, start.to_step) for start in run.starts] == [(0, 6), (5, 12), (12, 20)]
    told = run.facts["starts"]
    assert [start.get("ended") is not None for start in told] == [False, True, False]
    ends = [start.end for start in run.starts]
    assert None not in ends
    assert ends == sorted(ends)
    assert all(start.time <= following.time for start, following in zip(run.starts, run.starts[1:], strict=False))
    assert [saved.step for saved in run.checkpoints] == sorted(saved.step for saved in run.checkpoints)
    assert run.checkpoints[-1].step == run.step == run.num_steps == 20
    best = run.best_evaluation
    assert best is not None
    assert best[1] == np.nanmin(run.evaluations["validation_loss"])
    assert run.process_hours == pytest.approx(run.duration / 3600)


def test_times_say_when_lines_were_written(finished: Path) -> None:
    times = read_run(finished).training["time"]
    assert (np.diff(times) >= 0).all()
    assert 0 <= time.time() - times[-1] < 3600


def test_later_lines_of_a_step_count(finished: Path, tmp_path: Path) -> None:
    directory = copy(finished, tmp_path / "run")
    line = {"step": 18, "loss": 0.125, "grad_norm": 1.0}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    run = read_run(directory)
    assert run.training["step"].tolist() == list(range(1, 19))
    assert run.training["loss"][-1] == 0.125
    assert run.evaluations["step"].tolist() == [5, 10, 15]


def test_only_the_outcome(finished: Path) -> None:
    whole, outcome = read_run(finished), read_run(finished, only_outcome=True)
    assert outcome.training["step"].tolist() == [5, 10, 15, 20]
    for key in ("status", "step", "num_steps", "best_evaluation", "launch", "starts"):
        assert getattr(outcome, key) == getattr(whole, key), key


def test_metrics_are_columns(finished: Path, tmp_path: Path) -> None:
    """From the first evaluation that has one; names that could lead somewhere else are none."""
    directory = copy(finished, tmp_path / "run")
    recipe = yaml.safe_load((directory / "recipe.yaml").read_text())
    recipe["checkpoint"]["keep_best_by"] = "validation_f1"
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with (directory / "metrics.jsonl").open("a") as file:
        for step, value in ((21, 0.25), (22, 0.5), (23, None)):
            line = {"step": step, "validation_f1": value, "validation_/../x": 1.0}
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"step": 24, "validation_f1": "many"}) + "\n")
    for only_outcome in (True, False):
        run = read_run(directory, only_outcome=only_outcome)
        assert run.metrics == ("validation_f1",)
        assert run.evaluations["step"].tolist() == [5, 10, 15, 20, 21, 22, 23]
        np.testing.assert_equal(run.evaluations["validation_f1"], [np.nan] * 4 + [0.25, 0.5, np.nan])
        assert {len(column) for column in run.evaluations.values()} == {7}
        assert (run.best_name, run.best_evaluation) == ("validation f1", (22, 0.5))
        assert run.best("-validation_f1") == (21, 0.25)
        assert run.best("validation_loss") == read_run(finished).best_evaluation
        assert run.damaged_lines == 1


def test_a_stopped_run(tmp_path: Path) -> None:
    done = run_here(mlp(tmp_path / "run"), stop_after(6))
    run = read_run(done.directory)
    assert (run.status, run.step) == ("stopped", 6)


def test_a_diverged_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUBLE", json.dumps({"loss": {str(row): "nan" for row in range(200)}}))
    tree = mlp(tmp_path / "run", task={"name": "troubled_task:mlp"}, guard={"max_skipped_steps": 3})
    with pytest.raises(DivergedError):
        run_here(tree)
    run = read_run(tmp_path / "run")
    assert run.status == "diverged"
    assert [(i.step, i.kind, i.in_a_row, i.fatal) for i in run.incidents] == [
        (1, "nonfinite", 1, False),
        (2, "nonfinite", 2, False),
        (3, "nonfinite", 3, True),
    ]
    assert len(run.incidents[0].rows) == 8
    assert np.isnan(run.training["grad_norm"]).all()


def test_whether_it_runs_here(finished: Path, tmp_path: Path) -> None:
    directory = copy(finished, tmp_path / "run")
    change_start(directory, pid=os.getpid())
    assert read_run(directory).status == "running"
    change_start(directory, pid=ended_process())
    assert read_run(directory).status == "lost"
    # The number of a process that began after the run did is not the run's.
    change_start(directory, pid=os.getpid(), time="2020-01-01T00:00:00+0000")
    assert read_run(directory).status == "lost"


def test_whether_it_runs_elsewhere(finished: Path, tmp_path: Path) -> None:
    directory = copy(finished, tmp_path / "run")
    change_start(directory, host=f"not-{socket.gethostname()}", pid=os.getpid())
    assert read_run(directory).status == "running"
    for path in (*directory.iterdir(), directory):
        os.utime(path, (time.time() - 3600,) * 2)
    run = read_run(directory)
    assert run.status == "lost"
    # It has held its processes until it last wrote, not until now.
    assert run.starts[-1].end == run.training["time"][-1]


def test_reading_again_sees_what_is_new(finished: Path, tmp_path: Path) -> None:
    directory = copy(finished, tmp_path / "run")
    file = directory / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:6]) + lines[6][:9])
    reader = RunReader(directory)
    before = reader.read()
    with file.open("ab") as more:
        more.write(lines[6][9:] + b"".join(lines[7:]))
    after, whole = reader.read(), read_run(finished)
    assert before.step < after.step or len(before.training["step"]) < len(after.training["step"])
    for key in whole.training:
        np.testing.assert_array_equal(after.training[key], whole.training[key])
    # A restart replaces the file by a shorter one.
    other = file.with_name("other")
    other.write_bytes(b"".join(lines[:3]))
    other.replace(file)
    assert reader.read().training["step"].tolist() == [json.loads(line)["step"] for line in lines[:3]]


def test_damaged_lines_are_counted(finished: Path, tmp_path: Path) -> None:
    directory = copy(finished, tmp_path / "run")
    file = directory / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b"{nonsense\n", b"[1]\n", *lines[1:], b'{"step": 21, "gra']))
    run = read_run(directory)
    assert run.damaged_lines == 2
    assert run.training["step"].tolist() == list(range(1, 21))


def sample(machine: int, time: float, **figures: Any) -> dict[str, Any]:
    return {"step": 3, "time": time, "machine": machine, "host": f"node{machine}", **figures}


def write_samples(directory: Path, samples: list[dict[str, Any]]) -> None:
    (directory / "machines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))


def test_machines(finished: Path, tmp_path: Path) -> None:
    """A column a figure, with the GPU that is worst off; a machine that came later, and one whose host changed."""
    directory = copy(finished, tmp_path / "run")
    assert read_run(directory).machines == ()
    gpus = [{"percent": 97, "temperature_c": 60, "power_w": 300.5, "throttled": ["power cap"]}]
    gpus += [{"percent": 12, "temperature_c": 81, "power_w": 100.0, "throttled": ["power cap", "power brake"]}]
    samples = [sample(0, 10.0, cpu_percent=50.0, gpus=gpus), sample(1, 11.0), sample(0, 20.0, cpu_percent=None)]
    write_samples(directory, samples[:1])
    reader = RunReader(directory)
    assert [machine.name for machine in reader.read().machines] == ["0 node0"]
    write_samples(directory, [*samples, sample(0, 30.0, gpus=[{}]) | {"host": "spare"}])
    first, second = reader.read().machines
    assert (first.name, second.name, first.has_gpus, second.has_gpus) == ("0 spare", "1 node1", True, False)
    nan = np.nan
    for key, values in {
        "time": [10, 20, 30],
        "cpu_percent": [50, nan, nan],
        "gpu_percent": [12, nan, nan],
        "gpu_temperature_c": [81, nan, nan],
        "gpu_power_w": [400.5, nan, nan],
        "gpu_sm_clock_mhz": [nan, nan, nan],
    }.items():
        np.testing.assert_equal(first.samples[key], values, key)
    assert first.throttled == {"power cap": 1, "power brake": 1}
    assert read_run(directory, only_outcome=True).machines == ()


VALUES = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3)
DAMAGE = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2))


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    changes=st.dictionaries(st.sampled_from([*sample(0, 1.0), "cpu_percent", "gpus"]), DAMAGE, max_size=3),
    raw=st.binary(max_size=8),
)
def test_damaged_samples_are_left_out(finished: Path, changes: dict[str, Any], raw: bytes) -> None:
    """Whatever they hold, what is whole is read, all columns of a machine are as long, and what is not is counted."""
    lines = [sample(7, 10.0, cpu_percent=1.0), sample(7, 20.0) | changes, sample(7, 30.0, cpu_percent=2.0)]
    written = [json.dumps(line).encode() for line in lines]
    (finished / "machines.jsonl").write_bytes(
        b"\n".join([*written[:2], raw.replace(b"\n", b""), written[2], b'{"step": 4'])
    )
    try:
        run = read_run(finished)
    finally:
        (finished / "machines.jsonl").unlink()
    found = {machine.number: machine for machine in run.machines}
    assert found[7].samples["cpu_percent"][[0, -1]].tolist() == [1.0, 2.0]
    count = 0
    for machine in run.machines:
        (length,) = {len(values) for values in machine.samples.values()}
        count += length
    assert count + run.damaged_lines == 4


def test_an_older_run_has_no_times(finished: Path, tmp_path: Path) -> None:
    directory = copy(finished, tmp_path / "run")
    file = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "time"}) + "\n" for line in lines))
    told = json.loads((directory / "run.json").read_text())["starts"]
    change(directory, starts=[{k: v for k, v in s.items() if k not in ("to_step", "last_logged")} for s in told])
    run = read_run(directory)
    assert [start.from_step for start in run.starts] == [0, 5, 12]
    assert all(start.end is not None and start.end >= start.time for start in run.starts)
    assert run.training_seconds[-1] > 0


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="holds no run"):
        read_run(tmp_path / "nothing")
    for text in ("{", "[]", "{}"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"run\.json"):
            read_run(tmp_path)


@pytest.mark.parametrize("words", [["runs"], ["watch", "--once"], ["report", "--to"]], ids=lambda words: words[0])
def test_torch_is_not_imported(finished: Path, tmp_path: Path, words: list[str]) -> None:
    verb, *options = words
    run = copy(finished, tmp_path / "run")
    change(run, peak_memory={"of": "resident", "measured": 2, "predicted": 1})
    line = [verb, str(run), *options, *([str(tmp_path / "page.html")] if "--to" in options else [])]
    code = (
        "import sys\nfrom finetune.cli.main import main\n"
        f"assert main({line!r}) == 0\n"
        "assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules), 'heavy'\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
