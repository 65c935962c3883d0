"""Optimisers: what they compute, where they run, that they resume bit for bit, and what they keep."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ROOT, Launcher
from inside import Done, at_step, mlp, run_here, stop_after
from own_optimizers import reference
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.strategies import strategy
from finetune.optim import lr_schedule, optimizers
from finetune.optim.optimizers import build_optimizer
from finetune.training import dry_run
from finetune.utils.errors import RecipeError

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("resume")]

# More than 4096 elements: bitsandbytes keeps fp32 for less.
WIDE = {"task": {"name": "own_task:mlp", "args": {"width": 128}}}


# Each is refused where it is not a single process's path. Sides that two processes do not divide.
LAYERWISE = {
    "lars": {"name": "LARS", "lr": 0.3, "weight_decay": 0.01},
    "lamb": {"name": "LAMB", "lr": 0.02, "weight_decay": 0.01},
    "muon": {"name": "Muon", "lr": 0.02, "weight_decay": 0.01},
    "free": {"name": "ScheduleFreeAdamW", "lr": 0.01, "args": {"eps": 1e-6}},
}
OWN_RATES = {"name": "own_optimizers:TwoRates", "lr": 1e-2, "args": {"eps": 1e-6}}


def recipe_of(name: str, **args: Any) -> Recipe:
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 16, "num_attention_heads": 2}
    return validate_recipe(
        {
            "model": {"config": {**config, "intermediate_size": 32, "num_hidden_layers": 1}},
            "tokenizer": {"vocab_size": 512},
            "data": {"train": [{"sample": 10}], "sequence_length": 16},
            "length": {"steps": 1},
            "optim": {"name": name, "args": args},
            "schedule": "constant",
        }
    )


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_a_stopped_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    def tree(place: str) -> dict[str, Any]:
        made = mlp(tmp_path / place, checkpoint={"every_steps": 5, "keep": 9})
        return {**made, **WIDE, "optim": {"name": name, "lr": 1e-3}}

    straight = run_here(tree("straight"))
    run_here(tree("stopped"), stop_after(12))
    done = run_here(tree("stopped"))
    assert done.losses == straight.losses
    torch.testing.assert_close(done.weights, straight.weights, rtol=0, atol=0)
    saved = {key: t.dtype for file in done.directory.rglob("*.safetensors") for key, t in load_file(file).items()}
    assert torch.uint8 in {dtype for key, dtype in saved.items() if key.startswith("state1/")}


@pytest.mark.parametrize(
    ("name", "args", "bytes_an_element"),
    [
        ("AdamW", {}, 8.0),
        ("Muon", {}, 4.0),
        ("ScheduleFreeAdamW", {}, 12.0),
        ("SGD", {}, 0.0),
        ("SGD", {"momentum": 0.9}, 4.0),
        # Two bytes, the largest of each 256, and two tables of 256 numbers.
        ("AdamW8bit", {}, 2 + 2 * 4 / 256 + 2 * 1024 / (64 * 256)),
    ],
)
def test_state_is_measured(name: str, args: dict[str, Any], bytes_an_element: float) -> None:
    assert optimizers.state_bytes(recipe_of(name, **args).optim) == bytes_an_element


@pytest.mark.parametrize(
    ("name", "launch", "says"),
    [
        ("AdamW8bit", "fsdp", "optim.name: AdamW8bit of bitsandbytes keeps its state in blocks of whole tensors"),
        ("Lion8bit", "zero2", "optim.name: Lion8bit of bitsandbytes keeps its state in blocks of whole tensors"),
        *(
            (name, launch, f"optim.name: the update of {name} depends on whole tensors")
            for name in ("Adafactor", "own_optimizers:Normed", "own_optimizers:Says")
            for launch in ("fsdp", "zero1", "zero3")
        ),
        *(
            (name, launch, f"optim.name: the update of {name} depends on whole tensors")
            for name, launch in (("Muon", "zero1"), ("Muon", "zero3"))
        ),
        ("LAMB", "zero2", "optim.name: the update of LAMB depends on whole tensors"),
        (
            "LARS",
            "zero3",
            "which keep tensors whole, or take an optimiser that treats each element alone, such as AdamW",
        ),
        ("Rprop", "fsdp", "optim.name: Rprop cannot work on tensors that are sharded"),
        ("LBFGS", "ddp", "optim.name: LBFGS cannot take a step with dense gradients and nothing else: LBFGS.step()"),
        ("AdamW8bits", None, "'AdamW8bits' is no optimiser, did you mean 'AdamW8bit'? torch.optim has ASGD, "),
        pytest.param(
            "PagedAdamW8bit",
            None,
            "PagedAdamW8bit pages its state out of a GPU's memory, and this machine has no GPU. Take AdamW8bit",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        pytest.param(
            "PagedAdEMAMix",
            None,
            "this machine has no GPU. Take AdamW8bit.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
)
def test_refused(name: str, launch: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if launch is None:
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(key, raising=False)
    else:
        from ranks import exported

        monkeypatch.chdir(ROOT)
        for key, value in exported(launch).items():
            monkeypatch.setenv(key, value)
    with pytest.raises(RecipeError, match=re.escape(says)) as caught:
        dry_run.describe(recipe_of(name))
    assert "\n" not in str(caught.value)


def test_fused_kernels_without_sharded_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("SGD", fused=True)
    optimizers.check_optimizer(recipe.optim, Launch(kind="zero2", num_processes=2))
    with pytest.raises(RecipeError, match=r"optim.args.fused: the fused kernel of SGD .* or leave args.fused out"):
        optimizers.check_optimizer(recipe.optim, Launch(kind="fsdp", num_processes=2))


@pytest.mark.parametrize("name", ["LAMB", "Muon"])
def test_what_ranks_hold_of_split_layers_is_no_whole_tensor(name: str) -> None:
    with pytest.raises(RecipeError, match=f"the update of {name} depends on whole tensors.*, such as AdamW.$"):
        optimizers.check_optimizer(recipe_of(name).optim, Launch(kind="fsdp", num_processes=4, replicate=1, tensor=2))
    optimizers.check_optimizer(recipe_of(name).optim, Launch(kind="fsdp", num_processes=4))


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_what_has_a_key_of_its_own_is_no_argument(name: str) -> None:
    with pytest.raises(RecipeError, match=f"`{name}` is no argument to give here: give it as `optim.{name}`"):
        recipe_of("AdamW", **{name: 0.1})


@pytest.mark.parametrize("name", sorted(optimizers._classes(torch.optim)))
def test_who_treats_each_element_alone_is_known(name: str) -> None:
    """The names that are believed, against three steps on parts of matrices."""
    if name in ("LBFGS", "SparseAdam"):
        with pytest.raises(RecipeError, match="cannot take a step"):
            optimizers.state_bytes(recipe_of(name).optim)
        return
    assert optimizers._trials_agree(recipe_of(name).optim) == (name in optimizers.ELEMENTWISE)


def weights_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [nn.Parameter(tensor) for tensor in (*found, torch.zeros(3, 2, dtype=dtype))]


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_layerwise_steps_are_those_of_the_papers(name: str, decay: float) -> None:
    shapes: list[tuple[int, ...]] = [(4, 6), (6,), (2, 3, 4)]
    ours, theirs = weights_of(shapes, torch.float32), weights_of(shapes, torch.float64)
    optimizer = optimizers._OWN[name](ours, lr=0.5, weight_decay=decay)
    state: dict[Any, Any] = {"lr": 0.5, "decay": decay}
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        gradients = [torch.randn(w.shape, generator=generator) for w in ours]
        for weight, gradient in zip(ours, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        reference(name, theirs, gradients, state)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """On one process; `rates` has tensors that learn at rates of their own."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: run_here(layerwise(folder / name, section)) for name, section in cases().items()}


