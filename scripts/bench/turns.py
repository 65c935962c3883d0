"""Arms take turns: each a process, or two, that lives through the whole case and computes only when it is told to."""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.cases import AS_TEXTS, COUNTED, EACH, LIMIT_OURS, OURS, Case, launch_of
from bench.spec import Spec

ROOT = Path(__file__).resolve().parents[2]
HUGE_PAGES = os.environ.get("THP_MEM_ALLOC_ENABLE", "")
"""What the user has set for torch's huge pages, before finetune is imported and sets it."""
VOID = "void"
"""What the problem of an arm begins with whose figures mean nothing, since it has learned something else."""
JUDGED = 50
"""First steps whose losses must be alike; from there on, what is rounded otherwise has grown, and is only told."""
START_S = 300.0
"""Longest time that an arm may take to come to its first step."""


class ArmError(Exception):
    """An arm's process ended or said nothing."""


@dataclass
class Turn:
    """What one turn of an arm took, over all its processes."""

    wall_s: float
    cpu_s: float
    losses: list[float]
    """Of each step, per target."""
    norms: list[float]
    targets: int
    peak_mib: float
    """Of the processes together."""
    baseline_mib: float
    """The same before a model was read."""
    counted: list[tuple[int, int]] | None
    """Reads and collectives of each step, of the first process; where they were counted."""


@dataclass
class Arm:
    """An arm that is alive."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ranks: int
    links: list[IO[bytes]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    def turn(self, steps: int, *, count: bool = False) -> Turn:
        """Takes some steps.

        Raises:
            ArmError: If the process ends meanwhile.
        """
        order = json.dumps({"steps": steps, "count": count}).encode() + b"\n"
        for link in self.sockets:
            link.sendall(order)
        return together([self._hear(link) for link in self.links])

    def _hear(self, link: IO[bytes]) -> dict[str, Any]:
        line = link.readline()
        if not line:
            raise ArmError(f"ended: {last_words(self.log)}")
        report: dict[str, Any] = json.loads(line)
        ready = link.readline()  # it is held at the next boundary
        if not ready:
            raise ArmError(f"ended: {last_words(self.log)}")
        return report

    def end(self) -> None:
        """Ends its processes, those that a launcher started too."""
        for link in self.sockets:
            try:
                link.sendall(b'{"steps": 0, "count": false}\n')
            except OSError:
                self.process.kill()  # it is dead, or about to be
            link.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def together(reports: Sequence[dict[str, Any]]) -> Turn:
    """The turn of the processes of one arm."""
    targets = sum(report["targets"] for report in reports)
    sums = [sum(parts) for parts in zip(*(report["loss_sums"] for report in reports), strict=True)]
    return Turn(
        wall_s=max(report["wall_s"] for report in reports),
        cpu_s=sum(report["cpu_s"] for report in reports),
        losses=[total * len(sums) / targets for total in sums],
        norms=reports[0]["norms"],
        targets=targets,
        peak_mib=sum(report["peak_mib"] for report in reports),
        baseline_mib=sum(report["baseline_mib"] for report in reports),
        counted=reports[0]["counted"],
    )


def last_words(log: Path) -> str:
    """What a process that failed wrote last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it wrote nothing"])[-1][:300]


