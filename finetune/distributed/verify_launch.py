"""Reads back from the live objects what runs, and compares it with what was asked for.

Accelerate falls back without a word in many places (CPU flags, missing launch files, ignored plugins). So
nothing here trusts configuration: wrapper classes, shard sizes, dtypes and devices are what is looked at.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.parameter_info import DTYPES, held_bytes, off_share, short_dtype
from finetune.distributed.strategies import sequence
from finetune.distributed.strategies.strategy import Runtime, Strategy, strategy_of_model
from finetune.utils.compat import torch_private
from finetune.utils.errors import BackendError

# Where matrix products happen, and with them nearly all the arithmetic.
_MATRIX_MODULES = ("Float8Linear", "Linear", "StoredLinear", "Conv1D", "Linear4bit", "Linear8bit")


@dataclass(frozen=True)
class RuntimeReport:
    """Facts of what runs, read back from the live objects."""

    kind: str
    """single, ddp, fsdp, hsdp, zero1, zero2 or zero3."""
    world_size: int
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
    """Dtypes of the trainable parameters as the optimiser updates them (the fp32 master weights)."""
    model_dtypes: tuple[str, ...]
    """Dtypes of the parameters that the network computes with."""
    accumulation: int
    """Micro-batches an optimiser step and process."""
    num_threads: int
    replicas: int = 1
    """Hybrid shard: copies of the sharded model; otherwise 1."""
    reduce_dtype: str = "float32"
    """Dtype that gradients are summed over ranks in."""
    offload_params: str = "none"
    offload_optimizer: str = "none"
    on_disk: tuple[float, float] = (0.0, 0.0)
    """Shares of parameters and of optimiser state that really rest on NVMe: small shards stay in host memory."""
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
    """Trained parameters of the full model."""
    gloo_threads: int = 0
    """Worker threads of a gloo group, the most of any; 0 without such groups."""
    due: tuple[float, float] | None = None
    """FSDP2: the shares of parameters and of optimiser state that are this rank's by its rule, which is by whole rows;
    of thin tensors some ranks hold more than others, or nothing."""
    reshards: bool | None = None
    """FSDP2: whether layers free their weights after the forward pass; None where there are no separate layers."""
    output_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Dtype that each kind of module put out in a real forward pass, and that of the `loss`."""

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
        """Dtype of matrix products; None if the network has none of the known modules."""
        return next((self.output_dtypes[name] for name in _MATRIX_MODULES if name in self.output_dtypes), None)

    def line(self) -> str:
        """Returns in a few words where it runs."""
        over = f" ({self.communication})" if self.communication else ""
        ranks = f" x {self.world_size}" if self.world_size != 1 else ""
        if self.sequence * self.tensor > 1:
            ranks = "".join(f" x {size} {name}" for name, size in self.mesh.items() if size > 1 or name == "data")
        return f"{self.kind}{ranks} on {self.device}{over}"

    def offload(self) -> str:
        """Says what rests elsewhere than on the device; empty if nothing does."""
        if (self.offload_params, self.offload_optimizer) == ("none", "none"):
            return ""
        text = f"offload: parameters {self.offload_params}, optimiser {self.offload_optimizer}"
        if "nvme" in (self.offload_params, self.offload_optimizer):
            text += ", on disk {:.0%} and {:.0%} (shards under 1 MiB stay in memory)".format(*self.on_disk)
        return text


