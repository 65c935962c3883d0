"""What a launch file or a DeepSpeed config cannot say is refused by every command, before anything starts."""

import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from external_commands import require_ops
from harness import ROOT, command, environment, run
from packaging.version import Version
from ranks import MODEL, Here, Place, assert_said, exported, needed_ops

from finetune.cli import main
from finetune.config.recipe import load_recipe
from finetune.config.recipe_schema import GuardSection
from finetune.diagnostics import explain
from finetune.diagnostics.doctor import doctor, machine_checks
from finetune.diagnostics.parity import launch_runs
from finetune.distributed import gpu_specs
from finetune.distributed.launch import deepspeed_file, launcher
from finetune.distributed.launch.launch_config import launch_of_environment, read_launch
from finetune.distributed.launch.launch_file import read_launch_file
from finetune.distributed.launch.launch_schema import (
    FROM_COMMAND_LINE,
    SECTIONS,
    DeepspeedSection,
    FsdpSection,
    LaunchFile,
)
from finetune.distributed.launch.predicted_environment import elastic_launches, launch_of_file, predict_environment
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.strategies.deepspeed_config import fit_to_model
from finetune.monitoring.metrics import Reporter
from finetune.monitoring.trackers import Trackers
from finetune.planning.launch_candidates import assess_candidate, setting_of
from finetune.planning.model_shapes import Variant, read_variants
from finetune.training import entry_point
from finetune.utils import exit_codes, orphan_watch
from finetune.utils.errors import BackendError, RecipeError

ALONE = {"PATH": os.environ["PATH"]}

# ---------------------------------------------------------------- the known keys are those of the libraries


def test_every_key_of_accelerate_is_read_or_refused_with_the_reason() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    known = {*LaunchFile.model_fields, *LaunchFile.not_read}
    assert known == {*ClusterConfig.__dataclass_fields__, *FROM_COMMAND_LINE}
    options = {action.dest for action in launch_command_parser()._actions}
    for name, section in SECTIONS.items():
        begins = ("deepspeed_", "zero3_") if name == "deepspeed_config" else (name.removesuffix("config"),)
        assert {option for option in options if option.startswith(begins)} <= {*section.model_fields, *section.not_read}
        known |= {*section.model_fields, *section.not_read}
    others = {"fsdp_sync_each_batch", "parallelism_config_pp_size", "nnodes"}
    assert known - options - {*ClusterConfig.__dataclass_fields__} == others


def test_keys_of_fsdp_1_are_those_that_accelerate_converts() -> None:
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING

    converted = {old for old, new in ARGUMENT_KEY_MAPPING.items() if old != new}
    assert set(FsdpSection.not_read) == {*converted, "fsdp_activation_checkpointing_offload"}


def test_keys_that_accelerate_refuses_beside_a_deepspeed_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DeepSpeedPlugin

    for key in (*DeepspeedSection.not_read, "zero3_init_flag"):
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{key}")
        try:
            DeepSpeedPlugin._deepspeed_config_checks(SimpleNamespace())
        except ValueError:
            assert key in DeepspeedSection.not_read
        else:
            assert key == "zero3_init_flag"


def test_sections_are_the_models_of_deepspeed() -> None:
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, offload_config

    for section, model in {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "bf16": precision_config.DeepSpeedBF16Config,
        "fp16": precision_config.DeepSpeedFP16Config,
    }.items():
        fields = {field.alias or name for name, field in model.model_fields.items()}
        # DeepSpeed 0.19.7 still has the key of ZeRO++'s compressed reduction, which changes gradients.
        assert set(deepspeed_file.known_keys(section)) == fields - {"zeropp_loco_param"}, section


