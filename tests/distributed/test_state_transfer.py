"""State goes from any backend to any other without the loss of a bit, and training continues as if never stopped."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from external_commands import needs_ops, require_ops
from forkserver import ForkServer
from harness import ROOT
from ranks import needed_ops
from torch import nn

from finetune.distributed.state import state_transfer
from finetune.distributed.strategies import deepspeed, fsdp, strategy
from finetune.utils.errors import BackendError, CheckpointError

TORCH = strategy.STRATEGY

pytestmark = pytest.mark.xdist_group("state")

# What is trained in each launch (its processes, launch file and model), before what is taken up from all before it.
# DDP itself refuses parameters that are never used. Names with a dot are launch files that `variants` writes.
MAKES: dict[int, list[tuple[str, str]]] = {
    1: [("single", case) for case in ("llama", "tied", "odd", "lora")],
    4: [("hsdp", "llama"), ("hsdp", "odd"), ("fsdp", "odd"), ("zero2", "odd"), ("zero3", "odd")],
    2: [
        *(("ddp", case) for case in ("llama", "tied", "lora")),
        *(("fsdp", case) for case in ("llama", "tied", "odd", "lora")),
        ("fsdp_bf16.yaml", "llama"),
        *(("zero1", case) for case in ("llama", "odd")),
        *(("zero2", case) for case in ("llama", "tied", "lora")),
        ("zero2_bf16.yaml", "llama"),
        *(("zero3", case) for case in ("llama", "tied", "odd", "lora")),
        ("zero3_bf16.yaml", "llama"),
        *(("zero3_offload", case) for case in ("llama", "odd")),
    ],
}
CROSSES = {
    1: [("single", case) for case in ("llama", "tied", "odd", "lora")],
    4: [("hsdp", "llama"), ("hsdp", "odd")],
    2: [
        *((name, "llama") for name in ("ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload")),
        *((name, "odd") for name in ("fsdp", "zero2", "zero3")),
    ],
}
REFUSES = [(name, "llama") for name in ("ddp", "fsdp", "zero2", "zero3")]
NVME = [
    ("make", "zero3_nvme.yaml", "wide"),
    ("cross", "zero3_nvme.yaml", "wide"),
    ("cross", "zero3_nvme.yaml", "llama"),
]


def variants(folder: Path) -> None:
    """Launch files in which weights are computed with in bf16, and lie in DeepSpeed's buffers in other ways."""
    bf16 = {"bf16": {"enabled": True}}
    nvme = {"device": "nvme", "nvme_path": str(folder / "disk")}
    for name, base, changes in (
        ("zero2_bf16", "zero2", {**bf16, "zero_optimization": {"round_robin_gradients": True}}),
        # Some parameters are whole on every rank, and a buffer holds only few.
        (
            "zero3_bf16",
            "zero3",
            {**bf16, "zero_optimization": {"stage3_param_persistence_threshold": 1600, "sub_group_size": 3000}},
        ),
        ("zero3_nvme", "zero3_nvme", {"zero_optimization": {"offload_param": nvme, "offload_optimizer": nvme}}),
    ):
        config = merged(json.loads((ROOT / f"ds_configs/{base}.json").read_text()), changes)
        (folder / f"{name}.json").write_text(json.dumps(config))
        launch = yaml.safe_load((ROOT / f"accelerate_configs/{base}.yaml").read_text())
        launch["deepspeed_config"]["deepspeed_config_file"] = str(folder / f"{name}.json")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(launch))
    launch = yaml.safe_load((ROOT / "accelerate_configs/fsdp.yaml").read_text())
    (folder / "fsdp_bf16.yaml").write_text(yaml.safe_dump({**launch, "mixed_precision": "bf16"}))


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return tree | {k: merged(tree.get(k, {}), v) if isinstance(v, dict) else v for k, v in changes.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("state")
    variants(made)
    return made


def launched(
    fork_server: ForkServer, folder: Path, name: str, processes: int, jobs: list[tuple[str, str, str]]
) -> dict[str, str]:
    """Runs jobs in one launch, and returns what each found: nothing where all is well."""
    require_ops(needed_ops("zero3_offload"))
    places = [(kind, str(folder / config) if "." in config else config, case) for kind, config, case in jobs]
    (folder / f"{name}.jobs").write_text(json.dumps(places))
    arguments = (name, str(folder), str(folder / f"{name}.jobs"))
    config = "single" if processes == 1 else "ddp"
    code, output = fork_server.launch(config, *arguments, script="tests/support/state_worker.py", processes=processes)
    assert code == 0, output[-6000:]
    report: dict[str, str] = json.loads((folder / f"{name}.json").read_text())
    return report


@pytest.fixture(scope="module")
def reports(fork_server: ForkServer, folder: Path) -> dict[str, str]:
    """What all launches found, by their number of processes, launch file and model."""
    found: dict[str, str] = {}
    rounds = [(1, "make", MAKES[1]), (4, "make", MAKES[4]), (2, "make", MAKES[2]), (4, "cross", CROSSES[4])]
    rounds += [(1, "cross", CROSSES[1])]
    for processes, kind, pairs in rounds:
        jobs = [(kind, *pair) for pair in pairs]
        if processes == 2:
            jobs += [("cross", *pair) for pair in CROSSES[2]] + [("refuse", *pair) for pair in REFUSES]
        report = launched(fork_server, folder, f"{kind}{processes}", processes, jobs)
        found |= {f"{processes} {key}": value for key, value in report.items()}
    return found


def of(reports: dict[str, str], processes: int, config: str, case: str, kind: str) -> dict[str, str]:
    start = f"{processes} {Path(config).stem} {case} {kind}: "
    found = {key.removeprefix(start): value for key, value in reports.items() if key.startswith(start)}
    assert found
    return found


@pytest.mark.parametrize(
    ("processes", "config", "case"), [(number, *pair) for number, pairs in MAKES.items() for pair in pairs]
)
def test_goes_on_as_if_never_stopped(reports: dict[str, str], processes: int, config: str, case: str) -> None:
    found = of(reports, processes, config, case, "make")
    assert {"read back", "loss", "goes on"} <= found.keys()
    assert not {key: value for key, value in found.items() if value}


@pytest.mark.parametrize(
    ("processes", "config", "case"), [(number, *pair) for number, pairs in CROSSES.items() for pair in pairs]
)
def test_takes_up_what_any_other_left(reports: dict[str, str], processes: int, config: str, case: str) -> None:
    found = of(reports, processes, config, case, "cross")
    for number in {1, 4, 2}:
        for other, its_case in MAKES[number]:
            if its_case == case:
                assert f"from {Path(other).stem}-{number}" in found
    assert not {key: value for key, value in found.items() if value}


@pytest.mark.parametrize(("config", "case"), REFUSES)
def test_refuses_what_does_not_fit(reports: dict[str, str], config: str, case: str) -> None:
    found = of(reports, 2, config, case, "refuse")
    for what, name in {
        "missing": "'parameter/model.norm.weight'",
        "unexpected": "'parameter/more.weight'",
        "unexpected state": "'exp_avg/more.weight'",
        "shape": "'parameter/model.norm.weight' is (33,)",
        "dtype": "'parameter/model.norm.weight' is (32,) in torch.bfloat16",
    }.items():
        assert name in found[what], found
    # What one process or DDP take, since state may have any shape there, and each parameter its own step.
    assert ("'exp_avg/model.norm.weight' is (33,)" in found["state shape"]) == (config != "ddp")
    for what, name in {"state incomplete": "exp_avg", "step": "step"}.items():
        assert (f"'{name}/model.norm.weight'" in found[what]) == config.startswith("zero")
    assert found["good"] == "written"


@pytest.mark.nvme
@needs_ops("async_io")
def test_goes_on_from_the_disk(fork_server: ForkServer, reports: dict[str, str], folder: Path) -> None:
    found = launched(fork_server, folder, "nvme", 2, NVME)
    assert "zero3_nvme wide make: disk" in found
    assert any("from hsdp-4" in key for key in found)
    assert not {key: value for key, value in found.items() if value}


class Counting(torch.optim.Optimizer):
    """Keeps numbers of Python's, as older optimisers do, and a table of its own shape."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                held = self.state[parameter]
                if not held:
                    held |= {"step": 0, "decay": 1.0, "table": torch.zeros(3), "nothing": None}
                held["step"] += 1
                held["decay"] *= 0.1
                held["table"] += held["step"]
                parameter.add_(parameter.grad, alpha=-group["lr"] * held["decay"])


def small(optimizer: type[torch.optim.Optimizer], **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    network[1].bias.requires_grad_(False)
    made = optimizer([p for p in network.parameters() if p.requires_grad], **arguments)
    for _ in range(2):
        network(torch.ones(1, 3)).sum().backward()
        made.step()
        made.zero_grad()
    return network, made


def copied(network: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    return {key: piece.gather().clone() for key, piece in state_transfer.read_state(network, optimizer, cut=False)}


def test_numbers_come_back_as_what_they_were() -> None:
    network, optimizer = small(Counting)
    have = copied(network, optimizer)
    assert list(state_transfer.parameter_sizes(network).values()) == [6, 2, 2]
    assert {key.partition("/")[0] for key in have} == {"parameter", "step", "decay", "table"}
    network, optimizer = small(Counting, lr=0.3)
    state_transfer.write_state(network, optimizer, list(have), have.__getitem__, cut=False)
    held = optimizer.state[network[0].weight]
    assert (type(held["step"]), held["step"], type(held["decay"])) == (int, 2, float)
    assert held["decay"] == 1.0 * 0.1 * 0.1
    assert held["table"].tolist() == [3.0, 3.0, 3.0]
    again = copied(network, optimizer)
    assert all(torch.equal(have[key], again[key]) for key in have)


def test_the_order_is_no_matter_of_how_state_was_filled() -> None:
    """Ranks send each other pieces by it, and each of them may have read a checkpoint's keys in its own order."""
    network, optimizer = small(torch.optim.AdamW)
    have = copied(network, optimizer)
    state_transfer.write_state(network, optimizer, list(have)[::-1], have.__getitem__, cut=False)
    assert list(copied(network, optimizer)) == list(have)


def test_what_is_read_is_live_and_what_is_written_is_a_copy() -> None:
    network, optimizer = small(torch.optim.AdamW)
    live = dict(state_transfer.read_state(network, optimizer, cut=False))["parameter/0.weight"].local
    assert live.data_ptr() == network[0].weight.data_ptr()
    assert not live.requires_grad
    have = copied(network, optimizer)
    state_transfer.write_state(network, optimizer, list(have), have.__getitem__, cut=False)
    for tensor in have.values():
        tensor.fill_(7)
    assert not any((piece.local == 7).any() for _, piece in state_transfer.read_state(network, optimizer, cut=False))


@pytest.mark.parametrize("fused", [True, False])
def test_without_state_the_optimiser_stays_as_it_is(fused: bool) -> None:
    network, optimizer = small(torch.optim.AdamW, fused=fused)
    have = copied(network, optimizer)
    assert have["step/0.weight"].dtype == torch.float32
    parameters = [key for key in have if key.startswith("parameter/")]
    state_transfer.write_state(network, optimizer, parameters, have.__getitem__, cut=False)
    after = copied(network, optimizer)
    assert all(torch.equal(have[key], after[key]) for key in have)


def test_state_of_another_kind_is_refused() -> None:
    network, optimizer = small(Counting)
    optimizer.state[network[0].weight]["list"] = [1, 2]
    with pytest.raises(CheckpointError, match=r"'list/0\.weight' is list"):
        copied(network, optimizer)


def test_weights_that_lie_gathered_are_not_read() -> None:
    network, optimizer = small(torch.optim.AdamW)
    with pytest.raises(BackendError, match=r"'0\.weight' is not sharded"):
        list(fsdp.STRATEGY.read_state(None, network, optimizer))


def scaled(scaler: Any) -> Any:
    """What stands in for an accelerator with torch's scaler, or an engine with DeepSpeed's."""
    engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
    return SimpleNamespace(scaler=scaler, deepspeed_engine_wrapped=SimpleNamespace(engine=engine))


def torch_scaler(**options: Any) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, **options)


