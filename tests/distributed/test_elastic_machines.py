"""An elastic launch whose machines die, return and are more takes the path of one that nothing disturbs."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from forkserver import until
from harness import RUN_S, Launcher, Result, assert_same_path, environment
from inside import mlp
from machines import LOOPBACK, Machine, Machines, Program
from ranks import PARAGRAPH, by_finetune, launch_file

from finetune.utils.exit_codes import REQUEUE

pytestmark = [pytest.mark.machines, pytest.mark.xdist_group("machines_elastic")]

# A lost machine is known in 10 s: longer than a busy machine lets a process wait for a core.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=10,join_timeout=540,read_timeout=10"
# Python imports it when it starts. Two machines begin a round once both have come, however long one takes, and one
# begins a round alone when the test says so: torch has a time for that.
LAST_CALL = """
import os, sys
from datetime import timedelta
class Patience:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend":
            from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
            last_call = lambda self: timedelta(seconds=0.1 if os.path.exists(os.environ["ALONE"]) else 540)
            RendezvousTimeout.last_call = property(last_call)
sys.meta_path.insert(0, Patience())
"""
RECIPE = mlp(
    Path("run"),
    task={"name": "troubled_task:mlp"},
    batch={"global_size": 12, "micro_size": 2},
    length={"steps": 60},
    checkpoint={"every_steps": 2, "keep": 2},
    # Adam would divide rounding by rounding.
    optim={"name": "SGD", "lr": 1e-2, "args": {"momentum": 0.9}},
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    # Whose own names lead to themselves, as Debian sets it up: the interface is that of the way to the store.
    with Machines(tmp_path_factory.mktemp("machines") / "own", 4, own_address=LOOPBACK) as made:
        yield made


@pytest.fixture
def host(machines: Machines) -> Iterator[Machine]:
    """The machine that hosts the store, and computes nothing."""
    last: Machine = machines[3]
    store = last.start([sys.executable, "-m", "finetune", "rendezvous"])
    where = "Machines meet here: --main_process_ip m3 --main_process_port 29500"
    until(lambda: where in store.output, RUN_S, lambda: store.output)
    yield last
    machines.kill_programs()


class Disturbed:
    """An elastic run, of which rank 0 stops in every round at one of its micro-batches until it is let go."""

    def __init__(self, machines: Machines, folder: Path, config: str = "ddp") -> None:
        self.machines, self.folder = machines, folder
        self.gate, self.reached = folder / "gate", folder / "gate.reached"
        self.alone, self.asked, self.site = folder / "alone", folder / "asked", folder / "site"
        self.site.mkdir()
        (self.site / "sitecustomize.py").write_text(LAST_CALL)
        self.recipe, self.file = folder / "recipe.yaml", folder / "launch.yaml"
        self.recipe.write_text(yaml.safe_dump({**RECIPE, "output": {"dir": str(folder / "run"), "overwrite": True}}))
        self.file.write_text(yaml.safe_dump({**launch_file(config), "num_processes": 1}))
        self.programs: list[Program] = []
        self.restarts = "4"

    def start(self, number: int) -> Program:
        options = ["--nnodes", "1:2", "--max_restarts", self.restarts, "--main_process_ip", "m3", "--rdzv_conf", QUICK]
        hold = {"rank": 0, "at": 20, "file": str(self.gate), "takes": True}
        env = {"TROUBLE": json.dumps({"hold": hold, "asked": str(self.asked)}), "ALONE": str(self.alone)}
        env["PYTHONPATH"] = f"{environment()['PYTHONPATH']}:{self.site}"
        words = by_finetune(self.file, *options, str(self.recipe))
        self.programs.append(self.machines[number].start(words, env=env))
        return self.programs[-1]

    def said(self) -> str:
        return "\n".join(program.output[-3000:] for program in self.programs)

    def wait_at_gate(self) -> None:
        """Returns once rank 0 of a new round has come to the gate."""
        self.until(self.reached.exists)
        self.reached.unlink()

    def stop(self, program: Program) -> None:
        """Has a machine leave, and lets go of rank 0 once the machine's worker knows."""
        self.asked.unlink(missing_ok=True)
        program.signal(signal.SIGTERM)
        self.until(self.asked.exists)
        self.gate.touch()
        assert program.wait() == REQUEUE, self.said()

    def until(self, true: Callable[[], bool]) -> None:
        """Returns once something is true; fails if a launcher ends before it, other than by its machine's end."""

        def found() -> bool:
            ended = (None, -signal.SIGKILL, REQUEUE, 128 + signal.SIGTERM)
            assert all(program.code in ended for program in self.programs), self.said()
            return true()

        until(found, RUN_S, self.said)


