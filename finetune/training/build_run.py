"""Builds a `BuiltRun` from a recipe and a launch, by steps that each take what earlier ones returned."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from finetune.checkpoint import integrity, resume_point
from finetune.checkpoint.resume_point import ResumePoint
from finetune.checkpoint.run_directory import RunDirectory
from finetune.checkpoint.run_fingerprint import MICRO_SIZE, base_files, base_of, depends_on_micro_size, identity_of
from finetune.checkpoint.save_checkpoint import CheckpointManager
from finetune.checkpoint.snapshot import Snapshot
from finetune.config.recipe_schema import Recipe
from finetune.data.rows.feed import TokenFileFeed
from finetune.data.rows.row_order import RowOrder
from finetune.data.show_examples import preview
from finetune.distributed import device_selection, rendezvous_store
from finetune.distributed.backend import Backend
from finetune.distributed.launch.launch_config import Launch, ResolvedConfig, read_launch
from finetune.distributed.memory_usage import Memory
from finetune.distributed.rank_notes import failures_told
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.state.weight_average import WeightAverage
from finetune.distributed.verify_launch import RuntimeReport
from finetune.export import save_model
from finetune.models import activation_checkpointing, float8, lora_adapters
from finetune.models.build_network import check_pretrained, set_stop_tokens, settle_parameters
from finetune.models.forward_wrapper import unwrap
from finetune.models.pretrained_files import Weights, files_beside
from finetune.models.prompts import prompt_tokens
from finetune.monitoring.flops import flops_per_target
from finetune.monitoring.metrics import PhaseTimer, Reporter
from finetune.monitoring.nonfinite import NonFiniteGuard
from finetune.monitoring.out_of_memory import explain_out_of_memory
from finetune.monitoring.rank_progress import START
from finetune.monitoring.rank_watch import RankWatch
from finetune.monitoring.shutdown import ShutdownHandler
from finetune.monitoring.trackers import Trackers
from finetune.optim import optimizers
from finetune.planning.planner import candidates_of
from finetune.tasks.build_task import check_counts, without_validation
from finetune.tasks.evaluate_rows import join_teacher
from finetune.tasks.metrics import Metric, build_metrics
from finetune.tasks.prompt_set import Prompt, read_prompts
from finetune.tasks.task import Batch, Reference, Task, TaskData
from finetune.tasks.task_lookup import find_task
from finetune.training import micro_batch_search, preflight
from finetune.training.built_run import BuiltRun, Length, TrainState, measure_length
from finetune.training.dry_run import check_run
from finetune.training.load_network import FrozenNetwork, hold_frozen, load_network, read_frozen, wrap_network
from finetune.training.micro_batch_search import MicroBatchChoice
from finetune.training.profiler import Profiler
from finetune.training.reference_scores import Scorer, add_reference, join_without_adapters
from finetune.utils import orphan_watch
from finetune.utils.atomic_files import digest_of
from finetune.utils.compat import torch_private
from finetune.utils.compat.accelerate_private import unsplit_classes
from finetune.utils.compat.library_versions import untested_versions
from finetune.utils.errors import RecipeError
from finetune.utils.quoting import to_stderr

# A run of so many epochs that it has fewer steps than this is warned of.
_FEW_STEPS = 50


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
    frozen: FrozenNetwork | None
    """A second network, by its files."""


@dataclass(frozen=True)
class GradientSums:
    """When gradients of a step's micro-batches are summed over ranks."""

    each: bool
    """After each of them, with which a rank holds its shards alone; else after the last."""
    needed: int | None
    """Bytes that a rank would need to hold them whole, as a plan forecasts them; None if the launch decides, or if
    the network cannot be counted."""
    room: int
    """Bytes that a rank can have."""


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
class BuiltModel:
    """The network and its optimiser as the backend holds them, verified."""

    model: nn.Module
    optimizer: Any
    stateless: bool
    """True if the optimiser keeps no tensor of its own for a parameter."""
    runtime: RuntimeReport
    kernels: dict[str, str]
    memory: Memory
    mixes_rows: bool
    """True if results depend on which rows share a forward pass: it has dropout or batch norms."""
    flops_per_target: float
    infinite: frozenset[str]
    """Buffers that hold infinities as the network was built, such as causal masks; any other is a fault."""
    teacher: nn.Module | None
    """A second network that is computed in each step."""


