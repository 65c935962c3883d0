"""Evaluates all rows, of a run under any backend or of files: each once, whatever the batch size and number of ranks.

Letters as in `task`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from finetune.data.rows.feed import Rows, counts_of, evaluation_batches
from finetune.distributed.mesh import ONE_RANK
from finetune.distributed.strategies import sequence
from finetune.models.embedding_noise import KEYS as NOISE
from finetune.models.forward_wrapper import unwrap, without_training
from finetune.tasks.task import Batch, Figures, Reference, Task, mean_figures
from finetune.utils.compat.peft_private import adapters_off
from finetune.utils.to_device import batch_to_device, tensor_to_device

if TYPE_CHECKING:
    from finetune.distributed.backend import Backend

# Forward passes between two questions whether to give up; each makes the host wait for the device.
_ASK_EVERY = 16

Share = tuple[npt.NDArray[np.int64], dict[str, torch.Tensor]]
"""Numbers of rows, and their batch. Without any, the batch holds a row that counts for nothing."""


class OneProcess:
    """A process that computes by itself, with a `ForwardWrapper` that nothing is wrapped around."""

    mesh = ONE_RANK

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def share_buffers(self, network: nn.Module) -> None:
        """There is no other rank."""

    def evaluate_batches(self, model: nn.Module, function: Callable[..., Any], batches: Iterable[Any]) -> Iterator[Any]:
        """Yields `function(network, batch)` of each batch."""
        return (model(function, batch) for batch in batches)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values, which are those of all ranks."""
        return values


def evaluate_rows(
    backend: "Backend | OneProcess",
    model: nn.Module,
    task: Task,
    rows: Rows,
    micro_size: int,
    names: Sequence[str],
    *,
    window_size: int = 0,
    stopping: Callable[[], bool] = lambda: False,
    advance: Callable[[int], None] = lambda count: None,
    join: Callable[[Batch], Batch] = lambda batch: batch,
) -> tuple[Figures, torch.Tensor | None] | None:
    """Evaluates all rows; every rank must call it.

    Each runs the same number of forward passes, since sharded backends gather weights in them. A rank whose share is
    used up continues with a row that counts for nothing.

    Args:
        model: A `ForwardWrapper` inside what the backend has put around it.
        micro_size: Rows in one forward pass of one process; it does not change the result.
        names: Names of the classes.
        window_size: Rows that a task with a `window` sees at a time, in order; the last may be fewer.
        stopping: Returns True if this rank was asked to stop; every rank then gives up. Called now and then.
        advance: Is told of rows that are computed.
        join: Adds to a batch on the device what another network gives it.

    Returns:
        Mean loss per target and number of targets, what follows from them, and figures of each class; and the values of
        all rows, (R, J) in fp64, if the task evaluates any. None if a rank was asked to stop.
    """
    evaluation, mesh, device = task.evaluated, backend.mesh, backend.device
    terms, held = (*task.terms, *evaluation.terms), counts_of(rows, np.arange(len(rows)))
    # In float64: hundreds of millions of targets are beyond fp32's whole numbers.
    sums, values = torch.zeros(len(terms), dtype=torch.float64, device=device), None
    backend.share_buffers(unwrap(model))
    with without_training(model):
        size = window_size if task.window else len(rows)
        outputs = _outputs(backend, model, task, rows, micro_size, size, join)
        for number, (share, found, of_rows) in enumerate(outputs):
            if number % _ASK_EVERY == _ASK_EVERY - 1:
                asked = torch.tensor([float(stopping())], device=device)
                if backend.all_reduce_sum(asked).item() > 0:
                    return None
            sums = torch.cat((sums, sums.new_zeros(max(0, len(found) - len(sums)))))
            if of_rows is not None and values is None:
                values = sums.new_zeros(len(rows), of_rows.shape[1])
            if share.size and mesh.counts_loss:
                sums += found.double()
                if values is not None and of_rows is not None:
                    values[share] = of_rows.double()
            advance(share.size)
    values = None if values is None else backend.all_reduce_sum(values)
    totals = backend.all_reduce_sum(sums).tolist()
    means = mean_figures(terms, totals[: len(terms)], [held[term.counts] for term in terms])
    whole = {"loss": means["loss"], "targets": float(rows.num_targets(np.arange(len(rows))))}
    if "perplexity" in (task.rows.figures or ()):
        whole["perplexity"] = math.exp(min(totals[0] / (held[terms[0].counts] or 1.0), 700.0))
    figures = evaluation.figures_of(totals[len(terms) :], values, names)
    return replace(figures, whole=whole | means | figures.whole), values


