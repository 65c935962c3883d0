"""Rows that are split over ranks: exchanges, parts of a batch, and ZeRO's stages beside one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forkserver import ForkServer
from harness import ROOT, Launcher, assert_same_path
from recipes_for_tests import SPLIT, base
from split_rows_worker import CASES
from torch import nn

from finetune.config.recipe import validate_recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.mesh import Group
from finetune.distributed.resolve_config import derive_accumulation
from finetune.distributed.strategies import sequence
from finetune.distributed.strategies.refusals import check_split_rows
from finetune.tasks.task_lookup import check_task_splits
from finetune.utils.errors import BackendError

ASKED = Launch(kind="ddp", num_processes=4, sequence=2)


@pytest.fixture(scope="module")
def compared(fork_server: ForkServer) -> list[dict[str, Any]]:
    return fork_server.found("tests/support/split_rows_worker.py", processes=4)


@pytest.mark.parametrize("case", list(CASES))
def test_attention_of_split_rows_is_that_of_whole_ones(compared: list[dict[str, Any]], case: str) -> None:
    for rank in compared:
        assert max(rank[case]) < 1e-5


def test_heads_that_do_not_divide_are_refused(compared: list[dict[str, Any]]) -> None:
    assert {rank["refused"] for rank in compared} == {
        "The launch file splits rows over 4 ranks (sp_size), each of which attends whole rows with a part of the 6 "
        "attention heads. Set sp_size to a number that divides them: 1, 2, 3, 6."
    }


@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_a_batch(packed: bool) -> None:
    ids = torch.arange(16).view(2, 8)
    batch = {"input_ids": ids, "targets": ids + 1}
    positions, cu_seqlens = torch.arange(8).expand(2, 8), torch.tensor([0, 8, 16], dtype=torch.int32)
    if packed:
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6]])
        cu_seqlens = torch.tensor([0, 3, 8, 9, 16], dtype=torch.int32)
        batch |= {"position_ids": positions, "cu_seqlens": cu_seqlens}
    assert sequence.split(batch, None) is batch
    for rank in range(4):
        network = nn.Sequential(nn.Linear(1, 1))
        sequence.install(network, Group(4, rank, None))
        rows = sequence.row_group(network[0])
        part, own = sequence.split(batch, rows), slice(2 * rank, 2 * rank + 2)
        assert torch.equal(part["input_ids"], ids[:, own])
        assert torch.equal(part["targets"], ids[:, own] + 1), "targets are shifted before rows are split"
        assert torch.equal(part["position_ids"], positions[:, own]), "positions are those of whole rows"
        assert torch.equal(part["cu_seqlens"], cu_seqlens.expand(4, -1))
        with sequence.whole_rows(network):
            assert sequence.split(batch, rows) is batch


def test_ranks_that_share_rows_are_one_to_the_batch() -> None:
    recipe = validate_recipe(base())
    assert derive_accumulation(recipe, ASKED.data_ranks) == 2
    assert derive_accumulation(recipe, replace(ASKED, sequence=4).data_ranks) == 4


@pytest.mark.parametrize(
    ("sections", "sequence", "says"),
    [
        ({"data": {"sequence_length": 126}}, 4, "does not divide data.sequence_length 126. Set sp_size to a divisor"),
        ({"model": {"attention": "sdpa"}}, 2, "Set model.attention to auto"),
        ({"model": {"compile": True}}, 2, "Set model.compile to false"),
        ({"model": {"activation_offload": True}}, 2, "Set model.activation_offload to false"),
        ({"precision": "bf16", "model": {"fp8": "emulated"}}, 2, "Set model.fp8 to false"),
    ],
)
def test_what_split_rows_cannot_do_is_refused(sections: dict[str, Any], sequence: int, says: str) -> None:
    recipe = validate_recipe(base(**sections))
    with pytest.raises(BackendError, match=says) as raised:
        check_split_rows(recipe, Launch(kind="ddp", num_processes=4, sequence=sequence, file="sp.yaml"))
    assert str(raised.value).startswith(f"sp.yaml splits each row over {sequence} ranks (sp_size)")


def test_offload_is_refused() -> None:
    with pytest.raises(BackendError, match="not offered with offload"):
        check_split_rows(validate_recipe(base()), replace(ASKED, kind="zero3", offload_optimizer="cpu"))


def test_other_tasks_are_refused() -> None:
    recipe = validate_recipe(base())
    other = recipe.model_copy(update={"task": recipe.task.model_copy(update={"name": "sequence_classification"})})
    with pytest.raises(BackendError, match=r"Set task\.name to causal_lm"):
        check_task_splits(other, ASKED)
    check_task_splits(recipe, ASKED)


@pytest.mark.parametrize(
    "sections", [{"data": {"packing": "padded"}}, {"task": {"name": "dpo"}, "chat": {"template": "plain"}}]
)
def test_rows_that_are_as_long_as_their_longest_divide(sections: dict[str, Any]) -> None:
    recipe = validate_recipe(base(**sections))
    check_task_splits(recipe, replace(ASKED, sequence=4))
    with pytest.raises(BackendError, match=r"grow in steps of 8 tokens\. Set sp_size to a divisor"):
        check_task_splits(recipe, replace(ASKED, sequence=3))


LAUNCHED_RUNS = {"single": {"accumulates": SPLIT["accumulates"]}}


@pytest.mark.xdist_group("split")
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_stages_split_rows_too(launcher: Launcher, tmp_path: Path, stage: str) -> None:
    launch = yaml.safe_load((ROOT / f"accelerate_configs/{stage}.yaml").read_text())
    launch["deepspeed_config"]["deepspeed_config_file"] = str(ROOT / f"ds_configs/{stage}.json")
    file = tmp_path / "launch.yaml"
    file.write_text(yaml.safe_dump({**launch, "parallelism_config": {"parallelism_config_sp_size": 2}}))
    split = launcher.one(file, SPLIT["accumulates"])
    assert_same_path(launcher.many("single", LAUNCHED_RUNS["single"])["accumulates"], split, 1e-4)
    assert (split.facts["runs"]["kind"], split.facts["runs"]["sequence"]) == (stage, 2)
