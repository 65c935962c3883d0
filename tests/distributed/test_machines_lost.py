"""Launches on several machines that lose a worker, a launcher, a machine or a cable: who says what, what is left."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from forkserver import until
from harness import ROOT, RUN_S, WAIT_S
from machines import Machines, Program
from ranks import Place, by_finetune, lines

pytestmark = [pytest.mark.machines, pytest.mark.xdist_group("machines_lost")]

STUB = str(ROOT / "tests/support/machine_stub.py")
# Seconds after which a machine that says nothing is given up; longer than a process waits for a core.
PATIENCE_S = 8.0
RESUMES = "the same command on every machine resumes from the last checkpoint."


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("lost") / "own", 3) as made:
        yield made


class Launch:
    """A launch of `machine_stub.py` on some of the machines."""

    def __init__(self, machines: Machines, folder: Path, number: int, local: int = 1, **plan: Any) -> None:
        self.folder, self.machines = folder, list(machines)[:number]
        here = {"machines": number, "processes": number * local, "host": "10.78.0.1", "port": 4300}
        waits = {"join_s": RUN_S, "heartbeat_s": PATIENCE_S}
        self.programs: list[Program] = []
        for rank, machine in enumerate(self.machines):
            given = json.dumps({**here, **waits, **plan, "rank": rank})
            self.programs.append(machine.start([sys.executable, STUB, str(folder), given]))
        self.ranks = range(number * local)

    def order(self, name: str, text: str = "") -> None:
        """Leaves a file that the workers read."""
        (self.folder / f"{name}.new").write_text(text)
        (self.folder / f"{name}.new").rename(self.folder / name)

    def run(self) -> "Launch":
        """Waits until all ranks have summed."""
        until(
            lambda: all((self.folder / f"ready{rank}").exists() for rank in self.ranks) or any(self.codes()),
            RUN_S,
            self.output,
        )
        assert not any(self.codes()), self.output()
        return self

    def codes(self) -> list[int | None]:
        return [program.code for program in self.programs]

    def output(self) -> str:
        return "\n".join(program.output for program in self.programs)

    def end(self) -> list[str]:
        """Waits until nothing runs on any machine; returns what each has said as an error."""
        said = []
        for program in self.programs:
            program.wait(WAIT_S)
        for machine in self.machines:
            machine.wait_until_idle()
        for program in self.programs:
            assert "Traceback" not in program.output, program.output
            assert "frame #" not in program.output, program.output
            errors = [line for line in program.output.splitlines() if line.startswith("Error: ")]
            assert len(errors) <= 1, program.output
            said.append("".join(errors))
        return said


def assert_said(said: str, text: str) -> None:
    """What was said begins with a text, in which `N` is the time until it was seen: at most 10 s over the patience."""
    found = re.match(re.escape(text).replace(r"\ N\ ", r"\ (\d+)\ "), said)
    assert found is not None, said
    assert PATIENCE_S <= int(found[1]) <= PATIENCE_S + 10


def test_a_good_end_over_a_bad_cable(machines: Machines, tmp_path: Path) -> None:
    """50 ms each way and lost frames are no failure; nobody had to name an interface."""
    launch = Launch(machines, tmp_path, 2).run()
    machines[1].slow_down(delay_s=0.05, loss=0.01)
    try:
        for rank in launch.ranks:
            (tmp_path / f"ready{rank}").unlink()
        launch.run()
        launch.order("stop")
        assert launch.end() == ["", ""]
        assert launch.codes() == [0, 0]
    finally:
        machines[1].speed_up()


def test_a_worker_that_fails(machines: Machines, tmp_path: Path) -> None:
    """Its machine and rank are named on both, at once, and both end with its code."""
    launch = Launch(machines, tmp_path, 2, 2).run()
    launch.order("fail2", "7")
    said = launch.end()
    assert launch.codes() == [7, 7]
    assert said[0] == said[1]
    assert said[0].startswith("Error: The worker of rank 2 on machine 1 (m1, 10.78.0.2) ended with exit code 7;")
    assert said[0].endswith(RESUMES)


def test_a_worker_that_is_killed(machines: Machines, tmp_path: Path) -> None:
    launch = Launch(machines, tmp_path, 2).run()
    worker = psutil.Process(launch.programs[0].pid).children()[0]
    worker.kill()
    said = launch.end()
    assert launch.codes() == [137, 137]
    assert said[0] == said[1]
    assert "The worker of rank 0 on machine 0 (m0, 10.78.0.1) was ended by SIGKILL (so does the kernel when" in said[0]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_launcher_that_is_killed(machines: Machines, tmp_path: Path, killed: int) -> None:
    """Its worker, which waits in a collective for one that does not come, ends with it."""
    launch = Launch(machines, tmp_path, 2).run()
    launch.order(f"hang{1 - killed}")
    until((tmp_path / f"hangs{1 - killed}").exists, WAIT_S, launch.output)
    os.kill(launch.programs[killed].pid, signal.SIGKILL)
    machines[killed].wait_until_idle()
    said = launch.end()
    assert launch.codes()[1 - killed] == 1
    if killed:
        assert_said(said[0], "Error: Machine 1 (m1, 10.78.0.2) has not been heard of for N s: it is down, or cut")
    else:
        assert said[1].startswith("Error: The launcher of machine 0 (m0, 10.78.0.1) has ended: it was killed, or its")


def test_a_machine_that_loses_its_power(machines: Machines, tmp_path: Path) -> None:
    launch = Launch(machines, tmp_path, 2).run()
    machines[1].kill(silently=True)
    try:
        said = launch.end()
    finally:
        machines[1].boot()
    assert launch.codes()[0] == 1
    assert_said(said[0], "Error: Machine 1 (m1, 10.78.0.2) has not been heard of for N s: it is down, or cut off")
    assert said[0].endswith(RESUMES)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_machine_that_is_cut_off(machines: Machines, tmp_path: Path, cut: int) -> None:
    """The others name it, and it knows of itself."""
    launch = Launch(machines, tmp_path, 3).run()
    machines[cut].cut()
    try:
        said = launch.end()
    finally:
        machines[cut].join()
    assert launch.codes() == [1, 1, 1]
    if cut:
        for other in (0, 2):
            assert_said(said[other], "Error: Machine 1 (m1, 10.78.0.2) has not been heard of for N s: it is down,")
        assert_said(said[1], "Error: Machine 1 (m1, 10.78.0.2) has not reached machine 0 (m0, 10.78.0.1) for N s:")
    else:
        both = "Machine 1 (m1, 10.78.0.2) and machine 2 (m2, 10.78.0.3)"
        text = f"Error: {both} have not been heard of for N s by machine 0 (m0, 10.78.0.1), which is itself cut off"
        assert_said(said[0], text)
        for other in (1, 2):
            assert f"Error: Machine {other} (m{other}, 10.78.0.{other + 1}) has not reached machine 0" in said[other]


def test_runs_and_their_doctor(machines: Machines, tmp_path: Path) -> None:
    """What trains ends with its launcher, also within a step, and the other machine says whose it was."""
    place = {"num_machines": 2, "num_processes": 2, "main_process_ip": "10.78.0.1", "main_process_port": 4301}
    launch_file = tmp_path / "launch.yaml"
    launch_file.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", **place}))
    (tmp_path / "train.jsonl").write_text(lines(64))
    alerts = tmp_path / "alerts"
    guard = {"alert": f"""sh -c 'printf "%s\\n" "$(cat)" >> {alerts}'"""}
    recipe = Place(tmp_path, None).recipe(length={"steps": 1_000_000}, guard=guard)  # type: ignore[arg-type]
    waits = ["--join-timeout", str(RUN_S), "--heartbeat-timeout", str(PATIENCE_S)]
    words = [*by_finetune(launch_file, str(recipe)), *waits, "--machine_rank"]
    programs = [machine.start([*words, str(rank)]) for rank, machine in enumerate(machines[:2])]
    steps = tmp_path / "run" / "metrics.jsonl"
    until(
        lambda: steps.exists() or any(program.code is not None for program in programs),
        RUN_S,
        lambda: programs[0].output,
    )
    assert steps.exists(), programs[0].output + programs[1].output
    os.kill(programs[1].pid, signal.SIGKILL)
    machines[1].wait_until_idle()
    assert "the launcher is gone. Ended; the last checkpoint stays." in programs[1].output
    assert programs[0].wait(WAIT_S) == 1
    machines[0].wait_until_idle()
    assert "Error: Machine 1 (m1, 10.78.0.2) has not been heard of for " in programs[0].output
    # Rank 0 may have told of it, before it was ended.
    told = [json.loads(line) for line in alerts.read_text().splitlines()]
    assert {alert["event"] for alert in told} == {"failed"}
    assert any("Another rank is gone" in alert["text"] or "Machine 1 (m1" in alert["text"] for alert in told)
    # A worker that stands still is named on the other machine, and both launches end.
    programs = [
        machine.start([*words, str(rank), "guard.stall_s=8", "log.every_steps=1"])
        for rank, machine in enumerate(machines[:2])
    ]
    until(lambda: re.search(r"^step \d+2/", programs[0].output, re.M) is not None, RUN_S, lambda: programs[0].output)
    (worker,) = (process for process in machines[1].processes() if process.ppid() == programs[1].pid)
    worker.send_signal(signal.SIGSTOP)
    for program in programs:
        assert program.wait(RUN_S) == 1
    assert "No answer comes from rank 1 on machine 1 (m1)" in programs[0].output, programs[0].output[-2500:]
    assert "The worker of rank 0 on machine 0 (m0, 10.78.0.1) ended with exit code 1" in programs[1].output
    for machine in machines[:2]:
        machine.wait_until_idle()
    # A launch that says something else is refused by both, with exit code 2.
    programs = [
        machine.start([*words, str(rank), f"optim.lr={rank + 1}e-3"]) for rank, machine in enumerate(machines[:2])
    ]
    for program in programs:
        assert program.wait(RUN_S) == 2
        assert program.output.count("Error: ") == 1
        assert "Recipe: optim.lr is 0.002 on machine 1, and 0.001 on machine 0." in program.output
    # A machine that cannot read its recipe says so to the other, which would wait for it.
    for failed in (0, 1):
        files = [str(tmp_path / "nowhere.yaml") if rank == failed else str(recipe) for rank in range(2)]
        programs = [
            machine.start([*by_finetune(launch_file, files[rank]), *waits, "--machine_rank", str(rank)])
            for rank, machine in enumerate(machines[:2])
        ]
        for rank, program in enumerate(programs):
            assert program.wait(RUN_S) == 2
            assert program.output.count("Error: ") == 1
            named = f"nothing was started. On machine {failed} (m{failed}): " if rank != failed else ""
            assert re.search(rf"Error: .*{re.escape(named)}.*nowhere\.yaml", program.output), program.output
    # The same, and the network, looked at ahead.
    told = [sys.executable, "-m", "finetune", "doctor", "--machines", "--config_file", str(launch_file), "--recipe"]
    programs = [
        machine.start([*told, file, *waits, "--machine_rank", str(rank)])
        for rank, (machine, file) in enumerate(zip(machines[:2], (str(recipe), "nowhere.yaml"), strict=True))
    ]
    for program in programs:
        assert program.wait(RUN_S) == 1
        assert program.output.count("nowhere.yaml") == 1, program.output
    words = [sys.executable, "-m", "finetune", "doctor", "--machines", "--config_file", str(launch_file)]
    programs = [machine.start([*words, "--machine_rank", str(rank)]) for rank, machine in enumerate(machines[:2])]
    for program in programs:
        assert program.wait(RUN_S) == 0, program.output
        assert "ok       machines: machine 1 (m1, 10.78.0.2) at eth0, no GPU" in program.output
        assert re.search(r"ok       link: 0 to 1: \d+\.\d\d ms there and back", program.output)
