"""Stretched rotary positions: what transformers computes by itself, through the recipe, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from recipes_for_tests import base
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import LoraSection, Recipe, RopeScalingSection
from finetune.export import find_weights
from finetune.models import build_network
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config, stretch_positions
from finetune.utils.errors import RecipeError

KNOWN = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": KNOWN,
    # So large that positions show in what attention puts out.
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rope") / "llama"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_theta=1000.0)).save_pretrained(folder)
    return folder


def recipe_of(model: Path, scaling: dict[str, Any] | None, length: int = 4 * KNOWN) -> Recipe:
    sections: dict[str, Any] = {"model": {"name": str(model), "config": None, "rope_scaling": scaling}}
    return validate_recipe(base(**sections, data={"sequence_length": length}))


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"factor": 4.0}, {}),
    "dynamic": ({"factor": 4.0}, {}),
    "yarn": ({"factor": 4.0, "beta_fast": 16.0}, {"original_max_position_embeddings": KNOWN}),
    "llama3": (
        {"factor": 4.0, "high_freq_factor": 3.0},
        {"original_max_position_embeddings": KNOWN, "low_freq_factor": 1.0},
    ),
}


def built(recipe: Recipe) -> Any:
    return build_network.build_model(recipe, resolve_model_config(recipe, vocab_size=SIZES["vocab_size"]), NEXT_TOKEN)


def as_transformers_has_it(model: Path, kind: str) -> Any:
    """A whole model of transformers, whose configuration was written by hand."""
    given, beside = SCALINGS[kind]
    config = AutoConfig.from_pretrained(model)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1000.0, **given, **beside}
    if kind != "dynamic":
        config.max_position_embeddings = 4 * KNOWN
    return AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32)


@pytest.mark.parametrize("kind", list(SCALINGS))
def test_logits_are_those_of_transformers(model: Path, kind: str) -> None:
    network = built(recipe_of(model, {"type": kind, **SCALINGS[kind][0]})).eval()
    other, plain = as_transformers_has_it(model, kind).eval(), AutoModelForCausalLM.from_pretrained(model).eval()
    ids = torch.randint(0, 64, (2, 4 * KNOWN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, wanted, before = (n(input_ids=ids, use_cache=False).logits for n in (network, other, plain))
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not torch.allclose(found, before, atol=1e-3), "it changes something"


def test_dynamic_frequencies_do_not_depend_on_the_batch(model: Path) -> None:
    """transformers' own are those of the longest row so far."""
    network = built(recipe_of(model, {"type": "dynamic", "factor": 4.0})).eval()
    ids = torch.randint(0, 64, (1, 4 * KNOWN), generator=torch.Generator().manual_seed(1))

    def scores(network: Any, count: int) -> torch.Tensor:
        with torch.no_grad():
            return network(input_ids=ids[:, :count], use_cache=False).logits[:, :16]  # type: ignore[no-any-return]

    whole = scores(network, 4 * KNOWN)
    for count in (16, KNOWN + 8, 16):
        assert torch.allclose(scores(network, count), whole, atol=1e-5)
    other = as_transformers_has_it(model, "dynamic").eval()
    assert not torch.allclose(scores(other, 16), scores(other, 4 * KNOWN), atol=1e-3)


def test_the_model_that_is_written_says_so(model: Path) -> None:
    config = built(recipe_of(model, {"type": "yarn", "factor": 4.0})).config
    assert config.max_position_embeddings == 4 * KNOWN
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["original_max_position_embeddings"] == KNOWN


def test_positions_are_exact() -> None:
    """In binary, 1.15 x 100 is 114.99999999999999."""
    section = RopeScalingSection(type="linear", factor=1.15)
    assert stretch_positions(LlamaConfig(max_position_embeddings=100), section) == 115


def test_longer_rows_are_refused_with_the_factor_that_they_need(model: Path) -> None:
    with pytest.raises(RecipeError, match=r"knows 64 positions .* at most 64, or model\.rope_scaling\.factor to 2\.5"):
        resolve_model_config(recipe_of(model, None, length=160))
    with pytest.raises(RecipeError, match=r"knows 128 positions .*factor to 4 "):
        resolve_model_config(recipe_of(model, {"type": "linear", "factor": 2.0}))
    resolve_model_config(recipe_of(model, {"type": "linear", "factor": 2.5}, length=160))


def test_layers_that_see_whole_rows_are_stretched(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "layer_types": kinds}
    sizes["sliding_window"] = 8
    AutoModelForCausalLM.from_config(Gemma3TextConfig(**sizes)).save_pretrained(tmp_path)
    parameters = resolve_model_config(recipe_of(tmp_path, {"type": "linear", "factor": 4.0})).rope_parameters
    assert (parameters["full_attention"]["rope_type"], parameters["full_attention"]["factor"]) == ("linear", 4.0)
    assert parameters["sliding_attention"]["rope_type"] == "default"
    with pytest.raises(RecipeError, match=r"`dynamic` is not offered\. Set model\.rope_scaling\.type to `yarn`"):
        resolve_model_config(recipe_of(tmp_path, {"type": "dynamic", "factor": 4.0}))


def test_what_cannot_be_stretched_is_refused(model: Path, tmp_path: Path) -> None:
    GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(RecipeError, match="gpt2 has no rotary positions that could be stretched"):
        resolve_model_config(recipe_of(tmp_path / "gpt2", {"type": "linear", "factor": 2.0}))
    built(recipe_of(model, {"type": "linear", "factor": 4.0})).config.save_pretrained(tmp_path / "twice")
    with pytest.raises(RecipeError, match=r"stretched already \(linear, rope_parameters"):
        resolve_model_config(recipe_of(tmp_path / "twice", {"type": "yarn", "factor": 2.0}))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"type": "linear", "factor": 1.0}, "greater than 1"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3.0}, "`beta_fast` belongs to type `yarn`, not to `linear`"),
        ({"type": "longrope", "factor": 2.0}, "'linear', 'dynamic', 'yarn' or 'llama3'"),
    ],
)
def test_sections_that_mean_nothing_are_refused(model: Path, section: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        recipe_of(model, section)


def test_an_adapter_alone_is_refused(model: Path) -> None:
    recipe = recipe_of(model, {"type": "linear", "factor": 4.0}).model_copy(update={"lora": LoraSection()})
    with pytest.raises(RecipeError, match=r"runs/x stretched the positions of its base .* Use --as merged"):
        find_weights.check_kind(Path("runs/x"), recipe, "adapter")


def test_random_weights_have_keys_of_their_own() -> None:
    with pytest.raises(RecipeError, match="`config` has `rope_parameters` itself"):
        validate_recipe(base(model={**base()["model"], "rope_scaling": {"type": "linear", "factor": 2.0}}))


@pytest.mark.parametrize("key", ["rope_theta", "rope_scaling"])
def test_older_names_are_told_the_new_one(key: str) -> None:
    recipe = validate_recipe(base(model={"config": {**base()["model"]["config"], key: 10000.0}}))
    with pytest.raises(RecipeError, match=f"no key '{key}'; write rope_parameters: "):
        resolve_model_config(recipe, vocab_size=64)
