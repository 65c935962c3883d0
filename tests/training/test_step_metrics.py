"""Figures that a run reports: utilisation, accuracy; and what the documentation says of them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_task
import pytest
import torch
from harness import ROOT
from inside import mlp, run_here
from torch import nn

from finetune.config.recipe import validate_recipe
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.optim import lr_schedule
from finetune.tasks.classification import SEQUENCE_CLASSIFICATION
from finetune.tasks.evaluate_rows import OneProcess, evaluate_rows
from finetune.training import step_metrics
from finetune.training.built_run import BuiltRun


def test_utilisation_counts_all_tokens_and_not_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of seven tokens, of which one is learned: half-empty targets are no half-idle device."""
    peak = 1e9
    monkeypatch.setattr(step_metrics, "peak_flops", lambda *_: peak)
    monkeypatch.setattr(own_task.Points, "num_computed", lambda self, rows: 7 * len(rows), raising=False)
    found: list[BuiltRun] = []
    lines: list[dict[str, Any]] = []

    def note(run: BuiltRun) -> None:
        found.append(run)
        log = run.reporter.log
        run.reporter.log = lambda values: (lines.append(values), log(values))[-1]  # type: ignore[method-assign]

    run_here(mlp(tmp_path / "run"), note)
    steps = [line for line in lines if "mfu" in line]
    assert len(steps) == 20
    assert found[0].state.computed == 20 * 8 * 7
    for line in steps[1:]:
        # 8 targets a step, and 56 tokens.
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * 7 * found[0].flops_per_target / peak)


def test_a_classifier_is_evaluated_by_one_forward_pass_a_batch() -> None:
    calls = []

    class Scores(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            calls.append(len(input_ids))
            return type("Outputs", (), {"logits": torch.eye(3)[input_ids[:, 0]] * 2.0})

    class Rows:
        def __len__(self) -> int:
            return 10

        def batch(self, rows: Any) -> dict[str, torch.Tensor]:
            ids = torch.from_numpy(rows)
            # Of every five, one is another class than its first token says.
            targets = torch.where(ids % 5 == 4, (ids + 1) % 3, ids % 3)
            return {"input_ids": (ids % 3)[:, None], "attention_mask": torch.ones(len(ids), 1), "targets": targets}

        def num_targets(self, rows: Any) -> int:
            return len(rows)

    alone, model, names = OneProcess(torch.device("cpu")), ForwardWrapper(Scores()), ["a", "b", "c"]
    found = evaluate_rows(alone, model, SEQUENCE_CLASSIFICATION, Rows(), 4, names)
    assert calls == [4, 4, 2]
    assert found is not None
    figures = found[0].whole
    assert figures["accuracy"] == 0.8
    logits = torch.tensor([2.0, 0.0, 0.0]).log_softmax(0)
    assert figures["loss"] == pytest.approx(-(0.8 * logits[0] + 0.2 * logits[1]).item())
    bare = evaluate_rows(alone, model, replace(SEQUENCE_CLASSIFICATION, evaluation=None), Rows(), 4, [])
    assert bare is not None
    assert bare[0].whole == {key: figures[key] for key in ("loss", "targets")}


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_documented_schedule_is_the_one_that_runs(name: str, warmup: int) -> None:
    text = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    (formula,) = re.findall(r"Then p = (\([sn+w \-\d]+\) / \([sn+w \-\d]+\))", text)
    steps = 10
    recipe = validate_recipe(
        {
            "task": {"name": "own_task:mlp"},
            "length": {"steps": steps},
            "optim": {"lr": 1.0},
            "schedule": {"name": name, "warmup_steps": warmup, "floor": 0.0},
        }
    )
    for step in range(warmup, steps):
        p = eval(formula, {"s": step, "n": steps, "w": warmup})
        shape = 1 - p if name == "linear" else (1 + torch.tensor(torch.pi * p).cos().item()) / 2
        assert lr_schedule.lr_at(step, steps, recipe) == pytest.approx(shape, abs=1e-6)
