"""fp8 products: what is computed, that a token's result is its own, and one path on every backend."""

from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from exports import exported, opened_here
from harness import Launcher, assert_same_path_in_bf16
from inside import run_here, stop_after
from recipes_for_tests import ARCHITECTURES, base, stories
from torch import nn
from transformers import AutoModelForCausalLM

from finetune.config.recipe import validate_recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.resolve_config import _check_planes
from finetune.export import verify_export
from finetune.models import float8
from finetune.models.build_network import build_model
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.planning import model_shapes, recommendations
from finetune.planning.activation_memory import StepSetting
from finetune.tasks.causal_lm import CAUSAL_LM, causal_lm_logits
from finetune.tasks.classification import HEAD
from finetune.utils.errors import BackendError, LibraryVersionError, RecipeError

if TYPE_CHECKING:
    from finetune.config.recipe_schema import Recipe

installed = pytest.mark.skipif(util.find_spec("torchao") is None, reason="needs torchao, the extra [fp8]")

IDS = torch.randint(0, 512, (2, 48), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "targets": IDS.roll(-1, 1), "position_ids": torch.arange(24).repeat(2, 2)}
BATCH["cu_seqlens"] = torch.tensor([0, 24, 48, 72, 96], dtype=torch.int32)


def recipe_of(how: Any = "emulated", model: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return base(model={**base()["model"], **(model or {}), "fp8": how}, **{"precision": "bf16", **sections})


def built(tree: dict[str, Any]) -> Any:
    recipe = validate_recipe(tree)
    return build_model(recipe, resolve_model_config(recipe, vocab_size=512), NEXT_TOKEN)


def learn(network: Any, batch: dict[str, torch.Tensor] = BATCH) -> tuple[float, dict[str, torch.Tensor]]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = CAUSAL_LM.loss_sum(network, batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in network.named_parameters()}


def scores(network: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return causal_lm_logits(network, batch)


# ---------------------------------------------------------------- what is computed


def rounded(values: torch.Tensor, dim: int | None) -> torch.Tensor:
    """To e4m3 and back, scaled along `dim`, or as a whole, by the power of two that just keeps all in its range."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest.double()))).float()
    return (values.float() * scale).to(torch.float8_e4m3fn).float() / scale


@installed
@pytest.mark.parametrize("tokens", [1, 7, 48])
def test_a_product_is_that_of_numbers_of_8_bits(tokens: int) -> None:
    """For any number of tokens, with inputs of very different sizes."""
    module = built(recipe_of()).model.layers[1].mlp.up_proj
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, tokens, 64, generator=generator) * torch.logspace(-4, 4, tokens)[:, None]
    inputs.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(inputs)
    assert output.dtype == torch.bfloat16
    halved, weight = inputs.detach().bfloat16(), module.weight.detach()
    expected = (rounded(halved, -1).flatten(0, 1) @ rounded(weight, 1).t()).bfloat16()
    assert torch.equal(output.flatten(0, 1), expected)
    plain = (halved.flatten(0, 1) @ weight.bfloat16().t()).float()
    apart = (expected.float() - plain).norm() / plain.norm()
    assert 1e-2 < apart < 6e-2, "8 bits are not 16, and not far from them"

    gradient = torch.randn(output.shape, generator=generator).bfloat16()
    output.backward(gradient)
    assert inputs.grad is not None
    back = (rounded(gradient, -1).flatten(0, 1) @ rounded(weight, None)).bfloat16()
    assert torch.equal(inputs.grad.flatten(0, 1), back.float())
    # The sum over tokens is in bf16.
    assert torch.equal(module.weight.grad, (gradient.flatten(0, 1).t() @ halved.flatten(0, 1)).float())


@installed
def test_what_tokens_get_does_not_depend_on_their_neighbours() -> None:
    """Else documents of a row would see each other, and micro-batches would change what is learned."""
    network = built(recipe_of())
    rows = [{name: value[row : row + 1] for name, value in BATCH.items()} for row in (0, 1)]
    for row in rows:
        row["cu_seqlens"] = BATCH["cu_seqlens"][:3]
    changed = {**BATCH, "input_ids": torch.cat([(IDS[:, :24] + 7) % 512, IDS[:, 24:]], 1)}
    whole = scores(network, BATCH)
    assert torch.equal(scores(network, changed)[:, 24:], whole[:, 24:])
    assert torch.equal(torch.cat([scores(network, row) for row in rows]), whole)
    together = learn(built(recipe_of()))[1]
    for row in rows:
        apart = learn(network, row)[1]
    for name, gradient in together.items():
        # A micro-batch's part of a weight's gradient is rounded to bf16, with or without fp8.
        torch.testing.assert_close(apart[name].norm(), gradient.norm(), rtol=1e-3, atol=0)
        assert (apart[name] - gradient).norm() <= 4e-3 * gradient.norm(), name


@installed
def test_all_linear_modules_but_those_at_the_ends() -> None:
    tree = recipe_of()
    network, plain = built(tree), built(recipe_of(False))
    kinds = {name: type(m).__name__ for name, m in network.named_modules() if isinstance(m, nn.Linear)}
    left = {name for name, kind in kinds.items() if kind == "Linear"}
    assert left == {"model.layers.0.self_attn.q_proj", "lm_head"}
    assert set(kinds.values()) == {"Linear", "Float8Linear"}
    assert float8.describe_products(network, "emulated") == {"products": "emulated fp8 in 13 of 15 linear modules"}
    # The weights are the parameters that they were.
    assert [*network.state_dict()] == [*plain.state_dict()]
    for one, other in zip(network.parameters(), plain.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
    # The head is left out wherever it stands.
    plain.behind = nn.Linear(64, 64)
    float8.convert(plain, "emulated")
    assert type(plain.lm_head) is nn.Linear
    # Sides of 8 fit no kernel; what is frozen is no product of a trained weight.
    odd = {"config": {**tree["model"]["config"], "num_key_value_heads": 1, "head_dim": 8}}
    freeze = {"freeze": r"model.layers.1.mlp.*"}
    some = built(recipe_of(model={**odd, **freeze}))
    kinds = {name for name, m in some.named_modules() if type(m).__name__ == "Float8Linear"}
    assert not {name for name in kinds if name.endswith(("k_proj", "v_proj")) or "layers.1.mlp" in name}
    assert "model.layers.1.self_attn.q_proj" in kinds


@installed
@pytest.mark.parametrize("head", ["llama", "bert"])
def test_a_classifier_keeps_its_head(head: str) -> None:
    config = ARCHITECTURES["bert"]["model"]["config"] if head == "bert" else base()["model"]["config"]
    sections = {key: value for key, value in ARCHITECTURES["bert"].items() if key in ("task", "data")}
    sections["task"] = {"name": "sequence_classification", "num_labels": 16}
    recipe = validate_recipe(base(**sections, precision="bf16", model={"config": config, "fp8": "emulated"}))
    network = build_model(recipe, resolve_model_config(recipe, HEAD, vocab_size=512, num_labels=16), HEAD)
    kinds = {name: type(m).__name__ for name, m in network.named_modules() if isinstance(m, nn.Linear)}
    left = [name for name, kind in kinds.items() if kind == "Linear"]
    assert len(left) == 2
    assert left[1] == [*kinds][-1]
    assert kinds[left[1]] == "Linear"


@installed
def test_no_copies_of_weights_are_kept() -> None:
    """For the backward pass inputs in 16 bit are, and weights as they are."""
    module = built(recipe_of()).model.layers[1].mlp.up_proj
    kept: list[torch.Tensor] = []
    inputs = torch.randn(5, 64, requires_grad=True)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with keep, torch.autocast("cpu", torch.bfloat16):
        module(inputs)
    assert [t.dtype for t in kept] == [torch.bfloat16, torch.float32]
    assert kept[1].data_ptr() == module.weight.data_ptr()


@installed
@pytest.mark.parametrize("how", ["selective", True])
def test_recomputed_is_the_same(how: Any) -> None:
    loss, plain = learn(built(recipe_of()))
    again, recomputed = learn(built(recipe_of(model={"gradient_checkpointing": how})))
    assert loss == again
    assert loss != learn(built(recipe_of(False)))[0]
    for name, gradient in plain.items():
        assert torch.equal(recomputed[name], gradient), name


# ---------------------------------------------------------------- runs

_FEW = {"length": {"steps": 20}, "eval": {"micro_size": 3}}
JOBS = {
    "fp8": recipe_of(model={"gradient_checkpointing": True}, **_FEW),
    "bf16": recipe_of(False, **_FEW),
}


@installed
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero3"])
def test_backends_take_the_single_process_path(launcher: Launcher, backend: str) -> None:
    """FSDP2 and ZeRO-3 hold a weight in parts; its scales are those of the whole."""
    single = launcher.many("single", JOBS)["fp8"]
    other = launcher.one(backend, JOBS["fp8"])
    assert_same_path_in_bf16(single, other)
    assert other.validation() == pytest.approx(single.validation(), rel=1e-3)
    assert other.facts["runs"]["output_dtypes"]["Float8Linear"] == "bfloat16"
    assert other.facts["kernels"]["products"] == "emulated fp8 in 13 of 15 linear modules"
    assert "_C_cutlass" not in other.output


@installed
def test_it_learns_nearly_what_bf16_does(launcher: Launcher) -> None:
    runs = {name: run.check() for name, run in launcher.many("single", JOBS).items()}
    apart = np.abs(runs["fp8"].series("loss") / runs["bf16"].series("loss") - 1)
    assert 0 < apart.max() <= 1e-3
    assert 0 < abs(runs["fp8"].validation() / runs["bf16"].validation() - 1) <= 1e-3
    assert runs["bf16"].facts["kernels"].keys() == {"attention", "loss"}


@installed
def test_a_stopped_run_goes_on_and_its_model_is_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(place: str, how: Any = "emulated", **resume: Any) -> dict[str, Any]:
        data = {"train": stories("train", limit=60), "validation": stories("validation", limit=6)}
        return recipe_of(
            how,
            data={**data, "sequence_length": 64},
            length={"steps": 4},
            checkpoint={"every_steps": 2},
            output={"dir": str(tmp_path / place)},
            resume=resume,
        )

    straight = run_here(tree("straight"))
    run_here(tree("stopped"), stop_after(2))
    with pytest.raises(RecipeError, match=r"model\.fp8: 'emulated' there, False here"):
        run_here(tree("stopped", False))
    done = run_here(tree("stopped"))
    assert done.losses == straight.losses
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)
    # A checkpoint is one of weights: either kind of run goes on from the other's.
    for first, then in (("emulated", False), (False, "emulated")):
        place = f"{first}-{then}"
        run_here(tree(place, first), stop_after(2))
        went_on = run_here(tree(place, then, allow=["model.fp8"]))
        assert (went_on.losses[:2] == straight.losses[:2]) is (first == "emulated")
        assert went_on.losses[2:] != straight.losses[2:]
        assert went_on.weights.keys() == straight.weights.keys()
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    written, _ = exported(done.directory, "merged", tmp_path / "exported")
    opened = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    assert {type(m) for m in opened.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    for name, tensor in done.weights.items():
        assert torch.equal(opened.state_dict()[name], tensor), name


@pytest.mark.gpu
@pytest.mark.xdist_group("gpu")
@pytest.mark.parametrize("backend", ["single", "fsdp"])
def test_a_gpu_computes_what_is_emulated(launcher: Launcher, backend: str) -> None:
    if torch.cuda.get_device_capability() < float8._CAPABILITY:
        pytest.skip("this GPU has no fp8")
    jobs = {
        "emulated": JOBS["fp8"],
        "fp8": recipe_of(True, **_FEW),
        "compiled": recipe_of(True, {"compile": True}, **_FEW),
    }
    runs = {name: run.check() for name, run in launcher.many(backend, jobs, processes=1).items()}
    for name in ("fp8", "compiled"):
        assert runs[name].facts["kernels"]["products"] == "fp8 in 13 of 15 linear modules"
        # Products are summed in another order, and not always in fp32.
        assert np.allclose(runs[name].series("loss"), runs["emulated"].series("loss"), rtol=5e-3)


# ---------------------------------------------------------------- what is refused


def test_where_there_is_no_gpu_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "require_installed", lambda *given, **named: None)
    recipe = validate_recipe(recipe_of(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"needs a GPU of .* 8\.9 or above; this machine has no GPU.*`emulated`"):
        float8.check_fp8(recipe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(RecipeError, match=r"this GPU's is 8\.6\. Set it to false"):
        float8.check_fp8(recipe)
    float8.check_fp8(validate_recipe(recipe_of()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    float8.check_fp8(recipe)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "torchao" else found(name))
    float8.check_fp8(validate_recipe(recipe_of(False)))
    with pytest.raises(LibraryVersionError, match=r"pip install 'finetune\[fp8\]'"):
        float8.check_fp8(validate_recipe(recipe_of()))


@installed
def test_a_network_without_such_modules() -> None:
    """GPT-2's are of a class of its own. A custom task may build a network that never heard of fp8."""
    gpt2 = built(recipe_of(model={"config": ARCHITECTURES["gpt2"]["model"]["config"]}))
    for network in (gpt2, nn.Sequential(nn.Linear(16, 16))):
        assert float8.describe_products(network, False) == {}
        with pytest.raises(RecipeError, match=r"has no linear modules that can compute in fp8.* to false"):
            float8.describe_products(network, "emulated")


def test_what_does_not_go_together() -> None:
    for sections in ({"lora": {}}, {"lora": {}, "model": {**recipe_of()["model"], "quantization": "nf4"}}):
        with pytest.raises(RecipeError, match=r"model\.fp8: .* Set fp8 to false, or remove `lora`"):
            validate_recipe({**recipe_of(), **sections})
    recipe: Recipe = validate_recipe(recipe_of())
    fsdp, zero3 = (Launch(kind=kind, num_processes=2) for kind in ("fsdp", "zero3"))
    _check_planes(recipe, fsdp, "bf16", 1)
    for precision in ("fp32", "fp16"):
        with pytest.raises(RecipeError, match=f"precision is {precision}. Set `precision: bf16`"):
            _check_planes(recipe, fsdp, precision, 1)
    automatic = recipe.model_copy(update={"precision": "auto"})
    with pytest.raises(RecipeError, match="precision is fp32 on this machine"):
        _check_planes(automatic, fsdp, "fp32", 1)
    with pytest.raises(BackendError, match=r"Set `model\.gradient_checkpointing: true`"):
        _check_planes(recipe, zero3, "bf16", 1)
    _check_planes(validate_recipe(recipe_of(model={"gradient_checkpointing": True})), zero3, "bf16", 1)


def test_a_plan_for_adapters_leaves_it_out() -> None:
    recipe: Recipe = validate_recipe(recipe_of())
    for kind in ("LoRA", "QLoRA"):
        cell: Any = SimpleNamespace(
            kind=kind, setting=StepSetting(recipe.batch.rows, False), launch=SimpleNamespace(data_ranks=1)
        )
        assert "model.fp8=false" in recommendations.recipe_changes(cell, recipe)
        validate_recipe(model_shapes.as_kind(recipe, kind).model_dump(mode="json"))
