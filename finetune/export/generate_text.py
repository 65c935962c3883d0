"""Streams text from a loaded model until a stop token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch

from finetune.export.load_model import LoadedModel
from finetune.export.sampling_options import SamplingOptions
from finetune.models import prompts
from finetune.models.lora_adapters import transformer
from finetune.utils.errors import DataError


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
    encoded = opened.task.rows.reads_source and isinstance(prompt, str) and not chat
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
    stream = _Stream(tokenizer, write)
    generate_tokens(opened, [ids], replace(options, max_new_tokens=room), encoded=encoded, streamer=stream)
    return stream.written


def generate_tokens(
    opened: LoadedModel,
    ids: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    encoded: bool = False,
    streamer: Any = None,
) -> list[list[int]]:
    """Returns the tokens behind each of several prompts of one length, without the token that ends a text.

    Args:
        encoded: True if an encoder reads the prompts.
        streamer: Of transformers, for a single prompt; gets each token as it comes.
    """
    network: Any = transformer(opened.network)
    tokenizer, sampled = opened.tokenizer, options.temperature > 0
    paddings = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    stops = prompts.stop_tokens(network.generation_config, tokenizer, opened.ends)
    inputs = torch.tensor(ids, device=opened.device)
    torch.manual_seed(options.seed)
    with torch.no_grad():
        written = network.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=options.max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=next(token for token in paddings if token is not None),
            decoder_start_token_id=prompts.decoder_start(network) if encoded else None,
            streamer=streamer,
            # All are given: whatever the model's own generation config says of sampling must not mix in.
            do_sample=sampled,
            temperature=options.temperature if sampled else None,
            top_k=(options.top_k or 0) if sampled else None,
            top_p=(options.top_p or 1.0) if sampled else None,
            num_beams=1,
            repetition_penalty=1.0,
        )
    begin = 1 if encoded else inputs.shape[1]
    return [[*takewhile(lambda token: token not in stops, row[begin:])] for row in written.tolist()]
