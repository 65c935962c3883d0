"""The formulas of a plan: against papers, libraries' own estimates, what autograd saves, and each other."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.distributed.strategies.prediction import Flow, ParamSpec, ParamSpecs, Share
from finetune.distributed.strategies.strategy import strategy_of
from finetune.models import quantization
from finetune.models.build_network import build_model
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.monitoring import flops
from finetune.planning import model_shapes, recommendations
from finetune.planning.activation_memory import StepSetting, predict_activations, shape_of
from finetune.planning.launch_candidates import resting_places, state_memory
from finetune.tasks.causal_lm import CAUSAL_LM

BILLION = 10**9


def one(kind: str, ranks: int, elements: int, itemsize: int = 4) -> tuple[Launch, ParamSpecs]:
    """A network of a single weight, whose shape every backend cuts evenly."""
    weight = ParamSpec((elements // 1000, 1000), itemsize, 0, "", True)
    return Launch(kind=kind, num_processes=ranks, ds_config=ds(kind)), ParamSpecs((weight,), 0, 1000)


def share_of(launch: Launch, specs: ParamSpecs, accumulation: int = 1) -> Share:
    return strategy_of(launch).predict_share(launch, specs, accumulation)


def flows(launch: Launch, specs: ParamSpecs, accumulation: int) -> list[Flow]:
    return strategy_of(launch).predict_flows(launch, specs, accumulation)


def ds(kind: str) -> dict[str, Any]:
    auto = dict.fromkeys(("reduce_bucket_size", "stage3_param_persistence_threshold"), "auto")
    return {"zero_optimization": {"stage": int(kind[-1]), **auto}} if kind.startswith("zero") else {}


def held(launch: Launch, specs: ParamSpecs, *, state_bytes: float = 8, gradient_bytes: int = 4) -> int:
    memory = state_memory(share_of(launch, specs), state_bytes)
    return memory.frozen + memory.trained + memory.gradients * gradient_bytes // 4 + memory.optimizer


@pytest.mark.parametrize(("kind", "expected"), [("ddp", 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_the_papers_figures(kind: str, expected: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 GPUs, weights and gradients in 2 bytes, 12 of Adam's.

    Without sharding the fp32 master weights are the optimiser's; DeepSpeed's are counted apart.
    """
    state_bytes = 12 if kind == "ddp" else 8
    found = held(*one(kind, 64, 7_500_000_000, itemsize=2), state_bytes=state_bytes, gradient_bytes=2)
    assert found / BILLION == pytest.approx(expected, abs=0.05)


def test_documented_examples() -> None:
    """DeepSpeed's documentation on memory (code-docs/source/memory.rst): t5-3b on 8 GPUs, t5-large on 4.

    Stage 2: 4 + 16 / N bytes a parameter, there 2 + 2 of weights and gradients, here 4 of fp32 weights. Stage 3:
    18 / N, and 4 bytes an element of the largest layer.
    """
    assert held(*one("zero2", 8, 2_851_000_000)) / 2**30 == pytest.approx(15.93, abs=0.006)
    gathered = 4 * 32_000_000
    assert (held(*one("zero3", 8, 2_851_000_000, itemsize=2)) + gathered) / 2**30 == pytest.approx(6.09, abs=0.006)
    assert (held(*one("zero3", 4, 737_670_000, itemsize=2)) + 4 * 32_900_000) / 2**20 == pytest.approx(3291, abs=1)


@pytest.mark.parametrize("kind", ["fsdp", "zero3"])
def test_shards_add_up(kind: str) -> None:
    """What is cut is held once among all ranks, but for padding."""
    weights = tuple(ParamSpec(shape, 4, i % 2, "", True) for i, shape in enumerate([(7, 3), (5,), (64, 64), (1, 9)]))
    specs, elements = ParamSpecs(weights, 0, 64), 21 + 5 + 4096 + 9
    for ranks in (1, 2, 3, 8, 64):
        launch = Launch(kind=kind, num_processes=ranks, ds_config=ds(kind))
        memory = state_memory(share_of(launch, specs), 8)
        assert elements * 8 <= memory.optimizer * ranks <= (elements + ranks * sum(w.elements for w in weights)) * 8
        # A row, or an element, is not cut.
        least = sum(math.prod(w.shape[1:]) if kind == "fsdp" else 1 for w in weights)
        assert memory.gradients >= 4 * min(least, elements)


def test_whole_gradients_while_micro_batches_add_up() -> None:
    for kind, whole in (("fsdp", True), ("zero2", False), ("zero3", False)):
        launch, specs = one(kind, 8, 1_000_000)
        one_by_one, added = (state_memory(share_of(launch, specs, times), 8).gradients for times in (1, 4))
        assert added == (4_000_000 if whole else one_by_one)


