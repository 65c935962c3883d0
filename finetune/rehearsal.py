"""Forward passes before the first step: what runs, and whether documents stay apart, can only be seen running."""

import numpy as np
import torch
from torch import nn

from finetune import evaluate, tasks
from finetune.backend import Backend
from finetune.errors import BackendError, DataError
from finetune.recipe import Recipe


def rehearse(backend: Backend, model: nn.Module, task: tasks.Task, data: tasks.TaskData) -> torch.Tensor:
    """The loss of one row, without gradients. Every rank must call it."""
    rows = data.train if data.train is not None else data.validation
    if rows is None:
        raise DataError("There are neither training nor validation rows. Name data.train or data.validation.")
    model.eval()
    with torch.no_grad():
        loss: torch.Tensor = model(task.loss_sum, evaluate.to_device(rows.batch(np.arange(1)), backend.device))
    model.train()
    return loss


def check_isolation(backend: Backend, model: nn.Module, recipe: Recipe) -> None:
    """Proves on the prepared model that packed documents do not see each other.

    Two documents in one row: changing the first must not move the second's scores. Architectures that do not
    read restarting positions would leak without a word.

    Raises:
        BackendError: If they do.
    """
    length = min(8, recipe.data.sequence_length // 2)
    positions = torch.arange(length, device=backend.device).repeat(2)[None]
    ids = (torch.arange(2 * length, device=backend.device) % 7)[None]
    changed = ids.clone()
    changed[:, :length] = (changed[:, :length] + 1) % 7
    was_training = model.training
    model.eval()
    with torch.no_grad():
        one, two = (
            model(tasks.causal_lm_logits, {"input_ids": x, "position_ids": positions})[:, length:].float()
            for x in (ids, changed)
        )
    model.train(was_training)
    leak = (one - two).abs().max() / one.abs().max().clamp(min=1e-6)
    if leak.item() > 1e-3:
        raise BackendError(
            f"Documents packed into one row see each other in this network: a change in one moves the other's scores "
            f"by {leak.item():.1%}. Set data.packing to `padded` (one document a row) or `wrapped` (no isolation "
            f"wanted), or model.attention to `eager`, which may keep them apart."
        )
