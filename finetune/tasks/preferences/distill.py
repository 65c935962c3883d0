"""Distillation: a language model learns what a teacher gives the tokens of texts. Letters as in `objectives`.

The teacher is computed in each step, a second network whose head is in place while the student's computes its chunks;
or once before training, of which the K largest log-probabilities of each learned token are kept in the data cache, and
all other outcomes are one (`objectives.with_rest`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.kinds import taught_documents
from finetune.data.rows.packed_rows import IGNORED
from finetune.models.chunked_loss import Objective
from finetune.tasks.build_task import transformers_task
from finetune.tasks.causal_lm import CAUSAL_LM, head_values, visit_head
from finetune.tasks.preferences import objectives
from finetune.tasks.task import Batch, Reference, Task, TaskData, Term
from finetune.utils.errors import RecipeError


def distill(recipe: Recipe) -> Task:
    """The divergence of the student's distribution from the teacher's, and cross-entropy if it is asked for."""
    section = recipe.distillation
    assert section is not None, "checked with the recipe"
    outcomes, heat = section.top_k, section.temperature

    def of_student(logits: torch.Tensor, targets: torch.Tensor, *of_teacher: torch.Tensor) -> torch.Tensor:
        student = top = (logits / heat).log_softmax(-1)
        if len(of_teacher) == 1:
            teacher = (of_teacher[0] / heat).log_softmax(-1)
        else:
            teacher, tokens = of_teacher
            top = student.gather(-1, tokens)
            if tokens.shape[-1] < logits.shape[-1]:
                top, teacher = objectives.with_rest(top), objectives.with_rest(teacher)
        divergence = objectives.distillation(top, teacher, section.beta)
        plain = student if heat == 1 else logits.log_softmax(-1)
        nll = -plain.gather(-1, targets[:, None])[:, 0]
        return torch.stack((divergence + section.sft_weight * nll, divergence.detach(), nll.detach()), dim=1)

    def of_teacher(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        best = (logits / heat).log_softmax(-1).topk(outcomes or 1)
        return torch.cat((best.values, best.indices.float()), dim=1)

    def loss_sum(network: nn.Module, batch: Batch) -> torch.Tensor:
        held: Any = batch["teacher"]
        if isinstance(held, nn.Module):
            objective = Objective(of_student, opening=partial(_open, held, batch))
        else:
            objective = Objective(of_student, (held.flatten(0, 1), batch["teacher_tokens"].flatten(0, 1)))
        return head_values(network, batch, objective, per_token=False).reshape(-1).clone()

    def compute(network: nn.Module, batch: Batch) -> torch.Tensor:
        values = head_values(network, batch, Objective(of_teacher), per_token=True)
        return values[0, batch["targets"].flatten() != IGNORED]

    reference = None
    if outcomes is not None:
        reference = Reference(compute, [outcomes, heat], 2 * outcomes, partial(_stored, recipe.precision == "fp32"))
    assert CAUSAL_LM.head is not None
    assert CAUSAL_LM.build_config is not None
    task = transformers_task(
        CAUSAL_LM.head,
        CAUSAL_LM.build_config,
        taught_documents.KIND,
        loss_sum=loss_sum,
        terms=(Term("loss"), *(Term(name, weight=0.0) for name in taught_documents.FIGURES)),
        reference=reference,
    )
    return replace(task, build_data=partial(_build_data, task.build_data))


# What a language model reads of a batch, but the noise of training.
_READ = ("input_ids", "position_ids", "cu_seqlens")


def _open(teacher: nn.Module, batch: Batch, compute: Callable[[Any], None]) -> None:
    """Calls a function with a teacher's logits for slices of tokens, inside its head: its weight is in place there."""

    def visit(network: nn.Module, batch: Batch) -> torch.Tensor:
        visit_head(network, batch, compute)
        return torch.zeros(())

    with torch.no_grad():
        teacher(visit, {name: batch[name] for name in _READ if name in batch})


def _stored(exact: bool, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Returns log-probabilities and tokens, (targets, 2 K), as they are kept: (targets, K)."""
    logs, tokens = np.split(values, 2, axis=1)
    kept = np.empty(logs.shape, [("token", "<u4"), ("log", "<f4" if exact else "<f2")])
    kept["token"], kept["log"] = tokens, logs
    return kept


def _build_data(build: Callable[[Recipe, bool], TaskData], recipe: Recipe, quiet: bool) -> TaskData:
    """Raises a `RecipeError` if the teacher has another vocabulary than the student, or fewer tokens than are kept."""
    data, section = build(recipe, quiet), recipe.distillation
    assert CAUSAL_LM.build_config is not None
    assert section is not None
    of_teacher = CAUSAL_LM.build_config(recipe.of_frozen(section.teacher), None)
    configs = CAUSAL_LM.build_config(recipe, data), of_teacher
    ours, theirs = (config.get_text_config().vocab_size for config in configs)
    if ours != theirs:
        raise RecipeError(
            f"distillation.teacher.name: {section.teacher.name} scores {theirs:,} tokens, and the student {ours:,}. "
            "Distributions are compared token by token: name a teacher with the same vocabulary, such as a larger "
            "model of the same family."
        )
    if section.top_k is not None and section.top_k > theirs:
        raise RecipeError(
            f"distillation.top_k is {section.top_k:,}, and {section.teacher.name} scores {theirs:,} tokens. Set it to "
            "at most that; 64 are usual."
        )
    return data
