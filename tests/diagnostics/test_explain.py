"""`finetune explain` says of every value who set it, as a run would see it, and loads no torch for it."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from forkserver import ForkServer
from harness import ROOT, environment
from ranks import Place, exported
from recipe_keys import keys_of
from rich.console import Console

from finetune.cli import main as cli
from finetune.cli.main import main
from finetune.config.provenance import Value, flat, places
from finetune.config.recipe import RECIPE_FIELDS, load_recipe, read_recipe
from finetune.config.recipe_schema import Recipe, Section
from finetune.diagnostics.explain import explain_values, recipe_values, select_values, values_table
from finetune.distributed import device_selection
from finetune.distributed.launch.launch_schema import KEYS, NOT_FROM_FILE, FsdpSection, ParallelismSection
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.utils.errors import BackendError, FinetuneError, RecipeError

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LAUNCH_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ALONE = {"PATH": os.environ["PATH"]}
# Accelerate exports 1e8 of its own accord, of which a worker fails to make a whole number.
VARIABLES = {key.serialization_alias for key in KEYS.values() if key.serialization_alias} - {"FSDP_MIN_NUM_PARAMS"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer) -> Place:
    monkeypatch.chdir(ROOT)
    return Place(tmp_path, fork_server)


def explained(
    recipe: Path, *overrides: str, config: str | Path | None = None, options: dict[str, str] | None = None, **env: str
) -> dict[str, Value]:
    file = f"accelerate_configs/{config}.yaml" if isinstance(config, str) else config and str(config)
    found = explain_values(str(recipe), overrides, file, options or {}, ALONE | env)
    assert len({value.key for value in found}) == len(found)
    return {value.key: value for value in found}


def said(value: Value) -> list[tuple[str, Any]]:
    return [(setting.layer, setting.value) for setting in value.settings]


# ---------------------------------------------------------------- it answers at once


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        [
            "explain",
            "recipes/sample.yaml",
            "optim.lr",
            "optim.lr=1e-4",
            "--config_file",
            "accelerate_configs/fsdp.yaml",
        ],
        ["explain", "recipes/llama_qlora.yaml", "--json", "--config_file", "accelerate_configs/zero3_nvme.yaml"],
    ],
    ids=" ".join,
)
def test_no_torch_is_loaded(words: list[str]) -> None:
    script = f"""
import sys
from finetune.cli.main import main
try:
    main({words!r})
