"""Checkers and numbers that are not finite: NaN is smaller than nothing and larger than nothing, but never equal."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from inside import evaluate_batches
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from finetune.diagnostics.parity import compare
from finetune.diagnostics.parity.compare import FinishedRun
from finetune.export import verify_export
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.training import preflight
from finetune.utils.errors import BackendError

NAN, INF = float("nan"), float("inf")
NAMES = ["a", "b", "c"]
RUNS = dict.fromkeys(("parameter_dtypes", "model_dtypes", "reduce_dtype"), None) | {
    "output_dtypes": {},
    "kind": "single",
    "world_size": 1,
    "communication": None,
    "device": "cpu",
    "parameter_fraction": 1.0,
    "optimizer_fraction": 1.0,
}


def run(folder: Path, spoilt: str | None = None, value: float = NAN) -> FinishedRun:
    """A finished run of one step, one number of whose weights is spoilt."""
    weights = {name: torch.ones(4) for name in NAMES}
    if spoilt is not None:
        weights[spoilt][2] = value
    (folder / "model").mkdir(parents=True)
    save_file(weights, folder / "model" / "model.safetensors")
    facts = {"precision": "fp32", "identity": {}, "runs": RUNS, "length": {"num_steps": 1}}
    line = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 8, "step_s": 1.0}
    return FinishedRun(folder.name, folder, facts, {1: line}, {}, {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [NAN, INF])
def test_parity_sees_a_weight_that_is_not_finite_wherever_it_stands(tmp_path: Path, name: str, value: float) -> None:
    found = compare.compare_runs(run(tmp_path / "one"), run(tmp_path / "other", name, value))
    assert not found.holds
    assert found.tensor == (name, INF)
    assert f"tensor {name} is inf apart" in found.reasons[0]
    said = json.loads(json.dumps(compare.report_as_json([found]), allow_nan=False))
    assert said["comparisons"]["other"]["tensor"] == {"name": name, "difference": None}
    console = Console(file=io.StringIO(), width=200)
    compare.print_report([found], console)
    assert any(line.startswith("DRIFT") for line in console.file.getvalue().splitlines())


def test_two_runs_with_the_same_nan_took_no_path(tmp_path: Path) -> None:
    assert not compare.compare_runs(run(tmp_path / "one", "b"), run(tmp_path / "other", "b")).holds


@pytest.mark.parametrize("name", NAMES)
def test_the_proof_of_an_export_names_the_tensor(tmp_path: Path, name: str) -> None:
    spoilt = run(tmp_path / "one", name)
    assert verify_export.worst_tensor(spoilt.directory / "model", {name: torch.ones(4) for name in NAMES}) == (
        name,
        INF,
    )


def test_scores_that_are_not_finite_prove_nothing() -> None:
    class Broken(nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.full((*input_ids.shape, 7), NAN))

    backend = SimpleNamespace(device=torch.device("cpu"), all_reduce_max=lambda value: value, precision="fp32")
    backend.evaluate_batches = evaluate_batches
    recipe = SimpleNamespace(data=SimpleNamespace(sequence_length=16), model=SimpleNamespace(attention="auto"))
    with pytest.raises(BackendError, match="scores are not finite before the first step"):
        preflight.check_isolation(backend, ForwardWrapper(Broken()), recipe)
