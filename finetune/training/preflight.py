"""Forward passes of the prepared model before the first step, to verify kernels, document isolation, and the loss."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.config.recipe_schema import DataSection, Recipe
from finetune.distributed.backend import Backend
from finetune.distributed.strategies import sequence
from finetune.models import chunked_loss, lora_adapters
from finetune.models.forward_wrapper import unwrap, without_training
from finetune.tasks import causal_lm, classification
from finetune.tasks.evaluate_rows import OneProcess, with_window
from finetune.tasks.task import Batch, Task, TaskData
from finetune.utils.compat.transformers_private import attention_implementation
from finetune.utils.errors import BackendError, DataError, FinetuneError
from finetune.utils.to_device import batch_to_device


def loss_of_row(
    backend: Backend, model: nn.Module, task: Task, data: TaskData, device: torch.device | None = None
) -> torch.Tensor:
    """Returns the loss sum of one row, or of two that are a window. Every rank must call it of a prepared model.

    Args:
        device: Where the model is; the backend's device if left out.
    """
    rows = data.train if data.train is not None else data.validation
    if rows is None:
        raise DataError("There are neither training nor validation rows. Name data.train or data.validation.")
    ranks = backend if device is None else OneProcess(device)
    with without_training(model):
        # A row alone has no others that it could be compared with. All ranks compute those of one.
        numbers = np.arange(1 if task.window is None else min(2, len(rows)))
        batch = rows.batch(numbers) | ({} if task.window is None else {"window_rows": torch.from_numpy(numbers)})
        places = numbers if ranks.mesh.data_rank == 0 else numbers[:0]
        ((_, batch),) = with_window(ranks, model, task, [(places, batch)], len(numbers))
    sums = _evaluate(backend, model, task.loss_sum, batch_to_device(batch, ranks.device))
    return sums.reshape(-1)[: task.num_weighted].sum()


def _evaluate(
    backend: Backend, model: nn.Module, function: Callable[[nn.Module, Batch], torch.Tensor], batch: Batch
) -> torch.Tensor:
    """Returns `function(network, batch)`; names the architecture whose own code cannot run what it is given."""
    try:
        with without_training(model):
            result: torch.Tensor = next(backend.evaluate_batches(model, function, [batch]))
        return result
    except (FinetuneError, torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except Exception as error:  # architectures stumble in many ways
        inner = _inner(model)
        files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        if inner is None or not any("/transformers/models/" in Path(file).as_posix() for file in files):
            raise
        used, reason = str(attention_implementation(inner.config)), " ".join(str(error).split()).rstrip(".")
        other = "`eager`" if used == "sdpa" else "`sdpa`"
        raise BackendError(
            f"A forward pass of {_name(model)} with attention `{used}` ends in {type(error).__name__}: {reason}. Set "
            f"model.attention to {other}; if that ends likewise, this architecture cannot be trained on text alone."
        ) from error


def _inner(model: nn.Module) -> PreTrainedModel | None:
    """The network of transformers inside a model, if there is one."""
    return lora_adapters.transformer(unwrap(model))


def _name(model: nn.Module) -> str:
    """The architecture, as transformers and `model.config` call it."""
    network = _inner(model)
    if network is None:
        return "this network"
    kind = next(base for base in type(network).__mro__ if base.__module__.startswith("transformers"))
    return f"{kind.__name__} ({network.config.model_type})"


def verify_kernels(backend: Backend, model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Returns what a language model computes attention and loss with, both verified. Every rank must call it.

    Raises:
        BackendError: If they do something else than they should.
    """
    inner = _inner(model)
    if inner is not None:
        # Where tokens see those behind them, the targets are among the inputs.
        seen = causal_lm.sees_ahead(inner, partial(_scores, backend, model), backend.device)
        if backend.all_reduce_max(seen).item() > causal_lm.tolerances(backend.precision)[0]:
            turned = getattr(inner.config.get_text_config(), "is_decoder", None) is False
            hint = "Set `is_decoder: true` in model.config" if turned else "Take a causal language model"
            raise BackendError(
                f"{_name(model)} is no causal language model as it is configured: tokens see those behind them, which "
                f"they are to predict. {hint}, or set task.name to `{classification.NAME}`."
            )
    if recipe.data.packing == "documents":
        check_isolation(backend, model, recipe)
    if backend.mesh.group("sp") is not None:
        check_split(backend, model, recipe.data)
    if inner is None:
        return {"attention": "the network's own", "loss": "plain"}
    return {"attention": str(attention_implementation(inner.config)), "loss": check_loss(backend, model, recipe)}


