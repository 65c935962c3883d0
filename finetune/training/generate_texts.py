"""Generates texts with a model in training, under any backend: answers to the recipe's prompts, and its samples."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.config.recipe_schema import ChatSection, Recipe, SampleSection
from finetune.distributed.backend import Backend
from finetune.models.forward_wrapper import without_training
from finetune.models.prompts import text_tokens, turn_tokens
from finetune.tasks.causal_lm import next_token_logits
from finetune.utils.to_device import tensor_to_device


def generate(
    backend: Backend,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    longest: int,
    max_new_tokens: int,
    ends: Collection[int],
    stopping: Callable[[], bool] = lambda: False,
    pick: Callable[[torch.Tensor], int] = lambda logits: int(logits.argmax()),
    slides: bool = False,
) -> list[list[int]] | None:
    """Returns the tokens picked behind each prompt, one after the other, without the token that ends a text.

    Every rank must call it; each runs the same number of forward passes, since sharded backends gather weights in them.
    A pass has one prompt: so no text depends on what is computed beside it, nor on the number of ranks.

    Args:
        longest: Most tokens of a prompt and its text together, of which the network sees as many.
        ends: Tokens that end a text.
        stopping: Returns True if this rank was asked to stop.
        pick: Chooses a token by the logits behind a row, (V,); the likeliest by default.
        slides: Goes on behind `longest` tokens, of which the first fall out of view.

    Returns:
        Tokens by prompt, the same on every rank; None if a rank was asked to stop.
    """
    # One more than each token, and 0 where there is none.
    written = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64)
    first = backend.mesh.average_rank
    with without_training(model):
        for number in range(first, len(prompts) + first, backend.mesh.average_size):
            row = list(prompts[number]) if number < len(prompts) else []
            kept: dict[str, Any] = {}
            while True:
                told = torch.tensor([float(bool(row)), float(stopping())], device=backend.device)
                unfinished, stop = backend.all_reduce_sum(told).tolist()
                if stop:
                    return None
                if not unfinished:
                    break
                # Who has finished goes along with the others.
                ids = tensor_to_device(torch.tensor([row[-longest:] or prompts[0][:1]]), backend.device)
                score = partial(next_token_logits, kept=kept if 0 < len(row) <= longest else {})
                (logits,) = backend.evaluate_batches(model, score, [{"input_ids": ids}])
                if not row:
                    continue
                token, place = pick(logits[0]), len(row) - len(prompts[number])
                row.append(token)
                if token not in ends and backend.mesh.counts_loss:
                    written[number, place] = token + 1
                if token in ends or place + 1 == max_new_tokens or (len(row) == longest and not slides):
                    row = []
    gathered: list[list[int]] = backend.all_reduce_sum(written.to(backend.device)).tolist()
    return [[token - 1 for token in row if token] for row in gathered]


def decode_text(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Returns a text, decoded behind its prompt: alone, the first word of some tokenizers loses its space."""
    start = tokenizer.decode(before, skip_special_tokens=True)
    return str(tokenizer.decode([*before, *ids], skip_special_tokens=True)[len(start) :].strip())


def sample_prompt(section: SampleSection, chat: ChatSection | None, tokenizer: Any) -> list[int]:
    """Returns tokens of a sample's prompt: a text's beginning, or a user's turn, where the recipe learns conversations.

    Raises:
        DataError: If there is nothing to begin with, or the chat template refuses the turn.
    """
    if chat is None:
        return text_tokens(tokenizer, section.prompt)
    return turn_tokens(tokenizer, section.prompt, chat.template_args)


def sample_text(backend: Backend, model: nn.Module, recipe: Recipe, tokenizer: Any, taught: Sequence[int]) -> str:
    """Writes one text after the prompt of the recipe's `sample` section; every rank must call it.

    Args:
        taught: The tokens that learned answers end in.
    """
    section = recipe.sample
    assert section is not None
    ids = sample_prompt(section, recipe.chat, tokenizer)
    generator = torch.Generator().manual_seed(recipe.seed)

    def pick(logits: torch.Tensor) -> int:
        if section.temperature == 0:
            return int(logits.argmax())
        logits = logits.cpu() / section.temperature
        if section.top_k is not None and section.top_k < logits.numel():
            logits[logits < logits.topk(section.top_k).values[-1]] = -torch.inf
        return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))

    found = generate(
        backend,
        model,
        [ids],
        longest=recipe.data.sequence_length,
        max_new_tokens=section.max_new_tokens,
        ends={tokenizer.eos_token_id, *taught},
        pick=pick,
        slides=True,
    )
    assert found is not None
    return str(tokenizer.decode([*ids, *found[0]], skip_special_tokens=True)).strip()
