"""Preferences of pairs of answers: DPO with its losses, CPO, SimPO and ORPO. Letters as in `objectives`.

A row holds both answers to a prompt, each behind the prompt, as two documents that do not see each other. Their
log-probabilities are sums over the answers' tokens; losses of pairs are divided by the pairs of the global batch, and
`sft` by its chosen tokens, whatever ranks and micro-batches compute.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.config.preference_losses import SORTED_LOSSES
from finetune.config.recipe_schema import PreferenceSection, Recipe
from finetune.data.rows.kinds import answer_pairs
from finetune.data.rows.packed_rows import IGNORED
from finetune.distributed.strategies import sequence
from finetune.models.chunked_loss import Objective
from finetune.tasks.build_task import transformers_task
from finetune.tasks.causal_lm import CAUSAL_LM, token_values
from finetune.tasks.preferences import objectives
from finetune.tasks.preferences.objectives import Pair
from finetune.tasks.task import Batch, Reference, Task, Term

_TOKENS = "chosen_tokens"
_PAIRS = "pairs"


def sums(network: nn.Module, batch: Batch, ld_alpha: float | None = None, *, weighted: bool = False) -> torch.Tensor:
    """Returns the log-probabilities of both answers of each row, summed over their tokens: (B, 2) in fp32.

    Where pairs are `weighted`, also the sums that `objectives.policy_weights` takes, without gradients: (B, 4). Where
    rows are split over ranks, sums are over those of this rank's part.

    Args:
        ld_alpha: What tokens beyond the length of the shorter answer count; None for 1. LLaMA-Factory weights those of
            the policy only. Source: LD-DPO, arXiv:2409.06411.
    """
    losses, *aligned = token_values(network, batch, Objective(_aligned) if weighted else None).unbind(2)
    targets = batch["targets"]
    places = torch.arange(targets.shape[1], device=targets.device)
    rejected = places >= batch["rejected_from"][:, None]
    halves = torch.stack([~rejected, rejected], dim=1)
    counted = halves.float()
    if ld_alpha is not None:
        number = ((targets != IGNORED)[:, None] & halves).cumsum(2)
        counted = torch.where(number > batch["learned"].amin(1)[:, None, None], ld_alpha * counted, counted)
    counted, halves = (sequence.part_of_row(each, network) for each in (counted, halves))
    both = -(losses[:, None] * counted).sum(2)
    return torch.cat([both, *((one[:, None] * halves).sum(2) for one in aligned)], dim=1)


def _aligned(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns -log p of each target, and log p - log sum p^2 over the vocabulary: (n, 2)."""
    logs = logits.log_softmax(-1)
    of_target = logs.gather(-1, targets[:, None])[:, 0]
    return torch.stack((-of_target, (of_target - (2 * logs.detach()).logsumexp(-1)).detach()), dim=1)


def dpo(recipe: Recipe) -> Task:
    """Losses of log ratios to a reference; see `objectives.pair_loss`."""
    section = _section(recipe)
    names, summed = section.loss or ("sigmoid",), partial(sums, ld_alpha=section.ld_alpha)
    options: dict[str, Any] = {
        "beta": section.beta,
        "label_smoothing": section.label_smoothing,
        "f_divergence": section.f_divergence,
        "f_alpha": section.f_alpha,
        "discopop_tau": section.discopop_tau,
    }

    def losses(policy: Pair, batch: Batch) -> list[torch.Tensor]:
        reference, tokens = _pair(batch["reference"]), _pair(batch["learned"])
        window: dict[str, Any] = {"window": batch["window"], "rows": batch["window_rows"]} if "window" in batch else {}
        each = [objectives.pair_loss(name, policy, reference, tokens, **options, **window) for name in names]
        if section.use_weighting:
            weights = objectives.policy_weights(_pair(batch["aligned"]), tokens)
            each = [loss if name == "sft" else weights * loss for name, loss in zip(names, each, strict=True)]
        ratios = policy.minus(reference)
        return [*each, *_rewards(Pair(*(section.beta * ratio for ratio in ratios)))]

    def window(network: nn.Module, batch: Batch) -> torch.Tensor:
        def values(sums: torch.Tensor) -> torch.Tensor:
            return objectives.window_values(_pair(sums), _pair(batch["reference"]))

        return sequence.share_of(values, summed(network, batch), network)

    weights = section.loss_weights or (1.0,) * len(names)
    terms = [_term(name, weight) for name, weight in zip(names, weights, strict=True)]
    sorts = bool({*names} & {*SORTED_LOSSES})
    reference = Reference(summed, section.ld_alpha)
    of_policy = partial(summed, weighted=section.use_weighting)
    return _task(terms, losses, answer_pairs.REWARDS, of_policy, window=window if sorts else None, reference=reference)


