"""Reward models: a classifier with one number, learned from pairs of answers. Letters as in `objectives`.

A decoder scores at the last token that is not the padding token, as transformers does it, whichever side rows are
padded on. Where the padding token is the end of text, that is the token before the end.
"""

import torch
from torch import nn
from transformers import PretrainedConfig

from finetune.config.recipe_schema import PreferenceSection, Recipe
from finetune.data.rows.kinds import scored_pairs
from finetune.tasks.build_task import transformers_task
from finetune.tasks.classification import HEAD, class_scores
from finetune.tasks.preferences import objectives
from finetune.tasks.preferences.objectives import Pair
from finetune.tasks.regression import number_config
from finetune.tasks.task import Batch, Task, TaskData, Term
from finetune.utils.errors import RecipeError


def reward(recipe: Recipe) -> Task:
    """Bradley-Terry's loss of two scores and, with `preference.centering`, their squared sum."""
    section = recipe.preference or PreferenceSection()

    def loss_sum(network: nn.Module, batch: Batch) -> torch.Tensor:
        scores = Pair(*class_scores(network, batch).view(2, -1))
        chosen, rejected = (half.detach() for half in scores)
        figures = ((chosen > rejected).float(), chosen - rejected, (chosen + rejected) / 2)
        values = (objectives.reward(scores, batch["margin"]), objectives.centering(scores), *figures)
        return torch.stack([value.sum() for value in values])

    terms = (Term("reward", "pairs"), Term("centering", "pairs", section.centering or 0.0))
    figures = tuple(Term(name, "pairs", 0.0) for name in scored_pairs.FIGURES)
    return transformers_task(
        HEAD, _build_config, scored_pairs.KIND, loss_sum=loss_sum, terms=(*terms, *figures), scores=class_scores
    )


def _build_config(recipe: Recipe, ready: TaskData | None) -> PretrainedConfig:
    tokenizer = ready.tokenizer if ready else None
    first = getattr(tokenizer, "cls_token_id", None)
    if first is not None and first != tokenizer.bos_token_id:  # type: ignore[union-attr]
        raise RecipeError(
            f"model: {recipe.model.name or 'its tokenizer'} scores a text at {tokenizer.cls_token}, its first token, "  # type: ignore[union-attr]
            "which answers do not have. Name a decoder, which scores at the last one, such as a chat model."
        )
    return number_config(recipe, ready)
