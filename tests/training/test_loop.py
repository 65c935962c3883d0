"""Units of the loop: the learning rate, parameter groups, length, randomness, and what a step costs the host."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from forkserver import ForkServer
from harness import ROOT, Launcher, environment
from hypothesis import example, given
from hypothesis import strategies as st
from recipes_for_tests import base
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import OptimSection, Recipe
from finetune.distributed.resolve_config import derive_accumulation, micro_rows
from finetune.distributed.strategies import strategy
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.monitoring.metrics import PhaseTimer
from finetune.optim import lr_schedule
from finetune.optim.optimizers import build_optimizer
from finetune.optim.parameter_groups import parameter_groups
from finetune.training.built_run import Length, measure_length
from finetune.training.loop import seed_torch
from finetune.utils.errors import DataError, RecipeError


def recipe(**sections) -> Recipe:
    return validate_recipe({"task": {"name": "own_task:mlp"}, "length": {"steps": 10}, "precision": "fp32", **sections})


def rates(steps: int = 100, **schedule) -> list[float]:
    r = recipe(schedule=schedule, optim={"lr": 1.0})
    return [lr_schedule.lr_at(step, steps, r) for step in range(steps)]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    lr = rates(name="constant", warmup_steps=10)
    assert lr[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert set(lr[10:]) == {1.0}
    assert rates(name="constant", warmup_fraction=0.1) == lr


def test_cosine_ends_near_its_floor_and_is_half_way_in_the_middle() -> None:
    lr = rates(99, name="cosine", warmup_steps=0, floor=0.1)
    assert lr[49] == pytest.approx(0.55)
    # 99 hundredths of the way.
    assert lr[-1] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.99)))
    assert lr == sorted(lr, reverse=True)


def test_wsd_is_stable_and_then_decays() -> None:
    lr = rates(name="wsd", warmup_steps=10, decay_fraction=0.2, floor=0.0)
    assert set(lr[10:80]) == {1.0}
    assert lr[80] < 1.0
    assert lr[-1] == pytest.approx(1 / 21)


@given(
    name=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    floor=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_rates_stay_between_nought_and_the_peak(name: str, steps: int, warmup: int, floor: float, decay: float) -> None:
    lr = rates(steps, name=name, warmup_steps=warmup, floor=floor, decay_fraction=decay)
    assert all(0.0 <= value <= 1.0 + 1e-12 for value in lr)


def test_scaling_rules() -> None:
    linear = recipe(optim={"lr": 1e-3, "lr_scaling": "linear", "reference_batch": 8}, batch={"global_size": 32})
    root = recipe(optim={"lr": 1e-3, "lr_scaling": "sqrt", "reference_batch": 8}, batch={"global_size": 32})
    assert lr_schedule.peak_lr(linear) == pytest.approx(4e-3)
    assert lr_schedule.peak_lr(root) == pytest.approx(2e-3)


def test_norms_biases_and_embeddings_are_not_decayed() -> None:
    for model_type in ("gpt2", "llama", "bert"):
        config = AutoConfig.for_model(
            model_type, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
        )
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
        groups = parameter_groups(ForwardWrapper(network), OptimSection(weight_decay=0.1))
        names = {id(p): name for name, p in network.named_parameters()}
        decayed = {names[id(p)] for p in groups[0]["params"]}
        plain = {names[id(p)] for p in groups[1]["params"]}
        assert groups[0]["weight_decay"] == 0.1
        assert groups[1]["weight_decay"] == 0.0
        assert decayed | plain == set(names.values())
        assert not decayed & plain
        assert all("norm" not in n.lower() and "ln_" not in n and not n.endswith("bias") for n in decayed)
        assert all("embed" not in n and "wte" not in n and "wpe" not in n for n in decayed)
        assert any("attn" in n or "attention" in n for n in decayed)
        (alone,) = parameter_groups(ForwardWrapper(network), OptimSection(weight_decay=0.0))
        assert {id(p) for p in alone["params"]} == set(names)
        assert alone["weight_decay"] == 0.0


def test_adamw_runs_fused_and_other_optimisers_take_their_arguments() -> None:
    network = nn.Linear(4, 4)
    assert build_optimizer(network, recipe()).defaults["fused"]
    sgd = build_optimizer(network, recipe(optim={"name": "SGD", "args": {"momentum": 0.9}}))
    assert sgd.defaults["momentum"] == 0.9
    assert isinstance(build_optimizer(network, recipe(optim={"name": "torch.optim:Adagrad"})), torch.optim.Adagrad)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"args": {"betaz": 1}}, "AdamW refuses its arguments"),
        ({"name": "json:dumps"}, "'json:dumps' is no optimiser"),
        ({"name": "nowhere:Thing"}, "cannot import 'nowhere:Thing'"),
    ],
)
def test_optimisers_that_cannot_be(section: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_optimizer(nn.Linear(2, 2), recipe(optim=section))


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(RecipeError, match="no trainable parameters"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), recipe())


def length_of(asked: Recipe, num_rows: int) -> Length:
    return measure_length(asked.length, asked.batch.global_size, asked.data, num_rows)


def test_length_in_steps_epochs_and_tokens() -> None:
    def measure(length: dict, **data) -> Length:
        return length_of(recipe(length=length, batch={"global_size": 16, "micro_size": 4}, data=data), 100)

    assert measure({"steps": 7}).num_steps == 7
    assert measure({"epochs": 2}).num_steps == 12  # 200 rows, the last 8 of which fill no batch
    assert measure({"epochs": 2}, last_batch="drop").num_steps == 12  # 2 x 96 rows
    assert measure({"epochs": 2}, last_batch="drop").left_out == 4
    assert measure({"epochs": 25}).num_steps == 156  # carried rows add up to whole batches
    assert measure({"epochs": 25}, last_batch="drop").num_steps == 150
    assert measure({"tokens": 1000}, sequence_length=10).num_steps == 7
    with pytest.raises(RecipeError, match="less than one step"):
        measure({"epochs": 0.1})
    batch = {"global_size": 128, "micro_size": 4}
    with pytest.raises(
        DataError, match=r"fewer than one global batch of 128.* 100, lower data.sequence_length, or add"
    ):
        length_of(recipe(batch=batch), 100)
    with pytest.raises(DataError, match=r"fewer than one global batch of 128.* to at most 100, or add data"):
        length_of(recipe(batch=batch, data={"packing": "padded"}), 100)


@given(hundredths=st.integers(1, 1000), rows=st.integers(1, 400), size=st.integers(1, 8))
@example(hundredths=29, rows=100, size=1)
def test_epochs_are_decimals(hundredths: int, rows: int, size: int) -> None:
    steps, rows = hundredths * rows * size // (100 * size), rows * size
    length = recipe(length={"epochs": float(f"{hundredths}e-2")}, batch={"global_size": size, "micro_size": size})
    if steps:
        assert length_of(length, rows).num_steps == steps
    else:
        with pytest.raises(RecipeError, match="less than one step"):
            length_of(length, rows)


def test_shares_of_the_steps_are_decimals() -> None:
    """57.5 steps are rounded to 58; in binary, 0.575 x 100 is 57.49999999999999."""
    lr = rates(name="constant", warmup_fraction=0.575)
    assert lr == rates(name="constant", warmup_steps=58)
    lr = rates(name="wsd", warmup_steps=0, decay_fraction=0.575)
    assert [value < 1.0 for value in lr] == [False] * 42 + [True] * 58


@given(world=st.integers(1, 9), micro=st.integers(1, 9), share=st.integers(1, 40))
def test_the_largest_micro_batch_that_divides_is_taken(world: int, micro: int, share: int) -> None:
    def sized(global_size: int) -> Recipe:
        return recipe(batch={"global_size": global_size, "micro_size": micro})

    rows = micro_rows(sized(world * share), world)
    assert rows <= micro
    assert not any(share % larger == 0 for larger in range(rows + 1, micro + 1))
    assert derive_accumulation(sized(world * share), world) * rows == share
    if world > 1:
        near = ", ".join(str(number) for number in (world * (share - 1), world * share) if number)
        with pytest.raises(RecipeError, match=f"of the {world} processes that share it. Set it to .*{near}"):
            derive_accumulation(sized(world * share - 1), world)


def test_the_norm_of_large_gradients_is_exact() -> None:
    """torch's own, of the whole, is 3e-4 too small here; of halves, as two ranks have them, by another share."""
    large = torch.randn(30_000, 300, generator=torch.Generator().manual_seed(0))
    gradients = [large, torch.full((7,), 0.1), torch.tensor(2.0)]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert strategy._total_square(gradients, large.device).item() == pytest.approx(exact, rel=2e-7)
    assert strategy._total_square([], large.device).item() == 0.0


