"""Reads back from the live objects what runs, and compares it with what was asked for.

Accelerate falls back without a word in many places (CPU flags, missing launch files, ignored plugins). So
nothing here trusts configuration: wrapper classes, shard sizes, dtypes and devices are what is looked at.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from finetune.distributed import deepspeed_config
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.state.tensor_shards import local
from finetune.distributed.strategies import sequence
from finetune.distributed.strategies.tensor import Splits
from finetune.utils.compat import accelerate_private, torch_private
from finetune.utils.errors import BackendError

# Where matrix products happen, and with them nearly all the arithmetic.
_MATRIX_MODULES = ("Float8Linear", "Linear", "StoredLinear", "Conv1D", "Linear4bit", "Linear8bit")

# A rank may hold this much more than its share: padding, and parameters too small to be worth sharding.
_SHARD_SLACK = 0.03


@dataclass(frozen=True)
class RuntimeReport:
    """What runs, as read back from the live objects."""

    kind: str
    """single, ddp, fsdp, hsdp, zero1, zero2 or zero3."""
    world_size: int
    replicas: int
    """Hybrid shard: copies of the sharded model; otherwise 1."""
    communication: str | None
    """nccl, gloo, or None for one process."""
    device: str
    wrapper: str
    """Class of the prepared model."""
    num_parameters: int
    parameter_fraction: float
    """Share of the parameters that this rank holds between steps."""
    optimizer_fraction: float
    """Share of the optimiser's state that this rank holds."""
    parameter_dtypes: tuple[str, ...]
    """Of the trainable parameters as the optimiser updates them (the fp32 master weights)."""
    model_dtypes: tuple[str, ...]
    """Of the parameters that the network computes with."""
    reduce_dtype: str
    """What gradients are summed over ranks in."""
    offload_params: str
    offload_optimizer: str
    on_disk: tuple[float, float]
    """Shares of parameters and of optimiser state that really rest on NVMe: small shards stay in host memory."""
    accumulation: int
    """Micro-batches an optimiser step and process."""
    num_threads: int
    sequence: int = 1
    """Parts that rows were split into, by what attention was given in a real forward pass; 1: whole rows."""
    exchanges: int = 0
    """All-to-alls of that forward pass."""
    tensor: int = 1
    """Ranks that layers are split over, by the sizes of the parameters here and whole; 1: whole layers."""
    averaged: int = 1
    """Ranks that gradients are averaged over: those of the wrapper's process group."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share that this rank holds of each kind of parameter, such as `q_proj.weight`; torch's own backends."""
    num_trained: int = 0
    """Of the full model's parameters, those that are trained."""
    gloo_threads: int = 0
    """Worker threads of a gloo group, the most of any; 0 without such groups."""
    due: tuple[float, float] | None = None
    """FSDP2: the shares of parameters and of optimiser state that are this rank's by its rule, which is by whole rows;
    of thin tensors some ranks hold more than others, or nothing."""
    reshards: bool | None = None
    """FSDP2: whether layers free their weights after the forward pass; None where there are no separate layers."""
    output_dtypes: Mapping[str, str] = field(default_factory=dict)
    """What each kind of module put out in a real forward pass, and `loss`."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mesh": self.mesh}

    @property
    def mesh(self) -> dict[str, int]:
        """Ranks in each dimension; all of them multiplied are all ranks."""
        data = self.averaged // self.sequence
        over = {"replicate": self.replicas, "shard": data // self.replicas} if self.replicas > 1 else {"data": data}
        return {**over, "sequence": self.sequence, "tensor": self.tensor}

    @property
    def compute_dtype(self) -> str | None:
        """What matrix products came out in; None if the network has none of the known modules."""
        return next((self.output_dtypes[name] for name in _MATRIX_MODULES if name in self.output_dtypes), None)

    def line(self) -> str:
        """Where it runs, in a few words."""
        over = f" ({self.communication})" if self.communication else ""
        ranks = f" x {self.world_size}" if self.world_size != 1 else ""
        if self.sequence * self.tensor > 1:
            ranks = "".join(f" x {size} {name}" for name, size in self.mesh.items() if size > 1 or name == "data")
        return f"{self.kind}{ranks} on {self.device}{over}"

    def offload(self) -> str:
        """What rests elsewhere than on the device; empty if nothing does."""
        if (self.offload_params, self.offload_optimizer) == ("none", "none"):
            return ""
        said = f"offload: parameters {self.offload_params}, optimiser {self.offload_optimizer}"
        if "nvme" in (self.offload_params, self.offload_optimizer):
            said += ", on disk {:.0%} and {:.0%} (shards under 1 MiB stay in memory)".format(*self.on_disk)
        return said


def verify(
    accelerator: Accelerator,
    launch: Launch,
    precision: str,
    model: nn.Module,
    optimizer: Any,
    accumulation: int,
    splits: Splits,
    reduced: torch.dtype,
    rehearse: Callable[[], torch.Tensor],
) -> RuntimeReport:
    """Reads back what runs and compares it with the request.

    Args:
        splits: What of the network is split over ranks.
        reduced: What gradients are to be summed over ranks in.
        rehearse: Runs a forward pass of the prepared model and returns its loss; every rank must.

    Raises:
        BackendError: With every difference.
    """
    report = _read(accelerator, model, optimizer, splits)
    report = replace(report, output_dtypes=_census(model, rehearse))
    if (rows := sequence.row_group(model)) is not None:
        report = replace(report, sequence=rows.parts, exchanges=rows.exchanges)
    problems = list(_differences(report, launch, accumulation, precision, _short(reduced)))
    if problems:
        raise BackendError(
            f"What runs is not what {launch.file or 'the launch environment'} asks for: "
            + "; ".join(problems)
            + ". Nothing was trained. Check the launch file against accelerate_configs/, and ACCELERATE_* variables."
        )
    return report


def check_network(launch: Launch, ds_config: dict[str, Any], *, width: int, sizes: Sequence[int]) -> None:
    """`check_shards` of a network that is not there yet, for which the DeepSpeed config is completed in place.

    Args:
        width: Its hidden size.
        sizes: Elements of each of its parameters.

    Raises:
        BackendError: With what it would be refused for.
    """
    if launch.uses_deepspeed:
        deepspeed_config.fit_to_model(ds_config, hidden_size=width, parameter_sizes=sizes)
        check_shards(launch, ds_config, sizes)


def check_shards(launch: Launch, ds_config: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """Refuses a DeepSpeed config with which stage 3 does not shard a network.

    DeepSpeed keeps parameters of `stage3_param_persistence_threshold` elements or fewer whole on every rank.
    Source: deepspeed 0.19, `mark_persistent_parameters` in `runtime/zero/parameter_offload.py`.

    Args:
        ds_config: Completed, by the recipe and for the network.
        sizes: Elements of each of its parameters.

    Raises:
        BackendError: With the threshold, and one that shards the network.
    """
    if launch.kind != "zero3":
        return
    section, ranks, whole = ds_config["zero_optimization"], launch.num_processes, 0
    written = section.get("stage3_param_persistence_threshold")
    threshold = deepspeed_config.PERSISTENCE_THRESHOLD if written is None else written
    most = section.get("stage3_model_persistence_threshold", sys.maxsize)
    for size in sizes:
        if size <= threshold and whole + size <= most:
            whole += size
    held = (whole + (sum(sizes) - whole) / ranks) / max(1, sum(sizes))
    if _off(sum(sizes), 1 / ranks, held):
        said = (
            f"leaves stage3_param_persistence_threshold out, and DeepSpeed's default is {threshold:,} elements"
            if written is None
            else f"says stage3_param_persistence_threshold: {threshold:,} elements"
        )
        raise BackendError(
            f"{launch.ds_place} {said}: parameters that are no larger stay whole on every rank, which is "
            f"{whole / sum(sizes):.0%} of this network ({whole:,} of {sum(sizes):,} weights). Stage 3 would hold "
            f"{held:.0%} of it on each of {ranks} ranks, where {1 / ranks:.0%} is asked. Write "
            '"stage3_param_persistence_threshold": "auto" below "zero_optimization", which fits it to the network, '
            "or a smaller number; nothing was trained."
        )


def check_skeleton(launch: Launch, ds_config: dict[str, Any], network: nn.Module) -> None:
    """`check_network` of one that may be without storage."""
    sizes = [parameter.numel() for parameter in network.parameters()]
    check_network(launch, ds_config, width=deepspeed_config.width_of(network), sizes=sizes)


def inner_name(name: str) -> str:
    """A parameter's name in the network inside a prepared model."""
    return name.partition("network.")[2] or name


