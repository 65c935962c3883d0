"""FSDP2: weights, gradients and optimiser state sharded over ranks, whole copies of the shards on several (hsdp)."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from finetune.distributed.launch.launch_config import Launch, ResolvedConfig
from finetune.distributed.parameter_info import (
    DTYPES,
    held_whole,
    inner_name,
    inner_optimizer,
    local,
    master_weights,
    read_parameters,
    short_dtype,
)
from finetune.distributed.strategies import strategy
from finetune.distributed.strategies.prediction import (
    Flow,
    Gathered,
    ParamSpec,
    ParamSpecs,
    Share,
    Window,
    bytes_of,
    elements_of,
)
from finetune.distributed.strategies.strategy import TIMEOUT, Prepared, Runtime, Strategy
from finetune.utils.compat import accelerate_private, torch_private
from finetune.utils.compat import torch_sharding_private as sharding
from finetune.utils.errors import BackendError


def _accelerator_options(launch: Launch, settled: ResolvedConfig, reduced: torch.dtype, cpu: bool) -> dict[str, Any]:
    options = strategy.accelerator_options(launch, settled, reduced, cpu)
    if cpu:
        _enter_fsdp_on_gloo()
    plugin = FullyShardedDataParallelPlugin()
    # Accelerate's own policy reduces gradients in bf16 and casts every output, the loss too, to bf16.
    # Without an output dtype the loss leaves the model as it was computed: in fp32. Weights stay fp32 and are cast
    # inside operations, as on one device, unless the launch file asks for the lighter way.
    weights = DTYPES.get(launch.mixed_precision)
    # Gradients of fp32 weights are fp32 unless another dtype is named. Named, torch 2.13 fails over a unit that took no
    # part in a micro-batch (the vision tower of a model that reads text) where gradients are held until the last one.
    named = None if weights is None and reduced is torch.float32 else reduced
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=named)
    return {**options, "cpu": False, "fsdp_plugin": plugin}


def _enter_fsdp_on_gloo() -> None:
    """Starts gloo and opens Accelerate's FSDP branch, which it only takes for GPU process groups.

    `verify_launch` afterwards reads back what really runs.
    Source: accelerate 1.15, `AcceleratorState.__init__` (MULTI_CPU is not in its list).
    """
    state = PartialState(cpu=True, timeout=TIMEOUT)
    if state.distributed_type != DistributedType.MULTI_CPU:
        raise BackendError(
            "This version of accelerate no longer starts gloo as MULTI_CPU, which running FSDP without a GPU builds "
            "on. Install a version of it that was tested (`finetune doctor`)."
        )
    # All instances share these.
    state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")


def _prepare(runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    launch = runtime.launch
    before = sum(len(group["params"]) for group in optimizer.param_groups)
    # An Accelerate that fell back to another backend has no plugin, which `verify_launch` names.
    if (plugin := getattr(runtime.accelerator.state, "fsdp_plugin", None)) is not None:
        _keep_whole(runtime, plugin, model)
    wrapped: Any
    with sharding_over_mesh(runtime):
        wrapped, prepared = strategy.prepare(runtime, model, optimizer)
    distinct = {id(p) for group in prepared.param_groups for p in group["params"]}
    if len(distinct) != before:
        raise BackendError(
            f"The optimiser had {before} parameters and holds {len(distinct)} distinct ones after sharding: some would "
            "never be trained. This is a fault of the installed accelerate; install a version that was tested "
            "(`finetune doctor`)."
        )
    inner = inner_optimizer(prepared)
    for group in list(inner.param_groups):
        # One call of an optimiser's kernel takes either kind.
        apart = [p for p in group["params"] if held_whole(p)]
        if apart and len(apart) < len(group["params"]):
            group["params"] = [p for p in group["params"] if not held_whole(p)]
            inner.add_param_group({**group, "params": apart})
    if launch.offload_optimizer != "none":
        torch_private.never_skip_steps(inner)
    if launch.sync_each_batch:
        # Ranks may use different weights in a micro-batch (experts): what they reduce must match.
        wrapped.set_reduce_scatter_unused_params(True)
    return wrapped, prepared


def _keep_whole(runtime: Runtime, plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Has Accelerate leave out what cannot be cut, and puts it on the device, since torch moves it to none."""
    names = [name for name, parameter in model.named_parameters() if held_whole(parameter)]
    if names and plugin.cpu_ram_efficient_loading:
        raise BackendError(
            f"{runtime.launch.place} sets fsdp_cpu_ram_efficient_loading, by which Accelerate shards all parameters "
            f"anew, and '{inner_name(names[0])}' cannot be cut: it has no dimensions, or is of whole numbers. Set the "
            "key to false."
        )
    plugin.ignored_modules = [nn.ParameterList(p for p in model.parameters() if held_whole(p)).to(runtime.device)]


