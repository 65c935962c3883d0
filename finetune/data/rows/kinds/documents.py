"""Documents of text, or conversations, of which each token is learned or those of answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from finetune.config.recipe import TEXT_METRICS
from finetune.config.recipe_schema import DataSection, Recipe
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, RowKind, Shown, TokenRows
from finetune.data.rows.packed_rows import IGNORED, PackedRows, ranges, round_up
from finetune.data.tokenization.encoded import WEIGHTS
from finetune.data.tokenization.memmap import Int64s

_ROWS_AT_ONCE = 1024


def _pack(columns: Mapping[str, Any], data: DataSection, room: Sequence[int]) -> PackedRows:
    offsets = columns["offsets"]
    if data.packing == "wrapped":
        keep = data.remainder == "keep"
        return packed_rows.wrap_stream(int(offsets[-1]), data.sequence_length, keep_remainder=keep)
    pack = packed_rows.pad_documents if data.packing == "padded" else packed_rows.pack_documents
    return pack(offsets, data.sequence_length, data.long_documents)


def _count(columns: Mapping[str, Any], packed: PackedRows) -> tuple[Int64s | None, int]:
    return (columns["mask"].counts(packed.starts, packed.lengths) if "mask" in columns else None), 0


def read_segments(rows: TokenRows, numbers: Numbers, width: int, *, restarts: bool) -> Arrays:
    """Reads rows of documents.

    Args:
        width: Tokens of a row, (T or L).
        restarts: Documents share rows.

    Returns:
        `input_ids` and `targets`, both (B, T) or (B, L) int64: the target is the token that follows the input, -100
        where there is none or it is not learned. Where documents share rows also `position_ids`, which restart at each
        document and at the padding, and `cu_seqlens`: where they do in the batch read row by row, and its end, (D + 1,)
        int32 for D documents; where documents have weights `weights`, (B, T) or (B, L) fp32: those of the targets.
        There is no attention mask: it would make models look across documents.
    """
    widths = rows.widths[numbers]
    # All pairs of the batch at once: a Python step for each document would cost more than the reading.
    lengths, source = _pairs(rows, numbers)
    within = ranges(np.full_like(lengths, 0), lengths)
    destination = ranges(np.arange(numbers.size, dtype=np.int64) * width, widths)
    inputs = np.full(numbers.size * width, rows.padding_id, np.int64)
    targets = np.full(numbers.size * width, IGNORED, np.int64)
    inputs[destination] = rows.tokens[source]
    targets[destination] = rows.tokens[source + 1]
    if "mask" in rows.columns:
        targets[destination[~rows.columns["mask"][source + 1]]] = IGNORED
    batch: Arrays = {"input_ids": inputs, "targets": targets}
    if WEIGHTS in rows.columns:
        batch[WEIGHTS] = np.zeros(numbers.size * width, np.float32)
        batch[WEIGHTS][destination] = _weights(rows, source)
    if restarts:
        batch["position_ids"] = (np.arange(width) - widths[:, None]).ravel()
        batch["position_ids"][destination] = within
    arrays: Arrays = {name: values.reshape(numbers.size, width) for name, values in batch.items()}
    if restarts:
        ends = np.append(np.flatnonzero(batch["position_ids"] == 0), numbers.size * width)
        arrays["cu_seqlens"] = ends.astype(np.int32)
    return arrays


def _pairs(rows: TokenRows, numbers: Numbers) -> tuple[Int64s, Int64s]:
    """Returns the pairs of each segment of some rows, and the place of each pair in the stream."""
    first = rows.packed.row_starts[numbers]
    segments = ranges(first, rows.packed.row_starts[numbers + 1] - first)
    return rows.packed.lengths[segments], ranges(rows.packed.starts[segments], rows.packed.lengths[segments])


def _weights(rows: TokenRows, source: Int64s) -> Any:
    """Returns the weight of each pair's target, 0 where it is not learned."""
    weights = rows.columns[WEIGHTS][source + 1]
    return weights * rows.columns["mask"][source + 1] if "mask" in rows.columns else weights


def _counts(rows: TokenRows, numbers: Numbers) -> dict[str, float]:
    """Returns what losses are divided by where targets have weights: the sum of these."""
    if WEIGHTS not in rows.columns:
        return {}
    some = (numbers[first : first + _ROWS_AT_ONCE] for first in range(0, numbers.size, _ROWS_AT_ONCE))
    return {"targets": sum(float(_weights(rows, _pairs(rows, n)[1]).sum(dtype=np.float64)) for n in some)}


def _batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows; see `read_segments`."""
    width = rows.row_length
    if rows.packing == "padded":
        width = min(width, round_up(int(rows.widths[numbers].max(initial=1))))
    return read_segments(rows, numbers, width, restarts=rows.packing == "documents")


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    names = ["input_ids", "targets"] + ["position_ids"] * (recipe.data.packing == "documents")
    return dict.fromkeys(names, (recipe.batch.rows, recipe.data.sequence_length))


def examples_of(rows: TokenRows, row: int, read: Callable[[TokenRows, Numbers], Arrays]) -> Iterator[Shown]:
    """Yields the documents of a row, whose batches `read` returns."""
    batch, begin = {name: values[0] for name, values in read(rows, np.array([row])).items()}, 0
    for segment in range(int(rows.packed.row_starts[row]), int(rows.packed.row_starts[row + 1])):
        start, length = int(rows.packed.starts[segment]), int(rows.packed.lengths[segment])
        ids = np.append(batch["input_ids"][begin : begin + length], rows.tokens[start + length])
        yield Shown(ids, np.append(False, batch["targets"][begin : begin + length] != IGNORED))
        begin += length


KIND = RowKind(
    writes_text=True,
    takes_pairs=False,
    metrics=TEXT_METRICS,
    figures=("perplexity",),
    of_tokens={"mask": "bool", WEIGHTS: "float32"},
    pack=_pack,
    count=_count,
    targets=lambda rows: rows.widths,
    counts=_counts,
    batch=_batch,
    shapes=_shapes,
    examples=lambda rows, row, names: examples_of(rows, row, _batch),
)
