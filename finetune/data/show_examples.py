"""Examples as tokens, with the learned ones marked."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.text import Text

from finetune.data.prepare import PreparedData
from finetune.data.rows.row_dataset import IGNORED, Rows

_LEARNED = "bold green"
_READ = "dim"


def examples(data: PreparedData, count: int, *, coloured: bool) -> Iterator[Text]:
    """The first examples of the training rows, or of the validation rows where there are no others.

    Args:
        data: What was prepared.
        count: How many to show.
        coloured: Tell learned tokens by colour; else by brackets around each.
    """
    rows = data.train or data.validation
    assert rows is not None
    learned = "green" if coloured else "in [brackets]"
    yield Text(f"{count} examples; tokens are divided by |, those that are learned are {learned}")
    for number, (ids, targets) in enumerate(_segments(rows, count), start=1):
        total = int(targets.sum())
        yield Text(f"\nexample {number}: {ids.size:,} tokens, {total:,} learned", style="bold" if coloured else "")
        yield _line(data.tokenizer, ids.tolist(), targets.tolist(), coloured=coloured)


def _segments(rows: Rows, count: int) -> Iterator[tuple[Any, Any]]:
    """Tokens of documents, and which of them are targets, as the batches have them."""
    seen = 0
    for row in range(len(rows)):
        batch = {name: values[0].numpy() for name, values in rows.batch(np.array([row])).items()}
        begin = 0
        for segment in range(int(rows.packed.row_starts[row]), int(rows.packed.row_starts[row + 1])):
            if seen == count:
                return
            seen += 1
            start, length = int(rows.packed.starts[segment]), int(rows.packed.lengths[segment])
            ids = np.append(batch["input_ids"][begin : begin + length], rows.tokens[start + length])
            targets = np.append(False, batch["targets"][begin : begin + length] != IGNORED)
            begin += length
            yield ids, targets


def _line(tokenizer: Any, ids: list[int], targets: list[bool], *, coloured: bool) -> Text:
    line = Text()
    for token, target in zip(ids, targets, strict=True):
        # As characters, not as the tokenizer's own spelling: `Ġ` and `Ċ` say nothing to people.
        piece = "".join(c if c.isprintable() else repr(c)[1:-1] for c in tokenizer.decode([token]))
        if coloured:
            line.append(piece, style=_LEARNED if target else _READ)
            line.append("|", style=_READ)
        else:
            line.append(f"[{piece}]" if target else f"{piece}|")
    return line
