"""Launchers on several machines meet before they start anything: what they compare, and what each of them says."""

import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ROOT
from inside import mlp
from machines import LOOPBACK, Machines, Program, address
from ranks import PARAGRAPH

from finetune.distributed.launch.machine_facts import library_versions

pytestmark = [pytest.mark.machines, pytest.mark.xdist_group("machines_meet")]

FIRST, SIXTH, ELSEWHERE = "10.78.0.1", "fd78::1", "10.78.0.77"
# As the launcher has it.
QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
SCRIPT = str(ROOT / "tests/support/meetings.py")
# A machine that looks for the first one beyond its limit has up to 5 s for one more try, and 10 s to say so; on a busy
# machine longer. What does not end by then waits for as long as a meeting may take, 400 s.
BEYOND_S = 40.0


def case(rank: int, host: str = FIRST, **more: Any) -> dict[str, Any]:
    facts = {"rank": rank, **more.pop("facts", {})}
    return {"host": host, "facts": facts, **more}


def pair(*, other: dict[str, Any], ours: dict[str, Any] | None = None) -> list[dict[str, Any] | None]:
    """Two machines that say something else each."""
    return [case(0, facts=ours or {}), case(1, facts=other), None]


THREE = {"num_machines": 3, "num_processes": 3}
PATCHED = {**library_versions(), "transformers": f"{library_versions()['transformers']}.post1"}
# What the three machines do in each meeting; None: a machine that stays away.
CASES: dict[str, list[dict[str, Any] | None]] = {
    "agree": [case(rank, facts=THREE, measure=True) for rank in range(3)],
    "ipv6": [case(0, SIXTH), case(1, SIXTH), None],
    "recipe": pair(
        ours={"recipe": {"optim.lr": 3e-4, "batch.size": 8}}, other={"recipe": {"optim.lr": 1e-4, "batch.size": 8}}
    ),
    "launch": [
        case(rank, facts={**THREE, "launch": {"fsdp_config.fsdp_version": 2 if rank == 0 else 1}}) for rank in range(3)
    ],
    "code": pair(ours={"code": {"a.py": "1", "b.py": "2"}}, other={"code": {"a.py": "1", "b.py": "3"}}),
    "python": pair(other={"versions": {**library_versions(), "Python": "3.99.1"}}),
    "torch": pair(other={"versions": {**library_versions(), "torch": "2.99.0+cu999"}}),
    "patch": pair(other={"versions": PATCHED}),
    "verb": pair(other={"verb": "doctor"}),
    "twice": [case(0, facts=THREE), case(1, facts=THREE), case(1, facts=THREE)],
    "number": pair(other=THREE),
    "zero twice": [case(0, facts=THREE), case(0, facts=THREE), case(1, facts=THREE)],
    "missing": [case(0, facts=THREE, **{"join_s": 2, "await": 2}), case(1, facts=THREE), None],
    "none": [None, case(1, join_s=2), None],
    "port": [case(0, join_s=2), case(1, join_s=2, other_port=True), None],
    "address": [case(0, ELSEWHERE, join_s=2), case(1, ELSEWHERE, join_s=2), None],
    "route": [case(0, "10.99.0.1", join_s=2), case(1, "10.99.0.1"), None],
    "name": [case(0, "nobody.invalid", join_s=2), case(1, "nobody.invalid", join_s=2), None],
    "own name": [case(0, "m0"), case(1, "m0"), None],
    "clock": [case(0), case(1, clock_s=3600.0), None],
    "interface": [case(0), case(1, env={"GLOO_SOCKET_IFNAME": "ib0"}), None],
}

Said = dict[str, dict[int, dict[str, Any]]]


