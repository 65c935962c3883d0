"""Biases that two runs may have driven apart without a difference in what the networks compute.

Softmax does not see what is added to all scores of a query alike, as a bias of keys is where positions are not rotated
into them (GPT-2, BERT, OPT): its gradient is 0 but for rounding. Adam divides a gradient by its own size, so with a
small eps such a bias takes full steps in whatever direction rounding has.
"""

from collections.abc import Collection
from typing import Any

import torch
import transformers
from safetensors import safe_open

from finetune.parity.finished import Finished

# What scores move by if a bias is moved by 1 on average. Rounding makes it 1e-6.
_NOTHING = 1e-3


def among(one: Finished, other: Finished, biases: Collection[str]) -> set[str]:
    """Those of the biases that can be moved far, from one run's value towards the other's, without changing scores.

    Far, so that what is a small part of the difference would show. None where the network cannot be opened.
    """
    folder = one.directory / "model"
    if not (folder / "config.json").is_file():
        return set()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    cls: Any = getattr(transformers, (config.architectures or ["none"])[0], None)
    if cls is None:
        return set()
    network = cls.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    parameters = dict(network.named_parameters())
    ids = (torch.arange(2 * 24).view(2, 24) * 5 + 1) % config.get_text_config().vocab_size
    found = set()
    with torch.no_grad():
        before = network(input_ids=ids).logits
        for name in biases:
            if name not in parameters:
                continue
            away = _read(other, name).float() - parameters[name]
            kept = parameters[name].clone()
            parameters[name].add_(away / away.square().mean().sqrt())
            moved = (network(input_ids=ids).logits - before).norm() / before.norm()
            parameters[name].copy_(kept)
            if moved <= _NOTHING:
                found.add(name)
    return found


def _read(run: Finished, name: str) -> torch.Tensor:
    for file in run.weights:
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor
    raise KeyError(name)
