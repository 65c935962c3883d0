"""Samples text from a model in training, under any backend."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from finetune.config.recipe_schema import Recipe, SampleSection
from finetune.distributed.backend import Backend
from finetune.models import prompts
from finetune.tasks.causal_lm import causal_lm_logits
from finetune.training.evaluation import without_training


def _last_logits(network: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return causal_lm_logits(network, batch)[:, -1].float()


def prompt_tokens(recipe: Recipe, section: SampleSection, tokenizer: Any) -> list[int]:
    """Tokens of a sample's prompt: a text's beginning, or a user's turn, where the recipe learns conversations.

    Raises:
        DataError: If there is nothing to begin with, or the chat template refuses the turn.
    """
    if recipe.chat is None:
        return prompts.text_tokens(tokenizer, section.prompt)
    return prompts.turn_tokens(tokenizer, section.prompt, recipe.chat.template_args)


def sample_text(backend: Backend, model: nn.Module, recipe: Recipe, tokenizer: Any, taught: Sequence[int]) -> str:
    """Writes one text after the prompt of the recipe's `sample` section.

    Every rank must call it. Rank 0 picks each token and the others follow, so that all run the same number of
    forward passes and none waits for ever in a gather.

    Args:
        taught: The tokens that learned answers end in.
    """
    section, longest = recipe.sample, recipe.data.sequence_length
    assert section is not None
    ids = prompt_tokens(recipe, section, tokenizer)
    ends = {tokenizer.eos_token_id, *taught}
    generator = torch.Generator().manual_seed(recipe.seed)
    with without_training(model):
        for _ in range(section.max_new_tokens):
            # What is longer falls out of view.
            window = torch.tensor([ids[-longest:]], device=backend.device)
            (logits,) = backend.evaluate_batches(model, _last_logits, [{"input_ids": window}])
            token = torch.tensor([_pick(logits[0].cpu(), section, generator)], device=backend.device)
            ids.append(int(backend.broadcast(token).item()))
            if ids[-1] in ends:
                break
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _pick(logits: torch.Tensor, section: SampleSection, generator: torch.Generator) -> int:
    if section.temperature == 0:
        return int(logits.argmax())
    logits = logits / section.temperature
    if section.top_k is not None and section.top_k < logits.numel():
        logits[logits < logits.topk(section.top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
