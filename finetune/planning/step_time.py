"""Predicts FLOPs, time and cost of a step, and whether communication overlaps with it."""

from dataclasses import dataclass, field

from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.measure_bandwidth import RINGS, Line
from finetune.distributed.strategies.find_strategy import strategy_of
from finetune.distributed.strategies.prediction import Flow
from finetune.planning.communication_volume import flows_of_layers, flows_of_rows
from finetune.planning.launch_candidates import Candidate
from finetune.planning.link_speeds import LinkSpeeds
from finetune.planning.model_shapes import Variant, is_half, part_of

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
    """Rows x sequence length; None where the length is in epochs, whose rows nobody has counted yet."""
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


def count_work(variant: Variant) -> Work:
    """Counts a variant's arithmetic."""
    recipe = variant.recipe
    length, a_step = recipe.length, recipe.batch.global_size * recipe.data.sequence_length
    steps = length.steps
    if length.tokens is not None:
        steps = -(-length.tokens // a_step)
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


def predict_time(candidate: Candidate, variant: Variant, machines: Machines) -> Time | None:
    """Predicts a candidate's step; None in fp32, whose rate is not in the table of GPUs.

    Where each of the ranks that share layers computes the head's product whole, that is counted; norms and routers are
    not.
    """
    recipe, ranks = variant.recipe, candidate.launch.num_processes
    if not is_half(recipe) or candidate.memory is None:
        return None
    forward = variant.forward_flops
    a_token = variant.flops_per_token + (forward if candidate.setting.checkpointed else 0.0)
    variant = variant if candidate.launch.tensor == 1 else part_of(variant, candidate.launch.tensor)
    if not variant.loss_by_head:
        a_token += (candidate.launch.tensor - 1) * _head_flops(variant)
    tokens = recipe.batch.global_size * recipe.data.sequence_length
    rate = ranks * machines.gpu.bf16_tflops * 1e12 * machines.utilisation
    compute = tokens * a_token / rate
    backward = compute * (1 - forward / a_token)
    windows = {"all": compute, "backward": backward, "last backward": backward / candidate.accumulation, "none": 0.0}
    moved, exposed = [], 0.0
    launch, setting, accumulation = candidate.launch, candidate.setting, candidate.accumulation
    flows = strategy_of(launch).predict_flows(launch, variant.specs, accumulation)
    for of_split in (flows_of_rows, flows_of_layers):
        flows += of_split(launch, variant, setting, accumulation)
    for flow in (flow for flow in flows if flow.ranks > 1):
        far = flow.ranks * flow.apart > machines.gpus
        line = machines.links.line(flow.collective, far=far)
        seconds = _seconds(flow, machines, line, far=far)
        window = windows[flow.window]
        moved.append(Moved(flow, far, seconds, seconds <= window, line is not None))
        exposed += max(0.0, seconds - window)
    step = compute + exposed
    steps = count_work(variant).steps
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


def _head_flops(variant: Variant) -> float:
    """Counts a head's, a token: forward, and the gradients of its inputs and, if it is trained, weights."""
    head = variant.specs.units[variant.specs.head] if variant.specs.head else []
    return sum(2.0 * p.elements * (2 if p.group is None else 3) for p in head if len(p.shape) == 2)


def _seconds(flow: Flow, machines: Machines, line: Line | None, *, far: bool) -> float:
    """Predicts a flow's, by measured links with their latency, else by the data sheet's bandwidth alone."""
    if line is not None:
        return flow.calls * RINGS[flow.collective].hops(flow.ranks) * line.latency_s + flow.nbytes / line.bandwidth
    speed = min(machines.gpu.link_gbs, machines.network_gbs) if far else machines.gpu.link_gbs
    return flow.nbytes / (speed * 1e9)
