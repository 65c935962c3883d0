"""It is impossible to believe that one backend ran when another did."""

import dataclasses
import json
import os
import sys
from typing import Any

import psutil
import pytest
import torch
from harness import command, environment, read_lines, run
from ranks import PARAGRAPH, Here, Place, assert_said, by_launcher, exported, free_port

from finetune.config.recipe_schema import ModelSection, Recipe
from finetune.distributed.launch import launch_config
from finetune.distributed.launch.launch_config import Launch, read_launch
from finetune.distributed.resolve_config import _check_planes
from finetune.distributed.strategies.fsdp import rows_of
from finetune.distributed.verify_launch import RuntimeReport, _differences
from finetune.training import entry_point
from finetune.utils.errors import BackendError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


# ---------------------------------------------------------------- launch files that lie


def test_accelerate_launch_with_cpu(place: Place) -> None:
    words = command("fsdp", str(place.recipe()))
    code, output = run([*words[: words.index("--config_file")], "--cpu", *words[words.index("--config_file") :]])
    assert code != 0
    assert "returned non-zero exit status 2" in output
    assert output.strip().startswith("Error: accelerate_configs/fsdp.yaml asks for FSDP on 2 processes and also")
    assert len(PARAGRAPH.findall(output)) == 1
    assert not place.files()


@needs_no_gpu
def test_accelerate_launch_of_two_that_starts_one(place: Place) -> None:
    """Without a launch file, and without a GPU, Accelerate ignores --num_processes."""
    words = command("ddp", str(place.recipe()), processes=2)
    at = words.index("--config_file")
    words = [*words[:at], "--cpu", *words[at + 2 :]]
    code, output = run(words, env=environment(HF_HOME=str(place.folder / "home")))
    assert code != 0
    assert len(PARAGRAPH.findall(output)) == 1, output
    assert "asks for 2 processes" in output
    assert not place.files()


# ---------------------------------------------------------------- environments that lie


@pytest.mark.parametrize(("config", "value"), [("ddp", "true"), ("fsdp", "1"), ("zero2", "TRUE"), ("ddp", "yes")])
def test_use_cpu_exported(place: Place, here: Here, config: str, value: str) -> None:
    here.monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    here.assert_refused(place.recipe(), "ACCELERATE_USE_CPU is set", "Unset it", config=config)
    assert not place.files()


def test_world_size_without_a_launcher(place: Place, here: Here) -> None:
    here.monkeypatch.setenv("WORLD_SIZE", "2")
    here.monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert entry_point.train_main([str(place.recipe())]) == 2
    assert_said(here.capsys.readouterr().err, "WORLD_SIZE is 2", "no LOCAL_RANK", "unset WORLD_SIZE")
    assert not place.files()


