"""When gradients of a step's micro-batches are summed over ranks: once a step, or after each of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from forkserver import ForkServer
from harness import ROOT, Launcher
from recipes_for_tests import PARITY, base

from finetune.config.recipe import validate_recipe
from finetune.distributed import device_selection
from finetune.distributed.gpu_specs import find_gpu
from finetune.distributed.launch import launch_config
from finetune.distributed.launch.launch_config import Launch, launch_of_environment, read_launch
from finetune.distributed.launch.predicted_environment import launch_of_file, predict_environment
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.strategies.strategy import strategy_of
from finetune.planning import model_shapes
from finetune.planning.launch_candidates import Candidate, assess_candidate, setting_of
from finetune.training import build_run
from finetune.utils.compat import torch_private
from finetune.utils.errors import BackendError

MICRO_BATCHES, RANKS = 4, 8


def job(tmp_path: Path, ranks: int) -> Path:
    """A step of four micro-batches a rank, on any number of ranks the same rows."""
    global_size = 16
    recipe = base(
        batch={"global_size": global_size, "micro_size": global_size // MICRO_BATCHES // ranks},
        length={"steps": 4},
        # A large rate, and no clipping: a wrong factor shows at once.
        optim={"name": "SGD", "lr": 0.5, "weight_decay": 0.0, "clip_norm": None, "args": {}},
        schedule={"name": "constant", "warmup_steps": 0},
        output={"dir": str(tmp_path / "run")},
    )
    file = tmp_path / f"{ranks}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


@pytest.fixture(scope="module")
def alone(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, of which there is nothing to sum."""
    return taken(fork_server, tmp_path_factory.mktemp("alone"), "single", 1)["false"]


