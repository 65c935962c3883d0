"""Preferences of single answers, each with a label: KTO, and its form without a baseline. Letters as in `objectives`.

A row is a prompt with its answer. Losses are divided by the rows of the global batch, over which the baseline is
estimated, too: ranks and micro-batches change nothing.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from finetune.config.recipe_schema import PreferenceSection, Recipe
from finetune.data.rows.kinds import labelled_answers
from finetune.data.rows.kinds.row_kind import TokenRows
from finetune.data.rows.packed_rows import IGNORED
from finetune.tasks.build_task import build_task_data, transformers_task
from finetune.tasks.causal_lm import CAUSAL_LM, token_losses
from finetune.tasks.preferences import objectives
from finetune.tasks.task import Batch, Reference, Task, TaskData, Term
from finetune.utils.errors import DataError

_HALVES = {"chosen": "desirable", "rejected": "undesirable"}


def _sums(network: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each row's answer, summed over its tokens: (B,) in fp32."""
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
    return (policy - batch["reference"][:, 1])[:, None]


def kto(recipe: Recipe) -> Task:
    """Losses of log ratios to a reference; see `objectives.kto`."""
    section = recipe.preference or PreferenceSection()
    names, factors = section.loss or ("kto",), (section.desirable_weight, section.undesirable_weight)
    figures = [Term(f"{of}/{half}", count, 0.0) for half, count in _HALVES.items() for of in ("rewards", "logps")]
    margins = Term("rewards/margins", "desirable", 0.0, less="rewards/rejected")
    weights = section.loss_weights or (1.0,) * len(names)
    learned = [Term(name, "answers", weight) for name, weight in zip(names, weights, strict=True)]
    estimates = "kto" in names

    def loss_sum(network: nn.Module, batch: Batch) -> torch.Tensor:
        policy, desirable = _sums(network, batch["input_ids"], batch["targets"]), batch["desirable"].bool()
        ratios, none = policy - batch["reference"][:, 0], policy.new_zeros(())
        z = objectives.baseline(batch["window"]) if "window" in batch else none
        sums = {
            name: objectives.kto(ratios, desirable, z if name == "kto" else none, section.beta, factors).sum()
            for name in names
        }
        shown = objectives.answer_figures(policy, section.beta * ratios, desirable)
        sums |= {name: total for name, (total, _) in shown.items()}
        sums |= {"rewards/margins": sums["rewards/chosen"], "kl": z * len(policy)}
        return torch.stack([sums[term.name] for term in terms])

    terms = (*learned, *figures, margins, *([Term("kl", "answers", 0.0)] if estimates else []))
    head, build_config = CAUSAL_LM.head, CAUSAL_LM.build_config
    assert head is not None
    assert build_config is not None

    def build_data(recipe: Recipe, quiet: bool) -> TaskData:
        data = build_task_data(recipe, quiet, head, labelled_answers.KIND)
        for name in ("train", "validation"):
            _check(name, getattr(data, name))
        return data

    return transformers_task(
        head,
        build_config,
        labelled_answers.KIND,
        build_data=build_data,
        loss_sum=loss_sum,
        terms=terms,
        window=_window if estimates else None,
        reference=Reference(_reference),
    )


def _check(side: str, rows: TokenRows | None) -> None:
    """Refuses answers to learn from that are all of one kind, and a row without another."""
    if rows is None:
        return
    counts = rows.counts(np.arange(len(rows)))
    if side == "train" and not (counts["desirable"] and counts["undesirable"]):
        kind = "desirable" if counts["desirable"] else "undesirable"
        raise DataError(
            f"data.train: all {len(rows):,} answers are {kind}, and the loss compares both kinds. Add answers of "
            "the other one (`label`: true for a desirable answer, false for others)."
        )
    if len(rows) < 2:
        raise DataError(f"data.{side}: there is one answer; the baseline takes that of another row. Add answers.")