def check_isolation(backend: Backend, model: nn.Module, recipe: Recipe) -> None:
    """Raises a `BackendError` unless the prepared model computes a packed document as if it were alone."""
    scores, who = partial(_scores, backend, model), _name(model)
    distances = causal_lm.sees_documents(_inner(model), scores, backend.device, recipe.data.sequence_length)
    change = "Set data.packing to `padded` (one document a row) or `wrapped` (no isolation wanted)"
    if recipe.model.attention != "auto":
        change += ", or model.attention to `auto`, which takes what keeps them apart where the architecture can"
    leak = backend.all_reduce_max(next(distances)).item()
    if leak > causal_lm.tolerances(backend.precision)[0]:
        raise BackendError(
            f"Documents packed into one row see each other in {who}: a change in one moves the other's scores by "
            f"{leak:.2g} of the largest. {change}."
        )
    off = max((backend.all_reduce_max(apart).item() for apart in distances), default=0.0)
    if off > causal_lm.tolerances(backend.precision)[1]:
        raise BackendError(
            f"A document packed into a row behind another is not computed as it is alone in {who}: its scores are off "
            f"by {off:.2g} of the largest, as where positions do not restart, or count from another number than 0. "
            f"{change}."
        )


def _scores(
    backend: Backend, model: nn.Module, batch: Batch, forward: Callable[[nn.Module, Batch], torch.Tensor]
) -> torch.Tensor:
    """Returns scores of the prepared model in fp32, which must be finite."""
    scores = _evaluate(backend, model, forward, batch).float()
    spoilt = (~scores.isfinite().all()).float().reshape(1)
    if backend.all_reduce_max(spoilt).item():
        raise BackendError(
            "The network's scores are not finite before the first step, so that nothing can be verified. Look for "
            "numbers in its weights that are not finite, or set precision to `fp32`."
        )
    return scores


def check_loss(backend: Backend, model: nn.Module, recipe: Recipe) -> str:
    """Verifies on the prepared model that a loss computed by the head, in chunks, is the loss of the network's logits.

    Architectures that do something to logits behind the head would learn something else. Every rank must call it.

    Returns:
        How the loss is computed: `chunked` or `plain`. With `model.loss: auto` it is `plain` where they differ.

    Raises:
        BackendError: If they differ and the recipe asks for `chunked`.
    """
    inner = _inner(model)
    if inner is None or chunked_loss.loss_head(inner) is None:
        return "plain"
    ids = causal_lm.ordinary_tokens(inner, min(64, recipe.data.sequence_length), backend.device)
    batch = {"input_ids": ids, "targets": ids.roll(-1)}

    def plain_loss(network: nn.Module, batch: Batch) -> torch.Tensor:
        return chunked_loss.plain_loss(causal_lm.causal_lm_logits(network, batch), batch["targets"])

    with sequence.whole_rows(model):
        functions = (causal_lm.CAUSAL_LM.loss_sum, plain_loss, _changes_behind_head)
        fused, plain, changed = (_evaluate(backend, model, function, batch) for function in functions)
    # All ranks must decide alike, though the last bits of their sums may not be the same.
    apart = backend.all_reduce_max(((fused - plain).abs() / plain.abs().clamp(min=1e-6)).reshape(1)).item()
    most = 1e-3 if backend.precision == "fp32" else 5e-2
    if apart <= most and not backend.all_reduce_max(changed.reshape(1)).item():
        return "chunked"
    if recipe.model.loss == "chunked":
        raise BackendError(
            f"model.loss is `chunked`, but {_name(model)} does something to its logits behind its head, so that the "
            f"loss that the head computes is another one (off by {apart:.1%} here). Set model.loss to `plain`."
        )
    chunked_loss.unfuse_loss(inner)
    return "plain"


