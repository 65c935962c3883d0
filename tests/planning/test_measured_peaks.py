"""What training took at its peak: measured, beside what `plan` predicts, and remembered."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Launcher, command, environment, run
from hypothesis import given
from hypothesis import strategies as st
from test_plan import said

from finetune.distributed import device_selection
from finetune.planning import planner
from finetune.planning.planner import Error, Peak

GIB = 2**30


def peak(ratio: float, predicted: int = GIB, **changes: Any) -> Peak:
    facts = {"device": "cpu, x", "of": "resident", "launch": "ddp", "kind": "full", "processes": 2}
    return Peak(**{**facts, **changes}, predicted=predicted, measured=round(ratio * predicted))


@given(st.lists(st.floats(0.5, 2.0), min_size=1))
def test_an_error_is_that_of_all_runs(ratios: list[float]) -> None:
    found = planner.compare_peaks([peak(ratio) for ratio in ratios], "cpu, x")
    assert found is not None
    assert found.runs == len(ratios)
    assert found.least == pytest.approx(min(ratios))
    assert found.most == pytest.approx(max(ratios))
    assert found.least <= found.median <= found.most


def test_other_devices_and_what_libraries_hide_do_not_count() -> None:
    assert planner.compare_peaks([peak(1.0, device="another"), peak(9.0, predicted=100 * 2**20)], "cpu, x") is None
    small = peak(1.5, predicted=100 * 2**20, of="allocated")
    assert planner.compare_peaks([small], "cpu, x") == Error("cpu, x", 1, 1.5, 1.5, 1.5)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert planner.read_peaks(folder) == []
    kept = [peak(0.5), peak(1.25)]
    for one in kept:
        planner.add_peak(folder, one)
    with (folder / "peaks.jsonl").open("a") as file:
        file.write('{"device": "of an older release"}\n{"torn')
    assert planner.read_peaks(folder) == kept


SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize("config", ["single", "zero3"])
def test_a_run_says_what_it_took_and_plans_say_how_far_they_were_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    """1 GiB or so, most of it logits, so that a process's other memory is little beside it."""
    tree = {
        "model": {
            "config": {"model_type": "llama", **SIZES, "num_hidden_layers": 2, "vocab_size": 32_000},
            "loss": "plain",
        },
        "tokenizer": {"vocab_size": 512},
        "data": {
            "train": [{"sample": 400}],
            "validation_fraction": 0.0,
            "sequence_length": 512,
            "cache_dir": str(tmp_path / "cache"),
        },
        "batch": {"global_size": 8, "micro_size": 4},
        "length": {"steps": 2},
        "output": {"dir": str(tmp_path / "run"), "save_model": False},
        "checkpoint": {"at_end": False},
        "precision": "fp32",
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    code, output = run(command(config, str(file)), env=environment())
    assert code == 0, output
    found = json.loads((tmp_path / "run" / "run.json").read_text())["peak_memory"]
    assert found["of"] == "resident"
    # Resident memory is a rough measure; test_plan_peak.py has an exact one.
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.3)
    assert found["predicted"] > GIB // 2
    code, out, _ = said(capsys, file)
    assert code == 0
    ratio = found["measured"] / found["predicted"]
    device = device_selection.device_identity()["device"]
    assert f"On this machine ({device}) 1 run(s) took {ratio:.2f} to {ratio:.2f} of the peak" in out
    code, out, _ = said(capsys, file, "--json")
    assert json.loads(out)["own_error"]["median"] == pytest.approx(ratio)


def test_a_network_that_cannot_be_counted_is_measured_all_the_same(launcher: Launcher) -> None:
    job = {
        "task": {"name": "own_task:mlp", "args": {"width": 16}},
        "batch": {"global_size": 16, "micro_size": 4},
        "length": {"steps": 2},
        "precision": "fp32",
    }
    found = launcher.one("ddp", job).check().facts["peak_memory"]
    assert found["predicted"] is None
    assert found["of"] == "resident"
