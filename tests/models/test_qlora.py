"""QLoRA: the frozen weights in 4 bits, the same bytes however they got there, and adapters that learn."""

import bitsandbytes as bnb
import pytest
import torch
from recipes_for_tests import MODEL, base
from torch import nn

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.models import lora_adapters, quantization
from finetune.models.build_network import build_model
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.monitoring.flops import flops_per_target
from finetune.tasks.causal_lm import causal_lm_logits
from finetune.utils.errors import RecipeError

IDS = torch.arange(3, 3 + 2 * 20).reshape(2, 20)
SHAPE = {**base()["model"]["config"], "vocab_size": 512}
# Sides that the kernel takes, for which bitsandbytes repacks weights.
EVEN = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}


def recipe_of(kind: str | None = "nf4", *, double: bool = True, model: dict | None = None, **lora: object) -> Recipe:
    section = {**(model or {"name": MODEL}), "quantization": kind, "double_quantization": double}
    return validate_recipe({**base(lora={"rank": 4, **lora}), "model": section})


def built(recipe: Recipe) -> nn.Module:
    return build_model(recipe, resolve_model_config(recipe, vocab_size=512), NEXT_TOKEN)


def packed(network: nn.Module) -> dict[str, bnb.nn.Linear4bit]:
    return {name: module for name, module in network.named_modules() if isinstance(module, bnb.nn.Linear4bit)}


def num_bytes(module: bnb.nn.Linear4bit) -> int:
    """Of the quantized weights and all that belongs to them."""
    state = module.weight.quant_state
    nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return sum(tensor.nbytes for tensor in (module.weight, state.absmax, state.code, *nested))


@pytest.mark.parametrize(("double", "most"), [(True, 0.53), (False, 0.57)])
def test_a_weight_takes_half_a_byte(double: bool, most: float) -> None:
    shape = {**SHAPE, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}
    modules = packed(built(recipe_of(double=double, model={"config": shape}))).values()
    weights = sum(module.in_features * module.out_features for module in modules)
    assert weights >= 6 * 1024**2
    assert 0.5 < sum(map(num_bytes, modules)) / weights <= most
    assert sum(quantization.num_weights(module.weight) for module in modules) == weights


def test_all_linear_modules_but_the_head_are_packed() -> None:
    network = built(recipe_of(model={"config": SHAPE}))
    assert {name.split(".")[-2] for name in packed(network)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    dtypes = {p.dtype for p in network.parameters()}
    assert dtypes == {torch.float32}, "backends shard what has one dtype"
    assert all(p.dtype == torch.float32 for p in network.parameters() if p.requires_grad)
    assert not any(p.requires_grad for name, p in network.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_loading_packs_what_packing_in_place_does(kind: str) -> None:
    """Pretrained weights are packed by transformers as it reads them, random ones by us."""
    read = packed(built(recipe_of(kind)))
    whole = built(recipe_of(None).model_copy(update={"lora": None}))
    recipe = recipe_of(kind)
    quantization.quantize(whole, recipe.model, NEXT_TOKEN)  # type: ignore[arg-type]
    ours = packed(lora_adapters.attach(whole, recipe, NEXT_TOKEN))
    assert read.keys() == ours.keys() != set()
    for name, module in read.items():
        assert torch.equal(module.weight.view(torch.uint8), ours[name].weight.view(torch.uint8))
        states = (module.weight.quant_state, ours[name].weight.quant_state)
        values = [
            bnb.functional.dequantize_4bit(m.weight, s) for m, s in zip((module, ours[name]), states, strict=True)
        ]
        assert torch.equal(*values)


def test_at_the_beginning_the_adapter_changes_nothing() -> None:
    network = built(recipe_of()).eval()
    whole = built(recipe_of(None)).eval()
    with torch.no_grad():
        ours = causal_lm_logits(network, {"input_ids": IDS})
        with network.disable_adapter():  # type: ignore[operator]
            assert torch.equal(ours, causal_lm_logits(network, {"input_ids": IDS}))
        # And it is the quantised model that is run, which is near the other one.
        away = (ours - causal_lm_logits(whole, {"input_ids": IDS})).abs().max()
    assert 1e-3 < away < 10


def gradients(network: nn.Module) -> dict[str, torch.Tensor | None]:
    network.train().zero_grad()
    causal_lm_logits(network, {"input_ids": IDS}).square().sum().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.requires_grad}


def after_a_look(network: nn.Module) -> dict[str, torch.Tensor | None]:
    with torch.no_grad():
        network.eval()
        causal_lm_logits(network, {"input_ids": IDS})
    return gradients(network)


def test_an_evaluation_does_not_end_the_learning() -> None:
    network = built(recipe_of(model={"config": EVEN}))
    before, after = gradients(network), after_a_look(network)
    for name, gradient in before.items():
        assert gradient is not None
        assert torch.equal(gradient, after[name])  # type: ignore[arg-type]
    assert any(gradient.any() for gradient in before.values())  # type: ignore[union-attr]


@pytest.mark.skipif(not bnb.functional.has_avx512bf16(), reason="only this kind of processor has the kernel")
def test_it_would_without_our_switch() -> None:
    """That the test above can fail; once it passes, bitsandbytes has been mended."""
    network = built(recipe_of(model={"config": EVEN}))
    before = gradients(network)
    for module in packed(network).values():
        module.support_avx512bf16_for_cpu = True
    after = after_a_look(network)
    assert any(g is None or not torch.equal(g, before[name]) for name, g in after.items())  # type: ignore[arg-type]


def test_products_come_out_as_autocast_has_them() -> None:
    """In fp32, as bitsandbytes would have it, activations would take twice the memory of LoRA's."""
    network = built(recipe_of())
    quantization.compute_in(network, torch.bfloat16)
    seen = set()
    for module in packed(network).values():
        module.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        causal_lm_logits(network, {"input_ids": IDS})
    assert seen == {torch.bfloat16}


def test_flops_count_weights_not_bytes() -> None:
    assert flops_per_target(built(recipe_of()), 64) == flops_per_target(built(recipe_of(None)), 64)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora": None}, "model.quantization: quantized weights (nf4) cannot be trained. Add a `lora` section"),
        ({"lora": {"init": "pissa"}}, "lora.init: `pissa` takes singular vectors out of the weights, which"),
        ({"model": {"name": MODEL, "quantization": "int3"}}, "input should be 'nf4', 'fp4' or 'int8'"),
    ],
)
def test_refused(changes: dict, says: str) -> None:
    tree = {**base(lora={"rank": 4}), "model": {"name": MODEL, "quantization": "nf4"}}
    with pytest.raises(RecipeError) as caught:
        validate_recipe({**tree, **changes})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
