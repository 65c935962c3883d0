"""Tokens that a tokenizer puts around texts, and that fill rows. Imports no library of tokenizers."""

import itertools
from typing import Any, NamedTuple

from finetune.utils.errors import DataError


class Wrapping(NamedTuple):
    """Tokens that a tokenizer puts around a text, or around and between two, for classifiers: [CLS], [SEP]."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    types: tuple[int, ...] | None = None
    """Type ids of `before`, the first text, `between`, the second and `behind`, one for each text; None where the
    tokenizer has none, or there is one text."""

    @property
    def size(self) -> int:
        """Number of these tokens."""
        return len(self.before) + len(self.between) + len(self.behind)


def wrapping_of(tokenizer: Any, *, pair: bool = False, target: bool = False) -> Wrapping:
    """Finds what the tokenizer itself puts before and behind a text, or around and between two, with their type ids.

    Args:
        target: True for a text that is to be written, which some tokenizers treat otherwise (mBART's language codes).

    Raises:
        DataError: If it does something else to the text as well.
    """
    probes = {"text_target": "a"} if target else {"text": "a", "text_pair": "b"} if pair else {"text": "a"}
    key = next(iter(probes))
    bare = [list(tokenizer(**{key: text}, add_special_tokens=False)["input_ids"]) for text in probes.values()]
    both = tokenizer(**probes)
    full, types = list(both["input_ids"]), both.get("token_type_ids")
    for starts in itertools.combinations(range(len(full) + 1), len(bare)):
        ends = [start + len(ids) for start, ids in zip(starts, bare, strict=True)]
        if (not pair or ends[0] <= starts[1]) and all(
            full[start:end] == ids for start, end, ids in zip(starts, ends, bare, strict=True)
        ):
            # One type for each text, however many tokens the probes have.
            kept = [*range(starts[0] + 1), *range(ends[0], starts[-1] + 1), *range(ends[-1], len(full))]
            return Wrapping(
                before=tuple(full[: starts[0]]),
                between=tuple(full[ends[0] : starts[-1]]),
                behind=tuple(full[ends[-1] :]),
                types=tuple(types[place] for place in kept) if pair and types is not None else None,
            )
    what = "texts when it pairs them, so `pair_field` cannot be used with it"
    if not pair:
        what = "a text when it adds special tokens, so its documents cannot be prepared for this task"
    raise DataError(f"The tokenizer {type(tokenizer).__name__} changes {what}. Name another as tokenizer.name.")


def target_wrapping_of(tokenizer: Any) -> Wrapping:
    """Finds what the tokenizer puts before and behind a target, and adds the end of text if that is not there.

    Raises:
        DataError: If it has none, or does something else to the text as well.
    """
    wrapping, end = wrapping_of(tokenizer, target=True), tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} has no end-of-text token, so that no target would end, nor what "
            "is generated. Name another as tokenizer.name, or give this one an eos_token."
        )
    return wrapping if end in wrapping.behind else wrapping._replace(behind=(*wrapping.behind, end))


def truncate_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts stay, of which the longer loses more.

    Source: `longest_first` of the tokenizers library, `truncate_encodings` in utils/truncation.rs.
    """
    if first + second <= room:
        return first, second
    short, long = min(first, second), max(first, second)
    short, long = (short, room - short) if 2 * short <= room else (room // 2, room - room // 2)
    return (short, long) if first <= second else (long, short)


def padding_id(tokenizer: Any) -> int:
    """The token that fills rows. Nothing is learned from it, so any will do where there is none for it."""
    return next((int(n) for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)
