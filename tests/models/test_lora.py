"""LoRA: one recipe, one path on every backend; only adapters are trained, and plain peft opens what comes out."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Launcher, Result, assert_near_in_bf16, assert_same_path
from ranks import Place, assert_refused, start
from recipes_for_tests import ADAPTERS, ADAPTERS_EVERYWHERE, MODEL, TALKS, adapted, base, stories
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import OptimSection, Recipe
from finetune.models import lora_adapters
from finetune.models.build_network import build_meta_model, build_model
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.optim.parameter_groups import parameter_groups
from finetune.tasks.causal_lm import causal_lm_logits
from finetune.tasks.classification import HEAD
from finetune.tasks.task import Task, TaskData
from finetune.tasks.task_lookup import find_task
from finetune.training import dry_run
from finetune.utils.errors import RecipeError

LEARNING = {"train": stories("train", limit=300), "validation": stories("validation", limit=20), "lowercase": True}
LEARNER = {"model": {"name": MODEL}, "lora": {"rank": 8}, "data": {**LEARNING, "sequence_length": 128}}
THIN = adapted(
    {"name": MODEL},
    {"rank": 4},
    batch={"global_size": 6, "micro_size": 2},
    length={"steps": 3},
    eval={"at_end": False},
)
# Which modules and kinds of networks take adapters is the same where weights are whole: DDP and stage 2 share them.
SHARED = {"ddp": ("qwen3", "gemma3"), "zero2": ("whole", "gpt2", "fp4")}
JOBS = dict.fromkeys(("fsdp", "zero3"), ADAPTERS) | dict.fromkeys(
    ("hsdp", "zero1", "zero3_offload"), ADAPTERS_EVERYWHERE
)
JOBS |= {name: {k: v for k, v in ADAPTERS.items() if k not in left_out} for name, left_out in SHARED.items()}
JOBS = {name: {**jobs, **(TALKS if name in ("ddp", "fsdp", "zero3") else {})} for name, jobs in JOBS.items()}
LAUNCHED_RUNS: dict[str, dict[str, Any]] = {
    **JOBS,
    "single": {
        **ADAPTERS,
        **TALKS,
        "knows": adapted(**LEARNER, length={"steps": 0}),
        "learns": adapted(**LEARNER, length={"steps": 90}),
        "thin": THIN,
    },
}
LAUNCHED_RUNS["fsdp"] = {**JOBS["fsdp"], "adapter_seed+plain": ADAPTERS["plain"]}
PAIRS = [
    pytest.param(backend, name, marks=pytest.mark.xdist_group(backend))
    for backend, jobs in JOBS.items()
    for name in jobs
]


def launched(launcher: Launcher, backend: str, name: str) -> Result:
    return launcher.many(backend, {name: LAUNCHED_RUNS[backend][name]})[name]


def digests(run: Result) -> dict[str, dict[str, str]]:
    return json.loads((run.check().directory / "digests.json").read_text())


# ---------------------------------------------------------------- one path


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_same_path_on_every_backend(launcher: Launcher, backend: str, name: str) -> None:
    single, other = launched(launcher, "single", name), launched(launcher, backend, name)
    if "bf16" in name:
        assert_near_in_bf16(single, other)
    else:
        # `B` begins at zero: its difference is measured on a few updates, not on a weight.
        assert_same_path(single, other, 1e-5, weights=5e-5)
    assert single.validation() == pytest.approx(other.validation(), rel=5e-3 if "bf16" in name else 1e-5)
    if name == "plain":
        texts = [[m["sample"] for m in run.metrics if "sample" in m] for run in (single, other)]
        assert texts[0] == texts[1]
        assert texts[0][0].startswith("once")


def test_shards_of_thin_matrices_that_do_not_come_out_even(launcher: Launcher) -> None:
    """On three ranks, of a matrix of four rows one holds nothing."""
    single = launched(launcher, "single", "thin")
    assert_same_path(single, launcher.one("fsdp", THIN, processes=3), 1e-5, weights=5e-5)


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_adapters_begin_alike_and_the_rest_stays(launcher: Launcher, backend: str, name: str) -> None:
    one, other = digests(launched(launcher, "single", name)), digests(launched(launcher, backend, name))
    assert one["adapters"] == other["adapters"] != {}
    assert one["frozen"] == one["frozen_afterwards"] != {}
    assert other["frozen"] == other["frozen_afterwards"] == one["frozen"]


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_the_frozen_model_is_sharded_and_the_optimiser_holds_adapters(
    launcher: Launcher, backend: str, name: str
) -> None:
    runs = launched(launcher, backend, name).check().facts["runs"]
    parameters = 0.5 if backend in ("fsdp", "hsdp", "zero3", "zero3_offload") else 1.0
    optimizer = 1.0 if backend == "ddp" else 0.5
    slack = 0.3 if name == "gemma3" and backend == "fsdp" else 0.03
    assert runs["parameter_fraction"] == pytest.approx(parameters, abs=0.03)
    assert runs["optimizer_fraction"] == pytest.approx(optimizer, abs=slack)
    assert runs["parameter_dtypes"] == ["float32"]


@pytest.mark.xdist_group("fsdp")
def test_ranks_with_adapters_of_their_own_are_seen(launcher: Launcher) -> None:
    """The suite must be able to fail: without the seed, FSDP2 trains a mosaic of both ranks' adapters."""
    broken, single = launched(launcher, "fsdp", "adapter_seed+plain"), launched(launcher, "single", "plain")
    assert digests(broken)["adapters"] != digests(single)["adapters"]
    with pytest.raises(AssertionError, match=r"(loss|grad_norm) differs"):
        assert_same_path(single, broken, 1e-5)


