"""Preferences of single answers, each with a label: KTO, and its form without a baseline. Letters as in `objectives`.

A row is a prompt with its answer. Losses are divided by the rows of the global batch, over which the baseline is
estimated, too: ranks and micro-batches change nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from finetune.config.recipe_schema import PreferenceSection, Recipe
from finetune.data.rows.kinds import labelled_answers
from finetune.data.rows.kinds.row_kind import TokenRows
from finetune.data.rows.packed_rows import IGNORED
from finetune.distributed.strategies import sequence
from finetune.tasks.build_task import transformers_task
from finetune.tasks.causal_lm import CAUSAL_LM, token_losses
from finetune.tasks.preferences import objectives
from finetune.tasks.task import Batch, Reference, Task, TaskData, Term
from finetune.utils.errors import DataError

_HALVES = {"chosen": "desirable", "rejected": "undesirable"}


def _sums(network: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each row's answer, summed over its tokens: (B,) in fp32.

    Where rows are split over ranks, over those of this rank's part.
    """
    return -token_losses(network, {"input_ids": ids, "targets": targets}).sum(1)


def _reference(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the sums of each row's own and of its mismatched answer, (B, 2), by one forward pass."""
    both = []
    for own, other, fill in (("input_ids", "mismatched_ids", 0), ("targets", "mismatched_targets", IGNORED)):
        wide = max(batch[own].shape[1], batch[other].shape[1])
        each = (functional.pad(batch[name], (0, wide - batch[name].shape[1]), value=fill) for name in (own, other))
        both.append(torch.cat([*each]))
    return _sums(network, *both).view(2, -1).T


def _window(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the log ratio of each row's mismatched answer, (B, 1)."""
    policy = _sums(network, batch["mismatched_ids"], batch["mismatched_targets"])
    return sequence.share_of(lambda sums: (sums - batch["reference"][:, 1])[:, None], policy, network)


def kto(recipe: Recipe) -> Task:
    """Losses of log ratios to a reference; see `objectives.kto`."""
    section = recipe.preference or PreferenceSection()
    names, factors = section.loss or ("kto",), (section.desirable_weight, section.undesirable_weight)
    weights = section.loss_weights or (1.0,) * len(names)
    terms = [Term(name, "answers", weight) for name, weight in zip(names, weights, strict=True)]
    terms += [Term(f"{of}/{half}", count, 0.0) for half, count in _HALVES.items() for of in ("rewards", "logps")]
    terms += [Term("rewards/margins", "desirable", 0.0, less="rewards/rejected")]
    terms += [Term("kl", "answers", 0.0)] if "kto" in names else []

    def values(batch: Batch, policy: torch.Tensor) -> torch.Tensor:
        ratios, none, desirable = policy - batch["reference"][:, 0], policy.new_zeros(()), batch["desirable"].bool()
        z = objectives.baseline(batch["window"]) if "window" in batch else none
        baselines = {"kto": z, "apo_zero_unpaired": none}
        sums = {n: objectives.kto(ratios, desirable, baselines[n], section.beta, factors).sum() for n in names}
        figures = objectives.answer_figures(policy, section.beta * ratios, desirable)
        sums |= {name: total for name, (total, _) in figures.items()}
        sums |= {"rewards/margins": sums["rewards/chosen"], "kl": z * len(policy)}
        return torch.stack([sums[term.name] for term in terms])

    def loss_sum(network: nn.Module, batch: Batch) -> torch.Tensor:
        policy = _sums(network, batch["input_ids"], batch["targets"])
        return sequence.share_of(partial(values, batch), policy, network)

    assert CAUSAL_LM.head is not None
    assert CAUSAL_LM.build_config is not None
    task = transformers_task(
        CAUSAL_LM.head,
        CAUSAL_LM.build_config,
        labelled_answers.KIND,
        loss_sum=loss_sum,
        terms=tuple(terms),
        window=_window if "kto" in names else None,
        splits_rows=True,
        reference=Reference(_reference),
    )
    return replace(task, build_data=partial(_build_data, task.build_data))


def _build_data(build: Callable[[Recipe, bool], TaskData], recipe: Recipe, quiet: bool) -> TaskData:
    data = build(recipe, quiet)
    count = len(data.train) if data.train is not None else 0
    if isinstance(data.train, TokenRows) and count in (desirable := data.train.values.sum(), count - desirable):
        raise DataError(
            f"data.train: all {count:,} answers are {'' if desirable else 'un'}desirable, and the loss compares both "
            "kinds. Add answers of the other one (`label`: true for a desirable answer, false for others)."
        )
    return data
