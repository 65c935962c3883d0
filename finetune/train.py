"""The loop. `build` makes a `Run` of a recipe, `train` takes its steps, `train_step` is one of them."""

import json
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune import evaluate, export, generate, models, optim, rehearsal, tasks
from finetune.backend import Backend, Proof, read_launch, settle
from finetune.data.order import rows_at
from finetune.length import Length, describe, measure
from finetune.metrics import Reporter, Stopwatch, flops_per_target, peak_flops, peak_memory_gib
from finetune.recipe import Recipe
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
    targets: torch.Tensor
    """Targets trained on so far, over all ranks; on the device, float64."""
    watch: Stopwatch
    results: dict[str, Any] = field(default_factory=dict)


def build(recipe: Recipe, *, quiet: bool = False) -> Run:
    """Makes a run of a recipe: data, model, optimiser, prepared for what the launch asks, and proved.

    Raises:
        FinetuneError: With what is wrong; nothing has been overwritten then.
    """
    asked = read_launch()
    settled = settle(recipe, asked)
    task = tasks.find(recipe)
    directory = RunDirectory.check(recipe)
    # Before any process group exists, so that no rank times out in a collective while another tokenises.
    ready = task.build_data(recipe, quiet)
    length = measure(recipe, ready.train)
    backend = Backend.start(recipe, asked, settled, quiet=quiet)
    with backend.loading(pretrained=recipe.model.name is not None and task is tasks.CAUSAL_LM):
        network = models.materialise(task.build_model(recipe, ready), recipe.seed)
        flops = flops_per_target(network, recipe.data.sequence_length)
    caller = models.Caller(network.train())
    caller.autocast = backend.autocast
    model, optimizer = backend.prepare(caller, optim.build(caller, recipe))
    proof = backend.prove(model, optimizer, lambda: rehearsal.rehearse(backend, model, task, ready))
    if task.text and recipe.data.packing == "documents":
        rehearsal.check_isolation(backend, model, recipe)
    directory.create(backend, recipe, asked, proof, ready, length)
    reporter = Reporter(backend, directory.path, length.num_steps, quiet=quiet)
    plan = describe(recipe, length, world=backend.world, accumulation=backend.accumulation)
    for line in (*ready.report_lines, *plan, proof.line()):
        reporter.say(line)
    if recipe.log.trackers:
        backend.accelerator.init_trackers("finetune", config={"recipe": json.dumps(recipe.model_dump(mode="json"))})
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
        targets=torch.zeros(1, dtype=torch.float64, device=backend.device),
        watch=Stopwatch(backend.device),
    )


def train(run: Run) -> dict[str, Any]:
    """Takes every step of the run, evaluates and writes the model as the recipe says, and returns the results."""
    recipe, last = run.recipe, run.length.num_steps
    with run.reporter:
        began = time.perf_counter()
        for step in range(last):
            lr = optim.lr_at(step, last, recipe)
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            loss_sum, targets, norm = train_step(run, step)
            done = step + 1
            logged = _log(run, done, lr, loss_sum, targets, norm) if _due(recipe.log.every_steps, done, last) else None
            run.reporter.step(done, logged)
            if recipe.eval.every_steps and done % recipe.eval.every_steps == 0 and done < last:
                _evaluate(run, done)
            if recipe.sample and recipe.sample.every_steps and done % recipe.sample.every_steps == 0 and done < last:
                _sample(run, done)
        run.results["train_s"] = time.perf_counter() - began
        if recipe.eval.at_end:
            _evaluate(run, last)
        if recipe.sample and recipe.sample.at_end:
            _sample(run, last)
        if recipe.output.save_model and last:
            _save(run)
    run.directory.finish(run.backend, run.results)
    return run.results