@failures_told()
def build_run(recipe: Recipe, *, quiet: bool = False) -> BuiltRun:
    """Builds a run: data, model and optimiser, prepared as the launch asks, verified, and resumed.

    Raises:
        FinetuneError: With what is wrong; nothing has been overwritten then.
    """
    if os.environ.get("RANK", "0") == "0" and (text := untested_versions()):
        to_stderr(text)
    launch = read_launch()
    check_run(recipe, launch)
    rendezvous_store.check_machines(recipe.model_dump(mode="json"))
    inputs = _read_inputs(recipe, quiet)
    begun = resume_point.kept_micro_size(recipe, inputs.directory)
    micro = micro_batch_search.resolve_micro_size(recipe, launch, inputs.data.digest, begun=begun, quiet=quiet)
    config = resolve_config(micro.recipe, launch)
    sums = choose_gradient_sums(micro.recipe, launch, config.accumulation)
    settled = launch if sums is None else replace(launch, sync_each_batch=sums.each)
    plan = RunPlan(inputs, micro.recipe, settled, config, micro, sums)
    rank = int(os.environ.get("RANK", "0"))
    watch = RankWatch(recipe.guard, inputs.directory.path, rank=rank, world_size=launch.num_processes)
    with ExitStack() as watched:
        # It ends with the last step, or here over an error.
        watched.enter_context(watch)
        run = _build_watched(plan, watch, quiet)
        watched.pop_all()
    watch.begin(run.resume.step)
    return run


def _build_watched(plan: RunPlan, watch: RankWatch, quiet: bool) -> BuiltRun:
    """Builds what processes have in common, from the start of their group on."""
    recipe, inputs = plan.recipe, plan.inputs
    backend = Backend.start(recipe, plan.launch, plan.config, quiet=quiet)
    try:
        built = _build_model(plan, backend)
    except (RuntimeError, MemoryError) as error:
        if (full := explain_out_of_memory(error, building=True)) is not None:
            raise full from error
        raise
    network = unwrap(built.model)
    watch.mark(START)
    identity = {**inputs.identity, MICRO_SIZE: recipe.batch.rows} if built.mixes_rows else inputs.identity
    directory, last = inputs.directory, inputs.length.num_steps
    resume = resume_point.choose_resume_point(recipe, directory, backend, identity, num_steps=last)
    profiler = None
    if recipe.log.profile is not None and not resume.finished:
        folder = directory.path / "profile"
        profiler = Profiler(folder, backend.rank, first=resume.step, steps=recipe.log.profile, last=last)
    data, join = inputs.data, BuiltRun.join
    if not resume.finished and inputs.task.reference is not None:
        if "task.name" in resume.changed:
            raise RecipeError(
                f"resume.mode: {resume.address} is of another task, and {recipe.task.name} compares with the model as "
                "training begins. Write its model (`finetune export RUN --as merged`), and name that as model.name."
            )
        data, join = _with_reference(plan, backend, built.model, inputs.task.reference, partial(watch.mark, START))
    if built.teacher is not None:
        join = partial(join_teacher, built.teacher)
    resume.restore(backend, network, built.optimizer)
    average = None
    if (decay := recipe.optim.ema_decay) is not None and not resume.finished:
        masters, every = partial(backend.each_master, network), recipe.optim.ema_every_steps
        average = WeightAverage(masters, decay, every, stateless=built.stateless)
    reporter = _open_run(plan, backend, built, identity, resume, quiet)
    adapter_keys = lora_adapters.adapter_keys(network) if recipe.lora is not None else None
    beside = files_beside(recipe) if backend.is_main and inputs.task.head is not None else {}
    if inputs.task.files is not None:
        beside |= inputs.task.files(recipe, lora_adapters.config_of(network))
    return BuiltRun(
        recipe=recipe,
        backend=backend,
        task=inputs.task,
        data=data,
        length=inputs.length,
        prompts=inputs.prompts,
        metrics=inputs.metrics,
        model=built.model,
        optimizer=built.optimizer,
        average=average,
        feed=TokenFileFeed(
            data.train,
            inputs.order,
            first_step=resume.step,
            first_position=resume.position,
            num_steps=last,
            micro_size=recipe.batch.rows,
            data_size=backend.mesh.data_size,
            data_rank=backend.mesh.data_rank,
        ),
        state=TrainState.resumed(recipe, resume, backend, len(inputs.task.terms)),
        resume=resume,
        identity=identity,
        directory=directory,
        reporter=reporter,
        checkpoints=CheckpointManager(
            recipe.checkpoint,
            backend,
            directory,
            reporter,
            Snapshot(backend, adapter_keys, built.infinite),
            lambda folder: save_model.describe_model(network, inputs.data.tokenizer, folder, beside),
            step=resume.step,
        ),
        results=resume.results,
        shutdown=ShutdownHandler(
            recipe.guard.grace_s, partial(integrity.newest_address, directory.checkpoints), watch.stands_still
        ),
        nonfinite=NonFiniteGuard(backend, recipe.guard.max_skipped_steps, resume.state.get("skipped")),
        timer=PhaseTimer(backend.device, [watch.mark, *([profiler.mark] if profiler is not None else [])]),
        watch=watch,
        profiler=profiler,
        flops_per_target=built.flops_per_target,
        weight_bytes=built.memory.frozen + built.memory.trained,
        beside=beside,
        join=join,
    )


