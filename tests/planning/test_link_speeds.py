"""`finetune plan --links`: measured links in place of a data sheet's."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ROOT, environment, run
from test_plan import planned, said, sections

from finetune.distributed.link_speeds import RINGS, Line, LinkSpeeds, read_links
from finetune.planning.model_shapes import Variant
from finetune.planning.step_time import Time, predict_time
from finetune.utils.errors import RecipeError


def measured(machines: int = 1, bandwidth: float = 1e9, latency: float = 0.0, **changes: Any) -> dict[str, Any]:
    ring = {"latency_s": latency, "bandwidth": bandwidth, "sizes": []}
    tree = {"format": 1, "machines": machines, "processes": 2 * machines, "collectives": dict.fromkeys(RINGS, ring)}
    return {**tree, **changes}


def written(folder: Path, name: str, tree: Any) -> str:
    file = folder / name
    file.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return str(file)


def time_of(name: str, found: LinkSpeeds, nodes: int = 1) -> Time:
    plan = planned(sections(), nodes=nodes)
    variant = plan.variants["full"]
    assert isinstance(variant, Variant)
    time = predict_time(plan.candidates[name, "full"], variant, replace(plan.machines, links=found), None)
    assert time is not None
    return time


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op"])
def test_time_is_that_of_the_measured_ring(name: str) -> None:
    """Twice the bandwidth is half the time, and a latency counts for each hop of each collective."""
    found: dict[str, list[float]] = {}
    for kind, line in {"slow": Line(0.0, 1e9), "fast": Line(0.0, 2e9), "late": Line(1e-3, 1e9)}.items():
        time = time_of(name, LinkSpeeds(within=dict.fromkeys(RINGS, line)))
        assert all(moved.measured for moved in time.moved)
        found[kind] = [moved.seconds for moved in time.moved]
    sheet = time_of(name, LinkSpeeds())
    assert not any(moved.measured for moved in sheet.moved)
    for index, moved in enumerate(sheet.moved):
        flow = moved.flow
        assert found["slow"][index] == pytest.approx(flow.nbytes / 1e9)
        assert found["fast"][index] == pytest.approx(flow.nbytes / 2e9)
        hops = RINGS[flow.collective].hops(flow.ranks)
        assert flow.calls >= 1
        assert found["late"][index] - found["slow"][index] == pytest.approx(1e-3 * hops * flow.calls)


def test_links_of_one_machine_say_nothing_of_those_between() -> None:
    line = dict.fromkeys(RINGS, Line(0.0, 1e9))
    for found, near, far in (
        (LinkSpeeds(within=line), True, False),
        (LinkSpeeds(between=line), False, True),
    ):
        for moved in time_of("hsdp", found, nodes=2).moved:
            assert moved.measured is (far if moved.between_machines else near)


def test_slow_links_are_not_hidden() -> None:
    fast = time_of("fsdp", LinkSpeeds(within=dict.fromkeys(RINGS, Line(0.0, 1e15))))
    slow = time_of("fsdp", LinkSpeeds(within=dict.fromkeys(RINGS, Line(0.0, 1e6))))
    assert all(moved.hidden for moved in fast.moved)
    assert not any(moved.hidden for moved in slow.moved)
    assert fast.step_s == pytest.approx(fast.compute_s)
    assert slow.step_s > slow.compute_s


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "is not what `finetune comms --json"),
        ({}, "format: Field required"),
        (measured(format=2), "format: Input should be 1"),
        (measured(bandwidth=0.0), "bandwidth: Input should be greater than 0"),
        (measured(latency=-1.0), "latency_s: Input should be greater than or equal to 0"),
        (measured(collectives={"all_reduce": {"latency_s": 0.0, "bandwidth": 1.0}}), "it lacks all_gather, broadcast"),
        ([], "it: Input should be"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    file = written(tmp_path, "links.json", content)
    with pytest.raises(RecipeError) as caught:
        read_links([file])
    assert says in str(caught.value)
    assert file in str(caught.value)


def test_two_of_a_kind_and_none_are_refused(tmp_path: Path) -> None:
    one, two = written(tmp_path, "one", measured()), written(tmp_path, "two", measured(machines=2))
    assert {*read_links([one, two]).within} == {*read_links([two, one]).between} == {*RINGS}
    with pytest.raises(RecipeError, match="both of one machine"):
        read_links([one, one])
    with pytest.raises(RecipeError, match="cannot read"):
        read_links([str(tmp_path / "missing")])


def test_a_real_measurement_is_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, recipe = tmp_path / "links.json", tmp_path / "recipe.yaml"
    words = [sys.executable, "-m", "finetune", "comms", "--max-bytes", "65536", "--json", str(file)]
    code, output = run(words, cwd=ROOT, env=environment())
    assert code == 0, output
    recipe.write_text(yaml.safe_dump(sections()))
    code, out, _ = said(capsys, recipe, "--links", file, "--gpus", 2)
    assert code == 0
    assert "within a machine, measured" in out
    link = json.loads(file.read_text())["collectives"]["all_reduce"]
    code, out, _ = said(capsys, recipe, "--links", file, "--gpus", 2, "--json")
    kept = json.loads(out)["machines"]["links"]["within"]["all_reduce"]
    assert kept == {key: link[key] for key in ("latency_s", "bandwidth")}
