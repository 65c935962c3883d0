"""The functions that a way of holding a network over ranks consists of, and the way that each kind of launch takes.

The defaults are those of one device, or of any of torch's wrappers. Each other strategy is made in a module of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from finetune.distributed.launch.launch_config import Launch, ResolvedConfig
from finetune.distributed.mesh import Mesh
from finetune.distributed.parameter_info import inner_name, inner_optimizer, local, master_weights, read_parameters
from finetune.distributed.split_parameters import Splits
from finetune.distributed.state import state_transfer, tensor_shards
from finetune.distributed.state.tensor_shards import Shard
from finetune.distributed.strategies import tensor
from finetune.distributed.strategies.prediction import Flow, ParamSpecs, Share, predict_whole_share
from finetune.utils.compat import torch_private
from finetune.utils.errors import BackendError

TIMEOUT = timedelta(minutes=30)
"""Collectives wait this long for a slow rank before they give up."""


class Runtime(Protocol):
    """One process of a run, as strategies see it: `Backend`."""

    accelerator: Accelerator
    launch: Launch
    mesh: Mesh
    precision: str
    accumulation: int
    reduce_dtype: str
    splits: Splits
    model: Any
    optimizer: Any
    num_weights: int
    num_trained: int

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


Prepared = tuple[nn.Module, Any]
State = Iterator[tuple[str, Shard]]


def accelerator_options(launch: Launch, settled: ResolvedConfig, reduced: torch.dtype, cpu: bool) -> dict[str, Any]:
    """Returns the arguments of `Accelerator` beside accumulation.

    Args:
        reduced: Dtype that gradients are to be summed over ranks in.
        cpu: True on a machine without GPUs.
    """
    return {
        "mixed_precision": "no" if settled.precision == "fp32" else settled.precision,
        "cpu": cpu,
        "kwargs_handlers": [InitProcessGroupKwargs(timeout=TIMEOUT)],
    }


def prepare(runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """Wraps model and optimiser."""
    wrapped, prepared = runtime.accelerator.prepare(model, optimizer)
    return wrapped, prepared


def uncached_autocast(runtime: Runtime) -> AbstractContextManager[Any]:
    """Autocast where weights are freed after use: casts of them must not be cached for the whole forward pass."""
    if runtime.precision == "fp32":
        return nullcontext()
    return torch.autocast(runtime.device.type, dtype=runtime.dtype, cache_enabled=False)


def hold(runtime: Runtime, model: Any) -> nn.Module:
    """Puts a network that is not trained on the device, whole, to compute in the run's precision."""
    model.autocast = partial(uncached_autocast, runtime)
    held: nn.Module = model.to(runtime.device)
    return held


def no_sync(runtime: Runtime, model: Any) -> AbstractContextManager[Any]:
    """Returns the context of a micro-batch that is not a step's last: gradients stay on their rank."""
    context: AbstractContextManager[Any] = runtime.accelerator.no_sync(model)
    return context


def backward(runtime: Runtime, loss: torch.Tensor) -> None:
    """Runs the backward pass of a micro-batch; gradients are divided by the number of these in a step."""
    if runtime.accelerator.scaler is not None:
        runtime.accelerator.backward(loss)
    else:
        # What Accelerate does, which looks for an optional package on the disk at each call.
        (loss / runtime.accumulation).backward()  # type: ignore[no-untyped-call]


def grad_norm(runtime: Runtime, model: nn.Module) -> torch.Tensor:
    """Returns the norm of all gradients over all ranks, a scalar in fp32; every rank must call it."""
    runtime.accelerator.unscale_gradients()
    splits = runtime.splits
    gradients = ((inner_name(name), p.grad) for name, p in model.named_parameters() if p.grad is not None)
    square = _total_square((g for name, g in gradients if tensor.counts_in_norm(splits, name)), runtime.device)
    if splits.group is not None:
        torch.distributed.all_reduce(square, group=splits.group.handle)
    return square.sqrt().float()


