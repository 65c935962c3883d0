"""The same recipe takes the same path under every launch file (invariants 1, 2, 3, 4 and 7 of the design)."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from external_commands import needs_ops
from harness import ROOT, Launcher, assert_same_path, assert_same_path_in_bf16
from recipes_for_tests import PARITY, SPLITS, WIDE, base
from testdata import MODEL

BACKENDS = ["ddp", "fsdp", "fsdp_grad_op", "hsdp", "zero1", "zero2", "zero3", "zero3_offload"]
BACKENDS += ["sp", "fsdp_sp", "tp", "fsdp_tp", "fsdp_tp_sp"]
needs_async_io = needs_ops("async_io")
NVME = pytest.param("zero3_nvme", marks=[pytest.mark.nvme, needs_async_io, pytest.mark.xdist_group("zero3_nvme")])
EVERY = [*(pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in BACKENDS), NVME]

# The share of the parameters that no plan splits: embedding, head and norms.
WHOLE = 65_856 / 139_584

# Offload replaces torch's AdamW by DeepSpeed's, and refuses every other optimiser.
OFFLOADED = ("zero3_offload", "zero3_nvme")


# How rows are parted otherwise is shown once for each wrapper, and for rows and layers that are split.
OTHER_ROWS = ("ddp", "fsdp", "zero3", "sp", "tp")


def jobs(backend: str) -> dict:
    left_out = {"sgd"} if backend in OFFLOADED else set()
    left_out |= set() if backend in OTHER_ROWS else {"padded", "wrapped"}
    return {name: job for name, job in PARITY.items() if name not in left_out}


FAULTS = {f"{fault}+padded": PARITY["padded"] for fault in ("rank_factor", "accumulation_factor", "mean_of_means")}
LAUNCHED_RUNS = {
    "single": {**PARITY, **SPLITS, "wide": WIDE},
    **{backend: jobs(backend) for backend in BACKENDS},
    "ddp": {**jobs("ddp"), **FAULTS},
}


@pytest.mark.parametrize("backend", EVERY)
def test_fp32_takes_the_single_process_path(launcher: Launcher, backend: str) -> None:
    single, other = launcher.many("single", PARITY), launcher.many(backend, jobs(backend))
    for name, run in other.items():
        if name != "bf16":
            assert_same_path(single[name], run, 1e-4)


@pytest.mark.parametrize("backend", EVERY)
def test_bf16_takes_the_single_process_path(launcher: Launcher, backend: str) -> None:
    single = launcher.many("single", PARITY)["bf16"]
    other = launcher.many(backend, jobs(backend))["bf16"]
    assert_same_path_in_bf16(single, other, other_shapes=not {"sp", "tp"}.isdisjoint(backend.split("_")))
    # It is bf16, and not everything is.
    seen = other.facts["runs"]["output_dtypes"]
    assert seen == single.facts["runs"]["output_dtypes"]
    assert seen["Linear"] == "bfloat16"
    assert seen["LlamaRMSNorm"] == seen["loss"] == "float32"
    assert other.facts["runs"]["reduce_dtype"] == "float32"
    # The loss of a micro-batch is a sum above 1024, where bf16 knows only every eighth number.
    sums = other.series("loss") * np.diff(other.series("tokens"), prepend=0)
    assert (np.abs(sums - np.round(sums)) > 1e-3).any()


def test_bf16_differs_from_fp32(launcher: Launcher) -> None:
    runs = launcher.many("single", PARITY)
    # Of the same first weights and rows.
    fp32, bf16 = (runs[name].check().series("grad_norm")[0] for name in ("adamw", "bf16"))
    assert abs(bf16 / fp32 - 1) > 1e-5


@pytest.mark.parametrize("backend", EVERY)
def test_what_runs_is_what_was_asked(launcher: Launcher, backend: str) -> None:
    run = launcher.many(backend, jobs(backend))["adamw"].check()
    runs = run.facts["runs"]
    wrapper, kind, shards = {
        "ddp": ("DistributedDataParallel", "ddp", (1.0, 1.0)),
        "fsdp": ("FSDPForwardWrapper", "fsdp", (0.5, 0.5)),
        "fsdp_grad_op": ("FSDPForwardWrapper", "fsdp", (0.5, 0.5)),
        "hsdp": ("FSDPForwardWrapper", "hsdp", (0.5, 0.5)),
        "zero1": ("DeepSpeedEngine", "zero1", (1.0, 0.5)),
        "zero2": ("DeepSpeedEngine", "zero2", (1.0, 0.5)),
        "zero3": ("DeepSpeedEngine", "zero3", (0.5, 0.5)),
        "zero3_offload": ("DeepSpeedEngine", "zero3", (0.5, 0.5)),
        "zero3_nvme": ("DeepSpeedEngine", "zero3", (0.5, 0.5)),
        "sp": ("DistributedDataParallel", "ddp", (1.0, 1.0)),
        "fsdp_sp": ("FSDPForwardWrapper", "fsdp", (0.25, 0.25)),
        # Embedding and head are whole on each rank of those that share layers.
        "tp": ("DistributedDataParallel", "ddp", (WHOLE + (1 - WHOLE) / 2,) * 2),
        "fsdp_tp": ("FSDPForwardWrapper", "fsdp", (WHOLE / 2 + (1 - WHOLE) / 4,) * 2),
        "fsdp_tp_sp": ("FSDPForwardWrapper", "fsdp", (WHOLE / 2 + (1 - WHOLE) / 4,) * 2),
    }[backend]
    ranks = 4 if backend == "hsdp" or (backend.startswith("fsdp_") and backend != "fsdp_grad_op") else 2
    words = backend.split("_")
    parts, layers = 2 if "sp" in words else 1, 2 if "tp" in words else 1
    assert (runs["wrapper"], runs["kind"]) == (wrapper, kind)
    assert (runs["world_size"], runs["sequence"], runs["tensor"]) == (ranks, parts, layers)
    assert math.prod(runs["mesh"].values()) == ranks
    # Queries, keys, values and what comes out, of two layers.
    assert runs["exchanges"] == (8 if parts > 1 else 0)
    assert (runs["parameter_fraction"], runs["optimizer_fraction"]) == pytest.approx(shards, abs=0.03)
    offload = {"zero3_offload": "cpu", "zero3_nvme": "nvme"}.get(backend, "none")
    assert (runs["offload_params"], runs["offload_optimizer"]) == (offload, offload)
    assert runs["reshards"] == (None if kind not in ("fsdp", "hsdp") else backend != "fsdp_grad_op")
    seen = json.loads((run.directory.parent / "gloo.json").read_text())
    assert seen["threads"] == seen["groups"] > 0
    assert runs["gloo_threads"] == 1
    data = ranks // (parts * layers)
    assert runs["accumulation"] == 8 // (2 * data)
    sizes = [f"{size} {name}" for name, size in (("sequence", parts), ("tensor", layers)) if size > 1]
    split = " x ".join([f"{data} data", *sizes]) if sizes else str(ranks)
    assert f"launch    {kind} x {split} on cpu (gloo), fp32" in run.output


@pytest.mark.parametrize("backend", EVERY)
def test_evaluation_and_samples_are_the_single_process_ones(launcher: Launcher, backend: str) -> None:
    single = launcher.many("single", PARITY)["adamw"].check()
    other = launcher.many(backend, jobs(backend))["adamw"].check()
    for key in ("validation_loss", "validation_perplexity", "validation_targets"):
        left, right = ([m[key] for m in run.metrics if key in m] for run in (single, other))
        assert len(left) == 2
        assert left == pytest.approx(right, rel=1e-4)
    texts = [[m["sample"] for m in run.metrics if "sample" in m] for run in (single, other)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    assert texts[0][0].startswith("Once")


@pytest.mark.nvme
@needs_async_io
@pytest.mark.xdist_group("zero3_nvme")
def test_nvme_holds_the_state_and_takes_the_same_path(launcher: Launcher, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    config = json.loads((ROOT / "ds_configs/zero3_nvme.json").read_text())
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section]["nvme_path"] = str(disk)
    (tmp_path / "zero3_nvme.json").write_text(json.dumps(config))
    launch = yaml.safe_load((ROOT / "accelerate_configs/zero3_nvme.yaml").read_text())
    launch["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "zero3_nvme.json")
    (tmp_path / "zero3_nvme.yaml").write_text(yaml.safe_dump(launch))
    run = launcher.one(tmp_path / "zero3_nvme.yaml", WIDE)
    assert_same_path(launcher.many("single", {"wide": WIDE})["wide"], run, 1e-4)
    parameters, optimizer = run.facts["runs"]["on_disk"]
    assert parameters > 0.6
    assert optimizer > 0.9
    assert sum(path.stat().st_size for path in disk.rglob("*.swp")) > 2**20
    # A tiny model says that nothing of it is on disk.
    small = launcher.many("zero3_nvme", jobs("zero3_nvme"))["adamw"]
    assert small.facts["runs"]["on_disk"] == [0.0, 0.0]
    assert "on disk 0% and 0% (shards under 1 MiB stay in memory)" in small.output


@pytest.mark.parametrize("packing", ["documents", "padded"])
@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.xdist_group("single")
def test_micro_batches_change_nothing(launcher: Launcher, packing: str, size: int) -> None:
    runs = launcher.many("single", SPLITS)
    assert_same_path(runs[f"{packing}_micro_2"], runs[f"{packing}_micro_{size}"], 1e-4)


# Accelerate's DDP wants two processes at least, FSDP takes one.
@pytest.mark.parametrize(("backend", "processes"), [("fsdp", 1), ("ddp", 4)])
@pytest.mark.xdist_group("splits")
def test_processes_change_nothing(launcher: Launcher, backend: str, processes: int) -> None:
    names = ("documents_micro_2", "padded_micro_2", "documents_micro_1")
    runs = launcher.many(backend, {name: SPLITS[name] for name in names}, processes=processes)
    for name in names:
        assert_same_path(launcher.many("single", SPLITS)[name], runs[name], 1e-4)


@pytest.mark.xdist_group("ddp")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_scale_is_seen(launcher: Launcher, fault: str) -> None:
    """The suite must be able to fail: each fault on purpose parts the paths."""
    # SGD, and a document a row: micro-batches have unequal numbers of targets.
    broken = launcher.many("ddp", FAULTS)[fault]
    with pytest.raises(AssertionError, match=r"(loss|grad_norm) differs"):
        assert_same_path(launcher.many("single", PARITY)["padded"], broken, 1e-4)


@pytest.mark.xdist_group("zero3")
def test_a_lighter_bf16_can_be_asked_for(launcher: Launcher, tmp_path: Path) -> None:
    """DeepSpeed's own bf16: weights in 16 bit, masters in fp32; another path, near by, and said so."""
    config = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    config["bf16"] = {"enabled": True}
    (tmp_path / "zero2.json").write_text(json.dumps(config))
    launch = yaml.safe_load((ROOT / "accelerate_configs/zero2.yaml").read_text())
    launch["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "zero2.json")
    (tmp_path / "zero2.yaml").write_text(yaml.safe_dump(launch))
    run = launcher.one(tmp_path / "zero2.yaml", PARITY["bf16"]).check()
    assert run.facts["runs"]["model_dtypes"] == ["bfloat16"]
    assert run.facts["runs"]["parameter_dtypes"] == ["float32"]
    assert run.facts["runs"]["output_dtypes"]["loss"] == "float32"
    single = launcher.many("single", PARITY)["bf16"]
    assert run.series("loss") == pytest.approx(single.series("loss"), rel=1e-2)


@pytest.mark.xdist_group("fsdp")
def test_fsdp_gathers_in_bf16_if_the_launch_file_says_so(launcher: Launcher, tmp_path: Path) -> None:
    launch = yaml.safe_load((ROOT / "accelerate_configs/fsdp.yaml").read_text())
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump({**launch, "mixed_precision": "bf16"}))
    pairs = base(
        task={"name": "dpo"},
        model={"name": MODEL, "config": None},
        tokenizer={"name": None},
        data={"train": [{"sample": 16}], "validation": [], "validation_fraction": 0.0, "sequence_length": 512},
        chat={"template": "plain"},
        length={"steps": 1},
        precision="bf16",
    )
    runs = launcher.many(tmp_path / "fsdp.yaml", {"bf16": PARITY["bf16"], "pairs": pairs})
    run = runs["bf16"].check()
    assert run.facts["runs"]["model_dtypes"] == ["bfloat16"]
    assert run.facts["runs"]["parameter_dtypes"] == ["float32"]
    assert run.facts["runs"]["reduce_dtype"] == "float32"
    single = launcher.many("single", PARITY)["bf16"]
    assert run.series("loss") == pytest.approx(single.series("loss"), rel=1e-2)
    # The scores of a reference, which the model still is, are not rounded with its inputs.
    assert runs["pairs"].check().series("rewards/margins").tolist() == [0.0]