def _with_reference(
    plan: RunPlan, backend: Backend, model: nn.Module, reference: Reference, progress: Callable[[], None]
) -> tuple[TaskData, Callable[[Batch], Batch]]:
    """Returns the data with the reference's scores, and what adds to a batch those that are computed in each step."""
    inputs, recipe, none = plan.inputs, plan.recipe, BuiltRun.join
    if recipe.preference is not None and recipe.preference.reference == "adapters_off":
        return inputs.data, join_without_adapters(model, reference)
    if (frozen := inputs.frozen) is None:
        scorer = Scorer(backend, lambda: model, reference, recipe, inputs.base, progress)
        return add_reference(scorer, inputs.data), none
    held = cache(partial(hold_frozen, backend, frozen, inputs.task, inputs.data))
    scored = add_reference(Scorer(backend, held, reference, frozen.recipe, frozen.base, progress), inputs.data)
    held.cache_clear()
    gc.collect()  # modules and their hooks know each other
    return scored, none


def _read_inputs(recipe: Recipe, quiet: bool) -> Inputs:
    """Reads the data, looks at the model's files, and compares both with the run that the directory holds.

    Before any process group exists, so that no rank times out in a collective while another tokenises.
    """
    task = find_task(recipe)
    directory = RunDirectory.check(recipe)
    resume_point.check_resume(recipe.resume.mode, directory)
    if task.head is None and task.build_skeleton is not None:
        settle_parameters(task.build_skeleton(recipe, None))  # refused before data is read
    data = task.build_data(recipe, quiet)
    check_counts(task, data.train, data.validation)
    if recipe.sample is not None and task.rows.writes_text:
        # Refused before the first step, not after the last.
        variables = recipe.chat.template_args if recipe.chat is not None else None
        prompt_tokens(data.tokenizer, recipe.sample.prompt, encoded=task.rows.reads_source, variables=variables)
    prompts = read_prompts(recipe, data.tokenizer, paired=task.rows.reads_source)
    metrics = build_metrics(recipe, task, data, prompts)
    num_rows = None if data.train is None else len(data.train)
    length = measure_length(recipe.length, recipe.batch.global_size, recipe.data, num_rows)
    order = RowOrder(recipe.seed, num_rows or 0, length.epoch_rows, recipe.batch.global_size, data.digest)
    weights = None
    if task.head is not None and task.build_config is not None:
        weights = check_pretrained(recipe, task.build_config(recipe, data), task.head)
    frozen = read_frozen(recipe, task, data)
    inputs: dict[str, dict[str, Any]] = {
        "data": {
            **data.contents,
            "the rows": [data.digest, num_rows, None if data.validation is None else len(data.validation)],
            "the prompts": digest_of(list(map(asdict, prompts))),
            # Each machine may have it in a folder of its own.
            "model.name": {**(base_of(recipe, {}) or {}), "name": recipe.model.name},
        }
    }
    if frozen is not None:
        inputs["data"][frozen.key] = {**(base_of(frozen.recipe, {}) or {}), "name": frozen.recipe.model.name}
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # One rank of each machine reads the base's files, which may be many gigabytes.
        several = orphan_watch.on_several_machines()
        rendezvous_store.meet()  # so that the others hear of it if they cannot be read
        for name, read in {"base": recipe, "frozen": None if frozen is None else frozen.recipe}.items():
            known = read is not None and (several or Path(read.model.name or "hub").is_dir())
            inputs[name] = base_files(read) if read is not None and known else {}
    agreed = rendezvous_store.check_inputs(inputs)
    base = base_of(recipe, agreed["base"])
    if frozen is not None:
        frozen = replace(frozen, base=base_of(frozen.recipe, agreed["frozen"]))
    identity = identity_of(recipe, order, base, {} if frozen is None else {frozen.key: frozen.base})
    resume_point.compare_with_previous(recipe.resume.allow, directory, identity)
    return Inputs(task, directory, data, prompts, metrics, length, order, weights, base, identity, frozen)


