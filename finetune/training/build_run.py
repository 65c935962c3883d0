"""Builds a `Run`: everything that the loop touches, from a recipe and a launch."""

import os
from collections import deque
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import integrity, resume_point
from finetune.checkpoint.best_evaluation import BestEvaluation
from finetune.checkpoint.checkpoint_manager import CheckpointManager
from finetune.checkpoint.resume_point import ResumePoint
from finetune.checkpoint.run_directory import RunDirectory
from finetune.checkpoint.run_fingerprint import MICRO_SIZE, base_of, depends_on_micro_size, identity_of
from finetune.config.recipe_schema import Recipe
from finetune.data.rows.feed import Feed, TokenFileFeed
from finetune.data.rows.row_order import RowOrder
from finetune.distributed import rendezvous_store
from finetune.distributed.backend import Backend
from finetune.distributed.device_selection import slow_precision
from finetune.distributed.launch.launch_config import read_launch
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.strategies import sequence
from finetune.export import save_model
from finetune.models import (
    activation_checkpointing,
    build_network,
    float8,
    frozen_weights,
    lora_adapters,
    quantization,
    split_layers,
)
from finetune.models.build_network import init_weights
from finetune.models.forward_wrapper import ForwardWrapper, unwrap
from finetune.models.pretrained_files import Weights
from finetune.monitoring.flops import flops_per_target
from finetune.monitoring.metrics import Reporter, warn
from finetune.monitoring.nonfinite import NonFiniteGuard
from finetune.monitoring.shutdown import ShutdownHandler
from finetune.monitoring.timer import PhaseTimer
from finetune.monitoring.trackers import Trackers
from finetune.optim import optimizers
from finetune.optim.optimizers import build_optimizer
from finetune.tasks.metrics import Metric, build_metrics
from finetune.tasks.prompt_set import Prompt, read_prompts
from finetune.tasks.task import Task, TaskData
from finetune.tasks.task_lookup import check_task_splits, find_task
from finetune.tasks.task_networks import check_task_weights
from finetune.tasks.training_length import Length, measure_length
from finetune.training import micro_batch_search, preflight, sampling
from finetune.training.profiler import Profiler
from finetune.training.startup_summary import startup_summary
from finetune.utils.compat.accelerate_private import unsplit_classes
from finetune.utils.compat.library_versions import untried

# How long ranks wait for rank 0 to read the base's files.
_PATIENCE = timedelta(hours=2)


# Lines of metrics whose losses are compared with the first.
RECENT = 5


@dataclass(frozen=True)
class LastLog:
    """Where the last line of metrics was written; the next one's rates count from here."""

    step: int
    tokens: float
    computed: float = 0.0


@dataclass
class TrainState:
    """What changes from step to step, beside weights and optimiser state."""

    step: int
    """Optimiser steps taken."""
    tokens: torch.Tensor
    """Targets trained on over all ranks; (1,), float64, on the device."""
    last_log: LastLog
    best: BestEvaluation
    computed: float = 0.0
    """Tokens that all ranks have computed since this process began, learned or not, without padding."""
    recent_losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Steps and losses of the last lines of metrics of this process."""
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    """`step` of the last evaluation of this process, and its values as `metrics.jsonl` has them; empty before the first
    one."""

    @classmethod
    def at(cls, step: int, tokens: int, device: torch.device, best: BestEvaluation) -> "TrainState":
        """The state after some steps of an earlier process, or of none."""
        counted = torch.full((1,), float(tokens), dtype=torch.float64, device=device)
        return cls(step, counted, LastLog(step, float(tokens)), best)

    def log_here(self) -> None:
        """Has the next rates count from this step; waits for the device."""
        self.last_log = LastLog(self.step, self.tokens.item(), self.computed)

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint stores; waits for the device."""
        evaluated = self.last_evaluation if self.last_evaluation.get("step") == self.step else {}
        return {
            "step": self.step,
            "tokens": int(self.tokens.item()),
            "best": self.best.to_dict(),
            # By one of which the best checkpoint is kept.
            "validation_loss": None,
            **evaluated,
        }


