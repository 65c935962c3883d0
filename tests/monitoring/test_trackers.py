"""Trackers: what TensorBoard, Trackio and W&B read back of a run that was started, and resumed."""

import html
import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from forkserver import ForkServer
from harness import ROOT
from recipes_for_tests import base

from finetune.checkpoint.run_history import SAMPLED
from finetune.monitoring.trackers import Trackers
from finetune.utils.atomic_files import read_whole_lines, rewrite_lines

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("trackers")]

SECRET = "s3cret-of-the-environment"
ALL = ("tensorboard", "trackio", "wandb")


@dataclass(frozen=True)
class Outside:
    """A home and a network of its own for a process, to see whether it uses them."""

    home: Path
    listener: socket.socket

    @property
    def env(self) -> dict[str, str]:
        proxy = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        names = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy", "all_proxy")
        secrets = {"WANDB_API_KEY": SECRET.ljust(40, "0"), "HF_TOKEN": SECRET}
        mine = {"HOME": str(self.home), "XDG_CACHE_HOME": "", "NO_PROXY": "127.0.0.1,localhost"}
        return dict.fromkeys(names, proxy) | secrets | mine

    def check(self) -> None:
        with pytest.raises(BlockingIOError):  # nobody waits for an answer
            self.listener.accept()
        assert [path for path in self.home.rglob("*") if path.is_file()] == [], "all is in the run directory"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Outside(tmp_path_factory.mktemp("home"), listener)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer, outside: Outside) -> Path:
    """A run on two processes of four steps with all trackers, and resumed for two more."""
    folder = tmp_path_factory.mktemp("tracked")
    recipe = base(
        data={**base()["data"], "cache_dir": str(folder / "cache")},
        length={"steps": 4},
        schedule={"name": "constant", "warmup_steps": 0},
        eval={"every_steps": 2},
        sample={"prompt": "Once", "max_new_tokens": 4, "every_steps": 2},
        log={"every_steps": 1, "system_every_s": 0.02, "trackers": list(ALL)},
        output={"dir": str(folder / "tracked"), "save_model": False},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for steps in (4, 6):
        words = [str(folder / "recipe.yaml"), f"length.steps={steps}"]
        code, output = fork_server.launch("ddp", *words, script="scripts/train.py", env=outside.env)
        assert code == 0, output[-4000:]
        assert "log.trackers" not in output
    outside.check()
    return folder / "tracked"


def test_nothing_is_sent(tmp_path: Path, outside: Outside) -> None:
    # A process to its end: wandb sends when it ends, which the ranks of `run`, as forks, do not do.
    program = f"""
from pathlib import Path
from finetune.monitoring.trackers import Trackers
trackers = Trackers({ALL}, Path("."), {{"recipe": {{}}, "launch": {{}}}})
line = {{"step": 1, "time": 1.0, "loss": 2.0, "sample": "Once"}}
print([*trackers.open(), *trackers.add(line), *trackers.close()])
"""
    env = {**os.environ, **outside.env, "PYTHONPATH": str(ROOT)}
    env.pop("WANDB_ERROR_REPORTING", None)  # as a user has it
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    outside.check()


def scalars(lines: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """What each tracker must have: every number of every line, by name and step."""
    about = ("step", "time")
    return {
        (k, line["step"]): v for line in lines for k, v in line.items() if k not in about and type(v) in (int, float)
    }


def samples(lines: list[dict[str, Any]]) -> dict[int, str]:
    return {line["step"]: line["sample"] for line in lines if "sample" in line}


def of_tensorboard(run: Path) -> tuple[list[tuple[str, int, float]], dict[int, str], dict[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "trackers" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    found = [(tag, e.step, e.value) for tag in tags["scalars"] for e in events.Scalars(tag)]
    texts = {
        tag: {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)} for tag in tags["tensors"]
    }
    return (
        found,
        texts["sample/text_summary"],
        {key: yaml.safe_load(texts[f"{key}/text_summary"][0]) for key in ("recipe", "launch")},
    )


def of_trackio(run: Path) -> tuple[list[tuple[str, int, float]], dict[int, str], dict[str, Any]]:
    (file,) = (run / "trackers" / "trackio").glob("*.db")
    connection = sqlite3.connect(file)
    rows = connection.execute("select run_name, run_id, step, metrics from metrics").fetchall()
    (config,) = connection.execute("select config from configs").fetchone()
    connection.close()
    assert {(name, run_id) for name, run_id, _, _ in rows} == {("tracked", identity(run))}
    lines = [(step, json.loads(metrics)) for _, _, step, metrics in rows]
    found = [(k, step, v) for step, values in lines for k, v in values.items() if k != "sample"]
    return found, {step: v["sample"] for step, v in lines if "sample" in v}, json.loads(config)


def of_wandb(run: Path) -> tuple[list[tuple[str, int, float]], dict[int, str], dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    (file,) = (run / "trackers" / "wandb" / "wandb").glob("offline-run-*/*.wandb")
    # A log as LevelDB's: blocks of 32 KiB, in them records or parts of such, behind a header of 7 bytes.
    data, place, part, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    (about,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (about.run_id, about.display_name, about.project) == (identity(run), "tracked", "finetune")
    assert records[-1].WhichOneof("record_type") == "exit", "it was closed"
    found, written = [], {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            values = {".".join(i.nested_key or [i.key]): json.loads(i.value_json) for i in record.history.item}
            step = values["_step"]
            found += [(k, step, v) for k, v in values.items() if not k.startswith(("_", "sample"))]
            if "sample.path" in values:
                written[step] = html.unescape((file.parent / "files" / values["sample.path"]).read_text())
    return found, written, {u.key: json.loads(u.value_json) for u in about.config.update}


def identity(run: Path) -> str:
    return (run / "trackers" / "run_id").read_text()


@pytest.mark.parametrize("read", [of_tensorboard, of_trackio, of_wandb])
def test_each_tracker_has_each_line_once(run: Path, read: Any) -> None:
    lines = read_whole_lines(run / "metrics.jsonl").whole
    assert [start["from_step"] for start in json.loads((run / "run.json").read_text())["starts"]] == [0, 4]
    found, written, config = read(run)
    machine = {(key, step): value for key, step, value in found if key.startswith("machine/")}
    found = [(key, step, value) for key, step, value in found if (key, step) not in machine]
    expected = scalars(lines)
    assert {("loss", 1), ("loss", 6), ("validation_loss", 2), ("validation_loss", 6)} <= expected.keys()
    assert sorted(key[:2] for key in found) == sorted(expected), "each value once"
    for name, step, value in found:
        assert value == pytest.approx(expected[name, step], rel=1e-6)
    texts, sampled = samples(lines), read_whole_lines(run / "machines.jsonl").whole
    # Of two processes on one machine.
    assert {sample["machine"] for sample in sampled} == {0}
    known = {f"machine/0/{key}" for key in (*SAMPLED, "gpu/0/percent")}
    assert {"machine/0/cpu_percent", "machine/0/processes_gib"} <= {key for key, _ in machine} <= known
    for (key, _), value in machine.items():
        assert value in [pytest.approx(sample.get(key.removeprefix("machine/0/")), rel=1e-6) for sample in sampled]
    assert written.keys() == texts.keys() == {2, 4, 6}
    for step, text in texts.items():
        assert text in written[step]
    assert config["recipe"] == json.loads(json.dumps(yaml.safe_load((run / "recipe.yaml").read_text())))
    launch = config["launch"]
    assert (launch["launch"]["kind"], launch["launch"]["num_processes"], launch["precision"]) == ("ddp", 2, "fp32")
    assert launch["runs"]["wrapper"] == "DistributedDataParallel"


def test_no_secret_is_kept(run: Path) -> None:
    files = [path for path in (run / "trackers").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_only_what_was_asked_for_is_there(run: Path) -> None:
    assert sorted(os.listdir(run / "trackers")) == sorted([*ALL, "run_id"])


def test_steps_that_are_taken_again_come_once(tmp_path: Path) -> None:
    def line(step: int, loss: float) -> dict[str, Any]:
        return {"step": step, "loss": loss, "time": 1000.0 + step}

    # Killed after step 3, whose checkpoint is that of step 1: `metrics.jsonl` was taken back to it.
    for before, later in (([], [line(1, 5.0), line(2, 4.0), line(3, 3.0)]), ([line(1, 5.0)], [line(2, 4.5)])):
        trackers = Trackers(("tensorboard", "trackio"), tmp_path / "tracked", {"recipe": {"seed": 1}, "launch": {}})
        (tmp_path / "tracked").mkdir(exist_ok=True)
        rewrite_lines(tmp_path / "tracked" / "metrics.jsonl", before)
        assert trackers.open() == []
        for each in later:
            assert trackers.add(each) == []
        # Not closed: it was killed.
    for read in (of_tensorboard_scalars, of_trackio):
        found = read(tmp_path / "tracked")
        assert sorted(found[0] if isinstance(found, tuple) else found) == [("loss", 1, 5.0), ("loss", 2, 4.5)]


def test_machines_are_written_anew_with_the_lines(tmp_path: Path) -> None:
    """Of the samples since the line before, the newest of each machine; one after the last line waits for another."""

    def sample(time: float, value: float, **more: Any) -> dict[str, Any]:
        return {"step": 9, "time": time, "machine": 1, "host": "node1", "cpu_percent": value, **more}

    run = tmp_path / "run"
    run.mkdir()
    rewrite_lines(run / "metrics.jsonl", [{"step": n, "loss": 5.0, "time": 1000.0 + n} for n in (1, 2, 3)])
    later = [sample(1004.0, 50.0), {"machine": "x", "time": 1000.5}, {"machine": 0, "time": 1000.5, "gpus": 1}]
    gpus = [{"percent": 1, "throttled": ["power cap"]}, {"percent": 2}]
    rewrite_lines(run / "machines.jsonl", [sample(1001.5, 10.0), sample(1001.7, 20.0, gpus=gpus), *later])
    trackers = Trackers(("trackio",), run, {"recipe": {}, "launch": {}})
    assert trackers.open() == []
    (file,) = (run / "trackers" / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("select step, metrics from metrics order by step").fetchall()
    machine = {"machine/1/cpu_percent": 20.0, "machine/1/gpu/0/percent": 1, "machine/1/gpu/1/percent": 2}
    assert [(step, json.loads(values)) for step, values in rows] == [
        (1, {"loss": 5.0}),
        (2, {"loss": 5.0, **machine}),
        (3, {"loss": 5.0}),
    ]


def of_tensorboard_scalars(run: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "trackers" / "tensorboard"))
    events.Reload()
    return [("loss", e.step, e.value) for e in events.Scalars("loss")]


def test_a_tracker_that_fails_is_said_once_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    trackers = Trackers(("tensorboard", "trackio"), tmp_path / "run", {"recipe": {}, "launch": {}})
    assert trackers.open() == []
    from trackio.sqlite_storage import SQLiteStorage

    def full(**_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(SQLiteStorage, "bulk_log", full)
    (problem,) = trackers.add({"step": 1, "time": 1.0, "loss": 2.0})
    assert problem.startswith("log.trackers: trackio failed and is left out from here on: No space left on device.")
    assert trackers.add({"step": 2, "time": 2.0, "loss": 1.0}) == []
    assert trackers.close() == []
    assert [step for _, step, _ in of_tensorboard_scalars(tmp_path / "run")] == [1, 2]
