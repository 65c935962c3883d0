"""Text from a model in training, safe under every backend."""

from typing import Any

import torch
from torch import nn

from finetune.backend import Backend
from finetune.recipe import SampleSection
from finetune.tasks import causal_lm_logits


def _last_logits(network: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return causal_lm_logits(network, batch)[:, -1].float()


def sample(
    backend: Backend, model: nn.Module, tokenizer: Any, section: SampleSection, *, seed: int, longest: int
) -> str:
    """Writes one text after the section's prompt.

    Every rank must call it. Rank 0 picks each token and the others follow, so that all run the same number of
    forward passes and none waits for ever in a gather.

    Args:
        longest: Tokens that the model can see; older ones fall out of view.
    """
    ids: list[int] = tokenizer.encode(section.prompt, add_special_tokens=False)
    if tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    if not ids:
        ids = [tokenizer.eos_token_id or 0]
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(section.max_new_tokens):
            window = torch.tensor([ids[-longest:]], device=backend.device)
            logits = model(_last_logits, {"input_ids": window})[0].cpu()
            token = torch.tensor([_pick(logits, section, generator)], device=backend.device)
            ids.append(int(backend.broadcast(token).item()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    model.train(was_training)
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _pick(logits: torch.Tensor, section: SampleSection, generator: torch.Generator) -> int:
    if section.temperature == 0:
        return int(logits.argmax())
    logits = logits / section.temperature
    if section.top_k is not None and section.top_k < logits.numel():
        logits[logits < logits.topk(section.top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
