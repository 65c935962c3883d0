"""Causal language modelling: the next token of each token. Letters as in `task`."""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from finetune.config.recipe_schema import Recipe
from finetune.distributed.strategies import sequence
from finetune.models import attention, chunked_loss, lora_adapters
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.tasks.task import Batch, TaskData
from finetune.tasks.task_parts import build_task_data, transformers_task


def _build_config(recipe: Recipe, ready: TaskData | None) -> PretrainedConfig:
    tokenizer = ready.tokenizer if ready else None
    return resolve_model_config(recipe, tokenizer=tokenizer, vocab_size=recipe.tokenizer.vocab_size)


def causal_lm_logits(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Scores of the next token, (B, T, V), in the dtype that the network computes in.

    No attention mask, and no cache: transformers tells packed documents apart by their restarting positions,
    and only if it is given neither. Attention that takes one document at a time is told where they begin.
    """
    return _outputs(network, batch).logits  # type: ignore[no-any-return]


# With a cache, BLT and xLSTM fail, Bamba and, behind its window, Moshi choose other tokens. Source: architectures
# of transformers 5.23 in a tiny size, each token compared with that of a pass without a cache.
_UNCACHED = {"bamba", "blt", "moshi", "xlstm"}


def next_token_logits(network: nn.Module, batch: Batch, *, kept: dict[str, Any]) -> torch.Tensor:
    """Returns scores of the token behind one row, (1, V), in fp32.

    Args:
        kept: Empty at first; then the keys and values of the tokens before, if the network hands them out, so that it
            is only given the last token.
    """
    inner = lora_adapters.transformer(network)
    cached = inner is not None and inner.config.model_type not in _UNCACHED
    ids = batch["input_ids"][:, -1:] if kept else batch["input_ids"]
    told = attention.document_arguments(inner, {"input_ids": ids})
    if "position_ids" in told:
        told["position_ids"] = told["position_ids"] + batch["input_ids"].shape[1] - ids.shape[1]
    outputs = network(input_ids=ids, use_cache=cached, **told, **kept)
    if getattr(outputs, "past_key_values", None) is not None:
        kept["past_key_values"] = outputs.past_key_values
    return outputs.logits[:, -1].float()  # type: ignore[no-any-return]


def _outputs(network: nn.Module, batch: Batch) -> Any:
    positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    told = attention.document_arguments(lora_adapters.transformer(network), batch)
    return network(input_ids=batch["input_ids"], use_cache=False, **positions, **told)


def _loss_sum(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Targets are shifted already. Where rows are split over ranks, the loss is that of this rank's part."""
    batch = sequence.split(batch, getattr(network, "row_group", None))
    inner = lora_adapters.transformer(network)
    fused = chunked_loss.loss_head(inner)
    if fused is None:
        return chunked_loss.plain_loss(causal_lm_logits(network, batch), batch["targets"])
    fused.targets = batch["targets"].flatten()
    try:
        outputs = _outputs(network, batch)
    finally:
        fused.targets = None
    # A copy, not a view: wrappers that shard warn of views that leave a module.
    return outputs.logits.reshape(()).clone()  # type: ignore[no-any-return]


CAUSAL_LM = transformers_task(
    NEXT_TOKEN, _build_config, build_data=build_task_data, loss_sum=_loss_sum, text=True, splits_rows=True
)
