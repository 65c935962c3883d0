"""Ranks that others wait for are named; a run in which none gets on ends, and says which rank is behind."""

import json
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from forkserver import ForkServer, until
from harness import LIMIT_S, RUN_S, WAIT_S
from hypothesis import given
from hypothesis import strategies as st
from inside import mlp, run_here
from ranks import PARAGRAPH

from finetune.config.recipe_schema import GuardSection
from finetune.monitoring import rank_watch
from finetune.monitoring.rank_progress import (
    RANKS,
    START,
    OwnWork,
    Position,
    find_straggler,
    read_ranks,
    stall_text,
    straggler_line,
)
from finetune.monitoring.rank_watch import RankWatch

pytestmark = pytest.mark.xdist_group("rank watch")

FOLDER = Path("run/stalls/now")


def works(*busy: float, data: tuple[float, ...] = (), step_s: float = 1.0) -> list[OwnWork]:
    data = data or (0.0,) * len(busy)
    return [OwnWork(10, step_s, *pair) for pair in zip(data, busy, strict=True)]


def at(rank: int, marks: int, **changes: Any) -> Position:
    return Position(**{"place": f"rank {rank}", "step": 4, "phase": "forward", "marks": marks, "for_s": 7.0, **changes})


def test_the_rank_that_works_longest_is_behind() -> None:
    found = find_straggler(works(0.3, 0.7, 0.3), 0.25)
    assert found is not None
    assert (found.rank, round(found.late_s, 3), found.data_s, found.step_s) == (1, 0.4, 0.0, 1.0)
    assert straggler_line(found, "rank 1") == "rank 1 is behind: others wait 0.4 s of each step's 1 s for it"
    slow_disk = find_straggler(works(0.3, 0.3, data=(0.5, 0.0)), 0.25)
    assert slow_disk is not None
    assert straggler_line(slow_disk, "rank 0").endswith(
        "wait 0.5 s of each step's 1 s for it, 0.5 s of them for its data"
    )
    assert find_straggler(works(0.3, 0.5), 0.25) is None
    assert find_straggler(works(0.3), 0.25) is None


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=9), st.floats(0.01, 2.0))
def test_whoever_is_named_works_longest(busy: list[float], share: float) -> None:
    found = find_straggler(works(*busy), share)
    if found is not None:
        assert busy[found.rank] == max(busy)
        assert found.late_s > share
        assert 0.0 <= found.data_s <= found.late_s


def test_what_is_said_of_ranks_that_come_no_further() -> None:
    ahead, behind = at(0, 9, phase="backward", collectives=6, collective="6 of all"), at(1, 8, for_s=8.0)
    text = stall_text([ahead, behind], {}, 0.5, FOLDER)
    assert "No rank has come further for 7 s; a step usually takes 0.5 s." in text
    assert "Behind is rank 1, for 8 s: at step 5, in `forward`. Others are at step 5, in `backward`, in or" in text
    assert "are in run/stalls/now. All ranks end; the same command resumes from the last checkpoint." in text
    # At the same point, but in another collective.
    assert "Behind is rank 2, for 7 s: " in stall_text(
        [at(0, 8, collectives=4), at(2, 8, collectives=3)], {}, 0.5, FOLDER
    )
    assert "All are at step 5, in `forward`. The network" in stall_text([at(0, 8), at(1, 8)], {}, 0.5, FOLDER)
    parted = [at(rank, 8, collectives=5, collective=f"4 of all, {kind}") for rank, kind in enumerate("aba")]
    assert (
        "Ranks are at one point, but not in one collective: rank 0 and rank 2 at step 5, in `forward`, in or after "
        "collective 4 of all, a; rank 1 at step 5, in `forward`, in or after collective 4 of all, b. Code that"
    ) in stall_text(parted, {}, 0.5, FOLDER)
    assert "Behind is rank 1 and rank 2, " in stall_text([ahead, behind, at(2, 8)], {}, 0.5, FOLDER)
    silent = at(1, 7, phase="aside")
    assert "No answer comes from rank 1 (last seen after step 4, evaluating or saving), which is" in stall_text(
        [ahead], {"rank 1": silent}, 0.5, FOLDER
    )
    assert "No answer comes from rank 1, which is stopped by" in stall_text([ahead], {"rank 1": None}, 0.5, FOLDER)
    assert stall_text([at(0, 3)], {}, 0.0, FOLDER).startswith("This run has not come further for 7 s. It is at step 5")


