"""Rendezvous of the launchers of several machines, before any of them starts a worker.

Machine 0 hosts a store at the launch's port, which torchrun and the workers use after it. Each machine writes what it
is about to start, machine 0 compares, and all read the verdict: that they agree, or one paragraph on who differs in
what, is missing, or cannot be reached.

Calls of the store may hang on a link that is cut, since no timeout reaches a blocked send. So a thread makes them, and
the main thread watches it.
"""

import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from finetune.distributed.launch import machine_facts, machine_links
from finetune.distributed.launch.machine_facts import MachineFacts, capital, named_machines
from finetune.distributed.launch.machine_links import Link, LinkListener
from finetune.distributed.launch.network_interface import NetworkInterface, bare_host, find_interface, named_interface
from finetune.distributed.launch.predicted_environment import PredictedEnvironment, predict_environment
from finetune.utils.bounded_work import ends_within
from finetune.utils.errors import BackendError, FinetuneError
from finetune.utils.exit_codes import USER_ERROR, print_error

JOIN_TIMEOUT_S, HEARTBEAT_TIMEOUT_S = 300.0, 30.0

_POLL_S, _SAY_EVERY_S = 0.2, 30.0
# A launcher that waits counts up five times a second. One that stands still for so long has ended.
_LIVE_S = 5.0
# Beyond its limits, a store may take so long to answer.
_SLACK_S = 10.0
# After a refusal, machine 0 tells those that come so much later.
_LINGER_S = 10.0
# How long a machine that cannot start what it was given waits for the others, to tell them.
_TELL_S = 60.0


@dataclass(frozen=True)
class MachinePlan:
    """A launch that one machine of several is about to start, and how long it waits for the others."""

    host: str
    """Address or name of machine 0."""
    port: int
    facts: MachineFacts
    join_timeout_s: float = JOIN_TIMEOUT_S
    """Seconds within which all machines must have come."""
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    """Seconds after which a machine that says nothing is given up."""


def plan_machine(
    foreseen: PredictedEnvironment, verb: str, recipe: Mapping[str, Any], **timeouts: float
) -> MachinePlan:
    """Returns the plan of this machine, without its network and devices, which are looked at when it joins.

    Args:
        verb: Command that every machine must have started: launch, comms or doctor.
        recipe: Recipe, or what the command was given.
        timeouts: See `MachinePlan`.
    """
    asked = foreseen.asked
    facts = MachineFacts.of_here(
        recipe,
        rank=asked.machine_rank,
        num_machines=asked.num_machines,
        num_processes=foreseen.launch.num_processes,
        verb=verb,
        launch=machine_facts.launch_values(foreseen),
    )
    host = bare_host(asked.main_process_ip or "")
    return MachinePlan(host, asked.main_process_port, facts, **timeouts)


@contextmanager
def problems_told(
    config_file: str, options: Mapping[str, str], verb: str, timeouts: Mapping[str, float], say: Callable[[str], None]
) -> Iterator[None]:
    """Tells the other machines of a launch of an error that is raised within; they would wait for this machine.

    Args:
        options: Options of the launch file that were given, such as `machine_rank`.
        verb: Command that every machine must have started.
        timeouts: See `MachinePlan`.
        say: Prints a line.

    Raises:
        SystemExit: After an error that it has printed and told.
    """
    try:
        yield
    except FinetuneError as error:
        try:
            foreseen = predict_environment(config_file, options, os.environ)
        except FinetuneError:
            raise error from None  # it says the same, or stands before it
        if foreseen.asked.num_machines == 1 or foreseen.asked.nnodes is not None:
            raise
        print_error(error)
        tell_problem(plan_machine(foreseen, verb, {}, **timeouts), " ".join(str(error).split()), say)
        raise SystemExit(USER_ERROR) from None