def check_split(backend: Backend, model: nn.Module, data: DataSection) -> None:
    """Verifies on the prepared model that rows split over ranks give the loss that whole rows do.

    Three documents share a row, two of which lie on several ranks. Whatever looks at neighbours otherwise than by the
    attention that is exchanged (convolutions, states that are carried from token to token), or counts positions itself,
    would learn something else without a word. Every rank must call it.

    Raises:
        BackendError: If they do not.
    """
    parts = backend.mesh.size("sp")
    length = min(data.sequence_length, 16 * parts)
    ids = causal_lm.ordinary_tokens(_inner(model), length, backend.device)
    batch = {"input_ids": ids, "targets": ids.roll(-1)}
    if data.packing == "documents":
        begins = sorted({0, length // 3, 2 * length // 3})
        lengths = torch.tensor([*begins, length], device=backend.device)
        positions = torch.cat([torch.arange(int(count), device=backend.device) for count in lengths.diff()])
        batch |= {"position_ids": positions[None], "cu_seqlens": lengths.int()}
    part = _evaluate(backend, model, causal_lm.CAUSAL_LM.loss_sum, batch)
    with sequence.whole_rows(model):
        whole = _evaluate(backend, model, causal_lm.CAUSAL_LM.loss_sum, batch).item()
    why = "as where something but attention looks at neighbouring tokens. Take a launch config without sequence "
    _check_whole(backend, model, part, whole, f"Rows split over {parts}", why + "parallelism (sp_size).")


def check_layers(backend: Backend, model: nn.Module, task: Task, data: TaskData, whole: float) -> None:
    """Verifies on the prepared model that layers split over ranks give the loss that whole ones did.

    An architecture whose plan leaves something out, or does not fit what its layers do with their parts, would learn
    something else without a word. Every rank must call it.

    Args:
        whole: The loss of the same row, of the network before its layers were split.

    Raises:
        BackendError: If they do not.
    """
    part, size = loss_of_row(backend, model, task, data), backend.mesh.size("tp")
    why = "so that its plan for tensor parallelism in transformers does not fit. Take a launch config without tensor "
    _check_whole(backend, model, part, whole, f"Layers split over {size}", why + "parallelism (tp_size).")


def _check_whole(backend: Backend, model: nn.Module, part: torch.Tensor, whole: float, what: str, why: str) -> None:
    """Raises a `BackendError` if the sum of the ranks' parts of a row's loss is not the loss of the whole row."""
    here = part.double().reshape(1)
    counted = here if backend.mesh.counts_loss else torch.zeros_like(here)
    found = backend.all_reduce_sum(counted).item() / backend.mesh.data_size
    apart = abs(found - whole) / max(abs(whole), 1e-6)
    if not apart <= (1e-5 if backend.precision == "fp32" else 5e-2):
        raise BackendError(
            f"{what} ranks are not computed as whole ones in {_name(model)}: the loss is off by {apart:.2g} of itself, "
            f"{why}"
        )


def _changes_behind_head(network: nn.Module, batch: Batch) -> torch.Tensor:
    """1 if logits leave a network other than they leave its head, else 0; a scalar in fp32.

    Values are planted, since a cap does nothing to the small logits of first weights that it would do later on.
    """
    head = chunked_loss.loss_head(lora_adapters.transformer(network))
    assert head is not None
    head.plants = True
    try:
        logits = causal_lm.causal_lm_logits(network, batch)
    finally:
        head.plants = False
    planted, head.planted = head.planted, None
    if planted is None or logits.shape != planted.shape:
        return torch.ones((), device=logits.device)
    return torch.ne(logits, planted).any().float()
