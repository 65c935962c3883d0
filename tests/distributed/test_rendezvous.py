"""Parts of a rendezvous of several machines that need only one: facts, links, interfaces, and who is alive."""

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import LIMIT_S, WAIT_S
from ranks import free_port

from finetune.distributed.launch import heartbeat, machine_facts, machine_links, network_interface, rendezvous
from finetune.distributed.launch.heartbeat import Heartbeat
from finetune.distributed.launch.machine_facts import MachineFacts
from finetune.distributed.launch.machine_links import LinkListener
from finetune.distributed.launch.network_interface import NetworkInterface
from finetune.distributed.launch.rendezvous import MachinePlan
from finetune.utils.errors import BackendError

FACTS = MachineFacts(rank=0, host="a", num_machines=2, num_processes=2, verb="launch")


def facts(rank: int, **changes: Any) -> MachineFacts:
    return MachineFacts(**{**vars(FACTS), "rank": rank, "host": "abcdefgh"[rank], **changes})


def test_a_forgotten_copy_of_own_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a project, in which one file each has not come along, or is an old one."""
    files = {
        "mine.py": "import os, torch, losses\nfrom nets.deep import net\nfrom finetune.tasks import Task",
        "losses.py": "import mine",
        "nets/__init__.py": "",
        "nets/deep.py": "from . import net",
        "finetune/__init__.py": "",  # a checkout
        "metric.py": "import nowhere",
        "unrelated.py": "",
    }
    changed = {"old": "losses.py", "missing": "nets/deep.py", "other": "unrelated.py"}
    recipe = {
        "task": {"name": "mine:task", "loss": None},
        "eval": {"metrics": ["accuracy", "metric.py:f"]},
        "optim": {"name": "torch.optim:AdamW"},  # of a library
    }
    found = {}
    for name in ("whole", *changed):
        for place, text in files.items():
            (tmp_path / name / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / place).write_text(text)
        if name in changed:
            (tmp_path / name / changed[name]).write_text("# another")
        if name == "missing":
            (tmp_path / name / changed[name]).unlink()
        monkeypatch.chdir(tmp_path / name)
        found[name] = facts(1, own_code=machine_facts.own_code_digests(recipe))
    whole = facts(0, own_code=found["whole"].own_code)
    assert set(whole.own_code) == {*files} - {"unrelated.py", "finetune/__init__.py"}
    says = "Code that the recipe names: {} on machine 1 differ from those on machine 0. Copy the same files to every "
    assert machine_facts.find_differences([whole, found["other"]]) == []
    for name, shown in (("old", "losses.py"), ("missing", "nets/deep.py (missing)")):
        (said,) = machine_facts.find_differences([whole, found[name]])
        assert said == says.format(shown) + "machine."


def test_differences_name_the_machines_that_share_them() -> None:
    values = {f"key{number}": number for number in range(9)}
    first = facts(0, recipe={"lr": 1.0, "path": "{a}", **values}, devices=["H100", "H100"])
    others = dict.fromkeys(values, -1)
    machines = [
        first,
        facts(1, recipe={"lr": 2.0, "path": "{b}", **values}, devices=["H100"]),
        facts(2, recipe={"lr": 2.0, "path": "{a}", **values}),
        facts(3, recipe={"lr": 1.0, **others}, devices=["H100", "H200"]),
    ]
    recipe, devices = machine_facts.find_differences(machines)
    assert (
        "lr is 2.0 on machines 1 and 2, and 1.0 on machine 0; path is {b} on machine 1, and {a} on machine 0" in recipe
    )
    assert "path is nothing on machine 3, and {a} on machine 0" in recipe
    assert "; and 6 more. Start" in recipe
    assert devices == ("Devices: no GPU on machine 2, and 2 x H100 on machine 0. Start on machines of one kind.")
    assert machine_facts.find_differences([first, first]) == []
    warned = machine_facts.find_warnings(machines, {1: 29.0, 2: -7200.0})
    assert [text.split(" has ")[0].split(" is ")[0] for text in warned] == [
        "Machine 1 (b)",
        "The clock of machine 2 (c)",
        "Machine 3 (d)",
    ]
    assert "7,200 s behind that of machine 0" in warned[1]
    assert "1 x H100, 1 x H200, machine 0 has 2 x H100: the slowest" in warned[2]


def test_only_a_machine_is_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    token = bytes(range(16))
    listener = LinkListener("127.0.0.1", 3)
    link = machine_links.try_link("127.0.0.1", listener.port, 3, token)
    assert not link.problem
    assert abs(link.clock_s) < 1
    assert link.latency_s > 0
    assert "something else answers" in machine_links.try_link("127.0.0.1", listener.port, 2, token).problem
    listener.close()
    assert "Connection refused" in machine_links.try_link("127.0.0.1", listener.port, 3, token).problem
    monkeypatch.setattr(machine_links, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        # A program that hears and says nothing.
        link = machine_links.try_links({3: ("127.0.0.1", other.getsockname()[1])}, token)[3]
    assert "no answer from 127.0.0.1" in link.problem


def test_interfaces() -> None:
    with pytest.raises(BackendError, match=r"main_process_ip is localhost, which is .* here: the machine itself"):
        network_interface.find_interface("localhost")
    with pytest.raises(socket.gaierror):
        network_interface.find_interface("nobody.invalid")
    found = NetworkInterface("eth0", "10.0.0.2", "10.0.0.1")
    assert network_interface.named_interface(found, {}) == found
    with pytest.raises(BackendError, match="GLOO_SOCKET_IFNAME is ib7, an interface that this machine does not have"):
        network_interface.named_interface(found, {"GLOO_SOCKET_IFNAME": "ib7"})
    assert network_interface.named_interface(found, {"GLOO_SOCKET_IFNAME": "lo"}).address == "127.0.0.1"
    assert network_interface.interface_variables(found, {"GLOO_SOCKET_IFNAME": "x"}) == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert network_interface.bare_host("[fd00::1]") == "fd00::1"


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port of this machine, which is each of several machines."""
    found = NetworkInterface("lo", "127.0.0.1", "127.0.0.1")
    monkeypatch.setattr(rendezvous, "find_interface", lambda host: found)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return free_port()


