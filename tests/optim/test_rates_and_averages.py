"""Rates of parameters, averages of weights, Muon and schedule-free steps, against plain loops of their formulas."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Launcher, assert_same_path, read_lines
from inside import Done, at_step, mlp, run_here, stop_after
from own_task import Points
from recipes_for_tests import ARCHITECTURES, adapted, base
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import OptimSection
from finetune.distributed.state.weight_average import AVERAGE, WeightAverage
from finetune.models.forward_wrapper import ForwardWrapper, unwrap
from finetune.optim import optimizers
from finetune.optim.parameter_groups import parameter_groups
from finetune.tasks.task_lookup import find_task
from finetune.utils.errors import RecipeError

pytestmark = pytest.mark.xdist_group("resume")


def network_of(tree: dict[str, Any]) -> nn.Module:
    recipe = validate_recipe(tree)
    return find_task(recipe).build_skeleton(recipe, None)


def factors(network: nn.Module, **optim: Any) -> dict[str, float]:
    groups = parameter_groups(ForwardWrapper(network), OptimSection(**optim))
    names = {id(p): name for name, p in network.named_parameters()}
    return {names[id(p)]: group["lr_factor"] for group in groups for p in group["params"]}


def test_lora_plus_is_that_of_peft() -> None:
    from peft.optimizers import create_loraplus_optimizer

    lora = {"rank": 4, "dora": True, "save_modules": ["lm_head", "norm"]}
    network = network_of(adapted(base()["model"], lora))
    theirs = create_loraplus_optimizer(network, torch.optim.AdamW, lr=0.5, loraplus_lr_ratio=16)
    names = {id(p): name for name, p in network.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in theirs.param_groups for p in group["params"]}
    assert {name: 0.5 * factor for name, factor in factors(network, lora_plus=16).items()} == rates
    assert set(rates.values()) == {0.5, 8.0}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_tied", "qwen3"])
def test_layers_decay_as_in_beit(name: str) -> None:
    """Of two layers: 0.5 for the last, 0.25 for the first, 0.125 for embeddings, the norms beside them included."""
    found = factors(network_of(ARCHITECTURES[name]), layer_decay=0.5)
    for parameter, factor in found.items():
        if any(f"{stack}.{layer}." in parameter for stack in ("layer", "layers", "h") for layer in "01"):
            assert factor == (0.5 if ".1." in parameter else 0.25), parameter
        else:
            assert factor == (0.125 if any(w in parameter for w in ("embed", "wte", "wpe")) else 1.0), parameter
    assert set(found.values()) == ({0.125, 0.25, 0.5, 1.0})


def test_factors_of_modules_multiply() -> None:
    network = network_of(base())
    found = factors(network, layer_decay=0.5, lr_factors={"layers.1": 3.0, "q_proj": 2.0, "lm_head": 10.0})
    assert found["model.layers.1.self_attn.q_proj.weight"] == 3.0
    assert found["model.layers.0.self_attn.q_proj.weight"] == 0.5
    assert found["lm_head.weight"] == 10.0
    with pytest.raises(
        RecipeError, match=r"optim.lr_factors: 'lm_haed' is no trained module .* did you mean 'lm_head'"
    ):
        factors(network, lr_factors={"lm_haed": 2.0})


@pytest.mark.parametrize(
    ("optim", "says"),
    [
        ({"lora_plus": 16}, "optim.lora_plus: it is for adapters. Add a `lora` section"),
        ({"ema_every_steps": 2}, "`ema_every_steps` needs `ema_decay`"),
        ({"name": "ScheduleFreeAdamW"}, "schedule.name: ScheduleFreeAdamW averages in place of a decay, got cosine"),
        ({"name": "ScheduleFreeAdamW", "ema_decay": 0.9}, "`ema_decay`: ScheduleFreeAdamW keeps an average of its own"),
        ({"name": "Muon", "args": {"ns_dtype": "fp16"}}, "ns_dtype is fp32 or bf16"),
    ],
)
def test_refused(optim: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=says):
        run_here(mlp(tmp_path, optim=optim))


def test_layers_of_two_stacks_have_no_depth() -> None:
    layers = nn.ModuleDict({name: nn.ModuleList([nn.Linear(2, 2)]) for name in ("encoder", "decoder")})
    with pytest.raises(RecipeError, match=r"optim.layer_decay: .* one stack of layers .* trains 2"):
        factors(layers, layer_decay=0.5)


def test_matrices_of_layers_are_muons() -> None:
    network = network_of(ARCHITECTURES["bert"])
    groups = parameter_groups(ForwardWrapper(network), OptimSection(name="Muon"))
    names = {id(p): name for name, p in network.named_parameters()}
    matrices = {names[id(p)] for group in groups if group["matrix"] for p in group["params"]}
    assert matrices == {n for n, p in network.named_parameters() if ".layer." in n and p.ndim == 2}
    assert matrices
    # Half of what AdamW keeps, of these.
    elements = {n: p.numel() for n, p in network.named_parameters()}
    kept = sum(size * (4 if name in matrices else 8) for name, size in elements.items())
    state = optimizers.state_bytes(OptimSection(name="Muon"), groups)
    assert state == pytest.approx(kept / sum(elements.values()))


def test_embeddings_are_none_in_a_network_without_stacks() -> None:
    network = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.Embedding(4, 2))
    groups = parameter_groups(network, OptimSection(name="Muon"))
    assert [len(group["params"]) for group in groups if group["matrix"]] == [1]


def test_a_tensor_that_is_used_late_is_averaged_from_the_start() -> None:
    """AdamW makes its state where it finds none, so that the average must not be there before."""
    weights = [nn.Parameter(torch.full((3,), float(index))) for index in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)

    def each_master(change: Any, changes: bool) -> None:
        for p in weights:
            change(p.detach(), optimizer.state[p])

    average, theirs = WeightAverage(each_master, 0.9, 1, stateless=False), [p.detach().clone() for p in weights]
    for step in range(4):
        weights[0].grad, weights[1].grad = torch.ones(3), torch.ones(3) if step > 1 else None
        optimizer.step()
        average.update(torch.tensor(1.0), step)
        theirs = [0.9 * one + 0.1 * p.detach() for one, p in zip(theirs, weights, strict=True)]
    average.update(torch.tensor(torch.nan), 4)
    torch.testing.assert_close([optimizer.state[p][AVERAGE] for p in weights], theirs)


def steps_of(name: str, shapes: list[tuple[int, ...]], groups: Any = None, **arguments: Any) -> tuple[Any, ...]:
    """Ten steps of an optimiser on given gradients: the weights before, the gradients, the optimiser, its weights."""
    generator = torch.Generator().manual_seed(0)
    begin = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(10)]
    weights = [nn.Parameter(tensor.clone()) for tensor in begin]
    optimizer = optimizers._OWN[name](groups(weights) if groups else weights, **arguments)
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return begin, gradients, optimizer, weights


def near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muons_steps(adjust: str) -> None:
    """Jordan's: momentum by Nesterov, five iterations of a polynomial of odd degree; AdamW elsewhere."""
    lr, decay, shapes = 0.02, 0.1, [(6, 4), (3, 8), (5, 5), (7,)]

    def groups(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": [*weights[:2], weights[3]]}, {"params": [weights[2]], "matrix": False}]

    begin, gradients, _, ours = steps_of("Muon", shapes, groups, lr=lr, weight_decay=decay, adjust_lr_fn=adjust)
    theirs, velocity = [w.double() for w in begin], [torch.zeros_like(w).double() for w in begin]
    for step in gradients:
        for index in range(2):
            g, w = step[index].double(), theirs[index]
            velocity[index] = 0.95 * velocity[index] + 0.05 * g
            x = 0.05 * g + 0.95 * velocity[index]
            x = x / x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.775 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
            rows, columns = w.shape
            scale = math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))
            theirs[index] = w * (1 - lr * decay) - lr * scale * x
    others = [nn.Parameter(begin[index].double()) for index in (2, 3)]
    adamw = torch.optim.AdamW(others, lr=lr, weight_decay=decay)
    for step in gradients:
        others[0].grad, others[1].grad = step[2].double(), step[3].double()
        adamw.step()
    for one, other in zip(ours, [*theirs[:2], *(p.detach() for p in others)], strict=True):
        near(one.detach(), other, 1e-6)