def choose_gradient_sums(recipe: Recipe, launch: Launch, accumulation: int) -> GradientSums | None:
    """Chooses the same on every rank, before these form a process group; None where there is nothing to choose.

    What decides is the same at every start on a machine, so that a run that resumes takes the same path to the bit.
    """
    if not launch.defers(accumulation):
        chosen = launch.sync_each_batch if accumulation > 1 else None
        return None if chosen is None else GradientSums(chosen, None, 0)
    room = min(rendezvous_store.gather_notes(device_selection.total_memory()))

    def forecast() -> tuple[bool, int | None]:
        # Whole gradients send less, so they are held where they fit.
        if not torch_private.reduces_unused_gradients():
            return False, None
        candidate_of = candidates_of(recipe, replace(launch, sync_each_batch=False), room)
        whole = candidate_of(recipe.batch.rows) if candidate_of is not None else None
        if whole is None or whole.memory is None:
            return True, None
        return whole.verdict != "fits", whole.needed

    each, needed = rendezvous_store.from_main(forecast)
    return GradientSums(each, needed, room)


def _build_model(plan: RunPlan, backend: Backend) -> BuiltModel:
    """Builds the network with its weights and the optimiser, hands both to the backend, and verifies what it made."""
    recipe, task, data = plan.recipe, plan.inputs.task, plan.inputs.data
    build = partial(task.build_model, recipe, data)
    network = load_network(backend, recipe, task, plan.inputs.weights, build)
    products = float8.describe_products(network, recipe.model.fp8)
    set_stop_tokens(network, data.tokenizer, data.ends)
    # A token goes through an encoder or a decoder, which are taken to be alike.
    flops = flops_per_target(network, recipe.data.sequence_length) / (2 if task.rows.reads_source else 1)
    infinite = frozenset(name for name, buffer in network.named_buffers() if bool(buffer.isinf().any()))
    mixes_rows = depends_on_micro_size(network)
    wrapper, splits, whole_loss = wrap_network(backend, network.train(), recipe, task, data)
    optimizer = optimizers.build_optimizer(wrapper, recipe, whole=not plan.launch.cuts_state)
    state_bytes = optimizers.state_bytes(recipe.optim, optimizer.param_groups)
    stateless = state_bytes == (0 if recipe.optim.ema_decay is None else 4)
    model, optimizer = backend.prepare(wrapper, optimizer, splits)
    runtime = backend.verify(lambda: preflight.loss_of_row(backend, model, task, data))
    if whole_loss is not None:
        preflight.check_layers(backend, model, task, data, whole_loss)
    continues_text = task.rows.writes_text and not task.rows.reads_source
    kernels = {
        **(preflight.verify_kernels(backend, model, recipe) if continues_text else {}),
        **products,
    }
    if recipe.model.compile:
        # After the forward passes that verify things, whose other shapes and hooks would be compiled as well.
        activation_checkpointing.compile_layers(unwrap(model), set(unsplit_classes(wrapper)))
    held = None
    if plan.inputs.frozen is not None and task.reference is None:
        held = hold_frozen(backend, plan.inputs.frozen, task, data)
    memory = backend.memory(model, state_bytes, [held] if held is not None else [])
    return BuiltModel(model, optimizer, stateless, runtime, kernels, memory, mixes_rows, flops, infinite, held)


