"""`finetune comms`: the definitions of nccl-tests, the fit, and a measurement between two processes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Launcher, run
from hypothesis import given
from hypothesis import strategies as st

from finetune.cli import main
from finetune.distributed import link_speeds, measure_bandwidth
from finetune.utils.errors import RecipeError

# doc/PERFORMANCE.md of nccl-tests: busbw by algbw.
FACTORS = {
    "broadcast": lambda n: 1,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "reduce": lambda n: 1,
    "send": lambda n: 1,
}


def times(link: link_speeds.Line, processes: int, wanted: list[int]) -> list[tuple[link_speeds.Ring, int, float]]:
    """What rings of such links would be measured to take."""
    return [(ring, size, link.seconds(ring, processes, size)) for ring in link_speeds.RINGS.values() for size in wanted]


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("processes", [2, 3, 8, 512])
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, processes: int) -> None:
    assert link_speeds.RINGS[name].share(processes) == pytest.approx(FACTORS[name](processes))


@given(
    latency=st.floats(1e-7, 1e-2),
    bandwidth=st.floats(1e6, 1e12),
    processes=st.integers(2, 64),
)
def test_a_ring_is_found_again(latency: float, bandwidth: float, processes: int) -> None:
    """Whatever the links: the fit predicts what they took."""
    link = link_speeds.Line(latency, bandwidth)
    measured = times(link, processes, [1 << k for k in range(10, 31, 4)])
    found = measure_bandwidth.fit_link(measured, processes)
    for ring, size, seconds in measured:
        assert found.seconds(ring, processes, size) == pytest.approx(seconds, rel=1e-3)


def test_a_latency_is_never_below_nought() -> None:
    """Larger sizes that are slower than in proportion would ask for one."""
    ring = link_speeds.RINGS["all_reduce"]
    measured = [(ring, size, size**1.3 * 1e-9) for size in (1 << 10, 1 << 14, 1 << 18)]
    found = measure_bandwidth.fit_link(measured, 2)
    assert found.latency_s == 0
    assert found.bandwidth > 0


@given(first=st.integers(1, 10**6), more=st.integers(0, 10**9), factor=st.integers(2, 16), processes=st.integers(2, 33))
def test_sizes_divide_by_ranks(first: int, more: int, factor: int, processes: int) -> None:
    found = measure_bandwidth.message_sizes(first, first + more, factor, processes)
    assert found == sorted(set(found))
    assert found
    assert all(size > 0 and size % (4 * processes) == 0 for size in found)
    assert max(found) <= max(first + more, 4 * processes)


@pytest.mark.parametrize("wanted", [(0, 10, 2), (20, 10, 2), (1, 10, 1)])
def test_no_sizes_are_refused(wanted: tuple[int, int, int]) -> None:
    with pytest.raises(RecipeError, match="--min-bytes"):
        measure_bandwidth.message_sizes(*wanted, 2)


@pytest.fixture(scope="module")
def measured(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    file = tmp_path_factory.mktemp("comms") / "links.json"
    sizes = ["--min-bytes", "1000", "--max-bytes", "300000", "--factor", "16"]
    code, output = run([sys.executable, "-m", "finetune", "comms", "--processes", "2", *sizes, "--json", str(file)])
    assert code == 0, output
    return json.loads(file.read_text()), output


@pytest.mark.xdist_group("comms")
def test_two_processes_are_measured(measured: tuple[dict[str, Any], str]) -> None:
    found, output = measured
    assert (found["format"], found["backend"], found["processes"], found["machines"]) == (1, "gloo", 2, 1)
    assert set(found["collectives"]) == set(FACTORS)
    for name, rows in found["collectives"].items():
        assert [row["bytes"] for row in rows["sizes"]] == [1000, 16000, 256000]
        for row in rows["sizes"]:
            assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"])
            assert row["busbw"] == pytest.approx(row["algbw"] * FACTORS[name](2))
        assert rows["latency_s"] >= 0
        assert rows["bandwidth"] > 0
    assert found["link"]["bandwidth"] > 0
    # Said by rank 0 alone.
    assert output.count("gloo on 2 processes") == 1


def test_what_cannot_be_measured_is_one_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--processes", "1"], "a collective needs two processes or more"),
        (["--json", str(tmp_path / "none" / "links.json")], "there is no folder"),
        (["--config_file", str(tmp_path / "none.yaml")], "Cannot read the launch file"),
    ):
        assert main.main(["comms", *words]) == 2
        said = capsys.readouterr().err
        assert said.count("Error: ") == 1
        assert says in said
