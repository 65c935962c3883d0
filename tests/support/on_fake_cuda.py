"""Runs recipes on the device of `fake_cuda.py`, and notes what each training step waited for.

on_fake_cuda.py RECIPE …            as `many.py` does
on_fake_cuda.py --faults FOLDER     a step for each of the faults below, and what it ended in
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import fake_cuda

if __name__ == "__main__":
    fake_cuda.install(Path(os.environ["FAKE_CUDA"]))

import many
import torch
from accelerate.state import AcceleratorState, GradientState
from inside import mlp

from finetune.config.recipe import validate_recipe
from finetune.distributed.backend import Backend
from finetune.monitoring import step_all_reduce
from finetune.training import loop
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun
from finetune.utils import exit_codes
from finetune.utils.library_imports import silence_libraries


def note_what_steps_wait_for() -> None:
    taken = loop.train_step
    waited: dict[str, list[list[str]]] = {}

    def watched(run: BuiltRun, step: int):
        with fake_cuda.watched() as seen:
            found = taken(run, step)
        here = waited.setdefault(run.recipe.output.dir, [])
        here.append([*seen.reads, *seen.copies])
        if run.backend.is_main:
            Path(run.recipe.output.dir, "waited.json").write_text(json.dumps(here))
            Path(run.recipe.output.dir, "calls.json").write_text(json.dumps(seen.calls))
        return found

    loop.train_step = watched


def _left_on_the_host(batch, device):
    return batch


def _pageable(value, device):
    return value.to(device, non_blocking=True)


def _blocking(value, device):
    return value.pin_memory().to(device)


def _after(method: Callable, look: Callable) -> Callable:
    def looked(*arguments):
        found = method(*arguments)
        look(found)
        return found

    return looked


def _event(*arguments, **options):
    return torch.cuda.Evnt(*arguments, **options)


def _timed(*arguments, **options):
    return torch.cuda.get_device_name(index=0)


# What is put in the place of what. Each is a line that somebody might write; none shows on a CPU.
FAULTS = {
    "none": [],
    "the batch stays on the host": [(loop, "batch_to_device", _left_on_the_host)],
    "a copy from pageable memory": [(loop, "tensor_to_device", _pageable)],
    "a copy that blocks": [(loop, "tensor_to_device", _blocking)],
    "item": [(Backend, "clip", _after(Backend.clip, lambda norm: norm.item()))],
    "bool": [(Backend, "clip", _after(Backend.clip, lambda norm: bool(norm > 1)))],
    "tolist": [(Backend, "clip", _after(Backend.clip, lambda norm: norm.tolist()))],
    "nonzero": [(Backend, "clip", _after(Backend.clip, lambda norm: norm.reshape(1).nonzero()))],
    "a mask as an index": [(Backend, "clip", _after(Backend.clip, lambda norm: norm.reshape(1)[norm.reshape(1) > 1]))],
    "an index on the host": [(Backend, "clip", _after(Backend.clip, lambda norm: norm.reshape(1)[torch.tensor([0])]))],
    "a tensor made of values": [
        (Backend, "clip", _after(Backend.clip, lambda norm: torch.tensor([1.0], device=norm.device)))
    ],
    "no such attribute": [(Backend, "clip", _after(Backend.clip, lambda norm: _event()))],
    "no such argument": [(Backend, "clip", _after(Backend.clip, lambda norm: _timed()))],
    "read before it has arrived": [(step_all_reduce.AsyncScalar, "read", lambda self: self._values.tolist())],
}


def faults(folder: str) -> None:
    """Writes what a step of each came to: the loss and norm that the host reads, what it waited for, or the error."""
    silence_libraries()
    found = {}
    for number, (name, changes) in enumerate(FAULTS.items()):
        run = build_run(
            validate_recipe(mlp(Path(folder) / str(number), batch={"global_size": 8, "micro_size": 4})), quiet=True
        )
        for module, attribute, other in changes:
            mock.patch.object(module, attribute, other).start()
        try:
            with fake_cuda.watched() as seen:
                taken = loop.train_step(run, 0)
            said = {
                "waits": [*seen.reads, *seen.copies],
                "targets": taken.sync.read()[0],
                "norm": taken.norm.read()[0],
            }
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        said["tf32"] = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
        mock.patch.stopall()
        found[name] = said
        del run
        gc.collect()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    Path(folder, "faults.json").write_text(json.dumps(found))


def main(words: list[str]) -> None:
    if words[0] == "--faults":
        exit_codes.exit_with(exit_codes.run_guarded(lambda: faults(words[1])))
    note_what_steps_wait_for()
    exit_codes.exit_with(exit_codes.run_guarded(lambda: many.main(words)))


if __name__ == "__main__":
    main(sys.argv[1:])
