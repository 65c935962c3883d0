"""Layers that are split over ranks: parts of tensors, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from forkserver import ForkServer
from harness import ROOT, Launcher
from recipes_for_tests import GPT2, LLAMA, PARITY, base
from split_tokens_worker import CASES
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from finetune.config.recipe import validate_recipe
from finetune.distributed.launch.launch_config import Launch, launch_of_environment
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.distributed.mesh import Group
from finetune.distributed.split_parameters import Split
from finetune.distributed.state import tensor_shards
from finetune.distributed.strategies.refusals import check_split_layers
from finetune.models import split_layers
from finetune.training import dry_run
from finetune.utils.errors import BackendError

ASKED = Launch(kind="ddp", num_processes=4, tensor=2, file="tp.yaml")


@pytest.fixture(scope="module")
def compared(fork_server: ForkServer) -> list[dict[str, Any]]:
    return fork_server.found("tests/support/split_tokens_worker.py", processes=3)


@pytest.mark.xdist_group("split")
@pytest.mark.parametrize("case", list(CASES))
def test_gradients_are_those_of_a_whole_network(compared: list[dict[str, Any]], case: str) -> None:
    """Each rank computes the loss of a part of the tokens."""
    for rank in compared:
        assert max(rank[case]) < 1e-5


SGD_RUN = PARITY["sgd"]
LAUNCHED_RUNS = {"fsdp_tp": {"sgd": SGD_RUN}, "tp": {"drift+sgd": {**SGD_RUN, "length": {"steps": 2}}}}


@pytest.mark.xdist_group("fsdp_tp")
def test_shares_are_those_of_split_layers(launcher: Launcher) -> None:
    runs = launcher.many("fsdp_tp", LAUNCHED_RUNS["fsdp_tp"])["sgd"].check().facts["runs"]
    assert runs["mesh"] == {"data": 2, "sequence": 1, "tensor": 2}
    assert {runs["shares"][f"{name}.weight"] for name in ("q_proj", "o_proj", "up_proj", "down_proj")} == {0.25}
    assert {runs["shares"][f"{name}.weight"] for name in ("embed_tokens", "lm_head", "norm")} == {0.5}


@pytest.mark.xdist_group("tp")
def test_copies_that_drift_apart_are_seen_when_they_are_saved(launcher: Launcher) -> None:
    # Before the weights of the first steps are compared.
    run = launcher.many("tp", LAUNCHED_RUNS["tp"])["drift+sgd"]
    assert run.code == 2
    assert "Ranks that share layers (tp_size) have come to hold different values" in run.output
    assert not list((run.directory / "checkpoints").glob("step-*"))


SPLITS = [
    Split((12, 5), 0),
    Split((5, 12), 1),
    Split((24, 5), 0, blocks=2),
    Split((3, 24, 5), 1, blocks=2),
    Split((12,), 0),
    Split((3, 5, 12), 2),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2, 4, 7])
def test_blocks_of_all_ranks_make_up_the_tensor(split: Split, size: int, shards: int) -> None:
    whole = torch.arange(torch.Size(split.shape).numel()).view(split.shape)
    found = torch.full_like(whole, -1)
    for rank in range(size):
        part = split.part_of(whole, size, rank)
        step = -(-part.shape[0] // shards)
        for first in range(0, shards * step, step):
            rows = (min(first, len(part)), min(first + step, len(part)))
            local = part[slice(*rows)]
            blocks = tuple(tensor_shards._blocks(split, rows, size, rank))
            assert tensor_shards.from_numbers([*tensor_shards.to_numbers(blocks), 0, 0]) == blocks
            shard = tensor_shards.Shard(split.shape, local, blocks, (), lambda: whole)
            assert torch.equal(tensor_shards.part_of(whole, shard), local)
            for block in blocks:
                assert (block.within(found) == -1).all(), "no element belongs to two ranks"
                block.within(found).copy_(block.of(local))
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    ("sections", "precision", "says"),
    [
        ({}, "fp16", "Set precision to bf16"),
        ({"model": {"compile": True}}, "fp32", r"Set model\.compile to false"),
        ({"model": {"activation_offload": True}}, "fp32", r"Set model\.activation_offload to false"),
        ({"lora": {"rank": 4, "dora": True}}, "fp32", r"Set lora\.dora to false"),
        ({"lora": {"rank": 4, "dropout": 0.1}}, "fp32", r"Set lora\.dropout to 0"),
    ],
)
def test_what_split_layers_cannot_do_is_refused(sections: dict[str, Any], precision: str, says: str) -> None:
    with pytest.raises(BackendError, match=says) as raised:
        check_split_layers(validate_recipe(base(**sections)), ASKED, precision)
    assert str(raised.value).startswith("tp.yaml splits layers over 2 ranks (tp_size)")


@pytest.mark.parametrize(
    ("sizes", "flags", "processes", "says"),
    [
        ({"TP": 2}, {}, 3, "which takes 2 processes, but 3 run"),
        ({"TP": 2, "SP": 2}, {}, 6, "rows split over 2 and layers over 2, which takes 4 processes, but 6 run"),
        ({"TP": 2, "DP_SHARD": 4}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, 4, "takes 8 processes"),
        ({"TP": 2}, {"ACCELERATE_USE_DEEPSPEED": "true"}, 2, "under DeepSpeed, which is not offered"),
        (
            {"TP": 2, "DP_REPLICATE": 2},
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            4,
            "2 copies of a sharded model beside sequence or tensor parallelism",
        ),
        ({"CP": 2}, {}, 2, "ring attention has no kernel for CPUs, and drops the masks"),
    ],
)
def test_layouts_that_do_not_come_out_are_refused(
    sizes: dict[str, int], flags: dict[str, str], processes: int, says: str
) -> None:
    env = {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
    env |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **flags}
    with pytest.raises(BackendError, match=says):
        launch_of_environment(env, processes, "some.yaml", exported=env.keys())


def test_offload_is_refused() -> None:
    with pytest.raises(BackendError, match="not offered with offload"):
        check_split_layers(validate_recipe(base()), replace(ASKED, offload_optimizer="cpu"), "fp32")


def small(**sizes: Any) -> nn.Module:
    kept = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64, **sizes}
    network: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**kept))
    return network


def test_architectures_without_a_plan_are_refused() -> None:
    network = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    with pytest.raises(BackendError, match=r"no plan by which those of GPT2LMHeadModel \(gpt2\) are split"):
        split_layers.split(network, Group(2, 0, None))
    with pytest.raises(BackendError, match="no plan by which those of Linear are split"):
        split_layers.split(nn.Linear(2, 2), Group(2, 0, None))


@pytest.mark.parametrize(
    ("sizes", "ranks", "says"),
    [
        ({"num_attention_heads": 4}, 3, r"the 4 attention heads of LlamaForCausalLM do not divide\. .*: 1, 2, 4"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, r"the 2 key-value heads .*: 1, 2"),
        ({"num_attention_heads": 4, "intermediate_size": 46}, 4, r"the 46 rows or columns of model\.layers\.0\.mlp"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], ranks: int, says: str) -> None:
    with pytest.raises(BackendError, match=says):
        split_layers.split(small(**sizes), Group(ranks, 0, None))


def test_a_dry_run_refuses_what_would_be_refused_on_every_rank() -> None:
    foreseen = predict_environment(str(ROOT / "accelerate_configs/tp.yaml"), {}, {})
    dry_run.describe(validate_recipe(base()), foreseen)
    with pytest.raises(BackendError, match=r"no plan by which those of GPT2LMHeadModel \(gpt2\) are split"):
        dry_run.describe(validate_recipe(base(model={"config": GPT2})), foreseen)
    with pytest.raises(BackendError, match="the 1 key-value heads"):
        dry_run.describe(validate_recipe(base(model={"config": {**LLAMA, "num_key_value_heads": 1}})), foreseen)


def test_every_parameter_of_a_layer_is_split_by_its_plan() -> None:
    network = small(num_attention_heads=4, num_key_value_heads=2)
    whole = {name: tuple(p.shape) for name, p in network.named_parameters()}
    splits = split_layers.split(network, Group(2, 0, None))
    halved = {name for name, p in network.named_parameters() if tuple(p.shape) != whole[name]}
    assert halved == splits.parameters.keys() == {name for name in whole if "_proj" in name}
    assert all(splits.parameters[name].shape == whole[name] for name in halved)


def test_weights_of_other_ranks_are_let_go() -> None:
    network = small(num_attention_heads=4)
    split_layers.split(network, Group(2, 0, None))
    weight: Any = network.get_submodule("model.layers.0.mlp.up_proj").weight
    assert weight.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize("name", ["tp", "fsdp_tp", "fsdp_tp_sp"])
def test_launch_files_say_what_must_divide(name: str) -> None:
    text = (ROOT / f"accelerate_configs/{name}.yaml").read_text()
    assert "key-value heads" in text