@pytest.mark.xdist_group("single")
def test_adapters_learn(launcher: Launcher) -> None:
    before, after = (launched(launcher, "single", name).check().validation() for name in ("knows", "learns"))
    assert before > 2.2, "the model should not know lower-cased stories yet"
    assert after < before - 0.4


@pytest.mark.xdist_group("single")
@pytest.mark.parametrize("name", TALKS)
def test_answers_are_learned_and_nothing_else(launcher: Launcher, name: str) -> None:
    run = launched(launcher, "single", name).check()
    losses, report = run.series("loss"), run.facts["data"]["train"]
    assert losses[-1] < losses[0]
    assert np.isfinite(losses).all()
    assert 0.2 < report["chat"]["supervised_share"] < 0.9
    (sample,) = [m["sample"] for m in run.metrics if "sample" in m]
    assert sample.startswith("User: Who are you?\n\nAssistant:")
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "model")
    for place in (run.directory / "model", next((run.directory / "checkpoints").glob("step-*")) / "model"):
        assert GenerationConfig.from_pretrained(place).eos_token_id == tokenizer.eos_token_id


# ---------------------------------------------------------------- what is attached


def built(recipe: Recipe) -> nn.Module:
    return build_model(recipe, resolve_model_config(recipe, vocab_size=512), NEXT_TOKEN)


def recipe_of(lora: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return validate_recipe(adapted(model or {"name": MODEL}, lora, **sections))


def trained(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "bert"])
def test_plain_peft_opens_what_is_written(name: str, tmp_path: Path) -> None:
    """A folder with our configuration and our keys gives the logits that the network itself gives."""
    from peft import PeftModel

    recipe = validate_recipe(ADAPTERS[name])
    network = built(recipe).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained(network).values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    keys = lora_adapters.adapter_keys(network)
    save_file(
        {keys[n]: p.detach().clone() for n, p in trained(network).items()}, tmp_path / "adapter_model.safetensors"
    )
    config = lora_adapters.adapter_config(network)
    assert config is not None
    config.save_pretrained(tmp_path)
    fresh = built(recipe.model_copy(update={"lora": None})).eval()
    opened = PeftModel.from_pretrained(fresh, tmp_path).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = (causal_lm_logits(n, {"input_ids": ids}) for n in (network, opened))
        without = causal_lm_logits(built(recipe.model_copy(update={"lora": None})).eval(), {"input_ids": ids})
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (ours - without).abs().max() > 1e-2


@pytest.mark.parametrize("init", ["default", "gaussian", "orthogonal", "pissa"])
def test_the_adapted_network_begins_as_the_model(init: str) -> None:
    ids = torch.arange(40)[None]
    with torch.no_grad():
        one, two = (
            causal_lm_logits(built(r).eval(), {"input_ids": ids})
            for r in (
                recipe_of({"init": init}),
                validate_recipe(adapted({"name": MODEL}, {})).model_copy(update={"lora": None}),
            )
        )
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_adapters_are_a_function_of_the_seed() -> None:
    one, same, other = (trained(built(recipe_of({}, seed=seed))) for seed in (1, 1, 2))
    assert all(torch.equal(p, same[name]) for name, p in one.items())
    assert not all(torch.equal(p, other[name]) for name, p in one.items())
    assert all(p.dtype == torch.float32 for p in one.values())