class Started:
    """Pretends that the parent process is `accelerate launch` with these arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        line = ["python", "/bin/accelerate", "launch", *arguments, "scripts/train.py", "recipe.yaml"]

        class Parent:
            def parent(self) -> "Parent":
                return self

            def cmdline(self) -> list[str]:
                return line

            def environ(self) -> dict[str, str]:
                return {}

        monkeypatch.setattr("psutil.Process", Parent)


@pytest.mark.parametrize(("options", "keys"), [(["--cpu"], {}), ([], {"use_cpu": True})])
def test_cpu_beside_sharding(place: Place, here: Here, options: list[str], keys: dict[str, Any]) -> None:
    """`test_conflicts_are_errors` of `test_explain.py` has the other lies of launch files."""
    Started(here.monkeypatch, *options, "--config_file", str(place.launch_file("fsdp", **keys)))
    with pytest.raises(BackendError, match=r"asks for FSDP on 2 processes and also for `use_cpu`.*Take `use_cpu` out"):
        read_launch()


@pytest.mark.parametrize(
    ("arguments", "asked", "runs"),
    [
        (["--config_file", "accelerate_configs/ddp.yaml"], 2, 4),
        (["--config_file", "accelerate_configs/fsdp.yaml"], 2, 1),
        (["--config_file", "accelerate_configs/zero2.yaml", "--num_processes", "4"], 4, 2),
        (["--config_file=accelerate_configs/single.yaml"], 1, 2),
    ],
)
def test_world_size_that_was_not_asked_for(here: Here, arguments: list[str], asked: int, runs: int) -> None:
    Started(here.monkeypatch, *arguments)
    for key in ("RANK", "LOCAL_RANK"):
        here.monkeypatch.setenv(key, "0")
    here.monkeypatch.setenv("WORLD_SIZE", str(runs))
    with pytest.raises(BackendError, match=f"asks for {asked} processes, but {runs} run"):
        read_launch()


@pytest.mark.parametrize(
    ("config", "kind", "world"),
    [
        ("single", "single", 1),
        ("ddp", "ddp", 2),
        ("fsdp", "fsdp", 2),
        ("hsdp", "hsdp", 4),
        ("zero3", "zero3", 2),
        ("sp", "ddp", 2),
        ("tp", "ddp", 2),
        ("fsdp_tp_sp", "fsdp", 4),
    ],
)
def test_what_shipped_launch_files_ask_for(here: Here, config: str, kind: str, world: int) -> None:
    file = f"accelerate_configs/{config}.yaml"
    env = {} if config == "single" else exported(config)
    for key, value in {**env, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}.items():
        here.monkeypatch.setenv(key, value)
    Started(here.monkeypatch, "--config_file", file)
    launch = read_launch()
    assert (launch.kind, launch.num_processes, launch.file) == (kind, world, file)
    assert launch.mixed_precision == "no"
    words = config.split("_")
    assert (launch.sequence, launch.tensor) == (2 if "sp" in words else 1, 2 if "tp" in words else 1)


WORDS = ["--config_file", "accelerate_configs/ddp.yaml", "scripts/train.py"]


@pytest.mark.parametrize(
    "line",
    [
        ["python", "-m", "finetune.distributed.launch.launcher", *WORDS],
        ["python", "/venv/bin/accelerate-launch", *WORDS],
        ["python", "/x/accelerate/commands/launch.py", *WORDS],
        # A script's own argument of that name is none of the launcher's.
        ["python", "/venv/bin/accelerate", "launch", *WORDS, "finetune.distributed.launch.launcher"],
    ],
)
def test_launchers_are_known_by_their_command_line(here: Here, line: list[str]) -> None:
    Started(here.monkeypatch)
    parent: Any = psutil.Process()
    here.monkeypatch.setattr(type(parent), "cmdline", lambda self: line)
    for key, value in {**exported("ddp"), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        here.monkeypatch.setenv(key, value)
    assert read_launch().file == "accelerate_configs/ddp.yaml"


# ---------------------------------------------------------------- the recipe decides


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp", "zero2"])
def test_exported_accumulation(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    asked = Launch(kind=kind, num_processes=1 if kind == "single" else 2)
    with pytest.raises(BackendError, match="STEPS is 3 in the environment, and the recipe's batch makes it 2"):
        _check_planes(Recipe(), asked, "fp32", 2)


def test_selective_recomputation_has_no_place_where_weights_come_and_go() -> None:
    recipe = Recipe(model=ModelSection(gradient_checkpointing="selective"))
    _check_planes(recipe, Launch(kind="fsdp", num_processes=2), "fp32", 1)
    with pytest.raises(BackendError, match="Set it to true or false"):
        _check_planes(recipe, Launch(kind="zero3", num_processes=2), "fp32", 1)


@pytest.mark.parametrize(
    ("launch", "precision", "given", "said"),
    [
        ("bf16", "fp32", {"precision": "fp32"}, "the recipe's precision is fp32."),
        ("fp16", "bf16", {"precision": "bf16"}, "the recipe's precision is bf16."),
        ("bf16", "fp32", {"precision": "auto"}, "the recipe's precision is auto, which is fp32 on this machine."),
        ("bf16", "fp32", {}, "the recipe's precision is auto, which is fp32 on this machine."),
    ],
)
def test_precision_of_the_launch_plane(launch: str, precision: str, given: dict[str, Any], said: str) -> None:
    asked = Launch(kind="ddp", num_processes=2, file="some.yaml", mixed_precision=launch)
    with pytest.raises(BackendError) as refused:
        _check_planes(Recipe(**given), asked, precision, 2)
    assert f"some.yaml says mixed_precision: {launch}, and {said}" in str(refused.value)
    assert f"set `precision: {launch}` in the recipe" in str(refused.value)


# ---------------------------------------------------------------- what is honest


def by_torchrun(place: Place, *words: str) -> dict[str, Any]:
    """The facts of a run that torchrun starts, with its losses."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    folder = place.folder / "-".join(("run", *words[1:]))
    code, output = run([*start, "scripts/train.py", str(place.recipe(output={"dir": str(folder)})), *words])
    assert code == 0, output
    facts = json.loads((folder / "run.json").read_text())
    assert f"launch    {facts['runs']['kind']} x 2 on cpu (gloo)" in output
    return {**facts, "losses": [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "grad_norm" in line]}