@contextmanager
def check_all_used(launch: Launch, model: Any, optimizer: Any, *, holds: bool) -> Iterator[None]:
    """Proves that each trained tensor gets a gradient in the forward and backward pass inside, where that matters.

    DDP waits for all gradients, and fails in the next pass. ZeRO, and FSDP2 where it sums after each micro-batch, take
    those that are missing for zeros, with which an optimiser shrinks weights by weight decay. Others leave them as they
    are, but torch 2.13 fails over units that FSDP2 never gathered, where it holds gradients to sum in another dtype.

    Args:
        holds: Whether it is not the step's last micro-batch, so that FSDP2 may hold its gradients.

    Raises:
        BackendError: With the parts that got none.
    """
    zeros = launch.uses_deepspeed or bool(launch.uses_fsdp and launch.sync_each_batch)
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    if launch.uses_fsdp and holds and not zeros:
        named = _reduced_in_another_dtype(model)
        trained = _leaves(launch, model)
        gathered = [name for name, leaf in trained.items() if leaf is not None or name not in named]
        _refuse(unused(trained, gathered), "torch cannot hold their gradients")
    if not (launch.kind == "ddp" or (zeros and decays)):
        yield
        return
    trained = _leaves(launch, model)
    # A unit that FSDP2 never gathered gets no zeros either.
    used = {name for name, leaf in trained.items() if leaf is None}
    hooks = [
        leaf.register_hook(lambda _, name=name: used.add(name))  # type: ignore[no-untyped-call]
        for name, leaf in trained.items()
        if leaf is not None
    ]
    yield
    for hook in hooks:
        hook.remove()
    why = "DDP waits for the gradients of all" if launch.kind == "ddp" else "weight decay would shrink them here"
    _refuse(unused(trained, used), why)