@dataclass
class Run:
    """Everything that the loop touches."""

    recipe: Recipe
    backend: Backend
    task: Task
    data: TaskData
    prompts: tuple[Prompt, ...]
    """That evaluation generates texts for."""
    metrics: dict[str, Metric]
    """That evaluation computes, by their names in `eval.metrics`."""
    length: Length
    model: nn.Module
    """The prepared model: a `ForwardWrapper` inside what the backend wraps around it."""
    optimizer: Any
    state: TrainState
    feed: Feed
    directory: RunDirectory
    reporter: Reporter
    resume: ResumePoint
    checkpoints: CheckpointManager
    shutdown: ShutdownHandler
    nonfinite: NonFiniteGuard
    timer: PhaseTimer
    profiler: Profiler | None
    compiled_graphs: activation_checkpointing.CompiledGraphs | None
    """What was compiled, where layers are."""
    identity: dict[str, Any]
    """What the mathematics depend on."""
    flops_per_target: float
    """Of training, a token."""
    weight_bytes: int
    """Bytes of weights on this rank before the first step."""
    results: dict[str, Any] = field(default_factory=dict)

    def validation(self) -> dict[str, float] | None:
        """The figures of the evaluation at this step, if there was one."""
        if self.state.last_evaluation.get("step") != self.state.step:
            return None
        return {key: value for key, value in self.results.items() if key.startswith("validation_")}


@dataclass(frozen=True)
class _Inputs:
    """What is known of a run before its processes meet."""

    task: Task
    directory: RunDirectory
    data: TaskData
    prompts: tuple[Prompt, ...]
    metrics: dict[str, Metric]
    length: Length
    order: RowOrder
    """Of the training rows."""
    weights: Weights | None
    """The files of the pretrained model."""
    base: dict[str, Any] | None
    """What the pretrained model is, by its files' digests."""
    identity: dict[str, Any]


@dataclass(frozen=True)
class _Network:
    """The network, and what is read off it before a backend wraps it."""

    wrapper: ForwardWrapper
    flops_per_target: float
    products: dict[str, str]
    """Kernels of matrix products, by name."""
    infinite: frozenset[str]
    """Buffers that hold infinities as the network was built, such as causal masks; any other is a fault."""


