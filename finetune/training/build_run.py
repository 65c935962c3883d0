"""Builds a `BuiltRun` from a recipe and a launch, by steps that each take what earlier ones returned."""

import os
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import integrity, resume_point
from finetune.checkpoint.resume_point import ResumePoint
from finetune.checkpoint.run_directory import RunDirectory
from finetune.checkpoint.run_fingerprint import MICRO_SIZE, base_of, depends_on_micro_size, identity_of
from finetune.checkpoint.save_checkpoint import CheckpointManager
from finetune.checkpoint.snapshot import Snapshot
from finetune.config.recipe_schema import Recipe
from finetune.data.rows.feed import TokenFileFeed
from finetune.data.rows.row_order import RowOrder
from finetune.distributed import rendezvous_store
from finetune.distributed.backend import Backend
from finetune.distributed.device_selection import slow_precision
from finetune.distributed.held_memory import Memory
from finetune.distributed.launch.launch_config import Launch, ResolvedConfig, read_launch
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.split_parameters import UNSPLIT, Splits
from finetune.distributed.strategies import sequence
from finetune.distributed.verify_launch import RuntimeReport
from finetune.export import save_model
from finetune.models import (
    activation_checkpointing,
    float8,
    frozen_weights,
    lora_adapters,
    quantization,
    split_layers,
)
from finetune.models.build_network import init_weights, set_stop_tokens
from finetune.models.forward_wrapper import ForwardWrapper, unwrap
from finetune.models.pretrained_files import Weights
from finetune.monitoring.flops import flops_per_target
from finetune.monitoring.metrics import PhaseTimer, Reporter, warn
from finetune.monitoring.nonfinite import NonFiniteGuard
from finetune.monitoring.shutdown import ShutdownHandler
from finetune.monitoring.trackers import Trackers
from finetune.optim import optimizers
from finetune.tasks.metrics import Metric, build_metrics
from finetune.tasks.prompt_set import Prompt, read_prompts
from finetune.tasks.task import Task, TaskData
from finetune.tasks.task_lookup import find_task
from finetune.tasks.task_networks import check_task_weights
from finetune.tasks.training_length import Length, measure_length
from finetune.training import micro_batch_search, preflight, sampling
from finetune.training.gradient_sums import GradientSums, choose_gradient_sums
from finetune.training.micro_batch_search import MicroBatchChoice
from finetune.training.profiler import Profiler
from finetune.training.recipe_checks import check_recipe
from finetune.training.run import BuiltRun, TrainState
from finetune.training.startup_summary import startup_summary
from finetune.utils.compat.accelerate_private import unsplit_classes
from finetune.utils.compat.library_versions import untested_versions

# How long ranks wait for rank 0 to read the base's files.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Inputs:
    """Everything that is known of a run before its processes meet."""

    task: Task
    directory: RunDirectory
    data: TaskData
    prompts: tuple[Prompt, ...]
    metrics: dict[str, Metric]
    length: Length
    order: RowOrder
    """Order of the training rows."""
    weights: Weights | None
    """The files of the pretrained model."""
    base: dict[str, Any] | None
    """The pretrained model, by its files' digests."""
    identity: dict[str, Any]


@dataclass(frozen=True)
class RunPlan:
    """Inputs, recipe and launch, with everything settled that the latter leave open."""

    inputs: Inputs
    recipe: Recipe
    launch: Launch
    config: ResolvedConfig
    micro_size: MicroBatchChoice
    gradients: GradientSums | None


@dataclass(frozen=True)
class BuiltNetwork:
    """The network, and what is read off it before a backend wraps it."""

    wrapper: ForwardWrapper
    splits: Splits
    whole_loss: float | None
    """The loss of one row before layers were split; None if they are whole."""
    mixes_rows: bool
    """True if results depend on which rows share a forward pass: it has dropout or batch norms."""
    flops_per_target: float
    products: dict[str, str]
    """Kernels of matrix products, by name."""
    infinite: frozenset[str]
    """Buffers that hold infinities as the network was built, such as causal masks; any other is a fault."""


@dataclass(frozen=True)
class PreparedModel:
    """The network and its optimiser as the backend holds them, verified."""

    network: BuiltNetwork
    model: nn.Module
    optimizer: Any
    runtime: RuntimeReport
    kernels: dict[str, str]
    memory: Memory