def taken(fork_server: ForkServer, folder: Path, config: str, ranks: int, *words: str) -> dict[str, Any]:
    result = folder / "result.json"
    code, output = fork_server.launch(config, job(folder, ranks), result, *words, script="tests/support/sums_worker.py")
    assert code == 0, output[-4000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize(("config", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_both_ways_take_the_single_process_path(
    fork_server: ForkServer, alone: dict[str, Any], tmp_path: Path, config: str, ranks: int
) -> None:
    found = taken(fork_server, tmp_path, config, ranks)
    for way in found.values():
        np.testing.assert_allclose(way["loss"], alone["loss"], rtol=1e-5)
        np.testing.assert_allclose(way["norm"], alone["norm"], rtol=1e-5)
        for name, weight in alone["weights"].items():
            np.testing.assert_allclose(way["weights"][name], weight, rtol=1e-4, atol=1e-5, err_msg=name)
    once, each = found["false"], found["true"]
    assert (once["launch"], each["launch"]) == (False, True)
    # The layers, the embedding, and what is gathered with the head.
    units = once["sent"][-1][0]
    assert units >= 3
    copies = units if config == "hsdp" else 0
    assert once["sent"] == [[0, 0], [0, 0], [0, 0], [units, copies]]
    # Between copies of a hybrid shard sums cross once a step, either way.
    assert each["sent"] == [[units, 0], [units, 0], [units, 0], [units, copies]]
    elements = sum(np.size(weight) for weight in alone["weights"].values())
    assert once["memory"] == 4 * elements
    assert each["memory"] == 4 * elements // 2
    # Between micro-batches, where a parameter's gradient is its shard's: none, or all.
    assert once["held"] == [0, 0, 0, elements // 2]
    assert each["held"] == ([elements // 2] * 4 if config == "fsdp" else once["held"])


HALVES = {**PARITY["sgd"], "optim": {**PARITY["sgd"]["optim"], "reduce_dtype": "bf16"}, "length": {"steps": 4}}


HALVING = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tp")
LAUNCHED_RUNS = {key: {"bf16_sums": HALVES} for key in ("single", *HALVING)}


@pytest.mark.parametrize("config", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in HALVING])
def test_sums_in_bf16_are_near_those_in_fp32(launcher: Launcher, config: str) -> None:
    single, run = (launcher.many(name, LAUNCHED_RUNS[name])["bf16_sums"].check() for name in ("single", config))
    assert run.facts["runs"]["reduce_dtype"] == "bfloat16"
    apart = np.abs(run.series("grad_norm") / single.series("grad_norm") - 1)
    assert 1e-6 < apart.max() < 1e-2
    np.testing.assert_allclose(run.series("loss"), single.series("loss"), rtol=1e-3)


def test_what_is_held_is_read_back(fork_server: ForkServer, tmp_path: Path) -> None:
    """A run whose gradients are summed when they should not be, or the other way round, ends before its first step."""
    found = taken(fork_server, tmp_path, "fsdp", 2, "broken")
    assert (
        "with fsdp_sync_each_batch false, gradients between micro-batches are held as 0 bytes whole" in found["false"]
    )
    assert "with fsdp_sync_each_batch true" in found["true"]
    assert "and 0 cut. Nothing was trained." in found["true"]


@pytest.mark.parametrize("key", ["fsdp_sync_each_batch", "sync_each_batch"])
@pytest.mark.parametrize(("value", "means"), [(True, True), (False, False), ("auto", None), (None, None)])
def test_a_launch_file_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, value: Any, means: bool | None
) -> None:
    """A worker hears it though Accelerate does not hand it on, and so does what looks at launches ahead."""
    file = tmp_path / "launch.yaml"
    tree = yaml.safe_load((ROOT / "accelerate_configs/fsdp.yaml").read_text())
    if value is not None:
        tree["fsdp_config"][key] = value
    file.write_text(yaml.safe_dump(tree))
    assert predict_environment(str(file), {}, {}).launch.sync_each_batch is means
    assert launch_of_file(file, 8).sync_each_batch is means
    from accelerate.commands.launch import launch_command_parser

    arguments = launch_command_parser().parse_args(["--config_file", str(file), "scripts/train.py"])
    monkeypatch.setattr(launch_config, "_launcher_arguments", lambda *_: arguments)
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for name, said in {**ranks, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, said)
    assert read_launch().sync_each_batch is means


def test_other_values_are_refused() -> None:
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SYNC_EACH_BATCH": "sometimes"}
    with pytest.raises(
        BackendError,
        match="FSDP_SYNC_EACH_BATCH is 'sometimes' in the environment, and should be True, False or 'auto'",
    ):
        launch_of_environment({**env, "LOCAL_RANK": "0"}, 2, None)


LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


def variant_of(micro: int = 1) -> model_shapes.Variant:
    recipe = validate_recipe(
        {
            "model": {"config": LLAMA_7B, "gradient_checkpointing": True},
            "tokenizer": {"vocab_size": 512},
            "data": {"train": [{"sample": 10}], "sequence_length": 1024},
            "batch": {"global_size": RANKS * MICRO_BATCHES, "micro_size": micro},
            "length": {"steps": 1},
            "precision": "bf16",
        }
    )
    variant = model_shapes.read_variants(recipe, kinds=["full"])["full"]
    assert isinstance(variant, model_shapes.Variant)
    return variant


def planned(variant: model_shapes.Variant, gib: int = 79, name: str = "fsdp", *, each: bool | None = None) -> Candidate:
    recipe = variant.recipe
    asked = replace(launch_of_file(ROOT / "accelerate_configs" / f"{name}.yaml", RANKS), sync_each_batch=each)
    gpu = find_gpu(f"h100-80gb,memory={gib}")
    return assess_candidate(name, asked, variant, setting_of(recipe), gpu)


def test_a_plan_holds_whole_gradients_where_they_fit() -> None:
    """A 7B on 8 GPUs: whole gradients are 25 GiB of a rank's memory, and its shard of them 3."""
    variant = variant_of()
    large, small = planned(variant), planned(variant, 40)
    assert (large.launch.sync_each_batch, small.launch.sync_each_batch) == (False, True)
    assert large.memory is not None
    assert small.memory is not None
    assert large.memory.gradients / 2**30 == pytest.approx(25.1, abs=0.05)
    assert small.memory.gradients == pytest.approx(large.memory.gradients / 8, rel=1e-3)
    assert large.peak - small.peak > 0.8 * (large.memory.gradients - small.memory.gradients)
    assert (large.verdict, small.verdict) == ("fits", "fits")
    # The same figures as where the launch file says so.
    assert planned(variant, each=True).parts == small.parts
    # What is said is kept, even if it does not fit.
    assert planned(variant, 40, each=False).verdict != "fits"
    # One micro-batch leaves nothing to choose.
    assert planned(variant_of(micro=MICRO_BATCHES)).launch.sync_each_batch is None


@pytest.mark.parametrize(("name", "all_reduces"), [("fsdp", 0), ("hsdp", 1)])
def test_a_plan_counts_what_each_way_sends(name: str, all_reduces: int) -> None:
    variant = variant_of()
    once, each = (
        {
            flow.what: flow
            for flow in strategy_of(found.launch).predict_flows(found.launch, variant.specs, found.accumulation)
        }
        for found in (planned(variant, name=name, each=way) for way in (False, True))
    )
    last, every = once.pop("reduce-scatter gradients"), each.pop("reduce-scatter gradients")
    assert every.nbytes == pytest.approx(MICRO_BATCHES * last.nbytes, abs=MICRO_BATCHES)
    assert (every.calls, every.window) == (MICRO_BATCHES * last.calls, "backward")
    assert last.window == "last backward"
    assert len(once) == 1 + all_reduces
    assert once == each


def test_offloaded_gradients_are_on_the_device_while_they_are_whole() -> None:
    variant = variant_of()
    once, each = (planned(variant, name="fsdp_offload", each=way) for way in (False, True))
    assert once.parts is not None
    assert each.parts is not None
    assert once.memory is not None
    assert once.parts["gradients"] >= once.memory.gradients
    assert each.parts["gradients"] == 0
    assert each.host > once.host


@pytest.mark.parametrize(
    ("gib", "accumulation", "said", "cast", "each", "forecast"),
    [
        (64.0, 4, None, "no", False, True),
        (0.5, 4, None, "no", True, True),
        (64.0, 4, True, "no", True, False),
        (0.5, 4, False, "no", False, False),
        # Weights cast to 16 bit by the launch file are not planned.
        (64.0, 4, None, "bf16", True, False),
        (64.0, 1, None, "no", None, False),
    ],
)
def test_a_run_settles_it_by_the_forecast(
    monkeypatch: pytest.MonkeyPatch,
    gib: float,
    accumulation: int,
    said: bool | None,
    cast: str,
    each: bool | None,
    forecast: bool,
) -> None:
    monkeypatch.setattr(device_selection, "total_memory", lambda: round(gib * 2**30))
    recipe = validate_recipe(base(batch={"global_size": 4 * accumulation, "micro_size": 2}))
    asked = Launch("fsdp", 2, sync_each_batch=said, mixed_precision=cast)
    found = build_run.choose_gradient_sums(recipe, asked, accumulation)
    if each is None:
        assert found is None
        return
    assert found is not None
    assert found.each is each
    if forecast:
        assert found.needed is not None
        assert 1.0 <= found.needed / 2**30 < 2.0
        assert found.room == round(gib * 2**30)
    else:
        assert found.needed is None


def test_a_torch_that_cannot_sum_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11: asked for it is refused, left open it is once a step, whatever the forecast."""
    monkeypatch.setattr(torch_private, "reduces_unused_gradients", lambda: False)
    monkeypatch.setattr(device_selection, "total_memory", lambda: 2**29)
    recipe = validate_recipe(base(batch={"global_size": 16, "micro_size": 2}))
    with pytest.raises(BackendError, match=r"fsdp_sync_each_batch: true, for which torch .* lacks a function"):
        resolve_config(recipe, Launch("fsdp", 2, sync_each_batch=True), {})
    for asked in (None, False):
        launch = Launch("fsdp", 2, sync_each_batch=asked)
        resolve_config(recipe, launch, {})
        found = build_run.choose_gradient_sums(recipe, launch, 4)
        assert found is not None
        assert found.each is False