# Bytes a parameter, rank and step, with A micro-batches, of many ranks: the table of docs/launch.md. FSDP2's gradients
# are reduced after each micro-batch there; held whole, they are sent once. Full shards move half as much
# again as copies: ZeRO, section 7.
TRAFFIC = {
    "ddp": lambda a: 8,
    "fsdp": lambda a: 12 * a,
    "fsdp_grad_op": lambda a: 8 * a,
    "zero1": lambda a: 8,
    "zero2": lambda a: 4 * a + 4,
    "zero3": lambda a: 12 * a,
    "zero3_offload": lambda a: 12 * a,
}


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_traffic_is_the_ring_formulas(name: str, accumulation: int) -> None:
    for ranks in (2, 8, 1000):
        launch = launch_of_file(ROOT / "accelerate_configs" / f"{name}.yaml", ranks)
        _, specs = one("ddp", ranks, 8_000_000)
        for each in (True, False):
            asked = replace(launch, sync_each_batch=each)
            moved = sum(flow.nbytes for flow in flows(asked, specs, accumulation))
            once = 4 * (accumulation - 1) if name.startswith("fsdp") and not each else 0
            expected = (TRAFFIC[name](accumulation) - once) * 8_000_000 * (ranks - 1) / ranks
            assert moved == pytest.approx(expected, abs=4)


