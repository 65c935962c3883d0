"""What a reference gives each row, under any backend: once before training, or in each step.

It is computed once by the model as training begins, or by another one, and kept in the data cache under digests of all
that decides it, some rows a file, whose name holds the digest of its content: what was computed before a run was
stopped is not computed again, and what is damaged is. It is computed in each step by the model without its adapters.
"""

import io
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from finetune.data.rows.packed_rows import ranges
from finetune.distributed.backend import Backend
from finetune.models.forward_wrapper import unwrap, without_training
from finetune.tasks.evaluate_rows import join_scores
from finetune.tasks.task import Batch, Reference, TaskData
from finetune.utils.atomic_files import digest_of, write_bytes
from finetune.utils.errors import DataError, RecipeError
from finetune.utils.quoting import to_stderr
from finetune.utils.to_device import batch_to_device

_VERSION = 1
_ROWS = 4096
"""Rows of a file: what a run that is stopped computes again at most."""

_NUMBERS = 1 << 23
"""The most numbers of a file with values of targets."""

Scores = npt.NDArray[Any]


class MappedScores:
    """What a teacher gives each target, (targets, K), in files that are mapped."""

    def __init__(self, parts: Sequence[Scores]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])

    def __getitem__(self, targets: npt.NDArray[np.int64]) -> Scores:
        part_of = np.searchsorted(self._ends, targets, side="right")
        read = np.empty((len(targets), *self._parts[0].shape[1:]), self._parts[0].dtype)
        for number in np.unique(part_of):
            here, part = part_of == number, self._parts[number]
            read[here] = part[targets[here] - (self._ends[number] - len(part))]
        return read


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
        sides[name] = replace(rows, scores=scores)
    return replace(data, **sides)


def _scores(scorer: Scorer, rows: TokenRows, folder: Path) -> Any:
    """Returns the scores of all rows, (rows, J), or of all targets, on every rank."""
    backend, stored, width = scorer.backend, scorer.reference.stored, scorer.reference.of_targets
    parts, starts, size, writes = list[Scores](), np.arange(len(rows) + 1), _ROWS, backend.is_main
    if width:
        # Too many to be held: each machine maps files of its own.
        starts, writes = rows.target_starts, os.environ.get("LOCAL_RANK", "0") == "0"
        size = max(1, min(_ROWS, _NUMBERS // (rows.row_length * width)))
        _check_room(folder, stored(np.zeros((1, width), np.float32)).nbytes * int(starts[-1]), int(starts[-1]))
    dtype = stored(np.zeros((1, max(2, width)), np.float32)).dtype
    with rows_bar("reference", len(rows)) as advance:
        for first in range(0, len(rows), size):
            among = range(first, min(first + size, len(rows)))
            kept = _read(folder, among) if writes else None
            # Rank 0's, since machines need not share a cache.
            shape = backend.broadcast_object(None if kept is None else kept.shape)
            if shape is not None:
                part = np.empty(shape, dtype) if kept is None else kept
                sent = torch.from_numpy(part.reshape(-1).view(np.uint8)).to(backend.device)
                part = backend.broadcast(sent).cpu().numpy().view(dtype).reshape(shape)
            else:
                part = stored(_computed(scorer, rows, among, starts))
            content = _content(part)
            file = _file(folder, among, content)
            if writes and (kept is None or not file.exists()):
                _write(file, content)
            if width:
                backend.barrier()
                part = np.load(file, mmap_mode="r", allow_pickle=False)
            parts.append(part)
            advance(len(among))
    return MappedScores(parts) if width else np.concatenate(parts)


def _check_room(folder: Path, needed: int, targets: int) -> None:
    """Says how much a teacher's values take, and refuses to compute what has no room."""
    kept = sum(file.stat().st_size for file in folder.glob("*.npy"))
    parent = next(parent for parent in folder.resolve().parents if parent.is_dir())
    size, free = f"{needed / 2**30:.3g} GiB for {targets:,} targets", shutil.disk_usage(parent).free
    if needed - kept > free:
        raise DataError(
            f"The teacher's values take {size} in {folder.parent}, where {free / 2**30:.3g} GiB are free. Lower "
            "distillation.top_k, or set data.cache_dir to a directory with more room."
        )
    if os.environ.get("RANK", "0") == "0" and not kept:
        to_stderr(f"The teacher's values take {size}, in {folder}.")


def _computed(scorer: Scorer, rows: TokenRows, among: range, starts: npt.NDArray[np.int64]) -> Scores:
    """Returns the scores of some rows; `starts` are the positions at which those of each row begin, (rows + 1,)."""
    backend, model = scorer.backend, scorer.open()
    sizes = {"data_size": backend.mesh.data_size, "data_rank": backend.mesh.data_rank}
    computing: deque[npt.NDArray[np.int64]] = deque()
    begin, end = int(starts[among.start]), int(starts[among.stop])

    def sent() -> Iterator[Batch]:
        for numbers, batch in evaluation_batches(rows, among, scorer.recipe.batch.rows, **sizes):
            computing.append(numbers)
            yield batch_to_device(batch, backend.device)

    scores: torch.Tensor | None = None
    with without_training(model):
        for values in backend.evaluate_batches(model, scorer.reference.compute, sent()):
            numbers = computing.popleft()
            scores = values.new_zeros(end - begin, values.shape[1]) if scores is None else scores
            if numbers.size and backend.mesh.counts_loss:
                places = ranges(starts[numbers], starts[numbers + 1] - starts[numbers]) - begin
                scores[torch.from_numpy(places).to(scores.device)] = values
            scorer.progress()
    assert scores is not None
    computed: Scores = backend.all_reduce_sum(scores).cpu().numpy()
    if not np.isfinite(computed).all():
        at = begin + int(np.flatnonzero(~np.isfinite(computed).all(1))[0])
        raise DataError(
            f"The reference gives row {int(np.searchsorted(starts, at, side='right')) - 1} a score that is not finite. "
            "Look at the model's weights, or set precision to fp32."
        )
    return computed


def _content(scores: Scores) -> bytes:
    written = io.BytesIO()
    np.save(written, scores, allow_pickle=False)
    return written.getvalue()


def _file(folder: Path, among: range, content: bytes) -> Path:
    return folder / f"{among.start}-{among.stop}-{xxhash.xxh3_128_hexdigest(content)}.npy"


def _read(folder: Path, among: range) -> Scores | None:
    """Returns the scores of some rows; None if there is no whole file of them."""
    for file in folder.glob(f"{among.start}-{among.stop}-*.npy"):
        content = file.read_bytes()
        if file == _file(folder, among, content):
            scores: Scores = np.load(io.BytesIO(content), allow_pickle=False)
            return scores
    return None


def _write(file: Path, content: bytes) -> None:
    advice = "Set data.cache_dir to a directory that can be written and has room."
    with DataError.explaining(f"The scores of the reference cannot be kept in {file.parent}", advice, OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, content)