def _leaves(launch: Launch, model: Any) -> dict[str, torch.Tensor | None]:
    """What autograd gives the gradient of each trained tensor to; None for those that FSDP2 has never gathered."""
    if not launch.uses_fsdp:
        return {name: p for name, p in model.module.network.named_parameters() if p.requires_grad}
    from finetune.utils.compat import torch_sharding_private as sharding

    return {
        inner_name(sharding.parameter_name(p)): sharding.unsharded(p)
        for p in sharding.fsdp_params(model)
        if p.sharded_param.requires_grad
    }


def _reduced_in_another_dtype(model: Any) -> set[str]:
    """Parameters whose gradients FSDP2 reduces in a dtype that was named."""
    from finetune.utils.compat import torch_sharding_private as sharding

    return {
        inner_name(sharding.parameter_name(p))
        for p in sharding.fsdp_params(model)
        if sharding.reduce_dtype(p) is not None
    }


def _refuse(found: list[str], why: str) -> None:
    if found:
        shown = ", ".join([*found[:4], *(["…"] if len(found) > 4 else [])])
        raise BackendError(
            f"These parts of the model take no part in the loss, and {why}: {shown}. Freeze what the task never uses "
            "(model.freeze, by these names), give no adapters to it (lora.targets), or, where each batch uses other "
            "parts, take accelerate_configs/fsdp.yaml with fsdp_sync_each_batch: false and sums in fp32."
        )


def unused(trained: Iterable[str], used: Collection[str]) -> list[str]:
    """The names of modules none of whose trained tensors is used, and of single tensors of others."""
    found: dict[str, None] = {}
    for name in trained:
        if name not in used:
            words = name.split(".")
            above = (".".join(words[:count]) for count in range(1, len(words)))
            found[next((top for top in above if not any(n.startswith(f"{top}.") for n in used)), name)] = None
    return list(found)