class Ranks:
    """Watches of ranks that are threads of this process, by notes that they share."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, **guard: Any) -> None:
        self.notes: dict[str, Any] = {}
        self.lines: list[str] = []
        self.alerts: list[tuple[str, str]] = []
        monkeypatch.setattr(rank_watch, "RankNotes", lambda rank, world_size: self)
        monkeypatch.setattr(rank_watch, "_COMPARED_S", 0.0)
        monkeypatch.setattr(
            rank_watch, "send_alert", lambda guard, event, text, facts: self.alerts.append((event, text))
        )
        monkeypatch.setattr(rank_watch, "to_stderr", self.lines.append)
        self.watches = [
            RankWatch(GuardSection(**guard), folder, rank=rank, world_size=number) for rank in range(number)
        ]
        for watch in self.watches:
            watch._name = "watch"

    def write(self, name: str, note: Any) -> None:
        self.notes[name] = json.loads(json.dumps(note))

    def write_first(self, name: str, note: Any) -> Any:
        return self.notes.setdefault(name, note)

    def read(self, names: list[str]) -> dict[str, Any]:
        return {name: self.notes[name] for name in names if name in self.notes}

    def read_failure(self) -> None:
        return None

    def work(self, *busy: float) -> None:
        """Each rank takes ten steps, of one second each, in which it works so long."""
        for watch, busy_s in zip(self.watches, busy, strict=True):
            before = watch._work
            watch._work = OwnWork(before.steps + 10, before.seconds + 10, 0.0, before.busy_s + 10 * busy_s)
        # Rank 0 looks at what all have noted.
        for watch in reversed(self.watches):
            watch._tick(self)  # type: ignore[arg-type]


def test_a_rank_is_named_when_it_is_behind_twice_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, monkeypatch, 3)
    ranks.work(0.1, 0.1, 0.1)
    ranks.work(0.1, 0.1, 0.6)
    ranks.work(0.1, 0.1, 0.1)
    ranks.work(0.1, 0.7, 0.1)
    assert ranks.lines == []
    assert read_ranks(tmp_path) is None
    ranks.work(0.1, 0.7, 0.1)
    ranks.work(0.1, 0.8, 0.1)
    said = "rank 1 is behind: others wait 0.6 s of each step's 1 s for it"
    assert ranks.lines == [f"after step 0: {said}"]
    assert ranks.alerts == [("straggler", said)]
    assert read_ranks(tmp_path) == said.replace("0.6", "0.7")
    ranks.work(0.1, 0.1, 0.1)
    ranks.work(0.1, 0.1, 0.1)
    assert ranks.lines[1:] == ["after step 0: rank 1 is no longer behind"]
    assert read_ranks(tmp_path) is None


def test_nobody_is_named_where_nobody_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, monkeypatch, 2, straggler=None)
    for _ in range(4):
        ranks.work(0.1, 0.9)
    assert ranks.lines == []


def test_phases_have_their_own_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (watch,) = Ranks(tmp_path, monkeypatch, 1, stall_s=20.0).watches
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch.mark("forward")
    # What is loaded, or compiled in the first step, takes longer than a step.
    assert watch._limit_s() == 120.0
    watch.mark(START)
    assert watch._limit_s() == 120.0
    watch.mark("forward")
    watch.step_taken(1)
    assert watch._limit_s() == 20.0
    now[0] += 3.0
    watch.step_taken(2)
    assert watch._limit_s() == 30.0
    watch.mark("aside")
    assert watch._limit_s() == 180.0
    watch.mark(rank_watch.CALLER)
    assert watch._limit_s() is None
    (watch,) = Ranks(tmp_path, monkeypatch, 1, stall_s=None).watches
    watch.step_taken(1)
    assert watch._limit_s() is None


def test_damaged_files_of_ranks_say_nothing(tmp_path: Path) -> None:
    assert read_ranks(tmp_path) is None
    for content in ("", "{", "[]", '{"ranks": [], "behind": null}', '{"ranks": [{"place": "a"}], "behind": "b"}'):
        (tmp_path / RANKS).write_text(content)
        assert read_ranks(tmp_path) is None
    rank = {"place": "rank 1", "step": 4, "phase": "data", "marks": 3, "for_s": 40.5}
    (tmp_path / RANKS).write_text(json.dumps({"ranks": [rank, {**rank, "marks": 9}], "behind": None}))
    assert read_ranks(tmp_path) == "rank 1 is at step 5, in `data`, for 40 s"


def test_what_fails_while_a_watch_ends_the_process_waits(tmp_path: Path) -> None:
    """Or rank 0 would send a second alert, of the collective that failed since others have ended."""
    watch, ended, done = RankWatch(GuardSection(), tmp_path, rank=0, world_size=2), threading.Event(), threading.Event()
    watch._thread = threading.Thread(target=ended.wait, daemon=True)
    watch._thread.start()

    def fail() -> None:
        with watch:
            watch._ending.set()
        done.set()

    failing = threading.Thread(target=fail, daemon=True)
    failing.start()
    assert not done.wait(0.2)
    ended.set()
    assert done.wait(WAIT_S)


def test_threads_end_with_the_run(tmp_path: Path) -> None:
    # Of runs that other tests have built, and not trained.
    before = threading.enumerate()
    run_here(mlp(tmp_path / "run"))
    assert "rank watch" not in [thread.name for thread in threading.enumerate() if thread not in before]


# ---------------------------------------------------------------- launched


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    tree = mlp(
        tmp_path / "run",
        task={"name": "troubled_task:mlp"},
        batch={"global_size": 8, "micro_size": 2},
        length={"steps": 100_000},
        log={"every_steps": 100},
        guard={"stall_s": 1.0, "alert": f"tee {tmp_path / 'alert.json'}"},
    )
    file.write_text(yaml.safe_dump({**tree, "output": {"dir": str(tmp_path / "run"), "overwrite": True}}))
    return file


@pytest.mark.parametrize(
    ("launch", "trouble", "said"),
    [
        ("ddp", "collective", r"Behind is rank 1, for \d+ s: at step 6, in `forward`, at \S+troubled_task.py:\d+ "),
        (
            "fsdp",
            "lock",
            r"No answer comes from rank 1(?: \(last seen .*\))?, which is stopped by",
        ),
    ],
)
def test_ranks_that_come_no_further(
    launch: str, trouble: str, said: str, fork_server: ForkServer, recipe: Path, tmp_path: Path
) -> None:
    """One waits in a collective of its own; one keeps Python's lock, so that its own threads stand still as well."""
    # Whoever can answer does so, however late.
    answer = {"answer_s": LIMIT_S} if trouble == "collective" else {}
    env = {"TROUBLE": json.dumps({trouble: {"rank": 1, "at": 10}, **answer})}
    with fork_server.start(launch, tmp_path, str(recipe), env=env) as ranks:
        until(lambda: ranks.codes[0] is not None, RUN_S, ranks.output)
        assert ranks.codes[0] == 1
        (paragraph,) = set(PARAGRAPH.findall(ranks.output()))
    assert re.search(r"No rank has come further for \d+ s", paragraph)
    assert re.search(said, paragraph), paragraph
    assert re.search(r"Others are at step 6, in `\w+`, at \S+ ", paragraph), paragraph
    (folder,) = (tmp_path / "run" / rank_watch.STALLS).iterdir()
    assert str(folder) in paragraph
    told = json.loads((tmp_path / "alert.json").read_text())
    assert (told["event"], told["step"], told["run"]) == ("stalled", 5, str(tmp_path / "run"))
    assert "No rank has come further" in told["text"]
    assert "in train_step" in (folder / "rank-0.txt").read_text()
    recorded = json.loads((folder / "rank-0.collectives.json").read_text())
    assert recorded["entries"][-1]["profiling_name"].startswith("gloo:")
    if trouble == "collective":
        assert "in _wait_for_others" in (folder / "rank-1.txt").read_text()