def test_schedule_free_steps() -> None:
    """As the reference takes them, which keeps y and z: x is (y - (1 - beta1) z) / beta1."""
    lr, decay, (beta1, beta2) = 0.05, 0.1, (0.9, 0.999)
    begin, gradients, optimizer, ours = steps_of("ScheduleFreeAdamW", [(4, 3), (5,)], lr=lr, weight_decay=decay, r=1.0)
    for index, weight in enumerate(ours):
        y = z = begin[index].double()
        second, total = torch.zeros_like(y), 0.0
        for k, step in enumerate(gradients):
            g = step[index].double()
            second = beta2 * second + (1 - beta2) * g * g
            update = g / ((second / (1 - beta2 ** (k + 1))).sqrt() + 1e-8) + decay * y
            total += (k + 1) * lr**2
            c = (k + 1) * lr**2 / total
            y = y + c * (z - y) + lr * (beta1 * (1 - c) - 1) * update
            z = z - lr * update
        near(weight.detach(), y, 1e-6)
        near(optimizer.state[weight]["average"], (y - (1 - beta1) * z) / beta1, 1e-6)


FREE = {"name": "ScheduleFreeAdamW", "lr": 1e-2}
CONSTANT = {"name": "constant", "warmup_steps": 3}
AVERAGES: dict[str, dict[str, Any]] = {
    "each": {"optim": {"lr": 1e-2, "ema_decay": 0.9}},
    "some": {"optim": {"lr": 1e-2, "ema_decay": 0.7, "ema_every_steps": 3}},
    # One optimiser without state of its own.
    "stateless": {"optim": {"name": "SGD", "lr": 1e-2, "ema_decay": 0.9}},
    "free": {"optim": FREE, "schedule": CONSTANT},
}