def _differences(
    report: RuntimeReport, launch: Launch, accumulation: int, precision: str, reduced: str
) -> Iterator[str]:
    """Each difference between request and reality, as a clause."""
    for name, asked, runs in (
        ("kind", launch.kind, report.kind),
        ("number of processes", launch.num_processes, report.world_size),
        ("replicas", launch.replicate, report.replicas),
        ("ranks that a row is split over", launch.sequence, report.sequence),
        ("ranks that a layer is split over", launch.tensor, report.tensor),
        ("ranks that gradients are averaged over", launch.averaged_ranks, report.averaged),
        ("gradient accumulation", accumulation, report.accumulation),
        ("offload of parameters", launch.offload_params, report.offload_params),
        ("offload of the optimiser", launch.offload_optimizer, report.offload_optimizer),
    ):
        if asked != runs:
            yield f"{name}: asked {asked}, runs {runs}"
    if report.gloo_threads > 1 and torch_private.gloo_workers_race():
        yield (
            f"worker threads of a gloo group: asked 1, runs {report.gloo_threads}, which corrupt memory now and then "
            "in this torch (a program that starts a run makes no process group before it)"
        )
    if report.reshards not in (None, launch.reshard):
        yield f"resharding after the forward pass: asked {launch.reshard}, runs {report.reshards}"
    # A ds config can ask for gradients in 16 bit as well.
    said = launch.ds_config.get("communication_data_type") not in (None, "auto")
    if report.world_size > 1 and report.reduce_dtype != reduced and not said:
        yield f"gradients: asked to be summed in {reduced}, are summed in {report.reduce_dtype}"
    shards = launch.num_processes // launch.replicate
    want_parameters = 1 / shards if launch.sharded else 1.0
    want_optimizer = 1 / shards if launch.sharded or launch.uses_deepspeed else 1.0
    if report.due is not None:
        want_parameters, want_optimizer = report.due
    for name, want, have in (
        ("parameters held by a rank", want_parameters, report.parameter_fraction),
        ("optimiser state held by a rank", want_optimizer, report.optimizer_fraction),
    ):
        if _off(report.num_parameters, want, have):
            yield f"{name}: asked {want:.1%}, holds {have:.1%}"
    if set(report.parameter_dtypes) != {"float32"}:
        yield f"trainable parameters must be float32, are {'+'.join(report.parameter_dtypes)}"
    want_compute = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
    if report.compute_dtype not in (None, want_compute):
        yield f"matrix products: asked {want_compute}, come out in {report.compute_dtype}"
    if report.output_dtypes["loss"] != "float32":
        yield (
            f"the loss must leave the model as float32, is {report.output_dtypes['loss']} (a task's loss_sum "
            "computes it from logits.float() with reduction='sum')"
        )


def _census(model: nn.Module, rehearse: Callable[[], torch.Tensor]) -> dict[str, str]:
    """The dtype that each kind of module puts out in a forward pass, and that of the loss."""
    seen: dict[str, str] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        # A head that puts out the loss says nothing of products.
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel() > 1:
            name = type(module).__name__.removeprefix("FSDP")
            seen[name] = _short(output.dtype)

    hooks = [m.register_forward_hook(note) for m in model.modules() if not any(True for _ in m.children())]
    try:
        loss = rehearse()
    finally:
        for hook in hooks:
            hook.remove()
    return {**dict(sorted(seen.items())), "loss": _short(loss.dtype)}


def _off(num_parameters: int, want: float, have: float) -> bool:
    """Whether a rank's share is not the one that was asked for.

    A model of a few thousand parameters cannot be cut evenly; it must only not be held whole.
    """
    tiny = num_parameters < 10_000 and want < 1.0 and have < 1.0
    return abs(want - have) > _SHARD_SLACK and not tiny


