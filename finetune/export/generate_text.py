"""Streams text from a loaded model until a stop token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from finetune.export.load_model import LoadedModel
from finetune.models import prompts
from finetune.models.lora_adapters import transformer
from finetune.utils.errors import DataError, RecipeError


@dataclass(frozen=True)
class SamplingOptions:
    """Choice of the next token. Temperature 0 takes the likeliest."""

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"max_new_tokens": (self.max_new_tokens, 1), "top_k": (self.top_k, 1)}
        for name, (value, smallest) in least.items():
            if value is not None and value < smallest:
                raise RecipeError(f"{name} is {value}; give {smallest} or more.")
        if not 0 <= self.temperature < float("inf"):
            raise RecipeError(f"temperature is {self.temperature}; give 0 (always the likeliest token) or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RecipeError(f"top_p is {self.top_p}; give more than 0, and 1 at the most.")


@dataclass
class _Stream:
    """A streamer of transformers that hands text on as soon as its characters are whole.

    Its own `TextStreamer` decodes lines one by one, without the prompt: some tokenizers then drop a space.
    """

    tokenizer: Any
    write: Callable[[str], None]
    written: str = ""
    ids: list[int] = field(default_factory=list)
    start: int | None = None
    """Length of the prompt, which comes first."""

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()
        self._hand_on(last=False)

    def end(self) -> None:
        self._hand_on(last=True)

    def _hand_on(self, *, last: bool) -> None:
        decoded = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if self.start is None:
            self.start = len(decoded)
        text = decoded[self.start :]
        if text.startswith(self.written) and (last or not text.endswith("\ufffd")):
            self.write(text[len(self.written) :])
            self.written = text


def generate_text(
    opened: LoadedModel,
    prompt: str | Sequence[prompts.Turn],
    options: SamplingOptions,
    write: Callable[[str], None],
    *,
    chat: bool = False,
) -> str:
    """Continues a prompt, or answers it, or has an encoder-decoder read it; returns what was written.

    Args:
        prompt: A text, or the turns of a conversation.
        write: Is given each piece of text as it comes.
        chat: Puts a text into the tokenizer's chat template, as a user's turn; turns always are.

    Raises:
        DataError: If there is no chat template, or no room after the prompt.
        RecipeError: If the model writes no text.
    """
    encoded = opened.task.paired and isinstance(prompt, str) and not chat
    if not encoded:
        opened.require_text()
    tokenizer, longest = opened.tokenizer, opened.longest
    plain = isinstance(prompt, str) and not chat
    ids = prompts.prompt_tokens(tokenizer, prompt, encoded=encoded, variables=None if plain else opened.template_args)
    # What is written behind an encoder has positions of its own.
    taken = 0 if encoded else len(ids)
    room = options.max_new_tokens if longest is None else min(options.max_new_tokens, longest - taken)
    if room < 1 or (longest is not None and len(ids) > longest):
        raise DataError(f"The prompt has {len(ids)} tokens, and the model knows {longest} positions. Shorten it.")
    network: Any = transformer(opened.network)
    sampled = options.temperature > 0
    stream = _Stream(tokenizer, write)
    paddings = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    inputs = torch.tensor([ids], device=opened.device)
    torch.manual_seed(options.seed)
    with torch.no_grad():
        network.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=room,
            eos_token_id=prompts.stop_tokens(network.generation_config, tokenizer, opened.ends) or None,
            pad_token_id=next(token for token in paddings if token is not None),
            decoder_start_token_id=prompts.decoder_start(network) if encoded else None,
            streamer=stream,
            # All are given: whatever the model's own generation config says of sampling must not mix in.
            do_sample=sampled,
            temperature=options.temperature if sampled else None,
            top_k=(options.top_k or 0) if sampled else None,
            top_p=(options.top_p or 1.0) if sampled else None,
            num_beams=1,
            repetition_penalty=1.0,
        )
    return stream.written
