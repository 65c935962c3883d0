"""What a reference gives each row, under any backend: once before training, or in each step.

It is computed once by the model as training begins, or by another one, and kept in the data cache under digests of all
that decides it, some rows a file, whose name holds the digest of its content: what was computed before a run was
stopped is not computed again, and what is damaged is. It is computed in each step by the model without its adapters.
"""

import io
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from finetune.config.preference_losses import CACHED
from finetune.config.recipe_schema import Recipe
from finetune.data.progress_bar import rows_bar
from finetune.data.rows.feed import evaluation_batches
from finetune.data.rows.kinds.row_kind import TokenRows
from finetune.distributed.backend import Backend
from finetune.models.forward_wrapper import unwrap, without_training
from finetune.tasks.evaluate_rows import join_scores
from finetune.tasks.task import Batch, Reference, TaskData
from finetune.utils.atomic_files import digest_of, write_bytes
from finetune.utils.errors import DataError, RecipeError
from finetune.utils.to_device import batch_to_device

_VERSION = 1
_ROWS = 4096
"""Rows of a file: what a run that is stopped computes again at most."""

Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scorer:
    """What gives rows their scores: a network that the backend holds, and how it is called."""

    backend: Backend
    open: Callable[[], nn.Module]
    """Returns the network; is called on every rank, and only if there is something to compute."""
    reference: Reference
    recipe: Recipe
    """The recipe that the network is read by."""
    base: dict[str, Any] | None
    """The network's pretrained model by its digest; see `base_of`."""
    progress: Callable[[], None]
    """Is called after each forward pass."""


def join_without_adapters(model: nn.Module, reference: Reference) -> Callable[[Batch], Batch]:
    """Returns what adds to each batch its scores by a model without its adapters.

    Raises:
        RecipeError: If something else than adapters is trained.
    """
    if whole := [name for name, p in unwrap(model).named_parameters() if p.requires_grad and ".lora_" not in name]:
        raise RecipeError(
            f"preference.reference is adapters_off, and {len(whole)} parameters beside adapters are trained, such as "
            f"{whole[0]}, without which there is no base. {CACHED}."
        )
    return partial(join_scores, model, reference, adapters=False)


def add_reference(scorer: Scorer, data: TaskData) -> TaskData:
    """Returns data whose rows have the scores of the task's reference; every rank must call it.

    Raises:
        DataError: If scores are not finite, or cannot be written.
    """
    recipe = scorer.recipe
    sections = {name: getattr(recipe, name) for name in ("model", "lora", "data", "chat")}
    unlike = {"data": {"train", "validation", "cache_dir", "num_workers"}, "model": {"name", "revision"}}
    key = {
        "version": _VERSION,
        "base": None if scorer.base is None else scorer.base["digest"],
        "seed": recipe.seed,
        "precision": scorer.backend.precision,
        "task": [recipe.task.model_dump(mode="json"), scorer.reference.key],
        "data": [data.digest, dict(data.contents)],
        **{
            name: None if section is None else section.model_dump(mode="json", exclude=unlike.get(name))
            for name, section in sections.items()
        },
    }
    sides: dict[str, Any] = {}
    for name in ("train", "validation"):
        rows = getattr(data, name)
        if rows is None:
            continue
        if not isinstance(rows, TokenRows):
            raise RecipeError("task.name: a task with a `reference` has rows of `data`. Leave its `build_data` out.")
        folder = Path(recipe.data.cache_dir) / f"reference-{digest_of({**key, 'side': name})}"
        scores = _scores(scorer, rows, folder)
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores).all(1))[0])
            raise DataError(
                f"data.{name}: the reference gives row {row} a score that is not finite. Look at the model's weights, "
                "or set precision to fp32."
            )
        sides[name] = replace(rows, scores=scores)
    return replace(data, **sides)


def _scores(scorer: Scorer, rows: TokenRows, folder: Path) -> Scores:
    """Returns the scores of all rows, (rows, J), on every rank."""
    backend, parts = scorer.backend, list[Scores]()
    with rows_bar("reference", len(rows)) as advance:
        for first in range(0, len(rows), _ROWS):
            among = range(first, min(first + _ROWS, len(rows)))
            kept = _read(folder, among) if backend.is_main else None
            # Rank 0 alone reads, since machines need not share a cache.
            width = backend.broadcast_object(None if kept is None else kept.shape[1])
            if width is not None:
                sent = torch.zeros(len(among), width) if kept is None else torch.from_numpy(kept)
                part = backend.broadcast(sent.to(backend.device)).cpu().numpy()
            else:
                part = _computed(scorer, rows, among)
                if backend.is_main:
                    _write(folder, among, part)
            parts.append(part)
            advance(len(among))
    return np.concatenate(parts)


def _computed(scorer: Scorer, rows: TokenRows, among: range) -> Scores:
    backend, model = scorer.backend, scorer.open()
    sizes = {"data_size": backend.mesh.data_size, "data_rank": backend.mesh.data_rank}
    computing: deque[npt.NDArray[np.int64]] = deque()

    def sent() -> Iterator[Batch]:
        for numbers, batch in evaluation_batches(rows, among, scorer.recipe.batch.rows, **sizes):
            computing.append(numbers)
            yield batch_to_device(batch, backend.device)

    scores: torch.Tensor | None = None
    with without_training(model):
        for values in backend.evaluate_batches(model, scorer.reference.compute, sent()):
            numbers = computing.popleft()
            scores = values.new_zeros(len(among), values.shape[1]) if scores is None else scores
            if numbers.size and backend.mesh.counts_loss:
                scores[torch.from_numpy(numbers - among.start).to(scores.device)] = values
            scorer.progress()
    assert scores is not None
    computed: Scores = backend.all_reduce_sum(scores).cpu().numpy()
    return computed


def _name(among: range, content: bytes) -> str:
    return f"{among.start}-{among.stop}-{xxhash.xxh3_128_hexdigest(content)}.npy"


def _read(folder: Path, among: range) -> Scores | None:
    """Returns the scores of some rows; None if there is no whole file of them."""
    for file in folder.glob(f"{among.start}-{among.stop}-*.npy"):
        content = file.read_bytes()
        if file.name == _name(among, content):
            scores: Scores = np.load(io.BytesIO(content), allow_pickle=False)
            return scores
    return None


def _write(folder: Path, among: range, scores: Scores) -> None:
    written = io.BytesIO()
    np.save(written, scores, allow_pickle=False)
    advice = "Set data.cache_dir to a directory that can be written and has room."
    with DataError.explaining(f"The scores of the reference cannot be kept in {folder}", advice, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / _name(among, written.getvalue()), written.getvalue())
