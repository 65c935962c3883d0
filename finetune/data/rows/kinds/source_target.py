"""A source and its target, a row each: two segments, of which the second is learned."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from finetune.config.recipe import TEXT_METRICS
from finetune.config.recipe_schema import DataSection
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds import classes
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, RowKind, Shown, TokenRows, pad
from finetune.data.rows.packed_rows import IGNORED, PackedRows
from finetune.data.sources.readers import read_text
from finetune.data.tokenization.special_tokens import target_wrapping_of, wrapping_of


def _pack(columns: Mapping[str, Any], data: DataSection, room: Sequence[int]) -> PackedRows:
    drop = data.long_documents == "drop"
    return packed_rows.pad_pairs(columns["offsets"], columns["firsts"], room, drop=drop)


def _batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Reads rows.

    Returns:
        `input_ids` and `attention_mask`, (B, L) int64, of the sources, and `targets`, (B, M) int64 for the M tokens of
        the longest target, -100 behind the end of the others.
    """
    lists = []
    for side, around in enumerate(rows.around):
        segments = 2 * numbers + side
        starts, lengths = rows.packed.starts[segments].tolist(), rows.packed.lengths[segments].tolist()
        texts = (rows.tokens[start : start + n].tolist() for start, n in zip(starts, lengths, strict=True))
        lists.append([[*around.before, *text, *around.behind] for text in texts])
    sources, targets = lists
    return {**rows.pad(sources), "targets": pad(targets, IGNORED, rows.row_length)}


def _examples(rows: TokenRows, row: int, names: Sequence[str]) -> Iterator[Shown]:
    batch = _batch(rows, np.array([row]))
    source, target = batch["input_ids"][batch["attention_mask"] == 1], batch["targets"][batch["targets"] != IGNORED]
    yield Shown(np.append(source, target), np.repeat([False, True], [source.size, target.size]))


KIND = RowKind(
    writes_text=True,
    reads_source=True,
    takes_pairs=True,
    metrics=TEXT_METRICS,
    figures=("perplexity", "accuracy"),
    read=partial(read_text, needed=True),
    key=("target",),
    of_documents={"firsts": "int64"},
    # Marian has a vocabulary for each side.
    encode=lambda encoder, texts: encoder.encode_pairs(texts, targets=True),
    around=lambda tokenizer, paired: (wrapping_of(tokenizer), target_wrapping_of(tokenizer)),
    pack=_pack,
    targets=lambda rows: rows.packed.lengths[1::2] + rows.around[1].size,
    batch=_batch,
    shapes=classes.shapes_of_tokens,
    examples=_examples,
)