def test_keys_that_deepspeed_acts_on_are_read_or_refused(place: Place) -> None:
    """Of its own list of keys each is read here, passed on because it changes no number, or refused with a reason."""
    from deepspeed.runtime import config, constants

    for key, reason in deepspeed_file.TABLE["refused"].items():
        section, _, name = key.rpartition(".")
        assert name in deepspeed_file.known_keys(section), key
        assert name not in deepspeed_file.TABLE["passed_on"].get(section, "").split(), key
        for value, acts in ((2, True), (deepspeed_file.TABLE["defaults"].get(key, False), False)):
            tree: dict[str, Any] = {"zero_optimization": {"stage": 2}}
            below = tree
            for parent in section.split(".") if section else ():
                below = below.setdefault(parent, {})
            below[name] = value
            file = str(place.ds_launch_file(tree))
            with pytest.raises(BackendError, match=re.escape(reason)) if acts else nullcontext():
                predict_environment(file, {}, ALONE)
    assert deepspeed_file.TABLE["defaults"]["gradient_allreduce_op"] == constants.GRADIENT_ALLREDUCE_OP_DEFAULT
    assert constants.MANAGED_GRADIENT_ACCUMULATION_DEFAULT
    if hasattr(config, "_REMOVED_ZERO_CONFIG_KEYS"):
        removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
        removed |= {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
        assert removed == deepspeed_file.TABLE["removed"].keys()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, r"tensor_parallel: is not read here: .*fsdp_tp\.yaml.* Take it out"),
        ({"autotuning": {"enabled": True, "fast": False}}, "autotuning: is not read here: .*other batches"),
        ({"activation_checkpointing": {"partition_activations": True}}, "set model.gradient_checkpointing in the rec"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, r"zero_hpz_partition_size: .*hsdp\.yaml"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention: DeepSpeed has removed it, .*model.attention in"),
        ({"compression_training": {}}, "compression_training: DeepSpeed has removed it, so take it out"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "mics_shard_size: DeepSpeed has removed it"),
        # As templates write what is off.
        ({"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}}, None),
        ({"autotuning": {"enabled": False, "fast": True}, "tensor_parallel": {"autotp_size": 1}}, None),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_weights": False}}, None),
    ],
)
def test_what_deepspeed_would_do_beside_the_recipe(place: Place, changes: dict[str, Any], says: str | None) -> None:
    file = str(place.ds_launch_file(changes))
    with pytest.raises(BackendError, match=says) if says else nullcontext():
        predict_environment(file, {}, ALONE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": "auto"}}},
            "the same in the recipe: optim: {name: AdamW, lr: 2.0e-05, args: {betas: [0.9, 0.95]}}",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}},
            "the same in the recipe: schedule: {name: linear, warmup_steps: 5, floor: 0.0}. ",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001}}},
            "schedule: {name: constant}, and optim.lr: 0.001 (whose warm-up is linear, not logarithmic). ",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "'scheduler', which the recipe's optim and schedule decide. "),
    ],
)
def test_what_the_recipe_says_instead_of_deepspeed(place: Place, changes: dict[str, Any], says: str) -> None:
    foreseen = predict_environment(str(place.ds_launch_file(changes)), {}, ALONE)
    with pytest.raises(BackendError, match=re.escape(says)):
        resolve_config(load_recipe(place.recipe()), foreseen.launch, foreseen.env)
    if (written := re.search(r"(optim|schedule): (\{.*\})", says)) is not None:
        load_recipe(place.recipe(**{written[1]: yaml.safe_load(written[2])}))


