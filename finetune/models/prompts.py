"""Beginnings of texts for a network, and the tokens at which it stops."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from finetune.data.sources.streams import require_encodable
from finetune.utils.bounded_work import bounded_work
from finetune.utils.errors import CheckpointError, DataError

BOUND = ("The tokenizer's chat template", "Mend it, or write the prompt out as text (no --chat).")
"""Arguments of `bounded_work`, wherever a template writes a prompt."""


Turn = Mapping[str, str]
"""A turn of a conversation: `role` and `content`."""


def decoder_start(network: Any) -> int:
    """Returns the token that an encoder-decoder's decoder begins with."""
    start = network.generation_config.decoder_start_token_id
    return int(network.config.decoder_start_token_id if start is None else start)


def prompt_tokens(
    tokenizer: Any, prompt: str | Sequence[Turn], *, encoded: bool = False, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Returns tokens of a prompt, up to where a network goes on.

    Of an empty text to go on from it is the token that begins texts, or that ends the text before.

    Args:
        prompt: A text, or the turns of a conversation.
        encoded: True if an encoder reads it, with the tokens that the tokenizer puts around it.
        variables: More variables of the chat template, for which a text is a user's turn; None without a template.

    Raises:
        DataError: If it is empty, there is no template or it refuses the turns, or these hold half a character.
    """
    if variables is not None:
        if not tokenizer.chat_template:
            raise DataError("--chat needs a tokenizer with a chat template, and this one has none. Leave --chat out.")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        roles = ", ".join(turn["role"] for turn in messages)
        what = "a single turn of a user" if len(messages) == 1 else f"turns of {roles}"
        advice = (
            "Write the prompt out as text (no --chat), or, for samples of a run, leave the recipe's sample section "
        )
        # Whatever a template does with what it did not expect.
        with (
            DataError.explaining(f"The chat template refuses {what}", f"{advice}out.", Exception),
            bounded_work(*BOUND),
        ):
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
    require_encodable(prompt, "sample.prompt, or --prompt", "prompt")
    if encoded and not str(prompt).strip():
        raise DataError(
            "The prompt is empty, and an encoder needs a text to read. Give one (sample.prompt, or --prompt)."
        )
    ids: list[int] = tokenizer(prompt)["input_ids"] if encoded else tokenizer.encode(prompt, add_special_tokens=False)
    if encoded or variables is not None:
        return ids
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = [begin, *ids] if begin is not None else ids or [end]
    if ids == [None]:
        raise DataError(
            "The prompt is empty, and the tokenizer has no token to start from. Give one (sample.prompt, or --prompt)."
        )
    return ids


def stop_tokens(generation: GenerationConfig, tokenizer: Any, taught: Sequence[int]) -> list[int]:
    """Returns all tokens that end a text: the tokenizer's own, the learned ones, and those that the base may still say.

    Args:
        generation: The base's generation config.
        taught: The tokens that learned answers end in.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    base = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    return list(dict.fromkeys(end for end in (own, *taught, *base) if end is not None))


def stopping_at(generation: GenerationConfig, tokens: Sequence[int]) -> GenerationConfig:
    """Returns the generation config, made to stop at these tokens, and to be writable."""
    if tokens:
        generation.eos_token_id = list(tokens) if len(tokens) > 1 else tokens[0]
    if generation.temperature not in (None, 1.0) or generation.top_p not in (None, 1.0):
        # transformers writes no settings for sampling unless it is asked to sample; some hub models have them so.
        generation.do_sample = True
    return generation


def read_stop_tokens(folder: Path) -> list[int]:
    """Returns the tokens at which the generation config in a folder stops; none if there is no such file.

    Raises:
        OSError: If it cannot be read.
    """
    if not (folder / "generation_config.json").is_file():
        return []
    return stop_tokens(GenerationConfig.from_pretrained(folder), None, ())


def check_stop_tokens(folder: Path, ends: Sequence[int], tokenizer: Any) -> None:
    """Raises a `CheckpointError` unless the generation config in a folder stops at these tokens, and at no other."""
    stops = read_stop_tokens(folder)
    if set(stops) != set(ends):
        raise CheckpointError(
            f"{folder / 'generation_config.json'} stops at {_named(tokenizer, stops)}, but texts end at "
            f"{_named(tokenizer, ends)}: generation would not stop, or too early. Set eos_token_id to {list(ends)}."
        )


def _named(tokenizer: Any, ids: Sequence[int]) -> str:
    names = [f"{i} ('{tokenizer.convert_ids_to_tokens(i)}')" if tokenizer is not None else str(i) for i in ids]
    return ", ".join(names) or "nothing"
