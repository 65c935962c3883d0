"""What a run survives: ranks and launchers that are killed, requests to stop, memory that runs out.

`chaos.py` has what these tests and the longer loop of `make test-chaos` have in common.
"""

import fcntl
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from chaos import Moment, Victim, ask, finish, kill, launched, straight
from forkserver import ForkServer, until
from harness import LIMIT_S, ROOT, RUN_S, WAIT_S, command, environment
from ranks import PARAGRAPH, by_finetune, free_port
from terminal import Terminal

from finetune.checkpoint.checkpoint_store import name_of
from finetune.distributed.launch import launcher
from finetune.utils.exit_codes import REQUEUE

pytestmark = pytest.mark.xdist_group("survival")


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return straight(fork_server, tmp_path_factory.mktemp("straight") / "victim")


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path / "victim")


def trouble(**what: Any) -> dict[str, str]:
    return {"TROUBLE": json.dumps(what)}


def said_by(victim: Victim) -> str:
    """What a launched run has printed."""
    return (victim.folder / "launched").read_text(errors="replace")


@pytest.mark.parametrize("who", ["0", "1", "all"])
def test_killed_ranks_cost_no_checkpoint_and_change_nothing(
    fork_server: ForkServer, undisturbed: Victim, victim: Victim, who: str
) -> None:
    chance = random.Random(who)
    for save in (1, 2):
        moment = Moment(save, chance.uniform(0.0, 0.08))
        assert "killed" in kill(fork_server, victim, who, moment, 0.01)
    finish(fork_server, victim)
    victim.check_end(undisturbed)


@pytest.mark.parametrize(
    ("number", "skews"),
    [
        (signal.SIGTERM, {1: 0.0}),
        (signal.SIGUSR1, {0: 0.0, 1: 0.0}),
        (signal.SIGINT, {0: 1.3, 1: 0.0}),
        (signal.SIGTERM, {0: 0.0, 1: 0.15}),
    ],
    ids=["one", "all", "skewed", "skewed a little"],
)
def test_ranks_that_are_asked_to_stop_save_at_the_same_step(
    fork_server: ForkServer, undisturbed: Victim, victim: Victim, number: signal.Signals, skews: dict[int, float]
) -> None:
    assert "stopped and saved" in ask(fork_server, victim, number, skews, Moment(2, 0.01), 0.02)
    finish(fork_server, victim)
    victim.check_end(undisturbed)


def test_requests_that_come_when_all_is_saved_change_nothing(fork_server: ForkServer, victim: Victim) -> None:
    # However long the end takes, all that is asked is one request.
    env = trouble(wait_s=0.02, same_s=LIMIT_S, **victim.held_after(1))
    with fork_server.start("ddp", victim.said, str(victim.recipe), env=env) as ranks:
        assert Moment(1, 0.0).wait(victim, lambda: None not in ranks.codes), ranks.output()
        ranks.signal(signal.SIGTERM, 0)
        victim.let_go(once_asked=True)
        # One is asked over and over until both have ended.
        until(lambda: ranks.signal(signal.SIGTERM, 1) or None not in ranks.codes, WAIT_S, ranks.output)
        assert ranks.codes == [REQUEUE, REQUEUE], ranks.output()[-3000:]


def test_a_second_request_ends_at_once_also_what_waits_for_another_rank(
    fork_server: ForkServer, victim: Victim
) -> None:
    """Those of the first three seconds are one: a launcher passes on what its workers have received already."""
    hung = victim.folder / "hung"
    words = [str(victim.recipe), "guard.grace_s=1000"]
    with fork_server.start(
        "ddp", victim.said, *words, env=trouble(hang={"rank": 1, "at": 9, "file": str(hung)})
    ) as ranks:
        until(hung.exists, RUN_S, ranks.output)
        began = time.monotonic()
        # Rank 0 is inside an all-reduce by now, or soon.
        while ranks.code(0) is None:
            ranks.signal(signal.SIGTERM, 0)
            assert time.monotonic() - began < WAIT_S, "it never ended"
        assert time.monotonic() - began >= 3
        assert ranks.code(0) == 128 + signal.SIGTERM, ranks.output()[-3000:]
        assert ranks.code(1) is None
    victim.check()


def test_the_grace_is_kept_and_the_last_whole_checkpoint_stays(fork_server: ForkServer, victim: Victim) -> None:
    hung = victim.folder / "hung"
    words = [str(victim.recipe), "guard.grace_s=0.5"]
    with fork_server.start(
        "ddp", victim.said, *words, env=trouble(hang={"rank": 1, "at": 18, "file": str(hung)})
    ) as ranks:
        until(hung.exists, RUN_S, ranks.output)
        ranks.signal(signal.SIGUSR1)
        assert ranks.wait() == [128 + signal.SIGUSR1] * 2
        said = PARAGRAPH.findall(ranks.output())
        assert all(
            "asked to stop (SIGUSR1), but no checkpoint was complete within guard.grace_s = 0.5 s" in s for s in said
        )
        assert len(said) == 2
        assert "Traceback" not in ranks.output()
    victim.check()
    # Rank 1 hangs in step 10, whose all-reduce has told rank 0 that the first checkpoints can be sealed.
    assert victim.newest() >= 3