def _open_run(
    plan: RunPlan, backend: Backend, built: BuiltModel, identity: dict[str, Any], resume: ResumePoint, quiet: bool
) -> Reporter:
    """Writes into the run directory what starts, and says it by the reporter that it returns."""
    recipe, inputs, data = plan.recipe, plan.inputs, plan.inputs.data
    launch = {**backend.facts(), "precision": backend.precision, "runs": built.runtime.to_dict()}
    if not resume.finished:
        facts = {
            **launch,
            "kernels": built.kernels or None,
            "memory": asdict(built.memory),
            "length": asdict(inputs.length),
            "micro_size": plan.micro_size.facts or recipe.batch.rows,
            "gradients": asdict(plan.gradients) if plan.gradients is not None else None,
            "identity": identity,
            "base": inputs.base,
            "data": {"digest": data.digest, **data.report},
        }
        begin = {"from_step": resume.step, "resumed_from": resume.source, "data_ranks": plan.launch.data_ranks}

        def examples() -> list[list[dict[str, Any]]]:
            rows = data.train
            return [] if rows is None or data.tokenizer is None else preview(rows, data.tokenizer, data.label_names)

        inputs.directory.create(backend, recipe, facts, begin=begin, examples=examples)
    folder = inputs.directory.path
    trackers = Trackers(recipe.log.trackers, folder, {"recipe": recipe.model_dump(mode="json"), "launch": launch})
    reporter = Reporter(backend, folder, inputs.length.num_steps, trackers=trackers, quiet=quiet, guard=recipe.guard)
    if built.mixes_rows and backend.mesh.size("sp", "tp") > 1:
        reporter.warn(
            "This network has dropout. In rows or layers that are split over ranks it draws other masks than in whole "
            "ones, so that this run takes another path than under other launch configs."
        )
    size = plan.micro_size.facts or {}
    if built.mixes_rows and size.get("asked", "auto") not in ("auto", recipe.batch.rows):
        reporter.warn(
            f"This network has dropout or batch norms, whose results depend on the size of micro-batches: with "
            f"{recipe.batch.rows} rows in place of {size['asked']} this run takes another path than with "
            f"{size['asked']}. Set batch.micro_size to {recipe.batch.rows} for one path with every launch file."
        )
    if slow := device_selection.slow_precision(backend.precision):
        reporter.warn(f"{slow} `precision: fp32` is the faster one here.")
    weights = inputs.weights.lines if inputs.weights is not None else ()
    for line in (*weights, *plan.micro_size.lines, *_start_lines(plan, backend, built, resume)):
        reporter.say(line)
    return reporter


def _start_lines(plan: RunPlan, backend: Backend, built: BuiltModel, resume: ResumePoint) -> Iterator[str]:
    """Yields eight lines for a terminal of 80 columns, but for names and paths that are long, and one a warning."""
    recipe, data, runtime = plan.recipe, plan.inputs.data, built.runtime
    name = recipe.model.name or (recipe.model.config or {}).get("model_type") or recipe.task.name
    total, trained = runtime.num_parameters, runtime.num_trained
    share = "all trained" if trained == total else f"{_short_count(trained)} trained ({trained / total:.1%})"
    how = (recipe.model.quantization, "LoRA" if recipe.lora is not None else None)
    steps = "none, evaluation only"
    if num_steps := plan.inputs.length.num_steps:
        batch, accumulation, groups = recipe.batch, backend.accumulation, backend.mesh.data_size
        ranks = f"{groups} process{'es' if groups != 1 else ''}"
        if groups != backend.world_size:
            ranks = f"{groups} group{'s' if groups != 1 else ''} of processes"
        split = f"{ranks} x {batch.micro_size} rows x {accumulation} micro-batch{'es' if accumulation != 1 else ''}"
        epochs = num_steps * batch.global_size / max(1, plan.inputs.length.epoch_rows)
        steps = f"{num_steps:,} of {batch.global_size} rows = {split}; {epochs:.3g} epochs"
        if recipe.length.epochs is not None and num_steps < _FEW_STEPS:
            steps += f"\nonly {num_steps} steps: raise length.epochs, or lower batch.global_size"
    texts = {
        "model": ", ".join(filter(None, (str(name), f"{_short_count(total)} parameters", share, *how))),
        "data": "\n".join([*data.report_lines, *without_validation(recipe, data)]),
        "steps": steps,
        "launch": ", ".join(filter(None, (runtime.line(), backend.precision, runtime.offload()))),
        "memory": built.memory.line(),
        "directory": recipe.output.dir,
        "resume": "\n".join(resume.lines()),
    }
    for label, text in texts.items():
        for number, line in enumerate(filter(None, text.split("\n"))):
            yield f"{'' if number else label:<10}{line}"


def _short_count(number: int) -> str:
    """Returns a number of parameters such as 8.03 B."""
    for size, unit in ((10**9, " B"), (10**6, " M")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,}"