def train_step(run: Run, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One optimiser step over one global batch.

    The loss is the sum over all targets of the global batch divided by their number, over all ranks and
    micro-batches: however the batch is split, the gradient is the same.

    Returns:
        This rank's loss sum, the global number of targets, and the global gradient norm before clipping; all
        still on the device, since reading them would make the host wait.
    """
    backend, accelerator = run.backend, run.backend.accelerator
    window = _window(run, step)
    run.watch.mark("data")
    assert run.data.train is not None
    count = sum(run.data.train.num_targets(rows) for rows in window)
    targets = backend.sum(torch.tensor([count], dtype=torch.float64, device=backend.device))
    # Backends average over ranks and `backward` divides by the accumulation; both are undone here.
    scale = (backend.world * backend.accumulation / targets.clamp(min=1)).float().squeeze()
    loss_sum = torch.zeros((), device=backend.device)
    for index, rows in enumerate(window):
        run.watch.mark("data")
        batch = evaluate.to_device(run.data.train.batch(rows), backend.device)
        run.watch.mark("compute")
        # Dropout depends on where in the global batch rows stand, not on who computes them or what came before.
        seed_everything(run.recipe.seed, step, index * backend.world + backend.rank)
        accelerator.sync_gradients = index == len(window) - 1
        with nullcontext() if accelerator.sync_gradients else accelerator.no_sync(run.model):
            part = run.model(run.task.loss_sum, batch)
            accelerator.backward(part * scale)
        loss_sum += part.detach()
    run.watch.mark("optimizer")
    norm = backend.clip(run.model, run.recipe.optim.clip_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.watch.mark("other")
    run.targets += targets
    return loss_sum, targets, norm


def seed_everything(*parts: int) -> None:
    """Seeds torch from whole numbers, so that randomness has no history.

    Source: numpy's SeedSequence, whose mixing is fixed for all versions.
    """
    torch.manual_seed(int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]))


def _window(run: Run, step: int) -> list[np.ndarray]:
    """This rank's micro-batches of a step, as row numbers; a pure function of seed and step."""
    assert run.data.train is not None
    batch, backend = run.recipe.batch, run.backend
    positions = np.arange(step * batch.global_size, (step + 1) * batch.global_size)
    rows = rows_at(positions, num_rows=len(run.data.train), seed=run.recipe.seed, epoch_rows=run.length.epoch_rows)
    # (micro-batch, rank, row): with equal micro-batches, the same rows make a forward pass on any number of ranks.
    grid = rows.reshape(backend.accumulation, backend.world, batch.micro_size)
    return list(grid[:, backend.rank])


def _due(every: int, done: int, last: int) -> bool:
    return done % every == 0 or done in (1, last)


def _log(
    run: Run, done: int, lr: float, loss_sum: torch.Tensor, targets: torch.Tensor, norm: torch.Tensor
) -> dict[str, Any]:
    """Reads the step's figures from the device, on every rank alike, and writes them on rank 0."""
    run.watch.mark("other")
    split = run.watch.totals()
    split.pop("aside", None)  # evaluation and samples are no part of a step
    total = run.backend.sum(loss_sum.double().reshape(1))
    seen = run.targets.item()
    before = run.results.get("_logged", {"step": 0, "targets": 0.0})
    steps = done - before["step"]
    seconds = sum(split.values())
    rate = (seen - before["targets"]) / max(seconds, 1e-9)
    run.results["_logged"] = {"step": done, "targets": seen}
    peak = peak_flops(run.backend.device, run.backend.precision)
    values = {
        "step": done,
        "epoch": done * run.recipe.batch.global_size / max(1, run.length.epoch_rows),
        "loss": total.item() / max(1.0, targets.item()),
        "lr": lr,
        "grad_norm": norm.item(),
        "tokens": int(seen),
        "tokens_per_s": rate,
        "step_s": seconds / steps,
        "data_s": split.get("data", 0.0) / steps,
        "forward_backward_s": split.get("compute", 0.0) / steps,
        # Where the backend steps inside the backward pass, this is in forward_backward_s.
        "optimizer_s": None if run.backend.steps_in_backward() else split.get("optimizer", 0.0) / steps,
        "peak_memory_gib": peak_memory_gib(run.backend.device),
        "mfu": None if peak is None else rate * run.flops_per_target / (peak * run.backend.world),
    }
    run.reporter.log(values)
    run.results["train_loss"] = values["loss"]
    return values


def _evaluate(run: Run, done: int) -> None:
    if run.data.validation is None:
        return
    run.watch.mark("aside")
    micro = run.recipe.eval.micro_size or run.recipe.batch.micro_size
    figures = evaluate.evaluate(run.backend, run.model, run.task, run.data.validation, micro)
    values = {f"validation_{key}": value for key, value in figures.items()}
    run.reporter.log({"step": done, **values})
    run.results |= values
    shown = ", ".join(f"{key} {value:,.4f}" for key, value in figures.items() if key != "targets")
    run.reporter.say(f"step {done}: validation {shown} over {figures['targets']:,.0f} targets")


def _sample(run: Run, done: int) -> None:
    assert run.recipe.sample is not None
    run.watch.mark("aside")
    text = generate.sample(
        run.backend,
        run.model,
        run.data.tokenizer,
        run.recipe.sample,
        seed=run.recipe.seed,
        longest=run.recipe.data.sequence_length,
    )
    run.reporter.log({"step": done, "sample": text})
    run.reporter.say(f"step {done}: sample\n{text}\n")
    run.results["sample"] = text


def _save(run: Run) -> None:
    path = run.directory.path / "model"
    skeleton = run.task.build_skeleton
    with run.backend.loading(pretrained=False):
        export.save_model(
            run.backend,
            run.model,
            skeleton(run.recipe, run.data) if skeleton is not None else None,
            run.data.tokenizer,
            path,
        )
    run.results["model"] = str(path)
    run.reporter.say(f"model written to {path}")
