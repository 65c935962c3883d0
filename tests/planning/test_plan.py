"""`finetune plan`: what it says holds together, its advice is true, and broken input is one paragraph."""

import functools
import io
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from harness import ROOT
from rich.console import Console
from testdata import MODEL

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.distributed import gpu_specs
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.distributed.link_speeds import LinkSpeeds
from finetune.planning import model_shapes, plan_report, planner, recommendations
from finetune.planning.step_time import Machines
from finetune.planning.trace import trace_launches
from finetune.training import entry_point
from finetune.utils.errors import RecipeError

if TYPE_CHECKING:
    from finetune.config.recipe_schema import Recipe

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {**LLAMA_8B, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
VERDICTS = ["no", "tight", "fits"]


def sections(**changed: Any) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "model": {"config": SMALL},
        "tokenizer": {"vocab_size": 512},
        "data": {"train": [{"sample": 3}], "sequence_length": 1024, "packing": "wrapped"},
        "batch": {"global_size": 64, "micro_size": 8},
        "length": {"tokens": 10_000_000},
    }
    for name, values in changed.items():
        recipe[name] = {**recipe.get(name, {}), **values} if isinstance(values, dict) else values
    return recipe


def planned(recipe: dict[str, Any], gpu: str = "h100-80gb", number: int = 8, nodes: int = 1) -> planner.Plan:
    return _planned(json.dumps(recipe, sort_keys=True), gpu, number, nodes)


@functools.cache
def _planned(recipe: str, gpu: str, number: int, nodes: int) -> planner.Plan:
    machines = Machines(gpu_specs.find_gpu(gpu), number, nodes, 50.0, 0.4)
    return planner.make_plan(validate_recipe(json.loads(recipe)), machines, stored="bf16")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "recipe.yaml"
    place.write_text(yaml.safe_dump(sections()))
    return place


