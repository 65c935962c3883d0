"""`finetune parity` and biases that change nothing: named, with the reason, and not called drift."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.diagnostics.parity import compare
from finetune.diagnostics.parity.compare import FinishedRun

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**SMALL, "intermediate_size": 64, "is_decoder": True},
    "gpt2": SMALL,
    "llama": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "attention_bias": True},
}
KEYS = {
    "bert": "bert.encoder.layer.1.attention.self.key.bias",
    "gpt2": "transformer.h.1.attn.c_attn.bias",
    "llama": "model.layers.1.self_attn.k_proj.bias",
}


def run_of(folder: Path, name: str) -> FinishedRun:
    runs = dict.fromkeys(("parameter_dtypes", "model_dtypes", "reduce_dtype", "output_dtypes"))
    identity = {"optim.name": "AdamW", "optim.args.eps": 1e-8}
    facts = {"precision": "fp32", "identity": identity, "runs": runs, "length": {"num_steps": 1}}
    return FinishedRun(name, folder, facts, {1: {"loss": 3.1, "grad_norm": 1.0, "lr": 0.1, "tokens": 7}}, {}, {})


def pair(tmp_path: Path, kind: str, changes: dict[str, Any]) -> compare.Comparison:
    """Two runs whose final weights differ as said: by the tensor's name, from element to element, by how much."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    for name in ("one", "other"):
        network.save_pretrained(tmp_path / name / "model")
    file = tmp_path / "other" / "model" / "model.safetensors"
    weights = load_file(file)
    for name, (begin, end, by) in changes.items():
        weights[name][begin:end] += by * torch.randn(weights[name][begin:end].shape, generator=generator)
    save_file(weights, file, metadata={"format": "pt"})
    return compare.compare_runs(run_of(tmp_path / "one", "one"), run_of(tmp_path / "other", "other"))


@pytest.mark.parametrize(("kind", "place"), [("bert", (None, None)), ("gpt2", (32, 64))])
def test_key_biases_are_named_and_are_no_drift(tmp_path: Path, kind: str, place: tuple[Any, Any]) -> None:
    found = pair(tmp_path, kind, {KEYS[kind]: (*place, 0.01)})
    assert found.holds, found.reasons
    (note,) = found.notes
    assert note.startswith(f"tensor {KEYS[kind]} is ")
    assert "no drift" in note
    assert "AdamW with eps 1e-08 divides rounding by rounding" in note
    assert found.tensor is not None
    assert found.tensor[1] == 0.0


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        ("bert", KEYS["bert"].replace("key", "query"), (None, None)),
        ("bert", KEYS["bert"].replace("key", "value"), (None, None)),
        ("gpt2", KEYS["gpt2"], (0, 32)),
        # Rotated keys: their bias counts.
        ("llama", KEYS["llama"], (None, None)),
    ],
)
def test_biases_that_count_are_drift(tmp_path: Path, kind: str, name: str, place: tuple[Any, Any]) -> None:
    found = pair(tmp_path, kind, {name: (*place, 1e-3)})
    assert not found.holds
    assert name in found.reasons[0]
    assert not found.notes


def test_noise_does_not_hide_drift_in_the_same_tensor_or_another(tmp_path: Path) -> None:
    other = "bert.encoder.layer.0.output.dense.bias"
    found = pair(tmp_path, "bert", {KEYS["bert"]: (None, None, 0.01), other: (None, None, 1e-3)})
    assert not found.holds
    assert found.tensor is not None
    assert found.tensor[0] == other
    assert len(found.notes) == 1


def test_noise_does_not_hide_drift_in_its_own_tensor(tmp_path: Path) -> None:
    found = pair(tmp_path, "gpt2", {KEYS["gpt2"]: (0, 64, 0.01)})
    assert not found.holds
    assert not found.notes
