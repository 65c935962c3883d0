"""A loss or gradient that is not finite, on whatever rank: the step is skipped on all, and nothing of it stays.

One run on each backend meets every kind of it, and ends when there are too many in a row. The rows that are bad are
the same everywhere, so all backends must tell the same story.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from forkserver import ForkServer
from harness import read_lines
from inside import OneRank, mlp, run_here, stop_after
from ranks import PARAGRAPH
from safetensors.torch import load_file

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.data.rows.row_order import rows_at
from finetune.export import model_card
from finetune.export.find_weights import WeightSource
from finetune.monitoring.nonfinite import NonFiniteGuard
from finetune.monitoring.step_all_reduce import AsyncScalar, StepOutput
from finetune.utils.errors import DivergedError

pytestmark = pytest.mark.xdist_group("nonfinite")

BACKENDS = ["single", "ddp", "fsdp", "zero1", "zero2", "zero3"]
SGD = {"name": "SGD", "lr": 1e-3, "args": {"momentum": 0.9}}

# By step, counted from 1: what of the row is spoiled, how, and which micro-batch and rank of two it falls to.
BAD = {
    3: ("loss", "nan", 0, 0),
    5: ("gradient", "nan", 1, 1),
    7: ("loss", "inf", 1, 0),
    9: ("gradient", "inf", 0, 1),
    11: ("gradient", "-inf", 1, 0),
    # Two in a row between two checkpoints, and then as many as end the run.
    13: ("loss", "-inf", 0, 1),
    14: ("gradient", "nan", 0, 0),
    17: ("loss", "nan", 1, 1),
    18: ("loss", "inf", 0, 0),
    19: ("gradient", "inf", 1, 1),
}


def row_of(step: int) -> int:
    """The row that a step spoils."""
    _, _, micro, rank = BAD[step]
    rows = rows_at(np.arange(8 * (step - 1), 8 * step), num_rows=200, seed=3, epoch_rows=200)
    return int(rows.reshape(2, 2, 2)[micro, rank, 0])


TROUBLE = {
    kind: {str(row_of(step)): value for step, (spoiled, value, *_) in BAD.items() if spoiled == kind}
    for kind in ("loss", "gradient")
}


@dataclass(frozen=True)
class Ended:
    directory: Path
    codes: list[int]
    said: str

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "incidents.jsonl")

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        lines = read_lines(self.directory / "metrics.jsonl")
        return {line["step"]: line for line in lines if "grad_norm" in line}

    def checkpoint(self, step: int) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint, weights and optimiser, by a name that all backends share."""
        folder = self.directory / "checkpoints" / f"step-{step:08d}"
        files = [*folder.glob("*.safetensors"), *(folder / "model").glob("*.safetensors")]
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(
    scope="module", params=[*((b, "AdamW") for b in BACKENDS), *((b, "SGD") for b in BACKENDS[:3])], ids="-".join
)
def ended(request: pytest.FixtureRequest, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that meets all of it, on each backend and with each optimiser."""
    return launch(fork_server, tmp_path_factory, *request.param)


_ENDED: dict[tuple[str, str], Ended] = {}


def launch(fork_server: ForkServer, factory: pytest.TempPathFactory, backend: str, optimizer: str) -> Ended:
    if (backend, optimizer) not in _ENDED:
        folder = factory.mktemp(f"{backend}-{optimizer}")
        tree = mlp(
            folder / "run",
            task={"name": "troubled_task:mlp"},
            optim=SGD if optimizer == "SGD" else {"lr": 1e-2},
            length={"steps": 24},
            checkpoint={"every_steps": 2, "keep": 99},
            guard={"max_skipped_steps": 3},
        )
        (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
        env = {"TROUBLE": json.dumps(TROUBLE)}
        with fork_server.start(backend, folder / "said", str(folder / "recipe.yaml"), env=env) as ranks:
            codes = ranks.wait()
            _ENDED[backend, optimizer] = Ended(folder / "run", codes, ranks.output())
    return _ENDED[backend, optimizer]


@pytest.fixture
def single(
    ended: Ended, request: pytest.FixtureRequest, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Ended:
    """The same on one process."""
    optimizer = next(kind for (_, kind), run in _ENDED.items() if run is ended)
    return launch(fork_server, tmp_path_factory, "single", optimizer)


def test_each_is_written_down_with_its_rows_and_values(ended: Ended) -> None:
    assert [incident["step"] for incident in ended.incidents] == list(BAD), ended.said[-4000:]
    assert [incident["in_a_row"] for incident in ended.incidents] == [1, 1, 1, 1, 1, 1, 2, 1, 2, 3]
    for incident in ended.incidents:
        step = incident["step"]
        kind, value, *_ = BAD[step]
        assert incident["kind"] == "nonfinite"
        assert not math.isfinite(float(incident["grad_norm"]))
        read = sorted(row for part in incident["micro_batches"] for row in part["rows"])
        positions = np.arange(8 * (step - 1), 8 * step)
        assert read == sorted(rows_at(positions, num_rows=200, seed=3, epoch_rows=200).tolist())
        for part in incident["micro_batches"]:
            spoiled = kind == "loss" and row_of(step) in part["rows"]
            loss = float(part["loss_sum"])
            assert repr(loss) == value if spoiled else math.isfinite(loss), (step, part)


def test_the_same_micro_batches_on_every_backend(ended: Ended, single: Ended) -> None:
    """A step's micro-batches hold the same rows wherever they run, and their losses agree."""

    def by_rows(run: Ended) -> dict[tuple[int, ...], float]:
        parts = [(i["step"], part) for i in run.incidents for part in i["micro_batches"]]
        return {(step, *part["rows"]): float(part["loss_sum"]) for step, part in parts}

    one, other = by_rows(ended), by_rows(single)
    assert one.keys() == other.keys()
    for key, loss in one.items():
        assert loss == pytest.approx(other[key], rel=1e-4, nan_ok=True), key


def test_a_skipped_step_changes_neither_weights_nor_the_optimiser(ended: Ended) -> None:
    before, after, later = (ended.checkpoint(step) for step in (12, 14, 16))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert [name for name in before if torch.equal(after[name], later[name])] == []
    for step in range(2, 19, 2):
        assert all(tensor.isfinite().all() for tensor in ended.checkpoint(step).values())


def test_the_path_is_the_same_on_every_backend(ended: Ended, single: Ended) -> None:
    assert ended.steps.keys() == single.steps.keys()
    for step, line in ended.steps.items():
        other = single.steps[step]
        spoiled = BAD.get(step, ("",))[0]
        # What is not finite is null in `metrics.jsonl`, which is strict JSON.
        assert (line["grad_norm"] is None, line["loss"] is None) == (step in BAD, spoiled == "loss"), line
        for key in ("loss", "grad_norm"):
            one, two = (math.nan if value is None else value for value in (line[key], other[key]))
            assert one == pytest.approx(two, rel=1e-4, nan_ok=True), (step, key)
        # Counted a step later, when its numbers are there.
        assert line["skipped_steps"] in (sum(s < step for s in BAD), sum(s <= step for s in BAD))
        assert line["overflows"] == 0
    for name, tensor in ended.checkpoint(18).items():
        torch.testing.assert_close(tensor, single.checkpoint(18)[name], rtol=1e-3, atol=1e-5, msg=name)


def test_too_many_in_a_row_end_the_run_and_name_the_last_good_checkpoint(ended: Ended) -> None:
    assert set(ended.codes) == {2}, ended.said[-4000:]
    assert "step 3 was skipped on all ranks: nonfinite (skipped so far: 1 nonfinite)" in ended.said
    said = PARAGRAPH.findall(ended.said)
    assert len(said) == 1, ended.said[-4000:]
    assert "3 steps in a row, up to step 19" in said[0]
    newest = max((ended.directory / "checkpoints").iterdir())
    assert newest.name == "step-00000018"
    assert f"The last good checkpoint is {newest}." in said[0]
    assert "Traceback" not in ended.said


def test_steps_that_are_taken_again_are_written_down_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUBLE", json.dumps(TROUBLE))
    tree = mlp(tmp_path / "run", task={"name": "troubled_task:mlp"}, checkpoint={"every_steps": 4, "keep": 99})
    run_here(tree, stop_after(12))
    # As if it had been killed before the last checkpoint was whole.
    (tmp_path / "run/checkpoints/step-00000012/manifest.json").unlink()
    run_here(tree)
    assert [line["step"] for line in read_lines(tmp_path / "run/incidents.jsonl")] == list(BAD)


class Scaled(OneRank):
    """A backend that scales losses, as fp16 needs."""

    precision = "fp16"


def taken(step: int, *, loss: float, norm: float) -> StepOutput:
    losses, sync = torch.tensor([loss]), AsyncScalar(torch.zeros(6))
    return StepOutput(step, sync, AsyncScalar(torch.tensor([norm])), losses, [np.array([step])], losses, {})


def test_overflows_under_loss_scaling_are_counted_apart() -> None:
    """They are the scale's search for its size, and end a run only when no size can help."""
    guard = NonFiniteGuard(Scaled(), 2)  # type: ignore[arg-type]
    kinds = []
    for step, (loss, norm) in enumerate([(1, math.inf), (1, math.nan), (1, math.inf), (math.nan, math.nan), (1, 1)]):
        guard.check(taken(step, loss=loss, norm=norm))
        incident = guard.check(None)
        kinds.append((incident["kind"], incident["fatal"]) if incident else None)
    assert kinds == [("overflow", False)] * 3 + [("nonfinite", False), None]
    assert guard.counts == {"nonfinite": 1, "overflow": 3}
    fatal = []
    for step in range(60):
        guard.check(taken(step, loss=1, norm=math.inf))
        incident = guard.check(None)
        assert incident is not None
        fatal.append(incident["fatal"])
    assert fatal.index(True) == 39


def test_a_good_step_between_begins_the_count_anew() -> None:
    guard = NonFiniteGuard(OneRankUnscaled(), 2)  # type: ignore[arg-type]
    for step, norm in enumerate([math.nan, 1.0, math.inf, 1.0, -math.inf]):
        guard.check(taken(step, loss=1, norm=norm))
        incident = guard.check(None)
        assert (incident is None) if norm == 1.0 else (incident["in_a_row"] == 1 and not incident["fatal"])
    guard.check(taken(9, loss=1, norm=math.nan))
    incident = guard.check(None)
    assert incident is not None
    assert incident["fatal"]


class OneRankUnscaled(OneRank):
    precision = "bf16"


# ---------------------------------------------------------------- over restarts


def rows_of(step: int) -> list[int]:
    """All rows of a step, in the order of positions."""
    return rows_at(np.arange(8 * (step - 1), 8 * step), num_rows=200, seed=3, epoch_rows=200).tolist()


def bad_steps(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    monkeypatch.setenv("TROUBLE", json.dumps({"loss": {str(rows_of(step)[0]): "nan" for step in steps}}))


def test_a_restart_does_not_forget_how_many_there_were_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight in a row, and a checkpoint after four of them: the same command comes to the same end each time."""
    bad_steps(monkeypatch, range(11, 19))
    tree = mlp(tmp_path / "run", task={"name": "troubled_task:mlp"}, checkpoint={"every_steps": 2})
    for _ in range(2):
        with pytest.raises(DivergedError, match=r"5 steps in a row, up to step 15, had .*step-00000014"):
            run_here(tree)
        incidents = read_lines(tmp_path / "run" / "incidents.jsonl")
        assert [(line["step"], line["in_a_row"]) for line in incidents] == [(10 + n, n) for n in range(1, 6)]
    # As the message says; the count of all goes on, too.
    done = run_here({**tree, "guard": {"max_skipped_steps": 9}})
    last = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped_steps"] for line in last if "grad_norm" in line][-1] == 8
    assert [step["step"] for step in done.results["skipped"]] == list(range(11, 19))


def test_skipped_steps_are_named_with_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the results, by an audit and in a model card, also those of an earlier start."""
    bad_steps(monkeypatch, range(4, 6))
    tree = mlp(tmp_path / "run", task={"name": "troubled_task:mlp"})
    run_here(tree, stop_after(8))
    done = run_here(tree)
    expected = [{"step": step, "kind": "nonfinite", "rows": rows_of(step)} for step in (4, 5)]
    assert done.results["skipped"] == done.facts["results"]["skipped"] == expected
    assert main.main(["audit", str(done.directory)]) == 0
    said = capsys.readouterr().out
    lines = [f"step {step} (nonfinite): rows {', '.join(map(str, rows_of(step)))}" for step in (4, 5)]
    assert "2 of these steps skipped, so their rows changed no weight:\n  " + "\n  ".join(lines) in said
    recipe = validate_recipe(tree)
    for step, named in ((4, lines[:1]), (20, lines)):
        source = WeightSource(done.directory, done.directory / "model", step, recipe, done.facts)
        model_card.write_model_card(tmp_path, source, "merged", [], None, None)
        written = (tmp_path / "README.md").read_text()
        assert "## Skipped steps" in written
        assert [line[2:] for line in written.splitlines() if line.startswith("- step")] == named


def test_a_run_that_skipped_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(mlp(tmp_path / "run", length={"steps": 3}))
    assert done.facts["results"]["skipped"] == []
    assert main.main(["audit", str(done.directory)]) == 0
    assert "skipped" not in capsys.readouterr().out


def test_a_run_that_has_skipped_every_step_has_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than may be skipped in a row."""
    monkeypatch.setenv("TROUBLE", json.dumps({"loss": {str(row): "nan" for row in range(200)}}))
    with pytest.raises(DivergedError, match=r"Each of the run's 3 steps had .* Nothing was learned, and no model is"):
        run_here(mlp(tmp_path / "run", task={"name": "troubled_task:mlp"}, length={"steps": 3}))
    assert not (tmp_path / "run" / "model").exists()
