"""Losses and kinds of weights of preferences on backends, against the figures of docs/preference-table.md."""

import pytest
from harness import ROOT, Launcher, assert_same_path
from preference_table import BACKENDS, LOSS_RUNS, METHOD_RUNS, TOLERANCE, runs_on

from finetune.config.preference_losses import LOSSES

PACKED = ("sigmoid, QLoRA", "sigmoid + sft, LoRA", "kto, LoRA", "kto, QLoRA", "reward, QLoRA")
LAUNCHED_RUNS = {
    "single": METHOD_RUNS,
    **{config: {name: METHOD_RUNS[name] for name in PACKED} for config in ("fsdp", "zero3")},
}


def rows_of(table: int) -> dict[str, list[str]]:
    """The lines of a table of the page, by their first cell."""
    page = (ROOT / "docs" / "preference-table.md").read_text(encoding="utf-8")
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in tables[table]]
    return {line[0]: line[1:] for line in cells if not line[0].startswith("---")}


@pytest.mark.xdist_group("single")
def test_losses_are_those_of_the_page(launcher: Launcher) -> None:
    rows = rows_of(1)
    figures = dict(zip(rows["launch file"], rows["single x1, loss of step 5"], strict=True))
    runs = launcher.many("single", LAUNCHED_RUNS["single"])
    assert figures.keys() == METHOD_RUNS.keys()
    for name, run in runs.items():
        # Sums in fp32 depend on the processor's kernels.
        assert run.check().series("loss")[-1] == pytest.approx(float(figures[name]), rel=1e-3), name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(config, name, marks=pytest.mark.xdist_group(config))
        for config in ("fsdp", "zero3")
        for name in PACKED
    ],
)
def test_adapters_take_the_single_process_path(launcher: Launcher, config: str, name: str) -> None:
    single, other = (launcher.many(kind, LAUNCHED_RUNS[kind])[name].check() for kind in ("single", config))
    assert_same_path(single, other, TOLERANCE)


def test_the_page_has_every_loss_and_every_launch_file() -> None:
    losses, methods = rows_of(0), rows_of(1)
    assert losses.keys() - {"loss"} == LOSS_RUNS.keys()
    for task, names in LOSSES.items():
        assert all(f"{task}: {name}" in losses or task in losses for name in names)
    launch_files = {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert launch_files - {"fsdp_2nodes", "zero3_2nodes", "fsdp_offload"} == BACKENDS.keys()
    for backend, processes in BACKENDS.items() - {("single", 1)}:
        cells = dict(zip(methods["launch file"], methods[f"{backend} x{processes}"], strict=True))
        assert {name for name, cell in cells.items() if cell != "–"} == runs_on(backend).keys()