def _hold(runtime: Runtime, model: nn.Module) -> nn.Module:
    """Shards a second network over the same mesh as the trained one, by the launch file's units of its own."""
    state = runtime.accelerator.state
    # Anew from the launch file: the other one has the trained network's classes by now.
    plugin = FullyShardedDataParallelPlugin()
    plugin.mixed_precision_policy = state.fsdp_plugin.mixed_precision_policy
    _keep_whole(runtime, plugin, model)
    with sharding_over_mesh(runtime), patch.object(state, "fsdp_plugin", plugin):
        held: nn.Module = fsdp2_prepare_model(runtime.accelerator, model)
    return held


def sharding_over_mesh(runtime: Runtime) -> AbstractContextManager[None]:
    """Has Accelerate shard over the run's mesh, where that is not simply all ranks."""
    device_mesh = runtime.mesh.sharding_mesh
    return nullcontext() if device_mesh is None else accelerate_private.sharding_over(runtime.accelerator, device_mesh)


@contextmanager
def _sums_within_shards(model: Any) -> Iterator[None]:
    """Reduce-scatters gradients; between copies of a hybrid shard, sums still cross once a step."""
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)


@contextmanager
def _check_gradients(runtime: Runtime, model: Any, last: bool) -> Iterator[None]:
    """Refuses missing gradients where FSDP2 sums after each micro-batch, since it takes them for zeros.

    Else it leaves weights as they are, but torch 2.13 fails over units that it never gathered, where it holds gradients
    to sum in another dtype.
    """
    each, trained = runtime.launch.sync_each_batch, _leaves(model)
    if not each and not last:
        named = {
            inner_name(sharding.parameter_name(p))
            for p in sharding.fsdp_params(model)
            if getattr(p, "reduce_dtype", None) is not None
        }
        gathered = [name for name, leaf in trained.items() if leaf is not None or name not in named]
        strategy.refuse_unused(trained, gathered, "torch cannot hold their gradients")
    # Missing gradients of what is held whole are taken for zeros in any case.
    with strategy.expect_decayed({**(trained if each else {}), **_trained_whole(model)}, runtime.optimizer):
        yield
    if not last:
        _check_held_gradients(runtime.launch, model)


def _leaves(model: Any) -> dict[str, torch.Tensor | None]:
    """Returns trained parameters as gathered; None for those of units that never were, which get no zeros either."""
    return {
        inner_name(sharding.parameter_name(p)): sharding.unsharded(p)
        for p in sharding.fsdp_params(model)
        if p.sharded_param.requires_grad
    }


def _trained_whole(model: nn.Module) -> dict[str, nn.Parameter]:
    return {inner_name(name): p for name, p in model.named_parameters() if p.requires_grad and held_whole(p)}


@torch.no_grad()
def _reduce_gradients(runtime: Runtime, model: nn.Module) -> None:
    """Averages the gradients of parameters that each rank holds whole, which FSDP2 leaves to it."""
    if whole := [*_trained_whole(model).values()]:
        group = runtime.mesh.groups["average"]
        gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in whole])
        averaged = gradients.to(DTYPES[runtime.reduce_dtype]).div_(group.size)
        torch.distributed.all_reduce(averaged, group=group.handle)
        for parameter, gradient in zip(whole, averaged.float(), strict=True):
            parameter.grad = gradient


def _clip_gradients(model: nn.Module, norm: torch.Tensor, max_norm: float) -> None:
    for whole in (False, True):
        nn.utils.clip_grads_with_norm_([p for p in model.parameters() if held_whole(p) is whole], max_norm, norm)


