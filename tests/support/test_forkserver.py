"""Ranks that are forks compute what those of a real `accelerate launch` compute, see what they see, and end alike."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from forkserver import KILLED, ForkServer, until
from harness import WAIT_S, Launcher, Result, environment, launch_really, run
from recipes_for_tests import PARITY

# One of each way in which Accelerate tells workers what to do.
FILES = ["single", "ddp", "fsdp", "zero3"]
# What differs from launch to launch, and what the launcher tells of its agent.
OWN = ("MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE", "PYTHONPATH", "LC_CTYPE")
AGENTS = ("GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_", "NCCL_")
TIMES = (
    *("tokens_per_s", "step_s", "data_s", "forward_backward_s", "optimizer_s"),
    *("peak_memory_gib", "mfu", "seconds", "time"),
)
LAUNCHED_RUNS = {config: {"adamw": PARITY["adamw"]} for config in FILES}


def lines(ended: Result) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in ended.check().metrics]


@pytest.mark.parametrize("config", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FILES])
def test_it_takes_the_path_of_a_real_launch_to_the_bit(launcher: Launcher, config: str) -> None:
    forked = launcher.many(config, LAUNCHED_RUNS[config])["adamw"]
    real = Launcher(launcher.shared / "really", launch_really).many(config, LAUNCHED_RUNS[config])["adamw"]
    assert lines(forked) == lines(real)
    assert forked.weights.keys() == real.weights.keys()
    assert all(torch.equal(tensor, real.weights[name]) for name, tensor in forked.weights.items())
    assert forked.facts["runs"] == real.facts["runs"]
    # But for the file, which only a launcher's workers can name.
    found, asked = forked.facts["launch"], real.facts["launch"]
    assert asked.pop("file") == f"accelerate_configs/{config}.yaml"
    assert found.pop("file") is None
    assert found == asked


@pytest.mark.parametrize("config", ["zero3"])
def test_its_ranks_see_what_those_of_a_real_launch_see(fork_server: ForkServer, tmp_path: Path, config: str) -> None:
    seen: dict[str, list[dict[str, Any]]] = {}
    drawn: dict[str, list[str]] = {}
    for name, start in (("forked", fork_server.launch), ("real", launch_really)):
        folder = tmp_path / name
        folder.mkdir()
        code, output = start(config, str(folder), "optim.lr=1", script="tests/support/seen.py")
        assert code == 0, output
        seen[name] = [json.loads(file.read_text()) for file in sorted(folder.glob("?"))]
        for rank in seen[name]:
            assert rank["argv"].pop(1) == str(folder)
            rank["env"] = {k: v for k, v in rank["env"].items() if k not in OWN and not k.startswith(AGENTS)}
        # Nobody draws what another draws.
        for kind in ("python", "numpy", "torch"):
            drawn.setdefault(kind, []).extend(file.read_text() for file in folder.glob(f"*.{kind}"))
    for draws in drawn.values():
        assert len(set(draws)) == len(draws) == len([*seen["real"], *seen["forked"]])
    assert len(seen["real"]) == (1 if config == "single" else 2)
    for forked, real in zip(seen["forked"], seen["real"], strict=True):
        for key in real:
            assert forked[key] == real[key], key


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
    ],
)
def test_a_python_ends_as_ever(
    fork_server: ForkServer, quick_python: str, tmp_path: Path, ends: str, code: int, says: str
) -> None:
    file = script(tmp_path, ends)
    for ended, output in (fork_server.run([file]), run([sys.executable, file]), run([quick_python, file])):
        assert ended == code
        assert says in output
        assert says or not output


def test_modules_run_as_ever(fork_server: ForkServer, quick_python: str) -> None:
    module = ["-m", "json.tool", "--help"]
    assert fork_server.run(module) == run([sys.executable, *module]) == run([quick_python, *module])


def test_a_command_is_a_fork_in_its_own_place(quick_python: str, tmp_path: Path) -> None:
    """It has the caller's folder, files and variables, and starts others alike."""
    text = """
import subprocess, transformers
print(input(), os.getcwd(), os.environ["MINE"], sys.argv[1:], file=sys.stderr)
if sys.argv[1:] == ["first"]:
    subprocess.run([sys.executable, __file__, "second"], input="in turn", text=True, check=True)
"""
    file = script(tmp_path, text)
    words, env = [quick_python, "-u", file, "first"], environment(MINE="my own")
    done = subprocess.run(words, cwd=tmp_path, env=env, input="hello", text=True, capture_output=True, check=True)
    assert done.stderr.splitlines() == [f"{said} {tmp_path} my own ['{which}']" for said, which in SAID]
    assert done.stdout == ""
    assert run([quick_python, "-P", "-c", "import sys; print('torch' in sys.modules)"]) == (0, "False\n")


SAID = (("hello", "first"), ("in turn", "second"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_the_fork_of_a_command(quick_python: str, tmp_path: Path, number: signal.Signals) -> None:
    text = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
while True:
    signal.pause()
"""
    note = tmp_path / "pid"
    words = [quick_python, script(tmp_path, text), str(note)]
    with subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL) as command:
        try:
            until(lambda: note.exists() and note.read_text() != "", WAIT_S, "it never began")
            fork = int(note.read_text())
            command.send_signal(number)
            assert command.wait(WAIT_S) == (75 if number == signal.SIGTERM else -number)
        finally:
            command.kill()  # the block waits for its end
    until(lambda: not psutil.pid_exists(fork), WAIT_S, "the fork lives")


def test_a_rank_that_fails_takes_the_others_along(fork_server: ForkServer, tmp_path: Path) -> None:
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
    with fork_server.start("ddp", tmp_path, tmp_path, script=script(tmp_path, text)) as ranks:
        assert ranks.finish() == 1
        assert ranks.codes == [-signal.SIGKILL, 1]
        assert "rank 1 has had enough" in ranks.output(1)


def test_what_hangs_is_killed(fork_server: ForkServer, tmp_path: Path) -> None:
    text = "print('I wait', flush=True); signal.pause()"
    with fork_server.start("ddp", tmp_path, script=script(tmp_path, text)) as ranks:
        assert ranks.finish(limit_s=2) == KILLED
        assert ranks.codes == [-signal.SIGKILL] * 2


def test_the_environment_is_the_one_given(fork_server: ForkServer, tmp_path: Path) -> None:
    file = script(tmp_path, "print(sorted(os.environ))")
    code, output = fork_server.run([file], env=environment(WORLD="1"))
    assert code == 0
    assert "'WORLD'" in output
    assert "PYTEST_CURRENT_TEST" not in output