def start(spec: Spec, folder: Path, server: socket.socket) -> Arm:
    """Starts an arm, and returns when it is held at its first step.

    Raises:
        ArmError: If it does not come so far.
    """
    path, log = folder / f"{spec.arm}.json", folder / f"{spec.arm}.log"
    spec.write(path)
    command = [sys.executable, *launcher(spec), str(ROOT / "scripts" / "bench" / "worker.py"), str(path)]
    with log.open("wb") as output:
        env = environment(spec.arm, spec.case.threads // spec.processes)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    arm = Arm(spec.arm, process, log, spec.processes)
    until = time.monotonic() + START_S
    server.settimeout(0.5)
    while len(arm.links) < spec.processes:
        try:
            link, _ = server.accept()
        except TimeoutError:
            if process.poll() is not None or time.monotonic() > until:
                arm.end()
                raise ArmError(f"did not start: {last_words(log)}") from None
            continue
        link.settimeout(None)
        stream = link.makefile("rb")
        hello = stream.readline()  # comes when it is held, so that only one arm starts at a time
        arm.sockets.append(link)
        arm.links.append(stream)
        if not hello:
            arm.end()
            raise ArmError(f"did not start: {last_words(log)}")
    return arm


def launcher(spec: Spec) -> list[str]:
    """What comes between the interpreter and the worker."""
    if spec.processes == 1:
        return []
    if spec.arm.startswith("bare"):
        port = str(free_port())
        return ["-m", "torch.distributed.run", "--nproc_per_node", str(spec.processes), "--master_port", port]
    config = ROOT / "accelerate_configs" / f"{spec.launch.removesuffix(EACH)}.yaml"
    words = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    return [*words, "--main_process_port", str(free_port())]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(arm: str, threads: int) -> dict[str, str]:
    """Of all arms: the same threads, which sleep while they have nothing to do, and no network.

    finetune asks for huge pages when it is imported, as it is here: other arms are not to inherit it, nor to get it
    by importing a helper. What the user has set is for all.
    """
    paths = [str(ROOT), str(ROOT / "scripts"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(max(1, threads)),
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "FSDP_SYNC_EACH_BATCH": str(launch_of(arm)[1].endswith(EACH)).lower(),
        "THP_MEM_ALLOC_ENABLE": HUGE_PAGES or str(int(launch_of(arm)[0] in (OURS, LIMIT_OURS))),
    }


@dataclass
class Result:
    """An arm of a row."""

    arm: str
    problem: str = ""
    """Why there are no figures, if there are none; or why they are void."""
    loss_gap: float = 0.0
    """Largest relative difference of a step's loss to the first arm's, over the steps that are judged."""
    last_gap: float = 0.0
    """The same over all steps."""
    compared: int = 0
    """Steps whose losses were compared."""
    step_ms: list[float] = field(default_factory=list)
    """Wall time of a step, of each round."""
    cpu_ms: list[float] = field(default_factory=list)
    targets_per_s: float = 0.0
    peak_mib: float = 0.0
    baseline_mib: float = 0.0
    reads: float | None = None
    """Times a micro-batch that the host reads a number from the device."""
    collectives: float | None = None
    """Both of the first process and in steps that write no log."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


@dataclass
class Measured:
    """A row of the table."""

    case: Case
    rounds: int
    load: tuple[float, float]
    """Load average over a minute, at the start and at the end."""
    results: list[Result]


def measure(
    case: Case,
    rounds: int,
    make: Callable[[str], Spec],
    folder: Path,
    say: Callable[[str], None],
) -> Measured:
    """Lets the arms of a case take turns.

    Args:
        make: The specification of an arm, of its name; its socket is `folder/socket`.
        folder: For what the arms write; must be there.
        say: Is told how far it is.
    """
    before = os.getloadavg()[0]
    results = {name: Result(name) for name in case.arms}
    alive: dict[str, Arm] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in case.arms}
    address = folder / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen(8)
        try:
            for name in case.arms:
                say(f"{case.name}: starting {name}")
                with _noting(results[name]):
                    alive[name] = start(make(name), folder, server)
            for round_number in range(rounds + 2):
                steps = case.warm if round_number == 0 else COUNTED if round_number > rounds else case.turn
                say(f"{case.name}: round {round_number} of {rounds}")
                for name in [name for name in case.arms if name in alive and not results[name].problem]:
                    with _noting(results[name]):
                        turns[name].append(alive[name].turn(steps, count=round_number > rounds))
                if round_number in (0, rounds):
                    _compare(case, results, turns)
        finally:
            for arm in alive.values():
                arm.end()
            address.unlink()
    for name, result in results.items():
        _sum_up(case, result, turns[name], rounds)
    return Measured(case, rounds, (before, os.getloadavg()[0]), list(results.values()))


@contextmanager
def _noting(result: Result) -> Iterator[None]:
    """What happens to one arm stays with it; the others go on."""
    try:
        yield
    except ArmError as error:
        result.problem = str(error)


def _compare(case: Case, results: dict[str, Result], turns: dict[str, list[Turn]]) -> None:
    """Voids the arms whose losses are not those of the first one, over all turns so far."""
    right = _path(turns[case.arms[0]])
    for name, result in results.items():
        if result.problem:
            continue
        losses, norms = _path(turns[name])
        result.compared, result.losses, result.norms = len(losses), losses, norms
        if not right[0]:
            result.problem = f"{VOID}: {case.arms[0]} has no losses to compare with"
            continue
        if name == AS_TEXTS:
            continue
        result.loss_gap = _gap(losses[:JUDGED], right[0][:JUDGED])
        result.last_gap = _gap(losses, right[0])
        if not result.loss_gap <= case.tolerance:  # not a number is no match
            worst = max(range(len(losses[:JUDGED])), key=lambda i: abs(losses[i] - right[0][i]))
            result.problem = (
                f"{VOID}: its loss differs by {result.loss_gap:.1e} ({losses[worst]:.4f} for {right[0][worst]:.4f} "
                f"at step {worst + 1})"
            )
        elif not all(norm > 0 for norm in norms):
            result.problem = f"{VOID}: a gradient norm is 0"


def _path(turns: Sequence[Turn]) -> tuple[list[float], list[float]]:
    return [loss for turn in turns for loss in turn.losses], [norm for turn in turns for norm in turn.norms]


def _gap(found: Sequence[float], right: Sequence[float]) -> float:
    if len(found) != len(right):
        return float("inf")
    gaps = [abs(a - b) / abs(b) if b else float("inf") for a, b in zip(found, right, strict=True)]
    return max(gaps) if all(gap == gap for gap in gaps) else float("nan")


def _sum_up(case: Case, result: Result, turns: Sequence[Turn], rounds: int) -> None:
    timed = turns[1 : rounds + 1]
    if not timed:
        return
    result.step_ms = [turn.wall_s / case.turn * 1e3 for turn in timed]
    result.cpu_ms = [turn.cpu_s / case.turn * 1e3 for turn in timed]
    result.targets_per_s = statistics.median(turn.targets / turn.wall_s for turn in timed)
    result.peak_mib = timed[-1].peak_mib
    result.baseline_mib = timed[-1].baseline_mib
    if len(turns) > rounds + 1 and (counted := turns[rounds + 1].counted) is not None:
        reads, collectives = (statistics.median_high(column) for column in zip(*counted, strict=True))
        result.reads, result.collectives = reads / case.accumulation, collectives / case.accumulation


def ratios(result: Result, ours: Result, field_name: str = "step_ms") -> tuple[float, float, float]:
    """How many times as long as ours an arm takes: median and quartiles of the ratios within each round."""
    pairs = zip(getattr(result, field_name), getattr(ours, field_name), strict=True)
    return middle([theirs / own for theirs, own in pairs])


def middle(values: list[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high
