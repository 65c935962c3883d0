"""Examples as tokens, with the learned ones marked."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from finetune.data.rows.feed import Rows
from finetune.data.rows.packed_rows import IGNORED, TokenRows

_LEARNED = "bold green"
_READ = "dim"
_SHOWN = 8


def examples(rows: Rows, tokenizer: Any, label_names: Sequence[str], count: int, *, coloured: bool) -> Iterator[Text]:
    """The first examples of some rows: of this toolkit, or a custom task's own.

    Args:
        coloured: Tell learned tokens by colour; else by brackets around each.
    """
    bold = "bold" if coloured else ""
    if not isinstance(rows, TokenRows):
        for number in range(min(count, len(rows))):
            yield Text(f"\nexample {number + 1}: {rows.num_targets(np.array([number])):,} targets", style=bold)
            for name, values in ((name, values[0]) for name, values in rows.batch(np.array([number])).items()):
                first = ", ".join(f"{value:.4g}" for value in values.flatten()[:_SHOWN].tolist())
                more = ", ..." if values.numel() > _SHOWN else ""
                kind = str(values.dtype).removeprefix("torch.")
                yield Text(f"{name}: {kind} of shape {tuple(values.shape)}: {first}{more}")
        return
    tells = "the class is" if label_names else "the number is"
    learned = tells if rows.classes is not None else "those that are"
    how = "green" if coloured else "in [brackets]"
    yield Text(f"Tokens are divided by |; {learned} learned, and {how}")
    for number, (ids, targets, label) in enumerate(itertools.islice(_documents(rows), count), start=1):
        title = Text(f"\nexample {number}: {ids.size:,} tokens, ", style=bold)
        if label is None:
            yield title.append(f"{int(targets.sum()):,} learned")
        else:
            name = label_names[int(label)] if label_names else f"{label:g}"
            name = name if coloured else f"[{name}]"
            yield title.append("class " if label_names else "number ").append(name, style=_LEARNED if coloured else "")
        yield _line(tokenizer, ids.tolist(), targets.tolist(), coloured=coloured)


def _documents(rows: TokenRows) -> Iterator[tuple[Any, Any, float | None]]:
    """Tokens of documents, which of them are targets as the batches have them, and class or number if there is one."""
    for row in range(len(rows)):
        batch = {name: values[0].numpy() for name, values in rows.batch(np.array([row])).items()}
        if rows.classes is not None:
            ids = batch["input_ids"][batch["attention_mask"] == 1]
            yield ids, np.full(ids.size, False), batch["targets"].item()
            continue
        begin = 0
        for segment in range(int(rows.packed.row_starts[row]), int(rows.packed.row_starts[row + 1])):
            start, length = int(rows.packed.starts[segment]), int(rows.packed.lengths[segment])
            ids = np.append(batch["input_ids"][begin : begin + length], rows.tokens[start + length])
            yield ids, np.append(False, batch["targets"][begin : begin + length] != IGNORED), None
            begin += length


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
