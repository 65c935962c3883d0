"""What a rank holds from step to step, measured by purpose; activations come on top."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.state.tensor_shards import local
from finetune.utils.errors import BackendError


@dataclass(frozen=True)
class Memory:
    """Bytes that this rank holds from step to step, wherever they rest."""

    frozen: int
    """Weights that are not trained, with the scales of packed ones, and buffers."""
    trained: int
    """Weights that are trained, and their fp32 master weights where these are apart."""
    gradients: int
    """At their largest: while a step's micro-batches add up."""
    optimizer: int
    """As one step on a trial tensor shows."""

    def line(self) -> str:
        """One line for people."""
        weights = self.frozen + self.trained
        unit, size = ("GiB", 2**30) if weights + self.gradients + self.optimizer >= 2**30 else ("MiB", 2**20)
        held = {"weights": weights, "gradients": self.gradients, "optimiser": self.optimizer}
        shown = ", ".join(f"{name} {number / size:.3g}" for name, number in held.items())
        return f"{shown} {unit} a rank"


def measure(launch: Launch, model: nn.Module, accumulation: int, state_bytes: float) -> Memory:
    """Adds up what the prepared objects hold.

    Args:
        accumulation: Micro-batches a step and process.
        state_bytes: That the optimiser keeps for an element.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    held, elements = sum(map(_held, trained)), sum(local(p).numel() for p in trained)
    if launch.uses_deepspeed:
        engine: Any = model
        # Stages 1 and 2 hold the weights of a group as views of one tensor, padded.
        padded = getattr(engine.optimizer, "bit16_groups_flat", None)
        held = held if padded is None else sum(t.nbytes for t in padded)
        elements = _masters(engine.optimizer)
        held += 4 * _apart(engine.optimizer)
    # Until their last micro-batch.
    whole = launch.holds_whole_gradients(accumulation)
    return Memory(
        frozen=sum(_held(p) for p in parameters if not p.requires_grad)
        + sum(local(b).nbytes for b in model.buffers())
        + sum(t.nbytes for m in model.modules() for t in _scales(getattr(m, "quant_state", None))),
        trained=held,
        gradients=4 * (sum(int(getattr(p, "ds_numel", p.numel())) for p in trained) if whole else elements),
        optimizer=round(state_bytes * elements),
    )


def verify_gradients(launch: Launch, model: nn.Module) -> None:
    """Reads back what gradients FSDP2 holds between a step's micro-batches, and compares it with the request.

    Raises:
        BackendError: With the difference.
    """
    from finetune.utils.compat import torch_sharding_private as sharding

    whole = cut = 0
    for group in sharding.fsdp_param_groups(model):
        for parameter in group.fsdp_params:
            unsharded = sharding.unsharded(parameter)
            found = [parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
            whole += sum(tensor.nbytes for tensor in found if tensor is not None)
            cut += 0 if parameter.sharded_param.grad is None else local(parameter.sharded_param.grad).nbytes
        # What waits to be summed over the copies of a hybrid shard.
        waiting = sharding.partial_reduce_output(group)
        cut += 0 if waiting is None else waiting.nbytes
    unwanted, wanted = (whole, cut) if launch.sync_each_batch else (cut, whole)
    if unwanted or not wanted:
        raise BackendError(
            f"What runs is not what {launch.file or 'the launch environment'} asks for: with fsdp_sync_each_batch "
            f"{str(bool(launch.sync_each_batch)).lower()}, gradients between micro-batches are held as {whole:,} bytes "
            f"whole and {cut:,} cut. Nothing was trained. This is a fault of the installed torch or accelerate; "
            "install versions that were tested (`finetune doctor`)."
        )


def _held(parameter: Any) -> int:
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return local(parameter).nbytes
    # Small ones stay whole once training has needed them, which it may not have yet.
    whole = parameter.ds_numel * parameter.element_size() if parameter.ds_persist else parameter.nbytes
    return int(shard.ds_numel * shard.element_size()) + int(whole)


def _masters(inner: Any) -> int:
    """Elements of the master weights here; those on NVMe are empty between steps."""
    sizes = getattr(inner, "fp16_partitioned_groups_flat_numel", None)
    return sum(sizes) if sizes is not None else sum(m.numel() for m in inner.single_partition_of_fp32_groups)


def _apart(inner: Any) -> int:
    """Elements of the master weights that are not the weights themselves.

    Stage 3 means to step fp32 weights in place, but deepspeed 0.19 compares a device with its name
    (`_create_fp32_partitions` in `runtime/zero/stage3.py`), so that its masters are copies.
    """
    masters = getattr(inner, "fp32_partitioned_groups_flat", None)
    if masters is None:
        return _masters(inner)
    sizes, weights = inner.fp16_partitioned_groups_flat_numel, inner.fp16_partitioned_groups_flat
    return sum(n for n, master, held in zip(sizes, masters, weights, strict=True) if master is not held)


def _scales(state: Any) -> Iterator[torch.Tensor]:
    """What belongs to quantized weights; see bitsandbytes' `QuantState`."""
    if state is not None:
        yield from (t for t in (state.absmax, state.code, state.offset) if t is not None)
        yield from _scales(state.state2)