finally:
    print(*sys.modules, file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    loaded = ended.stderr.split()
    assert "finetune.cli.main" in loaded
    # NumPy, which kinds of rows import, takes a tenth of a second.
    assert not {"torch", "accelerate", "transformers", "datasets", "deepspeed"} & set(loaded)


# ---------------------------------------------------------------- the recipe


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_value_of_a_recipe_with_its_place(file: Path) -> None:
    effective, tree = flat(load_recipe(file).model_dump(mode="json")), flat(read_recipe(file))
    found = {value.key: value for value in recipe_values(load_recipe(file), str(file), (), [read_recipe(file)], {})}
    sections = {key for key in found if key not in effective}
    assert sections <= {"lora", "chat", "sample", "preference", "distillation", "embedding"}
    assert set(effective) == set(found) - sections
    lines = file.read_text().splitlines()
    for key, value in effective.items():
        *before, last = found[key].settings
        assert last.value == value
        assert last.layer == ("recipe file" if key in tree else "default"), key
        assert found[key].meaning
        if last.layer == "recipe file":
            line = lines[int(last.place.rpartition(":")[2]) - 1]
            assert key.rsplit(".", 1)[-1] in line, (key, line)
        assert all(setting.layer == "default" for setting in before)


def test_layers_lie_on_each_other(place: Place) -> None:
    recipe = place.recipe(optim={"lr": 0.5, "args": {"eps": 1.0}}, sample={"prompt": "A"})
    found = explained(
        recipe, "optim.lr=1", "optim.lr=2e-3", "optim.args.betas.0=0.8", "sample=null", "chat={}", "data.packing=padded"
    )
    assert said(found["optim.lr"]) == [
        ("default", 3e-4),
        ("recipe file", 0.5),
        ("command line", 1),
        ("command line", 2e-3),
    ]
    assert said(found["optim.args.eps"]) == [("recipe file", 1.0)]
    assert said(found["optim.args.betas"]) == [("command line", [0.8])]
    assert said(found["sample"]) == [("default", None), ("recipe file", "given"), ("command line", None)]
    assert said(found["chat"]) == [("default", None), ("command line", "given")]
    assert said(found["chat.train_on"]) == [("default", "assistant")]


def test_a_list_from_the_command_line_leaves_nothing_of_the_file(place: Place) -> None:
    recipe = place.recipe(data={"train": [{"path": "a.txt", "weight": 2}]})
    found = explained(recipe, "data.train=[{path: b.txt}]")
    assert said(found["data.train.0.path"])[-2:] == [("recipe file", "a.txt"), ("command line", "b.txt")]
    # The file's weight fell with its list: by the command line, the default holds.
    assert said(found["data.train.0.weight"]) == [("default", 1.0), ("recipe file", 2), ("command line", 1.0)]


def test_the_short_form_of_resume(place: Place) -> None:
    found = explained(place.recipe(resume={"mode": "never", "allow": ["data"]}), "resume=must")
    assert said(found["resume.mode"]) == [("default", "auto"), ("recipe file", "never"), ("command line", "must")]
    assert said(found["resume.allow"]) == [("default", []), ("recipe file", ["data"])]


def test_lines_of_merged_keys(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("base: &base\n  x: 1\n  y: 1\nover:\n  <<: *base\n  y: 2\nlist:\n  - z: 3\n")
    found = places(file)
    assert (found["over.x"], found["over.y"], found["list.0.z"]) == (2, 6, 8)
    file.write_text("a: [")
    assert places(file) == {}


def test_every_number_has_a_unit() -> None:
    schema = Recipe.model_json_schema()
    numbers = set()
    for name, section in {**schema["$defs"], "Recipe": schema}.items():
        for key, facts in section["properties"].items():
            parts = [facts, *facts.get("anyOf", [])]
            inside = [part.get(name) for part in parts for name in ("items", "additionalProperties")]
            kinds = [*parts, *(kind for kind in inside if isinstance(kind, dict))]
            if {"integer", "number"} & {kind.get("type") for kind in kinds}:
                numbers.add((name, key))
    sections = {"Recipe": Recipe, **{found.__name__: found for found in Section.__subclasses__()}}
    with_unit = {
        (name, key)
        for name, section in sections.items()
        for key, field in section.model_fields.items()
        if any(isinstance(text, str) for text in field.metadata)
    }
    assert numbers == with_unit


def test_every_key_is_known() -> None:
    known = {re.sub(r"data\.\w+\.0\.", "source.", key) for key in RECIPE_FIELDS}
    assert {key for key in keys_of(Recipe, "") if "." in key} <= known


# ---------------------------------------------------------------- the launch file


@pytest.mark.parametrize("file", [f for f in LAUNCH_FILES if f.stem != "single"], ids=lambda file: file.stem)
def test_workers_hear_what_is_foreseen(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    foreseen = predict_environment(f"accelerate_configs/{file.name}", {}, ALONE)
    read = VARIABLES | {f"ACCELERATE_USE_{name}" for name in ("FSDP", "DEEPSPEED", "CPU", "PARALLELISM_CONFIG")}
    truly = {key: value for key, value in exported(file).items() if key in read}
    ours = {key: value for key, value in foreseen.exported.items() if not key.endswith(("WORLD_SIZE", "LOCAL_RANK"))}
    assert ours == truly
    assert foreseen.launch.num_processes == yaml.safe_load(file.read_text())["num_processes"]


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("fsdp", {"fsdp_config": {"fsdp_reshard_after_forward": False, "fsdp_offload_params": True}}),
        ("fsdp", {"mixed_precision": "bf16", "debug": True, "gpu_ids": "0,1"}),
        (
            "fsdp",
            {
                "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block"},
                "enable_cpu_affinity": True,
                "debug": True,
            },
        ),
        ("fsdp", {"fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 5}}),
        ("zero2", {"deepspeed_config": {"zero3_init_flag": True}}),
        ("zero3", {"deepspeed_config": {"deepspeed_moe_layer_cls_names": "Experts"}}),
        (
            "hsdp",
            {"parallelism_config": {"parallelism_config_dp_shard_size": 4, "parallelism_config_dp_replicate_size": 1}},
        ),
    ],
)
def test_workers_hear_what_is_foreseen_of_other_values(place: Place, base: str, changes: dict[str, Any]) -> None:
    file = place.launch_file(base, **changes)
    truly, ours = exported(file), predict_environment(str(file), {}, ALONE).exported
    for name in VARIABLES | ours.keys() - {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"}:
        assert ours.get(name) == truly.get(name), name


def test_the_keys_are_those_of_accelerate() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    defaults = vars(launch_command_parser().parse_args(["script.py"]))
    # It completes its options by the file, but only those that are None by themselves.
    deaf = {name for name in ClusterConfig.__dataclass_fields__ if defaults.get(name) is not None}
    assert set(NOT_FROM_FILE) == deaf & KEYS.keys()
    for section in (FsdpSection, ParallelismSection):
        for name, key in section.model_fields.items():
            if name not in ("fsdp_sync_each_batch", "fsdp_min_num_params"):
                assert str(key.default).lower() == str(defaults[name]).lower(), name
    for name, key in KEYS.items():
        assert key.description, name


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero3_nvme"])
def test_every_value_of_a_launch(place: Place, name: str) -> None:
    found = explained(place.recipe(batch={"global_size": 8}), config=name)
    written = predict_environment(f"accelerate_configs/{name}.yaml", {}, ALONE).written
    lines = (ROOT / "accelerate_configs" / f"{name}.yaml").read_text().splitlines()
    for key, value in written.items():
        assert said(found[key])[-1] == ("launch file", value)
        assert key.rsplit(".", 1)[-1] in lines[int(found[key].settings[-1].place.rpartition(":")[2]) - 1]
    assert found["backend"].settings[-1].value == name.removesuffix("_nvme")
    assert found["accumulation"].settings[-1].value == 8 // (2 * written["num_processes"])
    assert all(value.meaning for value in found.values())


def test_what_deepspeed_leaves_to_the_recipe(place: Place) -> None:
    found = explained(place.recipe(precision="bf16", optim={"clip_norm": None}), config="zero2")
    assert said(found["train_batch_size"]) == [("ds_config", "auto"), ("derived", 4)]
    assert found["train_batch_size"].settings[-1].place == "the recipe's batch.global_size"
    assert said(found["gradient_clipping"]) == [("ds_config", "auto"), ("derived", 0.0)]
    assert said(found["torch_autocast.enabled"]) == [("derived", True)]
    assert said(found["zero_optimization.stage"]) == [("ds_config", 2)]
    assert found["zero_optimization.stage"].settings[-1].place == "ds_configs/zero2.json:17"


def test_options_of_the_launcher(place: Place) -> None:
    found = explained(place.recipe(batch={"global_size": 8}), config="ddp", options={"num_processes": "4"})
    assert said(found["num_processes"]) == [("launch file", 2), ("command line", 4)]
    assert said(found["accumulation"]) == [("derived", 1)]


@pytest.mark.parametrize(
    ("config", "processes", "ranks"), [("ddp", 2, 2), ("sp", 4, 2), ("fsdp_tp", 4, 2), ("fsdp_tp_sp", 8, 2)]
)
def test_accumulation_counts_ranks_that_read_rows(place: Place, config: str, processes: int, ranks: int) -> None:
    options = {"num_processes": str(processes)}
    found = explained(place.recipe(batch={"global_size": 32, "micro_size": 8}), config=config, options=options)
    (setting,) = found["accumulation"].settings
    assert setting.place == f"32 / (8 x {ranks})"
    assert setting.value == 32 // (8 * ranks)
    groups = "processes" if ranks == processes else f"groups of {processes // ranks} processes"
    with pytest.raises(RecipeError, match=f"31 is not a multiple of the {ranks} {groups} that share it"):
        explained(place.recipe(batch={"global_size": 31, "micro_size": 8}), config=config, options=options)
    (setting,) = explained(place.recipe(batch={"global_size": 32, "micro_size": 30}), config=config, options=options)[
        "accumulation"
    ].settings
    assert setting.place == f"32 / (16 x {ranks})"


def test_an_equal_value_overrides_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = place.recipe(optim={"lr": 3e-4, "weight_decay": 0.5})  # the default, and another one
    words = ["explain", str(recipe), "optim.weight_decay=0.1"]  # the default again
    assert main([*words, "--json", "optim.lr", "optim.weight_decay"]) == 0
    shown = {row["key"]: row["overrode"] for row in json.loads(capsys.readouterr().out)}
    assert shown["optim.lr"] == []
    assert [setting["value"] for setting in shown["optim.weight_decay"]] == [0.5]
    assert main([*words, "optim.lr"]) == 0
    assert "instead of" not in capsys.readouterr().out
    assert main([*words, "optim"]) == 0
    rows = {line.split()[0]: line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "instead of" not in rows["optim.lr"]
    assert rows["optim.weight_decay"].endswith("instead of 0.5 (recipe file)")


def test_the_environment_and_the_launch_file(place: Place) -> None:
    found = explained(
        place.recipe(),
        config="fsdp",
        FSDP_OFFLOAD_PARAMS="true",
        ACCELERATE_MIXED_PRECISION="bf16",
        CUDA_VISIBLE_DEVICES="",
        NCCL_DEBUG="INFO",
        OMP_NUM_THREADS="3",
    )
    # What the launcher exports covers what was there; the rest reaches workers.
    assert said(found["fsdp_config.fsdp_offload_params"])[-2:] == [("environment", "true"), ("launch file", False)]
    assert said(found["mixed_precision"]) == [("default", "no"), ("environment", "bf16"), ("default", "no")]
    assert said(found["gpu_ids"]) == [("default", "all"), ("environment", "")]
    assert said(found["NCCL_DEBUG"]) == [("environment", "INFO")]
    if not device_selection.visible_gpus():
        assert said(found["num_threads"]) == [("environment", "3")]


def test_what_accelerate_does_not_take_from_a_file(place: Place) -> None:
    file = place.launch_file("ddp", same_network=True)
    said_last = said(explained(place.recipe(), config=file)["same_network"])
    assert said_last == [("default", False), ("launch file", True), ("default", False)]


# ---------------------------------------------------------------- conflicts


@pytest.mark.parametrize(
    ("base", "changes", "env", "says"),
    [
        ("fsdp", {"use_cpu": True}, {}, "also for `use_cpu`"),
        ("single", {"num_processes": 2}, {}, "distributed_type 'NO'"),
        ("ddp", {"mixed_precision": "bf16"}, {}, "says mixed_precision: bf16"),
        ("ddp", {"num_processes": 3}, {}, "is not a multiple of"),
        ("ddp", {"num_processes": 3, "num_machines": 2}, {}, "num_processes is 3 over num_machines 2"),
        ("ddp", {"num_procesess": 3}, {}, "num_procesess: unknown key, did you mean 'num_processes'"),
        ("ddp", {"distributed_type": "MULTI_XPU"}, {}, "which is not offered"),
        ("ddp", {"compute_environment": "AMAZON_SAGEMAKER"}, {}, "only LOCAL_MACHINE"),
        ("ddp", {"num_processes": None}, {}, "names no num_processes"),
        ("fsdp", {"fsdp_config": {"fsdp_version": 1}}, {}, "FSDP version 1"),
        ("fsdp", {"fsdp_config": {"fsdp_activation_checkpointing": True}}, {}, "another mask"),
        ("hsdp", {"num_processes": 2}, {}, "takes 4 processes"),
        ("zero2", {"deepspeed_config": {"deepspeed_config_file": "nothing.json"}}, {}, "there is none in"),
        ("zero2", {"deepspeed_config": {"deepspeed_config_file": None}}, {}, "without a deepspeed_config_file"),
        ("ddp", {}, {"ACCELERATE_USE_CPU": "1"}, "ACCELERATE_USE_CPU is set"),
        ("ddp", {}, {"ACCELERATE_USE_FSDP": "1"}, "ACCELERATE_USE_FSDP is '1' in the environment"),
        ("ddp", {}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"}, "ACCUMULATION_STEPS is 7 in the environment"),
    ],
)
def test_conflicts_are_errors(place: Place, base: str, changes: dict[str, Any], env: dict[str, str], says: str) -> None:
    with pytest.raises(FinetuneError, match=says):
        explained(place.recipe(), config=place.launch_file(base, **changes), **env)


def test_other_conflicts(place: Place) -> None:
    with pytest.raises(BackendError, match=r"json says gradient_clipping: 3, the recipe's optim.clip_norm makes it 1"):
        explained(place.recipe(), config=place.ds_launch_file({"gradient_clipping": 3}))
    with pytest.raises(RecipeError, match="unknown key, did you mean 'lr'"):
        explained(place.recipe(), "optim.lrr=1")
    with pytest.raises(BackendError, match="no LOCAL_RANK"):
        explained(place.recipe(), WORLD_SIZE="2")
    with pytest.raises(BackendError, match=r"Cannot read the launch file nowhere\.yaml"):
        explained(place.recipe(), config=Path("nowhere.yaml"))
    with pytest.raises(BackendError, match="--num_processes takes a whole number from 1, got two"):
        explained(place.recipe(), config="ddp", options={"num_processes": "two"})
    with pytest.raises(BackendError, match="name its file by --config_file"):
        explained(place.recipe(), options={"num_processes": "2"})


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("lr", "did you mean optim.lr?"),
        ("optim.larning_rate", "did you mean 'optim"),
        ("lora.rnak", "did you mean 'lora.rank'"),
        ("num_proceses", "did you mean 'num_processes'"),
        ("xyzzy", "There is no key 'xyzzy'."),
    ],
)
def test_an_unknown_key_says_the_nearest(place: Place, key: str, near: str) -> None:
    values = list(explained(place.recipe(), config="ddp").values())
    with pytest.raises(RecipeError) as raised:
        select_values(values, key)
    assert near in str(raised.value)


def test_a_key_is_a_page(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", str(place.recipe(optim={"lr": 0.5})), "optim.lr=0.25"]
    assert main([*words, "optim.lr"]) == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown[:2] == ["optim.lr = 0.25", "  set by      command line: optim.lr=0.25"]
    assert shown[2].startswith("  instead of  0.5, recipe file: ")
    assert shown[3:5] == ["              0.0003, default", "  unit        rate"]
    assert shown[5].startswith("  meaning     Peak learning rate")
    assert main([*words, "lora.rank"]) == 0
    assert "lora.rank is not in force" in capsys.readouterr().out
    assert main([*words, "optim"]) == 0
    rows = {line.split()[0]: line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["optim.lr"].endswith("instead of 0.5 (recipe file), 0.0003 (default)")
    assert "null [norm]" in rows["optim.clip_norm"] or "1.0 [norm]" in rows["optim.clip_norm"]


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_fits_its_terminal(place: Place, width: int) -> None:
    values = list(explained(place.recipe(optim={"lr": 0.5}), config="fsdp").values())
    shown = Console(file=io.StringIO(), width=width, markup=False)
    with shown.capture() as captured:
        shown.print(values_table(values, width))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    keys = [value.key for value in values if value.settings]
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in keys] == keys
    lr = next(line for line in lines if line.startswith("  optim.lr "))
    assert re.search(r"0\.5( \[rate\])? +\S+\.yaml:\d+, instead of 0\.0003", lr)
    # The file is said once.
    assert sum(str(place.folder) in line for line in lines) <= 1
    assert ("[rate]" in lr) == (width > 120)


def test_a_section_that_is_no_key(place: Place) -> None:
    values = list(explained(place.recipe()).values())
    assert {value.key for value in select_values(values, "derived")} >= {"backend", "accumulation"}


def test_the_command(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", str(place.recipe()), "optim.lr=0.25", "--config_file", "accelerate_configs/zero1.yaml"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "optim.lr" in shown
    assert "optim.weight_decay" not in shown
    assert main([*words, "--all"]) == 0
    assert "optim.weight_decay" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["optim.lr"]["layer"] == "command line"
    assert rows["optim.lr"]["overrode"][0] == {"layer": "default", "place": "", "value": 3e-4}
    assert rows["train_batch_size"]["unit"] == "rows"
    assert main(["explain", str(place.recipe()), "optim.rl"]) == 2
    assert "did you mean 'optim.lr'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["launch", "explain", "doctor", "data", "show", "parity", "plan"])
def test_overrides_may_stand_anywhere(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, between and behind options, by every command that takes them."""
    option = {
        "doctor": ["--num_processes", "2"],
        "data": ["--show", "3"],
        "plan": ["--gpus", "2"],
        "parity": ["--to", "x"],
    }
    options = option.get(verb, ["--config_file", "ddp"] if verb in ("launch", "explain") else [])
    options = ["--config_file", "ddp", *options] if verb == "doctor" else options
    recipe = ["--recipe", "r.yaml"] if verb == "doctor" else ["r.yaml"]
    for words in (
        [*recipe, "a.b=1", *options, "c.d=2"],
        [*recipe, *options, "a.b=1", "c.d=2"],
        [*options, *recipe, "a.b=1", "c.d=2"],
    ):
        parsed = cli.parse_arguments(cli.build_parser(), [verb, *words])
        assert (parsed.words if verb == "explain" else parsed.overrides) == ["a.b=1", "c.d=2"], words
    with pytest.raises(SystemExit):
        cli.parse_arguments(cli.build_parser(), [verb, *recipe, *options, "a.b=1", "--nonsense"])


def test_the_driver_sees_what_torch_sees() -> None:
    assert device_selection.driver_gpus() == device_selection.visible_gpus()