def _check_held_gradients(launch: Launch, model: nn.Module) -> None:
    """Refuses a run whose gradients between a step's micro-batches are held otherwise than was asked."""
    whole = cut = here = 0
    for group in sharding.fsdp_param_groups(model):
        for parameter in group.fsdp_params:
            unsharded = sharding.unsharded(parameter)
            gradients = [parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
            whole += sum(tensor.nbytes for tensor in gradients if tensor is not None)
            cut += 0 if parameter.sharded_param.grad is None else local(parameter.sharded_param.grad).nbytes
            here += local(parameter.sharded_param).numel() if parameter.sharded_param.requires_grad else 0
        # What waits to be summed over the copies of a hybrid shard.
        waiting = sharding.partial_reduce_output(group)
        cut += 0 if waiting is None else waiting.nbytes
    unwanted, wanted = (whole, cut) if launch.sync_each_batch else (cut, whole)
    # Of a head with few rows a rank may have none, and so no gradients either.
    if unwanted or (here and not wanted):
        raise BackendError(
            f"What runs is not what {launch.file or 'the launch environment'} asks for: with fsdp_sync_each_batch "
            f"{str(bool(launch.sync_each_batch)).lower()}, gradients between micro-batches are held as {whole:,} bytes "
            f"whole and {cut:,} cut. Nothing was trained. This is a fault of the installed torch or accelerate; "
            "install versions that were tested (`finetune doctor`)."
        )


def _reshard(model: nn.Module) -> None:
    """Frees gathered weights that an evaluation left in place; a write to shards would not change them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _of_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that reads or writes state, and refuses weights that lie gathered beside their shards."""

    def checked(runtime: Runtime, network: nn.Module, *state: Any, **options: Any) -> Any:
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and not held_whole(parameter) and not hasattr(parameter, "full_tensor"):
                raise BackendError(f"The parameter '{name}' is not sharded at this moment: call reshard(model) first.")
        return function(runtime, network, *state, **options)

    return checked


def _read_back(runtime: Runtime, model: Any) -> dict[str, Any]:
    facts, whole = read_parameters(model, runtime.optimizer, runtime.splits)
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor) and any(isinstance(x, Shard) for x in p.placements)]
    mesh = sharded[0].device_mesh if sharded else None
    replicas = mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1
    # The root and the units at the model's ends stay gathered in any case; it is the layers that are asked about.
    layers = accelerate_private.unsplit_classes(model)
    units = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in layers]
    groups = [sharding.fsdp_param_group(m) for m in units if isinstance(m, FSDPModule)]
    owning = sharding.fsdp_param_groups(model)
    policy = owning[0].mp_policy
    # Where parameters rest on the CPU while the process computes elsewhere, they are offloaded.
    offload = "cpu" if CPUOffloadPolicy in {type(group.offload_policy) for group in owning} else "none"
    if policy.param_dtype is not None:
        facts["model_dtypes"] = (short_dtype(policy.param_dtype),)
    return {
        **facts,
        "kind": ("hsdp" if replicas > 1 else "fsdp") if sharded else "unsharded",
        "replicas": replicas,
        "averaged": mesh.size() if mesh is not None else 1,
        "reduce_dtype": short_dtype(policy.reduce_dtype or policy.param_dtype or torch.float32),
        "offload_params": offload,
        "offload_optimizer": offload,
        "due": (_due(parameters, mesh, whole), _due(master_weights(runtime.optimizer), mesh, whole)),
        "reshards": any(sharding.reshards_after_forward(g) for g in groups if g is not None) if groups else None,
    }