def test_seeds_have_no_history() -> None:
    seed_torch(1, 2, 3)
    first = torch.rand(3)
    torch.rand(100)
    seed_torch(1, 2, 3)
    assert torch.equal(first, torch.rand(3))
    seed_torch(1, 2, 4)
    assert not torch.equal(first, torch.rand(3))
    # Pinned, so that a new version of a library cannot change old runs without being seen.
    assert np.random.SeedSequence((1, 2, 3)).generate_state(1, np.uint64)[0] == 12997252459554536576


def test_stopwatch_gives_each_part_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    watch = PhaseTimer(torch.device("cpu"))
    for name in ("data", "compute", "data", "aside", "other"):
        watch.mark(name)
    assert watch.totals() == {"data": 1.0 + 4.0, "compute": 2.0, "aside": 3.0}
    watch.mark("data")
    # What was last goes on until the next mark, over the reading.
    assert watch.totals() == {"other": 10.0}


@pytest.mark.parametrize(
    ("config", "sent"),
    [
        ("single", {}),
        # What ranks tell each other, once a step.
        ("ddp", {"allreduce_": 1}),
        # And weights as they are needed, and the gradient's norm.
        pytest.param("fsdp", None, id="fsdp"),
        pytest.param("zero3", None, id="zero3"),
    ],
)
def test_what_a_step_asks_of_host_and_ranks(
    fork_server: ForkServer, tmp_path, config: str, sent: dict[str, int] | None
) -> None:
    """Of four micro-batches: no read of the device, and outside the backward passes no collective of a micro-batch."""
    job = base(batch={"global_size": 8 if config == "single" else 16, "micro_size": 2}, length={"steps": 5})
    job["output"] = {"dir": str(tmp_path / "run")}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    code, output = fork_server.launch(config, tmp_path / "job.yaml", script="tests/support/count_worker.py")
    assert code == 0, output[-3000:]
    found = json.loads((tmp_path / "run" / "counted.json").read_text())
    assert found["sees"] == [1, 0 if config == "single" else 1], "the counter must see"
    # DeepSpeed reads whether gradients overflowed.
    assert found["reads"] == 0 or config == "zero3"
    if sent is not None:
        assert found["sent"] == sent
    else:
        assert found["sent"]["allreduce_"] <= 2
    if config == "zero3":
        # So small a model stays whole from the forward pass on; the last backward pass takes the optimiser's step.
        assert found["gathers"][:3] == [0, 0, 0]


