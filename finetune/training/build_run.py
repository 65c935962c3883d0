"""A run: everything that the loop touches, built of a recipe under a launch."""

import json
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import resume_point
from finetune.checkpoint.checkpoint_manager import CheckpointManager
from finetune.checkpoint.resume_point import ResumePoint
from finetune.checkpoint.run_directory import RunDirectory
from finetune.checkpoint.run_fingerprint import MICRO_SIZE, base_of, depends_on_micro_size, identify
from finetune.config.recipe_schema import Recipe
from finetune.data.rows.prefetch import Prefetcher
from finetune.distributed import rendezvous_store
from finetune.distributed.backend import Backend
from finetune.distributed.device_selection import slow_precision
from finetune.distributed.launch.launch_config import read_launch
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.verify_launch import RuntimeReport
from finetune.export import save_model
from finetune.models import activation_checkpointing, float8, frozen_weights, lora_adapters, networks, quantization
from finetune.models.forward_wrapper import ForwardWrapper, unwrap
from finetune.models.init_weights import init_weights
from finetune.models.pretrained_files import Weights
from finetune.monitoring.flops import flops_per_target
from finetune.monitoring.metrics import Reporter, warn
from finetune.monitoring.nonfinite import NonFiniteGuard
from finetune.monitoring.shutdown import ShutdownHandler
from finetune.monitoring.timer import PhaseTimer
from finetune.optim import optimizers
from finetune.optim.optimizers import build_optimizer
from finetune.tasks.causal_lm import CAUSAL_LM
from finetune.tasks.task import Rows, Task, TaskData
from finetune.tasks.task_lookup import check_task_weights, find_task
from finetune.tasks.training_length import Length, describe_length, measure_length
from finetune.training import micro_batch_search, preflight, sampling
from finetune.training.profiler import Profiler

# How long ranks wait for rank 0 to read the base's files.
_PATIENCE = timedelta(hours=2)


@dataclass
class Run:
    """Everything that the loop touches."""

    recipe: Recipe
    backend: Backend
    task: Task
    data: TaskData
    length: Length
    model: nn.Module
    """The prepared model: a `ForwardWrapper` inside what the backend wraps around it."""
    optimizer: Any
    proof: RuntimeReport
    directory: RunDirectory
    reporter: Reporter
    flops_per_target: float
    """Of training, a token."""
    begin: ResumePoint
    """Where the run begins."""
    keeper: CheckpointManager
    """Checkpoints, ledger and incidents."""
    stopper: ShutdownHandler
    guard: NonFiniteGuard
    identity: dict[str, Any]
    """What the mathematics depend on."""
    targets: torch.Tensor
    """Targets trained on so far, over all ranks; on the device, float64."""
    reader: Prefetcher | None
    """Of the training rows; None where there are none."""
    watch: PhaseTimer
    profiler: Profiler | None
    graphs: activation_checkpointing.CompiledGraphs | None
    """What was compiled, where layers are."""
    held: int
    """Bytes of weights on this rank before the first step."""
    results: dict[str, Any] = field(default_factory=dict)
    computed: float = 0.0
    """Tokens that all ranks have computed since this process began, learned or not, without padding."""

    def read_from(self, rows: Rows) -> None:
        """Takes the training rows from somewhere else: the loop reads through `reader`, and counts in `data`."""
        self.data, self.reader = replace(self.data, train=rows), Prefetcher(rows.batch)

    def position_of(self, step: int) -> int:
        """The first position that a step reads."""
        return self.begin.position + (step - self.begin.step) * self.recipe.batch.global_size


