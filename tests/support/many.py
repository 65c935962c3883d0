"""Runs several recipes in one process, one after the other; what `harness.Launcher.many` launches.

A run whose file is named `FAULT+…` has a fault on purpose, so that tests can see the suite fail: one of
`finetune.diagnostics.fault_injection`, or one of `_faults`.
"""

import gc
import hashlib
import json
import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import MARK

from finetune.config.recipe import load_recipe
from finetune.diagnostics.fault_injection import FAULTS, plant_fault
from finetune.distributed.backend import Backend
from finetune.distributed.state.tensor_shards import local
from finetune.models import lora_adapters
from finetune.models.forward_wrapper import unwrap
from finetune.monitoring.step_all_reduce import StepSync
from finetune.training import loop
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun
from finetune.utils import exit_codes
from finetune.utils.errors import FinetuneError
from finetune.utils.library_imports import silence_libraries


def _faults(name: str) -> dict[str, tuple[Any, str, Any]]:
    """What of the loop each fault replaces: the object, its attribute, and what stands there instead."""
    window, total, step, prepare = Backend.forward_backward, Backend.all_reduce_sum, Backend.step, Backend.prepare
    attach = lora_adapters.attach

    def divided(self: Backend, model: Any, loss_sum: Any, batches: Any, scaled: Any) -> Any:
        factor = self.world_size if name == "rank_factor" else self.accumulation
        return window(self, model, loss_sum, batches, lambda loss: scaled(loss) / factor)

    def own_mean(self: Backend, values: Any) -> Any:
        counts = values.flatten()[-1] * self.world_size  # The sum is in place.
        summed = total(self, values)
        if summed.numel() == len(fields(StepSync)) + 1:
            summed[-1] = counts
        return summed

    def drifts(self: Backend, optimizer: Any, norm: torch.Tensor) -> None:
        step(self, optimizer, norm)
        norms = [p for name, p in self.model.named_parameters() if name.endswith("model.norm.weight")]
        norms[0].data += 1e-6 * self.rank

    def thaws(self: Backend, optimizer: Any, norm: torch.Tensor) -> None:
        step(self, optimizer, norm)
        frozen = next(p for n, p in self.model.named_parameters() if "q_proj.base_layer" in n)
        if self.rank == self.world_size - 1:
            local(getattr(frozen, "ds_tensor", frozen).data).view(torch.uint8)[..., -1] ^= 1

    def without_gradient(self: Backend, model: Any, optimizer: Any, splits: Any) -> Any:
        norm = next(m for n, m in model.named_modules() if n.endswith("layers.0.input_layernorm"))
        forward = norm.forward
        norm.forward = lambda states: states + 0 * forward(states)
        return prepare(self, model, optimizer, splits)

    def own_seed(network: Any, recipe: Any, head: Any = None) -> Any:
        seed = recipe.seed + int(os.environ.get("RANK", "0"))
        return attach(network, recipe.model_copy(update={"seed": seed}), head)

    return {
        # The gradient lacks a factor.
        "rank_factor": (Backend, "forward_backward", divided),
        "accumulation_factor": (Backend, "forward_backward", divided),
        # Every rank divides by its own targets, as if all had equally many.
        "mean_of_means": (Backend, "all_reduce_sum", own_mean),
        # A rank's copy of what it shares with others becomes another one.
        "drift": (Backend, "step", drifts),
        # A weight that is not trained changes on one rank.
        "thawed": (Backend, "step", thaws),
        "lost_steps": (Backend, "step", lambda self, optimizer, norm: None),
        # No gradient reaches a tensor.
        "stuck": (Backend, "prepare", without_gradient),
        # Every rank draws adapters of its own.
        "adapter_seed": (lora_adapters, "attach", own_seed),
    }


def broken(name: str) -> Any:
    """A context in which the loop has the fault that a run is named after, up to a `+`, if any."""
    fault, named, _ = name.partition("+")
    if named and fault in FAULTS:
        return plant_fault(fault)
    replaced = _faults(fault)
    return mock.patch.object(*replaced[fault]) if named and fault in replaced else nullcontext()


def digests(run: BuiltRun, trained: bool) -> dict[str, str]:
    """Of the weights that are trained, or of those that are not, whole; {} but on rank 0."""
    network = unwrap(run.model)
    wanted = {name for name, parameter in network.named_parameters() if parameter.requires_grad is trained}
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in run.backend.full_parameters(network)
        if tensor is not None and name in wanted
    }


def train_watched(run: BuiltRun) -> None:
    """Trains, and notes what the adapters began with and whether the frozen weights stayed."""
    if run.recipe.lora is None:
        loop.train(run)
        return
    noted = {"adapters": digests(run, True), "frozen": digests(run, False)}
    loop.train(run)
    noted["frozen_afterwards"] = digests(run, False)
    if run.backend.is_main:
        (run.directory.path / "digests.json").write_text(json.dumps(noted))


def gloo_workers() -> dict[str, int]:
    """Worker threads of gloo groups in this process, by the name that torch gives them, and process groups."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the listing and the reading.
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return {"threads": names.count("pt_gloo_runloop"), "groups": len(torch.distributed.distributed_c10d._world.pg_map)}


def main(paths: list[str]) -> None:
    silence_libraries()
    run = None
    for path in paths:
        for stream in (sys.stdout, sys.stderr):
            print(f"{MARK}{Path(path).parent.name}", file=stream, flush=True)
        try:
            with broken(Path(path).stem):
                run = build_run(load_recipe(path))
                train_watched(run)
        except FinetuneError as error:
            exit_codes.print_error(error)
            exit_codes.exit_with(exit_codes.USER_ERROR)
        run.backend.barrier()
        if run.backend.is_main:
            (Path(path).parent / "gloo.json").write_text(json.dumps(gloo_workers()))
            (Path(path).parent / "ended").touch()
        # Accelerate keeps its state for the life of a process; the process group can stay.
        if path != paths[-1]:
            del run
            gc.collect()
            Backend.forget()
    run.backend.close()
    exit_codes.exit_with(0)


if __name__ == "__main__":
    main(sys.argv[1:])