def build_run(recipe: Recipe, *, quiet: bool = False) -> Run:
    """Makes a run of a recipe: data, model, optimiser, prepared for what the launch asks, verified, and resumed.

    Raises:
        FinetuneError: With what is wrong; nothing has been overwritten then.
    """
    if os.environ.get("RANK", "0") == "0" and (text := untried()):
        warn(text)
    launch = read_launch()
    config = resolve_config(recipe, launch)
    check_task_splits(recipe, launch)
    optimizers.check_optimizer(recipe, cut=launch.cuts_state, flat=launch.flattens)
    float8.check_fp8(recipe)
    inputs = _prepare_inputs(recipe, quiet)
    data, length, directory, identity = inputs.data, inputs.length, inputs.directory, inputs.identity
    begun = resume_point.micro_size(recipe, directory)
    micro = micro_batch_search.resolve_micro_size(recipe, launch, data.digest, begun=begun, quiet=quiet)
    if micro.facts is not None:
        recipe, config = micro.recipe, resolve_config(micro.recipe, launch)
    backend = Backend.start(recipe, launch, config, quiet=quiet)
    if inputs.weights is not None:
        _check_values(inputs.weights, backend)
    sums = micro_batch_search.resolve_gradient_sums(recipe, backend)
    network = _build_network(recipe, backend, inputs)
    if depends_on_micro_size(network.wrapper.network):
        identity[MICRO_SIZE] = recipe.batch.rows
    whole_loss = _split_layers(backend, network.wrapper, inputs)
    sequence.install(network.wrapper, backend.mesh.group("sp"))
    model, optimizer = backend.prepare(
        network.wrapper, build_optimizer(network.wrapper, recipe, whole=not launch.cuts_state)
    )
    runtime = backend.verify(model, optimizer, lambda: preflight.loss_of_row(backend, model, inputs.task, data))
    if whole_loss is not None:
        preflight.check_layers(backend, model, inputs.task, data, whole_loss)
    kernels = {**(preflight.kernels(backend, model, recipe) if inputs.task.text else {}), **network.products}
    if recipe.model.compile:
        # After the forward passes that verify things, whose other shapes and hooks would be compiled as well.
        activation_checkpointing.compile_layers(unwrap(model), set(unsplit_classes(network.wrapper)))
    memory = backend.memory(model, optimizers.state_bytes(recipe))
    resume = resume_point.choose_resume_point(recipe, directory, backend, identity, num_steps=length.num_steps)
    profiler = _build_profiler(recipe, backend, directory, resume, length)
    resume.restore(backend, unwrap(model), optimizer)
    if not resume.finished:
        facts = {
            **backend.facts(),
            "precision": backend.precision,
            "runs": runtime.to_dict(),
            "kernels": kernels or None,
            "memory": asdict(memory),
            "length": asdict(length),
            "micro_size": micro.facts or recipe.batch.rows,
            "gradients": asdict(sums) if sums is not None else None,
            "identity": identity,
            "base": inputs.base,
            "data": {"digest": data.digest, **data.report},
        }
        directory.create(
            backend,
            recipe,
            facts,
            begin={"from_step": resume.step, "resumed_from": resume.source, "data_ranks": launch.data_ranks},
        )
    told = {**backend.facts(), "precision": backend.precision, "runs": runtime.to_dict()}
    trackers = Trackers(recipe.log.trackers, directory.path, {"recipe": recipe.model_dump(mode="json"), "launch": told})
    reporter = Reporter(backend, directory.path, length.num_steps, trackers=trackers, quiet=quiet)
    if launch.sequence * launch.tensor > 1 and depends_on_micro_size(network.wrapper.network):
        reporter.warn(
            "This network has dropout. In rows or layers that are split over ranks it draws other masks than in whole "
            "ones, so that this run takes another path than under other launch configs."
        )
    if slow := slow_precision(backend.precision):
        reporter.warn(f"{slow} `precision: fp32` is the faster one here.")
    for line in (
        *(inputs.weights.lines if inputs.weights is not None else ()),
        *micro.lines,
        *startup_summary(recipe, backend, data, length, runtime, memory, resume),
    ):
        reporter.say(line)
    return Run(
        recipe=recipe,
        backend=backend,
        task=inputs.task,
        data=data,
        prompts=inputs.prompts,
        metrics=inputs.metrics,
        length=length,
        model=model,
        optimizer=optimizer,
        state=TrainState.at(
            resume.step, resume.tokens, backend.device, BestEvaluation.resumed(recipe, resume.state.get("best"))
        ),
        feed=TokenFileFeed(
            data.train,
            inputs.order,
            first_step=resume.step,
            first_position=resume.position,
            num_steps=length.num_steps,
            micro_size=recipe.batch.rows,
            data_size=backend.mesh.data_size,
            data_rank=backend.mesh.data_rank,
        ),
        directory=directory,
        reporter=reporter,
        resume=resume,
        checkpoints=CheckpointManager(
            recipe,
            backend,
            directory,
            reporter,
            step=resume.step,
            adapter_keys=lora_adapters.adapter_keys(unwrap(model)) if recipe.lora is not None else None,
            describe=lambda folder: save_model.describe_model(unwrap(model), data.tokenizer, folder),
            infinite=network.infinite,
        ),
        shutdown=ShutdownHandler(recipe.guard.grace_s, partial(integrity.newest_address, directory.checkpoints)),
        nonfinite=NonFiniteGuard(backend, recipe.guard.max_skipped_steps, resume.state.get("skipped")),
        timer=PhaseTimer(backend.device, *([profiler.mark] if profiler is not None else [])),
        profiler=profiler,
        compiled_graphs=activation_checkpointing.CompiledGraphs() if recipe.model.compile else None,
        identity=identity,
        flops_per_target=network.flops_per_target,
        weight_bytes=memory.frozen + memory.trained,
        results=resume.results,
    )


