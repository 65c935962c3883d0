"""Frozen weights: held as they are stored, with the results of fp32 copies; parts frozen by name; 8-bit weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import exported, opened_here
from harness import Launcher, assert_near_in_bf16, assert_same_path
from inside import run_here, stop_after
from recipes_for_tests import ARCHITECTURES, MODEL, base, stories
from stored_model import store
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.export import verify_export
from finetune.models import build_network, frozen_weights, quantization
from finetune.models.build_network import build_model
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.tasks.causal_lm import causal_lm_logits
from finetune.training import dry_run
from finetune.utils.errors import RecipeError

IDS = torch.arange(3, 43).reshape(2, 20)
HALVES = (torch.bfloat16, torch.float16)


def recipe_of(model: dict[str, Any], lora: dict[str, Any] | None = None) -> Recipe:
    return validate_recipe({**base(), "model": model, **({"lora": {"rank": 4, **lora}} if lora is not None else {})})


def built(recipe: Recipe) -> Any:
    return build_model(recipe, resolve_model_config(recipe, vocab_size=512), NEXT_TOKEN)


def copied(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same network with its weights in fp32."""

    with monkeypatch.context() as patched:
        patched.setattr(build_network, "base_dtype", lambda recipe: torch.float32)
        return built(recipe)


def moved(network: nn.Module) -> nn.Module:
    """With adapters that do something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return network


def figures(network: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Logits and gradients."""
    quantization.compute_in(network, dtype)
    network.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = causal_lm_logits(network, {"input_ids": IDS})
    logits.float().square().sum().backward()
    return {"logits": logits.detach(), **{n: p.grad for n, p in network.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("name", ["stories", "gpt2", "qwen3", "gemma3", "mixtral"])
@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ({}, {}),
        ({}, {"dora": True}),
        ({"gradient_checkpointing": True}, {"save_modules": ["norm", "ln_f"]}),
        ({}, {"init": "pissa", "rank": 2}),
        ({"quantization": "nf4"}, {}),
        ({"quantization": "int8"}, {}),
        ({"freeze": r".*\.0\..*|.*embed_tokens|.*wte"}, None),
    ],
    ids=["lora", "dora", "whole", "pissa", "nf4", "int8", "freeze"],
)
def test_results_are_those_of_fp32_copies(
    stored: torch.dtype, name: str, model: dict, lora: dict | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lora and "save_modules" in lora:
        lora = {"save_modules": ["ln_f" if name == "gpt2" else "norm"]}
    if name == "gpt2" and model.get("quantization") == "int8":
        pytest.skip("GPT-2 has nothing to pack, which is refused below")
    recipe = recipe_of({"name": store(tmp_path, name, stored), **model}, lora)
    ours, theirs = built(recipe), copied(recipe, monkeypatch)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if one.requires_grad:
            assert one.dtype == torch.float32
            assert torch.equal(one, other), "it begins elsewhere"
    # Gemma's embedding, which is its head, scales what it looks up: a class of its own.
    if model.get("quantization") is None and (lora or {}).get("init") != "pissa":
        assert stored in {p.dtype for p in ours.parameters()}
    for dtype in (torch.float32, torch.bfloat16):
        one, other = figures(moved(ours), dtype), figures(moved(theirs), dtype)
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key]), f"{key} in {dtype}"


def test_only_what_is_small_is_fp32(tmp_path: Path) -> None:
    network = built(recipe_of({"name": store(tmp_path, "stories", torch.bfloat16)}, {}))
    wide = {n: p for n, p in network.named_parameters() if not p.requires_grad and p.dtype == torch.float32}
    assert all("norm" in name for name in wide)
    weights = sum(p.numel() for p in network.parameters() if not p.requires_grad)
    assert sum(p.nbytes for p in network.parameters() if not p.requires_grad) < 2.02 * weights
    assert network.base_model.model.lm_head.weight is network.get_input_embeddings().weight, "tied as before"


