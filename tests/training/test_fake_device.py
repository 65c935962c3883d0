"""The paths that only a GPU takes, on a fake one (`fake_cuda.py`): whole runs of every backend, and of every precision.

Their results are those of a CPU, and their steps wait for nothing. What fails on a GPU fails here, see `FAULTS`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
import yaml
from external_commands import require
from filelock import FileLock
from forkserver import ForkServer
from harness import ROOT, Launcher, Result, assert_same_path

from finetune.config.recipe import validate_recipe
from finetune.distributed import device_selection
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.distributed.resolve_config import resolve_for_devices
from finetune.monitoring import out_of_memory
from finetune.utils.errors import BackendError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU: tests/training/test_gpu.py")


def recipe(**sections: Any) -> dict[str, Any]:
    """A tiny Llama that evaluates, samples and saves within four steps."""
    tree: dict[str, Any] = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
        },
        "tokenizer": {"vocab_size": 300},
        "data": {
            "train": [{"sample": 60}],
            "validation_fraction": 0.03,
            "sequence_length": 32,
            "packing": "documents",
            "num_workers": 1,
        },
        "batch": {"global_size": 4, "micro_size": 2},
        "length": {"steps": 4},
        "optim": {"lr": 2e-3, "args": {"eps": 1e-6}},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "log": {"every_steps": 1},
        "eval": {"micro_size": 32},
        "sample": {"prompt": "Once", "max_new_tokens": 4},
        "checkpoint": {"every_steps": 2},
        "precision": "fp32",
        "seed": 7,
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return tree


@dataclass(frozen=True)
class Fake:
    """Launches runs on the fake device, one process each."""

    folder: Path
    server: ForkServer
    library: Path

    def run(self, config: str, jobs: dict[str, dict[str, Any]]) -> dict[str, Result]:
        """Runs recipes one after the other, those of one name up to a `+` in one directory."""
        paths = []
        for name, job in jobs.items():
            directory = self.folder / name.partition("+")[0]
            job = {**job, "output": {"dir": str(directory)}}
            job["data"] = {**job["data"], "cache_dir": str(self.library.parent / "cache")}
            paths.append(self.folder / f"{name}.yaml")
            paths[-1].write_text(yaml.safe_dump(job))
        code, output = self.start(config, *map(str, paths))
        return {name: Result(code, output, self.folder / name.partition("+")[0]) for name in jobs}

    def start(self, config: str, *words: str) -> tuple[int, str]:
        env = {"FAKE_CUDA": str(self.library.parent)}
        return self.server.launch(config, *words, script="tests/support/on_fake_cuda.py", processes=1, env=env)


@pytest.fixture
def fake(launcher: Launcher, fork_server: ForkServer, tmp_path: Path) -> Fake:
    folder = launcher.shared / "fake_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        require("c++")
        library = fake_cuda.built(folder)
    return Fake(tmp_path, fork_server, library)


def on_cpu(launcher: Launcher) -> dict[str, Result]:
    return launcher.many("single", {name: recipe(precision=name) for name in ("fp32", "bf16")})


def waits(run: Result) -> list[list[str]]:
    """What each step of the launch waited for."""
    return json.loads((run.directory / "waited.json").read_text())


@pytest.mark.parametrize("config", ["single", "ddp", "fsdp", "fsdp_offload", "zero2", "zero3", "zero3_offload"])
def test_a_backend_takes_the_cpus_path_and_waits_for_nothing(launcher: Launcher, fake: Fake, config: str) -> None:
    """From the start to the exported model, over a save and a resume."""
    if config == "fsdp_offload" and torch.version.cuda and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("this torch asks a real GPU for the shape of a sharded tensor that it moves there")
    cpu = on_cpu(launcher)["fp32"]
    cut = {"eval": {"at_end": False}, "sample": None}
    gpu = fake.run(config, {"run+1": recipe(length={"steps": 2}, **cut), "run+2": recipe()})["run+2"].check()
    assert gpu.facts["runs"]["device"] == "cuda"
    assert gpu.facts["starts"][-1]["resumed_from"].endswith("step-00000002")
    assert_same_path(cpu, gpu, 2e-6)
    for key in ("validation_loss", "sample"):
        one, other = cpu.facts["results"][key], gpu.facts["results"][key]
        assert one == (other if isinstance(one, str) else pytest.approx(other, rel=1e-6))
    # DeepSpeed itself reads whether gradients overflowed, and ZeRO-3 what it is about to gather.
    ours = [[wait for wait in step if ": DeepSpeed, " not in wait] for step in waits(gpu)]
    if config == "fsdp_offload":
        # The host steps, and asks whether the gradients are finite.
        said = ("blocking copy of [] to the host", "aten::_local_scalar_dense", "blocking copy of [] to the device")
        assert [[wait.partition(": ")[0] for wait in step] for step in ours] == [list(said)] * 4
        return
    assert ours == [[], [], [], []]
    assert config.startswith("zero") or waits(gpu) == ours


def test_several_terms_and_a_pass_over_the_window_wait_for_nothing(fake: Fake) -> None:
    several = recipe(task={"name": "terms_task:several", "args": {"dropout": 0.3}}, data={}, sample=None)
    several["checkpoint"] = {"keep_best_by": "validation_above"}
    run = fake.run("single", {"terms": several})["terms"].check()
    assert waits(run) == [[], [], [], []]
    assert (run.series("drift") == 0).all()
    assert (run.series("inside/mean") != 0).all()


def test_loss_scaling_of_offloaded_gradients_is_refused() -> None:
    """On a device whose copies arrive late, its losses were nan from the second step on."""
    launch = launch_of_file(ROOT / "accelerate_configs/fsdp_offload.yaml", 1)
    for precision in ("bf16", "fp32"):
        resolve_for_devices(validate_recipe(recipe(precision=precision)), launch, 1, {})
    with pytest.raises(BackendError, match="reads the scale before it has arrived"):
        resolve_for_devices(validate_recipe(recipe(precision="fp16")), launch, 1, {})


def test_half_precision_takes_kernels_and_loss_scaling(launcher: Launcher, fake: Fake) -> None:
    """Under autocast rotary embeddings leave queries in fp32, which attention's kernel for documents refuses."""
    cpu = on_cpu(launcher)["bf16"].check()
    found = fake.run("single", {name: recipe(precision=name, length={"steps": 3}) for name in ("bf16", "fp16")})
    for name, run in found.items():
        run.check()
        np.testing.assert_allclose(run.series("loss"), cpu.series("loss")[:3], rtol=1e-3, err_msg=name)
        assert waits(run) == [[], [], []], name
        assert run.facts["runs"]["output_dtypes"]["Linear"] == {"bf16": "bfloat16", "fp16": "float16"}[name]
        assert run.steps[-1]["mfu"] > 0
        assert json.loads((run.directory / "calls.json").read_text())["torch_attn::_varlen_attn_backward"] > 0


