"""`finetune audit` proves which rows a run has read, over all its stops, and sees whatever was done to its ledger."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from forkserver import ForkServer
from harness import read_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import Done, at_step, copy, mlp, run_here, stop_after

from finetune.checkpoint import row_ledger
from finetune.cli import main
from finetune.data.rows.feed import TokenFileFeed
from finetune.data.rows.row_order import rows_at
from finetune.utils.errors import CheckpointError, RecipeError

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("ledger")]

ROWS = 200  # of `own_task:mlp`


class Crash(Exception):
    """Ends a run at once, with nothing saved."""


def crash_after(step: int) -> Callable[[Any], None]:
    def crash(run: Any) -> None:
        # A process that crashes takes its writer with it; here that would go on beside the next run.
        run.checkpoints.join_writer()
        raise Crash

    return at_step(step, crash)


def should_read(steps: int, size: int, *, drop: bool, seed: int = 3) -> list[list[int]]:
    """The rows of each step, as the order function says."""
    epoch_rows = ROWS - ROWS % size if drop else ROWS
    rows = rows_at(np.arange(steps * size), num_rows=ROWS, seed=seed, epoch_rows=epoch_rows)
    return rows.reshape(steps, size).tolist()


def read(directory: Path) -> list[list[int]]:
    """The rows of each step, as the ledger says."""
    return [entry.rows.tolist() for entry in row_ledger.used_rows(directory)]


def rewrite(directory: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "ledger.jsonl").write_text(text)


def holds(directory: Path) -> bool:
    """Whether an audit is content; that it cannot be read counts as a no."""
    try:
        return row_ledger.audit_ledger(directory).holds
    except CheckpointError:
        return False


# ---------------------------------------------------------------- what runs write


@settings(max_examples=12)
@given(data=st.data())
def test_each_row_once_however_often_it_stopped(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Stops and crashes at any step, each start with another micro-batch; epochs that no batch ends with."""
    size = data.draw(st.sampled_from([8, 12, 30, 64]), "global size")
    drop = data.draw(st.booleans(), "drop the last batch of an epoch")
    last = data.draw(st.integers(1, 900 // size), "steps")
    ends = data.draw(st.lists(st.tuples(st.integers(1, last), st.booleans()), max_size=3), "stops")
    directory = tmp_path_factory.mktemp("ledger") / "run"
    for step, crash in [*ends, (last + 1, False)]:
        micro = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]), "micro size")
        tree = mlp(
            directory,
            batch={"global_size": size, "micro_size": micro},
            length={"steps": last},
            checkpoint={"every_steps": max(1, 60 // size)},
            data={"last_batch": "drop" if drop else "carry"},
            eval={"at_end": False},
        )
        try:
            run_here(tree, (crash_after if crash else stop_after)(step))
        except Crash:
            assert crash
    found = row_ledger.audit_ledger(directory)
    assert found.holds, found.lines()
    assert read(directory) == should_read(last, size, drop=drop)
    # Counted here once more, without the ledger's own bookkeeping.
    epoch_rows = ROWS - ROWS % size if drop else ROWS
    flat = [row for step in read(directory) for row in step]
    for epoch in found.epochs:
        part = flat[epoch.number * epoch_rows : (epoch.number + 1) * epoch_rows]
        assert max(Counter(part).values()) == 1
        assert (epoch.rows, epoch.once, epoch.more) == (epoch_rows, len(part), 0)
        assert epoch.finished == (len(part) == epoch_rows)
    assert len(found.epochs) == -(-last * size // epoch_rows)
    shutil.rmtree(directory)


def test_two_ranks_and_one_in_turn(fork_server: ForkServer, tmp_path: Path) -> None:
    """What every rank read is in the checksum, and a resume on other ranks with other micro-batches goes on in it."""
    directory = tmp_path / "run"
    for world, last, micro in ((2, 7, 3), (1, 13, 4), (2, 18, 1), (1, 20, 12)):
        tree = mlp(directory, batch={"global_size": 12, "micro_size": micro}, length={"steps": last})
        if world == 1:
            run_here(tree)
            continue
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tree))
        with fork_server.start("ddp", tmp_path / "ranks", str(recipe)) as ranks:
            assert ranks.wait() == [0, 0], ranks.output()
    found = row_ledger.audit_ledger(directory)
    assert found.holds, found.lines()
    assert read(directory) == should_read(20, 12, drop=False)
    assert [start["processes"] for start in json.loads((directory / "run.json").read_text())["starts"]] == [2, 1, 2, 1]


def test_rows_that_another_process_read_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is of what was read. A loop that reads other rows than it should is found out."""
    micro_batches = TokenFileFeed.micro_batches

    def wrong(feed: TokenFileFeed, step: int) -> list[np.ndarray]:
        rows = micro_batches(feed, step)
        if step == 6:
            rows[-1] = (rows[-1] + 1) % ROWS
        return rows

    monkeypatch.setattr(TokenFileFeed, "micro_batches", wrong)
    found = row_ledger.audit_ledger(run_here(mlp(tmp_path / "run")).directory)
    assert found.unproved == [7]
    assert not found.holds


def test_a_run_that_began_from_anothers_checkpoint(tmp_path: Path) -> None:
    run_here(mlp(tmp_path / "one", length={"steps": 30}), stop_after(10))
    tree = mlp(tmp_path / "two", length={"steps": 30}, resume={"mode": str(tmp_path / "one")})
    run_here(tree, stop_after(17))
    run_here(tree)
    found = row_ledger.audit_ledger(tmp_path / "two")
    assert found.holds, found.lines()
    assert (found.first, found.num_steps) == (11, 20)
    assert read(tmp_path / "two") == should_read(30, 8, drop=False)[10:]


# ---------------------------------------------------------------- what is done to a ledger


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two epochs and a half, with a crash that takes steps 31 to 33 again, and a stop."""
    tree = mlp(tmp_path_factory.mktemp("finished") / "run", length={"steps": 62})
    tree["checkpoint"]["asynchronous"] = False
    with pytest.raises(Crash):
        run_here(tree, crash_after(33))
    run_here(tree, stop_after(45))
    done = run_here(tree)
    assert row_ledger.audit_ledger(done.directory).holds
    assert [line["start"] for line in read_lines(done.directory / "ledger.jsonl") if "start" in line] == [0, 30, 45]
    return done


def lines_of(done: Done) -> list[dict[str, Any]]:
    return read_lines(done.directory / "ledger.jsonl")


def at(lines: list[dict[str, Any]], key: str, value: int) -> int:
    """The last line that has this."""
    return max(number for number, line in enumerate(lines) if line.get(key) == value)


def change(lines: list[dict[str, Any]], number: int, **values: Any) -> list[dict[str, Any]]:
    return [{**line, **values} if n == number else line for n, line in enumerate(lines)]


def without(lines: list[dict[str, Any]], *numbers: int) -> list[dict[str, Any]]:
    return [line for n, line in enumerate(lines) if n not in numbers]


FAULTS: dict[str, tuple[Callable[[list[dict[str, Any]]], list[dict[str, Any]]], str]] = {
    "a line removed": (lambda ls: without(ls, at(ls, "step", 50)), "no line for step 51"),
    "a checksum changed": (
        lambda ls: change(ls, at(ls, "step", 50), rows=ls[at(ls, "step", 50)]["rows"] + 1),
        "NOT the rows that the order says: steps 51",
    ),
    "two checksums exchanged": (
        lambda ls: change(
            change(ls, at(ls, "step", 50), rows=ls[at(ls, "step", 51)]["rows"]),
            at(ls, "step", 51),
            rows=ls[at(ls, "step", 50)]["rows"],
        ),
        "NOT the rows that the order says: steps 51, 52",
    ),
    "a step repeated": (lambda ls: [*ls, ls[at(ls, "step", 50)]], "two lines for step 51"),
    "a start at a wrong position": (
        lambda ls: change(ls, at(ls, "start", 45), position=44 * 8),
        "NOT where the step before ended: steps 46",
    ),
    "another seed at a start": (
        lambda ls: change(ls, at(ls, "start", 45), seed=4),
        "NOT the rows that the order says: steps 46, 47",
    ),
    "two starts at once": (
        # Two processes that write alternately.
        lambda ls: [ls[0], ls[0], *(line for line in ls[1:6] for _ in range(2))],
        "two lines for step 1",
    ),
    "one of them ahead": (lambda ls: [*ls[:6], ls[0], ls[6], ls[1], ls[7], ls[2]], "no line for steps 3 to 5 is there"),
    "the end cut off": (lambda ls: ls[:-1], "NOT to the end: the run has come to step 62"),
    "empty": (lambda ls: [], "NOT to the end: the run has come to step 62"),
    "the beginning cut off": (lambda ls: ls[at(ls, "start", 45) :], "NOT from the beginning: the run began with"),
    "a number too large": (lambda ls: change(ls, 0, position=1 << 70), "the run began with step 1"),
    "not a number": (lambda ls: change(ls, 0, position=None), "the run began with step 1"),
    "a key missing": (lambda ls: [{"start": 0}, *ls[1:]], "the run began with step 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_seen_by_name(finished: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    spoil, says = FAULTS[name]
    directory = copy(finished.directory, tmp_path / "run")
    rewrite(directory, spoil(lines_of(finished)))
    code = main.main(["audit", str(directory)])
    said = capsys.readouterr()
    assert says in said.out + said.err
    # A ledger that tells another story is a 1; one that tells none has to be mended.
    assert code == (1 if "THE LEDGER DOES NOT HOLD" in said.out else 2)
    assert "the ledger holds" not in said.out


@settings(max_examples=300)
@given(data=st.data())
def test_audits_that_hold_tell_the_truth(finished: Done, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Whatever is done to a ledger: the audit fails, or still says of each step what was really read."""
    lines, directory = lines_of(finished), tmp_path_factory.mktemp("spoilt")
    shutil.copy(finished.directory / "run.json", directory)
    for _ in range(data.draw(st.integers(1, 2))):
        number = data.draw(st.integers(0, len(lines) - 1))
        kind = data.draw(st.sampled_from(["remove", "repeat", "move", "change"]))
        if kind == "change":
            key = data.draw(st.sampled_from(sorted(lines[number].keys())))
            odd = st.none() | st.just("x") | st.just(1.5) | st.just(-1) | st.just(2**80)
            lines = change(lines, number, **{key: data.draw(st.integers(-2, 600) | odd)})
            continue
        line = lines[number]
        if kind != "repeat":
            lines = without(lines, number)
        if kind != "remove":
            place = data.draw(st.integers(0, len(lines)))
            lines = [*lines[:place], line, *lines[place:]]
    rewrite(directory, lines)
    if holds(directory):
        assert read(directory) == should_read(62, 8, drop=False)
    shutil.rmtree(directory)


def test_starts_that_differ_in_the_number_of_rows_are_refused(finished: Done, tmp_path: Path) -> None:
    lines, again = lines_of(finished), 40
    start = {**lines[0], "start": lines[again]["step"], "num_rows": lines[0]["num_rows"] + 2}
    start["position"] = lines[0]["position"] + start["start"] * lines[0]["global_size"]
    shutil.copy(finished.directory / "run.json", tmp_path)
    rewrite(tmp_path, [*lines[:again], start, *lines[again:]])
    with pytest.raises(CheckpointError, match=r"says of the same data that they have 200 rows and 202"):
        row_ledger.audit_ledger(tmp_path)


@settings(max_examples=60)
@given(data=st.data())
def test_wherever_it_is_cut(finished: Done, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """The run has ended: whatever is missing from the end is missed. A line begun and not ended is no fault itself."""
    directory = tmp_path_factory.mktemp("cut")
    shutil.copy(finished.directory / "run.json", directory)
    content = (finished.directory / "ledger.jsonl").read_bytes()
    length = data.draw(st.integers(0, len(content)))
    (directory / "ledger.jsonl").write_bytes(content[:length])
    # Without its last line break, the last line is whole.
    assert holds(directory) == (length >= len(content) - 1)
    (directory / "ledger.jsonl").write_bytes(content + content[:length].rpartition(b"\n")[2][:-1])
    assert holds(directory)
    shutil.rmtree(directory)


def test_a_torn_line_is_mended_by_the_next_start(finished: Done, tmp_path: Path) -> None:
    directory = copy(finished.directory, tmp_path / "run")
    with (directory / "ledger.jsonl").open("ab") as file:
        file.write(b'{"step":62,"ro')
    assert row_ledger.audit_ledger(directory).holds
    run_here(mlp(directory, length={"steps": 70}))
    assert row_ledger.audit_ledger(directory).holds
    assert read(directory) == should_read(70, 8, drop=False)


def spoil_bytes(kind: str, content: bytes) -> bytes:
    """A ledger of 12 steps: the line of its start, and one a step."""
    lines = content.splitlines(keepends=True)
    return {
        "empty": b"",
        "binary": bytes(range(256)) * 4,
        "cut": b"".join(lines[:8]),
        "zeros in the middle": b"".join([*lines[:5], b"\0" * 90 + b"\n", *lines[8:]]),
        "the start lost": b"".join([b"{nonsense\n", *lines[1:]]),
        "nested": b"".join([*lines[:5], b"[" * 100_000 + b"\n", *lines[6:]]),
    }[kind]


LOST = {
    "empty": range(1, 13),
    "binary": range(1, 13),
    "cut": range(8, 13),
    "zeros in the middle": range(5, 8),
    "the start lost": range(1, 13),
    "nested": range(5, 6),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_resume_says_what_can_no_longer_be_audited(tmp_path: Path, kind: str) -> None:
    """And the audit says the same of these steps, and still proves the others."""
    tree = mlp(tmp_path / "run")
    straight = run_here(mlp(tmp_path / "straight"))
    run_here(tree, stop_after(12))
    file = tmp_path / "run" / "ledger.jsonl"
    file.write_bytes(spoil_bytes(kind, file.read_bytes()))
    done = run_here(tree)
    lost = LOST[kind]
    which = f"step {lost[0]}" if len(lost) == 1 else f"steps {lost[0]} to {lost[-1]}"
    assert f"no line for {which} is there, or can be read" in " ".join(done.said.split())
    assert done.losses == straight.losses
    found = row_ledger.audit_ledger(tmp_path / "run")
    assert not found.holds
    assert found.lines()[-1] == "THE LEDGER DOES NOT HOLD"
    if lost[0] > 1:
        assert found.missing == list(lost)
        assert any(f"NOT audited: no line for {which}" in line for line in found.lines())
    else:
        assert found.lost == "NOT from the beginning: the run began with step 1"
    assert not found.unproved
    assert not found.gaps
    expected = should_read(20, 8, drop=False)
    steps = {entry.step + 1: entry.rows.tolist() for entry in row_ledger.used_rows(tmp_path / "run")}
    assert steps == {step: expected[step - 1] for step in range(1, 21) if step not in lost}
    # What was damaged is kept.
    assert (tmp_path / "run" / "ledger.jsonl.damaged").exists() == (
        kind in ("binary", "zeros in the middle", "the start lost", "nested")
    )


@pytest.mark.parametrize("kept", [0, 5, 9])
def test_a_checkpoint_proves_that_a_ledger_is_cut(tmp_path: Path, kept: int) -> None:
    """Also of a run that has not ended, and so says nothing of how far it came."""
    done = run_here(mlp(tmp_path / "run"), stop_after(10))
    assert row_ledger.audit_ledger(done.directory).holds
    lines = lines_of(done)
    rewrite(done.directory, lines[: 1 + kept])
    found = row_ledger.audit_ledger(done.directory)
    assert found.lost == "NOT to the end: the run has come to step 10"
    assert not found.holds


def test_a_checkpoint_that_was_refused_proves_nothing(tmp_path: Path) -> None:
    """The newest is damaged, so the run went back to the one before, and its ledger with it."""
    tree = mlp(tmp_path / "run")
    run_here(tree, stop_after(15))
    (tmp_path / "run" / "checkpoints" / "step-00000015" / "state.json").write_text("{}")
    run_here(tree, stop_after(12))
    found = row_ledger.audit_ledger(tmp_path / "run")
    assert found.holds, found.lines()
    assert found.num_steps == 12


# ---------------------------------------------------------------- what it prints


def listed(text: str) -> dict[int, list[int]]:
    found = {}
    for line in text.splitlines():
        if line.startswith("step "):
            head, _, rows = line.partition(", rows ")
            found[int(head.split(":")[0].split()[1])] = list(map(int, rows.split()))
    return found


@pytest.mark.parametrize(("span", "first", "last"), [("1:62", 1, 62), ("30:46", 30, 46), ("33", 33, 33)])
def test_the_list_is_the_order(
    finished: Done, capsys: pytest.CaptureFixture[str], span: str, first: int, last: int
) -> None:
    assert main.main(["audit", str(finished.directory), "--steps", span]) == 0
    said = capsys.readouterr().out
    expected = should_read(62, 8, drop=False)
    assert listed(said) == {step: expected[step - 1] for step in range(first, last + 1)}
    assert f"step {first}: position {(first - 1) * 8}, rows " in said
    assert "epoch 1: 200 rows, each row exactly once" in said
    assert "epoch 3: 200 rows, 96 rows once so far" in said
    assert "the ledger holds" in said


def test_what_cannot_be_listed(finished: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["audit", str(finished.directory), "--steps", "a:b"]) == 2
    assert "give A:B, such as 100:120, or one step" in capsys.readouterr().err
    assert main.main(["audit", str(tmp_path)]) == 2
    assert "holds no run: it has no run.json" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "says"), [("model", "holds a model, and no run"), ("nothing", "holds no run")])
def test_what_is_no_run_is_called_by_what_it_is(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=says):
        row_ledger.audit_ledger(tmp_path / name)