def _outputs(
    backend: "Backend | OneProcess",
    model: nn.Module,
    task: Task,
    rows: Rows,
    micro_size: int,
    size: int,
    join: Callable[[Batch], Batch],
) -> Iterator[tuple[npt.NDArray[np.int64], torch.Tensor, torch.Tensor | None]]:
    """Yields numbers of rows, their sums, and their values, of this rank's batches."""

    def sent(batches: Iterable[dict[str, torch.Tensor]]) -> Iterator[Batch]:
        return (join(batch_to_device(batch, backend.device)) for batch in batches)

    sizes = {"data_size": backend.mesh.data_size, "data_rank": backend.mesh.data_rank}
    for first in range(0, len(rows), max(1, size)):
        among = range(first, min(first + size, len(rows)))
        batches: Iterable[Share] = evaluation_batches(rows, among, micro_size, **sizes)
        if task.window is not None:
            at = ((share - first, batch) for share, batch in batches)
            windowed = with_window(backend, model, task, at, len(among), sent)
            batches = [(share + first, batch) for share, batch in windowed]
        computing: deque[npt.NDArray[np.int64]] = deque()

        def noted(batches: Iterable[Share] = batches, computing: Any = computing) -> Iterator[dict[str, torch.Tensor]]:
            for share, batch in batches:
                computing.append(share)
                yield batch

        for sums, values in backend.evaluate_batches(model, task.evaluated.compute, sent(noted())):
            yield computing.popleft(), sums, values


def join_scores(model: nn.Module, reference: Reference, batch: Batch, *, adapters: bool = True) -> Batch:
    """Returns a batch on the device with the scores that a model gives it, with its adapters or without.

    Args:
        model: A `ForwardWrapper` inside what a backend has put around it; every rank must call it.
    """

    def scored(network: nn.Module, batch: Batch) -> torch.Tensor:
        with nullcontext() if adapters else adapters_off(network):
            return sequence.sum_of_parts(reference.compute(network, batch), network)

    with without_training(model):
        # The policy alone learns with noise.
        plain = {name: values for name, values in batch.items() if name != NOISE}
        return {**batch, "reference": model(scored, plain)}


def join_teacher(teacher: Any, batch: Batch) -> Batch:
    """Returns a batch with a network that `loss_sum` calls while its own computes."""
    return {**batch, "teacher": teacher}


def with_window(
    backend: "Backend | OneProcess",
    model: nn.Module,
    task: Task,
    batches: Iterable[Share],
    size: int,
    send: Callable[[Iterator[dict[str, torch.Tensor]]], Iterator[Batch]] | None = None,
) -> list[Share]:
    """Returns batches with what the task's `window` gives for all rows of a window; every rank must call it.

    Each batch is read once, and kept on the host. What ranks have of the window is joined by one all-reduce.

    Args:
        batches: Numbers of rows in the window in place of row numbers.
        size: Rows in the window, G.
        send: Takes batches to the device, in order.
    """
    window, device, joined = task.window, backend.device, None
    if window is None:
        return [*batches]
    kept = [
        (places, {"window_rows": torch.from_numpy(places if places.size else np.arange(1)), **batch})
        for places, batch in batches
    ]
    given = (batch for _, batch in kept)
    sent = (batch_to_device(batch, device) for batch in given) if send is None else send(given)
    with torch.no_grad():
        for (places, _), values in zip(kept, backend.evaluate_batches(model, window, sent), strict=True):
            joined = values.new_zeros(size, values.shape[1]) if joined is None else joined
            if places.size and backend.mesh.counts_loss:
                joined[tensor_to_device(torch.from_numpy(places), device)] = values
    assert joined is not None
    whole = backend.all_reduce_sum(joined)
    return [(places, {**batch, "window": whole}) for places, batch in kept]
