"""What `plan` says of layers that are split over ranks is what splitting them leaves, and what they send."""

from typing import Any

import pytest
import torch
from harness import ROOT
from test_plan_formulas import recipe

from finetune.distributed import gpu_specs
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.distributed.mesh import Group
from finetune.distributed.strategies import tensor
from finetune.models import split_layers
from finetune.models.build_network import build_model
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.planning import model_shapes
from finetune.planning.activation_memory import StepSetting
from finetune.planning.launch_candidates import assess_candidate
from finetune.planning.step_time import flows_of_layers
from finetune.tasks.causal_lm import CAUSAL_LM

WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "full": (False, {}),
    "lora": (True, {}),
    "nf4": (True, {"quantization": "nf4"}),
    "checkpointed": (False, {"gradient_checkpointing": True}),
}
SIZES = {"intermediate_size": 256, "hidden_size": 128}


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_has_what_is_predicted(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lora, model = WAYS[way]
    wanted = recipe(2, False, lora, model, **SIZES)
    variant: Any = model_shapes.read_variants(wanted)[model_shapes.kind_of(wanted)]
    part = model_shapes.part_of(variant, 2)
    network = build_model(wanted, resolve_model_config(wanted, vocab_size=512), NEXT_TOKEN)
    split_layers.split(network, Group(2, 0, None))
    assert [w.shape for w in part.specs.params] == [tuple(p.shape) for p in network.parameters()]
    sent, joined = [], []
    monkeypatch.setattr(tensor.distributed, "all_reduce", lambda t, group: sent.append(t.nbytes))
    monkeypatch.setattr(tensor.distributed, "all_gather_into_tensor", lambda _, part, group: joined.append(part.nbytes))
    ids = torch.randint(3, 500, (2, 64))
    CAUSAL_LM.loss_sum(network, {"input_ids": ids, "targets": ids}).backward()
    launch = launch_of_file(ROOT / "accelerate_configs" / "tp.yaml", 2)
    layers, tokens, *_ = flows_of_layers(launch, part, StepSetting(2, way == "checkpointed"), 1)
    # The first layer's inputs need no gradient if the embedding is frozen; the loss is summed as well.
    assert (len(sent) - 1, sum(sent) - 4) == (layers.calls - lora, layers.nbytes - lora * sent[0])
    assert (len(joined), sum(joined)) == (tokens.calls, tokens.nbytes)


@pytest.mark.parametrize(
    ("config", "kind", "says"),
    [
        ({"num_key_value_heads": 1}, "full", "the 1 key-value heads"),
        ({"intermediate_size": 175}, "full", "the 175 rows or columns of model.layers.0.mlp"),
        ({"model_type": "gpt2"}, "full", "no plan by which those of GPT2LMHeadModel (gpt2) are split"),
        ({}, "QLoRA", "1 groups of 64 columns of model.layers.0.self_attn.o_proj, which is quantized in blocks of 64"),
    ],
)
def test_what_cannot_be_split_is_refused(config: dict[str, Any], kind: str, says: str) -> None:
    more: dict[str, Any] = {"quantization": "nf4"} if kind == "QLoRA" else {}
    # What is given of an architecture other than Llama is all that it is given.
    wanted = recipe(1, False, kind == "QLoRA", more | ({"config": config} if "model_type" in config else {}), **config)
    variant: Any = model_shapes.read_variants(wanted)[kind]
    launch = launch_of_file(ROOT / "accelerate_configs" / "tp.yaml", 2)
    found = assess_candidate("tp", launch, variant, StepSetting(1, False), gpu_specs.find_gpu("h100-80gb"))
    assert found.verdict == "refused"
    assert says in found.reason
