"""Exact evaluation: every row once, weighted by targets, whatever the batch size and the number of ranks."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from finetune.data.rows.feed import Rows, evaluation_batches
from finetune.distributed.backend import Backend
from finetune.tasks.task import Batch, Task
from finetune.utils.errors import RecipeError
from finetune.utils.to_device import batch_to_device

# Forward passes between two questions whether to give up; each makes the host wait for the device.
_ASK_EVERY = 16


def evaluate(
    backend: Backend,
    model: nn.Module,
    task: Task,
    rows: Rows,
    micro_size: int,
    *,
    stopped: Callable[[], bool] = lambda: False,
    classes: torch.Tensor | None = None,
) -> dict[str, float] | None:
    """Mean loss per target over all rows, with what follows from it.

    Every rank must call it; each runs the same number of forward passes, since sharded backends gather weights
    in them. A rank whose share is used up continues with a row that counts for nothing.

    Args:
        model: The prepared model, a `ForwardWrapper` inside.
        micro_size: Rows in one forward pass of one process; it does not change the result.
        stopped: Asked now and then, on all ranks together, whether to give up.
        classes: Zeros, (2, rows) int64: become the predicted and the true class of each row, on all ranks.

    Returns:
        None if it was stopped; else `loss` and `targets`; `perplexity` if the network writes text; `accuracy` if the
        task counts hits.
    """
    # Loss, hits. In float64: hundreds of millions of targets are beyond fp32's whole numbers.
    sums = torch.zeros(2, dtype=torch.float64, device=backend.device)
    targets = 0
    batches = evaluation_batches(rows, micro_size, data_size=backend.mesh.data_size, data_rank=backend.mesh.data_rank)
    computing: deque[tuple[Any, Batch]] = deque()

    def sent() -> Iterator[Batch]:
        for share, batch in batches:
            computing.append((share, batch_to_device(batch, backend.device)))
            yield computing[-1][1]

    with without_training(model):
        results = backend.evaluate_batches(model, task.loss_and_correct or task.loss_sum, sent())
        for number, found in enumerate(results):
            share, batch = computing.popleft()
            if number % _ASK_EVERY == _ASK_EVERY - 1 and stopped():
                return None
            if share.size and backend.mesh.counts_loss:
                found = found.reshape(-1)
                sums[: len(found[:2])] += found[:2].double()
                if classes is not None:
                    if len(found) != 2 + len(share):
                        raise RecipeError("eval.metrics: the task's `loss_and_correct` gives no class of each row.")
                    classes[:, share] = torch.stack((found[2:].long(), batch["targets"]))
                targets += rows.num_targets(share) if backend.mesh.counts_rows else 0
    if classes is not None:
        backend.all_reduce_sum(classes)
    count = torch.tensor([targets], dtype=torch.float64, device=backend.device)
    loss_sum, hit_sum, total = backend.all_reduce_sum(torch.cat((sums, count))).tolist()
    result = {"loss": loss_sum / max(1.0, total), "targets": total}
    if task.text:
        result["perplexity"] = math.exp(min(result["loss"], 700.0))
    if task.loss_and_correct:
        result["accuracy"] = hit_sum / max(1.0, total)
    return result


@contextmanager
def without_training(model: nn.Module) -> Iterator[None]:
    """Forward passes in here have no dropout and leave no gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