@pytest.mark.xdist_group("ddp")
def test_metrics_and_facts_of_a_run(launcher: Launcher) -> None:
    job = {
        "task": {"name": "own_task:mlp", "args": {"width": 16}},
        "batch": {"global_size": 16, "micro_size": 4},
        "length": {"epochs": 2},
        "optim": {"lr": 0.01},
        "log": {"every_steps": 5},
        "eval": {"every_steps": 10},
        "precision": "fp32",
    }
    run = launcher.one("ddp", job).check()
    # 200 points: 25 steps; the first, every fifth and the last are logged.
    assert [m["step"] for m in run.steps] == [1, 5, 10, 15, 20, 25]
    assert [m["tokens"] for m in run.steps] == [16, 80, 160, 240, 320, 400]
    last = run.steps[-1]
    assert last["epoch"] == 2.0
    for key in (
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "step_s",
        "data_s",
        "forward_backward_s",
        "optimizer_s",
    ):
        assert math.isfinite(last[key])
    assert last["data_s"] + last["forward_backward_s"] + last["optimizer_s"] <= last["step_s"]
    assert last["peak_memory_gib"] > 0
    assert last["mfu"] is None
    assert [m["step"] for m in run.metrics if "validation_loss" in m] == [10, 20, 25]
    assert [(m["step"], m["epoch"]) for m in run.metrics if "epoch_loss" in m] == [(13, 1.0), (25, 2.0)]
    facts = run.facts
    assert facts["launch"]["kind"] == "ddp"
    assert facts["versions"]["torch"]
    assert facts["results"]["validation_loss"] == run.validation()
    assert facts["length"] == {"num_steps": 25, "epoch_rows": 200, "left_out": 0}
    assert json.dumps(facts)
    assert (run.directory / "recipe.yaml").exists()
    assert set(run.weights) == {"0.weight", "0.bias", "3.weight", "3.bias", "5.weight", "5.bias"}


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPPING = """
import torch, finetune
big = torch.ones(1 << 24)
mappings = open("/proc/self/smaps").read().split("VmFlags:")
for at, flags in zip(mappings, mappings[1:]):
    for line in at.splitlines():
        first, _, last = line.split(" ")[0].partition("-")
        if last and int(first, 16) <= big.data_ptr() + big.nbytes // 2 < int(last, 16):
            print("hg" in flags.split("\\n")[0].split())
"""


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no huge pages to ask for")
def test_large_tensors_ask_for_huge_pages_unless_told_not_to() -> None:
    env = {key: value for key, value in environment().items() if key != "THP_MEM_ALLOC_ENABLE"}
    read = "import os, finetune; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    for script, extra, says in ((MAPPING, {}, "True"), (read, {"THP_MEM_ALLOC_ENABLE": "0"}, "0")):
        words = [sys.executable, "-c", script]
        done = subprocess.run(words, env=env | extra, cwd=ROOT, text=True, capture_output=True, check=True)
        assert done.stdout.split() == [says]


def test_trackers_that_are_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from finetune.distributed.resolve_config import check_trackers

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(RecipeError, match=r"log.trackers: wandb is not installed here. Install .*finetune\[wandb\]"):
        check_trackers(recipe(log={"trackers": ["wandb"]}))