@needs_no_gpu
def test_torchrun_runs_what_a_launch_file_behind_the_script_says(place: Place) -> None:
    """Without one it is DDP."""
    plain = by_torchrun(place)
    assert (plain["runs"]["kind"], plain["runs"]["world_size"], plain["launch"]["file"]) == ("ddp", 2, None)
    for file in ("fsdp", "zero2"):
        one = by_torchrun(place, "--config_file", file)
        assert (one["runs"]["kind"], one["runs"]["world_size"]) == (file, 2)
        assert one["launch"]["file"] == f"accelerate_configs/{file}.yaml"
        assert one["losses"] == pytest.approx(plain["losses"], rel=1e-6)


def test_a_launch_file_behind_the_script(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "accelerate_configs/fsdp.yaml"
    started = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    monkeypatch.setattr(os, "environ", {**os.environ, **started})
    launch_config.take_launch_file(file)
    assert (read_launch().kind, read_launch().num_processes, read_launch().file) == ("fsdp", 4, file)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    with pytest.raises(BackendError, match=r"ACCELERATE_USE_DEEPSPEED is 'true' in the environment, which acc"):
        read_launch()
    monkeypatch.setattr(launch_config.orphan_watch, "accelerate_arguments", lambda: ["scripts/train.py"])
    with pytest.raises(BackendError, match=r"stands behind the script, and the launcher reads what is before it"):
        launch_config.take_launch_file(file)


# ---------------------------------------------------------------- what runs is looked at

# Scripts that train as scripts/train.py does, on an Accelerate that falls back without a word.
FALLBACKS = {
    # It prepares nothing: N trainings that know nothing of each other.
    "ddp": "from accelerate import Accelerator; Accelerator.prepare = lambda self, *parts: parts",
    # It takes no notice of the sharding that is asked for, as it does for CPU processes.
    "fsdp": "from accelerate import PartialState as S\nfsdp._enter_fsdp_on_gloo = lambda: S(cpu=True)",
    # Plain DDP of whole layers,
    "tp": "from finetune.models import split_layers as s\ns.split = lambda network, group: s.Splits()",
    # and gradients averaged over ranks that hold different parts of a layer.
    "fsdp_tp": "from contextlib import nullcontext\nfsdp.sharding_over_mesh = lambda runtime: nullcontext()",
}


@needs_no_gpu
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("ddp", "kind: asked ddp, runs single"),
        ("fsdp", "kind: asked fsdp, runs ddp"),
        ("tp", "ranks that a layer is split over: asked 2, runs 1"),
        ("fsdp_tp", "ranks that gradients are averaged over: asked 2, runs 4"),
    ],
)
def test_a_fallback_is_seen(place: Place, kind: str, says: str) -> None:
    place.write(
        "falls_back.py",
        "from finetune.distributed.strategies import fsdp\nfrom finetune.training.entry_point import train_main\n"
        "from finetune.utils.exit_codes import exit_with\n"
        f"{FALLBACKS[kind]}\nexit_with(train_main())\n",
    )
    env = environment()
    env["PYTHONPATH"] += f":{place.folder}"
    code, output = run(by_launcher(kind, str(place.recipe()), module="falls_back"), env=env)
    assert code == 2, output
    assert len(PARAGRAPH.findall(output)) == 1, output
    assert f"Error: What runs is not what accelerate_configs/{kind}.yaml asks for: " in output
    assert says in output
    assert "Nothing was trained" in output
    assert "Traceback" not in output
    assert not place.files()