@pytest.mark.parametrize(
    ("at", "where"),
    [
        (-1, r"not in one collective: rank 0 before the first step, loading .*, gloo:broadcast .*; rank 1 .*:barrier"),
        (0, "Others are at step 1, in `"),
    ],
)
def test_a_stall_before_the_first_step_is_done_ends(
    fork_server: ForkServer, recipe: Path, tmp_path: Path, at: int, where: str
) -> None:
    """In the rehearsal that precedes it, and in the step itself."""
    env = {"TROUBLE": json.dumps({"collective": {"rank": 1, "at": at}, "answer_s": LIMIT_S})}
    with fork_server.start("ddp", tmp_path, str(recipe), env=env) as ranks:
        assert ranks.wait() == [1, 1]
        (paragraph,) = set(PARAGRAPH.findall(ranks.output()))
    assert re.search(rf"No rank has come further for \d+ s\. .*{where}", paragraph), paragraph


def test_ctrl_c_ends_what_comes_no_further(fork_server: ForkServer, recipe: Path, tmp_path: Path) -> None:
    """Long before `guard.grace_s` is over, which is for saving."""
    hung = tmp_path / "hung"
    env = {"TROUBLE": json.dumps({"collective": {"rank": 1, "at": 0, "file": str(hung)}, "hung_s": 1.0})}
    with fork_server.start("ddp", tmp_path, str(recipe), "guard.stall_s=null", "guard.grace_s=3600", env=env) as ranks:
        until(hung.exists, RUN_S, ranks.output)
        ranks.signal(signal.SIGINT)
        assert ranks.wait() == [130, 130]
        said = PARAGRAPH.findall(ranks.output())
    assert len(said) == 2
    for text in said:
        assert re.match(
            r"Error: asked to stop \(SIGINT\), but this process comes no further \(at step 1, in `\w+`", text
        )