def build_run(recipe: Recipe, *, quiet: bool = False) -> Run:
    """Makes a run of a recipe: data, model, optimiser, prepared for what the launch asks, proved, and resumed.

    Raises:
        FinetuneError: With what is wrong; nothing has been overwritten then.
    """
    asked = read_launch()
    settled = resolve_config(recipe, asked)
    optimizers.check_optimizer(recipe, cut=asked.cuts_state, flat=asked.flattens)
    float8.check(recipe)
    task = find_task(recipe)
    directory = RunDirectory.check(recipe)
    resume_point.check(recipe, directory)
    # Before any process group exists, so that no rank times out in a collective while another tokenises.
    ready = task.build_data(recipe, quiet)
    if recipe.sample is not None and task.text:
        sampling.prompt_tokens(
            recipe, recipe.sample, ready.tokenizer
        )  # refused before the first step, not after the last
    length = measure_length(recipe, ready.train)
    weights = check_task_weights(recipe, ready)
    # Rank 0 alone reads the base's files, which may be many gigabytes.
    base = rendezvous_store.from_main(partial(base_of, recipe), _PATIENCE) if recipe.model.name is not None else None
    identity = identify(recipe, ready, length, base)
    resume_point.compare(recipe, directory, identity)
    begun = resume_point.micro_size(recipe, directory)
    sized = micro_batch_search.resolve_micro_size(recipe, asked, ready.digest, begun=begun, quiet=quiet)
    if sized.facts is not None:
        recipe, settled = sized.recipe, resolve_config(sized.recipe, asked)
    backend = Backend.start(recipe, asked, settled, quiet=quiet)
    if weights is not None:
        _check_values(weights, backend)
    summed = micro_batch_search.resolve_gradient_dtype(recipe, backend)
    # Sharded as it loads only what stays as it is loaded; a packed weight is packed whole.
    sharded = recipe.model.name is not None and recipe.model.quantization is None and task is CAUSAL_LM
    with backend.loading(pretrained=sharded):
        network = init_weights(task.build_model(recipe, ready), recipe.seed)
        products = float8.products(network, recipe.model.fp8)
        networks.set_stop_tokens(network, ready.tokenizer, ready.ends)
        flops = flops_per_target(network, recipe.data.sequence_length)
        if depends_on_micro_size(network):
            identity[MICRO_SIZE] = recipe.batch.rows
        quantization.compute_in(network, backend.dtype)
        if backend.casts_weights:
            frozen_weights.set_output_dtype(network, backend.dtype)
        infinite = frozenset(name for name, buffer in network.named_buffers() if bool(buffer.isinf().any()))
    caller = ForwardWrapper(network.train())
    caller.autocast = backend.autocast
    if recipe.model.activation_offload:
        caller.keeping = partial(activation_checkpointing.offload_activations, backend.device)
    model, optimizer = backend.prepare(caller, build_optimizer(caller, recipe, whole=not asked.cuts_state))
    proof = backend.prove(model, optimizer, lambda: preflight.forward_once(backend, model, task, ready))
    kernels = {**(preflight.kernels(backend, model, recipe) if task.text else {}), **products}
    if recipe.model.compile:
        # After the forward passes that prove things, whose other shapes and hooks would be compiled as well.
        activation_checkpointing.compile_layers(unwrap(model), set(caller._no_split_modules))
    memory = backend.memory(model, optimizers.state_bytes(recipe))
    begin = resume_point.choose(recipe, directory, backend, identity, num_steps=length.num_steps, warn=warn)
    profiler = None
    if recipe.log.profile is not None and not begin.finished:
        begins, ends = begin.step, length.num_steps
        folder = directory.path / "profile"
        profiler = Profiler(folder, backend.rank, first=begins, steps=recipe.log.profile, last=ends)
    unwrapped = unwrap(model)
    begin.restore(backend, unwrapped, optimizer)
    if not begin.finished:
        facts = {
            **backend.facts(),
            "precision": backend.precision,
            "runs": proof.to_dict(),
            "kernels": kernels or None,
            "memory": asdict(memory),
            "length": asdict(length),
            "micro_size": sized.facts or recipe.batch.rows,
            "gradients": asdict(summed) if summed is not None else None,
            "identity": identity,
            "base": base,
            "data": {"digest": ready.digest, **ready.report},
        }
        directory.create(backend, recipe, facts, begin={"from_step": begin.step, "resumed_from": begin.source})
    reporter = Reporter(backend, directory.path, length.num_steps, text=task.text, quiet=quiet)
    slow = slow_precision(backend.precision)
    if slow:
        reporter.warn(f"{slow} `precision: fp32` is the faster one here.")
    plan = describe_length(recipe, length, world=backend.world, accumulation=backend.accumulation)
    sums = (summed.line(backend.accumulation),) if summed is not None else ()
    for line in (
        *ready.report_lines,
        *(weights.lines if weights is not None else ()),
        *sized.lines,
        *plan,
        *sums,
        proof.line(),
        memory.line(),
        *begin.lines(),
    ):
        reporter.say(line)
    if kernels:
        reporter.say(", ".join(f"{name}: {kernel}" for name, kernel in kernels.items()))
    if recipe.log.trackers:
        backend.accelerator.init_trackers("finetune", config={"recipe": json.dumps(recipe.model_dump(mode="json"))})
    keeper = CheckpointManager(
        recipe,
        backend,
        directory.path,
        reporter,
        step=begin.step,
        adapter_keys=lora_adapters.adapter_keys(unwrapped) if recipe.lora is not None else None,
        describe=lambda folder: save_model.describe(unwrapped, ready.tokenizer, folder),
        note=directory.note_checkpoint,
        # As the network was built: what becomes infinite later is a fault.
        infinite=infinite,
    )
    return Run(
        recipe=recipe,
        backend=backend,
        task=task,
        data=ready,
        length=length,
        model=model,
        optimizer=optimizer,
        proof=proof,
        directory=directory,
        reporter=reporter,
        flops_per_target=flops,
        begin=begin,
        keeper=keeper,
        stopper=ShutdownHandler(recipe.guard.grace_s),
        guard=NonFiniteGuard(backend, recipe.guard.max_skipped_steps, begin.state.get("skipped")),
        identity=identity,
        targets=torch.full((1,), float(begin.tokens), dtype=torch.float64, device=backend.device),
        reader=Prefetcher(ready.train.batch) if ready.train is not None else None,
        watch=PhaseTimer(backend.device, *([profiler.mark] if profiler is not None else [])),
        profiler=profiler,
        graphs=activation_checkpointing.CompiledGraphs() if recipe.model.compile else None,
        held=memory.frozen + memory.trained,
        results=begin.results,
    )


def _check_values(weights: Weights, backend: Backend) -> None:
    """Refuses weights that are not finite, on every rank alike; each looks at its share of them."""
    found = weights.first_not_finite(backend.rank, backend.world)
    position = -1.0 if found is None else float(found)
    worst = int(backend.max(torch.tensor([position], dtype=torch.float64, device=backend.device)).item())
    if worst >= 0:
        weights.refuse(worst)