# ---------------------------------------------------------------- every difference counts


def report(kind: str, **fields: Any) -> RuntimeReport:
    """What is read back when all is as it should be, but for some fields."""
    sharded, zero = kind in ("fsdp", "hsdp", "zero3"), kind.startswith("zero")
    good = {
        "kind": kind,
        "world_size": {"single": 1, "hsdp": 4}.get(kind, 2),
        "replicas": 2 if kind == "hsdp" else 1,
        "averaged": {"single": 1, "hsdp": 4}.get(kind, 2),
        "communication": None if kind == "single" else "gloo",
        "device": "cpu",
        "wrapper": "Wrapper",
        "num_parameters": 1_000_000,
        "parameter_fraction": 0.5 if sharded else 1.0,
        "optimizer_fraction": 0.5 if sharded or zero else 1.0,
        "parameter_dtypes": ("float32",),
        "model_dtypes": ("float32",),
        "reduce_dtype": "float32",
        "offload_params": "none",
        "offload_optimizer": "none",
        "on_disk": (0.0, 0.0),
        "accumulation": 2,
        "num_threads": 1,
        "output_dtypes": {"Linear": "float32", "loss": "float32"},
    }
    return RuntimeReport(**{**good, **fields})


def asked(kind: str, **fields: Any) -> Launch:
    good = {
        "kind": kind,
        "num_processes": {"single": 1, "hsdp": 4}.get(kind, 2),
        "replicate": 2 if kind == "hsdp" else 1,
    }
    return Launch(**{**good, **fields})


def differences(report: RuntimeReport, launch: Launch, precision: str = "fp32", reduced: str = "float32") -> list[str]:
    return list(_differences(report, launch, 2, precision, reduced))


