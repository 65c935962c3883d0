"""Forward passes before the first step: what runs, and whether documents stay apart, can only be seen running."""

import numpy as np
import torch
from torch import nn

from finetune import adapters, evaluate, loss, models, tasks
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


def kernels(backend: Backend, model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """What a language model computes its attention and its loss with, both proved. Every rank must call it.

    Raises:
        BackendError: If they do something else than they should.
    """
    if recipe.data.packing == "documents":
        check_isolation(backend, model, recipe)
    inner = adapters.transformer(models.unwrap(model))
    used = "the network's own" if inner is None else str(inner.config._attn_implementation)
    return {"attention": used, "loss": check_loss(backend, model, recipe)}


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
    edges = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=backend.device)
    told = {"position_ids": positions, "cu_seqlens": edges}
    with torch.no_grad():
        one, two = (model(tasks.causal_lm_logits, {"input_ids": x, **told})[:, length:].float() for x in (ids, changed))
    model.train(was_training)
    leak = (one - two).abs().max() / one.abs().max().clamp(min=1e-6)
    if leak.item() > 1e-3:
        raise BackendError(
            f"Documents packed into one row see each other in this network: a change in one moves the other's scores "
            f"by {leak.item():.1%}. Set data.packing to `padded` (one document a row) or `wrapped` (no isolation "
            f"wanted), or model.attention to `eager`, which may keep them apart."
        )


def check_loss(backend: Backend, model: nn.Module, recipe: Recipe) -> str:
    """Proves on the prepared model that a loss computed by the head, in chunks, is the loss of the network's logits.

    Architectures that do something to logits behind the head would learn something else. Every rank must call it.

    Returns:
        How the loss is computed: `chunked` or `plain`. With `model.loss: auto` it is `plain` where they differ.

    Raises:
        BackendError: If they differ and the recipe asks for `chunked`.
    """
    inner = adapters.transformer(models.unwrap(model))
    if inner is None or loss.of_network(inner) is None:
        return "plain"
    length = min(64, recipe.data.sequence_length)
    ids = (torch.arange(length, device=backend.device) * 5 % 7)[None]
    batch = {"input_ids": ids, "targets": ids.roll(-1)}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        fused, plain = (model(function, batch) for function in (tasks.CAUSAL_LM.loss_sum, _plain_loss))
    model.train(was_training)
    # All ranks must decide alike, though the last bits of their sums may not be the same.
    apart = backend.max(((fused - plain).abs() / plain.abs().clamp(min=1e-6)).reshape(1)).item()
    if apart <= (1e-3 if backend.precision == "fp32" else 5e-2):
        return "chunked"
    if recipe.model.loss == "chunked":
        raise BackendError(
            f"model.loss is `chunked`, but the loss that the head computes is off by {apart:.1%} from that of the "
            f"network's logits: {type(inner).__name__} does something to them behind its head. Set model.loss to "
            "`plain`."
        )
    loss.part(inner)
    return "plain"


def _plain_loss(network: nn.Module, batch: tasks.Batch) -> torch.Tensor:
    return loss.plain(tasks.causal_lm_logits(network, batch), batch["targets"])