class Reading(dict[str, Any]):
    """Notes the keys that are asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return _Keys(self)

    def __copy__(self) -> "Reading":
        return self


class _Keys:
    def __init__(self, of: Reading) -> None:
        self._of = of

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def __iter__(self) -> Any:
        return iter(dict.keys(self._of))


def test_other_keys_are_those_that_deepspeed_reads() -> None:
    import deepspeed
    from deepspeed.runtime import config

    known = set(deepspeed_file.known_keys(""))
    models = {"zero_optimization", "bf16", "fp16"}
    below = {name: Reading({}) for name in known - models if deepspeed_file.known_keys(name)}
    below["optimizer"].update(type="Adam", params={})
    below["scheduler"].update(type="WarmupLR", params={})
    whole = Reading({"train_batch_size": 1, "zero_optimization": {"stage": 3}, **below})
    config.DeepSpeedConfig(whole)
    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS, "bfloat16"}
    if Version(deepspeed.__version__) < Version("0.19.8"):
        # It still reads what later ones have removed, and lacks one of theirs.
        assert known - (whole.asked - removed) == {"disable_python_gc"}
        return
    assert whole.asked - removed == known
    for name, section in below.items():
        assert section.asked == set(deepspeed_file.known_keys(name)), name


@pytest.mark.parametrize("section", ["comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"])
def test_deepspeed_refuses_unknown_keys_of_other_sections(place: Place, section: str) -> None:
    foreseen = predict_environment(str(place.ds_launch_file({section: {"enabld": True}})), {}, ALONE)
    with pytest.raises(BackendError, match="enabld: Extra inputs are not permitted"):
        resolve_config(load_recipe(place.recipe()), foreseen.launch, foreseen.env)


# ---------------------------------------------------------------- what is refused, by whom

MISSPELT = {"fsdp_config": {"fsdp_reshard_after_forwrd": False}}
SAYS = (
    r"launch\.yaml:\d+: fsdp_config\.fsdp_reshard_after_forwrd: unknown key, "
    "did you mean 'fsdp_reshard_after_forward'"
)


@pytest.mark.parametrize(
    ("base", "changes", "says"),
    [
        ("fsdp", MISSPELT, SAYS),
        ("fsdp", {"fsdp_config": {"reshard_after_forwrd": False}}, "did you mean 'fsdp_reshard_after_forward'"),
        ("fsdp", {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, "fsdp_reshard_after_forward says it"),
        ("fsdp", {"fsdp_config": {"fsdp_reshard_after_forward": "flase"}}, "must be true or false, .* mean 'false'"),
        ("fsdp", {"fsdp_config": {"fsdp_version": "two"}}, "fsdp_version: must be a number from 1, got 'two'"),
        ("fsdp", {"fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASD"}}, "mean 'TRANSFORMER_BASED_WRAP'"),
        ("ddp", {"machine_rank": "first"}, "machine_rank: must be a number from 0, got 'first'"),
        ("fsdp", {"fsdp_config": {"num_processes": 4}}, "fsdp_num_processes: unknown key"),
        (
            "fsdp",
            {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            "dynamo_config: is not read here: the recipe's model.compile says it",
        ),
        ("fsdp", {"deepspeed_config": {"zero_stage": 2}}, "distributed_type FSDP does not read this section"),
        ("fsdp", {"max_restarts": 2}, "max_restarts: Accelerate does not take it from the file; give --max_restarts"),
        ("fsdp", {"nnodes": "1:2"}, "nnodes: Accelerate does not take it from the file; give --nnodes"),
        ("ddp", {"tpu_name": "x"}, "tpu_name: is not read here: it is for TPUs"),
        ("ddp", {"parallelism_config": {"parallelism_config_sp_backend": "deepspeed"}}, "takes sp_size alone"),
        ("ddp", {"parallelism_config": {"parallelism_config_sp_siz": 2}}, "did you mean 'parallelism_config_sp_size'"),
        ("ddp", MISSPELT, "MULTI_GPU does not read this section"),
        ("single", MISSPELT, "NO does not read this section"),
        ("hsdp", {"parallelism_config": {"parallelism_config_pp_size": 2}}, "pipeline parallelism is not offered"),
        ("hsdp", {"parallelism_config": {"dp_shard_size": 2}}, "did you mean 'parallelism_config_dp_shard_size'"),
        ("zero2", {"deepspeed_config": {"zero3_init_flg": True}}, "did you mean 'zero3_init_flag'"),
        ("zero2", {"deepspeed_config": {"zero_stage": 3}}, "zero_optimization.stage of the DeepSpeed config says it"),
        ("zero2", {"deepspeed_config": {"gradient_accumulation_steps": 2}}, "the recipe's batch decides"),
    ],
)
def test_keys_and_values_that_nothing_would_read(place: Place, base: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BackendError, match=says):
        read_launch_file(str(place.launch_file(base, **changes)))


@pytest.mark.parametrize(
    ("base", "text", "says"),
    [
        ("ddp", 'num_processes: "2"', "num_processes: must be a number from 1, got '2', .* take its quotes off"),
        ("ddp", "num_processes: 0", "num_processes: must be a number from 1, got 0"),
        ("ddp", "num_processes: 2.0", "num_processes: must be a number from 1, got 2.0"),
        ("ddp", "num_processes: true", "num_processes: must be a number from 1, got True"),
        ("ddp", "num_processes: [2]", r"num_processes: must be a number from 1, got \[2\]"),
        ("ddp", "num_machines: null", "num_machines: must be a number from 1, got null"),
        ("ddp", "main_process_port: '29500'", "main_process_port: must be a number from 0, .* quotes off"),
        ("ddp", "use_cpu: 'false'", "use_cpu: must be true or false, got 'false', which is a text: take its quotes"),
        ("ddp", "debug: 'no'", "debug: must be true or false, got 'no', which is a text"),
        ("ddp", "mixed_precision: no", r"mixed_precision: must be a text, got False \(which YAML makes of yes, no"),
        ("ddp", "gpu_ids: 0", "gpu_ids: must be a text, got 0; put it in quotes"),
        ("ddp", "gpu_ids: [0, 1]", r"gpu_ids: must be a text, got \[0, 1\]"),
        ("ddp", "distributed_type: NO", "distributed_type: false, which is what YAML makes of NO without quotes"),
        ("fsdp", "fsdp_config: {fsdp_version: '2'}", "fsdp_version: must be a number from 1, got '2', .* quotes off"),
        ("fsdp", "fsdp_config: {version: null}", "fsdp_version: must be a number from 1, got null"),
        ("fsdp", "fsdp_config: {fsdp_offload_params: null}", "fsdp_offload_params: must be true or false, got null"),
        ("fsdp", "fsdp_config: {fsdp_reshard_after_forward: 1}", "must be true or false, got 1"),
        ("hsdp", "parallelism_config: {parallelism_config_tp_size: '1'}", "tp_size: must be a number from 1, got '1'"),
        ("hsdp", "parallelism_config: {parallelism_config_tp_size: 0}", "tp_size: must be a number from 1, got 0"),
        ("zero3", "deepspeed_config: {zero3_init_flag: 'true'}", "zero3_init_flag: must be true or false, got 'true'"),
    ],
)
def test_values_of_another_type(place: Place, base: str, text: str, says: str) -> None:
    """Accelerate takes them as YAML makes them: `2` in quotes is no number, and `false` in quotes is true."""
    with pytest.raises(BackendError, match=says):
        read_launch_file(str(place.launch_file(base, **yaml.safe_load(text))))


def test_what_accelerate_config_writes_is_read(place: Place) -> None:
    """The values of another type that it writes itself, and those that may be null."""
    nulls = dict.fromkeys(("main_process_ip", "main_process_port", "gpu_ids", "use_cpu", "mixed_precision", "tpu_name"))
    file = str(place.launch_file("fsdp", downcast_bf16="no", **nulls))
    assert predict_environment(file, {}, ALONE).launch.kind == "fsdp"


TWO = {"num_machines": 2, "num_processes": 4, "main_process_ip": "10.0.0.1", "main_process_port": 29500}


@pytest.mark.parametrize(
    ("base", "keys", "options", "says"),
    [
        ("ddp", {**TWO, "machine_rank": 2}, {}, "machine_rank is 2, and num_machines is 2: .* from 0 to 1"),
        ("fsdp", TWO, {"machine_rank": "7"}, "machine_rank is 7, and num_machines is 2"),
        ("ddp", {"machine_rank": 1}, {}, "machine_rank is 1, and num_machines is 1: ranks are from 0 to 0"),
        ("fsdp", {**TWO, "num_processes": 3}, {}, "num_processes is 3 over num_machines 2"),
        ("ddp", TWO, {"num_processes": "5"}, "num_processes is 5 over num_machines 2"),
        ("ddp", {**TWO, "num_processes": 1}, {}, "num_processes is 1 over num_machines 2"),
        ("single", {"num_machines": 2}, {}, "num_machines is 2, and distributed_type 'NO' starts one process"),
        ("ddp", {**TWO, "main_process_ip": None}, {}, "num_machines is 2, and main_process_ip is missing"),
        ("zero3", TWO, {}, "deepspeed_config.deepspeed_multinode_launcher is missing, .* num_machines is 2: "),
        ("ddp", {**TWO, "main_process_port": 0}, {}, "main_process_port is 0, any that is free"),
        ("ddp", TWO, {"main_process_port": "0"}, "main_process_port is 0, any that is free"),
        ("ddp", {}, {"main_process_port": "65536"}, "main_process_port is 65536, and ports end at 65535"),
        ("ddp", {}, {"num_processes": "0"}, "--num_processes takes a whole number from 1, got 0"),
        ("ddp", {"gpu_ids": "0"}, {}, "gpu_ids is 0, and 2 processes run on a machine"),
        ("hsdp", {"num_processes": 6}, {}, "2 copies of 2 shards, .* takes 4 processes, but 6 run"),
        ("fsdp_tp", {"num_processes": 3}, {}, "takes 2 processes, but 3 run"),
    ],
)
def test_numbers_that_contradict_each_other(
    place: Place,
    here: Here,
    capsys: pytest.CaptureFixture[str],
    base: str,
    keys: dict[str, Any],
    options: dict[str, str],
    says: str,
) -> None:
    """By every command that takes a launch file, before anything starts: some would wait for others for ever."""
    file, recipe = str(place.launch_file(base, **keys)), str(place.recipe())
    here.monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    words = [f"--{name}={value}" for name, value in options.items()]
    for command_line in (["launch", recipe], ["launch", recipe, "--dry-run"], ["explain", recipe]):
        assert main.main([*command_line, "--config_file", file, *words]) == 2
        said = capsys.readouterr().err
        assert re.search(says, " ".join(said.split())), said
    _, (finding,) = doctor.read_request(None, (), file, options, ALONE)
    assert re.search(says, finding.found)
    named = re.match(r"(\w+) is ", says)
    if named and named[1] not in options:
        line = Path(file).read_text().splitlines()[int(re.search(r"launch\.yaml:(\d+): ", finding.found)[1]) - 1]
        assert line.startswith(f"{named[1]}:")


def test_numbers_that_agree(place: Place) -> None:
    for rank in ("0", "1"):
        file = str(place.launch_file("ddp", **TWO))
        found = predict_environment(file, {"machine_rank": rank}, ALONE)
        assert (found.launch.num_processes, found.local) == (4, 2)
    assert predict_environment(str(place.launch_file("ddp", gpu_ids="2,3")), {}, ALONE).local == 2


@pytest.mark.parametrize(
    ("base", "env", "says"),
    [
        ("ddp", {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP is 'true' .*launch.yaml does not ask for"),
        ("fsdp", {"ACCELERATE_USE_DEEPSPEED": "1"}, "ACCELERATE_USE_DEEPSPEED is '1' .* `unset ACCELERATE_USE_DEEPSP"),
        ("single", {"ACCELERATE_USE_MEGATRON_LM": "yes"}, "ACCELERATE_USE_MEGATRON_LM is 'yes' in the environment"),
        ("ddp", {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}, "USE_PARALLELISM"),
        ("zero1", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "`unset ACCELERATE_DYNAMO_BACKEND`"),
        ("ddp", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}, "`unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS`"),
        (
            "fsdp",
            {"FSDP_STATE_DICT_TYPE": "SHARDED"},
            "FSDP_STATE_DICT_TYPE is 'SHARDED' .* should be 'SHARDED_STATE_DICT' or",
        ),
        ("ddp", {"OMP_NUM_THREADS": ""}, "OMP_NUM_THREADS is '' in the environment, .* `unset OMP_NUM_THREADS`"),
        ("single", {"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS is 'many' in the environment"),
        ("single", {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE is 2 in the environment, left over"),
        (None, {"WORLD_SIZE": ""}, "WORLD_SIZE is '' in the environment"),
        (None, {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP in the environment asks for FSDP version 1"),
    ],
)
def test_variables_left_over_are_named(place: Place, base: str | None, env: dict[str, str], says: str) -> None:
    file = None if base is None else str(place.launch_file(base))
    with pytest.raises(BackendError, match=says):
        explain.explain_values(str(place.recipe()), (), file, {}, {**ALONE, **env})


def test_variables_that_the_launch_file_sets_itself_are_not_left_over(place: Place) -> None:
    same = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "ACCELERATE_MIXED_PRECISION": "fp16"}
    off = {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DYNAMO_BACKEND": "no", "WORLD_SIZE": "7"}
    launch = predict_environment(str(place.launch_file("fsdp")), {}, {**ALONE, **same, **off}).launch
    assert (launch.kind, launch.mixed_precision, launch.num_processes) == ("fsdp", "no", 2)


def test_a_worker_names_variables_left_over(place: Place, here: Here) -> None:
    file = place.launch_file("ddp")
    line = ["python", "/bin/accelerate", "launch", "--config_file", str(file), "scripts/train.py"]
    here.monkeypatch.setattr(orphan_watch, "_command_line", lambda: line)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}
    for key, value in {**exported(file), **ranks}.items():
        here.monkeypatch.setenv(key, value)
    with pytest.raises(BackendError, match="ACCELERATE_USE_FSDP is 'true' in the environment"):
        read_launch()
    here.monkeypatch.delenv("ACCELERATE_USE_FSDP")
    assert read_launch().kind == "ddp"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fsdp_config: {a: [1", "is not valid YAML: .*"),
        ("- a", "must hold keys and values, got a list."),
        ("fsdp_config: [1]\ndistributed_type: FSDP", r"fsdp_config: must hold keys and values, got \[1\]."),
        ("num_processes: 2", "distributed_type: missing; give one of NO, MULTI_GPU, FSDP, DEEPSPEED, NO in quotes."),
        ("distributed_type: FSDP\nnum_proceses: 2", "num_proceses: unknown key, did you mean 'num_processes'?."),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    """A file that was read is to be mended: only one that is not there is told of those that ship."""
    file = tmp_path / "launch.yaml"
    file.write_text(text)
    with pytest.raises(BackendError, match=rf"launch\.yaml.*{says}$"):
        read_launch_file(str(file))
    with pytest.raises(BackendError, match=r"the launch file .*other\.yaml.* Name a file, or one of the launch files"):
        read_launch_file(str(tmp_path / "other.yaml"))


def test_all_problems_of_a_launch_file_at_once(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    file = place.launch_file("fsdp", num_procesess=2, **MISSPELT)
    with pytest.raises(BackendError) as caught:
        read_launch_file(str(file))
    exit_codes.print_error(caught.value)
    head, *problems = capsys.readouterr().err.strip().splitlines()
    assert head == f"Error: The launch file {file} has 2 problems:"
    assert [re.sub(r":\d+:", ":N:", line).split(": ")[:2] for line in problems] == [
        [f"  {file}:N", "fsdp_config.fsdp_reshard_after_forwrd"],
        [f"  {file}:N", "num_procesess"],
    ]


def test_every_command_refuses(place: Place, here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    file, recipe = place.launch_file("fsdp", **MISSPELT), str(place.recipe())

    def refused(*words: str) -> None:
        assert main.main([*words]) == 2
        said = capsys.readouterr()
        assert re.search(SAYS, said.err), said

    here.monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    here.monkeypatch.setattr(launch_runs, "launch_run", lambda *_, **__: pytest.fail("started"))
    refused("launch", "--config_file", str(file), recipe)
    refused("explain", recipe, "--config_file", str(file))
    refused("parity", recipe, "--on", f"single,{file}")
    refused("comms", "--config_file", str(file))
    with pytest.raises(BackendError, match=SAYS):
        launch_of_file(file, 8)  # as `finetune plan` does
    _, (finding,) = doctor.read_request(None, (), str(file), {}, ALONE)
    assert finding.status == "failure"
    assert re.search(SAYS, finding.found)


def test_a_worker_of_plain_accelerate_launch_refuses(place: Place, here: Here) -> None:
    file = place.launch_file("fsdp", **MISSPELT)
    line = ["python", "/bin/accelerate", "launch", "--config_file", str(file), "scripts/train.py"]
    here.monkeypatch.setattr(orphan_watch, "_command_line", lambda: line)
    for key, value in {**exported(file), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        here.monkeypatch.setenv(key, value)
    with pytest.raises(BackendError, match=SAYS):
        read_launch()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "only FSDP reads"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo backend INDUCTOR, which is not offered"),
    ],
)
def test_an_environment_that_asks_for_what_is_not_offered(env: dict[str, str], says: str) -> None:
    with pytest.raises(BackendError, match=says):
        launch_of_environment({**env, "LOCAL_RANK": "0"}, 2, None)


# ---------------------------------------------------------------- DeepSpeed's own config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping: unknown key, did you mean 'gradient_clipping'"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "zero_optimization.overlap_com: .* 'overlap_comm'"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"devic": "cpu"}}},
            "zero_optimization.offload_param.devic: .*'device'",
        ),
        ({"bf16": {"enable": True}}, "bf16.enable: .*'enabled'"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "data_types.grad_acum_dtype: .*'grad_accum_dtype'"),
        ({"xyzzy": 1}, r"xyzzy: unknown key \(allowed: train_batch_size, "),
    ],
)
def test_misspelt_keys_of_deepspeed(place: Place, changes: dict[str, Any], says: str) -> None:
    file = place.ds_launch_file(changes)
    text = json.dumps(json.loads((place.folder / "ds.json").read_text()), indent=2)
    (place.folder / "ds.json").write_text(text)
    with pytest.raises(BackendError, match=rf"ds\.json:\d+: {says}"):
        predict_environment(str(file), {}, ALONE)


@pytest.mark.parametrize(
    ("zero", "more", "says"),
    [
        ({"max_live_parameters": "auto"}, {}, r'ds.json says "auto" for zero_optimization.stage3_max_live_parameters'),
        ({"stage3_max_reuse_distance": "auto"}, {}, 'says "auto" for zero_optimization.stage3_max_reuse_distance'),
        ({}, {"steps_per_print": "auto"}, 'says "auto" for steps_per_print'),
        ({"reduce_bucket_size": -1}, {}, "reduce_bucket_size: .*greater than"),
        ({"overlap_comm": "maybe"}, {}, 'overlap_comm: .*valid boolean.*, got "maybe"'),
        ({"offload_optimizer": {"device": "gpu"}}, {}, "offload_optimizer.device: .*'none', 'cpu' or 'nvme'"),
        ({}, {"communication_data_type": "fp99"}, "Got: fp99"),
        ({}, {"data_types": {"grad_accum_dtype": "fp99"}}, "fp99"),
        (
            {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1},
            {},
            "zero_optimization.prefetch_bucket_size: the same as stage3_prefetch_bucket_size; take one out",
        ),
        ({"cpu_offload": True}, {}, 'cpu_offload: deprecated; write offload_optimizer: {"device": "cpu"}'),
        ({"stage": "3"}, {}, "ZeRO stage '3'; offered are 1, 2 and 3"),
    ],
)
def test_what_deepspeed_would_refuse_later(
    place: Place, here: Here, capsys: pytest.CaptureFixture[str], zero: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    """The dry run and doctor know of it, as a run does before its processes meet."""
    file = str(place.ds_launch_file({"zero_optimization": {"stage": 3, **zero}, **more}))
    recipe = str(place.recipe())
    assert main.main(["launch", recipe, "--config_file", file, "--dry-run"]) == 2
    assert re.search(says, capsys.readouterr().err)
    asked, problems = doctor.read_request(recipe, (), file, {}, ALONE)
    checks = doctor.CHECKS
    here.monkeypatch.setattr(doctor, "CHECKS", [machine_checks.agreement] if not problems else [])
    findings = [*problems, *doctor.run_checks(asked, lambda _: None)]
    assert machine_checks.agreement in checks
    assert [finding.status for finding in findings] == ["failure"]
    assert re.search(says, findings[0].found)


def test_all_names_that_deepspeed_has_for_a_key_mean_the_same(place: Place) -> None:
    """Its documentation's `stage3_prefetch_bucket_size` is `prefetch_bucket_size` too, and `bf16` was `bfloat16`."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    aliases = [(name, f.alias) for name, f in DeepSpeedZeroConfig.model_fields.items() if f.alias not in (None, name)]
    assert all(alias == f"stage3_{name}" for name, alias in aliases)
    sizes = ("prefetch_bucket_size", "param_persistence_threshold")
    file = place.ds_launch_file(
        {"zero_optimization": {"stage": 3, **dict.fromkeys(sizes, "auto")}, "bfloat16": {"enabled": "auto"}}
    )
    written = json.loads((place.folder / "ds.json").read_text())
    del written["bf16"]
    place.write("ds.json", json.dumps(written))
    recipe = load_recipe(place.recipe(precision="bf16"))
    foreseen = predict_environment(str(file), {}, ALONE)
    config = resolve_config(recipe, foreseen.launch, foreseen.env).ds_config
    assert "bfloat16" not in config
    assert config["bf16"] == {"enabled": False}  # autocast instead, as on other backends
    fit_to_model(config, hidden_size=2000, parameter_sizes=[2000 * 2000] * 4)
    bucket = max(2000 * 2000, 1_000_000)
    read = DeepSpeedZeroConfig(**config["zero_optimization"])
    assert read.prefetch_bucket_size == int(0.9 * bucket)
    assert read.param_persistence_threshold == 10 * 2000


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "leaves stage3_param_persistence_threshold out, and DeepSpeed's default is 100,000 elements"),
        ({"param_persistence_threshold": 5000}, "says stage3_param_persistence_threshold: 5,000 elements"),
        ({"stage3_param_persistence_threshold": "auto"}, None),
        ({"stage3_param_persistence_threshold": 0}, None),
        ({"stage3_model_persistence_threshold": 64}, None),
    ],
)
def test_stage_3_that_would_shard_nothing_is_known_before_the_run(
    place: Place, here: Here, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], says: str | None
) -> None:
    here.monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    recipe, file = place.recipe(), place.ds_launch_file({"zero_optimization": {"stage": 3, **keys}})
    code = main.main(["launch", str(recipe), "--config_file", str(file), "--dry-run"])
    assert code == (2 if says else 0)
    foreseen = predict_environment(str(file), {}, ALONE)
    variant = read_variants(load_recipe(recipe), kinds=["full"])["full"]
    assert isinstance(variant, Variant)
    candidate = assess_candidate(
        "zero3", foreseen.launch, variant, setting_of(variant.recipe), gpu_specs.find_gpu("h100-80gb")
    )
    assert (candidate.verdict == "refused") == bool(says)
    if says:
        assert_said(capsys.readouterr().err, says, '"stage3_param_persistence_threshold": "auto"')
        assert says in candidate.reason