def dynamic_scaler() -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    options = {"min_scale": 1, "delayed_shift": 2, "consecutive_hysteresis": False}
    return DynamicLossScaler(1024.0, scale_window=3, **options)


def test_torch_scaler_goes_on() -> None:
    def step(scaler: Any, value: float) -> None:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight * value).backward()
        scaler.step(optimizer)
        scaler.update()

    one, other = torch_scaler(), torch_scaler()
    for value in (1.0, float("inf"), 1.0, 1.0):
        step(one, value)
    saved = TORCH.scaler_state(scaled(one))
    assert saved == {"scale": 512.0, "good_steps": 2}
    TORCH.set_scaler_state(scaled(other), saved)
    for scaler in (one, other):
        step(scaler, 1.0)
        assert scaler.get_scale() == 1024.0
        assert TORCH.scaler_state(scaled(scaler)) == {"scale": 1024.0, "good_steps": 0}


def test_deepspeeds_scaler_goes_on() -> None:
    torch.manual_seed(0)
    overflows = (torch.rand(40) < 0.2).tolist()
    for stop in range(40):
        one, other = dynamic_scaler(), dynamic_scaler()
        one.raise_error_at_min_scale = other.raise_error_at_min_scale = False
        for overflow in overflows[:stop]:
            update(one, overflow)
        saved = deepspeed.STRATEGY.scaler_state(scaled(one))
        assert saved is not None
        deepspeed.STRATEGY.set_scaler_state(scaled(other), saved)
        for overflow in overflows[stop:]:
            update(one, overflow)
            update(other, overflow)
            assert one.cur_scale == other.cur_scale


def update(scaler: Any, overflow: bool) -> None:
    # Its own method asks the process group who may speak.
    from deepspeed.runtime.fp16 import loss_scaler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
        scaler.update_scale(overflow)


def test_no_scaler_has_no_state() -> None:
    assert TORCH.scaler_state(scaled(None)) is None
    assert TORCH.scaler_state(scaled(torch_scaler(enabled=False))) is None
    assert deepspeed.STRATEGY.scaler_state(scaled(SimpleNamespace(dynamic=False))) is None