def test_frozen_weights_are_gathered_and_not_reduced() -> None:
    frozen, trained = ParamSpec((8000, 1000), 2, None, "", True), ParamSpec((8, 1000), 4, 0, "", True)
    specs = ParamSpecs((frozen, trained), 0, 1000)
    for name, gathered in (("ddp", False), ("fsdp", True), ("zero3", True)):
        launch = launch_of_file(ROOT / "accelerate_configs" / f"{name}.yaml", 8)
        found = {flow.what.split()[0]: flow.nbytes for flow in flows(launch, specs, 1)}
        assert found.get("all-gather", 0) == (2 * (16_000_000 + 32_000) * 7 // 8 if gathered else 0)
        assert sum(n for what, n in found.items() if what != "all-gather") <= 2 * 32_000 * 7 / 8


def test_hybrid_moves_whole_layers_within_groups_only() -> None:
    launch = launch_of_file(ROOT / "accelerate_configs" / "hsdp.yaml", 16, 2)
    inside, reduced, between = flows(launch, one("ddp", 16, 8_000_000)[1], 1)
    assert (inside.ranks, reduced.ranks, between.ranks, between.apart) == (8, 8, 2, 8)
    assert inside.nbytes == 2 * 32_000_000 * 7 // 8
    assert between.nbytes == 32_000_000 // 8  # 2 x 1/2 of a shard


# What autograd saves ----------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
ROWS, TOKENS = 2, 64


def recipe(layers: int, half: bool, lora: bool, model: dict[str, Any] | None = None, **config: Any) -> Recipe:
    return validate_recipe(
        {
            "model": {"config": {**LLAMA, "num_hidden_layers": layers, **config}, **(model or {})},
            **({"lora": {"rank": 4}} if lora else {}),
            "tokenizer": {"vocab_size": 512},
            "data": {"train": [{"sample": 3}], "sequence_length": TOKENS, "packing": "wrapped"},
            "batch": {"global_size": ROWS, "micro_size": ROWS},
            "length": {"steps": 1},
            "precision": "bf16" if half else "fp32",
        }
    )


def saved(wanted: Recipe) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward pass: of activations, and of copies of weights."""
    half = wanted.precision == "bf16"
    network = build_model(wanted, resolve_model_config(wanted, vocab_size=512), NEXT_TOKEN)
    quantization.compute_in(network, torch.bfloat16 if half else torch.float32)
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}
    shapes = {tuple(sorted(p.shape)) for p in network.parameters() if p.ndim == 2}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor
        return tensor

    ids = torch.randint(3, 500, (ROWS, TOKENS))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        loss = CAUSAL_LM.loss_sum(network, {"input_ids": ids, "targets": ids})
    assert loss.requires_grad
    sizes = {tuple(sorted(t.shape)): 0 for t in kept.values()}
    for tensor in kept.values():
        sizes[tuple(sorted(tensor.shape))] += tensor.untyped_storage().nbytes()
    copies = sum(size for shape, size in sizes.items() if shape in shapes)
    return sum(sizes.values()) - copies, copies


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("lora", "model", "config"),
    [
        (False, {}, {}),
        (True, {}, {}),
        (True, {"quantization": "nf4"}, {}),
        (True, {"quantization": "int8"}, {}),
        (False, {"attention": "eager"}, {}),
        (False, {"gradient_checkpointing": True}, {}),
        (False, {}, {"model_type": "qwen3", "head_dim": 16}),
    ],
    ids=["full", "lora", "nf4", "int8", "eager", "checkpointed", "qwen3"],
)
def test_layers_keep_what_the_formula_says(half: bool, lora: bool, model: dict, config: dict) -> None:
    """Within a few percent a layer: left out are products of rank 4, and a number a token."""
    few, many = recipe(1, half, lora, model, **config), recipe(3, half, lora, model, **config)
    measured = (saved(many)[0] - saved(few)[0]) / 2
    variant = model_shapes.read_variants(many)[model_shapes.kind_of(many)]
    checkpointed = many.model.gradient_checkpointing
    found = predict_activations(variant, StepSetting(ROWS, checkpointed is True))
    predicted = 4 * ROWS * TOKENS * LLAMA["hidden_size"] if checkpointed else found.layer
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_autocast_copies_what_is_counted(lora: bool) -> None:
    """A layer; of the first one, whose inputs need no gradient if the embedding is frozen, less."""
    counted, measured = [], []
    for layers in (1, 3):
        wanted = recipe(layers, True, lora)
        weights = model_shapes.read_variants(wanted)[model_shapes.kind_of(wanted)].specs.params
        counted.append(sum(2 * w.elements for w in weights if w.multiplied and w.itemsize == 4))
        measured.append(saved(wanted)[1])
    assert counted[1] - counted[0] == measured[1] - measured[0]
    assert counted[0] >= measured[0]


DEEPSEEK = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("lora", "config"),
    [
        (False, {}),
        (True, {}),
        (False, {"model_type": "qwen3", "head_dim": 48}),
        (False, {"model_type": "mixtral", **MIXTURE}),
        (False, {"model_type": "deepseek_v3", "n_routed_experts": 8, "first_k_dense_replace": 0, **DEEPSEEK}),
    ],
    ids=["full", "lora", "wide-heads", "mixture", "latent"],
)
def test_arithmetic_is_that_of_a_counted_step(lora: bool, config: dict[str, Any]) -> None:
    """Against torch's own counter, over a forward and a backward pass, and over a forward pass alone.

    Attention is written out, since torch does not count the kernel that CPUs have, and the loss is of all logits,
    since a head in chunks computes its gradients in the forward pass. The first layer's inputs need no gradient.
    """
    wanted = recipe(4, False, lora, {"attention": "eager", "loss": "plain"}, **config)
    network = build_model(wanted, resolve_model_config(wanted, vocab_size=512), NEXT_TOKEN)
    ids = torch.randint(3, 500, (ROWS, TOKENS))
    # Torch does not count the products of stacked experts either.
    network.set_experts_implementation("eager")
    kind = model_shapes.kind_of(wanted)
    variant = model_shapes.read_variants(wanted, kinds=(kind,))[kind]
    with FlopCounterMode(display=False) as forward:
        loss = CAUSAL_LM.loss_sum(network, {"input_ids": ids, "targets": ids})
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    tokens = ROWS * TOKENS
    assert variant.forward_flops == pytest.approx(forward.get_total_flops() / tokens, rel=0.02)
    total = forward.get_total_flops() + backward.get_total_flops()
    assert variant.flops_per_token == pytest.approx(total / tokens, rel=0.05)
    assert variant.flops_per_token == flops.flops_per_target(network, TOKENS)


# The first has no defaults, the others several texts' configurations.
WITHOUT_A_SIZE = {"gemma4_assistant", "musicgen", "musicgen_melody"}


@pytest.mark.parametrize("model_type", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - WITHOUT_A_SIZE))
def test_every_configuration_has_sizes(model_type: str) -> None:
    """Some say a size for each layer: Gemma 3n the width of its MLPs, Gemma 4 that of its heads."""
    config = AutoConfig.for_model(model_type)
    variant: Any = SimpleNamespace(config=config, names=(), parts=1, division="")
    shape = shape_of(variant)
    if shape is not None:
        assert min(shape.h, shape.f, shape.a, shape.k, shape.d, shape.layers) > 0
    assert flops.attention_width(config.get_text_config()) >= 0


def test_offload_leaves_the_device() -> None:
    for name, place in (("zero3_offload", "host"), ("zero3_nvme", "disk"), ("fsdp_offload", "host"), ("ddp", "device")):
        launch = launch_of_file(ROOT / "accelerate_configs" / f"{name}.yaml", 8)
        share = share_of(launch, one("ddp", 8, 8_000_000)[1])
        memory = state_memory(share, 8)
        found = resting_places(launch, share, memory)
        assert (
            found[place] == sum(found.values()) == memory.frozen + memory.trained + memory.gradients + memory.optimizer
        )


def test_every_shipped_launch_file_has_its_place_and_reason() -> None:
    found = {}
    for file in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        launch = launch_of_file(file, 1 if file.stem == "single" else 16)
        found[file.stem] = (recommendations.plain_name(launch), recommendations.reason_for(launch))
    assert all(name.removesuffix("_2nodes") == plain for name, (plain, _) in found.items())
    assert "a custom launch file" not in {reason for _, reason in found.values()}
