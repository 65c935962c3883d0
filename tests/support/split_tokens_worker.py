"""Ranks that share layers: `split_tokens_worker.py FOLDER` compares gradients with those of a network that is whole.

Each rank writes the largest differences, of the loss and of gradients, by case.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from finetune.config.recipe import validate_recipe
from finetune.distributed.mesh import Group
from finetune.distributed.strategies import tensor
from finetune.models import chunked_loss, split_layers
from finetune.models.build_network import build_model
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.tasks.causal_lm import CAUSAL_LM, causal_lm_logits
from finetune.utils.compat import torch_private

# 14 tokens, which three ranks do not share evenly.
ROWS, LENGTH, VOCABULARY = 2, 7, 50

_LORA = {"rank": 2, "targets": ["q_proj", "down_proj", "lm_head"]}
# Sections of the recipe; whether the head is the embedding; whether the loss is taken from logits.
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "a head of its own": ({}, False, False),
    "the embedding is the head": ({}, True, False),
    "a loss from logits": ({}, False, True),
    "a loss from the embedding's logits": ({}, True, True),
    "an adapter of the head": ({"lora": _LORA}, False, False),
    "a head that is trained whole": ({"lora": {"rank": 2, "save_modules": ["lm_head"]}}, False, False),
}


def differences(case: str, group: Group) -> list[float]:
    sections, tied, from_logits = CASES[case]
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    config = {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": tied, **sizes}
    recipe = validate_recipe(
        {
            "model": {"config": config},
            "tokenizer": {"vocab_size": 512},
            "data": {"train": [{"sample": 10}], "sequence_length": 16},
            "length": {"steps": 1},
            **sections,
        }
    )
    draw = torch.Generator().manual_seed(3)
    ids, targets = (torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draw) for _ in range(2))
    targets[0, :3] = chunked_loss.IGNORED

    def run(network: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if from_logits:
            found = chunked_loss.plain_loss(causal_lm_logits(network, {"input_ids": ids}), targets)
        else:
            found = CAUSAL_LM.loss_sum(network, {"input_ids": ids, "targets": targets})
        found.backward()
        return found.detach(), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}

    def built() -> Any:
        network = build_model(recipe, resolve_model_config(recipe, vocab_size=VOCABULARY), NEXT_TOKEN)
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        return network

    loss, whole = run(built())
    network = built()
    splits = split_layers.split(network, group)
    part_loss, parts = run(network)
    assert whole.keys() == parts.keys(), whole.keys() ^ parts.keys()
    tensor.sum_partial([parts[name] for name in sorted(splits.partial & parts.keys())], group)
    found = [((loss - part_loss).abs() / loss).item()]
    for name, gradient in whole.items():
        split = splits.parameters.get(name)
        wanted = gradient if split is None else split.part_of(gradient, group.size, group.rank)
        found.append(((parts[name] - wanted).abs().max() / gradient.abs().max()).item())
    return found


if __name__ == "__main__":
    torch_private.start_gloo_with_one_worker()
    distributed.init_process_group("gloo")
    group = Group(distributed.get_world_size(), distributed.get_rank(), None)
    # The head's gradient is summed by itself, as that of a large one is; the others are summed at once.
    tensor._LARGE = 1000
    found = {case: differences(case, group) for case in CASES}
    (Path(sys.argv[1]) / str(distributed.get_rank())).write_text(json.dumps(found))