def said(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main.main(["plan", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_has_every_launch_file_and_way(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, file, "--price", "2.5", "--energy")
    assert code == 0
    names = {f.stem for f in (ROOT / "accelerate_configs").glob("*.yaml")} - {"single", "fsdp_2nodes", "zero3_2nodes"}
    rows = [line.split()[0] for line in out.splitlines() if line.count(" > ") == 3]
    assert set(rows) == names
    assert len(rows) == len(names)
    for word in (
        "full (the recipe)",
        "LoRA",
        "QLoRA",
        "Recommended: ",
        "GPU hours, costs",
        "kWh",
        "all-reduce gradients",
    ):
        assert word in out


def test_json_says_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, file, "--json")
    assert code == 0
    found = json.loads(out)
    for candidate in found["cells"]:
        assert candidate["peak"] == sum(candidate["parts"].values())
        assert candidate["needed"] > candidate["peak"]
        assert candidate["verdict"] in VERDICTS
    assert found["advice"]["cell"]["verdict"] == "fits"
    assert found["work"]["tokens"] == found["work"]["steps"] * 64 * 1024
    assert found["time"]["step_s"] >= found["time"]["compute_s"] > 0


def facts(plan: planner.Plan, part: str) -> dict[Any, int]:
    return {
        key: candidate.peak if part == "peak" else getattr(candidate.memory, part)
        for key, candidate in plan.candidates.items()
        if candidate.verdict != "refused"
    }


def whole(plan: planner.Plan) -> dict[Any, bool]:
    return {
        key: candidate.launch.holds_whole_gradients(candidate.accumulation)
        for key, candidate in plan.candidates.items()
        if candidate.verdict != "refused"
    }


def test_less_work_at_a_time_never_takes_more_memory() -> None:
    """But for gradients that are held whole because there is room for them now."""
    plain, ways = facts(planned(sections()), "peak"), whole(planned(sections()))
    for changed in (
        {"model": {"gradient_checkpointing": True}},
        {"batch": {"micro_size": 4}},
        {"data": {"sequence_length": 512}},
    ):
        plan = planned(sections(**changed))
        smaller = facts(plan, "peak")
        for key in plain:
            assert smaller[key] <= plain[key] or (
                whole(plan)[key] > ways[key] and plan.candidates[key].verdict == "fits"
            )
        assert any(smaller[key] < plain[key] for key in plain)


def test_more_ranks_never_hold_more_each() -> None:
    sizes = [planned(sections(batch={"micro_size": 1}), number=number) for number in (2, 4, 8, 16)]
    for part in ("frozen", "trained", "optimizer"):
        for fewer, more in itertools.pairwise(sizes):
            one, other = facts(fewer, part), facts(more, part)
            # Of small ranks' adapters, a row a rank is the least.
            assert all(other[key] <= one[key] * 1.01 + 4096 for key in one if key in other)


@pytest.mark.parametrize("lora", [{"rank": 4}, {"dora": True, "save_modules": ["lm_head"]}, {"init": "pissa"}])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_ways_that_share_a_network_are_those_built_alone(lora: dict[str, Any], quantization: str) -> None:
    model = {"config": SMALL} | ({} if "init" in lora else {"quantization": quantization})
    recipe = validate_recipe(sections(model=model, lora=lora))
    together = model_shapes.read_variants(recipe, "bf16")
    for kind, found in together.items():
        alone = model_shapes.read_variants(recipe, "bf16", [kind])[kind]
        assert isinstance(found, model_shapes.Variant)
        assert isinstance(alone, model_shapes.Variant)
        assert replace(found, config=None) == replace(alone, config=None)


def test_packing_and_adapters_save_what_they_should() -> None:
    plan = planned(sections(model={"config": LLAMA_8B}))
    full, lora, packed = (plan.candidates["ddp", kind].memory for kind in ("full", "LoRA", "QLoRA"))
    assert full is not None
    assert lora is not None
    assert packed is not None
    assert full.trained == full.gradients == full.optimizer // 2 == 4 * 8_030_261_248
    linear = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert lora.frozen - packed.frozen == pytest.approx((2 - 4.127 / 8) * linear, rel=1e-4)  # QLoRA, section 3
    assert lora.trained == packed.trained


@pytest.mark.parametrize("gpu", ["memory=40,bf16=50", "memory=20,bf16=50", "memory=8,bf16=50"])
@pytest.mark.parametrize("lora", [None, {"rank": 16}])
def test_advice_is_true(gpu: str, lora: dict[str, Any] | None) -> None:
    """What is recommended fits, with the changes that go with it, and nothing simpler does."""
    wanted = sections(model={"config": {**LLAMA_8B, "num_hidden_layers": 6}}, **({"lora": lora} if lora else {}))
    plan = planned(wanted, gpu)
    chosen = plan.advice.candidate
    if chosen is None:
        assert "pipeline parallelism is not offered" in plan.advice.reason
        return
    again = planned(overridden(wanted, plan.advice.changes), gpu)
    assert again.candidates[chosen.name, chosen.kind].verdict == "fits"
    simpler = list(plan.launches)[: list(plan.launches).index(chosen.name)]
    assert all(again.candidates[name, chosen.kind].verdict != "fits" for name in simpler)


def overridden(recipe: dict[str, Any], words: Any) -> dict[str, Any]:
    changed = yaml.safe_load(yaml.safe_dump(recipe))
    for word in words:
        key, _, value = word.partition("=")
        *parents, last = key.split(".")
        node = changed
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = yaml.safe_load(value)
    return changed


def test_what_fits_nowhere_is_said() -> None:
    huge = {**LLAMA_8B, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
    plan = planned(sections(model={"config": {**huge, "num_attention_heads": 128}}), "memory=4,bf16=50", 2)
    assert plan.advice.candidate is None
    assert "pipeline parallelism is not offered" in plan.advice.reason


@pytest.mark.parametrize(("number", "nodes"), [(8, 1), (4, 2), (1, 1)])
def test_written_launch_files_ask_for_what_was_planned(number: int, nodes: int, tmp_path: Path) -> None:
    plan = planned(sections(), number=number, nodes=nodes)
    folder = tmp_path / "elsewhere" / "accelerate_configs"
    folder.mkdir(parents=True)
    for name, launch in plan.launches.items():
        (written := folder / f"{name}.yaml").write_text(recommendations.launch_text(launch, nodes))
        config = yaml.safe_load(written.read_text())
        assert (config["num_processes"], config["num_machines"]) == (number * nodes, nodes)
        assert ("machine_rank" in config) == (nodes > 1)
        if launch.uses_deepspeed:
            assert (ROOT / config["deepspeed_config"]["deepspeed_config_file"]).is_file()
            (folder.parent / "ds_configs").mkdir(exist_ok=True)
            place = folder.parent / config["deepspeed_config"]["deepspeed_config_file"]
            place.write_text(Path(launch.ds_place).read_text())
        again = launch_of_file(written, number * nodes)
        for field in (
            "kind",
            "replicate",
            "reshard",
            "offload_params",
            "offload_optimizer",
            "sharded_init",
            "ds_config",
        ):
            assert getattr(again, field) == getattr(launch, field)


def test_from_another_folder_the_library_config_is_named_whole(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = planned(sections(batch={"micro_size": 1}, model={"gradient_checkpointing": True})).candidates
    ends = [candidates[name, "full"].needed / 2**30 for name in ("zero1", "ddp")]
    assert ends[0] < ends[1]
    monkeypatch.chdir(tmp_path)
    # Too small for all whole on each: the optimiser has to be cut.
    size, rest = sum(ends) / 2, ("batch.micro_size=1", "model.gradient_checkpointing=true")
    code, out, _ = said(capsys, file, *rest, "--gpu", f"memory={size},bf16=100", "--write", "made.yaml")
    assert code == 0
    assert "Written: made.yaml" in out
    place = yaml.safe_load(Path("made.yaml").read_text())["deepspeed_config"]["deepspeed_config_file"]
    assert Path(place).is_file()
    code, _, err = said(capsys, file, "--write", "made.yaml")
    assert code == 2
    assert "made.yaml is there already" in err


def test_two_machines_keep_layers_within_them() -> None:
    names = list(planned(sections(), nodes=2).launches)
    assert names.index("hsdp") < names.index("fsdp")
    names = list(planned(sections(), nodes=1).launches)
    assert names.index("hsdp") > names.index("zero3")


def test_traffic_between_machines_takes_the_network() -> None:
    moved = {nodes: planned(sections(), number=8 // nodes, nodes=nodes).time for nodes in (1, 2)}
    assert moved[1] is not None
    assert moved[2] is not None
    assert [m.between_machines for m in moved[1].moved] == [False]
    assert [m.between_machines for m in moved[2].moved] == [True]
    assert moved[2].moved[0].seconds == pytest.approx(moved[1].moved[0].seconds * 450 / 50)


def test_a_micro_batch_is_that_of_data_ranks() -> None:
    """As a run takes it: ranks that share rows or layers are one."""
    plan = planned(sections(batch={"global_size": 16}))
    micro = {name: plan.candidates[name, "full"].setting.micro for name in plan.launches}
    assert micro == {name: min(8, 16 // launch.data_ranks) for name, launch in plan.launches.items()}
    assert (micro["ddp"], micro["sp"], micro["fsdp_tp_sp"]) == (2, 4, 8)
    assert plan.advice.changes == ()
    few = planned(sections(batch={"global_size": 4, "micro_size": 2}))
    assert {name for name in few.launches if few.candidates[name, "full"].memory is None} == {
        name for name, launch in few.launches.items() if launch.data_ranks > 4
    }
    refused = planned(sections(batch={"global_size": 15, "micro_size": 1}))
    assert {candidate.verdict for candidate in refused.candidates.values()} == {"refused"}
    assert "not a multiple" in refused.candidates["ddp", "full"].reason


def test_epochs_are_not_guessed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, file, "length.tokens=null", "length.epochs=1")
    assert code == 0
    assert "Length: 1 epochs of 1 rows, estimated from the first documents of each source." in out


def test_optimisers_that_cannot_be_cut_are_refused_where_they_are() -> None:
    plan = planned(sections(optim={"name": "PagedAdamW8bit", "lr": 1e-3}))
    assert plan.candidates["ddp", "full"].verdict == "fits"
    assert "blocks of whole tensors" in plan.candidates["zero3", "full"].reason
    eight, whole = plan.candidates["ddp", "full"].memory, planned(sections()).candidates["ddp", "full"].memory
    assert eight is not None
    assert whole is not None
    assert eight.optimizer < 0.27 * whole.optimizer


def test_networks_of_ones_own_are_counted_without_activations() -> None:
    task = {"name": "own_task:mlp", "args": {"dropout": 0.1}}
    recipe = sections(task=task, batch={"micro_size": 8}, data={"packing": "documents"})
    plan = planned({key: value for key, value in recipe.items() if key != "model"})
    assert "activations are not counted" in plan.candidates["ddp", "full"].reason
    assert isinstance(plan.variants["LoRA"], str)
    assert plan.candidates["ddp", "LoRA"].verdict == "refused"


# Overrides of the recipe, options, and what the paragraph says.
BROKEN = {
    "gpu": ("", "--gpu h10-80gb", "did you mean 'h100-80gb'?"),
    "figure": ("", "--gpu memory=24,speed=3", "cannot read 'speed=3'"),
    "negative": ("", "--gpu memory=-1,bf16=3", "cannot read 'memory=-1'"),
    "not a number": ("", "--gpu memory=nan,bf16=3", "cannot read 'memory=nan'"),
    "too little": ("", "--gpu bf16=24", "must say memory (GiB) at least"),
    "two of a name": ("", "--gpu A100", "there is no 'A100': a100-80gb or a100-40gb?"),
    "no gpus": ("", "--gpus 0", "--gpus is 0"),
    "nodes": ("", "--nodes -2", "--nodes is -2"),
    "mfu": ("", "--mfu 40", "--mfu is 40.0"),
    "network": ("", "--network nan", "--network is nan"),
    "price": ("", "--price -1", "--price is -1.0"),
    "configs": ("", "--configs nowhere", "There are no launch files in nowhere"),
    "steps": ("length.tokens=null length.steps=0", "", "trains nothing that could be planned"),
    "lora": ("lora.targets=[nothing]", "", "lora.targets"),
    "folder": ("", "--write nowhere/a.yaml", "cannot write nowhere/a.yaml"),
    "key": ("batch.micro=3", "", "batch.micro"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_input_is_one_paragraph(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, options, expected = BROKEN[name]
    code, _, err = said(capsys, file, *overrides.split(), *options.split())
    assert code == 2
    assert expected in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


BROKEN_LAUNCH_FILES = {
    "a list": b"[1, 2]",
    "a kind": b"distributed_type: TPU\n",
    "a version": b"distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n",
    "no YAML": b"a: [",
    "no text": b"\xff\xfe\x00",
    "unknown keys": b"distributed_type: MULTI_GPU\nnum_procs: 2\nzero: 3\n",
    "no JSON": b"distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: nonesuch.json}\n",
}


def test_broken_launch_files_are_lines_beside_the_others(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    for name, content in BROKEN_LAUNCH_FILES.items():
        (folder / f"{name}.yaml").write_bytes(content)
    code, _, err = said(capsys, file, "--configs", folder)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert all(f"{name}.yaml" in err for name in BROKEN_LAUNCH_FILES)
    shutil.copy(ROOT / "accelerate_configs" / "ddp.yaml", folder)
    code, out, err = said(capsys, file, "--configs", folder)
    assert (code, err) == (0, "")
    assert "Recommended: " in out
    lines = dict(line.strip().split(": ", 1) for line in out.splitlines() if f"{folder}/" in line and line[:2] == "  ")
    assert {name for name in lines if f"{folder}/{name}.yaml" in lines[name]} == set(BROKEN_LAUNCH_FILES)
    _, out, _ = said(capsys, file, "--configs", folder, "--json")
    assert json.loads(out)["unread"].keys() == set(BROKEN_LAUNCH_FILES)


def test_each_cell_that_fits_has_its_time_and_cost(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, file, "--json", "--price", 2)
    cells = [cell for cell in json.loads(out)["cells"] if cell["verdict"] == "fits"]
    assert code == 0
    assert len(cells) > 20
    for cell in cells:
        assert cell["time"]["cost"] == pytest.approx(cell["time"]["hours"] * 8 * 2)
    _, out, _ = said(capsys, file, "--price", 2)
    shown = out.partition("The cheapest first")[2].splitlines()[2 : 2 + len(cells)]
    assert {tuple(line.split()[:2]) for line in shown} == {(cell["launch"], cell["kind"]) for cell in cells}
    costs = [float(line.split()[-1]) for line in shown]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gpu", "memory=24"), "Time and cost: not planned without a rate; add bf16=TFLOP/s to --gpu."),
        (("precision=fp32",), "Time and cost: not planned in fp32"),
        (("length={epochs: 1}", "data.train=[{path: nowhere.jsonl}]"), "so the run's time and its cost take the num"),
    ],
)
def test_a_price_is_answered(file: Path, capsys: pytest.CaptureFixture[str], options: tuple[str], says: str) -> None:
    """Figures of a GPU that are left out cost what takes them, and nothing else."""
    words = [word for word in options if "=" in word and options[0] != "--gpu"]
    code, out, _ = said(capsys, file, *words, "--price", "2.5", *(options if options[0] == "--gpu" else ()))
    assert code == 0
    assert says in out
    assert "Recommended: " in out


def test_rows_of_epochs_are_estimated_and_then_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"{n} cats sat on {n} mats. " * 9}) + "\n" for n in range(3000)))
    tree = sections(
        model={"config": None, "name": str(MODEL)},
        tokenizer={"vocab_size": None},
        data={"train": [{"path": str(documents)}], "sequence_length": 64, "cache_dir": str(tmp_path / "cache")},
        length={"tokens": None, "epochs": 2},
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    found = []
    for _ in range(2):
        code, out, err = said(capsys, recipe, "--json", "--price", 2)
        assert code == 0, err
        found.append(json.loads(out))
        assert main.main(["data", str(recipe)]) == 0
        capsys.readouterr()
    estimate, count = (one["rows"] for one in found)
    assert (estimate[1], count[1]) == ("estimated from the first documents of each source", "as they are prepared")
    assert estimate[0] == pytest.approx(count[0], rel=0.05)
    assert found[1]["work"]["steps"] == 2 * count[0] // 64
    assert found[1]["time"]["cost"] > 0
    _, out, _ = said(capsys, recipe)
    assert f"Length: 2 epochs of {count[0]:,} rows, as they are prepared." in out


def test_offload_takes_time_and_host_memory() -> None:
    """PCIe, the host's optimiser, and what rests in host memory; the disk is slower than both."""
    plan = planned(sections(model={"config": LLAMA_8B, "gradient_checkpointing": True}), number=1)
    small = planned(sections(), number=1)
    single, host, disk = (small.times[name, "full"] for name in ("single", "zero3_offload", "zero3_nvme"))
    assert single.step_s < host.step_s < disk.step_s
    elements = small.candidates["single", "full"].memory.trained / 4
    (step,) = [m.seconds for m in host.moved if m.flow.collective == "host_step"]
    assert step == pytest.approx(28 * elements / 128e9, rel=0.01)
    (weights,) = [m for m in host.moved if m.flow.of == "weights to the device"]
    assert weights.seconds == pytest.approx(weights.flow.nbytes / 64e9)
    cell = plan.candidates["zero3_offload", "full"]
    # Weights, their fp32 masters, gradients and both moments, in fp32.
    assert cell.host == pytest.approx(5 * 4 * 8.03e9, rel=0.01)


def _with_launch(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A folder with that launch file, changed, and the shipped one."""
    folder = tmp_path / "configs"
    shutil.copytree(ROOT / "ds_configs", tmp_path / "ds_configs", dirs_exist_ok=True)
    folder.mkdir(exist_ok=True)
    tree = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    for section, values in changes.items():
        tree[section] |= values
    (folder / f"{name}_changed.yaml").write_text(yaml.safe_dump(tree))
    return folder


def test_wrap_policies_count(tmp_path: Path) -> None:
    """Without units, FSDP2 gathers the whole network at once."""
    machines = Machines(gpu_specs.find_gpu("h100-80gb"), 8, 1, 50.0, 0.4)
    recipe = validate_recipe(sections())
    for policy, gathers in (("NO_WRAP", True), ("SIZE_BASED_WRAP", None)):
        folder = _with_launch(tmp_path / policy, "fsdp", fsdp_config={"fsdp_auto_wrap_policy": policy})
        plan = planner.make_plan(recipe, machines, folder)
        layers, changed = (plan.candidates[name, "full"] for name in ("fsdp", "fsdp_changed"))
        if gathers is None:
            assert "SIZE_BASED_WRAP are not planned" in changed.reason
            continue
        whole = 4 * plan.work.parameters
        assert layers.parts["gathered"] < whole <= changed.parts["gathered"]


def test_an_optimiser_on_the_host_is_recommended_as_such(tmp_path: Path) -> None:
    folder = _with_launch(tmp_path, "zero2", deepspeed_config={"deepspeed_config_file": "../ds_configs/host.json"})
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    (tmp_path / "ds_configs" / "host.json").write_text(json.dumps(config))
    machines = Machines(gpu_specs.find_gpu("h100-80gb"), 8, 1, 50.0, 0.4)
    plan = planner.make_plan(validate_recipe(sections()), machines, folder)
    assert plan.advice.candidate.name == "zero2"
    plain, host = plan.candidates["zero2", "full"], plan.candidates["zero2_changed", "full"]
    assert "rests in host memory" in recommendations.reason_for(host.launch)
    assert recommendations.preference_of(host.launch, 1) > recommendations.preference_of(plain.launch, 1)
    # Its state and the fp32 master weights, and gradients, leave the device.
    assert host.host == pytest.approx(4 * 4 * plan.work.parameters / 8, rel=0.01)
    assert plan.times["zero2_changed", "full"].step_s > plan.times["zero2", "full"].step_s


def test_a_base_without_weights_is_taken_in_the_dtype_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "dtype": "bfloat16"}))
    tree = sections(model={"config": None, "name": str(tmp_path), "gradient_checkpointing": True}, lora={"rank": 16})
    tree |= {"tokenizer": {}, "batch": {"global_size": 8, "micro_size": 1}}
    machines = Machines(gpu_specs.find_gpu("RTX4090"), 1, 1, 50.0, 0.4)
    plan = planner.make_plan(validate_recipe(tree), machines)
    assert plan.candidates["single", "LoRA"].verdict == "fits"


def test_known_gpus_can_be_changed() -> None:
    known, changed = gpu_specs.find_gpu("a100-80gb"), gpu_specs.find_gpu("a100-80gb,memory=60")
    assert (changed.memory_gib, changed.bf16_tflops) == (60.0, known.bf16_tflops)
    with pytest.raises(RecipeError, match="--gpu"):
        gpu_specs.find_gpu("a100-80gb,bf16=fast")


def test_recipes_that_ship_can_be_planned() -> None:
    for place in sorted((ROOT / "recipes").glob("*.yaml")):
        text = yaml.safe_load(place.read_text())
        if "config" not in text.get("model", {}) or "name" in text.get("tokenizer", {}):
            continue
        recipe: Recipe = validate_recipe(text)
        plan = planner.make_plan(recipe, Machines(gpu_specs.find_gpu("a100-80gb"), 8, 1, 50.0, 0.4))
        assert plan.advice.candidate is not None, place.name


def test_a_named_tokenizer_decides_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run counts the same network as a plan."""
    config = {key: value for key, value in sections()["model"]["config"].items() if key != "vocab_size"}
    named = {"model": {"config": config}, "tokenizer": {"name": MODEL}}
    data = {"train": [{"sample": 10}], "sequence_length": 32}
    tree = {**named, "data": data, "length": {"steps": 1}, "output": {"dir": str(tmp_path / "run")}}
    place = tmp_path / "recipe.yaml"
    place.write_text(yaml.safe_dump(tree))
    code, out, _ = said(capsys, place, "--json")
    assert code == 0
    parameters = json.loads(out)["variants"]["full"]["parameters"]
    assert entry_point.train_main([str(place), "--dry-run"]) == 0
    assert f"{parameters:,} parameters" in capsys.readouterr().out
    vocabulary = json.loads((Path(MODEL) / "tokenizer.json").read_text())["model"]["vocab"]
    assert (
        parameters == planned({**tree, "model": {"config": {**config, "vocab_size": len(vocabulary)}}}).work.parameters
    )


def test_groups_of_more_ranks_than_there_are_are_left_out() -> None:
    plan = planned(sections(batch={"global_size": 60, "micro_size": 1}), number=2)
    assert {"sp", "tp"} <= plan.launches.keys()
    assert "fsdp_tp_sp" not in plan.launches


@pytest.mark.parametrize("number", [1, 3, 5])
def test_numbers_of_gpus_that_copies_do_not_divide_leave_them_out(number: int) -> None:
    plan = planned(sections(batch={"global_size": 60, "micro_size": 1}), number=number)
    assert not {"hsdp", "sp", "tp", "fsdp_tp_sp"} & plan.launches.keys()
    assert "fsdp" in plan.launches or number == 1
    assert "hsdp" in planned(sections(batch={"global_size": 60, "micro_size": 1}), number=4).launches


@pytest.mark.parametrize("flags", ["--json", "--trace", "--trace all", "--write new.yaml"])
@pytest.mark.parametrize(
    ("name", "machines", "overrides", "says"),
    [
        ("ddp", "--gpus 1", "", "No launch file in .*configs can run on 1 GPU"),
        ("hsdp", "--gpus 3", "", "No launch file in .*configs can run on 3 GPU"),
        ("ddp", "--gpus 5", "", "global_size 64 is not a multiple of the 5"),
        ("ddp", "--gpus 2 --gpu memory=1,bf16=1", "", "nothing fits"),
    ],
)
def test_nothing_to_recommend(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    machines: str,
    overrides: str,
    says: str,
    flags: str,
) -> None:
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "accelerate_configs" / f"{name}.yaml", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace_launches, "trace_all", lambda *_: [])  # it has tests of its own, and takes long
    words = [*machines.split(), *flags.split(), "--configs", tmp_path / "configs"]
    code, out, err = said(capsys, file, *words)
    assert code == (2 if "No launch file" in says or flags in ("--trace", "--write new.yaml") else 0), err
    assert re.search(says, out + err), out + err
    assert "Traceback" not in err
    assert not (tmp_path / "new.yaml").exists()


def test_host_memory_is_limited_where_it_is_given(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def offloaded(*words: Any) -> dict[str, Any]:
        code, out, _ = said(capsys, file, "--json", *words)
        assert code == 0
        return next(c for c in json.loads(out)["cells"] if (c["launch"], c["kind"]) == ("zero3_offload", "full"))

    candidate = offloaded()
    assert candidate["verdict"] == "fits"
    gib = 8 * candidate["host"] / 2**30
    assert gib > 1
    assert offloaded("--host", gib * 1.001)["verdict"] == "fits"
    small = offloaded("--host", gib * 0.999)
    assert small["verdict"] == "no"
    assert "host memory a machine do not fit" in small["reason"]
    code, _, err = said(capsys, file, "--host", "-1")
    assert code == 2
    assert "--host is -1.0" in err


@pytest.mark.parametrize("config", [SMALL, LLAMA_8B])
def test_a_terminal_of_80_columns_has_each_launch_file_on_one_line(config: dict[str, Any]) -> None:
    plan = planned(sections(model={"config": config}, precision="bf16"))
    shown = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=80, highlight=False, markup=False)
    with shown.capture() as captured:
        plan_report.print_plan(plan, shown)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [tuple(line.split()[:2]) for line in lines if re.search(r" (m?s|h) +[\d,.]+ (s|h)\s*$", line)]
    assert rows == list(plan.times)


def test_what_nobody_said_is_assumed_aloud(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, what in (
        ([], "8 x h100-80gb a machine, since this machine has none and --gpu and --gpus did not say"),
        (["--gpus", 4], "h100-80gb a machine, since this machine has none and --gpu did not say"),
        (["--gpu", "l4-24gb"], "8 x l4-24gb a machine, since this machine has none and --gpus did not say"),
    ):
        assert f"Assumed: {what}. Give" in said(capsys, file, *options)[1]
    assert "Assumed" not in said(capsys, file, "--gpu", "l4-24gb", "--gpus", 1)[1]
    here = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=39.5 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: here.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    machines = planner.machines_of(main.build_parser().parse_args(["plan", str(file)]), LinkSpeeds())
    assert (machines.gpu.name, machines.gpu.memory_gib, machines.gpus, machines.assumed) == ("a100-40gb", 39.5, 2, None)
    here.name = "NVIDIA Something"
    machines = planner.machines_of(main.build_parser().parse_args(["plan", str(file)]), LinkSpeeds())
    assert machines.assumed is not None
    assert "the table of GPUs lacks this machine's NVIDIA Something and --gpu did not say" in machines.assumed


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.97e-5, "19.7 µs"), (0.0126, "12.6 ms"), (5.746, "5.75 s"), (5760.0, "1.6 h"), (9e6, "2,500 h")],
)
def test_times_have_a_unit_that_needs_no_exponent(seconds: float, text: str) -> None:
    assert plan_report._time(seconds) == text


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA A10", None),
    ],
)
def test_a_device_is_known_by_its_own_name_only(device: str, name: str | None) -> None:
    found = gpu_specs.of_device(device)
    assert (found.name if found is not None else None) == name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_config_of_a_stage_alone_is_planned_with_its_defaults(tmp_path: Path, stage: int) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    (tmp_path / "zero.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    recipe = validate_recipe(sections(model={"config": LLAMA_8B}))
    found = planner.make_plan(recipe, Machines(gpu_specs.find_gpu("h100-80gb"), 2, 1, 50.0, 0.4), tmp_path)
    full = {"stage": stage, "reduce_bucket_size": 500_000_000}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": full}))
    again = planner.make_plan(recipe, Machines(gpu_specs.find_gpu("h100-80gb"), 2, 1, 50.0, 0.4), tmp_path)
    assert found.candidates["zero", "full"].peak == again.candidates["zero", "full"].peak > 0