def test_an_error_of_one_rank_ends_the_others(fork_server: ForkServer, recipe: Path, tmp_path: Path) -> None:
    """No launcher is there that would, and no connection breaks that they look at."""
    trouble = {"raise": {"rank": 1, "at": 4}, "hang": {"rank": 0, "at": 4}, "alike_s": 0.1, "lost_s": 0.1}
    env = {"TROUBLE": json.dumps(trouble)}
    with fork_server.start("ddp", tmp_path, str(recipe), "guard.stall_s=null", env=env) as ranks:
        assert ranks.wait() == [1, 1]
        said = ranks.output(0)
    assert "Rank 0 ends, because another rank is gone: rank 1 has failed: RuntimeError: the task has had enough" in said


def test_a_rank_that_computes_longer_is_named_while_it_runs(
    fork_server: ForkServer, recipe: Path, tmp_path: Path
) -> None:
    env = {"TROUBLE": json.dumps({"late": {"rank": 1, "s": 0.02}, "compared_s": 0.5})}
    with fork_server.start("ddp", tmp_path, str(recipe), "guard.stall_s=null", env=env) as ranks:
        until(lambda: "rank 1 is behind" in ranks.output(0), RUN_S, ranks.output)
    assert re.search(r"rank 1 is behind: others wait \d\.\d+ s of each step's \d\.\d+ s for it", ranks.output(0))
    assert "rank 0 is behind" not in ranks.output(0)
