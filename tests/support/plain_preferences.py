"""DPO and KTO as their papers have them, with padded rows, whole logits and torch alone: what runs are compared with.

An answer's log-probability is the sum over its own tokens. Letters: `P` pairs, `B` rows of a batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import logsigmoid

Ids = Sequence[int]


class Pair(NamedTuple):
    """Token ids of a prompt and two answers."""

    prompt: Ids
    chosen: Ids
    rejected: Ids


class Labelled(NamedTuple):
    """Token ids of a prompt, its answer, and the answer to another prompt, by which the baseline is estimated."""

    prompt: Ids
    completion: Ids
    mismatched: Ids
    desirable: bool


class Trained(NamedTuple):
    """The loss of each step before its update, and the weights after the last."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def log_probabilities(model: nn.Module, rows: Sequence[tuple[Ids, Ids]], *, aligned: bool = False) -> torch.Tensor:
    """Returns the sums of log-probabilities of answers, (B,) fp32, given prompts and answers.

    If `aligned`, the means over tokens of log p less log sum p^2 over the vocabulary.
    """
    ids = torch.zeros(len(rows), max(len(prompt) + len(answer) for prompt, answer in rows), dtype=torch.long)
    attended, learned = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(rows):
        size = len(prompt) + len(answer)
        ids[row, :size] = torch.tensor([*prompt, *answer])
        attended[row, :size], learned[row, len(prompt) : size] = 1, 1
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits.float()
    each = logits[:, :-1].log_softmax(-1)
    logs = each.gather(-1, ids[:, 1:, None])[..., 0]
    if aligned:
        return ((logs - (each.exp() ** 2).sum(-1).log()) * learned[:, 1:]).sum(1) / learned.sum(1)
    return (logs * learned[:, 1:]).sum(1)


def both_answers(
    model: nn.Module, batch: Sequence[Pair] | Sequence[Labelled], *, aligned: bool = False
) -> torch.Tensor:
    """Returns (2, B): the sums of each row's first and of its second answer; see `log_probabilities`."""
    rows = [(row[0], row[number]) for number in (1, 2) for row in batch]
    return log_probabilities(model, rows, aligned=aligned).view(2, -1)


def train_dpo(
    model: nn.Module,
    batches: Sequence[Sequence[Pair]],
    beta: float = 0.1,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    *,
    sft_weight: float = 0.0,
    weighted: bool = False,
    **optimizer: Any,
) -> Trained:
    """Trains on global batches of pairs; the reference is the model as it comes.

    Args:
        model: A causal language model of transformers, without dropout.
        batches: The pairs of each step.
        beta: Scale of rewards.
        loss: Losses (P,) of chosen and rejected log ratios (P,); without, arXiv:2305.18290, eq. 7.
        sft_weight: Weight of the mean NLL of the batch's chosen tokens.
        weighted: Weights each pair by the policy's alignment, without gradients (arXiv:2406.11827, eq. 2).
        **optimizer: Arguments of AdamW.
    """
    loss = loss or (lambda chosen, rejected: -logsigmoid(beta * (chosen - rejected)))
    with torch.no_grad():
        reference = [both_answers(model, batch) for batch in batches]

    def batch_loss(step: int) -> torch.Tensor:
        sums = both_answers(model, batches[step])
        each = loss(*(sums - reference[step]))
        if weighted:
            each = each * both_answers(model, batches[step], aligned=True).sum(0).exp().detach()
        pairs = each.sum() / len(batches[step])
        return pairs - sft_weight * sums[0].sum() / sum(len(pair.chosen) for pair in batches[step])

    return _train(model, len(batches), batch_loss, optimizer)


def train_kto(
    model: nn.Module,
    batches: Sequence[Sequence[Labelled]],
    beta: float = 0.1,
    weights: tuple[float, float] = (1.0, 1.0),
    **optimizer: Any,
) -> Trained:
    """Trains on global batches of answers with labels, whose baseline is theirs. Source: arXiv:2402.01306, eq. 8."""
    with torch.no_grad():
        reference = [both_answers(model, batch) for batch in batches]

    def batch_loss(step: int) -> torch.Tensor:
        total, (ratios, others) = torch.zeros(()), both_answers(model, batches[step]) - reference[step]
        z = max(0.0, others.detach().mean().item())
        for ratio, row in zip(ratios, batches[step], strict=True):
            value = beta * (ratio - z if row.desirable else z - ratio)
            total = total + weights[not row.desirable] * (1 - value.sigmoid())
        return total / len(batches[step])

    return _train(model, len(batches), batch_loss, optimizer)


def _train(model: nn.Module, steps: int, batch_loss: Callable[[int], torch.Tensor], keys: dict[str, Any]) -> Trained:
    optimizer, losses = torch.optim.AdamW(model.parameters(), **keys), []
    for step in range(steps):
        value = batch_loss(step)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    return Trained(losses, {name: weight.detach().clone() for name, weight in model.state_dict().items()})