def test_memory_that_runs_out_is_one_paragraph(fork_server: ForkServer, victim: Victim) -> None:
    with fork_server.start("ddp", victim.said, str(victim.recipe), env=trouble(memory={"rank": 1, "at": 4})) as ranks:
        codes = ranks.wait()
        said = ranks.output(1)
        assert (codes[1], codes[0] != 0) == (2, True)
    assert "Traceback" not in said
    paragraphs = PARAGRAPH.findall(said)
    assert len(paragraphs) == 1, said
    assert "Out of memory on rank 1: " in paragraphs[0]
    assert f"you tried to allocate {4 * 2**58} bytes" in paragraphs[0]
    held = re.search(r"Held by this process: ([\d.]+) GiB, at most ([\d.]+); of the \S+ ([\d.]+) GiB", paragraphs[0])
    assert held is not None
    assert 0 < float(held[1]) <= float(held[2]) + 0.01 <= float(held[3])
    for key in ("batch.micro_size", "model.gradient_checkpointing", "data.sequence_length", "lora", "offloads"):
        assert key in paragraphs[0]


def test_a_failing_rank_speaks_first_and_a_hung_one_goes_with_it(victim: Victim) -> None:
    """Within 30 s of its end, where a launcher looks after them."""
    assert launcher._HUNG_S < 30
    with launched(victim, **{"raise": {"rank": 0, "at": 9}, "hang": {"rank": 1, "at": 8}}) as process:
        assert process.wait(RUN_S) == 1
    said = said_by(victim)
    errors = re.findall(r"^(?:Rank .*|The worker .*|Traceback.*|Error: .*|\w+Error: .*)$", said, re.MULTILINE)
    trace = "Traceback (most recent call last):"
    error = "RuntimeError: the task has had enough"
    gone = f"Rank 1 ends, because another rank is gone: rank 0 has failed: {error}"
    assert errors == ["Rank 0 failed:", trace, error, gone]


def test_a_killed_rank_is_named_and_the_launcher_starts_again_by_itself(
    undisturbed: Victim, victim: Victim, tmp_path: Path
) -> None:
    """Plain `accelerate launch --max_restarts 1`, with a rank that kills itself in the first go only."""
    words = command("ddp", str(victim.recipe))
    words[words.index("launch") + 1 : words.index("launch") + 1] = ["--max_restarts", "1"]
    once = trouble(kill={"rank": 1, "at": 20, "once": str(tmp_path / "once")})
    done = subprocess.run(words, cwd=ROOT, env=environment(**once), capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "once").exists()
    starts = victim.facts()["starts"]
    # Step 11 was its last, and the checkpoint of step 9 may have been under way.
    assert len(starts) == 2
    assert starts[1]["from_step"] in (6, 9)
    victim.check_end(undisturbed)


def test_a_killed_rank_is_what_is_reported(victim: Victim) -> None:
    """Not the ranks that lost it, which end a moment later. One alert is sent, by rank 0 or in its place."""
    alerts = victim.folder / "alerts"
    recipe = yaml.safe_load(victim.recipe.read_text())
    recipe["guard"] = {**recipe.get("guard", {}), "alert": f"sh -c 'cat >> {alerts}; echo >> {alerts}'"}
    victim.recipe.write_text(yaml.safe_dump(recipe))
    # However late the launcher looks, it sees that rank before another one says that it has lost it.
    with launched(victim, kill={"rank": 1, "at": 9}, lost_s=LIMIT_S) as process:
        assert process.wait(RUN_S) == 128 + signal.SIGKILL
    (alert,) = [json.loads(line) for line in alerts.read_text().splitlines()]
    assert alert["event"] == "failed"
    assert "Another rank is gone" in alert["text"] or "rank 1 was ended by SIGKILL" in alert["text"]
    said = said_by(victim)
    assert "The worker of rank 1 was ended by SIGKILL" in said
    assert "Traceback" not in said
    assert "Rank 0" not in said


