"""Tokens at which generation stops: the tokenizer's end of text, the ends of learned answers, and the base model's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from finetune.export.find_weights import WeightSource
from finetune.models import prompts
from finetune.utils.errors import CheckpointError


def learned_stop_tokens(source: WeightSource, tokenizer: Any) -> list[int]:
    """Returns the tokens that the answers which a run learned end in; none if it learned no conversations.

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


def read_stop_tokens(folder: Path) -> list[int]:
    """Returns the tokens at which the generation config in a folder stops; none if there is no such file.

    Raises:
        OSError: If it cannot be read.
    """
    if not (folder / "generation_config.json").is_file():
        return []
    return prompts.stop_tokens(GenerationConfig.from_pretrained(folder), None, ())


def check_stop_tokens(folder: Path, ends: Sequence[int], tokenizer: Any) -> None:
    """Makes sure that what was written stops at these tokens, and at no other.

    Raises:
        CheckpointError: If it does not.
    """
    found = read_stop_tokens(folder)
    if set(found) != set(ends):
        raise CheckpointError(
            f"{folder / 'generation_config.json'} stops at {_named(tokenizer, found)}, but texts end at "
            f"{_named(tokenizer, ends)}: generation would not stop, or would too early. Set eos_token_id to "
            f"{list(ends)}."
        )


def _named(tokenizer: Any, ids: Sequence[int]) -> str:
    names = [f"{i} ('{tokenizer.convert_ids_to_tokens(i)}')" if tokenizer is not None else str(i) for i in ids]
    return ", ".join(names) or "nothing"
