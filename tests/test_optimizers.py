"""Optimisers of bitsandbytes: where they run, that they resume bit for bit, and what they keep."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROOT
from inside import mlp, run_here, stop_after
from safetensors.torch import load_file

from finetune import dryrun, optim
from finetune.errors import RecipeError
from finetune.recipe import Recipe, validate

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("resume")]

# More than 4096 elements: bitsandbytes keeps fp32 for less.
WIDE = {"task": {"name": "own_task:mlp", "args": {"width": 128}}}


def recipe_of(name: str, **args: Any) -> Recipe:
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 16, "num_attention_heads": 2}
    return validate(
        {
            "model": {"config": {**config, "intermediate_size": 32, "num_hidden_layers": 1}},
            "tokenizer": {"vocab_size": 512},
            "data": {"train": [{"sample": 10}], "sequence_length": 16},
            "length": {"steps": 1},
            "optim": {"name": name, "args": args},
        }
    )


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_a_stopped_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    def tree(place: str) -> dict[str, Any]:
        made = mlp(tmp_path / place, checkpoint={"every_steps": 5, "keep": 9})
        return {**made, **WIDE, "optim": {"name": name, "lr": 1e-3}}

    straight = run_here(tree("straight"))
    run_here(tree("stopped"), stop_after(12))
    done = run_here(tree("stopped"))
    assert done.losses == straight.losses
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)
    saved = {key: t.dtype for file in done.directory.rglob("*.safetensors") for key, t in load_file(file).items()}
    assert torch.uint8 in {dtype for key, dtype in saved.items() if key.startswith("state1/")}


@pytest.mark.parametrize(
    ("name", "args", "bytes_an_element"),
    [
        ("AdamW", {}, 8.0),
        ("SGD", {}, 0.0),
        ("SGD", {"momentum": 0.9}, 4.0),
        # Two bytes, the largest of each 256, and two tables of 256 numbers.
        ("AdamW8bit", {}, 2 + 2 * 4 / 256 + 2 * 1024 / (64 * 256)),
    ],
)
def test_state_is_measured(name: str, args: dict[str, Any], bytes_an_element: float) -> None:
    assert optim.state_bytes(recipe_of(name, **args)) == bytes_an_element


@pytest.mark.parametrize(
    ("name", "launch", "says"),
    [
        ("AdamW8bit", "fsdp", "optim.name: AdamW8bit of bitsandbytes keeps its state in blocks of whole tensors"),
        ("Lion8bit", "zero2", "optim.name: Lion8bit of bitsandbytes keeps its state in blocks of whole tensors"),
        ("AdamW8bits", None, "'AdamW8bits' is no optimiser, did you mean 'AdamW8bit'? torch.optim has ASGD, "),
        pytest.param(
            "PagedAdamW8bit",
            None,
            "PagedAdamW8bit pages its state out of a GPU's memory, and this machine has no GPU. Take AdamW8bit",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        pytest.param(
            "PagedAdEMAMix",
            None,
            "this machine has no GPU. Take AdamW8bit.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
)
def test_refused(name: str, launch: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if launch is None:
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(key, raising=False)
    else:
        from ranks import exported

        monkeypatch.chdir(ROOT)
        for key, value in exported(launch).items():
            monkeypatch.setenv(key, value)
    with pytest.raises(RecipeError, match=re.escape(says)) as caught:
        dryrun.describe(recipe_of(name))
    assert "\n" not in str(caught.value)
