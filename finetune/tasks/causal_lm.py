"""Causal language modelling: the next token of each token. Letters as in `task`.

Beside the task, checks on the scores of a few tokens that a network sees neither ahead nor other documents. Wherever
a network is trained or scored, these say whether the figures mean anything.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.kinds import documents
from finetune.distributed.strategies import sequence
from finetune.models import attention, chunked_loss, lora_adapters
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.tasks import seq2seq
from finetune.tasks.build_task import transformers_task
from finetune.tasks.task import Batch, TaskData


def _build_config(recipe: Recipe, ready: TaskData | None) -> PretrainedConfig:
    tokenizer = ready.tokenizer if ready else None
    size = recipe.tokenizer.vocab_size
    return resolve_model_config(
        recipe, tokenizer=tokenizer, vocab_size=size, advice=f"Set task.name to `{seq2seq.NAME}`. "
    )


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
    arguments = attention.document_arguments(inner, {"input_ids": ids})
    if "position_ids" in arguments:
        arguments["position_ids"] = arguments["position_ids"] + batch["input_ids"].shape[1] - ids.shape[1]
    outputs = network(input_ids=ids, use_cache=cached, **arguments, **kept)
    if getattr(outputs, "past_key_values", None) is not None:
        kept["past_key_values"] = outputs.past_key_values
    return outputs.logits[:, -1].float()  # type: ignore[no-any-return]


def _outputs(network: nn.Module, batch: Batch) -> Any:
    positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    arguments = attention.document_arguments(lora_adapters.transformer(network), batch)
    return network(input_ids=batch["input_ids"], use_cache=False, **positions, **arguments)


def _loss_sum(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> torch.Tensor:
    """Targets are shifted already. Where rows are split over ranks, the loss is that of this rank's part."""
    batch = sequence.split(batch, getattr(network, "row_group", None))
    if "weights" in batch:
        losses = head_values(network, batch, per_token=True, label_smoothing=label_smoothing)
        return (losses.flatten() * batch["weights"].flatten()).sum()
    # A copy, not a view: wrappers that shard warn of views that leave a module.
    return head_values(network, batch, label_smoothing=label_smoothing).reshape(()).clone()