def cpo(recipe: Recipe) -> Task:
    """Losses of log-probabilities without a reference, and `sft`; see `objectives.without_reference`."""
    section = _section(recipe)
    names = section.loss or ("sigmoid",)

    def losses(policy: Pair, batch: Batch) -> list[torch.Tensor]:
        none, tokens = Pair(*(torch.zeros_like(half) for half in policy)), _pair(batch["learned"])
        each = [
            objectives.without_reference(policy, section.beta, 0.0, section.label_smoothing)
            if name == "sigmoid"
            else objectives.pair_loss(name, policy, none, tokens, beta=section.beta)
            for name in names
        ]
        return [*each, -policy.chosen, *_rewards(Pair(*(section.beta * half for half in policy)))]

    weights = section.loss_weights or (1.0,) * len(names)
    terms = [_term(name, weight) for name, weight in zip(names, weights, strict=True)]
    return _task([*terms, _sft(section, 1.0)], losses, answer_pairs.REWARDS)


def simpo(recipe: Recipe) -> Task:
    """The loss of mean log-probabilities with a margin, and `sft` if it is asked for."""
    section = _section(recipe)

    def losses(policy: Pair, batch: Batch) -> list[torch.Tensor]:
        means = policy.over(_pair(batch["learned"]))
        loss = objectives.without_reference(means, section.beta, section.gamma, section.label_smoothing)
        return [loss, -policy.chosen, *_rewards(Pair(*(section.beta * half for half in means)))]

    return _task([_term("simpo", 1.0), _sft(section, 0.0)], losses, answer_pairs.REWARDS)


def orpo(recipe: Recipe) -> Task:
    """The odds ratio of both answers, and `sft`; see `objectives.orpo`."""
    section = _section(recipe)

    def losses(policy: Pair, batch: Batch) -> list[torch.Tensor]:
        tokens = _pair(batch["learned"])
        loss, log_odds = objectives.orpo(policy, tokens, section.beta)
        rewards = Pair(*(section.beta * half for half in policy.over(tokens)))
        return [-policy.chosen, loss, *_rewards(rewards), log_odds.detach()]

    terms = [_sft(section, 1.0), _term("odds_ratio", 1.0)]
    return _task(terms, losses, (*answer_pairs.REWARDS, "log_odds_chosen"))


def _section(recipe: Recipe) -> PreferenceSection:
    return recipe.preference or PreferenceSection()


def _pair(values: torch.Tensor) -> Pair:
    return Pair(*values.unbind(1)[:2])


def _term(name: str, weight: float) -> Term:
    return Term(name, _TOKENS if name == "sft" else _PAIRS, weight)


def _sft(section: PreferenceSection, default: float) -> Term:
    return Term("sft", _TOKENS, default if section.sft_weight is None else section.sft_weight)


def _rewards(rewards: Pair) -> list[torch.Tensor]:
    chosen, rejected = (half.detach() for half in rewards)
    return [chosen, rejected, (chosen > rejected).float(), chosen - rejected]


def _task(terms: list[Term], losses: Any, figures: tuple[str, ...], summed: Any = sums, **fields: Any) -> Task:
    """A task of pairs.

    Args:
        terms: Those that are learned, in the order in which `losses` returns them.
        losses: Given both answers' sums and the batch, the values of each pair, (B,) each: of the terms, and of
            `figures`.
    """
    # Without a weight it is a figure like others; those that are learned come first.
    logged = [*figures, *answer_pairs.LOGPS]
    every = [*terms, *(Term(name, _PAIRS, 0.0) for name in logged)]
    order = sorted(range(len(every)), key=lambda index: every[index].weight == 0)

    def loss_sum(network: nn.Module, batch: Batch) -> torch.Tensor:
        def sums(of_rows: torch.Tensor) -> torch.Tensor:
            policy = _pair(of_rows)
            values = [*losses(policy, {**batch, "aligned": of_rows[:, 2:]}), *(half.detach() for half in policy)]
            values.append((policy.chosen > policy.rejected).float())
            return torch.stack([values[index].sum() for index in order])

        return sequence.share_of(sums, summed(network, batch), network)

    assert CAUSAL_LM.head is not None
    assert CAUSAL_LM.build_config is not None
    return transformers_task(
        CAUSAL_LM.head,
        CAUSAL_LM.build_config,
        answer_pairs.KIND,
        loss_sum=loss_sum,
        terms=tuple(every[index] for index in order),
        splits_rows=True,
        **fields,
    )
