"""What CI runs with the lowest and the highest versions of the libraries; with those of .venv it is `make test-smoke`.

Every way to launch trains, resumes and exports, and each private name that `utils/compat` uses is used: it does what is
expected of it, with these versions. `make test` leaves this file out, since its tests look closer at the same.
"""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import private_uses
import pytest
import torch
from forkserver import ForkServer
from harness import Launcher, Result, assert_same_path, weight_difference
from private_names_worker import CHECKS
from recipes_for_tests import base
from testdata import MADE, MODEL

from finetune.config.recipe import validate_recipe
from finetune.distributed import gpu_specs
from finetune.planning import planner
from finetune.planning.step_time import Machines
from finetune.planning.trace import trace_launches

KINDS = ["ddp", "fsdp", "hsdp", "zero2", "zero3", "sp", "tp"]
# Four processes share two cores. Blocks of packed weights do not divide over split layers as narrow as these.
LEFT_OUT = {"hsdp": ("lora", "qlora"), "tp": ("qlora",)}
STEPS, STOP = 4, 2

SHORT = {
    "length": {"steps": STEPS},
    "schedule": {"name": "constant", "warmup_steps": 0},
    "checkpoint": {"every_steps": STOP, "every_minutes": None, "keep": 9},
}
ADAPTERS = {"rank": 4, "targets": "all-linear"}
FULL = base(eval={"at_end": False}, **SHORT)
JOBS = {
    "full": FULL,
    "lora": base(
        lora=ADAPTERS, model={"name": MODEL, "config": None, "gradient_checkpointing": True}, tokenizer={}, **SHORT
    ),
    "qlora": base(lora=ADAPTERS, model={"quantization": "nf4"}, eval={"at_end": False}, **SHORT),
}
# A GPU's.
NOT_HERE = "_dump_nccl_trace_json"


@pytest.fixture(scope="module", autouse=True)
def uses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where uses of private names are noted: it comes before the fork server starts."""
    folder = tmp_path_factory.mktemp("uses") / "noted"
    private_uses.begin(folder)
    return folder


def second_half(launcher: Launcher, kind: str) -> dict[str, Any]:
    """The recipe of a run that resumes in the middle of one of another kind, or of its own."""
    begun = launcher.directory(kind, "full", FULL) / "checkpoints" / f"step-{STOP:08d}"
    return {**FULL, "resume": {"mode": str(begun)}}


def runs(launcher: Launcher, kind: str) -> dict[str, Result]:
    jobs = {name: job for name, job in JOBS.items() if name not in LEFT_OUT.get(kind, ())}
    jobs["stayed"] = second_half(launcher, kind)
    if kind != "single":
        runs(launcher, "single")["full"].check()
        jobs["moved"] = second_half(launcher, "single")
    return launcher.many(kind, jobs)


def assert_same_half(whole: Result, half: Result, tolerance: float) -> None:
    expected = [step["loss"] for step in whole.check().steps if step["step"] > STOP]
    assert [step["loss"] for step in half.check().steps] == pytest.approx(expected, rel=tolerance, abs=0.0)
    assert weight_difference(whole, half) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_the_single_process_path(launcher: Launcher, kind: str) -> None:
    single, found = runs(launcher, "single"), runs(launcher, kind)
    assert_same_half(found["full"], found.pop("stayed"), 0.0)
    assert_same_half(single["full"], found.pop("moved"), 1e-4)
    for name, run in found.items():
        assert_same_path(single[name], run, 1e-4)
        wrapper = json.loads((run.directory / "run.json").read_text())["runs"]["wrapper"]
        assert wrapper != single[name].facts["runs"]["wrapper"]


def test_one_process_goes_on_from_each(launcher: Launcher) -> None:
    single = runs(launcher, "single")
    assert_same_half(single["full"], single["stayed"], 0.0)
    for kind in KINDS:
        runs(launcher, kind)["full"].check()
    for half in launcher.many("single", {kind: second_half(launcher, kind) for kind in KINDS}).values():
        assert_same_half(single["full"], half, 1e-4)


@pytest.mark.parametrize(("kind", "name", "way"), [("fsdp", "lora", "merged"), ("zero3", "full", "merged-16bit")])
def test_an_export_says_the_same_elsewhere(
    launcher: Launcher, fork_server: ForkServer, tmp_path: Path, kind: str, name: str, way: str
) -> None:
    """A fresh process has opened it, which knows nothing of this package; `eval` does so as well."""
    run, folder = runs(launcher, kind)[name].directory, tmp_path / "exported"
    code, output = fork_server.run(["-m", "finetune", "export", str(run), "--as", way, "--to", str(folder)])
    assert code == 0, output
    text = str(MADE / "stories" / "endoftext.txt")
    losses = []
    for opened in (run / "model", folder):
        code, output = fork_server.run(["-m", "finetune", "eval", str(opened), "--data", text, "--json"])
        assert code == 0, output
        losses.append(json.loads(output[output.index("{") :])["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if way == "merged" else 1e-2)


@pytest.mark.parametrize(("kind", "more"), [("ddp", {}), ("fsdp", {}), ("fsdp", {"lora": ADAPTERS})])
def test_a_traced_step_holds_what_formulas_say(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, kind: str, more: dict[str, Any]
) -> None:
    def run(words: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        code, output = fork_server.run(words[1:], env=env)
        return subprocess.CompletedProcess(words, code, "", output)

    monkeypatch.setattr(trace_launches, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
    recipe = validate_recipe(base(batch={"global_size": 2, "micro_size": 1}, **more))
    plan = planner.make_plan(recipe, Machines(gpu_specs.find_gpu("h100-80gb"), 2, 1, 50.0, 0.4))
    (traced,) = trace_launches.trace_all(plan, trace_launches.find_wanted(plan, kind), None, lambda _: None)
    assert not traced.reason
    memory = traced.candidate.memory
    assert memory is not None
    expected = {
        "weights": memory.frozen + memory.trained,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
    }
    # To the byte with the versions of constraints.txt; torch 2.11 holds 32 bytes more of gradients.
    assert traced.state == pytest.approx(expected, rel=1e-2)
    assert traced.difference is not None
    assert abs(traced.difference) < traced.candidate.margin


@pytest.mark.parametrize("check", CHECKS)
def test_private_names(fork_server: ForkServer, tmp_path: Path, check: str) -> None:
    code, output = fork_server.run(["tests/support/private_names_worker.py", check, str(tmp_path)])
    assert code == 0, output


def test_every_private_name_is_used(uses: Path) -> None:
    """By the tests above: run the whole file."""
    unused = [use for use in private_uses.unused(uses) if torch.cuda.is_available() or not use.endswith(NOT_HERE)]
    assert not unused, "\n".join(unused)
