"""A run: everything that the loop touches, built of a recipe under a launch."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from finetune import adapters, export, frozen, generate, models, optim, quantization, rehearsal, resume, tasks
from finetune.backend import Backend, Proof, read_launch, settle
from finetune.guard import Stopper, Watch
from finetune.identity import base_of, identify
from finetune.keeper import Keeper
from finetune.length import Length, describe, measure
from finetune.metrics import Reporter, Stopwatch, flops_per_target, warn
from finetune.recipe import Recipe
from finetune.resume import Begin
from finetune.rundir import RunDirectory


@dataclass
class Run:
    """Everything that the loop touches."""

    recipe: Recipe
    backend: Backend
    task: tasks.Task
    data: tasks.TaskData
    length: Length
    model: nn.Module
    """The prepared model: a `models.Caller` inside what the backend wraps around it."""
    optimizer: Any
    proof: Proof
    directory: RunDirectory
    reporter: Reporter
    flops_per_target: float
    begin: Begin
    """Where the run begins."""
    keeper: Keeper
    """Checkpoints, ledger and incidents."""
    stopper: Stopper
    guard: Watch
    identity: dict[str, Any]
    """What the mathematics depend on."""
    targets: torch.Tensor
    """Targets trained on so far, over all ranks; on the device, float64."""
    watch: Stopwatch
    results: dict[str, Any] = field(default_factory=dict)

    def position_of(self, step: int) -> int:
        """The first position that a step reads."""
        return self.begin.position + (step - self.begin.step) * self.recipe.batch.global_size


def build(recipe: Recipe, *, quiet: bool = False) -> Run:
    """Makes a run of a recipe: data, model, optimiser, prepared for what the launch asks, proved, and resumed.

    Raises:
        FinetuneError: With what is wrong; nothing has been overwritten then.
    """
    asked = read_launch()
    settled = settle(recipe, asked)
    optim.check(recipe, cut=asked.cuts_state)
    task = tasks.find(recipe)
    directory = RunDirectory.check(recipe)
    resume.check(recipe, directory)
    # Before any process group exists, so that no rank times out in a collective while another tokenises.
    ready = task.build_data(recipe, quiet)
    if recipe.sample is not None and task.text:
        generate.opening(recipe, recipe.sample, ready.tokenizer)  # refused before the first step, not after the last
    length = measure(recipe, ready.train)
    identity = identify(recipe, ready, length)
    resume.compare(recipe, directory, identity)
    backend = Backend.start(recipe, asked, settled, quiet=quiet)
    # Sharded as it loads only what stays as it is loaded; a packed weight is packed whole.
    sharded = recipe.model.name is not None and recipe.model.quantization is None and task is tasks.CAUSAL_LM
    with backend.loading(pretrained=sharded):
        network = models.materialise(task.build_model(recipe, ready), recipe.seed)
        models.end_texts(network, ready.tokenizer, ready.ends)
        flops = flops_per_target(network, recipe.data.sequence_length)
        quantization.compute_in(network, backend.dtype)
        if backend.casts_weights:
            frozen.put_out(network, backend.dtype)
    caller = models.Caller(network.train())
    caller.autocast = backend.autocast
    model, optimizer = backend.prepare(caller, optim.build(caller, recipe))
    proof = backend.prove(model, optimizer, lambda: rehearsal.rehearse(backend, model, task, ready))
    if task.text and recipe.data.packing == "documents":
        rehearsal.check_isolation(backend, model, recipe)
    memory = backend.memory(model, optim.state_bytes(recipe))
    begin = resume.choose(recipe, directory, backend, identity, num_steps=length.num_steps, warn=warn)
    unwrapped = models.unwrap(model)
    begin.restore(backend, unwrapped, optimizer)
    if not begin.finished:
        facts = {
            **backend.facts(),
            "precision": backend.precision,
            "runs": proof.to_dict(),
            "memory": asdict(memory),
            "length": asdict(length),
            "identity": identity,
            "base": base_of(recipe),
            "data": {"digest": ready.digest, **ready.report},
        }
        directory.create(backend, recipe, facts, begin={"from_step": begin.step, "resumed_from": begin.source})
    reporter = Reporter(backend, directory.path, length.num_steps, quiet=quiet)
    plan = describe(recipe, length, world=backend.world, accumulation=backend.accumulation)
    for line in (*ready.report_lines, *plan, proof.line(), memory.line(), *begin.lines()):
        reporter.say(line)
    if recipe.log.trackers:
        backend.accelerator.init_trackers("finetune", config={"recipe": json.dumps(recipe.model_dump(mode="json"))})
    keeper = Keeper(
        recipe,
        backend,
        directory.path,
        reporter,
        step=begin.step,
        adapter_keys=adapters.adapter_keys(unwrapped) if recipe.lora is not None else None,
        describe=lambda folder: export.describe(unwrapped, ready.tokenizer, folder),
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
        stopper=Stopper(recipe.guard.grace_s),
        guard=Watch(backend, recipe.guard.max_skipped_steps),
        identity=identity,
        targets=torch.full((1,), float(begin.tokens), dtype=torch.float64, device=backend.device),
        watch=Stopwatch(backend.device),
        results=begin.results,
    )
