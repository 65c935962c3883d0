"""Documents of one text or a pair of texts, a row each, of which the class is learned."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.config.recipe import CLASS_METRICS
from finetune.config.recipe_schema import DataSection, Recipe
from finetune.data.class_labels import ClassList
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, RowKind, Shown, TokenRows, pad
from finetune.data.rows.packed_rows import PackedRows
from finetune.data.tokenization.memmap import Int64s
from finetune.data.tokenization.special_tokens import truncate_pair, wrapping_of


def pack_texts(columns: Mapping[str, Any], data: DataSection, room: Sequence[int]) -> PackedRows:
    """Puts each document into a row, without its end where that is too long."""
    return packed_rows.pad_documents(columns["offsets"], room[0], "truncate", with_targets=False)


def read_texts(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads the texts of rows.

    Returns:
        `input_ids` and `attention_mask`, (B, L) int64; of pairs also `token_type_ids`, (B, L) int64, if the tokenizer
        gives them.
    """
    (around,), firsts = rows.around, rows.columns.get("firsts")
    ids, types = list[list[int]](), list[list[int]]()
    for row in numbers.tolist():
        # A row is one document.
        start, length = int(rows.packed.starts[row]), int(rows.packed.lengths[row])
        kept, second, then = length, start + length, 0
        if firsts is not None:
            first, end = int(firsts[row]), int(rows.columns["offsets"][row + 1])
            kept, then = truncate_pair(first, end - start - first, rows.row_length - around.size)
            second = start + first
        texts = rows.tokens[start : start + kept].tolist(), rows.tokens[second : second + then].tolist()
        ids.append([*around.before, *texts[0], *around.between, *texts[1], *around.behind])
        if around.types is not None:
            each = [1] * len(around.before), kept, [1] * len(around.between), then, [1] * len(around.behind)
            types.append(np.repeat(around.types, np.hstack(each)).tolist())
    return {**rows.pad(ids), **({"token_type_ids": pad(types, 0, rows.row_length)} if types else {})}


def weigh(rows: TokenRows, targets: npt.NDArray[Any]) -> Arrays:
    """Returns `targets`, and where classes are weighted `weights` in fp32, 0 where there is no target."""
    if rows.class_weights is None:
        return {"targets": targets}
    return {"targets": targets, "weights": np.append(rows.class_weights, np.float32(0))[np.maximum(targets, -1)]}


def batch_texts(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows: `read_texts`, and `targets`, (B,) int64, or fp32 for numbers; see `weigh`."""
    return {**read_texts(rows, numbers), **weigh(rows, rows.values[numbers])}


def _values(columns: Mapping[str, Any], labels: Sequence[Any], classes: ClassList | None) -> Int64s:
    assert classes is not None
    return classes.renumber(columns["labels"], labels)


def shapes_of_tokens(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Returns shapes of a micro-batch with a target for each token."""
    shape = (recipe.batch.rows, recipe.data.sequence_length)
    return dict.fromkeys(("input_ids", "targets", "attention_mask"), shape)


def count_classes(classes: npt.NDArray[Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns how many of some class numbers there are, by the names of the classes."""
    counts = np.bincount(classes, minlength=len(names)).tolist()
    return {"classes": dict(zip(names, counts, strict=True))}


def _examples(rows: TokenRows, row: int, names: Sequence[str]) -> Iterator[Shown]:
    batch = batch_texts(rows, np.array([row]))
    ids, value = batch["input_ids"][batch["attention_mask"] == 1], batch["targets"].item()
    yield Shown(ids, np.full(ids.size, False), ("class", names[value]) if names else ("number", f"{value:g}"))


KIND = RowKind(
    labels="class",
    metrics=CLASS_METRICS,
    figures=("accuracy", "recall_macro"),
    of_documents={"labels": "int64", "firsts": "int64"},
    around=lambda tokenizer, paired: (wrapping_of(tokenizer, pair=paired),),
    pack=pack_texts,
    values=_values,
    targets=lambda rows: np.ones(len(rows), np.int64),
    batch=batch_texts,
    shapes=lambda recipe: {**shapes_of_tokens(recipe), "targets": (recipe.batch.rows,)},
    report=lambda rows, names: count_classes(rows.values, names),
    shown_as="the class, which is learned, is",
    examples=_examples,
)
