"""Examples as tokens, with the learned ones marked."""

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from rich.text import Text

from finetune.data.rows.feed import Rows
from finetune.data.rows.kinds.row_kind import TokenRows

_LEARNED = "bold green"
_READ = "dim"
_SHOWN = 8
_DIVIDED = "Tokens are divided by |"

# What a run keeps of its data: some 10 KB, which take milliseconds to make.
_PREVIEWED, _PREVIEWED_TOKENS = 3, 240


def preview(rows: Rows, tokenizer: Any, label_names: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Returns lines about the first examples, for `examples.json`: parts with `text` and whether it is `learned`.

    Of a long example only the beginning and the end are there. Pairs of answers are texts: the prompt, and both
    answers as learned.
    """
    if isinstance(rows, TokenRows) and rows.kind.judged and len(rows) and len([*rows.kind.examples(rows, 0, ())]) > 1:
        return [*_pairs_of_texts(rows, tokenizer)]
    lines = examples(rows, tokenizer, label_names, _PREVIEWED, coloured=True, most_tokens=_PREVIEWED_TOKENS)
    # A page says for itself how learned tokens are marked.
    return [_parts(line) for line in lines if not line.plain.startswith(_DIVIDED)]


def _pairs_of_texts(rows: TokenRows, tokenizer: Any) -> Iterator[list[dict[str, Any]]]:
    for row in range(min(_PREVIEWED, len(rows))):
        chosen, rejected = (shown.ids for shown in rows.kind.examples(rows, row, ()))
        shorter = min(chosen.size, rejected.size)
        differ = np.flatnonzero(chosen[:shorter] != rejected[:shorter])
        same = int(differ[0]) if differ.size else shorter
        for name, ids in {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}.items():
            yield [{"text": f"example {row + 1}, {name}: {ids.size:,} tokens", "learned": False}]
            half = _PREVIEWED_TOKENS // 2
            ends = [ids] if ids.size <= 2 * half else [ids[:half], ids[-half:]]
            text = " … ".join(str(tokenizer.decode(end)) for end in ends)
            yield [{"text": text, "learned": name != "prompt"}]


def _parts(line: Text) -> list[dict[str, Any]]:
    """Returns the learned and the other parts of a line in turn; what divides two learned tokens is in theirs."""
    text = line.plain.lstrip("\n")
    learned = np.zeros(len(line.plain), dtype=bool)
    for span in line.spans:
        learned[span.start : span.end] |= span.style == _LEARNED
    learned = learned[len(learned) - len(text) :]
    learned[1:-1] |= learned[:-2] & learned[2:]
    parts = itertools.groupby(zip(text, learned.tolist(), strict=True), itemgetter(1))
    return [{"text": "".join(letter for letter, _ in part), "learned": is_learned} for is_learned, part in parts]


def examples(
    rows: Rows,
    tokenizer: Any,
    label_names: Sequence[str],
    count: int,
    *,
    coloured: bool,
    most_tokens: int | None = None,
) -> Iterator[Text]:
    """The first examples of some rows: of this toolkit, or a custom task's own.

    Args:
        coloured: Tell learned tokens by colour; else by brackets around each.
        most_tokens: Tokens of an example that are shown, half of them from its end; None: all.
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
    yield Text(f"{_DIVIDED}; {rows.kind.shown_as} {'green' if coloured else 'in [brackets]'}")
    shown = (one for row in range(len(rows)) for one in rows.kind.examples(rows, row, label_names))
    for number, (ids, learned, label) in enumerate(itertools.islice(shown, count), start=1):
        title = Text(f"\nexample {number}: {ids.size:,} tokens, ", style=bold)
        if label is None:
            yield title.append(f"{np.count_nonzero(learned):,} learned")
        else:
            kind, name = label
            yield title.append(f"{kind} ").append(name if coloured else f"[{name}]", style=_LEARNED if coloured else "")
        tokens, targets = ids.tolist(), learned.tolist()
        if most_tokens is None or ids.size <= most_tokens:
            yield _line(tokenizer, tokens, targets, coloured=coloured)
            continue
        half = most_tokens // 2
        yield _line(tokenizer, tokens[:half], targets[:half], coloured=coloured)
        yield Text(f"… {ids.size - 2 * half:,} more tokens …", style=_READ)
        yield _line(tokenizer, tokens[-half:], targets[-half:], coloured=coloured)


def _line(tokenizer: Any, ids: list[int], targets: list[bool] | list[str], *, coloured: bool) -> Text:
    line = Text()
    for token, target in zip(ids, targets, strict=True):
        # As characters, not as the tokenizer's own spelling: `Ġ` and `Ċ` say nothing to people.
        piece = "".join(c if c.isprintable() else repr(c)[1:-1] for c in tokenizer.decode([token]))
        piece += f"/{target}" if isinstance(target, str) and target else ""
        if coloured:
            line.append(piece, style=_LEARNED if target else _READ)
            line.append("|", style=_READ)
        else:
            line.append(f"[{piece}]" if target else f"{piece}|")
    return line