def test_a_worker_refuses_stage_3_that_would_shard_nothing(place: Place) -> None:
    require_ops(needed_ops("zero3"))
    file = place.ds_launch_file({"zero_optimization": {"stage": 3}})
    code, output = run(command(file, str(place.recipe())))
    assert code == 1
    assert output.count("leaves stage3_param_persistence_threshold out, and DeepSpeed's default is 100,000") == 1
    assert "of it on each of 2 ranks, where 50% is asked" in output
    assert not any("checkpoint" in name or "model" in name for name in place.files())


def test_packed_weights_and_a_cast_of_all_weights(place: Place) -> None:
    lora = {"lora": {"rank": 2}, "model": {"config": None, "name": str(MODEL), "quantization": "nf4"}}
    recipe = load_recipe(place.recipe(**lora, tokenizer={"name": None}, precision="bf16"))
    for file in (place.ds_launch_file({"bf16": {"enabled": True}}), place.launch_file("fsdp", mixed_precision="bf16")):
        foreseen = predict_environment(str(file), {}, ALONE)
        with pytest.raises(BackendError, match="a cast would destroy those that model"):
            resolve_config(recipe, foreseen.launch, foreseen.env)


def test_a_deepspeed_config_is_found_from_anywhere(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the launch file, in the folder above it, and only then in the working directory."""
    monkeypatch.chdir(place.folder)
    shipped = predict_environment(str(ROOT / "accelerate_configs" / "zero2.yaml"), {}, ALONE).launch
    assert shipped.kind == "zero2"
    assert Path(shipped.ds_place) == ROOT / "ds_configs" / "zero2.json"
    (place.folder / "a" / "b").mkdir(parents=True)
    file = shutil.move(place.launch_file("zero2", deepspeed_config={"deepspeed_config_file": "x.json"}), "a/b/l.yaml")
    for folder, stage in ((".", 1), ("a", 2), ("a/b", 3)):
        assert not Path(folder, "x.json").exists()
        shutil.copy(ROOT / "ds_configs" / f"zero{stage}.json", Path(folder, "x.json"))
        launch = predict_environment(file, {}, ALONE).launch
        assert (launch.kind, Path(launch.ds_place)) == (f"zero{stage}", Path(folder, "x.json"))
    monkeypatch.chdir("/")
    assert predict_environment(str(place.folder / file), {}, ALONE).launch.kind == "zero3"


def test_what_is_no_key_stops_accelerate_launch_elsewhere(place: Place) -> None:
    """By plain `accelerate launch`, from another directory: the file beside the launch file is read, and refused."""
    shutil.copy(ROOT / "ds_configs" / "zero2.json", place.folder / "good.json")
    file = place.launch_file("zero2", deepspeed_config={"deepspeed_config_file": "beside/bad.json"})
    (place.folder / "beside").mkdir()
    place.write("beside/bad.json", json.dumps({"zero_optimization": {"stage": 2, "overlap_com": True}}))
    elsewhere = environment(PYTHONPATH=str(ROOT))
    code, output = run(
        command(file, str(place.recipe()), script=str(ROOT / "scripts/train.py")), cwd=Path("/"), env=elsewhere
    )
    assert code == 1
    said = output.strip().splitlines()
    (error,) = (line for line in said if line.startswith("Error: "))
    assert error.startswith(f"Error: {place.folder}/beside/bad.json:1: zero_optimization.overlap_com: unknown key")
    assert "`finetune launch` takes the same launch file and recipe" in "\n".join(said[-3:])
    assert not place.files()


# ---------------------------------------------------------------- who started this process

SHELL = ["/bin/bash"]
ACCELERATE = ["python", "/venv/bin/accelerate", "launch", "scripts/train.py", "recipe.yaml"]


@pytest.mark.parametrize(
    ("line", "launches"),
    [
        (SHELL, False),
        (["sh", "-c", "nohup python scripts/train.py recipe.yaml &"], False),
        (["/sbin/init"], False),
        ([], False),
        (ACCELERATE, True),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", "a.py"], True),
        (["python", "-m", "finetune.distributed.launch.launcher", "a.py"], True),
        (["python", "/venv/bin/torchrun", "a.py"], True),
        (["python", "-m", "torch.distributed.run", "a.py"], True),
        (["python", "-u", "-m", "deepspeed.launcher.launch", "a.py"], True),
    ],
)
def test_only_a_launcher_is_watched(monkeypatch: pytest.MonkeyPatch, line: list[str], launches: bool) -> None:
    """Left by the shell that started it, as by `nohup … &` and a logout, a process goes on."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(orphan_watch, "_line", line)
    monkeypatch.setattr(orphan_watch, "_parent", os.getppid() + 1)  # it is gone
    assert orphan_watch.parent_is_gone() == launches
    monkeypatch.setattr(orphan_watch, "_parent", os.getppid())
    assert not orphan_watch.parent_is_gone()
    with orphan_watch.end_with_parent(1):
        watches = [thread for thread in threading.enumerate() if thread.name == "parent"]
    assert bool(watches) == launches
    for thread in watches:
        thread.join()


def test_torchelastic_is_a_launcher_under_whatever_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphan_watch, "_line", SHELL)
    monkeypatch.setattr(orphan_watch, "_parent", os.getppid() + 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert orphan_watch.parent_is_gone()


# ---------------------------------------------------------------- what is said


def test_the_launchers_traceback_ends_in_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "0" / "error.json"
    file.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(orphan_watch, "_line", ["python", "-m", "finetune.distributed.launch.launcher", "a.py"])
    exit_codes.print_error(RecipeError("no"))
    assert not file.exists()
    monkeypatch.setattr(orphan_watch, "_line", ACCELERATE)
    exit_codes.print_error(RecipeError("no"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    *_, last, _ = str(ChildFailedError("train.py", {0: failure})).splitlines()
    assert last.endswith("ends with the error and exit code 2 only.")


def test_a_single_process_says_what_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for line, hint in (
        (ACCELERATE, True),
        (SHELL, False),
        (["python", "-m", "finetune.distributed.launch.launcher", "a.py"], False),
    ):
        monkeypatch.setattr(orphan_watch, "_line", line)
        exit_codes.print_error(RecipeError("no"))
        said = capsys.readouterr().err
        assert said.startswith("\nError: no\n")
        assert ("`finetune launch` takes the same" in said) == hint


def test_train_without_arguments_prints_its_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, arguments in (("0", []), ("0", ["--quiet"]), ("1", [])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert entry_point.train_main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("usage: scripts/train.py ") == (rank == "0")
        assert ("finetune launch --config_file" in said) == (rank == "0")


def test_dry_run_of_finetune_launch(place: Place, here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    here.monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    words = ["launch", "--config_file", "accelerate_configs/zero2.yaml", str(place.recipe()), "--dry-run"]
    assert main.main([*words, "--num_processes", "1"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^backend +zero2 on 1 process\(es\), from accelerate_configs/zero2\.yaml$", said, re.MULTILINE)
    assert re.search(r"^batch +4 rows = 1 x 2 x 2$", said, re.MULTILINE)
    assert main.main([*words, "--num_processes", "1", "batch.global_size=3"]) == 0
    says = r"^batch +3 rows = 1 x 1 x 3; batch.micro_size 2 is 1 here, the largest up to it that divides$"
    assert re.search(says, capsys.readouterr().out, re.MULTILINE)
    assert main.main([*words, "batch.global_size=3"]) == 2
    assert "batch.global_size 3 is not a multiple of the 2 processes that share it" in capsys.readouterr().err
    assert not place.files()
    # Of a network that transformers warns of, as it does of any that has adapters.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main.main([*words, "--num_processes", "1", "lora.rank=4"]) == 0
    assert [warning for warning in caught if issubclass(warning.category, FutureWarning)] == []


def test_the_launcher_takes_a_free_port_unless_one_is_named(place: Place) -> None:
    for config, options, free in (
        ("ddp", [], True),
        ("ddp", ["--main_process_port", "29501"], False),
        ("fsdp_2nodes", ["--machine_rank", "1"], False),
    ):
        words = launcher.launcher_command(f"accelerate_configs/{config}.yaml", options, ["r.yaml"])
        assert (words[words.index("--config_file") + 2 :][:2] == ["--main_process_port", "0"]) == free, words


def test_each_log_step_is_a_line_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend: Any = SimpleNamespace(is_main=True)
    with Reporter(
        backend, tmp_path, 4, trackers=Trackers((), tmp_path, {}), quiet=False, guard=GuardSection()
    ) as reporter:
        for step in (1, 2, 3, 4):
            values = {"loss": 1.0, "lr": 1e-3, "tokens_per_s": 1234.0}
            reporter.step(step, values if step != 2 else None)
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == ["1/4", "3/4", "4/4"]
    assert all(line.endswith("1,234 targets/s") for line in said)


def test_shipped_files_hold_known_keys_only() -> None:
    files = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
    assert len(files) >= 13
    for file in files:
        assert read_launch_file(str(file)).num_processes == yaml.safe_load(file.read_text())["num_processes"]


def test_an_elastic_launch_may_have_several_sizes(place: Place) -> None:
    """Copies are as many as there is room for; shards and split layers stay."""
    options = {"nnodes": "1:3", "main_process_ip": "store"}

    def sizes(file: Path | str) -> list[tuple[int, str, int, int, int]]:
        found = elastic_launches(predict_environment(str(file), options, {}))
        return [(n, one.kind, one.num_processes, one.replicate, one.data_ranks) for n, one in found]

    assert sizes("accelerate_configs/ddp.yaml") == [(n, "ddp", 2 * n, 1, 2 * n) for n in (1, 2, 3)]
    file = place.launch_file("hsdp", num_machines=2)
    assert sizes(file) == [(1, "fsdp", 2, 1, 2), (2, "hsdp", 4, 2, 4), (3, "hsdp", 6, 3, 6)]
    assert sizes(place.launch_file("fsdp_tp", num_machines=2)) == [(n, "fsdp", 2 * n, 1, n) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nnodes": "3:2", "main_process_ip": "store"}, "nnodes is 3:2. Give the least and the most machines"),
        ({"nnodes": "some", "main_process_ip": "store"}, "nnodes is some. Give the least and the most machines"),
        ({"nnodes": "0:2", "main_process_ip": "store"}, "nnodes is 0:2. Give the least and the most machines"),
        ({"nnodes": "1:2"}, "the machines must know where they meet. Run `finetune rendezvous`"),
        ({"rdzv_conf": "join_timeout=3"}, "which only an elastic launch reads. Give --nnodes too"),
    ],
)
def test_what_an_elastic_launch_cannot_be_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(BackendError, match=re.escape(says)):
        predict_environment("accelerate_configs/fsdp.yaml", options, {})


def test_the_batch_comes_out_even_on_each_number_of_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--config_file", "accelerate_configs/ddp.yaml", "--nnodes", "1:3", "--main_process_ip", "store"]
    assert main.main([*words, str(place.recipe(batch={"global_size": 8, "micro_size": 1}))]) == 2
    assert_said(capsys.readouterr().err, "--nnodes 1:3 allows 3 machines, over which batch.global_size 8 is not")
