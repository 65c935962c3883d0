"""What only a GPU can show. One device is enough: sharded backends run as one process."""

import numpy as np
import pytest
import torch
from harness import SHARED, Launcher
from recipes_for_tests import PARITY, base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data"),
]

JOBS = {"fp32": PARITY["adamw"], "bf16": PARITY["bf16"], "fp16": base(precision="fp16")}


@pytest.mark.parametrize("precision", list(JOBS))
@pytest.mark.parametrize("backend", ["fsdp", "fsdp_offload", "zero2", "zero3", "zero3_offload"])
def test_backends_take_the_single_process_path(launcher: Launcher, backend: str, precision: str) -> None:
    single = launcher.many("single", JOBS)[precision].check()
    other = launcher.many(backend, JOBS, processes=1)[precision].check()
    assert other.facts["runs"]["device"] == "cuda"
    # fp16 scalers skip different steps, so that only the end is compared.
    if precision == "fp16":
        assert other.validation() == pytest.approx(single.validation(), rel=2e-2)
    else:
        tolerance = 1e-4 if precision == "fp32" else 1e-2
        assert np.allclose(single.series("loss"), other.series("loss"), rtol=tolerance)


def test_a_gpu_is_used_and_measured(launcher: Launcher) -> None:
    run = launcher.many("single", JOBS)["bf16"].check()
    assert run.facts["runs"]["device"] == "cuda"
    assert run.facts["runs"]["output_dtypes"]["Linear"] == "bfloat16"
    assert run.steps[-1]["peak_memory_gib"] > 0