def verify_runtime(runtime: Runtime, strategy: Strategy, rehearse: Callable[[], torch.Tensor]) -> RuntimeReport:
    """Reads back what runs and compares it with the request; every rank must call it.

    `rehearse` runs a forward pass of the prepared model and returns its loss.

    Raises:
        BackendError: With every difference.
    """
    accelerator, launch, model = runtime.accelerator, runtime.launch, runtime.model
    # Before the forward pass, which may leave weights gathered.
    read_back = strategy_of_model(model, strategy).read_back(runtime, model)
    dtypes = _output_dtypes(model, rehearse)
    rows = sequence.row_group(model)
    grouped = torch.distributed.is_initialized()
    facts: dict[str, Any] = {
        "world_size": torch.distributed.get_world_size() if grouped else 1,
        "communication": torch.distributed.get_backend() if grouped else None,
        "device": accelerator.device.type,
        "wrapper": type(model).__name__,
        "num_parameters": runtime.num_weights,
        "num_trained": runtime.num_trained,
        "num_threads": torch.get_num_threads(),
        "gloo_threads": torch_private.gloo_worker_threads(),
        "accumulation": accelerator.gradient_accumulation_steps,
        "output_dtypes": dtypes,
        "sequence": 1 if rows is None else rows.parts,
        "exchanges": 0 if rows is None else rows.exchanges,
    }
    report = RuntimeReport(**{**facts, **read_back})
    reduced = short_dtype(DTYPES[runtime.reduce_dtype])
    problems = list(_differences(report, launch, runtime.accumulation, runtime.precision, reduced))
    if problems:
        raise BackendError(
            f"What runs is not what {launch.file or 'the launch environment'} asks for: "
            + "; ".join(problems)
            + ". Nothing was trained. Check the launch file against accelerate_configs/, and ACCELERATE_* variables."
        )
    return report


def verify_frozen(launch: Launch, model: nn.Module) -> None:
    """Raises a `BackendError` if a rank holds all of a second network that the launch shards."""
    parameters = list(model.parameters())
    whole = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in parameters)
    share, want = sum(map(held_bytes, parameters)) / max(1, whole), launch.replicate / launch.averaged_ranks
    # Between its share and all of it: thin tensors are not shared evenly.
    if launch.sharded and want < 1 and share > (1 + want) / 2:
        raise BackendError(
            f"{launch.place} shards networks, and a rank holds {share:.0%} of the second one. Nothing was trained. "
            "This is a fault of the installed accelerate, torch or deepspeed; install versions that were tested "
            "(`finetune doctor`)."
        )


def _differences(
    report: RuntimeReport, launch: Launch, accumulation: int, precision: str, reduced: str
) -> Iterator[str]:
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
    if report.gloo_threads > 1:
        yield (
            f"worker threads of a gloo group: asked 1, runs {report.gloo_threads}, which corrupt memory now and then "
            "in this torch (a program that starts a run makes no process group before it)"
        )
    if report.reshards not in (None, launch.reshard):
        yield f"resharding after the forward pass: asked {launch.reshard}, runs {report.reshards}"
    # A ds config can ask for gradients in 16 bit as well.
    configured = launch.ds_config.get("communication_data_type") not in (None, "auto")
    if report.world_size > 1 and report.reduce_dtype != reduced and not configured:
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
        if off_share(report.num_parameters, want, have):
            yield f"{name}: asked {want:.1%}, holds {have:.1%}"
    if set(report.parameter_dtypes) != {"float32"}:
        yield f"trainable parameters must be float32, are {'+'.join(report.parameter_dtypes)}"
    want_compute = short_dtype(DTYPES[precision])
    if report.compute_dtype not in (None, want_compute):
        yield f"matrix products: asked {want_compute}, come out in {report.compute_dtype}"
    if report.output_dtypes["loss"] != "float32":
        yield (
            f"the loss must leave the model as float32, is {report.output_dtypes['loss']} (a task's loss_sum "
            "computes it from logits.float() with reduction='sum')"
        )


def _output_dtypes(model: nn.Module, rehearse: Callable[[], torch.Tensor]) -> dict[str, str]:
    """Returns the dtype that each kind of module puts out in a forward pass, and that of the loss."""
    seen: dict[str, str] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        # A head that puts out losses, whatever their shape, says nothing of products.
        floats = isinstance(output, torch.Tensor) and output.is_floating_point()
        if floats and output.numel() > 1 and not getattr(module.forward, "computes_loss", False):
            name = type(module).__name__.removeprefix("FSDP")
            seen[name] = short_dtype(output.dtype)

    hooks = [m.register_forward_hook(note) for m in model.modules() if not any(True for _ in m.children())]
    try:
        loss = rehearse()
    finally:
        for hook in hooks:
            hook.remove()
    return {**dict(sorted(seen.items())), "loss": short_dtype(loss.dtype)}
