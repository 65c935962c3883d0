"""Where generation stops: at the tokenizer's end of text, at what a run's answers end in, and at what the base says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from finetune.artefacts.source import Source
from finetune.errors import CheckpointError


def learned(source: Source, tokenizer: Any) -> list[int]:
    """The tokens that the answers which a run learned end in; none if it learned no conversations.

    Raises:
        CheckpointError: If the tokenizer does not know one of them.
    """
    if tokenizer is None or source.ends is None:
        return []
    known = tokenizer.get_vocab()
    absent = [name for name in source.ends if name not in known]
    if absent:
        raise CheckpointError(
            f"{source.run / 'run.json'} says that answers end in '{absent[0]}', which the tokenizer does not know. "
            "Restore the run's tokenizer."
        )
    return [int(known[name]) for name in source.ends]


def all_of(told: GenerationConfig, tokenizer: Any, taught: Sequence[int]) -> list[int]:
    """All tokens that end a text: what was learned, the tokenizer's own, and those of the base, which it may still say.

    Args:
        told: The base's generation config.
        taught: As `learned` gives them.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    base = told.eos_token_id if isinstance(told.eos_token_id, list) else [told.eos_token_id]
    return list(dict.fromkeys(end for end in (own, *taught, *base) if end is not None))


def stopping_at(told: GenerationConfig, ends: Sequence[int]) -> GenerationConfig:
    """A generation config that stops at these tokens, and can be written."""
    if ends:
        told.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
    if told.temperature not in (None, 1.0) or told.top_p not in (None, 1.0):
        # transformers writes no settings for sampling unless it is asked to sample; some hub models have them so.
        told.do_sample = True
    return told


def read(folder: Path) -> list[int]:
    """The tokens at which the generation config in a folder stops; none if there is no such file.

    Raises:
        CheckpointError: If it cannot be read.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    try:
        told = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Restore it.") from error
    return [end for end in (told if isinstance(told, list) else [told]) if end is not None]


def check(folder: Path, ends: Sequence[int], tokenizer: Any) -> None:
    """Makes sure that what was written stops at these tokens, and at no other.

    Raises:
        CheckpointError: If it does not.
    """
    found = read(folder)
    if set(found) != set(ends):
        raise CheckpointError(
            f"{folder / 'generation_config.json'} stops at {_named(tokenizer, found)}, but texts end at "
            f"{_named(tokenizer, ends)}: generation would not stop, or would too early. Set eos_token_id to "
            f"{list(ends)}."
        )


def _named(tokenizer: Any, ids: Sequence[int]) -> str:
    names = [f"{i} ('{tokenizer.convert_ids_to_tokens(i)}')" if tokenizer is not None else str(i) for i in ids]
    return ", ".join(names) or "nothing"
