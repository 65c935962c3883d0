"""The record of functions that a way of holding a network over ranks consists of, and their defaults.

Each strategy is made in a module of its own. The defaults are those of one device, or of any of torch's wrappers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn

from finetune.distributed.launch.launch_config import Launch, ResolvedConfig
from finetune.distributed.mesh import Mesh
from finetune.distributed.param_specs import ParamSpecs
from finetune.distributed.split_parameters import Splits
from finetune.distributed.state import state_transfer, tensor_shards
from finetune.distributed.state.tensor_shards import Shard
from finetune.distributed.strategies import gradient_norm, tensor
from finetune.distributed.strategies.prediction import Flow, Share, predict_whole_share
from finetune.distributed.tensor_facts import inner_optimizer, local
from finetune.utils.compat import torch_private

TIMEOUT = timedelta(minutes=30)
"""Collectives wait this long for a slow rank before they give up."""

REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""`optim.reduce_dtype` as torch names it."""


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
    unverified: bool

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


Prepared = tuple[nn.Module, Any]
LossFunction = Callable[[nn.Module, Any], torch.Tensor]


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
    """Returns the norm of all gradients over all ranks, a scalar in fp32."""
    runtime.accelerator.unscale_gradients()
    return gradient_norm.total_norm(model, runtime.splits, runtime.device)


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


def read_state(
    runtime: Runtime, network: nn.Module, optimizer: Any, *, parameters_only: bool = False
) -> Iterator[tuple[str, Shard]]:
    """Yields this rank's shard of each trainable parameter and its optimiser state; see `state_transfer.read_state`."""
    cut = runtime.launch.cuts_state
    return state_transfer.read_state(network, optimizer, runtime.splits, cut=cut, parameters_only=parameters_only)


def write_state(
    runtime: Runtime,
    network: nn.Module,
    optimizer: Any,
    keys: Collection[str],
    load: Callable[[str], torch.Tensor],
) -> None:
    """Writes them into a freshly prepared model and optimiser; see `state_transfer.write_state`."""
    state_transfer.write_state(network, optimizer, keys, load, runtime.splits, cut=runtime.launch.cuts_state)


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
    parts = [local(parameter) for parameter in trained]
    return sum(part.nbytes for part in parts), sum(part.numel() for part in parts)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way of holding a network over ranks; the functions are documented above."""

    holds: Callable[[Any], bool]
    """True for a model that it has prepared."""
    read_back: Callable[[Any, Any, Any, Splits], dict[str, Any]]
    """Facts of `RuntimeReport`, read off the accelerator, a model and an optimiser that it has prepared."""
    accelerator_options: Callable[[Launch, ResolvedConfig, torch.dtype, bool], dict[str, Any]] = accelerator_options
    loading: Callable[[Launch, bool], AbstractContextManager[None]] = lambda launch, pretrained: nullcontext()
    """The context to build the network in: whole on every rank, or sharded as it loads."""
    check_network: Callable[[Launch, dict[str, Any], int, Sequence[int]], None] = lambda *network: None
    """Refuses a network that is not there yet, by its hidden size and the elements of each parameter; completes the
    launch's DeepSpeed config for it in place."""
    prepare: Callable[[Runtime, nn.Module, torch.optim.Optimizer], Prepared] = prepare
    check_prepared: Callable[[Runtime, Any], None] = lambda runtime, model: None
    """Refuses a model that would be held otherwise than was asked, as far as its settings say so."""
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
    grad_norm: Callable[[Runtime, nn.Module], torch.Tensor] = grad_norm
    clip_gradients: Callable[[nn.Module, torch.Tensor, float], None] = clip_gradients
    step: Callable[[Runtime, Any, torch.Tensor], None] = step
    keeps_gradients: Callable[[Runtime], bool] = lambda runtime: False
    """True if gradients stay in place from step to step."""
    steps_in_backward: bool = False
    """The backward pass that ends a window also runs the optimiser."""
    reshard: Callable[[nn.Module], None] = lambda model: None
    """Frees weights that an evaluation left gathered."""
    read_state: Callable[..., Iterator[tuple[str, Shard]]] = read_state
    write_state: Callable[..., None] = write_state
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


def forward_backward(
    strategy: Strategy,
    runtime: Runtime,
    model: nn.Module,
    loss_sum: LossFunction,
    batches: Iterable[Any],
    scaled: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Runs the window of a step: its micro-batches, forward and backward.

    Gradients are reduced over ranks after the last micro-batch, or after each where the strategy shards them or is told
    to.

    Args:
        batches: As many as `runtime.accumulation`, each asked for when the one before has been computed.
        scaled: Makes of a micro-batch's summed loss what its gradients are taken of.

    Returns:
        The summed loss of each micro-batch, on the device.

    Raises:
        BackendError: If gradients turn out to be held otherwise than was asked, or to be missing where that would
            not leave weights as they are; nothing has been trained then.
    """
    losses = []
    for index, batch in enumerate(batches):
        last = index == runtime.accumulation - 1
        with _micro_batch(strategy, runtime, model, last):
            loss = model(loss_sum, batch)
            strategy.backward(runtime, scaled(loss))
        losses.append(loss.detach())
    tensor.reduce_partial(model, runtime.splits)
    return losses


@contextmanager
def _micro_batch(strategy: Strategy, runtime: Runtime, model: nn.Module, last: bool) -> Iterator[None]:
    runtime.accelerator.sync_gradients = last
    with (
        strategy.check_gradients(runtime, model, last) if runtime.unverified else nullcontext(),
        nullcontext() if last else strategy.no_sync(runtime, model),
    ):
        yield
    runtime.unverified = False
