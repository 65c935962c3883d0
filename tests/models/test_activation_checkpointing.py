"""What is recomputed, offloaded or compiled gives the gradients that it would have given anyway."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from recipes_for_tests import base
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from finetune.config.recipe import validate_recipe
from finetune.models import activation_checkpointing
from finetune.models.build_network import build_model
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.tasks.causal_lm import CAUSAL_LM

IDS = torch.randint(0, 512, (2, 48), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "targets": IDS.roll(-1, 1), "position_ids": torch.arange(48).repeat(2, 1)}
BATCH["cu_seqlens"] = torch.tensor([0, 48, 96], dtype=torch.int32)


def network_of(**model: Any) -> Any:
    recipe = validate_recipe(base(model={**base()["model"], **model}))
    return build_model(recipe, resolve_model_config(recipe, vocab_size=512), NEXT_TOKEN)


def learn(network: Any) -> dict[str, torch.Tensor]:
    CAUSAL_LM.loss_sum(network, BATCH).backward()
    return {name: p.grad for name, p in network.named_parameters()}


class Products(TorchDispatchMode):
    """Counts matrix products and attention, and all else."""

    def __init__(self) -> None:
        super().__init__()
        self.dear = self.cheap = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in activation_checkpointing._SAVED_OPERATIONS:
            self.dear += 1
        else:
            self.cheap += 1
        return func(*args, **(kwargs or {}))


def test_selective_recomputes_the_cheap_and_keeps_the_dear() -> None:
    counts, gradients = {}, {}
    for how in (False, "selective", True):
        network = network_of(gradient_checkpointing=how)
        with Products() as products:
            gradients[how] = learn(network)
        counts[how] = products
    for how in ("selective", True):
        for name, gradient in gradients[how].items():
            assert torch.equal(gradient, gradients[False][name]), name
    assert counts["selective"].dear == counts[False].dear < counts[True].dear
    assert counts["selective"].cheap > counts[False].cheap


def test_offloaded_activations_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the context that a GPU gets, without its pinned memory."""
    assert isinstance(activation_checkpointing.offload_activations(torch.device("cpu")), nullcontext)
    plain = learn(network_of())
    moved: list[int] = []
    save = torch.autograd.graph.save_on_cpu

    def counted(pin_memory: bool) -> Any:
        moved.append(pin_memory)
        return save(pin_memory=False)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counted)
    caller = ForwardWrapper(network_of())
    caller.keeping = lambda: activation_checkpointing.offload_activations(torch.device("cuda"))
    caller(CAUSAL_LM.loss_sum, BATCH).backward()
    assert moved == [True]
    for name, parameter in caller.network.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, plain[name])


def test_every_layer_is_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def stand_in(forward: Any, **options: Any) -> Any:
        compiled.append(forward.__self__)
        return forward

    monkeypatch.setattr(torch, "compile", stand_in)
    monkeypatch.setattr("finetune.models.attention.keep_eager", lambda: None)
    network = network_of()
    assert activation_checkpointing.compile_layers(network, {"LlamaDecoderLayer"}) == 2
    assert compiled == list(network.model.layers)
    assert isinstance(network, AutoModelForCausalLM._model_mapping[type(network.config)])
