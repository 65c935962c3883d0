"""Samples text from a model in training, under any backend."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.config.recipe_schema import ChatSection, Recipe, SampleSection
from finetune.distributed.backend import Backend
from finetune.models import prompts
from finetune.training.generate_answers import generate


def prompt_tokens(section: SampleSection, chat: ChatSection | None, tokenizer: Any) -> list[int]:
    """Returns tokens of a sample's prompt: a text's beginning, or a user's turn, where the recipe learns conversations.

    Raises:
        DataError: If there is nothing to begin with, or the chat template refuses the turn.
    """
    if chat is None:
        return prompts.text_tokens(tokenizer, section.prompt)
    return prompts.turn_tokens(tokenizer, section.prompt, chat.template_args)


def sample_text(backend: Backend, model: nn.Module, recipe: Recipe, tokenizer: Any, taught: Sequence[int]) -> str:
    """Writes one text after the prompt of the recipe's `sample` section; every rank must call it.

    Args:
        taught: The tokens that learned answers end in.
    """
    section = recipe.sample
    assert section is not None
    ids = prompt_tokens(section, recipe.chat, tokenizer)
    found = generate(
        backend,
        model,
        [ids],
        longest=recipe.data.sequence_length,
        max_new_tokens=section.max_new_tokens,
        ends={tokenizer.eos_token_id, *taught},
        pick=partial(_pick, section=section, generator=torch.Generator().manual_seed(recipe.seed)),
        slides=True,
    )
    assert found is not None
    return str(tokenizer.decode([*ids, *found[0]], skip_special_tokens=True)).strip()


def _pick(logits: torch.Tensor, section: SampleSection, generator: torch.Generator) -> int:
    if section.temperature == 0:
        return int(logits.argmax())
    logits = logits.cpu() / section.temperature
    if section.top_k is not None and section.top_k < logits.numel():
        logits[logits < logits.topk(section.top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