KINDS = ["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_difference(kind: str) -> None:
    assert differences(report(kind), asked(kind)) == []
    bf16 = report(kind, output_dtypes={"LayerNorm": "float32", "Linear": "bfloat16", "loss": "float32"})
    assert differences(bf16, asked(kind), "bf16") == []
    for other in KINDS:
        problems = "; ".join(differences(report(other), asked(kind)))
        assert (f"kind: asked {kind}, runs {other}" in problems) == (kind != other)


@pytest.mark.parametrize(
    ("kind", "field", "value", "says"),
    [
        ("ddp", "world_size", 1, "number of processes: asked 2, runs 1"),
        ("hsdp", "replicas", 1, "replicas: asked 2, runs 1"),
        ("fsdp", "replicas", 2, "replicas: asked 1, runs 2"),
        ("fsdp", "sequence", 2, "ranks that a row is split over: asked 1, runs 2"),
        ("ddp", "tensor", 2, "ranks that a layer is split over: asked 1, runs 2"),
        ("ddp", "averaged", 1, "ranks that gradients are averaged over: asked 2, runs 1"),
        ("zero2", "accumulation", 1, "gradient accumulation: asked 2, runs 1"),
        ("zero3", "offload_params", "cpu", "offload of parameters: asked none, runs cpu"),
        ("zero2", "offload_optimizer", "nvme", "offload of the optimiser: asked none, runs nvme"),
        ("fsdp", "parameter_fraction", 1.0, "parameters held by a rank: asked 50.0%, holds 100.0%"),
        ("zero3", "parameter_fraction", 0.6, "parameters held by a rank: asked 50.0%, holds 60.0%"),
        ("ddp", "parameter_fraction", 0.5, "parameters held by a rank: asked 100.0%, holds 50.0%"),
        ("zero1", "optimizer_fraction", 1.0, "optimiser state held by a rank: asked 50.0%, holds 100.0%"),
        ("fsdp", "optimizer_fraction", 1.0, "optimiser state held by a rank: asked 50.0%, holds 100.0%"),
        ("single", "optimizer_fraction", 0.9, "optimiser state held by a rank: asked 100.0%, holds 90.0%"),
        ("fsdp", "parameter_dtypes", ("bfloat16", "float32"), "must be float32, are bfloat16+float32"),
        ("ddp", "reduce_dtype", "bfloat16", "gradients: asked to be summed in float32, are summed in bfloat16"),
        ("fsdp", "reshards", False, "resharding after the forward pass: asked True, runs False"),
        ("ddp", "output_dtypes", {"Linear": "float16", "loss": "float32"}, "asked float32, come out in float16"),
        ("ddp", "output_dtypes", {"Conv1D": "float16", "loss": "float32"}, "asked float32, come out in float16"),
        ("fsdp", "output_dtypes", {"Linear": "float32", "loss": "bfloat16"}, "leave the model as float32, is bfloat16"),
    ],
)
def test_a_difference_is_told(kind: str, field: str, value: Any, says: str) -> None:
    (problem,) = differences(report(kind, **{field: value}), asked(kind))
    assert says in problem


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
def test_rows_of_a_shard_are_those_of_torch(shards: int) -> None:
    for rows in range(1, 30):
        chunks = [len(chunk) for chunk in torch.arange(rows).chunk(shards)]
        assert [rows_of(rows, rank, shards) for rank in range(shards)] == chunks + [0] * (shards - len(chunks))


def test_uneven_shards_are_compared_with_their_own_rule() -> None:
    """Of four rows on three ranks, the last one holds none."""
    launch = asked("fsdp", num_processes=3)
    three = {"world_size": 3, "averaged": 3}
    for share in (0.5, 0.0):
        holds = report("fsdp", **three, parameter_fraction=1 / 3, optimizer_fraction=share, due=(1 / 3, share))
        assert differences(holds, launch) == []
        (problem,) = differences(dataclasses.replace(holds, optimizer_fraction=1.0), launch)
        assert f"optimiser state held by a rank: asked {share:.1%}, holds 100.0%" in problem


def test_what_does_not_happen_is_told() -> None:
    assert differences(report("ddp"), asked("ddp"), "bf16") == ["matrix products: asked bfloat16, come out in float32"]
    assert differences(report("zero3"), asked("zero3", offload_params="nvme", offload_optimizer="cpu")) == [
        "offload of parameters: asked nvme, runs none",
        "offload of the optimiser: asked cpu, runs none",
    ]
    wrong = report("ddp", world_size=1, accumulation=5, output_dtypes={"Linear": "float16", "loss": "float16"})
    assert len(differences(wrong, asked("fsdp"))) >= 6, "all differences are told at once"


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero2"])
def test_gradients_that_are_summed_in_another_dtype(kind: str) -> None:
    assert differences(report(kind), asked(kind), reduced="bfloat16") == [
        "gradients: asked to be summed in bfloat16, are summed in float32"
    ]
    assert not differences(report(kind, reduce_dtype="bfloat16"), asked(kind), reduced="bfloat16")
    if kind == "zero2":
        chosen = asked(kind, ds_config={"communication_data_type": "bf16"})
        assert not differences(report(kind, reduce_dtype="bfloat16"), chosen)


def test_tiny_models_cannot_be_cut_evenly_but_must_be_cut() -> None:
    assert differences(report("fsdp", num_parameters=500, parameter_fraction=0.7), asked("fsdp")) == []
    assert len(differences(report("fsdp", num_parameters=500, parameter_fraction=1.0), asked("fsdp"))) == 1


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "without a deepspeed_config_file; values such as zero_stage"),
        (
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero2.json", "ACCELERATE_MIXED_PRECISION": "bf16"},
            "says mixed_precision: bf16, which DeepSpeed takes from its own config",
        ),
        (
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"},
            "names the DeepSpeed config nowhere.json, and there is none in",
        ),
    ],
    ids=["values in the launch file", "precision in the launch file", "no such config"],
)
def test_deepspeed_launch_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(BackendError, match=says):
        read_launch()
