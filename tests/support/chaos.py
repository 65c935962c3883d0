"""Kills runs and asks them to stop at random moments, over and over; each must end as if nothing had happened.

`PYTHONPATH=. python tests/support/chaos.py KILLS SIGNALS SEED`; `make test-chaos` runs it. The suite does a few
of the same.

A case is one run: it is disturbed, and the same command is started again until it has ended. After each start this
must hold: no checkpoint that was whole is gone but by rotation, and all that are there are whole. At the end all
figures, the final weights and the last checkpoint are those of a run that nobody disturbed, and the ledger holds.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from forkserver import ForkServer, until
from harness import ROOT, RUN_S, WAIT_S, environment, read_lines
from inside import mlp
from ranks import by_finetune

from finetune.checkpoint import integrity, row_ledger
from finetune.checkpoint.checkpoint_store import CheckpointStore, name_of, open_store, sealed_name, step_of
from finetune.utils import errors
from finetune.utils.exit_codes import REQUEUE

STEPS, KEEP, EVERY = 24, 2, 3
# Whole tensors on each rank; and pieces, which the ranks send each other while a checkpoint is written.
CONFIGS = ("ddp", "fsdp")
# Those of a line that a clock or the system's memory shows.
_TIMES = {"tokens_per_s", "step_s", "data_s", "forward_backward_s", "optimizer_s", "peak_memory_gib", "mfu", "time"}


class Lie(AssertionError):
    """Something that docs/checkpoints.md promises did not hold."""


def demand(true: bool, what: str) -> None:
    if not true:
        raise Lie(what)


@dataclass
class Victim:
    """A run that is disturbed, and what has been seen of it."""

    folder: Path
    config: str = "ddp"
    steps: int = STEPS
    whole: dict[str, float | None] = field(default_factory=dict)
    """Every checkpoint that was ever there, with its validation loss."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        tree = mlp(
            self.directory,
            task={"name": "troubled_task:mlp"},
            length={"steps": self.steps},
            checkpoint={"every_steps": EVERY, "keep": KEEP},
            eval={"every_steps": 6},
        )
        self.recipe.write_text(yaml.safe_dump(tree))

    @property
    def directory(self) -> Path:
        return self.folder / "run"

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def said(self) -> Path:
        return self.folder / "said"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def store(self) -> CheckpointStore:
        return open_store(self.directory)

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    @property
    def asked(self) -> Path:
        """Is there once a rank has heard a request to stop."""
        return self.folder / "asked"

    def held(self, at: int) -> dict[str, Any]:
        """Trouble for the next start: rank 0 waits at one of its micro-batches until `let_go`."""
        self.gate.unlink(missing_ok=True)
        self.asked.unlink(missing_ok=True)
        return {"hold": {"rank": 0, "at": at, "file": str(self.gate)}, "asked": str(self.asked)}

    def held_after(self, save: int) -> dict[str, Any]:
        """The same a few steps after a save has begun, the how many-th after the start.

        Whoever strikes late, on a busy machine, finds the run there, and not at its end.
        """
        micro_batches = 2  # of a rank, in a step of two ranks
        return self.held(micro_batches * (EVERY * (save + 1) + 2))

    def let_go(self, *, once_asked: bool = False) -> None:
        """Lets go of rank 0; `once_asked` only when a request to stop has come to a rank."""
        if once_asked:
            until(self.asked.exists, WAIT_S, "no rank was asked to stop")
        self.gate.touch()

    def staged(self) -> set[str]:
        """The checkpoints that are being written, or that somebody who was killed has left unfinished."""
        return {path.name for path in self.checkpoints.glob("*.staging")}

    def look(self) -> None:
        """Notes the checkpoints that are there."""
        for name in self.store.list_names():
            if name not in self.whole:
                try:
                    self.whole[name] = integrity.read_manifest(self.store, name)["validation_loss"]
                except errors.CheckpointError:
                    # Deleted since it was listed. If it still has its name, it never was whole.
                    demand(name not in self.store.list_names(), f"{name} was listed before it was whole")

    def begun(self) -> int:
        """How many saves at every `EVERY` steps have begun, of all starts; some of them may have been seen too late."""
        self.look()
        return max((step_of(sealed_name(name)) or 0 for name in {*self.staged(), *self.whole}), default=0) // EVERY

    def newest(self) -> int:
        """The step of the newest checkpoint, named or killed before it got its name; 0 without one."""
        found = map(sealed_name, integrity.list_resumable(self.store))
        return max((step_of(name) or 0 for name in found), default=0)

    def check(self) -> None:
        """What must hold whenever nobody is at work."""
        self.look()
        there = self.store.list_names()
        for name in there:
            integrity.verify_checkpoint(self.store, name)
        demand(not list(self.checkpoints.glob("*.broken")), "a checkpoint was found broken")
        best = min((loss for loss in self.whole.values() if loss is not None), default=None)
        for name, loss in self.whole.items():
            newer = sum(other > name for other in there)
            demand(name in there or newer >= KEEP, f"{name} is gone, with {newer} newer ones")
            demand(name in there or loss is None or loss != best, f"{name}, the best one, is gone")

    def facts(self) -> dict[str, Any]:
        return json.loads((self.directory / "run.json").read_text())

    def figures(self) -> list[dict[str, Any]]:
        """All lines of `metrics.jsonl`, but for times."""
        lines = read_lines(self.directory / "metrics.jsonl")
        return [{key: value for key, value in line.items() if key not in _TIMES} for line in lines]

    def tensors(self) -> dict[str, bytes | str]:
        """The final model's files, and the digests of what the last checkpoint holds."""
        files: dict[str, bytes | str] = {}
        files |= {file.name: file.read_bytes() for file in (self.directory / "model").iterdir() if file.suffix != ".md"}
        manifest = integrity.read_manifest(self.store, name_of(self.steps))
        files |= {name: facts["xxh3_128"] for name, facts in manifest["files"].items() if name != integrity.STATE}
        return files

    def check_end(self, straight: "Victim") -> None:
        """What must hold once it has ended, by a run that nobody disturbed."""
        self.check()
        demand("finished" in self.facts(), "run.json does not say that it finished")
        found, expected = self.figures(), straight.figures()
        for one, other in zip(found, expected, strict=False):
            demand(one == other, f"metrics.jsonl has {one} instead of {other}")
        demand(len(found) == len(expected), f"metrics.jsonl has {len(found)} lines instead of {len(expected)}")
        demand(self.tensors() == straight.tensors(), "the final weights are others")
        proof = row_ledger.audit_ledger(self.directory)
        demand(proof.holds and proof.num_steps == self.steps, "\n".join(proof.lines()))