@torch.no_grad()
def _total_square(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the sum of all gradients' squares over the ranks that shard them, a scalar in fp64."""
    here: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            summed = tuple(Partial() if placement.is_shard() else placement for placement in gradient.placements)
            here[gradient.device_mesh, summed].append(gradient.to_local())
        else:
            here[()].append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for where, tensors in here.items():
        square = _square(tensors)
        total += (DTensor.from_local(square, *where).full_tensor() if where else square).to(device)
    return total


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of all squares, in fp64.

    On CPUs torch 2.13 adds squares one after the other in fp32: of nine million values the norm is 3e-4 too small, and
    that of each rank's shards by another share. So it adds those of a row only.
    """
    if tensors[0].device.type != "cpu":
        return nn.utils.get_total_norm(tensors).double().square()
    rows = (torch.linalg.vector_norm(tensor, dim=-1) if tensor.ndim > 1 else tensor for tensor in tensors)
    return torch.stack([torch.linalg.vector_norm(row, dtype=torch.float64) for row in rows]).square().sum()


def clip_gradients(model: nn.Module, norm: torch.Tensor, max_norm: float) -> None:
    """Scales gradients so that their norm, which is `norm`, is at most `max_norm`."""
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


def step(runtime: Runtime, optimizer: Any, norm: torch.Tensor) -> None:
    """Steps the optimiser, unless the gradient norm is not finite: then nothing of it reaches the weights."""
    inner = inner_optimizer(optimizer)
    if runtime.accelerator.scaler is not None:
        optimizer.step()  # loss scaling decides alike by itself
    elif torch_private.skips_nonfinite_steps(inner) and not _makes_momenta(inner):
        # The kernel itself skips, as it does under loss scaling, so that the host need not wait.
        inner.grad_scale, inner.found_inf = None, (~norm.isfinite()).float()
        inner.step()
    elif bool(norm.isfinite()):
        inner.step()


def _makes_momenta(optimizer: Any) -> bool:
    """Returns whether this step makes the momenta of torch's fused SGD: skipped, it leaves them uninitialised.

    Source: torch 2.13, `torch/optim/sgd.py::_fused_sgd`.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(group["momentum"] and not optimizer.state.get(group["params"][0]) for group in optimizer.param_groups)


def expect_decayed(leaves: Mapping[str, torch.Tensor | None], optimizer: object) -> AbstractContextManager[None]:
    """Returns the context of `expect_all` if the optimiser shrinks weights whose gradients are zeros."""
    decays = any(group.get("weight_decay") for group in getattr(optimizer, "param_groups", []))
    return expect_all(leaves, "weight decay would shrink them here") if decays else nullcontext()


@contextmanager
def expect_all(leaves: Mapping[str, torch.Tensor | None], why: str) -> Iterator[None]:
    """Proves that each trained tensor gets a gradient in the forward and backward pass inside.

    Args:
        leaves: What autograd gives the gradient of each trained tensor to, by name; None for what no pass can miss.
        why: Why a missing one does harm, for the message.

    Raises:
        BackendError: With the parts that got none.
    """
    used = {name for name, leaf in leaves.items() if leaf is None}
    hooks = [
        leaf.register_hook(lambda _, name=name: used.add(name))  # type: ignore[no-untyped-call]
        for name, leaf in leaves.items()
        if leaf is not None
    ]
    yield
    for hook in hooks:
        hook.remove()
    refuse_unused(leaves, used, why)


def refuse_unused(trained: Iterable[str], used: Collection[str], why: str) -> None:
    """Refuses a model that has trained tensors beside those that are used, by their names."""
    if unused := unused_parts(trained, used):
        shown = ", ".join([*unused[:4], *(["…"] if len(unused) > 4 else [])])
        raise BackendError(
            f"These parts of the model take no part in the loss, and {why}: {shown}. Freeze what the task never uses "
            "(model.freeze, by these names), give no adapters to it (lora.targets), or, where each batch uses other "
            "parts, take accelerate_configs/fsdp.yaml with fsdp_sync_each_batch: false and sums in fp32."
        )


def unused_parts(trained: Iterable[str], used: Collection[str]) -> list[str]:
    """Returns the names of modules none of whose trained tensors is used, and of single tensors of others."""
    unused: dict[str, None] = {}
    for name in trained:
        if name not in used:
            words = name.split(".")
            above = (".".join(words[:count]) for count in range(1, len(words)))
            unused[next((top for top in above if not any(n.startswith(f"{top}.") for n in used)), name)] = None
    return list(unused)


def trained_leaves(model: object) -> dict[str, torch.Tensor | None]:
    """Returns trained parameters of the network inside a wrapper that holds them whole, or gathers them in place."""
    network: nn.Module = model.module.network  # type: ignore[attr-defined]
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def each_master(network: nn.Module, optimizer: Any, change: Callable[[Any, dict[str, Any]], None], _: bool) -> None:
    """Calls `change` with each tensor that the optimiser steps, and its state; see `weight_average.EachMaster`."""
    for parameter in master_weights(optimizer):
        change(parameter.detach(), inner_optimizer(optimizer).state[parameter])


def read_frozen(runtime: Runtime, name: str, parameter: Any) -> Shard:
    """Returns this rank's piece of a frozen parameter, to be copied at once; every rank must call it."""
    return tensor_shards.shard_of(parameter, runtime.splits.parameters.get(name), runtime.splits.group)


def scaler_state(accelerator: Any) -> dict[str, float | int] | None:
    """Returns the loss scale and for how many steps it has held, `scale` and `good_steps`; None without scaling."""
    if accelerator.scaler is None or not accelerator.scaler.is_enabled():
        return None
    values = accelerator.scaler.state_dict()
    return {"scale": float(values["scale"]), "good_steps": int(values[torch_private.GROWTH_TRACKER])}


def set_scaler_state(accelerator: Any, state: Mapping[str, float | int]) -> None:
    """Takes up what any strategy's `scaler_state` gave; only where losses are scaled."""
    values = {"scale": float(state["scale"]), torch_private.GROWTH_TRACKER: int(state["good_steps"])}
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), **values})


