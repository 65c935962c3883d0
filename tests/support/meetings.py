"""Holds one rendezvous after the other on a machine: `meetings.py FILE`, a list of what this machine says in each.

Prints how each went, as JSON: the paragraph, or what was found, and the seconds it took. Torch is imported once. All
machines begin each meeting together, those that stay away too: they wait for files of each other.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed

from finetune.distributed.launch import machine_links, network_interface, rendezvous
from finetune.distributed.launch.machine_facts import MachineFacts, library_versions
from finetune.utils.errors import BackendError

look = rendezvous._Judge.look


def look_once_come(judge: Any) -> None:
    """Does not see that the time is over before as many machines have come as the case says."""
    if int(judge._store.add("joined", 0)) < case.get("await", 0):
        judge._deadline = max(judge._deadline, time.monotonic() + 1)
    look(judge)


rendezvous._Judge.look = look_once_come  # type: ignore[method-assign]
lines: list[str] = []
assert torch.distributed.is_available()
for case in json.loads(Path(sys.argv[1]).read_text()):
    (Path(case["folder"]) / f"{case['name']}.{case['machine']}").touch()
    while len(list(Path(case["folder"]).glob(f"{case['name']}.*"))) < case["number"]:
        time.sleep(0.02)
    if "host" not in case:
        continue
    here = {"rank": 0, "host": os.uname().nodename, "num_machines": 2, "num_processes": 2, "verb": "launch"}
    facts = MachineFacts(**{**here, "versions": library_versions(), **case.get("facts", {})})
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(case.get("env", {}))
    ahead = case.get("clock_s", 0.0)
    machine_links.time = SimpleNamespace(
        time=lambda ahead=ahead: time.time() + ahead, perf_counter=time.perf_counter, monotonic=time.monotonic
    )
    plan = rendezvous.MachinePlan(case["host"], case["port"], facts, case.get("join_s", 400.0), 3.0)
    meeting, began = rendezvous.Meeting(plan, lines.append, go_on=case.get("go_on", False)), time.monotonic()
    found = {"name": case["name"], "rank": facts.rank}
    try:
        met = meeting.hold()
        found |= {
            "interface": met.interface.name,
            "variables": network_interface.interface_variables(met.interface, {}),
            "warnings": met.warnings,
            "problems": met.problems,
            "hosts": [other.host for other in met.machines],
            "links": {one: {other: vars(link) for other, link in row.items()} for one, row in met.links.items()},
        }
        met.store.add("done", 1)
        while facts.rank == 0 and int(met.store.add("done", 0)) < facts.num_machines:
            time.sleep(0.05)  # the store ends with its host
    except BackendError as error:
        found["text"] = str(error)
        found["took_s"] = time.monotonic() - began
        meeting.tell_late_ones()
    found["whole_s"] = time.monotonic() - began
    print(json.dumps(found), flush=True)
os._exit(0)
