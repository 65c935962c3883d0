"""NEFTune: uniform noise on the embeddings of training rows, the same however a batch is split.

Of each document's L tokens, embedded in h numbers, a number gets noise of [-1, 1) x alpha / sqrt(L h). It is a hash of
(seed, step, row of the global batch, token, number), so that neither ranks nor micro-batches nor packing change it.

Letters: B rows, T tokens, h width.

Source: Jain et al. 2023, "NEFTune". transformers 5.23 (`integrations/neftune.py`) takes for L the padded length of a
micro-batch, and for packed documents that of the row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.distributed.strategies.sequence import part_of_row
from finetune.models.lora_adapters import transformer

KEYS, SCALES = "noise_keys", "noise_scales"
# Of splitmix64 (Steele et al. 2014), and of MurmurHash3's last steps, as signed numbers.
_STEP, _MIX = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_STEP_32, _MIX_32 = -0x61C88647, (-0x7A143595, -0x3D4D51CB)


def with_noise(
    batch: Mapping[str, torch.Tensor], alpha: float, seed: Sequence[int], places: Sequence[int], widths: Any = None
) -> dict[str, torch.Tensor]:
    """Returns a batch of the host with what the noise of its rows depends on.

    Args:
        seed: That of the run, and the step.
        places: Numbers of its rows in the global batch, (B,).
        widths: Tokens of its rows, (B,), where the batch does not say where documents end; None for T.
    """
    shape = batch["input_ids"].shape
    if "cu_seqlens" in batch:
        of_documents = batch["cu_seqlens"].diff()
        lengths = of_documents.repeat_interleave(of_documents).reshape(shape)
    elif "attention_mask" in batch or widths is not None:
        of_rows = batch["attention_mask"].sum(1) if "attention_mask" in batch else torch.as_tensor(widths)
        lengths = of_rows[:, None].expand(shape)
    else:
        lengths = torch.tensor(shape[1]).expand(shape)
    # Of other length than the seeds of dropout.
    keys = [np.random.SeedSequence((*seed, place, 0)).generate_state(1, np.uint64) for place in places]
    scales = alpha / lengths.clamp(min=1).float().sqrt()
    return {**batch, KEYS: torch.from_numpy(np.concatenate(keys).view(np.int64)), SCALES: scales}


@contextmanager
def adding_noise(network: nn.Module, batch: Any) -> Iterator[None]:
    """Has a network add noise to the embeddings of a batch that `with_noise` has returned; of others none."""
    inner = transformer(network) if isinstance(batch, Mapping) and KEYS in batch else None
    if inner is None:
        yield
        return
    keys, scales = batch[KEYS], batch[SCALES]
    of_tokens = (hash_tokens(keys, scales.shape[1]), scales)

    def add(module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        hashes, factors = (part_of_row(values, network) for values in of_tokens)
        return embedded + uniform(hashes, factors, embedded.shape[-1]).to(embedded.dtype)

    hook = inner.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def hash_tokens(keys: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns a hash of each token of some rows, (B,) to (B, T) int32, by splitmix64."""
    # Of 64 bits, which wrap; a shift fills up with the sign, which is masked off.
    mixed = keys[:, None] + torch.arange(1, tokens + 1, device=keys.device) * _STEP
    mixed = (mixed ^ (mixed >> 30 & (1 << 34) - 1)) * _MIX[0]
    mixed = (mixed ^ (mixed >> 27 & (1 << 37) - 1)) * _MIX[1]
    return ((mixed ^ (mixed >> 31 & (1 << 33) - 1)) >> 32).int()


def uniform(hashes: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """Returns numbers in [-1, 1) x scale / sqrt(h), (B, T) to (B, T, h) fp32: 24 bits of a hash of token and number."""
    numbers = torch.arange(width, dtype=torch.int32, device=hashes.device) * _STEP_32
    mixed = hashes[..., None] + numbers
    for shift, factor in zip((16, 13), _MIX_32, strict=True):
        mixed ^= mixed >> shift & (1 << 32 - shift) - 1
        mixed *= factor
    mixed ^= mixed >> 16 & 0xFFFF
    return (mixed >> 8).float() * (scales[..., None] * (2.0**-23 / math.sqrt(width)))