def token_losses(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the cross-entropy of each target, (B, T) in fp32, 0 where there is none: -log of its probability.

    Where rows are split over ranks, that of this rank's part.
    """
    return token_values(network, batch)[..., 0]


def token_values(network: nn.Module, batch: Batch, objective: chunked_loss.Objective | None = None) -> torch.Tensor:
    """Returns the cross-entropy of each target, or an objective's values, (B, T, J); else as `token_losses`."""
    batch = sequence.split(batch, getattr(network, "row_group", None))
    return head_values(network, batch, objective, per_token=True).reshape(*batch["targets"].shape, -1)


def head_values(
    network: nn.Module,
    batch: Batch,
    objective: chunked_loss.Objective | None = None,
    *,
    per_token: bool = False,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns the cross-entropy of targets or an objective's values, in fp32: summed, (1, 1, J), or (1, B * T, J)."""
    fused, targets = chunked_loss.loss_head(lora_adapters.transformer(network)), batch["targets"]
    if fused is None:
        options: dict[str, Any] = {"per_token": per_token, "label_smoothing": label_smoothing}
        plain = partial(chunked_loss.plain_loss, causal_lm_logits(network, batch), targets, **options)
        values = plain() if objective is None else objective.opened(lambda one: plain(objective=one))
        return values.reshape(1, targets.numel() if per_token else 1, -1)
    fused.targets, fused.per_token, fused.label_smoothing = targets.flatten(), per_token, label_smoothing
    fused.objective = objective
    try:
        return _outputs(network, batch).logits  # type: ignore[no-any-return]
    finally:
        fused.targets = None


def visit_head(network: nn.Module, batch: Batch, visitor: Callable[[Any], None]) -> None:
    """Calls a function, inside a network's head, with its logits for slices of tokens; see `chunked_loss.LogitsOf`."""
    head = chunked_loss.loss_head(lora_adapters.transformer(network))
    if head is None:
        visitor(causal_lm_logits(network, batch).float().flatten(0, 1))
        return
    head.visitor = visitor
    try:
        _outputs(network, batch)
    finally:
        head.visitor = None


CAUSAL_LM = transformers_task(
    NEXT_TOKEN, _build_config, documents.KIND, loss_sum=_loss_sum, weighs=True, splits_rows=True
)


Scores = Callable[[Batch, Callable[[nn.Module, Batch], torch.Tensor]], torch.Tensor]
"""Runs a function of network and batch, which returns logits, on the network; returns (1, T, V) in fp32."""


def tolerances(precision: str) -> tuple[float, float]:
    """Returns the most that scores may move which should not, and may differ in a packed row from those of a document
    alone, which other kernels compute.

    Computed alike, scores move by nothing but in experts, where tokens meet: measured at most 3e-7 in fp32, where the
    least leak was 3e-5.
    """
    return (1e-5, 1e-4) if precision == "fp32" else (1e-3, 5e-2)


def sees_ahead(network: PreTrainedModel, scores: Scores, device: torch.device) -> torch.Tensor:
    """Returns how far tokens move the scores of those before them, as a share of the largest score: (1,)."""
    ids = ordinary_tokens(network, 8, device)
    changed = torch.cat([ids[:, :4], _repeat_last(ids, 4)], 1)
    one, two = (scores({"input_ids": x}, causal_lm_logits) for x in (ids, changed))
    return _difference(one[:, :4], two[:, :4])


def sees_documents(
    network: PreTrainedModel | None, scores: Scores, device: torch.device, sequence_length: int
) -> Iterator[torch.Tensor]:
    """Two documents in one row: how far they are from being computed as if each were alone.

    Architectures that do not read restarting positions, or that carry a state from token to token, leak without a word;
    others count positions from another number than 0.

    Yields:
        How far a change in the first moves the second's scores, as a share of the largest score: (1,). Then, of a
        network of transformers, how far the second's are from its own alone, of which the network is told nothing.
    """
    length = max(1, min(8, sequence_length // 2))
    ids = ordinary_tokens(network, 2 * length, device)
    changed = torch.cat([_repeat_last(ids, length), ids[:, length:]], 1)
    cu_seqlens = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=device)
    boundaries = {"position_ids": torch.arange(length, device=device).repeat(2)[None], "cu_seqlens": cu_seqlens}
    one, two = (scores({"input_ids": x, **boundaries}, causal_lm_logits)[:, length:] for x in (ids, changed))
    yield _difference(one, two)
    if network is not None:
        # In front, where nothing before it can be seen; by the network's own masks and positions.
        alone = scores(
            {"input_ids": ids.roll(length, 1)},
            lambda inner, batch: inner(input_ids=batch["input_ids"], use_cache=False).logits,
        )
        yield _difference(one, alone[:, :length])


def ordinary_tokens(network: PreTrainedModel | None, count: int, device: torch.device) -> torch.Tensor:
    """Returns tokens that mean nothing special to a network: (1, count)."""
    size = 7 if network is None else int(network.config.get_text_config().vocab_size)
    special = set(_special_tokens({} if network is None else network.config.to_dict()))
    ordinary = [token for token in range(min(size, 1000)) if token not in special][:7] or [0]
    return torch.tensor(ordinary, device=device)[torch.arange(count, device=device) % len(ordinary)][None]


def _repeat_last(ids: torch.Tensor, count: int) -> torch.Tensor:
    """Repeats the last token and again: in another order, they would be the same to attention without positions."""
    return ids[:, -1:].expand(-1, count)


def _special_tokens(config: dict[Any, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _special_tokens(value)
        elif isinstance(key, str) and key.endswith(("_id", "_ids", "_index")):
            yield from (x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, int))


def _difference(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The largest difference, as a share of the largest value: (1,)."""
    return ((one - two).abs().max() / one.abs().max().clamp(min=1e-6)).reshape(1)
