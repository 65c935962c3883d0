"""Architectures of transformers in a tiny size: what runs is right, and what would be wrong without a word is refused.

scripts/architectures.py goes through all of them; here are some of each kind.
"""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ROOT, Launcher, assert_same_path
from inside import ONE_RANK, evaluate_batches
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

sys.path.insert(0, str(ROOT / "scripts"))

import architectures as script

from finetune.config.recipe import validate_recipe
from finetune.diagnostics.parity.launch_runs import shrink_model
from finetune.distributed.strategies.strategy import unused_parts
from finetune.models import chunked_loss
from finetune.models.build_network import build_model
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.training import preflight
from finetune.training.dry_run import describe
from finetune.utils.errors import BackendError, RecipeError

BACKEND: Any = SimpleNamespace(
    mesh=ONE_RANK,
    device=torch.device("cpu"),
    precision="fp32",
    all_reduce_max=lambda values: values,
    evaluate_batches=evaluate_batches,
)


def built(model_type: str, packing: str = "documents", sizes: dict[str, Any] | None = None, **model: Any) -> Any:
    """A network with its first weights, as a run would prepare it, and its recipe."""
    tree = script.recipe_of(model_type, model=model, data={"packing": packing})
    tree["model"]["config"] |= sizes or {}
    recipe = validate_recipe(tree)
    network = build_model(recipe, resolve_model_config(recipe, vocab_size=script.VOCABULARY), NEXT_TOKEN)
    return ForwardWrapper(network), recipe


# Windows, experts, latent attention, positions counted from a mask, masks that do not look at positions.
PACKED = ["afmoe", "biogpt", "deepseek_v3", "gemma2", "llama4_text", "mllama", "opt", "phi3", "qwen3_moe"]
UNPACKED = {"biogpt"}


@pytest.mark.parametrize("model_type", PACKED)
def test_scores_and_gradients_are_those_of_transformers(model_type: str) -> None:
    found = script.examine(model_type)
    wanted = {"wrapped", "ahead", "gradients"} | (set() if model_type in UNPACKED else {"documents"})
    assert found["finite"]
    assert {name: found[name] for name in wanted if not found[name] <= script.GOOD} == {}


@pytest.mark.parametrize("model_type", [name for name in PACKED if name not in UNPACKED])
def test_what_is_right_is_not_refused(model_type: str) -> None:
    model, recipe = built(model_type)
    assert preflight.verify_kernels(BACKEND, model, recipe)["attention"] in ("packed", "sdpa", "eager")


@pytest.mark.parametrize("model_type", ["biogpt", "gpt_oss", "lfm2", "mamba", "reformer"])
def test_documents_that_would_see_each_other_are_refused(model_type: str) -> None:
    """LFM2's convolutions reach two tokens back: a leak of 2e-4 of the scores."""
    model, recipe = built(model_type)
    with pytest.raises(BackendError, match=rf"see each other in \w+ \({model_type}\).*`padded`.*`wrapped`"):
        preflight.verify_kernels(BACKEND, model, recipe)
    model, recipe = built(model_type, packing="wrapped")
    preflight.verify_kernels(BACKEND, model, recipe)


def test_positions_that_do_not_count_from_nought_are_refused() -> None:
    model, recipe = built("roberta")
    with pytest.raises(BackendError, match=r"not computed as it is alone in RobertaForCausalLM \(roberta\)"):
        preflight.verify_kernels(BACKEND, model, recipe)


