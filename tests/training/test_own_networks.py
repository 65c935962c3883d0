"""Networks and losses that people bring: what can be trained is, and what cannot is refused by its name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_networks
import pytest
import torch
from forkserver import ForkServer
from harness import ROOT, Launcher, assert_same_path
from ranks import Here, Place, start
from recipes_for_tests import SGD, base, own_network
from torch import nn

from finetune.config.recipe import validate_recipe
from finetune.models.build_network import settle_parameters
from finetune.tasks import Evaluation, Term
from finetune.tasks.task_lookup import find_task
from finetune.training.api import train
from finetune.training.dry_run import describe
from finetune.utils.errors import RecipeError


def job(folder: Path, **arguments: str) -> dict[str, Any]:
    task = {"name": "own_networks:classifier", "args": arguments}
    return base(task=task, data={}, length={"steps": 1}, output={"dir": str(folder / "run")})


# ---------------------------------------------------------------- parameters


def test_parameters_become_what_every_backend_can_hold() -> None:
    network = own_networks.Odd()
    names, turned = network.state_dict().keys(), network.turned.detach().clone()
    assert not network.turned.is_contiguous()
    assert settle_parameters(network) is network
    assert network.state_dict().keys() == names
    assert all(p.is_contiguous() and p.numel() for p in network.parameters())
    assert {"empty", "no_inputs"} == {name for name, _ in network.named_buffers()}
    assert torch.equal(network.turned, turned)
    # In memory of its own: a step would else write to one number 24 times.
    assert network.expanded.untyped_storage().nbytes() == 24 * 4


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64"])
def test_a_trained_parameter_of_another_dtype_is_refused_before_data_is_read(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    tree = job(tmp_path, network="mlp", dtype=dtype)
    said = rf"'fc2.bias' is trained in torch.{dtype}. Trained parameters .* float32 .*build_model, as network.float\(\)"
    with pytest.raises(RecipeError, match=said):
        describe(validate_recipe(tree))
    made: Callable[..., Any] = own_networks.classifier

    def unread(**arguments: str) -> Any:
        return replace(made(**arguments), build_data=lambda recipe, quiet: pytest.fail("data was read"))

    monkeypatch.setattr(own_networks, "classifier", unread)
    with pytest.raises(RecipeError, match=said):
        train(tree, quiet=True)


def test_what_ranks_cannot_send_is_refused() -> None:
    network = nn.Linear(2, 2)
    network.register_buffer("table", torch.zeros(3, dtype=torch.uint16))
    with pytest.raises(
        RecipeError, match=r"'table' is in torch.uint16. .* that ranks can send each other \(not uint16"
    ):
        settle_parameters(network)


def test_a_rank_that_holds_nothing_of_a_head_takes_the_same_steps(launcher: Launcher) -> None:
    """Gradients are summed after each micro-batch, of which the second rank gets none."""
    jobs = {
        name: own_network(name, optim={**SGD, "lr": 0.05, "args": {}}, length={"steps": 3})
        for name in ("few_rows", "odd")
    }
    single, other = (
        launcher.many("single", jobs),
        launcher.many("fsdp", jobs, env={"FSDP_SYNC_EACH_BATCH": "true"}),
    )
    for name in jobs:
        assert other[name].check().facts["launch"]["sync_each_batch"] is True
        assert_same_path(single[name], other[name], 1e-4)


def test_what_cannot_be_cut_is_refused_where_all_is_sharded_anew(launcher: Launcher, tmp_path: Path) -> None:
    file, text = tmp_path / "fsdp.yaml", (ROOT / "accelerate_configs" / "fsdp.yaml").read_text()
    file.write_text(text.replace("cpu_ram_efficient_loading: false", "cpu_ram_efficient_loading: true"))
    refused = launcher.one(file, own_network("odd", length={"steps": 3}))
    assert "sets fsdp_cpu_ram_efficient_loading, by which Accelerate shards all" in refused.output
    assert "and 'scale' cannot be cut" in refused.output


def test_a_number_that_decays_without_a_gradient_is_named(fork_server: ForkServer, tmp_path: Path) -> None:
    place = Place(tmp_path, fork_server)
    recipe = place.recipe(task={"name": "own_networks:classifier", "args": {"network": "unused"}}, data={})
    ranks = start(place, recipe, config="fsdp")
    assert [rank.code for rank in ranks] == [2, 2]
    spoken = "".join(rank.stderr for rank in ranks)
    assert "take no part in the loss, and weight decay would shrink them here: unused." in spoken


# ---------------------------------------------------------------- losses

RETURNS = {
    "vector": r"a tensor of shape \(\d,\)",
    "detached": "a tensor without gradients",
    "float": "float, not a tensor",
    "pair": "tuple, not a tensor",
    "half": "a tensor in bfloat16",
    "nothing": "NoneType, not a tensor",
}


@pytest.mark.parametrize("returns", RETURNS)
def test_what_a_loss_must_return_is_said(tmp_path: Path, returns: str) -> None:
    said = rf" returned {RETURNS[returns]}.* summed over the batch's targets, a float32 tensor of shape \(\)"
    with pytest.raises(RecipeError, match=rf"task\.name: the task's loss_sum{said}"):
        train(job(tmp_path, returns=returns), quiet=True)
    loss = own_networks.classifier(returns=returns).loss_sum
    with pytest.raises(RecipeError, match=rf"task\.loss: 'python:loss'{said}"):
        train(job(tmp_path / "loss"), quiet=True, loss=loss)
    if returns != "detached":
        with pytest.raises(RecipeError, match=said):
            train(job(tmp_path / "evaluation", returns=returns), "length.steps=0", quiet=True)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.ones(2), "Tensor, not a pair"),
        ((torch.ones(()), None), r"a tensor of shape \(\)"),
        ((torch.ones(2).half(), None), "a tensor in float16"),
    ],
)
def test_what_an_evaluation_must_return_is_said(tmp_path: Path, returned: Any, said: str) -> None:
    made = own_networks.classifier()
    task = replace(made, evaluation=Evaluation(lambda network, batch: returned, (Term("accuracy", weight=0.0),)))
    with pytest.raises(RecipeError, match=f"the task's evaluation returned {said}.* torch.stack"):
        train(job(tmp_path), quiet=True, task=task)
    recipe = validate_recipe(job(tmp_path))
    assert find_task(recipe).evaluation is None
