"""The benchmark: rows come out whole, and an arm that learns something else is refused."""

import importlib.util
import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, environment, run

sys.path.insert(0, str(ROOT / "scripts"))

import benchmark as script
from bench import table, turns
from bench.arms.ours import EqualRows
from bench.cases import Case, cases
from bench.turns import Measured, Result, Turn

from finetune.data.rows.row_order import rows_at


def benchmark(python: str, folder: Path, *words: str, rounds: int = 2) -> tuple[int, str, dict[str, Any]]:
    """Runs the command on tiny shapes; returns its exit code, output and figures."""
    figures = folder / "figures.json"
    command = [
        python,
        "scripts/benchmark.py",
        "--tiny",
        "--rounds",
        str(rounds),
        "--json",
        str(figures),
        *words,
    ]
    code, output = run(command, env=environment())
    return code, output, json.loads(figures.read_text()) if figures.exists() else {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, quick_python: str) -> tuple[int, str, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("benchmark")
    document = folder / "benchmarks.md"
    document.write_text(f"method\n{table.MARK}\nold results\n")
    names = "tiny, accumulation 2;tiny raw;tiny start"
    # A second round starts six processes more; those below take two, in which nothing starts.
    code, output, figures = benchmark(quick_python, folder, "--cases", names, "--write", str(document), rounds=1)
    return code, output, figures, document.read_text()


@pytest.mark.xdist_group("benchmark")
def test_rows_come_out_whole(whole: tuple[int, str, dict[str, Any], str]) -> None:
    code, output, figures, _ = whole
    assert code == 0, output
    steps, raw, start = figures["rows"]
    assert [result["arm"] for result in steps["results"]] == ["bare", "ours", "trainer"]
    for result in steps["results"]:
        assert result["problem"] == ""
        assert len(result["step_ms"]) == len(result["cpu_ms"]) == 1
        assert min(result["step_ms"] + result["cpu_ms"] + [result["targets_per_s"], result["peak_mib"]]) > 0
        assert len(result["losses"]) == len(result["norms"]) == result["compared"] == 4 + 2
        assert min(result["norms"]) > 0
        assert result["loss_gap"] < 1e-4
    reads = {result["arm"]: result["reads"] for result in steps["results"]}
    assert reads["ours"] <= reads["bare"] < reads["trainer"]
    for row, names in ((raw, {"total_s", "prepare_s", "steps_s", "useful", "cpu_s"}), (start, {"start_s", "cpu_s"})):
        assert not row["problems"], row["problems"]
        for arm in ("ours", "trainer"):
            assert names <= row["figures"][arm].keys()
            assert all(len(values) == 1 for values in row["figures"][arm].values())
    assert figures["facts"].keys() >= {"torch", "accelerate", "transformers", "processor", "load", "date", "command"}


@pytest.mark.xdist_group("benchmark")
def test_results_go_behind_their_line(whole: tuple[int, str, dict[str, Any], str]) -> None:
    document = whole[3]
    assert document.startswith("method\n")
    assert "old results" not in document
    assert document.count("### tiny") == 3


def test_arms_that_learn_something_else_or_cannot_start_are_said(tmp_path: Path, quick_python: str) -> None:
    words = ("--cases", "tiny fp32, all", "--arms", "trainer,litgpt", "--spoil", "ours")
    code, output, figures = benchmark(quick_python, tmp_path, *words)
    assert code == 1, output
    results = {result["arm"]: result for result in figures["rows"][0]["results"]}
    assert results["ours"]["problem"].startswith(turns.VOID)
    assert results["ours"]["step_ms"] == []  # no turn of it was timed
    assert "its loss differs by" in output
    assert results["trainer"]["problem"] == ""
    assert len(results["trainer"]["step_ms"]) == 2
    if importlib.util.find_spec("litgpt") is None:
        assert results["litgpt"]["problem"].startswith("did not start: ModuleNotFoundError")


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra [bench]")
def test_other_toolkits_learn_the_same(tmp_path: Path, quick_python: str) -> None:
    _, output, figures = benchmark(quick_python, tmp_path, "--cases", "tiny fp32, all", "--arms", "trl,trl-best")
    assert [result["problem"] for result in figures["rows"][0]["results"]] == [""] * 4, output


def test_rows_are_read_in_the_order_of_the_file() -> None:
    rows = np.arange(37 * 5).reshape(37, 5)
    equal = EqualRows(rows, seed=3)
    batch = equal.batch(rows_at(np.arange(8, 12), num_rows=37, seed=3))
    assert batch["input_ids"].tolist() == rows[8:12].tolist()
    assert batch["targets"][:, :-1].tolist() == rows[8:12, 1:].tolist()
    assert (batch["targets"] >= 0).sum().item() == equal.num_targets(np.arange(4))


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine was three times as slow in the second round: of the medians' ratio it would be 1.5 at most.
    ours, theirs = Result("ours", step_ms=[10, 30, 10]), Result("trainer", step_ms=[20, 60, 20])
    assert turns.ratios(theirs, ours) == (2, 2, 2)


@pytest.mark.parametrize("losses", [[1.0, 2.1], [1.0], [1.0, math.nan]])
def test_what_differs_in_a_step_is_void(losses: list[float]) -> None:
    case = Case("one", "tiny", ("bare", "ours"))
    results = {name: Result(name) for name in case.arms}
    found = {"bare": [_turn([1.0, 2.0])], "ours": [_turn(losses)]}
    turns._compare(case, results, found)
    assert not results["bare"].problem
    assert results["ours"].problem.startswith(turns.VOID)
    text = table.text(Measured(case, 1, (0.0, 0.0), [Result("bare", step_ms=[1], cpu_ms=[1]), results["ours"]]))
    assert turns.VOID in text


def test_a_gradient_of_nought_is_void() -> None:
    case = Case("one", "tiny", ("bare", "ours"))
    results = {name: Result(name) for name in case.arms}
    turns._compare(case, results, {name: [_turn([1.0], norm=0.0)] for name in case.arms})
    assert results["ours"].problem == "void: a gradient norm is 0"


def _turn(losses: list[float], norm: float = 1.0) -> Turn:
    return Turn(1.0, 1.0, losses, [norm] * len(losses), 10, 100.0, 50.0, None)


def test_rows_are_named_whole_or_in_part() -> None:
    def chosen(cases: str) -> list[str]:
        return [row.name for row in script._choose(Namespace(cases=cases, arms=None, tiny=False, quick=False))]

    assert chosen("15M bf16;start, 15M fp32, 2") == ["15M bf16", "start, 15M fp32, 2 x fsdp"]
    assert chosen("raw") == [f"raw TinyStories, {shape}" for shape in ("1M fp32", "15M fp32", "15M bf16")]
    assert chosen("15M bf16;nonesuch") == []


def test_only_our_arms_have_huge_pages_unless_the_user_says_so(monkeypatch) -> None:
    def switch(arm: str) -> str:
        return turns.environment(arm, threads=1)["THP_MEM_ALLOC_ENABLE"]

    monkeypatch.setattr(turns, "HUGE_PAGES", "")
    assert [switch(arm) for arm in ("bare@fsdp", "bare+", "ours@fsdp", "trainer")] == ["0", "1", "1", "0"]
    for told in "01":
        monkeypatch.setattr(turns, "HUGE_PAGES", told)
        assert {switch(arm) for arm in ("bare", "ours", "trainer")} == {told}


def test_every_case_has_its_limit_first_and_ours() -> None:
    for case in cases():
        names = [arm.partition("@")[0] for arm in case.arms]
        assert names[0] == "bare"
        assert "ours" in names
        assert case.micro % 2 == 0 or "@" not in case.arms[0]


def test_a_document_without_its_line_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "notes.md"
    document.write_text("mine")
    with pytest.raises(ValueError, match="no line"):
        table.write(document, "results")
    assert document.read_text() == "mine"