def meet(
    port: int,
    *machines: MachineFacts,
    join_s: float = WAIT_S,
    heartbeat_s: float = WAIT_S,
    say: Callable[[str], Any] = str,
) -> list[Any]:
    """What each of several launchers in this process comes to."""
    found: list[Any] = [None] * len(machines)

    def hold(index: int, own: MachineFacts) -> None:
        try:
            found[index] = rendezvous.Meeting(MachinePlan("127.0.0.1", port, own, join_s, heartbeat_s), say).hold()
        except BackendError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=hold, args=pair) for pair in enumerate(machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_machine_that_was_stopped_and_started_again_is_one(local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first launcher counts no more; a second one at the same time does."""
    monkeypatch.setattr(rendezvous, "_LIVE_S", LIMIT_S)
    store = rendezvous._store("127.0.0.1", local, host=True)
    judge = rendezvous._Judge(store, MachinePlan("127.0.0.1", local, FACTS), time.monotonic() + WAIT_S)

    def come(rank: int) -> int:
        number = int(store.add("joined", 1))
        store.set(f"alive/{number}", "0")
        store.set(f"facts/{number}", json.dumps(asdict(facts(rank))))
        return number

    come(1)
    judge.look()
    again = come(1)
    for count in range(3):
        store.set(f"alive/{again}", str(count))
        judge.look()
    assert not store.check(["verdict"])
    come(0)
    judge.look()
    assert json.loads(store.get("verdict"))["problems"] == []


def test_a_port_that_is_taken(local: int) -> None:
    with socket.create_server(("0.0.0.0", local)):
        text = meet(local, FACTS)[0]
    assert f"Port {local} of this machine, where all machines are to meet, is taken by another program" in text


def test_what_listens_and_is_no_machine(local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SAY_EVERY_S", 0.1)
    monkeypatch.setattr(rendezvous, "_SLACK_S", LIMIT_S)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if sum("something listens" in one for one in lines) == 2:
            monkeypatch.setattr(rendezvous, "_SLACK_S", -LIMIT_S)  # the time is over

    with socket.create_server(("127.0.0.1", local)):
        text = meet(local, facts(1), join_s=1.0, say=say)[0]
    assert "something listens at 127.0.0.1" in text
    assert all(line.startswith("Waiting for machine 0 (something listens at") for line in lines[-2:])


def test_a_plan_is_handed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MachinePlan("first", 1, facts(1, recipe={"a": [1, None]}), 5.0, 6.0)
    monkeypatch.setenv("PLAN", "")
    rendezvous.hand_over(plan, "PLAN")
    assert rendezvous.take_over("PLAN") == plan


def beats(local: int, monkeypatch: pytest.MonkeyPatch, **waits: float) -> list[Heartbeat]:
    """The heartbeats of two machines; nothing is killed or ended, since both are this process."""
    monkeypatch.setattr(heartbeat, "kill_descendants", lambda: None)
    monkeypatch.setattr(heartbeat, "_END_S", LIMIT_S)
    # Neither is silent, however long this process waits for a core; how that is found out has tests of its own.
    monkeypatch.setattr(Heartbeat, "_find_silence", lambda *_: None)
    found = [Heartbeat(met) for met in meet(local, facts(0), facts(1), **waits)]
    for beat in found:
        beat.start()
    return found


def finish(beats: list[Heartbeat], *codes: int) -> list[int]:
    """How launchers end whose workers have ended so."""
    found = [-1, -1]
    threads = [
        threading.Thread(target=lambda i=i, code=code: found.__setitem__(i, beats[i].finish(code)))
        for i, code in enumerate(codes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("code", [0, 75])
def test_machines_that_end_well(local: int, monkeypatch: pytest.MonkeyPatch, capfd: Any, code: int) -> None:
    """75: all is saved, because one of them was told to stop."""
    both = beats(local, monkeypatch)
    both[0].workers_ended([code])
    assert finish(both, code, code) == [code, code]
    assert "\nError: " not in capfd.readouterr().err


def test_an_error_of_the_user_is_said_by_the_workers(local: int, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    both = beats(local, monkeypatch)
    both[1].workers_ended([2])
    assert finish(both, 2, 2) == [2, 2]
    assert "\nError: " not in capfd.readouterr().err


def test_ranks_that_lost_others_wait_for_the_reason(local: int, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    both = beats(local, monkeypatch)
    both[0].workers_ended([69])
    assert not both[0].has_ended_workers
    both[1].workers_ended([None, -11])
    assert finish(both, 69, 139) == [139, 139]
    said = capfd.readouterr().err
    assert said.count("Error: The worker of rank 3 on machine 1 (b, 127.0.0.1) was ended by SIGSEGV;") == 2


def test_ranks_that_lost_others_for_no_reason(local: int, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    both = beats(local, monkeypatch, heartbeat_s=2.0)
    assert finish(both, 69, 69) == [1, 1]
    assert "have lost others, and no machine says why" in capfd.readouterr().err


def test_what_a_machine_cannot_read_it_does_not_know() -> None:
    """A machine that is cut off names itself, and not all the others."""
    met: Any = SimpleNamespace(
        store=None, plan=MachinePlan("a", 1, facts(1), 5.0, 10.0), machines=[facts(rank) for rank in range(3)]
    )
    beat, now = Heartbeat(met), time.monotonic()
    assert beat._find_silence(now + 9) is None
    ending = beat._find_silence(now + 11)
    assert ending is not None
    assert ending.text.startswith("Machine 1 (b) has not reached machine 0 (a) for 11 s: the network between")
    beat._reached = now + 11
    ending = beat._find_silence(now + 11)
    assert ending is not None
    assert "Machine 0 (a) and machine 2 (c) have not been heard of for 11 s by machine 1 (b), which is" in ending.text


def test_a_machine_that_stood_still_accuses_nobody() -> None:
    met: Any = SimpleNamespace(
        store=None, plan=MachinePlan("a", 1, facts(1), 5.0, 10.0), machines=[facts(rank) for rank in range(3)]
    )
    beat, now = Heartbeat(met), time.monotonic()
    beat._awake = now + 60
    assert beat._find_silence(now + 69) is None
    assert beat._find_silence(now + 71) is not None


def test_machines_that_fall_silent_together_are_named_together() -> None:
    """Machine 0 is cut off; it last heard of machine 2 two seconds after machine 1."""
    met: Any = SimpleNamespace(
        store=None, plan=MachinePlan("a", 0, facts(0), 5.0, 10.0), machines=[facts(rank) for rank in range(3)]
    )
    beat, now = Heartbeat(met), time.monotonic()
    beat._counts = {1: (b"1", now), 2: (b"1", now + 2)}
    beat._reached = now + 11
    assert beat._find_silence(now + 11) is None
    beat._reached = now + 13
    ending = beat._find_silence(now + 13)
    assert ending is not None
    assert "Machine 1 (b) and machine 2 (c) have not been heard of for 11 s by machine 0 (a), which is" in ending.text


def test_a_machine_is_given_up_while_others_stumble() -> None:
    """A machine that is gone ends the launch although another one is always late."""
    met: Any = SimpleNamespace(
        store=None, plan=MachinePlan("a", 0, facts(0), 5.0, 10.0), machines=[facts(rank) for rank in range(3)]
    )
    beat, now = Heartbeat(met), time.monotonic()
    for seconds in range(21):
        beat._counts = {1: (b"1", now), 2: (b"1", now + seconds - 6)}
        beat._reached = now + seconds
        ending = beat._find_silence(now + seconds)
        assert (ending is not None) == (seconds == 20)
    assert ending is not None
    assert ending.text.startswith("Machine 1 (b) has not been heard of for 20 s: it is down, or cut off")