def hold(machines: Machines, cases: dict[str, list[dict[str, Any] | None]], port: int, folder: Path) -> Said:
    """What each machine says in each meeting, by the meeting's name and the machine's number."""
    ports = itertools.count(port)
    lists: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for name, parts in cases.items():
        place = next(ports)
        for number, part in enumerate(parts):
            about = {"name": name, "machine": number, "number": len(parts), "folder": str(folder)}
            own = part or {}
            lists[number].append({**own, **about, "port": place + 1000 if own.get("other_port") else place})
    programs: dict[int, Program] = {}
    for number, given in lists.items():
        file = folder / f"meetings-{port}-{number}.json"
        file.write_text(json.dumps(given))
        programs[number] = machines[number].start([sys.executable, SCRIPT, str(file)], env=QUIET)
    found: Said = defaultdict(dict)
    for number, program in programs.items():
        assert program.wait() == 0, program.output
        for line in program.output.splitlines():
            assert line.startswith("{"), program.output  # nothing else is printed, by torch neither
            said = json.loads(line)
            found[said["name"]][number] = said
    for machine in machines:
        machine.wait_until_idle()
    return found


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("meet") / "own", 3, own_address=LOOPBACK) as made:
        yield made


@pytest.fixture(scope="module")
def said(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Said:
    return hold(machines, CASES, 4100, tmp_path_factory.mktemp("cases"))


def test_machines_that_agree(said: Said) -> None:
    for number, found in said["agree"].items():
        assert found["hosts"] == ["m0", "m1", "m2"], number
        assert found["variables"] == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
        assert found["warnings"] == found["problems"] == []
        assert found["links"] == said["agree"][0]["links"]
        for one, row in found["links"].items():
            assert set(row) == {"0", "1", "2"} - {one}
            assert all(not link["problem"] and link["latency_s"] > 0 for link in row.values())
    assert {found["interface"] for found in said["ipv6"].values()} == {"eth0"}


EVERYWHERE = {
    "recipe": r"^The machines .* nothing was s.*d\. Recipe: optim.lr is 0.0001 on machine 1, and 0.0003 on machine 0",
    "launch": r"options: fsdp_config.fsdp_version is 1 on machines 1 and 2, and 2 on machine 0\. Start with the same",
    "code": r"Files of finetune: b.py on machine 1 differ from those on machine 0\. Install the same finetune",
    "python": r"Versions: Python is 3.99.1 on machine 1, and 3\.",
    "torch": r"Versions: torch is 2.99.0\+cu999 on machine 1, and 2\.",
    "verb": r"verb is doctor on machine 1, and launch on machine 0\.",
    "twice": r"Rank 1 \(machine_rank\) is given twice, on m[12] \(10.78.0.[23]\) and m[12] \(10.78.0.[23]\)\. Give",
    "zero twice": r"Rank 0 \(machine_rank\) is given to m1 \(10.78.0.2\), and main_process_ip 10.78.0.1 is no address",
    "number": r"num_machines is 3 on machine 1, and 2 on machine 0; num_processes is 3 on machine 1, and 2 on ",
    "interface": r"On machine 1 \(m1\): GLOO_SOCKET_IFNAME is ib0, an interface that this machine does not have",
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_differs_is_said_on_every_machine(said: Said, name: str) -> None:
    assert len(said[name]) == sum(part is not None for part in CASES[name])
    texts = {found["text"] for found in said[name].values()}
    assert len(texts) == 1
    assert re.search(EVERYWHERE[name], text := texts.pop()), text
    assert "\n" not in text
    assert max(found["took_s"] for found in said[name].values()) < BEYOND_S + 30


def test_a_machine_that_does_not_come(said: Said) -> None:
    texts = [found["text"] for found in said["missing"].values()]
    assert len(texts) == 2
    for text in texts:
        assert "Machine 2 has not come within 2 s; here are machine 0 (m0, 10.78.0.1), machine 1 (m1, 10.78" in text
        assert "--machine_rank 2 and --main_process_ip 10.78.0.1" in text
    alone = said["none"][1]
    assert "Machine 1 has waited 2 s for machine 0 at 10.78.0.1" in alone["text"]
    assert "that machine answers, but nothing listens at the port" in alone["text"]
    assert max(found["took_s"] for found in [alone, *said["missing"].values()]) < 2 + BEYOND_S


def test_what_machine_0_is_told_to_be_and_is_not(said: Said) -> None:
    """A wrong port, an address that nobody has, none that there is a way to, an unknown name."""
    assert "Machine 1 has not come within 2 s" in said["port"][0]["text"]
    assert "has another main_process_port" in said["port"][1]["text"]
    assert "main_process_ip 10.78.0.77 is no address there" in said["address"][0]["text"]
    assert "Machine 1 has waited 2 s for machine 0 at 10.78.0.77" in said["address"][1]["text"]
    for found in said["route"].values():
        assert "main_process_ip is 10.99.0.1, to which this machine has no route" in found["text"]
        assert "Addresses of this machine: 10.78.0." in found["text"]
    assert "main_process_ip is nobody.invalid, which has no address here" in said["name"][0]["text"]
    assert "its name has no address here" in said["name"][1]["text"]
    for name in ("port", "address", "route", "name"):
        assert max(found["took_s"] for found in said[name].values()) < 2 + BEYOND_S


def test_a_name_that_is_each_machine_itself(said: Said) -> None:
    """Debian gives a machine's own name 127.0.1.1, while the others know its address."""
    own = said["own name"][0]["text"]
    assert own.startswith("main_process_ip is m0, which is 127.0.1.1 here: the machine itself, to each machine.")
    assert "10.78.0.1 (eth0)" in own
    assert f"Machine 0 (m0): {own}" in said["own name"][1]["text"]


def test_differences_that_do_not_matter_are_said(said: Said) -> None:
    for found in said["patch"].values():
        assert len(found["warnings"]) == 1
        assert f"Machine 1 (m1, 10.78.0.2) has transformers {PATCHED['transformers']} (" in found["warnings"][0]
    for found in said["clock"].values():
        assert len(found["warnings"]) == 1
        assert "The clock of machine 1 (m1, 10.78.0.2) is 3,600 s ahead of that of machine 0" in found["warnings"][0]


def test_a_firewall_is_found(machines: Machines, tmp_path: Path) -> None:
    """The port of the rendezvous is open, as a first look would show; others are not."""
    machines[0].allow_only(4200, 4201)
    try:
        found = hold(machines, {"wall": [case(0), case(1), None]}, 4200, tmp_path)["wall"]
    finally:
        machines[0].allow_all()
    text = found[0]["text"]
    assert text == found[1]["text"]
    assert "Machine 1 (m1, 10.78.0.2) cannot connect to machine 0 (no answer from 10.78.0.1 port" in text
    assert "open the firewall" in text
    assert max(part["took_s"] for part in found.values()) < 5 + BEYOND_S


def test_torchrun_starts_the_same_run_or_it_is_refused_on_each_machine(machines: Machines, tmp_path: Path) -> None:
    """Ranks compare what launchers other than `finetune launch` do not, and find the interface."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(mlp(tmp_path / "run", batch={"global_size": 4, "micro_size": 2})))

    def torchrun(*values: str) -> list[Program]:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
        meeting = ["--master_addr", address(0), "--master_port", "4300"]
        train = [str(ROOT / "scripts/train.py"), str(recipe), "length.steps=2"]
        return [
            machine.start([*words, *meeting, "--node_rank", str(machine.number), *train, value])
            for machine, value in zip(machines, values, strict=False)
        ]

    for program in torchrun("optim.lr=0.1", "optim.lr=0.2"):
        assert program.wait() == 1, "torchrun's own code"
        (said,) = PARAGRAPH.findall(program.output)
        assert "nothing was trained. Recipe: optim.lr is 0.2 on machine 1, and 0.1 on machine 0. Start the same" in said
    assert not (tmp_path / "run").exists()
    programs = torchrun("optim.lr=0.1", "optim.lr=0.1")
    assert [program.wait() for program in programs] == [0, 0], "\n".join(program.output for program in programs)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["runs"]["world_size"] == 2
