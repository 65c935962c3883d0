"""`finetune watch` and `finetune runs`: what a terminal shows of runs."""

import io
import json
import os
import threading
import time
from pathlib import Path

import pytest
from inside import copy, mlp, run_here, stop_after
from rich.console import Console

from finetune.checkpoint.run_history import read_run
from finetune.cli.main import main
from finetune.diagnostics import watch_and_list
from finetune.diagnostics.watch_and_list import list_runs
from finetune.utils.atomic_files import write_json
from finetune.utils.console import plain_console


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and below another folder one that was stopped."""
    root = tmp_path_factory.mktemp("runs")
    run_here(mlp(root / "finished", eval={"every_steps": 5}))
    run_here(mlp(root / "sweep" / "stopped", optim={"lr": 3e-2}), stop_after(6))
    return root


def shown(run: Path, width: int = 80) -> str:
    console = plain_console(file=io.StringIO(), width=width, soft_wrap=False)
    watch_and_list.watch_run(run, console, once=True)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_list(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs), "--json"]) == 0
    found = {one["run"]: one for one in json.loads(capsys.readouterr().out)}
    assert {name: (one["status"], one["step"], one["num_steps"]) for name, one in found.items()} == {
        "finished": ("finished", 20, 20),
        "sweep/stopped": ("stopped", 6, 20),
    }
    best = read_run(runs / "finished").best_evaluation
    assert (found["finished"]["best_step"], found["finished"]["best_validation_loss"]) == best
    assert found["sweep/stopped"]["best_validation_loss"] is None
    assert main(["runs", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:3] == ["finished", "finished", "20/20"]
    assert lines[2].split()[:3] == ["sweep/stopped", "stopped", "6/20"]


def test_a_run_itself_is_a_list_of_one(runs: Path) -> None:
    assert [one.run for one in list_runs(runs / "finished")] == ["finished"]


def test_an_unreadable_run_does_not_hide_the_others(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copy(runs, tmp_path / "runs")
    (root / "sweep" / "stopped" / "run.json").write_text("{")
    assert main(["runs", str(root)]) == 0
    said = capsys.readouterr().out
    assert "unreadable" in said
    assert "run.json cannot be read" in " ".join(said.split())
    assert "20/20" in said


def test_nowhere_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path / "nothing")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0
    assert "There are no runs below" in capsys.readouterr().out
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80, 200])
def test_screen(runs: Path, tmp_path: Path, width: int) -> None:
    run = copy(runs / "finished", tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "sample": "Once\x1b[2J upon [red]a time " * 40}) + "\n")
    incident = {"step": 20, "kind": "nonfinite", "in_a_row": 1, "fatal": False, "micro_batches": []}
    (run / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    figures = {"cpu_percent": 53.25, "memory_used_gib": 1012.5, "memory_total_gib": 2015.2, "sent_mib_s": 8.0}
    for number, more in enumerate(({}, {"gpus": [{"percent": 97, "temperature_c": 71, "sm_clock_mhz": 1755}]})):
        sample = {"step": 20, "time": 9.0, "machine": number, "host": f"no\x1bde[red]{number}", **figures, **more}
        with (run / "machines.jsonl").open("a") as file:
            file.write(json.dumps(sample) + "\n")
    said = shown(run, width)
    lines = said.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= (40 if width > 40 else 60)
    if width == 200:
        (head,) = (number for number, line in enumerate(lines) if "net MiB/s" in line)
        first, second = (line.split() for line in lines[head + 1 : head + 3])
        assert first == ["0", "no\\x1bde[red]0", "53.2%", "1,012/2,015", "–", "–/8", "–/–", "–"]
        assert second == ["1", "no\\x1bde[red]1", *first[2:4], "97%", "71°C", *first[5:]]
    for words in ("finished", "20/20", "100%", "validation loss", "sample at step 20", "last incident: step 20"):
        assert words in said, words
    assert "\x1b" not in said
    assert "[red]a" in said
    assert any(0x2800 < ord(letter) < 0x2900 for letter in said), "no curve"
    assert said.count("●") >= 4


@pytest.mark.parametrize("words", [["runs"], ["watch", "--once"], ["parity"], ["report"]])
def test_a_strangers_texts_are_no_commands_of_the_terminal(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Neither names of runs nor what their files say, here and in errors: colours, titles, clipboards, markup."""
    evil = "\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e[/red]"
    run = copy(runs / "finished", tmp_path / f"run{evil}")
    facts = json.loads((run / "run.json").read_text())
    facts["precision"] = facts["starts"][-1]["host"] = evil
    write_json(run / "run.json", facts)
    broken = copy(run, tmp_path / f"broken{evil}")
    (broken / "run.json").write_text(json.dumps({**facts, evil: evil})[:-1])
    (broken / "recipe.yaml").write_text(json.dumps({evil: evil}))
    others = {"runs": [[str(tmp_path)]], "parity": [[str(run), str(run)], [str(run), str(broken)]]}
    for paths in others.get(words[0], [[str(run)], [str(broken)]]):
        main([words[0], *paths, *words[1:]])
    said = "".join(capsys.readouterr())
    assert "\\x1b]52;c;" in said
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*said}, said


def test_screen_of_a_run_without_a_step(runs: Path, tmp_path: Path) -> None:
    run = copy(runs / "finished", tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    assert "training loss" in shown(run)


def test_watching_ends_with_the_run(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copy(runs / "sweep" / "stopped", tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    start = {**facts["starts"][-1], "pid": os.getpid()}
    going = {key: value for key, value in facts.items() if key != "stopped"} | {"starts": [start]}
    (run / "run.json").write_text(json.dumps(going))
    monkeypatch.setattr(watch_and_list, "REFRESH_S", 0.05)
    screen = io.StringIO()
    console = Console(file=screen, width=80, height=40, force_terminal=True, highlight=False)
    thread = threading.Thread(target=watch_and_list.watch_run, args=(run, console))
    thread.start()
    before = time.monotonic()
    while "running" not in screen.getvalue() and time.monotonic() - before < 60:
        time.sleep(0.05)
    assert thread.is_alive()
    write_json(run / "run.json", {**going, "finished": "2026-01-01T00:00:00+0000"})
    thread.join(60)
    assert not thread.is_alive()
    assert "finished" in screen.getvalue()