def held_weights(model: Any, trained: list[Any]) -> tuple[int, int]:
    """Returns the bytes of the trained weights that this rank holds, and the elements of these that it steps."""
    tensors = [local(parameter) for parameter in trained]
    return sum(tensor.nbytes for tensor in tensors), sum(tensor.numel() for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way of holding a network over ranks; the functions are documented above."""

    holds: Callable[[Any], bool]
    """True for a model that it has prepared."""
    read_back: Callable[[Runtime, Any], dict[str, Any]]
    """Facts of `RuntimeReport`, read off a model that it has prepared; refuses one whose settings give it away."""
    accelerator_options: Callable[[Launch, ResolvedConfig, torch.dtype, bool], dict[str, Any]] = accelerator_options
    loading: Callable[[Launch, bool], AbstractContextManager[None]] = lambda launch, pretrained: nullcontext()
    """The context to build the network in: whole on every rank, or sharded as it loads."""
    check_network: Callable[[Launch, dict[str, Any], int, Sequence[int]], None] = lambda *network: None
    """Refuses a network that is not there yet, by its hidden size and the elements of each parameter; completes the
    launch's DeepSpeed config for it in place."""
    prepare: Callable[[Runtime, nn.Module, torch.optim.Optimizer], Prepared] = prepare
    hold: Callable[[Runtime, Any], nn.Module] = hold
    """Holds a second network, a `ForwardWrapper` whose parameters are all frozen, without an optimiser."""
    casts_weights: Callable[[Runtime], bool] = lambda runtime: False
    """True if the network's weights are computed with in 16 bit, all of them."""
    autocast: Callable[[Runtime], AbstractContextManager[Any]] = lambda runtime: nullcontext()
    """The context that the network computes in, inside the one that the wrapper provides. A disabled autocast would
    switch off the wrapper's."""
    no_sync: Callable[[Runtime, Any], AbstractContextManager[Any]] = no_sync
    check_gradients: Callable[[Runtime, Any, bool], AbstractContextManager[Any]] = lambda runtime, model, last: (
        nullcontext()
    )
    """The context of the first micro-batches of a run, in which gradients are checked; whether it is a step's last."""
    backward: Callable[[Runtime, torch.Tensor], None] = backward
    reduce_gradients: Callable[[Runtime, nn.Module], None] = lambda runtime, model: None
    """Averages over ranks, once a window, the gradients that the backward pass has left as they are."""
    grad_norm: Callable[[Runtime, nn.Module], torch.Tensor] = grad_norm
    clip_gradients: Callable[[nn.Module, torch.Tensor, float], None] = clip_gradients
    step: Callable[[Runtime, Any, torch.Tensor], None] = step
    keeps_gradients: Callable[[Runtime], bool] = lambda runtime: False
    """True if gradients stay in place from step to step."""
    steps_in_backward: bool = False
    """The backward pass that ends a window also runs the optimiser."""
    reshard: Callable[[nn.Module], None] = lambda model: None
    """Frees weights that an evaluation left gathered."""
    read_state: Callable[..., State] = lambda runtime, network, optimizer, parameters_only=False: (
        state_transfer.read_state(
            network, optimizer, runtime.splits, cut=runtime.launch.cuts_state, parameters_only=parameters_only
        )
    )
    write_state: Callable[..., None] = lambda runtime, network, optimizer, keys, load: state_transfer.write_state(
        network, optimizer, keys, load, runtime.splits, cut=runtime.launch.cuts_state
    )
    each_master: Callable[[nn.Module, Any, Callable[[Any, dict[str, Any]], None], bool], None] = each_master
    read_frozen: Callable[[Runtime, str, Any], Shard] = read_frozen
    scaler_state: Callable[[Any], dict[str, float | int] | None] = scaler_state
    set_scaler_state: Callable[[Any, Mapping[str, float | int]], None] = set_scaler_state
    held_weights: Callable[[Any, list[Any]], tuple[int, int]] = held_weights
    copies_masters: Callable[[Launch], bool] = lambda launch: False
    """True if the network computes with copies of what the optimiser steps."""
    predict_share: Callable[[Launch, ParamSpecs, int], Share] = predict_whole_share
    """Share of the fullest rank, of a launch, a network, and the micro-batches of a step and process."""
    predict_flows: Callable[[Launch, ParamSpecs, int], list[Flow]] = lambda launch, specs, accumulation: []
    """Traffic of a step, other than losses and norms, where there are several averaging ranks."""


def _prepare_alone(runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """Prepares without wrapping: Accelerate would wrap a process of torch's launcher in DDP, but on a CPU only."""
    accelerator = runtime.accelerator
    return accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)


def _read_back(runtime: Runtime, model: Any) -> dict[str, Any]:
    facts, _ = read_parameters(model, runtime.optimizer, runtime.splits)
    return {"kind": "single", "due": (1.0, 1.0), **facts}


STRATEGY = Strategy(
    holds=lambda model: not any(hasattr(model, name) for name in ("no_sync", "unshard", "zero_optimization_stage")),
    prepare=_prepare_alone,
    read_back=_read_back,
)
"""One process that holds all of the network: nearly every default."""

_MODULES = {
    "single": "strategy",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": "fsdp",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
}
"""Modules by the kind of a launch. Only the one that a launch asks for is imported."""


def strategy_of(launch: Launch) -> Strategy:
    """Returns the strategy that a launch asks for."""
    return _load(_MODULES[launch.kind])


def strategy_of_model(model: Any, asked: Strategy) -> Strategy:
    """Returns the strategy that has prepared a model, which may be another than was asked for."""
    others = map(_load, dict.fromkeys(_MODULES.values()))
    return asked if asked.holds(model) else next(strategy for strategy in others if strategy.holds(model))


def _load(name: str) -> Strategy:
    strategy: Strategy = import_module(f"finetune.distributed.strategies.{name}").STRATEGY
    return strategy