def test_gradient_checkpointing_changes_no_gradient() -> None:
    ids = torch.arange(40)[None]
    found = []
    for checkpointed in (False, True):
        network = built(
            recipe_of({"dropout": 0.3, "dora": True}, {"name": MODEL, "gradient_checkpointing": checkpointed})
        )
        torch.manual_seed(3)
        causal_lm_logits(network, {"input_ids": ids}).square().sum().backward()
        found.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() == trained(network).keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])
    assert any(gradient.abs().max() > 0 for gradient in found[0].values())


def test_lengths_and_embeddings_are_not_decayed() -> None:
    network = built(recipe_of({"dora": True, "save_modules": ["embed_tokens", "lm_head", "norm"]}, base()["model"]))
    decayed, plain = parameter_groups(ForwardWrapper(network), OptimSection(weight_decay=0.1))
    names = {id(p): name for name, p in trained(network).items()}
    ends = [
        {names[id(p)].split(".")[-4] for p in group["params"] if "modules_to_save" in names[id(p)]}
        for group in (decayed, plain)
    ]
    assert ends == [{"lm_head"}, {"embed_tokens", "norm"}]
    assert not any("magnitude" in names[id(p)] for p in decayed["params"])
    assert any("magnitude" in names[id(p)] for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


@pytest.mark.parametrize("lora", [{"rank": 3}, {"rank": 2, "dora": True}, {"rank": 2, "save_modules": ["lm_head"]}])
def test_dry_run_counts(lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(lora, {"config": {**base()["model"]["config"], "vocab_size": 512}})
    network = built(recipe)
    base_parameters = sum(p.numel() for p in built(recipe.model_copy(update={"lora": None})).parameters())
    # Attention's four matrices and the MLP's three, in two layers: in, out.
    sides = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    expected = 2 * sum(lora["rank"] * (i + o) + (o if lora.get("dora") else 0) for i, o in sides)
    expected += 512 * 64 if "save_modules" in lora else 0
    assert sum(p.numel() for p in trained(network).values()) == expected
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)
    text = dry_run.describe(recipe)
    assert f"LlamaForCausalLM, {base_parameters + expected:,} parameters, {expected:,} trained" in text
    assert f"{'DoRA' if lora.get('dora') else 'LoRA'} of rank {lora['rank']} on 14 modules" in text
    assert ("trained whole: lm_head" in text) == ("save_modules" in lora)


@pytest.mark.parametrize(
    ("width", "inner", "layers", "expected"), [(4096, 11008, 32, 4_194_304), (5120, 13824, 40, 6_553_600)]
)
def test_parameters_of_llama_2(width: int, inner: int, layers: int, expected: int) -> None:
    """Rank 8 on `q_proj` and `v_proj` of the 7B and 13B configurations."""
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 32_000}
    config = {"model_type": "llama", **shape, "num_attention_heads": width // 128}
    recipe = recipe_of({"rank": 8, "targets": ["q_proj", "v_proj"]}, {"config": config})
    network = build_meta_model(resolve_model_config(recipe), NEXT_TOKEN, recipe)
    assert sum(p.numel() for p in trained(network).values()) == expected
    assert all(p.is_meta for p in network.parameters())


def test_a_classifiers_head_is_trained_whole() -> None:
    recipe = validate_recipe(ADAPTERS["bert"])
    config = resolve_model_config(recipe, HEAD, vocab_size=512, num_labels=7)
    names = trained(build_model(recipe, config, HEAD))
    assert "base_model.model.classifier.modules_to_save.default.weight" in names
    assert all("lora_" in name or ".classifier." in name for name in names)
    assert any(".pooler.dense.lora_A" in name for name in names)


# ---------------------------------------------------------------- tasks of one's own


def own() -> Task:
    """A custom task around a network of transformers, for recipes that name it as `test_lora:own`."""
    return Task(
        build_data=lambda recipe, quiet: TaskData(train=None),
        build_model=lambda recipe, data: AutoModelForCausalLM.from_pretrained(MODEL),
        loss_sum=lambda network, batch: torch.zeros(()),
        build_skeleton=lambda recipe, data: build_meta_model(AutoConfig.from_pretrained(MODEL), NEXT_TOKEN, Recipe()),
    )


def test_a_task_of_ones_own_gets_adapters_too() -> None:
    recipe = validate_recipe({"task": {"name": "test_lora:own"}, "lora": {"rank": 2}, "length": {"steps": 1}})
    task = find_task(recipe)
    names = trained(task.build_model(recipe, TaskData(train=None)))
    assert names
    assert all("lora_" in name for name in names)
    assert task.build_skeleton is not None
    assert trained(task.build_skeleton(recipe, None)).keys() == names.keys()


@pytest.mark.parametrize("meta", [True, False])
def test_adapters_need_a_transformers_network(meta: bool) -> None:
    task = {"name": "own_task:mlp", "args": {"meta": meta}}
    recipe = validate_recipe({"task": task, "lora": {}, "length": {"steps": 1}})
    with pytest.raises(RecipeError, match=r"task 'own_task:mlp' builds a Sequential\. Remove the section"):
        find_task(recipe).build_model(recipe, TaskData(train=None))
    with pytest.raises(RecipeError, match=r"builds a Sequential"):
        dry_run.describe(recipe)


# ---------------------------------------------------------------- what is refused, and how


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"rank": 0}, "lora.rank: input should be greater than 0, got 0"),
        ({"rank": 2.5}, "lora.rank: input should be a valid integer"),
        ({"alpha": 0}, "lora.alpha: input should be greater than 0"),
        ({"dropout": 1}, "lora.dropout: input should be less than 1"),
        ({"targets": "(q_proj"}, "lora.targets: the regular expression '(q_proj' does not compile: missing ), "),
        ({"targets": []}, "lora.targets: name at least one module, or `all-linear`"),
        ({"targets": ""}, "lora.targets: name at least one module"),
        ({"targets": 3}, "lora.targets"),
        ({"init": "pisa"}, "lora.init: input should be 'default', 'gaussian', 'orthogonal' or 'pissa', got \"pisa\""),
        ({"init": "orthogonal", "rank": 3}, "lora: `orthogonal` needs an even `rank`, got 3"),
        ({"rnk": 3}, "lora.rnk: unknown key, did you mean 'rank'?"),
    ],
)
def test_refused_by_the_recipe(lora: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_of(lora)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (
            {"targets": ["q_proj", "vproj"]},
            "lora.targets: 'vproj' is no linear module of LlamaForCausalLM, did you mean 'v_proj'? Its linear modules "
            "are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj.",
        ),
        ({"targets": ["zzz"]}, "'zzz' is no linear module of LlamaForCausalLM. Its linear modules are"),
        ({"targets": ["embed_tokens"]}, "'embed_tokens' is no linear module"),
        (
            {"targets": "q_proj"},
            "the regular expression 'q_proj' matches none of the 15 linear modules of LlamaForCausalLM, did you mean "
            "'[q_proj]'? It is compared with whole names, such as model.layers.0.self_attn.q_proj and",
        ),
        ({"targets": "all_linear"}, "did you mean 'all-linear'?"),
        ({"targets": r"model\.layers\.9\..*"}, "matches none of the 15 linear modules of LlamaForCausalLM. It is"),
        ({"targets": ["lm_head"]}, "lora.targets: lm_head and the input embedding of this LlamaForCausalLM are one"),
        (
            {"save_modules": ["lm_haed"]},
            "lora.save_modules: 'lm_haed' is no module of LlamaForCausalLM, did you mean 'lm_head'? Its modules are ",
        ),
        (
            {"save_modules": ["lm_head"]},
            "lora.save_modules: model.embed_tokens and lm_head of this LlamaForCausalLM are one weight "
            "(tie_word_embeddings), which a copy of one of them would part. Leave them out",
        ),
        ({"save_modules": ["model"]}, "lora.save_modules: model.embed_tokens and lm_head of this LlamaForCausalLM are"),
        (
            {"targets": ["q_proj"], "save_modules": ["self_attn"]},
            "lora.targets: every linear module that is meant is trained whole already (model.layers.0.self_attn",
        ),
        (
            {"init": "pissa", "rank": 33},
            "lora.rank is 33, but `pissa` takes singular vectors, of which the smallest of the modules has 32.",
        ),
    ],
)
def test_refused_by_the_network(lora: dict[str, Any], says: str) -> None:
    """By the run and by the dry run, in one line."""
    recipe = recipe_of(lora)
    with pytest.raises(RecipeError) as caught:
        built(recipe)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match=re.escape(str(caught.value))):
        dry_run.describe(recipe)


class Lookup(PreTrainedModel):
    """A network of transformers without linear modules."""

    config_class = AutoConfig.for_model("llama").__class__

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = nn.Embedding(8, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.table


def test_a_network_without_linear_modules_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"lora: Lookup has no linear modules.*Remove the section"):
        lora_adapters.attach(Lookup(AutoConfig.for_model("llama")), recipe_of({}))


@pytest.mark.xdist_group("lora_ranks")
def test_two_ranks_say_it_once(place: Place) -> None:
    ranks = start(place, place.recipe(lora={"targets": ["vproj"]}), config="zero3")
    assert_refused(ranks, "lora.targets: 'vproj' is no linear module", "did you mean 'v_proj'?")