def cases() -> dict[str, dict[str, Any]]:
    return {**LAYERWISE, "rates": OWN_RATES}


def layerwise(place: Path, section: dict[str, Any], **sections: Any) -> dict[str, Any]:
    tree = mlp(place, checkpoint={"every_steps": 10, "keep": 9}, **sections)
    schedule = {"schedule": {"name": "constant"}} if section["name"].startswith("ScheduleFree") else {}
    return {**tree, "task": {"name": "own_task:mlp", "args": {"width": 33}}, "optim": section, **schedule}


@pytest.mark.parametrize("launch", ["ddp", "fsdp", "hsdp"])
def test_layerwise_optimisers_take_one_path(launcher: Launcher, alone: dict[str, Done], launch: str) -> None:
    jobs = {name: layerwise(Path("anywhere"), section) for name, section in cases().items()}
    # From one process's checkpoint to the same end.
    jobs |= {
        f"{name}_resumed": {**jobs[name], "resume": {"mode": str(alone[name].directory / "checkpoints/step-00000010")}}
        for name in cases()
    }
    for name, result in launcher.many(launch, jobs).items():
        one = alone[name.removesuffix("_resumed")]
        first = 10 if name.endswith("_resumed") else 0
        assert len(result.check().steps) == 20 - first
        torch.testing.assert_close(
            torch.from_numpy(result.series("loss")), torch.tensor(one.losses[first:]).double(), rtol=2e-6, atol=0
        )
        torch.testing.assert_close(result.weights, one.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(cases()))
