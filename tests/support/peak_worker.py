"""Takes steps of a recipe and writes the most memory that tensors took in the third, on rank 0.

Launched with a recipe and the file to write into.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from finetune.config.recipe import validate_recipe
from finetune.distributed.backend import Backend
from finetune.distributed.launch.launch_config import read_launch
from finetune.distributed.resolve_config import resolve_config
from finetune.models import split_layers
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.model_config import resolve_model_config
from finetune.models.networks import build_model
from finetune.optim.optimizers import build_optimizer
from finetune.tasks.task_lookup import find_task


def peak_of(step: Callable[[], None], held: int) -> tuple[int, int]:
    """The most bytes at a time, and those at the end, by each allocation and release that torch's profiler sees.

    Args:
        held: Bytes that are there before.
    """
    gc.collect()  # What a collection during the step releases of an earlier one's would count as the step's.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    inner: Any = profiled.profiler
    events = [e for e in inner.kineto_results.events() if e.name() == "[memory]"]
    most = held
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, held


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main(source: Path, result: Path) -> None:
    recipe, asked = validate_recipe(json.loads(source.read_text())), read_launch()
    backend, task = Backend.start(recipe, asked, resolve_config(recipe, asked), quiet=True), find_task(recipe)
    config = resolve_model_config(recipe, vocab_size=recipe.tokenizer.vocab_size)
    caller = ForwardWrapper(build_model(recipe, config, "causal_lm"))
    caller.autocast = backend.autocast
    if asked.tensor > 1:
        backend.splits = split_layers.split(caller.network)
    model, optimizer = backend.prepare(caller, build_optimizer(caller, recipe))
    ids = torch.zeros(recipe.batch.micro_size, recipe.data.sequence_length, dtype=torch.long)

    def step() -> None:
        for last in (False, True) if backend.accumulation > 1 else (True,):
            with backend.micro_batch(model, last=last):
                backend.accelerator.backward(model(task.loss_sum, {"input_ids": ids, "targets": ids}))
        backend.step(optimizer, backend.clip(model, 1.0))
        backend.clear(optimizer)

    with torch.no_grad():
        model(task.loss_sum, {"input_ids": ids, "targets": ids})  # as a run proves its backend before the first step
    step()
    step()  # in which copies of a model arrange their buckets anew
    tensors = [*model.parameters(), *model.buffers(), ids, ids]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    # Buckets hold gradients whether there are any or not.
    tensors += [p for p in model.parameters() if p.requires_grad and asked.kind == "ddp"]
    held = sum(local(tensor).nbytes for tensor in tensors)
    # The profiler doesn't see it where one of gloo's threads, not this one, is the last to let go of what was sent.
    peaks, seen = [], False
    while len(peaks) < 4 or not seen:
        most, left = peak_of(step, held)
        peaks.append(most)
        seen = backend.tell(seen or left <= 1.001 * held)
    if backend.is_main:
        result.write_text(json.dumps(min(peaks)))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
