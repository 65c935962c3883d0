"""Attention within documents that share a row, without a mask of all pairs of tokens.

Letters: B rows, T tokens a row, D documents of a batch, H heads (K of keys), E a head's width.

What tells documents apart, `cu_seqlens` of the batch, goes where architectures take a mask: transformers passes it on
as it is. So every architecture that asks transformers' `AttentionInterface` for its attention can be packed, and what
it recomputes in the backward pass is told the same.
"""

import inspect
import math
import sys
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from finetune.distributed.strategies import sequence
from finetune.models.frozen_weights import compute_dtype
from finetune.utils.compat import transformers_private
from finetune.utils.compat.torch_private import varlen_takes_groups
from finetune.utils.errors import BackendError, RecipeError

NAME = "packed"
"""Name of this attention in transformers; nothing of it is written into a model's files."""

# What else a mask says in some architectures (Llama 4's chunks, Gemma 3 reading both ways, Doge's own).
_MASKED = ("attention_chunk_size", "use_bidirectional_attention", "keep_window_size")
# Layers that read nothing off a mask but documents and a window. Others choose keys by it (DeepSeek-V3.2).
_TOLD_APART = {"full_attention", "sliding_attention"}


def choose_attention(asked: str, config: PretrainedConfig, architectures: Any, *, told: bool) -> str:
    """Returns the implementation that a network is asked for.

    Args:
        asked: `model.attention` of the recipe; all but `auto` is taken as it is.
        architectures: transformers' `AutoModelFor...` for the network.
        told: True if the task calls the network with `document_arguments`.

    Raises:
        RecipeError: If it cannot use what is asked.
    """
    _register()
    known, text = transformers_private.model_mapping(architectures), config.get_text_config()
    # What a model brings as code of its own is not in the table.
    network = known.get(type(config), None)
    # Capped scores (Gemma 2) and sinks (GPT-OSS) only attention that writes them out can do.
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    written = capped or not transformers_private.supports_sdpa(network)
    if asked == NAME and written:
        raise RecipeError(f"model.attention: {config.model_type} cannot use `{NAME}` attention. Set it to `eager`.")
    if asked != "auto":
        return asked
    if written:
        return "eager"
    masked = any(getattr(text, key, None) for key in _MASKED)
    masked = masked or not _TOLD_APART.issuperset(getattr(text, "layer_types", None) or ())
    return NAME if told and not masked and transformers_private.supports_attention_backend(network) else "sdpa"


