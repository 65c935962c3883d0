"""Sequence classification: one class a row. Letters as in `task`."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.kinds import classes
from finetune.models import lora_adapters
from finetune.models.heads import Head
from finetune.models.model_config import first_position, resolve_model_config
from finetune.tasks.build_task import transformers_task
from finetune.tasks.metrics import HITS, figures_of_classes
from finetune.tasks.task import Batch, Evaluation, TaskData
from finetune.utils.errors import RecipeError

NAME = "sequence_classification"
"""Its name in recipes."""

HEAD = Head("AutoModelForSequenceClassification", "SEQ_CLS", "text-classification")


def _build_config(recipe: Recipe, ready: TaskData | None) -> PretrainedConfig:
    config = class_config(recipe, ready, HEAD)
    if config.problem_type is not None:
        # The head may have learned several classes a document, or numbers.
        config.problem_type = "single_label_classification"
    if ready is not None and ready.tokenizer is not None:
        set_padding(config, ready.tokenizer)
    return config


def class_config(recipe: Recipe, ready: TaskData | None, head: Head) -> PretrainedConfig:
    """Returns the configuration of a network with a head for the data's classes, by their names.

    Raises:
        RecipeError: If the recipe's model cannot have it, or the number of classes is not known.
    """
    counted, asked = ready.num_labels if ready is not None else None, recipe.task.num_labels
    if counted is not None and asked is not None and counted > asked:
        raise RecipeError(f"task.num_labels is {asked}, but the data has {counted} classes. Set it to {counted}.")
    num_labels = asked or counted
    if num_labels is None:
        raise RecipeError("task.num_labels: how many classes there are is not known before the data is read; give it.")
    return resolve_model_config(
        recipe,
        head,
        tokenizer=ready.tokenizer if ready else None,
        vocab_size=recipe.tokenizer.vocab_size,
        num_labels=num_labels,
        label_names=ready.label_names if ready and len(ready.label_names) == num_labels else (),
    )


def set_padding(config: PretrainedConfig, tokenizer: Any) -> None:
    """Has a network know the token that fills rows.

    Decoders classify at the last token that is another one, whatever a model's config says. Where it says at which
    position rows begin, it stays.

    Raises:
        RecipeError: If there is none.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.pad_token_id is not None and first_position(config):
        return
    if tokenizer.pad_token_id is not None:
        config.pad_token_id = tokenizer.pad_token_id
    elif config.pad_token_id is None:
        raise RecipeError(
            f"tokenizer: the tokenizer has neither a padding token nor an end of text, and a {config.model_type} "
            "classifies at the last token that is no padding. Name a tokenizer with one of them as tokenizer.name."
        )


def class_scores(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Scores of the classes, (B, C), or of those of each token, (B, L, C), or the number, (B, 1), in fp32."""
    return network(**network_inputs(network, batch)).logits.float()  # type: ignore[no-any-return]


def network_inputs(network: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns what a classifier reads of a batch; type ids, where the architecture knows more than one type."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if "token_type_ids" in batch:
        inner = lora_adapters.transformer(network) or network
        known = "token_type_ids" in inspect.signature(inner.forward).parameters
        if known and getattr(inner.config, "type_vocab_size", 2) > 1:
            inputs["token_type_ids"] = batch["token_type_ids"]
    return inputs


def class_loss_sum(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> torch.Tensor:
    """Returns the cross-entropy of a network, summed over the batch's targets."""
    return class_loss(class_scores(network, batch), batch, label_smoothing)


def class_loss(scores: torch.Tensor, batch: Batch, label_smoothing: float = 0.0) -> torch.Tensor:
    """Returns the cross-entropy summed over the batch's targets, each with its weight if it has one.

    Args:
        label_smoothing: Share of the loss that is the mean over all classes, see `chunked_loss.plain_loss`.
    """
    scores, targets = scores.flatten(0, -2), batch["targets"].flatten()
    reduction = "none" if "weights" in batch else "sum"
    loss = functional.cross_entropy(scores, targets, reduction=reduction, label_smoothing=label_smoothing)
    return (loss * batch["weights"].flatten()).sum() if "weights" in batch else loss


def _evaluate(network: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    scores, targets = class_scores(network, batch), batch["targets"]
    predicted = scores.argmax(-1)
    sums = torch.stack((class_loss(scores, batch), (predicted == targets).sum().float()))
    return sums, torch.stack((predicted, targets), 1)


SEQUENCE_CLASSIFICATION = transformers_task(
    HEAD,
    _build_config,
    classes.KIND,
    loss_sum=class_loss_sum,
    evaluation=Evaluation(_evaluate, (HITS,), ("recall_macro",), figures_of_classes),
    scores=class_scores,
)