def _read(accelerator: Accelerator, model: nn.Module, optimizer: Any, splits: Splits) -> RuntimeReport:
    distributed = torch.distributed.is_initialized()
    world = torch.distributed.get_world_size() if distributed else 1
    common: dict[str, Any] = {
        "on_disk": (0.0, 0.0),
        "world_size": world,
        "communication": torch.distributed.get_backend() if distributed else None,
        "device": accelerator.device.type,
        "wrapper": type(model).__name__,
        "num_threads": torch.get_num_threads(),
        "gloo_threads": torch_private.gloo_worker_threads(),
    }
    if hasattr(model, "zero_optimization_stage"):
        return _read_deepspeed(model, common)
    named = [(inner_name(name), p) for name, p in model.named_parameters()]
    parameters = [p for _, p in named]
    whole = {id(p): splits.size(name, p) for name, p in named}
    optimizer = getattr(optimizer, "optimizer", optimizer)
    master_weights = [p for group in optimizer.param_groups for p in group["params"]]
    common |= {
        "num_parameters": sum(whole.values()),
        "parameter_fraction": _fraction(parameters, whole),
        "optimizer_fraction": _fraction(master_weights, whole),
        "parameter_dtypes": _dtypes(master_weights),
        "accumulation": accelerator.gradient_accumulation_steps,
        "tensor": _parts(named, splits),
        "shares": _shares(named, whole),
    }
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        return _read_fsdp(model, parameters, master_weights, whole, common)
    averaged = model.process_group.size() if isinstance(model, nn.parallel.DistributedDataParallel) else None
    split = {id(p) for name, p in named if name in splits.parameters}

    def due(tensors: list[Any]) -> float:
        here = sum(whole[id(t)] // (common["tensor"] if id(t) in split else 1) for t in tensors)
        return float(here / max(1, sum(whole[id(t)] for t in tensors)))

    return RuntimeReport(
        kind="single" if averaged is None else "ddp",
        replicas=1,
        averaged=averaged or 1,
        due=(due(parameters), due(master_weights)),
        model_dtypes=_dtypes(parameters),
        reduce_dtype="bfloat16" if averaged is not None and _halves_gradients(model) else "float32",
        offload_params="none",
        offload_optimizer="none",
        **common,
    )


def _fraction(tensors: list[Any], whole: Mapping[int, int]) -> float:
    """The share of some parameters that lies here."""
    here: int = sum(local(t).numel() for t in tensors)
    return here / max(1, sum(whole[id(t)] for t in tensors))


def _parts(named: list[tuple[str, Any]], splits: Splits) -> int:
    """How many times as large as here split parameters are; 1 if none is split, or not all alike."""
    found = {math.prod(splits.parameters[name].shape) / p.numel() for name, p in named if name in splits.parameters}
    return int(found.pop()) if len(found) == 1 else 1


def _shares(named: list[tuple[str, Any]], whole: Mapping[int, int]) -> dict[str, float]:
    """The share that lies here, by the last two words of parameters' names."""
    kinds: dict[str, list[Any]] = defaultdict(list)
    for name, parameter in named:
        kinds[".".join(name.split(".")[-2:])].append(parameter)
    return {kind: round(_fraction(tensors, whole), 4) for kind, tensors in kinds.items()}


def _halves_gradients(model: Any) -> bool:
    """Whether DDP sends gradients in bf16."""
    return "bf16" in str(torch_private.ddp_logging_data(model).get("comm_hook", ""))


def _read_fsdp(
    model: Any, parameters: list[Any], master_weights: list[Any], whole: Mapping[int, int], common: dict[str, Any]
) -> RuntimeReport:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    from finetune.utils.compat import torch_sharding_private as sharding

    sharded = [p for p in parameters if isinstance(p, DTensor) and any(isinstance(x, Shard) for x in p.placements)]
    mesh = sharded[0].device_mesh if sharded else None
    replicas = mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1

    def due(tensors: list[Any]) -> float:
        # The mesh of hybrid shard is (replicas, shards).
        rank, shards = (0, 1) if mesh is None else (mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
        here = sum(rows_of(t.shape[0], rank, shards) * (t.numel() // max(1, t.shape[0])) for t in tensors)
        return float(here / max(1, sum(whole[id(t)] for t in tensors)))

    # The root and the units at the model's ends stay gathered in any case; it is the layers that are asked about.
    layers = accelerate_private.unsplit_classes(model)
    units = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in layers]
    groups = [sharding.fsdp_param_group(m) for m in units if isinstance(m, FSDPModule)]
    reshards = any(sharding.reshards_after_forward(g) for g in groups if g is not None) if groups else None
    owning = sharding.fsdp_param_groups(model)
    policies = {type(group.offload_policy) for group in owning}
    policy = owning[0].mp_policy
    compute = policy.param_dtype
    # Where parameters rest on the CPU while the process computes elsewhere, they are offloaded.
    offload = "cpu" if CPUOffloadPolicy in policies else "none"
    return RuntimeReport(
        kind=("hsdp" if replicas > 1 else "fsdp") if sharded else "unsharded",
        replicas=replicas,
        averaged=mesh.size() if mesh is not None else 1,
        model_dtypes=_dtypes(parameters) if compute is None else (_short(compute),),
        reduce_dtype=_short(policy.reduce_dtype or policy.param_dtype or torch.float32),
        offload_params=offload,
        offload_optimizer=offload,
        due=(due(parameters), due(master_weights)),
        reshards=reshards,
        **common,
    )


def rows_of(rows: int, rank: int, shards: int) -> int:
    """How many of a tensor's rows FSDP2 gives to a rank: as many as `torch.chunk` does, which may be none.

    Source: torch 2.13, `_chunk_with_empty` in `distributed/fsdp/_fully_shard/_fsdp_common.py`.
    """
    most = -(-rows // shards)
    return max(0, min(most, rows - rank * most))


def _read_deepspeed(engine: Any, common: dict[str, Any]) -> RuntimeReport:
    stage = engine.zero_optimization_stage()
    inner = engine.optimizer
    parameters = list(engine.module.parameters())
    sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
    if stage == 3:
        # A persistent parameter stays whole on every rank although it also has a partition.
        held = [
            p.ds_numel if getattr(p, "ds_persist", False) else p.ds_tensor.ds_numel
            for p in parameters
            if hasattr(p, "ds_tensor")
        ]
        master_weights = inner.fp32_partitioned_groups_flat
        # Not read off the master_weights themselves: on NVMe they are empty between steps.
        master_sizes = list(inner.fp16_partitioned_groups_flat_numel)
        swaps = any(getattr(p, "nvme_swapper", None) is not None for p in parameters)
        offload_params = _rests(swaps, inner.offload_param)
        offload_optimizer = _rests(inner.swap_optimizer, inner.offload_optimizer)
        common["on_disk"] = _on_disk(parameters, inner)
    else:
        held = sizes
        master_weights = inner.single_partition_of_fp32_groups
        master_sizes = [m.numel() for m in master_weights]
        offload_params = "none"
        offload_optimizer = _rests(False, inner.cpu_offload)
    trainable = sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad)
    return RuntimeReport(
        kind=f"zero{stage}",
        replicas=1,
        averaged=engine.dp_world_size,
        num_parameters=sum(sizes),
        parameter_fraction=sum(held) / max(1, sum(sizes)),
        optimizer_fraction=sum(master_sizes) / max(1, trainable),
        parameter_dtypes=_dtypes(master_weights),
        model_dtypes=_dtypes(parameters),
        reduce_dtype=_short(engine.communication_data_type),
        offload_params=offload_params,
        offload_optimizer=offload_optimizer,
        accumulation=engine.gradient_accumulation_steps(),
        **common,
    )


def _on_disk(parameters: list[Any], inner: Any) -> tuple[float, float]:
    """Shares of parameters and optimiser state that rest on NVMe; DeepSpeed keeps shards under 1 MiB in memory."""
    shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    marks = [(s.ds_numel, getattr(s.final_location, "value", s.final_location)) for s in shards]
    held = sum(size for size, mark in marks if mark == "nvme")
    from finetune.utils.compat.deepspeed_private import is_swapped

    groups = list(enumerate(inner.fp16_partitioned_groups_flat_numel))
    swapped = sum(size for index, size in groups if is_swapped(inner, index))
    return held / max(1, sum(size for size, _ in marks)), swapped / max(1, sum(size for _, size in groups))


def _rests(on_disk: bool, offloaded: bool) -> str:
    return "nvme" if on_disk else "cpu" if offloaded else "none"


def _dtypes(tensors: Any) -> tuple[str, ...]:
    return tuple(sorted({_short(t.dtype) for t in tensors}))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
