"""Predicts FLOPs, traffic, time and cost of a step, and whether communication overlaps with it.

Link speeds are those that `finetune comms --json` measured, else those of a data sheet.
"""

import math
from dataclasses import dataclass, field

from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.link_speeds import RINGS, LinkSpeeds
from finetune.distributed.strategies.prediction import Flow, ParamSpecs, Share, bytes_of, elements_of
from finetune.distributed.strategies.strategy import strategy_of
from finetune.planning.activation_memory import StepSetting, shape_of
from finetune.planning.launch_candidates import Candidate
from finetune.planning.model_shapes import Variant, is_half, part_of
from finetune.utils.exact import exact_product

# Tokens a parameter, for the least loss at a given amount of training. Source: Hoffmann et al. 2022, table 3.
CHINCHILLA = 20.0


@dataclass(frozen=True)
class Machines:
    """Machines that a plan is for."""

    gpu: Gpu
    gpus: int
    """A machine."""
    nodes: int
    network_gbs: float
    """Between machines, each way and GPU, in 10^9 bytes a second."""
    utilisation: float
    """Share of the peak rate, while a GPU computes; recomputation counts as computing."""
    price: float | None = None
    """A GPU and hour."""
    host_gib: float | None = None
    """Host memory of a machine, for what is offloaded; None: enough."""
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    """Measured ones, which stand in for the data sheet's."""
    assumed: str | None = None
    """A line for people on what of this nobody has said."""

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Work:
    """Arithmetic of a run, wherever it happens."""

    parameters: int
    trained: int
    tokens: int | None
    """Rows x sequence length; None where the length is in epochs, and the rows could not be counted."""
    steps: int | None
    flops_per_token: float
    """6 a weight in a product (4 if it is frozen), and attention's scores."""
    flops: float | None
    flops_6nd: float | None
    """6 x parameters x tokens, the usual estimate."""

    @property
    def tokens_per_parameter(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.parameters


@dataclass(frozen=True)
class Moved:
    """A flow between ranks, in time."""

    flow: Flow
    between_machines: bool
    seconds: float
    hidden: bool
    """True if the arithmetic that it can run beside takes as long."""
    measured: bool
    """True if the link was measured; else it is the data sheet's, without a latency."""


@dataclass(frozen=True)
class Time:
    """An optimiser step of a candidate, and with its length the run."""

    compute_s: float
    moved: tuple[Moved, ...]
    step_s: float
    """Arithmetic, and the traffic that it does not hide."""
    hours: float | None
    gpu_hours: float | None
    cost: float | None
    energy_kwh: float | None


def count_work(variant: Variant, rows: int | None) -> Work:
    """Counts a variant's arithmetic; `rows` are training rows, for a length in epochs."""
    recipe = variant.recipe
    length, size = recipe.length, recipe.batch.global_size
    steps, a_step = length.steps, size * variant.row_tokens
    if length.tokens is not None:
        steps = -(-length.tokens // a_step)
    elif length.epochs is not None and rows is not None:
        used = rows - (rows % size if recipe.data.last_batch == "drop" else 0)
        steps = int(exact_product(length.epochs, used) / size)
    tokens = None if steps is None else steps * a_step
    return Work(
        parameters=variant.parameters,
        trained=variant.trained,
        tokens=tokens,
        steps=steps,
        flops_per_token=variant.flops_per_token,
        flops=None if tokens is None else variant.flops_per_token * tokens,
        flops_6nd=None if tokens is None else 6.0 * variant.parameters * tokens,
    )


def predict_time(candidate: Candidate, variant: Variant, machines: Machines, steps: int | None) -> Time | None:
    """Predicts a candidate's step, and with its number of steps the run; None without a rate (fp32 has none).

    Where each of the ranks that share layers computes the head's product whole, that is counted; norms and routers are
    not.
    """
    recipe, launch, ranks = variant.recipe, candidate.launch, candidate.launch.num_processes
    if not is_half(recipe) or candidate.memory is None or not machines.gpu.bf16_tflops:
        return None
    forward = variant.forward_flops
    a_token = variant.flops_per_token + (forward if candidate.setting.checkpointed else 0.0)
    variant = variant if launch.tensor == 1 else part_of(variant, launch.tensor)
    if not variant.loss_by_head and variant.specs.head:
        # A head's products forward, and for the gradients of its inputs and, if it is trained, weights.
        head = [p for p in variant.specs.units[variant.specs.head] if len(p.shape) == 2]
        a_token += (launch.tensor - 1) * sum(2.0 * p.elements * (2 if p.group is None else 3) for p in head)
    tokens = recipe.batch.global_size * variant.row_tokens
    rate = ranks * machines.gpu.bf16_tflops * 1e12 * machines.utilisation
    compute = tokens * a_token / rate
    backward = compute * (1 - forward / a_token)
    windows = {"all": compute, "backward": backward, "last backward": backward / candidate.accumulation, "none": 0.0}
    setting, accumulation, specs = candidate.setting, candidate.accumulation, variant.specs
    flows = strategy_of(launch).predict_flows(launch, specs, accumulation)
    flows += flows_of_rows(launch, variant, setting, accumulation)
    flows += flows_of_layers(launch, variant, setting, accumulation)
    moved, exposed = [], 0.0
    for flow in (flow for flow in flows if flow.ranks > 1):
        far = flow.ranks * flow.apart > machines.gpus
        line = (machines.links.between if far else machines.links.within).get(flow.collective)
        if line is not None:
            seconds = flow.calls * RINGS[flow.collective].hops(flow.ranks) * line.latency_s
            seconds += flow.nbytes / line.bandwidth
        else:
            speed = min(machines.gpu.link_gbs, machines.network_gbs) if far else machines.gpu.link_gbs
            seconds = flow.nbytes / (speed * 1e9)
        window = windows[flow.window]
        moved.append(Moved(flow, far, seconds, seconds <= window, line is not None))
        exposed += max(0.0, seconds - window)
    for flow in flows_of_offload(candidate, strategy_of(launch).predict_share(launch, specs, accumulation), specs):
        seconds = flow.nbytes / (_HOST_SPEEDS[flow.collective] or machines.gpu.host_gbs * 1e9)
        # A machine has one host and one disk for all of its GPUs.
        seconds *= 1 if flow.collective == "host_copy" else min(machines.gpus, ranks)
        moved.append(Moved(flow, False, seconds, seconds <= windows[flow.window], False))
        exposed += max(0.0, seconds - windows[flow.window])
    step = compute + exposed
    hours = None if steps is None else steps * step / 3600
    gpu_hours = None if hours is None else hours * ranks
    return Time(
        compute_s=compute,
        moved=tuple(moved),
        step_s=step,
        hours=hours,
        gpu_hours=gpu_hours,
        cost=None if gpu_hours is None or machines.price is None else gpu_hours * machines.price,
        energy_kwh=None if gpu_hours is None else gpu_hours * machines.gpu.watts / 1000,
    )


# Bytes a second of a machine; None: the GPU's own link. Assumed, not measured: AdamW is bound by host memory, of
# which it reads and writes 28 bytes a parameter, and reaches 128 GB/s on two sockets; a disk is one NVMe SSD.
_HOST_SPEEDS = {"host_copy": None, "host_step": 128e9, "disk": 5e9}


def flows_of_offload(candidate: Candidate, share: Share, specs: ParamSpecs) -> list[Flow]:
    """Returns what a rank moves between device, host memory and disk, and what its optimiser steps through on the host.

    Weights come for each forward and backward pass; gradients go after each backward pass that reduces them; weights
    that stay on the device come back after a step. The step waits for the optimiser.
    """
    launch, memory, accumulation = candidate.launch, candidate.memory, candidate.accumulation
    assert memory is not None
    weights, flows = bytes_of(specs.params) // (launch.averaged_ranks // launch.replicate if launch.sharded else 1), []
    if launch.offload_params != "none":
        flows.append(Flow("host_copy", "weights to the device", 2 * accumulation * weights, 1, "all", 1))
    if launch.offload_params == "nvme":
        flows.append(Flow("disk", "weights from the disk", 2 * accumulation * weights, 1, "all", 1))
    if launch.offload_optimizer != "none":
        times = 1 if launch.holds_whole_gradients(accumulation) else accumulation
        flows.append(Flow("host_copy", "gradients to the host", 4 * times * share.stepped, 1, "backward", 1))
        flows.append(Flow("host_step", "optimiser state on the host", 28 * share.stepped, 1, "none", 1))
        if launch.offload_params == "none":
            flows.append(Flow("host_copy", "new weights to the device", 4 * share.stepped, 1, "none", 1))
    if launch.offload_optimizer == "nvme":
        flows.append(Flow("disk", "optimiser state", 2 * (memory.optimizer + share.masters), 1, "none", 1))
    return flows


def flows_of_rows(launch: Launch, variant: Variant, setting: StepSetting, accumulation: int) -> list[Flow]:
    """Returns what the ranks that share rows exchange around attention; a step waits for all of it.

    Queries, keys, values and what comes out, each there and back; where layers are recomputed, there once more. Keys
    and values have as many heads as there are ranks, at least.
    """
    parts, shape = launch.sequence, shape_of(variant)
    if parts == 1 or shape is None:
        return []
    heads = 2 * (shape.a + math.lcm(shape.k, parts))
    tokens = setting.micro * variant.row_tokens // parts
    times = (3 if setting.checkpointed else 2) * accumulation * shape.layers
    moved = times * tokens * heads * shape.d * (2 if is_half(variant.recipe) else 4) * (parts - 1) // parts
    return [Flow("all_to_all", "parts of rows", moved, parts, "none", 4 * times, apart=launch.tensor)]


def flows_of_layers(launch: Launch, variant: Variant, setting: StepSetting, accumulation: int) -> list[Flow]:
    """Returns what the ranks that share layers sum, in fp32; a step waits for all of it.

    Outputs of attention and MLP, and gradients of their inputs; where layers are recomputed, attention's outputs once
    more (recomputing ends before an MLP's are summed). Where the head computes the loss, gradients of what it is given,
    of which each rank finds those of its tokens. At the end, gradients of what each rank has all of, but uses in a part
    of the layer, or for some tokens.
    """
    parts, shape = launch.tensor, shape_of(variant)
    if parts == 1 or shape is None:
        return []
    ring = 2 * (parts - 1) / parts
    tokens = setting.micro * variant.row_tokens // launch.sequence
    calls = (5 if setting.checkpointed else 4) * accumulation * shape.layers
    flows = [Flow("all_reduce", "parts of layers", round(ring * calls * 4 * tokens * shape.h), parts, "none", calls)]
    if variant.loss_by_head:
        joined = round(ring / 2 * accumulation * 4 * tokens * shape.h)
        flows.append(Flow("all_gather", "gradients of tokens", joined, parts, "none", accumulation))
    if partial := 4 * elements_of(p for p in variant.specs.trained if p.partial):
        held = partial / (launch.averaged_ranks if launch.sharded else 1)
        flows.append(Flow("all_reduce", "gradients of parts", round(ring * held), parts, "none", 1))
    return flows
