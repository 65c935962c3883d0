"""What a run shows of itself: its first lines, its progress bar, and the card and plot beside its model."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from inside import Done, mlp, run_here, stop_after
from recipes_for_tests import base
from rich.console import Console

from finetune.config.recipe_schema import GuardSection
from finetune.export import model_card
from finetune.monitoring import metrics
from finetune.monitoring.trackers import Trackers

LABELS = ["model", "data", "steps", "launch", "memory", "directory", "resume"]
SVG = "{http://www.w3.org/2000/svg}"


def first_lines(done: Done) -> list[str]:
    lines = done.said.splitlines()
    return lines[: next(number for number, line in enumerate(lines) if re.match(r"step \d+/", line))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A language model whose data has something to be said of."""
    folder = tmp_path_factory.mktemp("shown")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        recipe = base(
            data={"sequence_length": 16},
            eval={"every_steps": 3},
            log={"every_steps": 1},
            length={"steps": 6},
            checkpoint={"every_steps": 2},
            output={"dir": "run"},
        )
        run_here(recipe, stop_after(5))
        done = run_here(recipe)
    return Done(folder / "run", done.results, done.said)


def test_at_most_eight_short_lines_say_what_runs(trained: Done) -> None:
    lines = first_lines(trained)
    assert len(lines) <= 8, "\n".join(lines)
    assert not [line for line in lines if len(line) > 80 and not line.startswith("resume")]
    assert [line.split()[0] for line in lines if line[0] != " "] == LABELS
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line[0] != " "}
    facts = trained.facts
    assert f"{facts['runs']['num_parameters']:,} parameters, all trained" in said["model"]
    assert said["data"].startswith(f"{facts['data']['train']['rows']:,} rows of 16 tokens from ")
    assert f"validation {facts['data']['validation']['rows']:,} rows" in said["data"]
    assert re.fullmatch(r" +\d+ documents longer than a row(, and .*)?; see `finetune data`", lines[2])
    size, micro = (int(number) for number in re.findall(r"of (\d+) rows = 1 process x (\d+) rows", said["steps"])[0])
    assert said["steps"].startswith(f"6 of {size} rows = 1 process x {micro} rows x {size // micro} micro-batch")
    assert said["launch"] == "single on cpu, fp32"
    assert said["directory"] == "run"
    assert said["resume"].startswith("resumed at step 5 from run/checkpoints/step-00000005, saved under single x 1")


def test_few_steps_and_what_is_too_long_are_warned_of(tmp_path: Path) -> None:
    lines = first_lines(run_here(mlp(tmp_path / "own", length={"steps": None, "epochs": 1})))
    assert f"{'':10}only 25 steps: raise length.epochs, or lower batch.global_size" in lines
    data = {"sequence_length": 48, "long_documents": "drop"}
    checks = {"max_left_out": 1.0}
    lines = first_lines(
        run_here(base(data=data, checks=checks, length={"steps": 1}, output={"dir": str(tmp_path / "lm")}))
    )
    (said,) = (line.strip() for line in lines if "raise" in line)
    assert re.fullmatch(
        r"\d+% of the data left out as too long: raise data.sequence_length \(48, of \d+ that the model takes\) .*",
        said,
    )


def test_adapters_and_custom_tasks_have_these_lines_too(tmp_path: Path) -> None:
    lines = first_lines(run_here(base(lora={"rank": 2}, length={"steps": 1}, output={"dir": str(tmp_path / "lora")})))
    assert re.search(r"parameters, [\d,.]+( [BM])? trained \([\d.]+%\), LoRA$", lines[0])
    lines = first_lines(run_here(mlp(tmp_path / "own", length={"steps": 1})))
    assert lines[0].startswith("model     own_task:mlp, ")
    assert not [line for line in lines if line.startswith("data")]


def test_the_bar_shows_loss_validation_loss_rate_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = SimpleNamespace(is_main=True, accelerator=SimpleNamespace(trackers=[]))
    monkeypatch.setattr(Console, "is_terminal", True)
    with metrics.Reporter(
        backend, tmp_path, 40000, trackers=Trackers((), tmp_path, {}), quiet=False, guard=GuardSection()
    ) as reporter:
        assert reporter._progress is not None
        reporter.step(1, {"loss": 5.25, "lr": 1e-3, "tokens_per_s": 1234.0})
        assert figures(reporter) == "loss 5.2500  1,234 targets/s"
        reporter.log({"step": 1, "validation_loss": 4.5})
        assert figures(reporter) == "loss 5.2500  val 4.5000  1,234 targets/s", "at once, not a log step later"
        reporter.step(12345, {"loss": 5.0, "lr": 1e-3, "tokens_per_s": 123456.0})
        assert figures(reporter) == "loss 5.0000  val 4.5000  123,456 targets/s"
        shown = Console(width=80)
        with shown.capture() as captured:
            shown.print(reporter._progress.get_renderable())
    line = captured.get().splitlines()
    assert len(line) == 1
    assert figures(reporter) in line[0]
    assert line[0].endswith(" left")
    assert "━" in line[0]
    assert "step 12345/40000" in line[0]
    assert re.search(r"(\d|-):(\d\d|--)", line[0])


def figures(reporter: metrics.Reporter) -> str:
    assert reporter._progress is not None
    fields = reporter._progress.tasks[0].fields
    return "".join(fields[name] for name in ("loss", "validation", "rate"))


def test_the_model_has_a_card_with_its_losses(trained: Done) -> None:
    folder = trained.directory / "model"
    text = (folder / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert (head["library_name"], head["pipeline_tag"]) == ("transformers", "text-generation")
    assert "trained for 6 steps with finetune" in text
    assert "![Losses over steps](loss.svg)" in text
    assert f"- validation_loss: {trained.results['validation_loss']:.5g}" in text
    assert "Proof" not in text
    curves = drawn(folder / "loss.svg")
    assert [len(points) for points in curves] == [6, 2]
    # Downwards in the picture, as the losses fall.
    losses = [line["loss"] for line in metrics_of(trained) if "grad_norm" in line]
    assert sorted(range(6), key=losses.__getitem__) == sorted(range(6), key=lambda n: -curves[0][n][1])


def metrics_of(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]


def drawn(file: Path) -> list[list[tuple[float, float]]]:
    """The points of each curve."""
    found = ET.parse(file).getroot().findall(f"{SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()] for curve in found]


def test_the_plot_is_of_the_steps_that_the_weights_have(trained: Done, tmp_path: Path) -> None:
    assert model_card.write_loss_plot(tmp_path, trained.directory, 4) == "loss.svg"
    assert [len(points) for points in drawn(tmp_path / "loss.svg")] == [4, 1]
    # Nothing to draw a line of; and weights of which no history is left.
    assert model_card.write_loss_plot(tmp_path, trained.directory, 1) is None
    assert model_card.write_loss_plot(tmp_path, tmp_path / "nothing", None) is None
