"""One short run of each launch kind, whole, with adapters, and with adapters on packed weights: all take one path.

Part of the quick tests, which show that a set of library versions works; tests/training/test_parity.py looks closer.
"""

import json
import re

import pytest
import torch
from harness import Launcher, Result, assert_same_path
from recipes_for_tests import base
from safetensors.torch import load_file

KINDS = ["ddp", "fsdp", "fsdp_grad_op", "hsdp", "zero1", "zero2", "zero3", "zero3_offload"]
KINDS += ["sp", "fsdp_sp", "tp", "fsdp_tp", "fsdp_tp_sp"]
# Four processes share two cores. Blocks of packed weights do not divide over split layers as narrow as these.
LEFT_OUT = {**dict.fromkeys(("hsdp", "fsdp_sp", "fsdp_tp", "fsdp_tp_sp"), ("lora", "qlora")), "tp": ("qlora",)}

SHORT = {"length": {"steps": 4}, "schedule": {"name": "constant", "warmup_steps": 0}, "eval": {"at_end": False}}
ADAPTERS = {"rank": 4, "targets": "all-linear"}
# Evaluated before the last step alone, whose weights are therefore not the best.
BEST = {**SHORT, "eval": {"every_steps": 3, "at_end": False}, "output": {"model": "best"}}
JOBS = {
    "full": base(**BEST),
    "lora": base(lora=ADAPTERS, **BEST),
    "qlora": base(lora=ADAPTERS, model={**base()["model"], "quantization": "nf4"}, **SHORT),
}


LAUNCHED_RUNS = {
    "single": JOBS,
    **{kind: {name: job for name, job in JOBS.items() if name not in LEFT_OUT.get(kind, ())} for kind in KINDS},
}


def runs(launcher: Launcher, kind: str) -> dict[str, Result]:
    return launcher.many(kind, LAUNCHED_RUNS[kind])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in KINDS])
def test_it_takes_the_single_process_path(launcher: Launcher, kind: str) -> None:
    single = runs(launcher, "single")
    for name, run in runs(launcher, kind).items():
        assert_same_path(single[name], run, 1e-4)
        found = json.loads((run.directory / "run.json").read_text())["runs"]
        assert found["wrapper"] != single[name].facts["runs"]["wrapper"]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in KINDS])
def test_the_best_model_is_written(launcher: Launcher, kind: str) -> None:
    """Its weights are compared above; here with those of its checkpoint."""
    for name, run in runs(launcher, kind).items():
        assert run.facts["results"]["model_step"] == (4 if name == "qlora" else 3)
    run = runs(launcher, kind)["full"]
    saved = run.directory / "checkpoints" / "step-00000003" / "model"
    tensors = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert {name: tensors.get(name) is not None for name in run.weights} == dict.fromkeys(run.weights, True)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in run.weights.items())


# What libraries print where nothing is wrong: of loaded ops, of the device, of threads, of what is deprecated.
NOISE = re.compile(
    r"^(DeepSpeed|Setting accelerator|\[?[WIE]\d{4} |\[W|.*\[(WARNING|INFO)\]|.*Warning: |Failed to load).*",
    re.MULTILINE,
)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in KINDS])
def test_libraries_are_silent_where_nothing_is_wrong(launcher: Launcher, kind: str) -> None:
    for run in runs(launcher, kind).values():
        launch = run.directory.parent.parent
        assert [found.group() for found in NOISE.finditer(run.check().output)] == [], launch


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.xdist_group("ddp"))])
def test_one_process_of_a_launch_file(launcher: Launcher, kind: str) -> None:
    """What a machine with one GPU, or the rest of an elastic launch, runs of a file for several."""
    jobs = {"full": JOBS["full"]}
    alone = launcher.many(kind, jobs, processes=1)["full"].check()
    assert_same_path(runs(launcher, "single")["full"], alone, 1e-6)
    assert alone.facts["runs"]["kind"] == "single"