def test_products_keep_no_copies_of_frozen_weights() -> None:
    """What autograd saves: a copy of each weight until the backward pass would take twice the memory of fp32."""
    module = frozen_weights.StoredLinear(64, 64)
    module.weight.data = module.weight.data.bfloat16()
    module.requires_grad_(False)
    saved: list[torch.Tensor] = []
    inputs = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(inputs)
    assert [t.data_ptr() for t in saved] == [module.weight.data_ptr()]


def test_a_bias_beside_a_frozen_weight_is_trained() -> None:
    """As of a head whose weight is a frozen embedding's."""
    module = frozen_weights.StoredLinear(8, 4)
    module.weight = nn.Parameter(module.weight.data.bfloat16(), requires_grad=False)
    plain = nn.Linear(8, 4)
    plain.load_state_dict({"weight": module.weight.float(), "bias": module.bias})
    inputs = torch.randn(2, 3, 8)
    for one in (module, plain):
        one(inputs).square().sum().backward()
    torch.testing.assert_close(module.bias.grad, plain.bias.grad)


def test_a_configuration_that_lies_about_its_files_loses_nothing(tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(MODEL, place)
    place.chmod(0o755)
    config = AutoConfig.from_pretrained(place)
    (place / "config.json").chmod(0o644)
    config.dtype = torch.bfloat16
    config.save_pretrained(place)
    network, whole = built(recipe_of({"name": str(place)}, {})), built(recipe_of({"name": MODEL}, {}))
    for one, other in zip(network.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------- 8 bits


def test_8_bits_are_near_the_weights() -> None:
    module = nn.Linear(128, 64)
    packed = quantization.Linear8bit(module)
    away = (packed.weight - module.weight).abs()
    scale = module.weight.abs().amax(1, keepdim=True)
    # Half a unit, and what fp16 takes from weight and scale.
    assert (away <= scale / 127 * (0.5 + 2 * 127 / 2**12)).all()
    assert packed.packed.nbytes == 128 * 64
    inputs = torch.randn(3, 128)
    torch.testing.assert_close(packed(inputs), nn.functional.linear(inputs, packed.weight, module.bias))


# ---------------------------------------------------------------- frozen by name


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [
        (["embed_tokens", "lm_head"], {"layers.0", "layers.1", "norm"}),
        (["layers.0"], {"embed_tokens", "layers.1", "norm", "lm_head"}),
        (r"model\.layers\.\d", {"embed_tokens", "norm", "lm_head"}),
    ],
)
def test_parts_are_frozen(freeze: Any, trained: set[str]) -> None:
    config = {**base()["model"]["config"], "vocab_size": 512}
    recipe = recipe_of({"config": config, "freeze": freeze})
    network = built(recipe)
    names = {n.removeprefix("model.") for n, p in network.named_parameters() if p.requires_grad}
    assert {".".join(n.split(".")[:2]) if n.startswith("layers") else n.split(".")[0] for n in names} == trained
    free, whole = (sum(p.numel() for p in network.parameters() if p.requires_grad or full) for full in (False, True))
    assert f"{whole:,} parameters, {free:,} trained" in dry_run.describe(recipe)


GPT2 = {**ARCHITECTURES["gpt2"]["model"]["config"], "vocab_size": 512}


@pytest.mark.parametrize(
    ("model", "lora", "says"),
    [
        ({"freeze": ["embed"]}, None, "model.freeze: 'embed' is no module of LlamaForCausalLM"),
        ({"freeze": r"layers\.0"}, None, r"model.freeze: the regular expression 'layers\.0' matches none of the"),
        ({"freeze": "("}, None, "model.freeze: the regular expression '(' does not compile"),
        ({"freeze": []}, None, "model.freeze: name at least one module"),
        ({"freeze": ".*"}, None, "model.freeze: '.*' leaves nothing to train"),
        ({"freeze": ["norm"]}, {}, "model.freeze: with a `lora` section the whole model is frozen already"),
        ({"config": GPT2, "quantization": "int8"}, {}, "model.quantization: GPT2LMHeadModel has no linear modules"),
        (
            {"quantization": "int8"},
            None,
            "model.quantization: quantized weights (int8) cannot be trained. Add a `lora`",
        ),
    ],
)
def test_refused(model: dict, lora: dict | None, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        built(recipe_of({**({} if "config" in model else {"name": MODEL}), **model}, lora))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- one path on every backend

LOWER = {
    "train": stories("train", limit=100),
    "validation": stories("validation", limit=2),
    "sequence_length": 64,
    "lowercase": True,
}


def jobs_for(folder: Path) -> dict[str, Any]:
    def job(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
        optim = {"name": "AdamW", "lr": 2e-3, "args": {"eps": 1e-5}}
        return {**base(**{"data": LOWER, "length": {"steps": 3}, "optim": optim, **sections}), "model": model}

    stored = {"name": store(folder, "stories", torch.bfloat16)}
    # Which modules take adapters is test_lora.py's business.
    two = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    return {
        "stored": job({**stored, "gradient_checkpointing": True}, lora={**two, "dropout": 0.1}),
        "stored_bf16": job(stored, lora={**two, "dora": True}, precision="bf16"),
        "int8": job({**stored, "quantization": "int8"}, lora=two, eval={"every_steps": 2}),
        "freeze": job({**stored, "freeze": r"model\.layers\.[0-3]|model\.embed_tokens"}),
    }


def LAUNCHED_RUNS(launcher: Launcher) -> dict[str, Any]:
    return dict.fromkeys(("single", "ddp", "fsdp", "zero2", "zero3"), jobs_for(launcher.shared / "stored"))


PAIRS = [
    pytest.param(backend, name, marks=pytest.mark.xdist_group(backend))
    for backend in ("ddp", "fsdp", "zero2", "zero3")
    for name in ("stored", "stored_bf16", "int8", "freeze")
]


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_same_path_on_every_backend(launcher: Launcher, backend: str, name: str) -> None:
    jobs = jobs_for(launcher.shared / "stored")
    single, other = (launcher.many(where, jobs)[name] for where in ("single", backend))
    if "bf16" in name:
        assert_near_in_bf16(single, other)
    else:
        assert_same_path(single, other, 1e-5, weights=5e-5)
    assert single.validation() == pytest.approx(other.validation(), rel=5e-3 if "bf16" in name else 1e-5)
    # What is held, as the start says it.
    one, many = (run.facts["memory"] for run in (single, other))
    share = 0.5 if backend in ("fsdp", "zero3") else 1.0
    assert many["frozen"] == pytest.approx(share * one["frozen"], rel=0.1)
    assert many["optimizer"] == pytest.approx((1.0 if backend == "ddp" else 0.5) * one["optimizer"], rel=0.1)
    assert other.facts["runs"]["num_parameters"] == single.facts["runs"]["num_parameters"] > 120_000, (
        "packed, but there"
    )
    if name != "int8":
        dtypes = other.facts["runs"]["model_dtypes"]
        assert dtypes == ["bfloat16", "float32"]


def test_a_run_with_frozen_parts_goes_on_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(place: str) -> dict[str, Any]:
        job = jobs_for(tmp_path / "stored")["freeze"]
        data = {**job["data"], "cache_dir": str(tmp_path / "cache"), "num_workers": 1}
        return {**job, "data": data, "checkpoint": {"every_steps": 2}, "output": {"dir": str(tmp_path / place)}}

    straight = run_here(tree("straight"))
    run_here(tree("stopped"), stop_after(2))
    done = run_here(tree("stopped"))
    assert done.losses == straight.losses
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)
    assert {t.dtype for t in done.weights.values()} == {torch.float32, torch.bfloat16}
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    written, _ = exported(done.directory, "merged", tmp_path / "exported")
    opened = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).state_dict()
    for name, tensor in done.weights.items():
        assert torch.equal(opened[name], tensor.float()), name