def document_arguments(network: PreTrainedModel | None, batch: Any) -> dict[str, torch.Tensor]:
    """Returns the arguments that tell a network its documents apart; none where it looks at positions.

    Of rows that are a document each it is told so: else transformers looks for documents in the positions, for which
    the host has to wait for the device.
    """
    if network is None or transformers_private.attention_implementation(network.config) != NAME:
        if "cu_seqlens" in batch and batch["cu_seqlens"].ndim > 1:
            kind = "This network" if network is None else type(network).__name__
            raise BackendError(
                f"{kind} does not attend by `{NAME}` attention, which alone can attend rows that are split over ranks "
                "(sp_size of the launch file). Take a launch config without sequence parallelism."
            )
        return {}
    if "cu_seqlens" in batch:
        # Once, or once for each part of rows that are split over ranks.
        cu_seqlens = torch.atleast_2d(batch["cu_seqlens"])  # type: ignore[no-untyped-call]
        return {"attention_mask": cu_seqlens[None, None]}
    ids, window = batch["input_ids"], getattr(network.config.get_text_config(), "sliding_window", None)
    if "position_ids" in batch or (window is not None and window < ids.shape[1]):
        return {}
    arguments = {"attention_mask": torch.empty(1, 1, 1, 0, dtype=torch.int32, device=ids.device)}
    if _counts_positions(type(network)):  # type: ignore[arg-type]
        arguments["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
    return arguments


@cache
def _counts_positions(kind: type[Any]) -> bool:
    """True if an architecture counts positions from its mask, for an embedding that takes the mask (OPT, BioGPT)."""
    modules = [
        vars(sys.modules[base.__module__]) for base in kind.__mro__ if base.__module__.startswith("transformers.")
    ]
    embeddings = (x for names in modules for x in names.values() if isinstance(x, type) and issubclass(x, nn.Embedding))
    return any("attention_mask" in inspect.signature(x.forward).parameters for x in embeddings)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attends as the interface asks: `query` (B, H, T, E), `key` and `value` (B, K, T, E) to (B, T, H, E).

    Without `cu_seqlens` it is transformers' own.
    """
    mask = attention_mask if attention_mask is not None and attention_mask.numel() else None
    if mask is not None and mask.dtype == torch.int32 and mask.shape[2] > 1:
        if others.get("position_bias") is not None:
            raise BackendError(
                f"{type(module).__name__} adds a bias to each pair of tokens, which is not offered where rows are "
                "split over ranks (sp_size of the launch file). Take a launch config without sequence parallelism."
            )
        rows: Any = module.row_group
        # Repeated until the number of heads is divisible by that of parts.
        copies = math.lcm(key.shape[1], mask.shape[2]) // key.shape[1]
        key, value = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
        # Rotary embeddings leave queries and keys in fp32, which autocast would cast behind the exchange.
        query, key, value = (sequence.gather_rows(x.to(compute_dtype(x)), rows) for x in (query, key, value))
        # What transformers reads of a module, for the heads that are here.
        here: Any = SimpleNamespace(is_causal=True, num_key_value_groups=query.shape[1] // key.shape[1])
        output, _ = _attend(here, query, key, value, mask[:, :, :1], dropout, scaling, sliding_window, **others)
        return sequence.exchange(output, rows), None
    if mask is not None and mask.dtype == torch.int32:
        cu_seqlens, (num_rows, _, length, _) = mask.view(-1), query.shape
        if query.is_cuda:
            # Rotary embeddings leave queries and keys in fp32. Autocast casts what sdpa is given, not for this kernel.
            query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
        if others.get("position_bias") is None and _has_kernel(query, value, dropout):
            # One document behind the other: (B T, heads, E).
            heads = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
            if query.is_cuda:
                output = _by_kernel(heads, cu_seqlens, length, scaling, sliding_window)
            else:
                output = _by_document(heads, cu_seqlens, dropout, scaling, sliding_window)
            return output.view(num_rows, length, *output.shape[1:]), None
        # The mask of all pairs, (B, 1, T, T), for what no kernel can do.
        places = torch.arange(num_rows * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        document = torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True).view(num_rows, 1, length)
        same = document.transpose(1, 2) == document
        mask = (same & _band(length, sliding_window or length, cu_seqlens.device))[:, None]
    return sdpa_attention_forward(  # type: ignore[no-any-return]
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **others
    )


def _has_kernel(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """True if attention without a mask is to be had; on a GPU, documents one by one would make the host wait.

    Source: torch, `mha_varlen_fwd` in `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`.
    """
    if not query.is_cuda:
        return True
    width = query.shape[3]
    if query.dtype == torch.float32 or dropout or width > 256 or width % 8 or value.shape[3] != width:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _by_document(
    heads: Sequence[torch.Tensor], cu_seqlens: torch.Tensor, dropout: float, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attends one document after the other; `heads` are queries, keys and values, each (B T, heads, E)."""
    lengths = [heads[0].shape[0]] if _one_document else cu_seqlens.diff().tolist()
    # Split and joined, not cut out: the gradient of a cut is as large as what it was cut from.
    outputs = []
    for document in zip(*(torch.split(x, lengths) for x in heads), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in document)
        mask = _band(q.shape[2], window, q.device) if window is not None and q.shape[2] > window else None
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": q.shape[1] != k.shape[1]}
        one = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, **options)
        outputs.append(one[0].transpose(0, 1))
    return torch.cat(outputs)


def _by_kernel(
    heads: Sequence[torch.Tensor], cu_seqlens: torch.Tensor, longest: int, scaling: float | None, window: int | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = heads
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if varlen_takes_groups():
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    output = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)
    assert isinstance(output, torch.Tensor)
    return output


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Returns which tokens of a document see each other: (length, length) bool."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


_one_document = False


def assume_one_document() -> None:
    """Takes each batch for one document: tensors without values do not say where documents begin."""
    global _one_document
    _register()
    _one_document = True


def keep_eager() -> None:
    """Has `torch.compile` leave out the loop over documents, whose lengths change from batch to batch."""
    global _by_document
    _by_document = torch.compiler.disable(_by_document)  # type: ignore[no-untyped-call]


@cache
def _register() -> None:
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