def tell_problem(plan: MachinePlan, problem: str, say: Callable[[str], None]) -> None:
    """Tells the other machines of a launch that this one cannot start, and why; waits a little for them."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    facts = replace(plan.facts, problem=f"On machine {plan.facts.rank} ({plan.facts.host}): {problem}")
    plan = replace(plan, facts=facts, join_timeout_s=min(_TELL_S, plan.join_timeout_s))
    say(f"Telling the other machines, for at most {plan.join_timeout_s:g} s.")
    meeting = Meeting(plan, say)
    try:
        meeting.hold()
    except BackendError:
        meeting.tell_late_ones()


def hand_over(plan: MachinePlan, variable: str) -> None:
    """Leaves the plan to the program that this process turns into, in a file without a name, which ends with it.

    The `variable` of the environment gets the file's number.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(json.dumps(asdict(plan), default=str).encode())
    file.flush()
    os.environ[variable] = str(number := os.dup(file.fileno()))
    os.set_inheritable(number, True)


def take_over(variable: str) -> MachinePlan:
    """Returns the plan that `hand_over` has left to this process; workers do not see it."""
    with os.fdopen(int(os.environ.pop(variable)), "rb") as file:
        file.seek(0)
        tree = json.loads(file.read())
    return MachinePlan(**tree | {"facts": MachineFacts.from_json(tree["facts"])})


@dataclass(frozen=True)
class Rendezvous:
    """Machines that have met."""

    plan: MachinePlan
    store: Any
    """The store that machine 0 hosts."""
    machines: list[MachineFacts]
    """Facts of all machines, by rank."""
    interface: NetworkInterface
    """The interface of this machine."""
    links: dict[int, dict[int, Link]]
    """Connections that were tried, from each machine to each other, by rank."""
    problems: list[str]
    """Sentences on what stands in the way; none unless the meeting was told to go on."""
    warnings: list[str]