@pytest.mark.parametrize("model_type", ["bert", "xlnet", "xlm"])
def test_a_network_that_sees_its_targets_is_refused(model_type: str) -> None:
    sizes = {"is_decoder": False} if model_type == "bert" else {}
    model, recipe = built(model_type, packing="wrapped", sizes=sizes)
    with pytest.raises(BackendError, match="tokens see those behind them") as refused:
        preflight.verify_kernels(BACKEND, model, recipe)
    assert ("is_decoder: true" in str(refused.value)) == (model_type == "bert")


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "xlstm", "llama"])
def test_logits_that_are_capped_behind_the_head_are_seen(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though first weights give logits that a cap leaves as they are, and no name tells."""
    monkeypatch.setattr(chunked_loss, "_CAPS", ())
    monkeypatch.setattr(chunked_loss, "_SCALES", ())
    model, recipe = built(model_type, packing="wrapped")
    assert preflight.check_loss(BACKEND, model, recipe) == ("chunked" if model_type == "llama" else "plain")
    model, recipe = built(model_type, packing="wrapped", loss="chunked")
    if model_type != "llama":
        with pytest.raises(BackendError, match=r"logits behind its head.*`plain`"):
            preflight.check_loss(BACKEND, model, recipe)


def test_what_an_architecture_stumbles_over_is_named() -> None:
    model, recipe = built("doge", attention="packed")
    with pytest.raises(BackendError, match=r"DogeForCausalLM \(doge\) with attention `packed`.*Set model.attention to"):
        preflight.verify_kernels(BACKEND, model, recipe)
    with pytest.raises(RecipeError, match=r"gpt_oss cannot use.*`eager`"):
        built("gpt_oss", attention="packed")


@pytest.mark.parametrize("model_type", ["bart", "t5", "musicgen", "whisper"])
def test_encoder_decoder_models_are_refused_in_those_words(model_type: str) -> None:
    tree = script.recipe_of("llama")
    tree["model"]["config"] = {"model_type": model_type}
    with pytest.raises(RecipeError, match=f"{model_type} is an encoder-decoder model"):
        describe(validate_recipe(tree))


def test_what_is_no_language_model_is_refused() -> None:
    tree = script.recipe_of("llama")
    tree["model"]["config"] = {"model_type": "vit"}
    with pytest.raises(RecipeError, match="no causal_lm network of a vit model"):
        describe(validate_recipe(tree))


def test_keys_that_only_a_network_reads_are_keys() -> None:
    """Qwen3-MoE's published configurations say `head_dim`; its class does not declare it."""
    model, _ = built("qwen3_moe", sizes={"head_dim": 16})
    assert model.network.model.layers[0].self_attn.q_proj.out_features == 4 * 16
    with pytest.raises(RecipeError, match="no key 'heed_dim'"):
        built("qwen3_moe", sizes={"heed_dim": 16})


def test_a_shrunk_model_keeps_the_tokenizer_that_a_recipe_trains(tmp_path: Any) -> None:
    model, _ = built("qwen3_moe", sizes={"head_dim": 16})
    model.network.save_pretrained(tmp_path)
    tree = script.recipe_of("llama")
    tree["model"] = {"name": str(tmp_path)}
    recipe = validate_recipe(tree)
    small = validate_recipe(shrink_model(recipe))
    assert (small.tokenizer.name, small.tokenizer.vocab_size) == (None, script.VOCABULARY)
    assert resolve_model_config(small).head_dim == 16


def test_the_page_names_architectures_that_there_are() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (yes|no) \|", (ROOT / "docs" / "architectures.md").read_text(), re.MULTILINE)
    assert len(rows) > 150
    assert {name for name, _ in rows} <= set(CONFIG_MAPPING_NAMES)
    assert "opt" in {name for name, trains in rows if trains == "yes"}


# ---------------------------------------------------------------- parts that a text never uses

FOR_IMAGES = ("model.vision_tower", "model.multi_modal_projector")


def sees_images(**model: Any) -> dict[str, Any]:
    """A Gemma 3 with a part for images, on text, with two micro-batches a step."""
    return script.recipe_of("gemma3", model=model, data={"packing": "wrapped"}, output={"save_model": True})


FROZEN = sees_images(freeze=list(FOR_IMAGES))
LAUNCHED_RUNS = {
    "single": {"unused": sees_images(), "frozen": FROZEN},
    "fsdp": {"unused": sees_images()},
    **{key: {"frozen": FROZEN} for key in ("ddp", "zero2")},
}


@pytest.mark.xdist_group("fsdp")
def test_fsdp_leaves_parts_that_are_not_used_as_they_are(launcher: Launcher) -> None:
    single, other = (launcher.many(config, LAUNCHED_RUNS["fsdp"])["unused"] for config in ("single", "fsdp"))
    assert_same_path(single, other, 1e-4)
    assert any("vision_tower" in name for name in other.weights)


@pytest.mark.parametrize(("config", "why"), [("ddp", "waits for the gradients"), ("zero2", "weight decay")])
def test_parts_that_are_not_used_are_refused_where_they_would_not_stay(
    launcher: Launcher, config: str, why: str
) -> None:
    refused = launcher.one(config, sees_images())
    assert refused.code != 0
    assert re.search(rf"take no part in the loss, and .*{why}.*: {', '.join(FOR_IMAGES)}\. Freeze", refused.output)
    assert_same_path(*(launcher.many(name, LAUNCHED_RUNS[config])["frozen"] for name in ("single", config)), 1e-4)


def test_fsdp_refuses_them_where_it_would_not_leave_them(launcher: Launcher) -> None:
    refused = launcher.one("fsdp", sees_images(), env={"FSDP_SYNC_EACH_BATCH": "true"})
    assert re.search(r"take no part in the loss, and weight decay .*model\.vision_tower", refused.output)
    halves = {**sees_images(), "precision": "bf16", "optim": {**sees_images()["optim"], "reduce_dtype": "bf16"}}
    refused = launcher.one("fsdp", halves)
    assert re.search(r"take no part in the loss, and torch cannot hold .*model\.vision_tower", refused.output)


def test_unused_parts_are_named_as_a_whole() -> None:
    trained = ["a.b.x", "a.b.y", "a.c.x", "d", "e.x", "e.y"]
    assert unused_parts(trained, ["a.c.x", "e.x"]) == ["a.b", "d", "e.y"]
    assert unused_parts(trained, trained) == []
