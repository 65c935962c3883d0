"""Sizes of which there is no network are refused in one paragraph, before data is read or anything is built."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import run_here
from testdata import MODEL

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.link_speeds import LinkSpeeds
from finetune.monitoring.out_of_memory import explain_out_of_memory
from finetune.planning.planner import machines_of, make_plan
from finetune.tasks.task_lookup import BUILT_IN
from finetune.training import load_network
from finetune.training.dry_run import describe
from finetune.utils.errors import MemoryFullError, RecipeError

SMALL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
GPT2 = {"model_type": "gpt2", "hidden_size": None, "intermediate_size": None, "num_attention_heads": None}
ASKED = {"gpu": "h100-80gb", "gpus": 8, "nodes": 1, "network": 50.0, "mfu": 0.4, "price": None, "host": None}


def tree_of(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose data is not there: to read it would be another error."""
    return {
        "model": model,
        "tokenizer": MODEL,
        "data": {"train": [{"path": str(folder / "absent.jsonl")}], "sequence_length": 32},
        "length": {"steps": 1},
        "batch": {"global_size": 2, "micro_size": 2},
        "output": {"dir": str(folder / "run")},
    }


def checked(tree: dict[str, Any]) -> Recipe:
    return validate_recipe(tree, None, BUILT_IN)


VERBS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "train": run_here,
    "dry run": lambda tree: describe(checked(tree)),
    "plan": lambda tree: make_plan(checked(tree), machines_of(argparse.Namespace(**ASKED), LinkSpeeds())),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, .* 1 to 10,000"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": "64"}, "'hidden_size' expected int, got str"),
        ({"intermediate_size": 10**18}, "intermediate_size is 1000000000000000000"),
        ({"num_attention_heads": 0}, "refuses these sizes"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"hidden_act": "gelux"}, "does not know 'gelux'"),
        ({**GPT2, "n_head": 0}, "n_head is 0"),
        ({"model_type": "mixtral", "num_key_value_heads": 1, "num_local_experts": 10**9}, "num_local_experts is"),
    ],
)
def test_sizes_of_no_network_are_named_at_once(tmp_path: Path, verb: str, sizes: dict[str, Any], says: str) -> None:
    config = {key: value for key, value in {**SMALL, **sizes}.items() if value is not None}
    with pytest.raises(RecipeError, match=f"^model(.config)?: .*{says}"):
        VERBS[verb](tree_of(tmp_path, {"config": config}))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", "64"), ("num_hidden_layers", 10**9), ("hidden_act", "gelux")]
)
def test_sizes_of_a_base_are_not_the_tokenizers_fault(tmp_path: Path, verb: str, key: str, value: Any) -> None:
    shutil.copytree(MODEL, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(RecipeError, match=r"^model|config\.json") as caught:
        VERBS[verb](tree_of(tmp_path, {"name": str(tmp_path / "base")}))
    assert "gelux" in str(caught.value) or key in str(caught.value)
    assert "tokenizer" not in str(caught.value)


def test_a_network_that_does_not_fit_does_not_accuse_the_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(load_network, "init_weights", full)
    tree = tree_of(tmp_path, {"config": {**SMALL, "num_hidden_layers": 1}})
    tree["data"]["train"] = [{"sample": 20}]
    with pytest.raises(MemoryFullError, match="network itself does not fit") as caught:
        run_here(tree)
    assert "micro_size" not in str(caught.value)
    assert "micro_size" in str(explain_out_of_memory(torch.OutOfMemoryError("out of memory")))