class Meeting:
    """A rendezvous that is being held.

    Args:
        say: Prints a line.
        go_on: Look at links also where machines differ.
    """

    def __init__(self, plan: MachinePlan, say: Callable[[str], None], *, go_on: bool = False) -> None:
        self._plan, self._say, self._go_on = plan, say, go_on
        self._started = time.monotonic()
        self._awaited = "machine 0"
        self._deadline = self._started + plan.join_timeout_s
        self._found: Rendezvous | BaseException | None = None
        self._store: Any = None

    def hold(self) -> Rendezvous:
        """Returns once all machines have come, agree and reach each other.

        Raises:
            BackendError: Where they do not, on every machine; or the others have not come in time.
        """
        thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        thread.start()
        last_report = self._started
        while thread.is_alive():
            thread.join(_POLL_S / 2)
            now = time.monotonic()
            if now - last_report >= _SAY_EVERY_S:
                last_report = now
                self._say(f"Waiting for {self._awaited}; {now - self._started:.0f} s so far.")
            if now > self._deadline + _SLACK_S:
                raise BackendError(
                    f"Machine {self._plan.facts.rank} has waited {now - self._started:.0f} s for {self._awaited}, and "
                    f"machine 0 at {self._plan.host} port {self._plan.port} no longer answers: it, or the network "
                    "between, is down. Nothing was started. Start the same command on every machine again."
                )
        if isinstance(self._found, Rendezvous):
            return self._found
        assert self._found is not None
        raise self._found

    def tell_late_ones(self) -> None:
        """Lets machines that come a little later learn why nothing was started; only machine 0 can."""
        if self._plan.facts.rank or self._store is None:
            return
        until = time.monotonic() + min(_LINGER_S, self._plan.join_timeout_s)
        store, others = self._store, self._plan.facts.num_machines - 1

        def wait() -> None:
            while time.monotonic() < until and int(store.add("told", 0)) < others:
                time.sleep(_POLL_S)

        ends_within(_LINGER_S + 1, wait)

    def _run(self) -> None:
        try:
            self._found = self._meet()
        except (BackendError, OSError, RuntimeError, ValueError) as error:
            plan, known = self._plan, isinstance(error, BackendError)
            self._found = (
                error
                if known
                else BackendError(
                    f"Machine {plan.facts.rank} has lost machine 0 at {plan.host} port {plan.port} while it waited for "
                    f"{self._awaited}: `finetune {plan.facts.verb}` has ended there, whose output says why, or another "
                    f"program listens at that port. Nothing was started ({_short(error)})."
                )
            )
            self._found.__cause__ = None if known else error

    def _meet(self) -> Rendezvous:
        interface, problem = self._open()
        own, plan = self._plan.facts, self._plan
        problem = own.problem or problem
        try:
            interface = named_interface(interface, os.environ)
        except BackendError as error:
            problem = problem or f"On machine {own.rank} ({own.host}): {error}"
        listener = LinkListener(interface.address, own.rank)
        own = replace(
            own,
            address=interface.address,
            interface=interface.name,
            port=listener.port,
            devices=machine_facts.gpu_names(),
            problem=problem,
        )
        store, number = self._store, int(self._store.add("joined", 1))
        store.set(f"alive/{number}", "0")
        store.set(f"facts/{number}", json.dumps(asdict(own)))
        judge = _Judge(store, plan, self._deadline) if own.rank == 0 and interface.reaches_itself else None
        if judge is None:
            # Machine 0 may have started later, and then waits longer.
            self._deadline = time.monotonic() + plan.join_timeout_s
        count = 0
        while not store.check(["verdict"]):
            store.set(f"alive/{number}", str(count := count + 1))
            if judge is not None:
                judge.look()
            if store.check(["awaited"]):
                self._awaited = store.get("awaited").decode()
            time.sleep(_POLL_S)
        verdict = json.loads(store.get("verdict"))
        if verdict["ends"] or (verdict["problems"] and not self._go_on):
            if own.rank or judge is None:
                store.add("told", 1)
            raise BackendError(_paragraph(verdict["problems"]))
        machines, token = list(map(MachineFacts.from_json, verdict["machines"])), bytes.fromhex(verdict["token"])
        self._awaited = "the connections between all machines"
        self._deadline = time.monotonic() + 3 * machine_links.CONNECT_S
        places = {other.rank: (other.address, other.port) for other in machines if other.rank != own.rank}
        own_links = machine_links.try_links(places, token)
        store.set(f"links/{own.rank}", json.dumps({rank: asdict(link) for rank, link in own_links.items()}))
        if judge is not None:
            judge.look_at_links(machines, self._deadline)
        _wait(store, ["reached"], self._deadline)
        reached = json.loads(store.get("reached"))
        if reached["problems"] and not self._go_on:
            if own.rank:
                store.add("told", 1)
            raise BackendError(_paragraph(reached["problems"]))
        links = {
            int(rank): {int(other): Link(**link) for other, link in row.items()}
            for rank, row in reached["links"].items()
        }
        problems = [*verdict["problems"], *reached["problems"]]
        listener.close()
        return Rendezvous(plan, store, machines, interface, links, problems, reached["warnings"])

    def _open(self) -> tuple[NetworkInterface, str]:
        """Opens the store; returns the interface that it is reached by, and why this machine cannot take part."""
        plan, rank = self._plan, self._plan.facts.rank
        if rank:
            self._store = self._connect((interface := self._reach()).peer)
            return interface, ""
        try:
            interface = find_interface(plan.host)
        except socket.gaierror as error:
            raise BackendError(
                f"main_process_ip is {plan.host}, which has no address here ({error.strerror}). Give --main_process_ip "
                "an address of this machine, which is machine 0, the same on all machines."
            ) from error
        except BackendError as error:
            # The others may know that name by another address, and wait there.
            self._store = self._host("127.0.0.1")
            problem = f"machine 0 ({plan.facts.host}): {error}"
            self._store.set("verdict", json.dumps({"ends": True, "problems": [problem]}))
            raise
        if interface.reaches_itself:
            self._store = self._host(interface.peer)
            return interface, ""
        here, most = f"{plan.facts.host} ({interface.address})", plan.facts.num_machines - 1
        problem = (
            f"Rank 0 (machine_rank) is given to {here}, and main_process_ip {plan.host} is no address there. Give each "
            f"machine its own --machine_rank, from 0 to {most}, and --main_process_ip an address of machine 0."
        )
        # The true machine 0, if there is one, is told as well.
        until = time.monotonic() + min(_LINGER_S, plan.join_timeout_s)
        while True:
            try:
                socket.create_connection((interface.peer, plan.port), timeout=machine_links.CONNECT_S).close()
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise BackendError(problem) from error
                time.sleep(_POLL_S)
        self._store = self._connect(interface.peer)
        return interface, problem

    def _host(self, address: str) -> Any:
        plan = self._plan
        try:
            return _store(address, plan.port, host=True)
        except RuntimeError as error:
            taken = "is taken by another program, or by another launch: end that one"
            reason = taken if "EADDRINUSE" in str(error) else f"cannot be listened on ({_short(error)}): look at that"
            raise BackendError(
                f"Port {plan.port} of this machine, where all machines are to meet, {reason}, or give another "
                "--main_process_port, the same on all machines."
            ) from error

    def _connect(self, address: str) -> Any:
        self._awaited = f"machine 0 (something listens at {address} port {self._plan.port}, but does not answer)"
        return _store(address, self._plan.port, host=False)

    def _reach(self) -> NetworkInterface:
        """Waits until something listens where machine 0 should be."""
        plan, limit = self._plan, machine_links.CONNECT_S
        while True:
            try:
                interface = find_interface(plan.host)
                socket.create_connection((interface.peer, plan.port), timeout=limit).close()
                return interface
            except socket.gaierror as error:
                reason = f"its name has no address here: {error.strerror}"
            except TimeoutError:
                reason = (
                    f"no answer within {limit:g} s: no machine has this address, it is off, or a firewall drops packets"
                )
            except ConnectionRefusedError:
                itself = "this machine itself" if find_interface(plan.host).reaches_itself else "that machine"
                reason = (
                    f"{itself} answers, but nothing listens at the port: `finetune {plan.facts.verb}` has not started "
                    "there with machine_rank 0, has ended, or has another main_process_port"
                )
            except OSError as error:
                reason = f"{error.strerror or error}"
            if time.monotonic() > self._deadline:
                raise BackendError(
                    f"Machine {plan.facts.rank} has waited {plan.join_timeout_s:g} s for machine 0 at {plan.host} port "
                    f"{plan.port}: {reason}. Start the same command on every machine, with the address of machine 0 as "
                    "--main_process_ip and the same --main_process_port; --join-timeout says how long to wait."
                )
            self._awaited = f"machine 0 at {plan.host} port {plan.port} ({reason})"
            time.sleep(_POLL_S)


