"""What depends on the size of micro-batches is part of a run, and said to be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from inside import mlp, run_here, stop_after
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.checkpoint.run_fingerprint import depends_on_micro_size
from finetune.config.recipe import validate_recipe
from finetune.models import lora_adapters
from finetune.training import micro_batch_search
from finetune.utils.errors import RecipeError

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("resume")]


def tree(place: Path, dropout: float, **sections: Any) -> dict[str, Any]:
    made = mlp(place, checkpoint={"every_steps": 5, "keep": 9}, **sections)
    return {**made, "task": {"name": "own_task:mlp", "args": {"dropout": dropout}}}


def test_masks_differ_with_the_size_of_micro_batches(tmp_path: Path) -> None:
    """Why they are part of a run: another size is another path, with dropout and not without."""
    losses = {
        (dropout, size): run_here(
            tree(tmp_path / f"{dropout}-{size}", dropout, batch={"micro_size": size}, length={"steps": 3})
        ).losses
        for dropout in (0.0, 0.5)
        for size in (2, 4)
    }
    assert losses[0.0, 2] == pytest.approx(losses[0.0, 4], rel=1e-6)
    assert losses[0.5, 2] != pytest.approx(losses[0.5, 4], rel=1e-3)


def test_a_resume_with_another_size_is_refused_where_it_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run_here(tree(tmp_path / "straight", 0.5))
    stopped = run_here(tree(tmp_path / "run", 0.5), stop_after(12))
    assert stopped.facts["identity"]["batch.micro_size"] == 2
    other = {"batch": {"micro_size": 4}}
    says = r"batch.micro_size: 2 there, 4 here \(the network has dropout, whose masks depend on it, or batch norms\)"
    with pytest.raises(RecipeError, match=says):
        run_here(tree(tmp_path / "run", 0.5, **other))
    # What `auto` would come to on this machine does not matter any more.
    monkeypatch.setattr(micro_batch_search, "next_size", lambda *_: pytest.fail("nothing is to be tried"))
    done = run_here(tree(tmp_path / "run", 0.5, batch={"micro_size": "auto"}))
    assert "batch.micro_size: auto is 2, as this run began" in done.said
    assert done.losses == straight.losses
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)


def test_it_may_change_where_it_does_not_matter_or_is_allowed(tmp_path: Path) -> None:
    plain = run_here(tree(tmp_path / "plain", 0.0), stop_after(12))
    assert "batch.micro_size" not in plain.facts["identity"]
    other = {"batch": {"micro_size": 4}}
    assert run_here(tree(tmp_path / "plain", 0.0, **other)).steps[-1] == 20
    run_here(tree(tmp_path / "run", 0.5), stop_after(12))
    allowed = tree(tmp_path / "run", 0.5, **other, resume={"allow": ["batch.micro_size"]})
    assert run_here(allowed).steps[-1] == 20


def test_it_is_an_upper_bound(tmp_path: Path) -> None:
    """The largest that divides is taken and said, also of a network whose path it changes; a resume keeps it."""
    batch = {"batch": {"global_size": 8, "micro_size": 7}}
    straight = {
        dropout: run_here(tree(tmp_path / f"straight-{dropout}", dropout, batch={"global_size": 8, "micro_size": 4}))
        for dropout in (0.0, 0.5)
    }
    says = "batch.micro_size: 7 is 4, the largest up to it that divides the 8 rows of a process"
    for dropout, one in straight.items():
        stopped = run_here(tree(tmp_path / f"{dropout}", dropout, **batch), stop_after(12))
        assert says in stopped.said
        assert stopped.facts["micro_size"] == {"asked": 7, "rows": 4}
        assert ("with 4 rows in place of 7 this run takes another path" in stopped.said) == bool(dropout)
        done = run_here(tree(tmp_path / f"{dropout}", dropout, **batch))
        assert ("batch.micro_size: 7 is 4, as this run began" in done.said) == bool(dropout)
        assert done.losses == one.losses


def llama(**config: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=32, **sizes, **config))


def test_what_depends_on_it_is_seen() -> None:
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **small))
    assert depends_on_micro_size(gpt2)
    assert depends_on_micro_size(llama(attention_dropout=0.1))
    assert depends_on_micro_size(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert depends_on_micro_size(nn.Sequential(nn.Dropout1d(0.1)))
    assert not depends_on_micro_size(llama())
    assert not depends_on_micro_size(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.0)))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_of_adapters_is_seen(dropout: float) -> None:
    data = {"train": [{"sample": 3}]}
    recipe = validate_recipe(
        {"model": {"name": "x"}, "data": data, "lora": {"dropout": dropout}, "length": {"steps": 1}}
    )
    assert depends_on_micro_size(lora_adapters.attach(llama(), recipe)) == bool(dropout)