def build_run(recipe: Recipe, *, quiet: bool = False) -> BuiltRun:
    """Builds a run: data, model and optimiser, prepared as the launch asks, verified, and resumed.

    Raises:
        FinetuneError: With what is wrong; nothing has been overwritten then.
    """
    if os.environ.get("RANK", "0") == "0" and (text := untested_versions()):
        warn(text)
    launch = read_launch()
    check_recipe(recipe, launch)
    inputs = _read_inputs(recipe, quiet)
    plan = _settle_plan(recipe, launch, inputs, quiet)
    backend = Backend.start(plan.recipe, plan.launch, plan.config, quiet=quiet)
    network = _load_network(plan, backend)
    prepared = _prepare_model(plan, backend, network)
    identity = {**inputs.identity, MICRO_SIZE: plan.recipe.batch.rows} if network.mixes_rows else inputs.identity
    directory, last = inputs.directory, inputs.length.num_steps
    resume = resume_point.choose_resume_point(plan.recipe, directory, backend, identity, num_steps=last)
    profiler = None
    if recipe.log.profile is not None and not resume.finished:
        folder = directory.path / "profile"
        profiler = Profiler(folder, backend.rank, first=resume.step, steps=recipe.log.profile, last=last)
    resume.restore(backend, unwrap(prepared.model), prepared.optimizer)
    if not resume.finished:
        _write_start(plan, backend, prepared, identity, resume)
    adapter_keys = lora_adapters.adapter_keys(unwrap(prepared.model)) if recipe.lora is not None else None
    reporter = _open_reporter(plan, backend, prepared, resume, quiet)
    return BuiltRun(
        recipe=plan.recipe,
        backend=backend,
        task=inputs.task,
        data=inputs.data,
        length=inputs.length,
        prompts=inputs.prompts,
        metrics=inputs.metrics,
        model=prepared.model,
        optimizer=prepared.optimizer,
        feed=TokenFileFeed(
            inputs.data.train,
            inputs.order,
            first_step=resume.step,
            first_position=resume.position,
            num_steps=last,
            micro_size=plan.recipe.batch.rows,
            data_size=backend.mesh.data_size,
            data_rank=backend.mesh.data_rank,
        ),
        state=TrainState.resumed(recipe, resume, backend.device),
        resume=resume,
        identity=identity,
        directory=directory,
        reporter=reporter,
        checkpoints=CheckpointManager(
            plan.recipe.checkpoint,
            backend,
            directory,
            reporter,
            Snapshot(backend, adapter_keys, network.infinite),
            lambda folder: save_model.describe_model(unwrap(prepared.model), inputs.data.tokenizer, folder),
            step=resume.step,
        ),
        results=resume.results,
        shutdown=ShutdownHandler(recipe.guard.grace_s, partial(integrity.newest_address, directory.checkpoints)),
        nonfinite=NonFiniteGuard(backend, recipe.guard.max_skipped_steps, resume.state.get("skipped")),
        timer=PhaseTimer(backend.device, *([profiler.mark] if profiler is not None else [])),
        profiler=profiler,
        flops_per_target=network.flops_per_target,
        weight_bytes=prepared.memory.frozen + prepared.memory.trained,
    )


def _read_inputs(recipe: Recipe, quiet: bool) -> Inputs:
    """Reads the data, looks at the model's files, and compares both with the run that the directory holds.

    Before any process group exists, so that no rank times out in a collective while another tokenises.
    """
    task = find_task(recipe)
    directory = RunDirectory.check(recipe)
    resume_point.check_resume(recipe.resume.mode, directory)
    data = task.build_data(recipe, quiet)
    if recipe.sample is not None and task.text:
        # Refused before the first step, not after the last.
        sampling.prompt_tokens(recipe.sample, recipe.chat, data.tokenizer)
    prompts = read_prompts(recipe, data.tokenizer)
    metrics = build_metrics(recipe, task, data, prompts)
    num_rows = None if data.train is None else len(data.train)
    length = measure_length(recipe.length, recipe.batch.global_size, recipe.data, num_rows)
    order = RowOrder(recipe.seed, num_rows or 0, length.epoch_rows, recipe.batch.global_size, data.digest)
    weights = check_task_weights(task, recipe, data)
    # Rank 0 alone reads the base's files, which may be many gigabytes.
    base = rendezvous_store.from_main(partial(base_of, recipe), _PATIENCE) if recipe.model.name is not None else None
    identity = identity_of(recipe, order, base)
    resume_point.compare_with_previous(recipe.resume.allow, directory, identity)
    return Inputs(task, directory, data, prompts, metrics, length, order, weights, base, identity)


def _settle_plan(recipe: Recipe, launch: Launch, inputs: Inputs, quiet: bool) -> RunPlan:
    """Settles the size of micro-batches, and when gradients are summed; every rank must call it."""
    begun = resume_point.kept_micro_size(recipe.resume.allow, inputs.directory)
    micro = micro_batch_search.resolve_micro_size(recipe, launch, inputs.data.digest, begun=begun, quiet=quiet)
    config = resolve_config(micro.recipe, launch)
    sums = choose_gradient_sums(micro.recipe, launch, config.accumulation)
    settled = launch if sums is None else replace(launch, sync_each_batch=sums.each)
    return RunPlan(inputs, micro.recipe, settled, config, micro, sums)


