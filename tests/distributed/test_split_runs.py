"""Runs whose rows or layers are split over ranks, of many kinds, beside one process."""

import pytest
from harness import Launcher, assert_near_in_bf16, assert_same_path
from recipes_for_tests import SPLIT, SPLIT_LAYERS, SPLIT_ROWS

JOBS = {"sp": SPLIT_ROWS, "tp": SPLIT_LAYERS, "fsdp_tp": {"qlora": SPLIT_LAYERS["qlora"]}}
LAUNCHED_RUNS = {"single": SPLIT, **JOBS}
MESHES = {
    "sp": {"data": 1, "sequence": 2, "tensor": 1},
    "tp": {"data": 1, "sequence": 1, "tensor": 2},
    "fsdp_tp": {"data": 2, "sequence": 1, "tensor": 2},
}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(config, name, marks=pytest.mark.xdist_group(config))
        for config, jobs in JOBS.items()
        for name in jobs
    ],
)
def test_every_kind_takes_the_single_process_path(launcher: Launcher, config: str, name: str) -> None:
    single, split = launcher.many("single", SPLIT)[name], launcher.many(config, JOBS[config])[name]
    if SPLIT[name].get("precision") == "bf16":
        assert_near_in_bf16(single, split)
    else:
        assert_same_path(single, split, 1e-4)
    assert split.facts["runs"]["mesh"] == MESHES[config]
    assert single.validation() == pytest.approx(split.validation(), rel=1e-4)
