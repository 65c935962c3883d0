"""A forked launch is a launch: what its ranks see, what they compute, and how they end."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from harness import SHARED, Launcher, Result, command, run
from nursery import Nursery
from recipes_for_tests import PARITY
from test_parity import NVME

# One of each kind.
FILES = ["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero3_offload", NVME]
# What no two launches have in common, and what depends on the clock.
OWN = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
TIMES = ("tokens_per_s", "step_s", "data_s", "forward_backward_s", "optimizer_s", "peak_memory_gib", "mfu", "seconds")
JOB = {**PARITY["adamw"], "length": {"steps": 3}, "eval": {"at_end": True}}


def lines(ended: Result) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in ended.check().metrics]


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data")
@pytest.mark.parametrize("config", FILES)
def test_it_takes_the_path_of_a_real_launch_to_the_bit(launcher: Launcher, config: str) -> None:
    jobs = {"run": {**JOB, "data": {**JOB["data"], "cache_dir": str(launcher.shared / "cache")}}}
    forked = launcher.many(config, jobs)["run"]
    real = Launcher(launcher.shared / "really", run).many(config, jobs)["run"]
    assert lines(forked) == lines(real)
    assert forked.weights.keys() == real.weights.keys()
    assert all(torch.equal(tensor, real.weights[name]) for name, tensor in forked.weights.items())
    assert forked.facts["runs"] == real.facts["runs"]


@pytest.mark.parametrize("config", ["single", "zero3"])
def test_its_ranks_see_what_those_of_a_real_launch_see(nursery: Nursery, tmp_path: Path, config: str) -> None:
    seen: dict[str, list[dict[str, Any]]] = {}
    drawn: dict[str, list[str]] = {}
    for name, start in (("forked", nursery.run), ("real", run)):
        folder = tmp_path / name
        folder.mkdir()
        code, output = start(command(config, str(folder), "optim.lr=1", script="tests/seen.py"))
        assert code == 0, output
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("?"))]
        for rank in ranks:
            assert rank["argv"].pop(1) == rank["launcher"]["training_script_args"].pop(0) == str(folder)
            for key in OWN:
                rank["env"].pop(key, None)
        # Nobody draws what another draws.
        for kind in ("python", "numpy", "torch"):
            drawn.setdefault(kind, []).extend(file.read_text() for file in folder.glob(f"*.{kind}"))
        seen[name] = ranks
    for draws in drawn.values():
        assert len(set(draws)) == len(draws) == len([*seen["real"], *seen["forked"]])
    assert len(seen["real"]) == (1 if config == "single" else 2)
    for forked, real in zip(seen["forked"], seen["real"], strict=True):
        for key in real:
            assert forked[key] == real[key], key


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def script(folder: Path, text: str) -> str:
    file = folder / "script.py"
    file.write_text("import os, pathlib, signal, sys, time\n" + text)
    return str(file)


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('as it wished')", 1, "as it wished"),
        ("raise ValueError('unforeseen')", 1, "ValueError: unforeseen"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
    ],
)
def test_a_python_ends_as_ever(nursery: Nursery, tmp_path: Path, ends: str, code: int, says: str) -> None:
    for start in (nursery.run, run):
        ended, output = start([sys.executable, script(tmp_path, ends)])
        assert ended == code
        assert says in output
        assert says or not output


@pytest.mark.parametrize("module", [["-m", "json.tool", "--help"], ["-m", "finetune", "--help"]])
def test_modules_run_as_ever(nursery: Nursery, module: list[str]) -> None:
    assert nursery.run([sys.executable, *module]) == run([sys.executable, *module])


def test_a_rank_that_fails_takes_the_others_along(nursery: Nursery, tmp_path: Path) -> None:
    """The others would wait for ever."""
    text = """
folder = pathlib.Path(sys.argv[1])
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    while not (folder / "0").exists():
        pass
    sys.exit("rank 1 has had enough")
signal.pause()
"""
    code, output = nursery.run(command("ddp", str(tmp_path), script=script(tmp_path, text)))
    assert code == 1
    assert "rank 1 has had enough" in output
    assert not running(int((tmp_path / "0").read_text()))


def test_what_hangs_is_killed(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "print('I wait'); pathlib.Path(sys.argv[1], os.environ['RANK']).write_text('here'); signal.pause()"
    hangs: list[psutil.Process] = []

    def ends(pid: int, limit_s: float) -> bool:
        """Time is up when both ranks hang."""
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert psutil.pid_exists(pid)
        hangs.extend([psutil.Process(pid), *psutil.Process(pid).children(recursive=True)])
        return False

    monkeypatch.setattr("nursery.ends", ends)
    code, output = nursery.run(command("ddp", str(tmp_path), script=script(tmp_path, text)))
    assert code == 124
    assert output.count("I wait") == 2
    assert len(hangs) == 3
    while any(running(process.pid) for process in hangs):
        pass
