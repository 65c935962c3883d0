"""Checks of a causal language model on the scores of a few tokens: it sees neither ahead nor other documents.

Letters: T tokens, V vocabulary. Wherever a network is trained or scored, these say whether the figures mean anything.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.tasks.causal_lm import causal_lm_logits
from finetune.tasks.task import Batch

Scores = Callable[[Batch, Callable[[nn.Module, Batch], torch.Tensor]], torch.Tensor]
"""Runs a function of network and batch, which returns logits, on the network; returns (1, T, V) in fp32."""


def seen_tolerance(precision: str) -> float:
    """Returns the most that scores may move that should not. Computed alike they move by nothing, but in experts, where
    tokens meet: measured at most 3e-7 in fp32, where the least leak was 3e-5."""
    return 1e-5 if precision == "fp32" else 1e-3


def alone_tolerance(precision: str) -> float:
    """Returns the most that scores in a packed row may differ from those of the document alone, by other kernels."""
    return 1e-4 if precision == "fp32" else 5e-2


def sees_ahead(network: PreTrainedModel, scores: Scores, device: torch.device) -> torch.Tensor:
    """Returns how far tokens move the scores of those before them, as a share of the largest score: (1,)."""
    ids = ordinary_tokens(network, 8, device)
    changed = torch.cat([ids[:, :4], _other(ids, 4)], 1)
    one, two = (scores({"input_ids": x}, causal_lm_logits) for x in (ids, changed))
    return _apart(one[:, :4], two[:, :4])


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
    changed = torch.cat([_other(ids, length), ids[:, length:]], 1)
    cu_seqlens = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=device)
    boundaries = {"position_ids": torch.arange(length, device=device).repeat(2)[None], "cu_seqlens": cu_seqlens}
    one, two = (scores({"input_ids": x, **boundaries}, causal_lm_logits)[:, length:] for x in (ids, changed))
    yield _apart(one, two)
    if network is not None:
        # In front, where nothing before it can be seen.
        alone = scores({"input_ids": ids.roll(length, 1)}, _logits_of_tokens)
        yield _apart(one, alone[:, :length])


def ordinary_tokens(network: PreTrainedModel | None, count: int, device: torch.device) -> torch.Tensor:
    """Returns tokens that mean nothing special to a network: (1, count)."""
    known: dict[str, Any] = {} if network is None else network.config.to_dict()
    size = 7 if network is None else int(network.config.get_text_config().vocab_size)
    special = set(_special(known))
    ordinary = [token for token in range(min(size, 1000)) if token not in special][:7] or [0]
    return torch.tensor(ordinary, device=device)[torch.arange(count, device=device) % len(ordinary)][None]


def _other(ids: torch.Tensor, count: int) -> torch.Tensor:
    """Repeats the last token and again: in another order, they would be the same to attention without positions."""
    return ids[:, -1:].expand(-1, count)


def _special(config: dict[Any, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _special(value)
        elif isinstance(key, str) and key.endswith(("_id", "_ids", "_index")):
            yield from (x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, int))


def _logits_of_tokens(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns scores of tokens alone, by the network's own masks and positions."""
    return network(input_ids=batch["input_ids"], use_cache=False).logits  # type: ignore[no-any-return]


def _apart(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The largest difference, as a share of the largest value: (1,)."""
    return ((one - two).abs().max() / one.abs().max().clamp(min=1e-6)).reshape(1)