def averaged(place: Path, name: str, **sections: Any) -> dict[str, Any]:
    about = {"eval": {"every_steps": 4}, "checkpoint": {"every_steps": 4, "keep": 9}, "length": {"steps": 12}}
    tree = mlp(place, **about, **sections)
    return {**tree, **AVERAGES[name], "schedule": CONSTANT}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Done, list[dict[str, torch.Tensor]]]]:
    """Runs with averages, and their weights before the first step and after each."""
    runs = {}
    for name in AVERAGES:
        weights: list[dict[str, torch.Tensor]] = []

        def note(run: Any, weights: Any = weights) -> None:
            weights.append({name: p.detach().clone() for name, p in unwrap(run.model).named_parameters()})

        def watch(run: Any, note: Any = note) -> None:
            note(run)
            for step in range(1, 13):
                at_step(step, note)(run)

        runs[name] = run_here(averaged(tmp_path_factory.mktemp(name), name), watch), weights
    return runs


@pytest.mark.parametrize("name", ["each", "some", "stateless"])
def test_the_average_is_evaluated_and_written(name: str, done: Any, tmp_path: Path) -> None:
    """That of a plain loop; the path is that of a run without it, to the bit."""
    run, weights = done[name]
    optim = AVERAGES[name]["optim"]
    average = {key: tensor.double() for key, tensor in weights[0].items()}
    for step, after in enumerate(weights[1:], 1):
        if step % optim.get("ema_every_steps", 1) == 0:
            decay = optim["ema_decay"]
            average = {key: decay * tensor + (1 - decay) * after[key].double() for key, tensor in average.items()}
        if step % 4 == 0:
            saved = run.directory / f"checkpoints/step-{step:08d}/model"
            (model,) = (load_file(file) for file in saved.glob("*.safetensors"))
            for key, tensor in average.items():
                near(model[key], tensor, 1e-6)
            network, points = find_task(validate_recipe(mlp(Path("x")))).build_model, Points(33, 2)
            plain = network(validate_recipe(mlp(Path("x"))), None)
            plain.load_state_dict({key: tensor.float() for key, tensor in average.items()})
            loss = functional.mse_loss(plain(points.inputs), points.targets).item()
            (line,) = (m for m in metrics_of(run) if m["step"] == step and "validation_loss" in m)
            assert line["validation_loss"] == pytest.approx(loss, rel=1e-5)
    for key, tensor in run.weights.items():
        assert torch.equal(tensor, model[key])
    without = {key: value for key, value in optim.items() if not key.startswith("ema")}
    bare = run_here({**averaged(tmp_path, name), "optim": without})
    assert bare.losses == run.losses
    torch.testing.assert_close(bare.weights, weights[-1], rtol=0, atol=0)