def held(victim: Victim) -> bool:
    """Whether a process holds the run directory."""
    file = victim.directory / ".lock"
    if not file.exists():
        return False
    handle = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def test_a_launcher_passes_requests_on_and_may_be_killed_at_any_time(undisturbed: Victim, victim: Victim) -> None:
    with launched(victim, wait_s=0.02, **victim.held_after(1)) as process:
        assert Moment(1, 0.0).wait(victim, lambda: process.poll() is not None), said_by(victim)
        process.send_signal(signal.SIGUSR1)
        victim.let_go(once_asked=True)
        assert process.wait(RUN_S) == REQUEUE, said_by(victim)[-4000:]
    victim.check()
    stopped_at = victim.newest()
    assert 3 <= stopped_at < victim.steps
    # Its workers are still starting. Orphans that did not notice would go on for longer than the next run waits.
    with launched(victim, wait_s=1.0, **victim.held(1)) as process:
        until(lambda: held(victim), RUN_S, lambda: said_by(victim))
        process.kill()
        victim.let_go()
        with launched(victim) as again:
            assert again.wait(RUN_S) == 0, said_by(victim)[-4000:]
    starts = [start["from_step"] for start in victim.facts()["starts"]]
    # The orphans took one step, saved it and ended, or never came that far.
    assert starts[:2] == [0, stopped_at]
    assert starts[-1] in (stopped_at, stopped_at + 1)
    victim.check_end(undisturbed)


def in_terminal(victim: Victim, words: list[str], **env: str) -> Terminal:
    """A run of many short steps in the foreground of a terminal; after its first save it waits to be let go."""
    return Terminal(words, env=environment(**trouble(wait_s=0.02, **victim.held_after(1)), **env))


LAUNCHES = {
    "finetune launch": lambda recipe: by_finetune("ddp", recipe),
    "finetune launch, one process": lambda recipe: by_finetune("single", recipe),
    "accelerate launch": lambda recipe: command("ddp", recipe),
    "accelerate launch, one process": lambda recipe: command("single", recipe),
    "torchrun": lambda recipe: [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())),
        *("scripts/train.py", recipe),
    ],
    "alone": lambda recipe: [sys.executable, "scripts/train.py", recipe],
}


@pytest.mark.parametrize("launch", list(LAUNCHES))
def test_a_terminal_that_closes_has_the_run_saved(
    fork_server: ForkServer, undisturbed: Victim, victim: Victim, launch: str
) -> None:
    with in_terminal(victim, LAUNCHES[launch](str(victim.recipe))) as terminal:
        assert Moment(1, 0.0).wait(victim, lambda: terminal.process.poll() is not None), terminal.output
        terminal.close()
        # A shell passes it on as well.
        terminal.process.send_signal(signal.SIGHUP)
        victim.let_go(once_asked=True)
        code = terminal.end()
        until(lambda: not held(victim), WAIT_S, "the workers did not end")
    if launch.startswith(("finetune", "alone")):
        assert code == REQUEUE
    facts = victim.facts()
    assert "stopped" in facts
    # Other launchers may end at once, or end their workers: at a second hangup torchrun sends SIGTERM.
    others = () if launch.startswith(("finetune", "alone")) else ("SIGTERM", "the launcher is gone")
    assert facts["results"]["stopped"] in ("SIGHUP", *others)
    victim.check()
    assert 3 <= victim.newest() < victim.steps
    if "one process" not in launch and launch != "alone":
        finish(fork_server, victim)
        victim.check_end(undisturbed)


def test_under_nohup_a_terminal_that_closes_changes_nothing(undisturbed: Victim, victim: Victim) -> None:
    """Nor do hangups that are sent to launcher and workers one by one."""
    words = shlex.join(by_finetune("ddp", str(victim.recipe)))
    shell = f"nohup {words} > {victim.folder}/launched 2>&1 & echo $! > {victim.folder}/pid; wait"
    with in_terminal(victim, ["sh", "-c", shell]) as terminal:
        assert Moment(1, 0.0).wait(victim, lambda: terminal.process.poll() is not None), said_by(victim)
        parent = psutil.Process(int((victim.folder / "pid").read_text()))
        terminal.close()
        assert terminal.end() == -signal.SIGHUP, "the shell is gone"
        told = [parent, *parent.children()]
        assert len(told) == 3
        for process in told:
            process.send_signal(signal.SIGHUP)
        victim.let_go()
        parent.wait(RUN_S)
    victim.check_end(undisturbed)


def test_ctrl_c_says_where_a_run_stopped_and_leaves_nothing_behind(victim: Victim, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    words = by_finetune("ddp", "--max_restarts", "3", str(victim.recipe))
    with in_terminal(victim, words, TMPDIR=str(folder)) as terminal:
        assert Moment(1, 0.0).wait(victim, lambda: terminal.process.poll() is not None), terminal.output
        terminal.press_ctrl_c()
        victim.let_go(once_asked=True)
        assert terminal.end() == REQUEUE, terminal.output
    step = victim.newest()
    checkpoint = victim.checkpoints / name_of(step)
    said = f"Stopped at step {step} of 24 (SIGINT), saved in {checkpoint}. The same command resumes here."
    assert terminal.output.count(said) == 1
    for word in ("Traceback", "signal", "Error", "SIGTERM"):
        assert word not in terminal.output
    assert len(victim.facts()["starts"]) == 1, "it is not started again"
    assert [path.name for path in folder.iterdir() if path.suffix != ".lock"] == []