def _load_network(plan: RunPlan, backend: Backend) -> BuiltNetwork:
    """Builds the network with its weights, and leaves this rank its part of what is split."""
    recipe, inputs = plan.recipe, plan.inputs
    if inputs.weights is not None:
        _check_values(inputs.weights, backend)
    # Sharded as it loads only what stays as it is loaded; quantized weights are quantized whole.
    head = inputs.task.head
    whole = head is None or not head.next_token or recipe.model.quantization is not None
    with backend.loading(pretrained=recipe.model.name is not None and not whole):
        network = init_weights(inputs.task.build_model(recipe, inputs.data), recipe.seed)
        products = float8.describe_products(network, recipe.model.fp8)
        set_stop_tokens(network, inputs.data.tokenizer, inputs.data.ends)
        flops = flops_per_target(network, recipe.data.sequence_length)
        quantization.compute_in(network, backend.dtype)
        if backend.strategy.casts_weights(backend):
            frozen_weights.set_output_dtype(network, backend.dtype)
        infinite = frozenset(name for name, buffer in network.named_buffers() if bool(buffer.isinf().any()))
    mixes_rows = depends_on_micro_size(network)
    wrapper = ForwardWrapper(network.train())
    wrapper.autocast = backend.autocast
    if recipe.model.activation_offload:
        wrapper.keeping = partial(activation_checkpointing.offload_activations, backend.device)
    splits, whole_loss = UNSPLIT, None
    if (group := backend.mesh.group("tp")) is not None:
        loss = preflight.loss_of_row(backend, wrapper, inputs.task, inputs.data, torch.device("cpu"))
        splits, whole_loss = split_layers.split(network, group), loss.item()
    sequence.install(wrapper, backend.mesh.group("sp"))
    return BuiltNetwork(wrapper, splits, whole_loss, mixes_rows, flops, products, infinite)


def _check_values(weights: Weights, backend: Backend) -> None:
    """Refuses weights that are not finite, on every rank alike; each looks at its share of them."""
    found = weights.first_not_finite(backend.rank, backend.world_size)
    position = -1.0 if found is None else float(found)
    worst = int(backend.all_reduce_max(torch.tensor([position], dtype=torch.float64, device=backend.device)).item())
    if worst >= 0:
        weights.refuse(worst)


def _prepare_model(plan: RunPlan, backend: Backend, network: BuiltNetwork) -> PreparedModel:
    """Hands network and optimiser to the backend, and verifies what it makes of them by a few forward passes."""
    recipe, task, data = plan.recipe, plan.inputs.task, plan.inputs.data
    built = optimizers.build_optimizer(network.wrapper, recipe, whole=not plan.launch.cuts_state)
    model, optimizer = backend.prepare(network.wrapper, built, network.splits)
    runtime = backend.verify(lambda: preflight.loss_of_row(backend, model, task, data))
    if network.whole_loss is not None:
        preflight.check_layers(backend, model, task, data, network.whole_loss)
    kernels = {**(preflight.kernels(backend, model, recipe) if task.text else {}), **network.products}
    if recipe.model.compile:
        # After the forward passes that verify things, whose other shapes and hooks would be compiled as well.
        activation_checkpointing.compile_layers(unwrap(model), set(unsplit_classes(network.wrapper)))
    memory = backend.memory(model, optimizers.state_bytes(recipe.optim))
    return PreparedModel(network, model, optimizer, runtime, kernels, memory)


def _write_start(
    plan: RunPlan, backend: Backend, prepared: PreparedModel, identity: dict[str, Any], resume: ResumePoint
) -> None:
    """Writes into the run directory what starts."""
    inputs = plan.inputs
    facts = {
        **_launch_facts(backend, prepared.runtime),
        "kernels": prepared.kernels or None,
        "memory": asdict(prepared.memory),
        "length": asdict(inputs.length),
        "micro_size": plan.micro_size.facts or plan.recipe.batch.rows,
        "gradients": asdict(plan.gradients) if plan.gradients is not None else None,
        "identity": identity,
        "base": inputs.base,
        "data": {"digest": inputs.data.digest, **inputs.data.report},
    }
    begin = {"from_step": resume.step, "resumed_from": resume.source, "data_ranks": plan.launch.data_ranks}
    inputs.directory.create(backend, plan.recipe, facts, begin=begin)


def _launch_facts(backend: Backend, runtime: RuntimeReport) -> dict[str, Any]:
    return {**backend.facts(), "precision": backend.precision, "runs": runtime.to_dict()}


def _open_reporter(
    plan: RunPlan, backend: Backend, prepared: PreparedModel, resume: ResumePoint, quiet: bool
) -> Reporter:
    """Makes the reporter, and says what starts."""
    recipe, inputs, folder = plan.recipe, plan.inputs, plan.inputs.directory.path
    told = {"recipe": recipe.model_dump(mode="json"), "launch": _launch_facts(backend, prepared.runtime)}
    trackers = Trackers(recipe.log.trackers, folder, told)
    reporter = Reporter(backend, folder, inputs.length.num_steps, trackers=trackers, quiet=quiet)
    if prepared.network.mixes_rows and backend.mesh.size("sp", "tp") > 1:
        reporter.warn(
            "This network has dropout. In rows or layers that are split over ranks it draws other masks than in whole "
            "ones, so that this run takes another path than under other launch configs."
        )
    if slow := slow_precision(backend.precision):
        reporter.warn(f"{slow} `precision: fp32` is the faster one here.")
    for line in (
        *(inputs.weights.lines if inputs.weights is not None else ()),
        *plan.micro_size.lines,
        *startup_summary(recipe, backend, inputs.data, inputs.length, prepared.runtime, prepared.memory, resume),
    ):
        reporter.say(line)
    return reporter