def _store(address: str, port: int, *, host: bool) -> Any:
    """Returns the store of all machines; keys of torchrun and of workers stay apart by a prefix."""
    from torch import distributed

    torch_stores: Any = distributed
    store = torch_stores.TCPStore(
        address,
        port,
        is_master=host,
        wait_for_workers=False,
        timeout=timedelta(seconds=2 * machine_links.CONNECT_S),
        multi_tenant=host,  # torchrun's own store of this process shares the port
    )
    return torch_stores.PrefixStore("finetune/machines", store)


def leave(met: Rendezvous) -> None:
    """Has machine 0, with which the store ends, wait until every machine has read all; every machine calls it."""
    deadline = time.monotonic() + 8 * machine_links.CONNECT_S
    with suppress(RuntimeError):
        met.store.add("left", 1)
        while met.plan.facts.rank == 0 and time.monotonic() < deadline:
            if int(met.store.add("left", 0)) >= len(met.machines):
                return
            time.sleep(_POLL_S)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _wait(store: Any, keys: list[str], deadline: float) -> None:
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{keys[0]} has not come")
        time.sleep(_POLL_S)


def _paragraph(problems: list[str]) -> str:
    return f"The machines cannot start together, and nothing was started. {' '.join(map(capital, problems))}"


class _Judge:
    """Looks at what has come, on machine 0, and writes the verdict."""

    def __init__(self, store: Any, plan: MachinePlan, deadline: float) -> None:
        self._store, self._plan, self._deadline = store, plan, deadline
        self._facts: dict[int, MachineFacts] = {}
        self._alive: dict[int, tuple[bytes, float]] = {}
        self._came: dict[int, float] = {}
        self._awaited = ""

    def look(self) -> None:
        """Writes the verdict once it can be known."""
        now, store = time.monotonic(), self._store
        for number in range(1, int(store.add("joined", 0)) + 1):
            if number not in self._facts and store.check([f"facts/{number}"]):
                self._facts[number] = MachineFacts.from_json(json.loads(store.get(f"facts/{number}")))
                self._came[number] = now
        for number, value in zip(self._facts, store.multi_get([f"alive/{n}" for n in self._facts]), strict=True):
            if self._alive.get(number, (b"", 0.0))[0] != value:
                self._alive[number] = value, now
        live = [number for number, (_, at) in self._alive.items() if now - at < _LIVE_S]
        by_rank: dict[int, list[int]] = defaultdict(list)
        for number in live:
            by_rank[self._facts[number].rank].append(number)
        machines = [self._facts[numbers[-1]] for _, numbers in sorted(by_rank.items())]
        ends = [facts.problem for number in live if (facts := self._facts[number]).problem]
        ends += self._twice(by_rank)
        differ = [facts for facts in machines if facts.num_machines != self._plan.facts.num_machines]
        missing = [rank for rank in range(self._plan.facts.num_machines) if rank not in by_rank]
        if ends or differ:
            ends += machine_facts.find_differences(machines) if differ else []
            self._write(True, ends, machines)
        elif not missing:
            self._write(False, machine_facts.find_differences(machines), machines)
        elif now > self._deadline:
            have, within = "have" if len(missing) > 1 else "has", f"within {self._plan.join_timeout_s:g} s"
            came = ", ".join(facts.place for facts in machines)
            text = (
                f"{capital(named_machines(missing))} {have} not come {within}; here are {came}. "
                f"Start the same command there, with --machine_rank {' or '.join(map(str, missing))} and "
                f"--main_process_ip {self._plan.host}, or look at its output; --join-timeout says how long to wait."
            )
            self._write(True, [text], machines)
        elif (awaited := named_machines(missing)) != self._awaited:
            self._awaited = awaited
            store.set("awaited", awaited)

    def _twice(self, by_rank: Mapping[int, list[int]]) -> list[str]:
        """Says which ranks two machines have; one that was stopped and started again is not two."""
        problems = []
        for rank, numbers in by_rank.items():
            latest = max(self._came[number] for number in numbers)
            both = [number for number in numbers if self._alive[number][1] > latest or self._came[number] == latest]
            if len(both) > 1:
                places = " and ".join(f"{self._facts[n].host} ({self._facts[n].address})" for n in both)
                problems.append(
                    f"Rank {rank} (machine_rank) is given twice, on {places}. Give each machine its own "
                    f"--machine_rank, from 0 to {self._plan.facts.num_machines - 1}."
                )
        return problems

    def _write(self, ends: bool, problems: list[str], machines: list[MachineFacts]) -> None:
        verdict = {
            "ends": ends,
            "problems": problems,
            "machines": [asdict(facts) for facts in machines],
            "token": secrets.token_hex(16),
        }
        self._store.set("verdict", json.dumps(verdict))

    def look_at_links(self, machines: list[MachineFacts], deadline: float) -> None:
        """Gathers what all machines found of their connections, and says which cannot be made."""
        keys, problems = [f"links/{facts.rank}" for facts in machines], []
        while not self._store.check(keys) and time.monotonic() < deadline - _POLL_S:
            time.sleep(_POLL_S)
        rows: dict[int, dict[str, Any]] = {}
        for facts, key in zip(machines, keys, strict=True):
            if self._store.check([key]):
                rows[facts.rank] = json.loads(self._store.get(key))
            else:
                problems.append(f"{capital(facts.place)} came, and then no longer answered.")
        for rank, row in rows.items():
            broken = [f"machine {other} ({link['problem']})" for other, link in row.items() if link["problem"]]
            if broken:
                problems.append(f"{capital(machines[rank].place)} cannot connect to {', '.join(broken)}.")
        if problems:
            problems.append(
                "All machines must reach each other at every port, since gloo and NCCL take any: open the firewall "
                "between them for TCP, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface in a network "
                "that all are in."
            )
        clocks = {int(other): link["clock_s"] for other, link in rows.get(0, {}).items()}
        reached = {"problems": problems, "links": rows, "warnings": machine_facts.find_warnings(machines, clocks)}
        self._store.set("reached", json.dumps(reached))
