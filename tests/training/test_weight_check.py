"""After the first steps, and at the end: what is trained has moved, what is frozen has not, ranks agree."""

from typing import Any

import pytest
import torch
from harness import Launcher, Result
from recipes_for_tests import base

from finetune.distributed.weight_digests import Held, digest_weight
from finetune.training.weight_check import check_movement, compare_weights
from finetune.utils.errors import BackendError

SHORT = {"length": {"steps": 5}, "eval": {"at_end": False}, "optim": {"name": "AdamW", "lr": 1e-3, "weight_decay": 0.0}}
WHOLE = base(**SHORT)
ADAPTED = base(**SHORT, lora={"rank": 2})
# Of launch configs, the processes that hold the same weights.
BACKENDS = {"single": 1, "ddp": 2, "fsdp": 1, "zero2": 2, "zero3": 1}
LAUNCHED_RUNS: dict[str, dict[str, Any]] = {
    name: {"whole": WHOLE, "adapted": ADAPTED, "stuck+whole": WHOLE, "thawed+adapted": ADAPTED} for name in BACKENDS
}
for _name in ("ddp", "zero2"):
    LAUNCHED_RUNS[_name]["drift+whole"] = WHOLE
for _name in ("single", "fsdp"):
    LAUNCHED_RUNS[_name]["lost_steps+adapted"] = ADAPTED
LAUNCHED_RUNS["single"]["one_step"] = {**ADAPTED, "length": {"steps": 1}}


def ended(launcher: Launcher, backend: str, name: str) -> Result:
    return launcher.many(backend, {name: LAUNCHED_RUNS[backend][name]})[name]


def marked(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


@pytest.mark.parametrize("backend", marked(*BACKENDS))
def test_every_tensor_that_is_trained_moves_and_no_other(launcher: Launcher, backend: str) -> None:
    for name, frozen in (("whole", 0), ("adapted", 21)):
        run = ended(launcher, backend, name).check()
        found = run.facts["results"]["weights"]
        assert found["unmoved"] == []
        assert found["frozen"] == frozen
        assert found["ranks_agree"]
        assert found["step"] == 5
        moved = f"{found['trained']} of {found['trained']} trained tensors have moved in 3 steps"
        assert f"weights: {moved}" in run.output


@pytest.mark.parametrize("backend", marked(*BACKENDS))
def test_a_tensor_without_gradient_is_named(launcher: Launcher, backend: str) -> None:
    run = ended(launcher, backend, "stuck+whole").check()
    assert run.facts["results"]["weights"]["unmoved"] == ["model.layers.0.input_layernorm.weight"]
    assert "1 of 21 trained tensors have not moved in 3 steps: model.layers.0.input_layernorm.weight" in run.output


@pytest.mark.parametrize("backend", marked(*BACKENDS))
def test_a_frozen_tensor_that_changes_ends_the_run(launcher: Launcher, backend: str) -> None:
    run = ended(launcher, backend, "thawed+adapted")
    assert run.code == 2
    assert (
        "1 of 21 frozen tensors have changed by step 3: base_model.model.model.layers.0.self_attn.q_proj" in run.output
    )


@pytest.mark.parametrize("backend", marked("ddp", "zero2"))
def test_ranks_that_part_end_the_run(launcher: Launcher, backend: str) -> None:
    run = ended(launcher, backend, "drift+whole")
    assert run.code == 2
    assert "different values of 1 tensors that they share by step 3: model.norm.weight" in run.output


@pytest.mark.parametrize("backend", marked("single", "fsdp"))
def test_a_run_in_which_nothing_moves_is_an_error(launcher: Launcher, backend: str) -> None:
    run = ended(launcher, backend, "lost_steps+adapted")
    assert run.code == 2
    assert "None of the 28 trained tensors has moved in 5 steps: nothing is trained" in run.output


@pytest.mark.xdist_group("single")
def test_one_step_of_adapters_moves_one_factor_only(launcher: Launcher) -> None:
    run = ended(launcher, "single", "one_step").check()
    unmoved = run.facts["results"]["weights"]["unmoved"]
    assert len(unmoved) == 14
    assert all("lora_A" in name for name in unmoved)
    assert "They cannot move in the first step" in run.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int64])
def test_a_single_bit_changes_the_number_of_a_tensor(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    before = digest_weight(tensor, torch.device("cpu"))
    for bit in range(8 * tensor.element_size()):
        changed = tensor.clone()
        changed.view(torch.uint8)[1, bit // 8] ^= 1 << bit % 8
        assert digest_weight(changed, torch.device("cpu")) != before
    assert digest_weight(tensor.t(), torch.device("cpu")) == before


def test_parts_of_one_tensor_need_not_be_equal_and_copies_must() -> None:
    held = [Held("a", True, 0), Held("b", False, 0)]
    before = torch.tensor([[1, 5], [2, 5]])
    sharded = torch.tensor([[7, 0], [8, 0]])
    found = compare_weights(held, sharded, before, torch.tensor([[1, 5], [3, 5]]), 3, 3)
    assert (found.unmoved, found.changed, found.parted) == ((), (), ())
    copied = torch.zeros(2, 2, dtype=torch.int64)
    found = compare_weights(held, copied, before, torch.tensor([[1, 5], [3, 6]]), 3, 3)
    assert (found.unmoved, found.changed, found.parted) == ((), ("b",), ("a", "b"))
    with pytest.raises(BackendError, match="frozen tensors have changed"):
        check_movement(found, nothing_moves=False)