@contextmanager
def launched(victim: Victim, **trouble: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`finetune launch` of a run on two processes; afterwards all of it is gone.

    What it prints goes to the file `launched` in the victim's folder.
    """
    with (victim.folder / "launched").open("ab") as out:
        process = subprocess.Popen(
            by_finetune(victim.config, str(victim.recipe)),
            cwd=ROOT,
            env=environment(TROUBLE=json.dumps(trouble)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Moment:
    """When to strike: some seconds after a save was seen under way, or after the start."""

    save: int | None
    """The how many-th save after the start; None counts from the start itself."""
    delay_s: float

    @classmethod
    def draw(cls, chance: random.Random, longest_s: float) -> "Moment":
        """Two of three fall into a save, or shortly after one."""
        if chance.random() < 2 / 3:
            return cls(chance.randint(1, 4), chance.uniform(0.0, 0.08))
        return cls(None, chance.uniform(0.0, longest_s))

    def hold(self, victim: Victim) -> dict[str, Any]:
        """Trouble by which the run does not end before the moment has come; none if that counts from the start."""
        return {} if self.save is None else victim.held_after(self.save)

    def wait(self, victim: Victim, ended: Callable[[], bool]) -> bool:
        """Returns when the moment has come; False if the run has ended before."""
        old = victim.begun()
        since, end = (time.monotonic() if self.save is None else None), time.monotonic() + RUN_S
        while since is None or time.monotonic() - since < self.delay_s:
            saves = victim.begun() - old
            if since is None and self.save is not None and saves >= self.save:
                since = time.monotonic()
            if ended():
                return False
            demand(time.monotonic() < end, "the moment to strike never came")
            time.sleep(0.001)
        return True

    def __str__(self) -> str:
        place = "the start" if self.save is None else f"the beginning of save {self.save}"
        return f"{1000 * self.delay_s:.0f} ms after {place}"


def straight(fork_server: ForkServer, folder: Path, config: str = "ddp") -> Victim:
    """A run that nobody disturbs."""
    victim = Victim(folder, config)
    finish(fork_server, victim)
    victim.check()
    return victim


def finish(fork_server: ForkServer, victim: Victim) -> None:
    """Starts a run and lets it come to its end; it must resume from the newest checkpoint."""
    newest = victim.newest()
    with fork_server.start(victim.config, victim.said, str(victim.recipe)) as ranks:
        codes = ranks.wait()
        demand(codes == [0, 0], f"the same command ended with {codes}:\n{ranks.output()[-3000:]}")
    begun = victim.facts()["starts"][-1]["from_step"]
    demand(newest in (begun, victim.steps), f"it resumed from step {begun}, not {newest}")


def kill(fork_server: ForkServer, victim: Victim, who: str, moment: Moment, wait_s: float) -> str:
    """Starts a run and ends ranks of it by SIGKILL; returns what became of it.

    Args:
        who: `0`, `1` or `all`.
    """
    trouble = {"TROUBLE": json.dumps({"wait_s": wait_s, **moment.hold(victim)})}
    with fork_server.start(victim.config, victim.said, str(victim.recipe), env=trouble) as ranks:
        struck = moment.wait(victim, lambda: None not in ranks.codes)
        during = ", ".join(victim.staged())
        ranks.signal(signal.SIGKILL, *([0, 1] if who == "all" else [int(who)]))
        victim.let_go()
        if moment.save is None:
            # Ranks may not have met yet, and one that waits for another is ended by its launcher.
            until(lambda: any(code is not None for code in ranks.codes), RUN_S, "no rank was ended")
            ranks.signal(signal.SIGTERM)
        # After that a rank ends by itself when another is gone.
        codes = ranks.wait()
        victim.check()
        if not struck or codes == [0, 0]:
            return "came too late"
        demand(-signal.SIGKILL in codes, f"exit codes {codes}:\n{ranks.output()[-3000:]}")
    return f"killed during {during}" if during else f"killed, newest is step {victim.newest()}"


def kill_launcher(victim: Victim, moment: Moment) -> str:
    """Ends `finetune launch` by SIGKILL and starts it again at once, which runs to the end."""
    # An orphan that does not notice would go on for longer than the next run waits for its folder.
    with launched(victim, wait_s=1.0 if moment.save is None else 0.02) as process:
        struck = moment.wait(victim, lambda: process.poll() is not None)
        process.kill()
        process.wait()
        newest = victim.newest()
        with launched(victim) as again:
            code = again.wait(RUN_S)
            said = (victim.folder / "launched").read_text()[-3000:]
            demand(code == 0, f"the same command ended with {code}:\n{said}")
    demand(victim.facts()["starts"][-1]["from_step"] >= newest, f"it did not resume from step {newest}")
    return f"launcher killed at step {newest} or later" if struck else "came too late"


def ask(
    fork_server: ForkServer, victim: Victim, number: int, skews: dict[int, float], moment: Moment, wait_s: float
) -> str:
    """Starts a run and asks it to stop; returns how that ended.

    Args:
        skews: How long after the moment each rank is asked, in seconds; ranks that are not named are not.
    """
    trouble = {"TROUBLE": json.dumps({"wait_s": wait_s, **moment.hold(victim)})}
    with fork_server.start(victim.config, victim.said, str(victim.recipe), env=trouble) as ranks:
        struck = moment.wait(victim, lambda: None not in ranks.codes)
        since, newest = time.monotonic(), victim.newest()
        for rank, skew in sorted(skews.items(), key=lambda pair: pair[1]):
            until(lambda skew=skew: time.monotonic() - since >= skew, WAIT_S, "time stands still")
            ranks.signal(number, rank)
            victim.let_go(once_asked=moment.save is not None)
        codes = ranks.wait()
        victim.check()
        if codes == [0, 0] and (not struck or newest >= victim.steps - 6):
            return "came too late"
        demand(codes == [REQUEUE, REQUEUE], f"exit codes {codes}, not 75 twice:\n{ranks.output()[-3000:]}")
    demand("stopped" in victim.facts(), "run.json does not say that it was stopped")
    demand(victim.newest() >= newest, "no checkpoint was written")
    return f"stopped and saved at step {victim.newest()}"


def kill_case(fork_server: ForkServer, chance: random.Random, victim: Victim, left: int) -> Iterator[str]:
    """One run that is killed up to three times; a line for each kill."""
    if chance.random() < 0.1:
        moment = Moment.draw(chance, 12.0)
        yield f"kill launcher, {moment}: {kill_launcher(victim, moment)}"
        return
    for _ in range(min(left, chance.randint(1, 3))):
        who, moment, wait_s = chance.choice(["0", "1", "all"]), Moment.draw(chance, 3.0), chance.choice([0, 0.01])
        yield f"kill {who}, {moment}: {kill(fork_server, victim, who, moment, wait_s)}"
    finish(fork_server, victim)


def signal_case(fork_server: ForkServer, chance: random.Random, victim: Victim) -> Iterator[str]:
    """One run that is asked to stop."""
    number = chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    moment = Moment(chance.randint(1, 4), chance.uniform(0.0, 0.1))
    if chance.random() < 0.25:
        skews = {chance.randint(0, 1): 0.0}
    else:
        skews = dict(zip((0, 1), chance.sample([0.0, chance.choice([0.2, 2.0]) * chance.random()], 2), strict=True))
    shown = ", ".join(f"rank {rank} at {1000 * skew:.0f} ms" for rank, skew in sorted(skews.items()))
    wait_s = chance.choice([0.01, 0.2])
    yield f"{number.name} to {shown}, {moment}: {ask(fork_server, victim, number, skews, moment, wait_s)}"
    finish(fork_server, victim)


def main(kills: int = 100, signals: int = 20, seed: int | None = None) -> None:
    """Runs all cases, and ends non-zero at the first that shows a promise broken."""
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"seed {seed}: {kills} kills, {signals} requests to stop", flush=True)
    chance, fork_server, began = random.Random(seed), ForkServer(), time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    done, late = {"kill": 0, "signal": 0}, 0
    wanted = {"kill": kills, "signal": signals}
    victim = Victim(root / "none")
    try:
        references = {config: straight(fork_server, root / f"straight-{config}", config) for config in CONFIGS}
        while done != wanted:
            kind = chance.choice([kind for kind in done if done[kind] < wanted[kind]])
            victim = Victim(root / f"{kind}-{sum(done.values()) + late}", chance.choice(CONFIGS))
            left = wanted[kind] - done[kind]
            case = (
                kill_case(fork_server, chance, victim, left)
                if kind == "kill"
                else signal_case(fork_server, chance, victim)
            )
            for line in case:
                too_late = line.endswith("too late")
                late, done[kind] = late + too_late, done[kind] + (not too_late)
                print(f"{sum(done.values()):4d} {victim.folder.name} {victim.config}: {line}", flush=True)
            victim.check_end(references[victim.config])
            shutil.rmtree(victim.folder)
    except (Lie, AssertionError, errors.CheckpointError) as error:
        sys.exit(f"LIE in {victim.folder} (kept), seed {seed}: {error}")
    shutil.rmtree(root)
    print(
        f"{done['kill']} kills and {done['signal']} requests to stop: every run resumed to the same result, no whole "
        f"checkpoint was lost, the ledgers hold. {late} more came too late. {time.monotonic() - began:.0f} s, seed "
        f"{seed}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
