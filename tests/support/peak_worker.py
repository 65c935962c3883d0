"""Takes steps of a recipe and writes the most memory that tensors took in the third, on rank 0.

Launched with a recipe and the file to write into.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from finetune.config.recipe import validate_recipe
from finetune.distributed.backend import Backend
from finetune.distributed.launch.launch_config import read_launch
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.split_parameters import UNSPLIT
from finetune.distributed.strategies import sequence
from finetune.models import split_layers
from finetune.models.build_network import build_model
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.optim.optimizers import build_optimizer
from finetune.tasks.task_lookup import find_task


def peak_of(step: Callable[[], None], held: int) -> int:
    """The most bytes at a time, by each allocation and release that torch's profiler sees.

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
    return most


def send_copies() -> None:
    """Has collectives of split rows and layers send copies, which torch did not allocate.

    Of what is sent one of gloo's threads may be the last to let go, whose releases the profiler does not see.
    """
    summed, exchanged = distributed.all_reduce, distributed.all_to_all_single

    def unseen(like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.empty(like.nbytes, dtype=np.uint8)).view(like.dtype).view(like.shape)

    def all_reduce(values: torch.Tensor, *words: Any, **options: Any) -> None:
        summed(copy := unseen(values).copy_(values), *words, **options)
        values.copy_(copy)

    def all_to_all_single(received: torch.Tensor, sent: torch.Tensor, *words: Any, **options: Any) -> None:
        exchanged(copy := unseen(received), unseen(sent).copy_(sent), *words, **options)
        received.copy_(copy)

    distributed.all_reduce, distributed.all_to_all_single = all_reduce, all_to_all_single


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main(source: Path, result: Path) -> None:
    recipe, asked = validate_recipe(json.loads(source.read_text())), read_launch()
    backend, task = Backend.start(recipe, asked, resolve_config(recipe, asked), quiet=True), find_task(recipe)
    config = resolve_model_config(recipe, vocab_size=recipe.tokenizer.vocab_size)
    caller = ForwardWrapper(build_model(recipe, config, NEXT_TOKEN))
    caller.autocast = backend.autocast
    if asked.sequence * asked.tensor > 1:
        send_copies()
    group = backend.mesh.group("tp")
    splits = UNSPLIT if group is None else split_layers.split(caller.network, group)
    sequence.install(caller, backend.mesh.group("sp"))
    backend.accumulation = min(2, backend.accumulation)
    model, optimizer = backend.prepare(caller, build_optimizer(caller, recipe), splits)
    ids = torch.zeros(recipe.batch.micro_size, recipe.data.sequence_length, dtype=torch.long)

    def step() -> None:
        batches = [{"input_ids": ids, "targets": ids}] * min(2, backend.accumulation)
        backend.forward_backward(model, task.loss_sum, batches, lambda loss: loss)
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
    # The least of some: now and then gloo's threads have not let go yet of what they have sent.
    most = min(peak_of(step, held) for _ in range(4))
    if backend.is_main:
        result.write_text(json.dumps(most))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