def _due(tensors: list[Any], mesh: Any, whole: Mapping[int, int]) -> float:
    """Returns the share of some tensors that is this rank's by FSDP2's rule."""
    # The mesh of hybrid shard is (replicas, shards).
    rank, shards = (0, 1) if mesh is None else (mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    here = (t.numel() if held_whole(t) else rows_of(t.shape[0], rank, shards) * math.prod(t.shape[1:]) for t in tensors)
    return float(sum(here) / max(1, sum(whole[id(t)] for t in tensors)))


def rows_of(rows: int, rank: int, shards: int) -> int:
    """Returns how many of a tensor's rows FSDP2 gives to a rank: as many as `torch.chunk` does, maybe none.

    Source: torch 2.13, `_chunk_with_empty` in `distributed/fsdp/_fully_shard/_fsdp_common.py`.
    """
    most = -(-rows // shards)
    return max(0, min(most, rows - rank * most))


def _predict_share(launch: Launch, specs: ParamSpecs, accumulation: int) -> Share:
    shards = launch.averaged_ranks // launch.replicate

    def part(param: ParamSpec) -> int:
        return param.elements if param.whole else rows_of(param.shape[0], 0, shards) * math.prod(param.shape[1:])

    stepped, whole = sum(map(part, specs.trained)), launch.holds_whole_gradients(accumulation)
    gathered, in_flight = _predict_gathers(launch, specs)
    return Share(
        frozen=sum(part(p) * p.itemsize for p in specs.frozen) + specs.rest,
        trained=sum(part(p) * p.itemsize for p in specs.trained),
        stepped=stepped,
        summed=elements_of(specs.trained) if whole else stepped,
        # It offloads only gradients that it has reduce-scattered.
        gradients_rest="none" if whole else launch.offload_optimizer,
        gathered=gathered,
        in_flight=in_flight,
    )


def _predict_gathers(launch: Launch, specs: ParamSpecs) -> tuple[Gathered, int]:
    """Returns what is gathered, and bytes of whole gradients in the backward pass.

    FSDP2 gathers into one tensor, copies weights out of it, and keeps it until the next unit is copied out. In the
    backward pass the next unit is gathered while one computes, and the last one's gradients are still being scattered
    while this one's are made. Accelerate never frees the head's unit between the passes.
    Source: torch, `FSDPParamGroup.wait_for_unshard` and `post_backward`; accelerate, `fsdp2_prepare_model`.
    """
    if launch.units == "root":
        every = bytes_of(specs.params)  # from the first module to the last gradient
        gathered = Gathered(forward=every, loss=every, loss_gradient=every, backward=every)
        return gathered, 4 * elements_of(specs.trained)
    # What is in no unit of its own is gathered with the head, or with the root.
    last = [p for p in specs.params if p.unit in ("", specs.head)]
    units = [unit for name, unit in specs.units.items() if name not in ("", specs.head)] or [[]]
    gradients = [4 * elements_of(p for p in unit if p.group is not None) for unit in [*units, last]]
    in_flight = max(map(sum, pairwise(gradients)))
    sizes, tail = [bytes_of(unit) for unit in units], bytes_of(last)
    if not launch.reshard:
        every = sum(sizes) + tail
        return Gathered(forward=every + max(sizes), loss=every + tail, loss_gradient=every, backward=every), in_flight
    if specs.head_alone:
        early, loss, sizes = 0, 2 * tail, [*sizes, tail]
    else:
        # A head that is the embedding too, or what the root has, is there from the beginning.
        early, loss, sizes = tail, tail + sizes[-1], sizes if len(sizes) > 1 else [0, *sizes]
    forward, backward = (max(a + times * b for a, b in pairwise(sizes)) + early for times in (2, 1))
    return Gathered(forward=forward, loss=loss, loss_gradient=tail, backward=backward), in_flight


def _predict_flows(launch: Launch, specs: ParamSpecs, accumulation: int) -> list[Flow]:
    """Frozen weights are gathered, and never reduced."""
    copies, units = launch.replicate, specs.units.values()
    shards, gradients = launch.averaged_ranks // copies, 4 * elements_of(specs.trained)
    trained = sum(any(p.group is not None for p in unit) for unit in units)
    times = accumulation if launch.sync_each_batch else 1
    window: Window = "backward" if launch.sync_each_batch else "last backward"
    ring, gathers = (shards - 1) / shards, (2 if launch.reshard else 1) * accumulation
    weights, sent = round(gathers * ring * bytes_of(specs.params)), round(times * ring * gradients)
    flows = [
        Flow("all_gather", "weights", weights, shards, "all", gathers * len(units), launch.tensor),
        Flow("reduce_scatter", "gradients", sent, shards, window, times * trained, launch.tensor),
    ]
    if copies > 1:
        between = round(2 * (copies - 1) / copies * gradients / shards)
        flows.append(Flow("all_reduce", "gradients", between, copies, "last backward", trained, apart=shards))
    return flows


STRATEGY = Strategy(
    holds=lambda model: isinstance(model, FSDPModule),
    accelerator_options=_accelerator_options,
    prepare=_prepare,
    hold=_hold,
    casts_weights=lambda runtime: runtime.launch.mixed_precision in DTYPES,
    autocast=strategy.uncached_autocast,
    no_sync=lambda runtime, model: (
        _sums_within_shards(model) if runtime.launch.sync_each_batch else strategy.no_sync(runtime, model)
    ),
    check_gradients=_check_gradients,
    reduce_gradients=_reduce_gradients,
    clip_gradients=_clip_gradients,
    reshard=_reshard,
    read_state=_of_shards(strategy.STRATEGY.read_state),
    write_state=_of_shards(strategy.STRATEGY.write_state),
    predict_share=_predict_share,
    predict_flows=_predict_flows,
    read_back=_read_back,
)