def test_machines_die_and_return(machines: Machines, host: Machine, launcher: Launcher, tmp_path: Path) -> None:
    run = Disturbed(machines, tmp_path)
    first, second = run.start(0), run.start(1)
    run.wait_at_gate()
    # A worker is killed.
    (worker,) = [process for process in machines[1].processes() if process.ppid() == second.pid]
    worker.kill()
    run.wait_at_gate()
    # A machine dies, and the others hear that it does.
    run.alone.touch()
    machines[1].kill()
    run.wait_at_gate()
    run.alone.unlink()
    # It returns.
    machines[1].boot()
    second = run.start(1)
    run.until(lambda: "1 machine(s) wait to join" in first.output)
    run.gate.touch()
    run.wait_at_gate()
    assert first.output.count("2 machine(s), rank 0 is here") == 3
    # The machine of rank 0 loses its power.
    run.alone.touch()
    machines[0].kill(silently=True)
    run.wait_at_gate()
    run.gate.touch()
    assert second.wait() == 0, run.said()
    machines[1].wait_until_idle()
    machines[0].boot()

    result = Result(0, run.said(), tmp_path / "run")
    starts = result.facts["starts"]
    assert [start["processes"] for start in starts] == [2, 2, 1, 2, 1], run.said()
    begins = [start["from_step"] for start in starts]
    assert begins == sorted(begins)
    assert begins[1] > 0, "`output.overwrite` is for the first round"
    assert_same_path(launcher.one("single", RECIPE), result, 1e-5)


def test_machines_are_preempted_and_a_spare_one_steps_in(
    machines: Machines, host: Machine, launcher: Launcher, tmp_path: Path
) -> None:
    """SIGTERM has all save; the others go on without that machine, which is no failure that counts."""
    run = Disturbed(machines, tmp_path, "fsdp")
    run.restarts = "0"
    first, second = run.start(0), run.start(1)
    run.wait_at_gate()
    spare = run.start(2)
    run.until(lambda: "This one waits to take the place of another" in spare.output)
    run.stop(second)
    run.wait_at_gate()
    assert spare.code is None
    run.alone.touch()
    run.stop(spare)
    run.wait_at_gate()
    run.gate.touch()
    assert first.wait() == 0, run.said()
    result = Result(0, run.said(), tmp_path / "run")
    assert [start["processes"] for start in result.facts["starts"]] == [2, 2, 1], run.said()
    assert_same_path(launcher.one("single", RECIPE), result, 1e-5)


def test_what_ends_an_elastic_launch_is_said(machines: Machines, host: Machine, tmp_path: Path) -> None:
    run = Disturbed(machines, tmp_path)
    run.alone.touch()
    program = run.start(0)
    run.wait_at_gate()
    # In the middle of a step: torch's agent waits in calls that no timeout ends.
    machines[0].cut()
    assert program.wait() == 2
    machines[0].wait_until_idle()
    machines[0].join()
    (said,) = PARAGRAPH.findall(program.output)
    assert "The store at m3:29500, where the machines of this launch meet, does not answer" in said
    run.gate.touch()
    program = run.start(0)
    assert program.wait() == 0, program.output
    late = run.start(1)
    assert late.wait() == 2
    (said,) = PARAGRAPH.findall(late.output)
    assert "The launch that has met at m3:29500 is over" in said
    os.kill(host.processes()[0].pid, signal.SIGKILL)
    alone = run.start(1)
    assert alone.wait() == 2
    (said,) = PARAGRAPH.findall(alone.output)
    assert "The store at m3:29500, where the machines of this launch meet, does not answer" in said
    assert "Traceback" not in late.output + alone.output