def _prepare_inputs(recipe: Recipe, quiet: bool) -> _Inputs:
    """Reads the data, looks at the model's files, and compares both with the run that the directory holds.

    Before any process group exists, so that no rank times out in a collective while another tokenises.
    """
    task = find_task(recipe)
    directory = RunDirectory.check(recipe)
    resume_point.check_resume(recipe, directory)
    data = task.build_data(recipe, quiet)
    if recipe.sample is not None and task.text:
        # Refused before the first step, not after the last.
        sampling.prompt_tokens(recipe, recipe.sample, data.tokenizer)
    prompts = read_prompts(recipe, data.tokenizer)
    metrics = build_metrics(recipe, task, data, prompts)
    num_rows = None if data.train is None else len(data.train)
    length = measure_length(recipe.length, recipe.batch.global_size, recipe.data, num_rows)
    order = RowOrder(recipe.seed, num_rows or 0, length.epoch_rows, recipe.batch.global_size, data.digest)
    weights = check_task_weights(task, recipe, data)
    # Rank 0 alone reads the base's files, which may be many gigabytes.
    base = rendezvous_store.from_main(partial(base_of, recipe), _PATIENCE) if recipe.model.name is not None else None
    identity = identity_of(recipe, order, base)
    resume_point.compare_with_previous(recipe, directory, identity)
    return _Inputs(task, directory, data, prompts, metrics, length, order, weights, base, identity)


def _build_network(recipe: Recipe, backend: Backend, inputs: _Inputs) -> _Network:
    # Sharded as it loads only what stays as it is loaded; quantized weights are quantized whole.
    head = inputs.task.head
    whole = head is None or not head.next_token or recipe.model.quantization is not None
    sharded = recipe.model.name is not None and not whole
    with backend.loading(pretrained=sharded):
        network = init_weights(inputs.task.build_model(recipe, inputs.data), recipe.seed)
        products = float8.describe_products(network, recipe.model.fp8)
        build_network.set_stop_tokens(network, inputs.data.tokenizer, inputs.data.ends)
        flops = flops_per_target(network, recipe.data.sequence_length)
        quantization.compute_in(network, backend.dtype)
        if backend.casts_weights:
            frozen_weights.set_output_dtype(network, backend.dtype)
        infinite = frozenset(name for name, buffer in network.named_buffers() if bool(buffer.isinf().any()))
    wrapper = ForwardWrapper(network.train())
    wrapper.autocast = backend.autocast
    if recipe.model.activation_offload:
        wrapper.keeping = partial(activation_checkpointing.offload_activations, backend.device)
    return _Network(wrapper, flops, products, infinite)


def _split_layers(backend: Backend, wrapper: ForwardWrapper, inputs: _Inputs) -> float | None:
    """Leaves this rank its part of each layer, where ranks share them; returns the loss of one row from before."""
    group = backend.mesh.group("tp")
    if group is None:
        return None
    loss = preflight.loss_of_row(backend, wrapper, inputs.task, inputs.data, torch.device("cpu")).item()
    backend.splits = split_layers.split(wrapper.network, group)
    return loss


def _build_profiler(
    recipe: Recipe, backend: Backend, directory: RunDirectory, resume: ResumePoint, length: Length
) -> Profiler | None:
    if recipe.log.profile is None or resume.finished:
        return None
    folder = directory.path / "profile"
    return Profiler(folder, backend.rank, first=resume.step, steps=recipe.log.profile, last=length.num_steps)


def _check_values(weights: Weights, backend: Backend) -> None:
    """Refuses weights that are not finite, on every rank alike; each looks at its share of them."""
    found = weights.first_not_finite(backend.rank, backend.world_size)
    position = -1.0 if found is None else float(found)
    worst = int(backend.all_reduce_max(torch.tensor([position], dtype=torch.float64, device=backend.device)).item())
    if worst >= 0:
        weights.refuse(worst)
