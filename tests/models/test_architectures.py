"""Architectures of every kind go through the same lines on every backend, and what is written opens elsewhere."""

import numpy as np
import pytest
import torch
from harness import Launcher, assert_same_path
from recipes_for_tests import ARCHITECTURES
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.config.recipe import validate_recipe
from finetune.models.build_network import build_model, init_weights
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.tasks.causal_lm import CAUSAL_LM, causal_lm_logits
from finetune.utils import errors

BACKENDS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("ddp", "fsdp", "zero2", "zero3")]
LAUNCHED_RUNS = dict.fromkeys(("single", "ddp", "fsdp", "zero2", "zero3"), ARCHITECTURES)
DECODERS = ["llama_tied", "gpt2", "qwen3", "gemma3", "mixtral"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_same_path_on_every_backend(launcher: Launcher, backend: str, name: str) -> None:
    single = launcher.many("single", ARCHITECTURES)[name]
    other = launcher.many(backend, ARCHITECTURES)[name]
    assert_same_path(single, other, 1e-4)
    assert single.validation() == pytest.approx(other.validation(), rel=1e-4)


@pytest.mark.xdist_group("zero3")
@pytest.mark.parametrize("name", DECODERS)
def test_saved_model_opens_elsewhere_with_the_same_loss(launcher: Launcher, name: str) -> None:
    """Written under ZeRO-3 on two processes; plain transformers sees what the run saw."""
    run = launcher.many("zero3", ARCHITECTURES)[name].check()
    path = run.directory / "model"
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.encode("Once upon a time", add_special_tokens=False)
    recipe = validate_recipe({**ARCHITECTURES[name], "output": {"dir": str(run.directory)}})
    recipe = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"cache_dir": str(launcher.shared / "cache")})}
    )
    rows = CAUSAL_LM.build_data(recipe, True).validation
    assert rows is not None
    network.eval()
    with torch.no_grad():
        total = sum(CAUSAL_LM.loss_sum(network, rows.batch(np.array([row]))).item() for row in range(len(rows)))
    assert total / run.validation("validation_targets") == pytest.approx(run.validation(), rel=1e-5)


@pytest.mark.parametrize("name", [*DECODERS, "llama_checkpointed"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    """Perturbs one document of a packed row: the others' scores and gradients stay as they are."""
    job = ARCHITECTURES[name]
    recipe = validate_recipe(job)
    network = build_model(recipe, resolve_model_config(recipe, vocab_size=512), NEXT_TOKEN)
    network.eval()
    lengths = (13, 21, 30)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ids = torch.randint(0, 512, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 13:34] = (changed[:, 13:34] + 5) % 512
    with torch.no_grad():
        one, two = (
            causal_lm_logits(network, {"input_ids": x, "position_ids": positions, "cu_seqlens": cu_seqlens})
            for x in (ids, changed)
        )
        alone = causal_lm_logits(network, {"input_ids": ids[:, 34:], "position_ids": torch.arange(30)[None]})
    torch.testing.assert_close(one[:, :13], two[:, :13])
    torch.testing.assert_close(one[:, 34:], two[:, 34:])
    assert (one[:, 13:34] - two[:, 13:34]).abs().max() > 1e-3
    # And packed is as good as alone.
    torch.testing.assert_close(one[:, 34:], alone, rtol=1e-4, atol=1e-5)


def test_materialised_weights_are_a_function_of_the_seed() -> None:
    def built(seed: int) -> torch.nn.Module:
        with torch.device("meta"):
            network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        return init_weights(network, seed)

    one, same, other = built(1), built(1), built(2)
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    assert torch.equal(one[1].running_var, torch.ones(4))


def test_a_module_that_cannot_initialise_itself_is_named() -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        network = torch.nn.Sequential(torch.nn.Linear(3, 3), Scale())
    with pytest.raises(errors.RecipeError, match=r"module '1' \(Scale\) has no reset_parameters"):
        init_weights(network, 0)
