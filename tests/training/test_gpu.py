"""What only a GPU can show. One device is enough: sharded backends run as one process.

The same recipes as on the fake device (`test_fake_device.py`), which stands in for one where there is none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from harness import Launcher
from test_fake_device import recipe

from finetune.config.recipe import validate_recipe
from finetune.training import loop
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun
from finetune.utils.to_device import tensor_to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

JOBS = {name: recipe(precision=name, length={"steps": 12}) for name in ("fp32", "bf16", "fp16")}


@pytest.mark.parametrize("precision", list(JOBS))
@pytest.mark.parametrize("backend", ["fsdp", "fsdp_offload", "zero2", "zero3", "zero3_offload"])
def test_backends_take_the_single_process_path(launcher: Launcher, backend: str, precision: str) -> None:
    jobs = {name: job for name, job in JOBS.items() if backend != "fsdp_offload" or name != "fp16"}
    if precision not in jobs:
        pytest.skip("what is refused here runs on a GPU otherwise")
    single = launcher.many("single", JOBS)[precision].check()
    other = launcher.many(backend, jobs, processes=1)[precision].check()
    assert other.facts["runs"]["device"] == "cuda"
    # fp16 scalers skip different steps, so that only the end is compared.
    if precision == "fp16":
        assert other.validation() == pytest.approx(single.validation(), rel=2e-2)
    else:
        tolerance = 1e-4 if precision == "fp32" else 1e-2
        assert np.allclose(single.series("loss"), other.series("loss"), rtol=tolerance)


def test_a_gpu_takes_the_cpus_path(launcher: Launcher) -> None:
    """The first process computes on a GPU, the second sees none."""
    gpu = launcher.many("single", JOBS)["fp32"].check()
    cpu = launcher.many("single", {"fp32": JOBS["fp32"]}, env={"CUDA_VISIBLE_DEVICES": ""})["fp32"].check()
    assert cpu.facts["runs"]["device"] == "cpu"
    assert np.allclose(cpu.series("loss"), gpu.series("loss"), rtol=1e-4)


def test_a_gpu_is_used_and_measured(launcher: Launcher) -> None:
    run = launcher.many("single", JOBS)["bf16"].check()
    assert run.facts["runs"]["device"] == "cuda"
    assert run.facts["runs"]["output_dtypes"]["Linear"] == "bfloat16"
    assert run.steps[-1]["peak_memory_gib"] > 0


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[BuiltRun]:
    monkeypatch.setattr("sys.argv", ["test"])
    job: dict[str, Any] = {**recipe(precision=request.param), "output": {"dir": str(tmp_path / "run")}}
    job["data"] = {**job["data"], "cache_dir": str(tmp_path / "cache")}
    yield build_run(validate_recipe(job), quiet=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("made", list(JOBS), indirect=True)
def test_a_step_makes_the_host_wait_for_nothing(made: BuiltRun) -> None:
    """CUDA's own check: it raises at whatever would wait for the device."""
    for step in (0, 1):
        loop.train_step(made, step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = loop.train_step(made, 2)
        with pytest.raises(RuntimeError, match="synchronizing"):
            taken.losses.sum().item()
        # Copies from pageable memory wait as well, and are not all seen by that check.
        sent = tensor_to_device(torch.ones(3), made.backend.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sent.tolist() == [1, 1, 1]
    assert taken.sync.read()[0] > 0