def metrics_of(run: Done) -> list[dict[str, Any]]:
    return read_lines(run.directory / "metrics.jsonl")


@pytest.mark.parametrize("name", ["some", "free"])
def test_a_stopped_run_goes_on_bit_for_bit(name: str, done: Any, tmp_path: Path) -> None:
    """Stopped before anything was averaged, and later; evaluations on the way change nothing."""
    run, _ = done[name]
    for stop in (2, 7):
        tree = averaged(tmp_path / str(stop), name)
        run_here(tree, stop_after(stop))
        again = run_here(tree)
        assert again.losses == run.losses
        torch.testing.assert_close(again.weights, run.weights, rtol=0, atol=0)
    seldom = run_here({**averaged(tmp_path / "seldom", name), "eval": {"at_end": True}})
    torch.testing.assert_close(seldom.weights, run.weights, rtol=0, atol=0)


def test_the_best_average_is_written(tmp_path: Path) -> None:
    """That of the best evaluation's checkpoint, not the weights which went on learning from there."""
    tree = averaged(tmp_path, "each", output={"model": "best"})
    # The later the worse.
    tree |= {"optim": {"name": "SGD", "lr": 0.5, "ema_decay": 0.5, "clip_norm": None}, "checkpoint": {"keep": 9}}
    run = run_here(tree | {"eval": {"every_steps": 1}})
    best = run.results["model_step"]
    assert best < 12
    saved = run.directory / f"checkpoints/step-{best:08d}"
    (model,) = (load_file(file) for file in (saved / "model").glob("*.safetensors"))
    torch.testing.assert_close(run.weights, model, rtol=0, atol=0)
    (state,) = (load_file(file) for file in saved.glob("optimizer*.safetensors"))
    assert not torch.equal(state["parameter/0.weight"], model["0.weight"])


RUNS = {
    "free": {
        **base(length={"steps": 6}, optim={**FREE, "args": {"eps": 1e-6}}, schedule=CONSTANT),
        "task": {"name": "own_task:mlp"},
        "data": {},
    }
}
LAUNCHED_RUNS = dict.fromkeys(("single", "zero1", "zero2", "zero3"), RUNS)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in list(LAUNCHED_RUNS)[1:]]
)
def test_free_of_schedules_in_flat_buffers(launcher: Launcher, kind: str) -> None:
    single, other = (launcher.many(name, LAUNCHED_RUNS[name])["free"] for name in ("single", kind))
    assert_same_path(single, other, 1e-4)


def test_a_resume_may_leave_the_average(done: Any, tmp_path: Path) -> None:
    run, weights = done["each"]
    mode = str(run.directory / "checkpoints/step-00000008")
    tree = averaged(tmp_path, "each", resume={"mode": mode, "allow": ["optim.ema_decay"]})
    again = run_here({**tree, "optim": {"lr": 1e-2}})
    torch.testing.assert_close(again.weights, weights[-1], rtol=0, atol=0)
    (state,) = (load_file(file) for file in (again.directory / "checkpoints/step-00000012").glob("opt*.safetensors"))
    assert not [key for key in state if key.startswith(("average/", "parameter/"))]


def test_an_adapters_average_is_its_file(tmp_path: Path) -> None:
    optim = {"name": "SGD", "lr": 0.5, "lora_plus": 4.0, "ema_decay": 0.5, "args": {}}
    tree = adapted(base()["model"], {"rank": 2, "targets": ["q_proj"]}, optim=optim, checkpoint={"every_steps": 2})
    run = run_here({**tree, "output": {"dir": str(tmp_path)}, "length": {"steps": 2}})
    saved = run.directory / "checkpoints/step-00000002"
    adapter, state = (load_file(saved / file) for file in ("model/adapter_model.safetensors", "optimizer.safetensors"))
    written = load_file(run.directory / "model/adapter_model.safetensors")
    torch.testing.assert_close(written, adapter, rtol=0, atol=0)
    learning = {key.replace(".default", ""): t for key, t in state.items() if key.startswith("parameter/")}
    assert {f"parameter/{key}" for key in adapter} == set(learning)
    changed = {key: not torch.equal(tensor, learning[f"parameter/{key}"]) for key, tensor in adapter.items()}
    assert all(changed.values())