def test_what_fails_on_a_gpu_fails_here(fake: Fake) -> None:
    """Each of the faults was put into a step once."""
    code, output = fake.start("single", "--faults", str(fake.folder))
    assert code == 0, output[-3000:]
    found = json.loads((fake.folder / "faults.json").read_text())
    none = found.pop("none")
    assert none["waits"] == []
    assert none["targets"] == 8
    assert none["tf32"] == [False, False], "fp32 means fp32"
    assert (
        "same device, but aten::addmm found tensors on cuda:0 and cpu"
        in found.pop("the batch stays on the host")["error"]
    )
    assert "has no attribute 'Evnt'" in found.pop("no such attribute")["error"]
    assert "unexpected keyword argument 'index'" in found.pop("no such argument")["error"]
    early = found.pop("read before it has arrived")
    assert math.isnan(early["targets"])
    assert math.isnan(early["norm"])
    expected = {
        "a copy from pageable memory": "pageable copy of [8] to the device",
        "a copy that blocks": "blocking copy of [8] to the device",
        "item": "aten::_local_scalar_dense",
        "bool": "aten::_local_scalar_dense",
        "tolist": "blocking copy of [] to the host",
        "nonzero": "aten::nonzero",
        "a mask as an index": "aten::index",
        "an index on the host": "aten::index by an index in host memory",
        "a tensor made of values": "blocking copy of [1] to the device",
    }
    assert found.keys() == expected.keys()
    for name, wait in expected.items():
        assert found[name]["waits"][0].startswith(f"{wait}: tests/support/on_fake_cuda.py"), name
        assert found[name]["norm"] == none["norm"], name


def test_a_process_that_sees_one_gpu_of_eight_asks_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """So Slurm hands them out: `--gpus-per-task=1`."""
    asked = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or properties)
    assert device_selection.available_memory() == 2**30
    assert asked == [0]


def test_a_host_that_runs_out_of_memory_is_not_blamed_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    for error in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: …")):
        assert "of the machine's" in str(out_of_memory.explain_out_of_memory(error))
    assert "of the device's 2.00 GiB 1.00" in str(
        out_of_memory.explain_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    )