def test_a_stopped_run_of_these_goes_on_bit_for_bit(name: str, alone: dict[str, Done], tmp_path: Path) -> None:
    tree = layerwise(tmp_path, cases()[name])
    run_here(tree, stop_after(12))
    torch.testing.assert_close(run_here(tree).weights, alone[name].weights, rtol=0, atol=0)


def test_groups_keep_their_own_rates(tmp_path: Path) -> None:
    rates: list[list[float]] = []

    def note(run: Any) -> None:
        for step in range(1, 21):
            at_step(step, lambda run: rates.append(run.optimizer.optimizer.seen[-1]))(run)

    tree = layerwise(tmp_path, OWN_RATES)
    run_here(tree, lambda run: (note(run), stop_after(12)(run)))
    run_here(tree, note)
    lrs = [lr_schedule.lr_at(step, 20, validate_recipe(tree)) for step in range(20)]
    assert lrs[0] != lrs[12] != lrs[19]
    assert rates == [[pytest.approx(lr), pytest.approx(lr / 10)] * (len(rates[0]) // 2) for lr in lrs]
    # What the recipe says is set as it stands, to the bit.
    assert [found[0] for found in rates] == lrs


class Reads(TorchDispatchMode):
    """Counts what the host reads from the device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return function(*args, **(kwargs or {}))


SKIPS = {
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "LARS": {},
    "LAMB": {},
    "Muon": {},
    "ScheduleFreeAdamW": {},
    # What is not fused asks the host.
    "RMSprop": {},
    "Adagrad": {},
}


@pytest.mark.parametrize("name", SKIPS)
@pytest.mark.parametrize("begins", [True, False], ids=["first", "later"])
def test_a_step_that_is_not_finite_changes_nothing(name: str, begins: bool) -> None:
    """Neither weights nor state, and of fused optimisers without a word to the host."""
    runtime: Any = SimpleNamespace(accelerator=SimpleNamespace(scaler=None))

    def trained(*finite: bool) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        network, reads = nn.Linear(3, 2), []
        optimizer = build_optimizer(network, recipe_of(name, **SKIPS[name]), whole=True)
        generator = torch.Generator().manual_seed(1)
        for good in finite:
            for p in network.parameters():
                p.grad = torch.randn(p.shape, generator=generator) if good else torch.full_like(p, torch.nan)
            with Reads() as counted:
                strategy.STRATEGY.step(runtime, optimizer, torch.tensor(1.0 if good else torch.nan))
            reads.append(counted.count)
        states = [value for p in network.parameters() for value in optimizer.state[p].values()]
        return [*(p.detach() for p in network.parameters()), *states], reads

    (spoiled, reads), (clean, _) = trained(*([False] * begins), True, True, False, True), trained(True, True, True)
    torch.testing.assert_close(spoiled, clean, rtol=0, atol=0)
    if name in ("AdamW", "LARS", "LAMB", "Muon", "ScheduleFreeAdamW"):
        assert not any(reads)
    elif name == "SGD":
        # Until the momenta are there.
        assert not any(reads[1 + begins :])
    else:
        assert all(reads)
