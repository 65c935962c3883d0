"""Ranks that share rows: `split_rows_worker.py FOLDER` compares attention over split rows with that over whole ones.

Each rank writes the largest differences, of results and of gradients, by case.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from finetune.distributed.mesh import Group
from finetune.distributed.strategies.sequence import RowGroup, gather_rows
from finetune.models import attention
from finetune.utils.compat import torch_private

ROWS, LENGTH, WIDTH = 2, 24, 8
# Documents begin and end within parts, and one lies on several of them.
CU_SEQLENS = torch.tensor([0, 5, 7, 24, 41, 48], dtype=torch.int32)

# Heads, heads of keys and values, window, and whether the kernel takes one document at a time.
CASES: dict[str, tuple[int, int, int | None, bool]] = {
    "as many keys": (4, 4, None, True),
    "fewer keys than ranks": (8, 2, None, True),
    "one key": (4, 1, None, True),
    "keys that do not divide": (12, 3, None, True),
    "a window": (8, 4, 6, True),
    "a mask of all pairs": (8, 2, None, False),
}


def differences(case: str, group: Group) -> list[float]:
    heads, keys, window, by_document = CASES[case]
    module: Any = SimpleNamespace(is_causal=True, num_key_value_groups=heads // keys, row_group=RowGroup(group))
    attention._has_kernel = lambda *_: by_document  # type: ignore[assignment]
    draw = torch.Generator().manual_seed(len(case))
    shapes = {"query": heads, "key": keys, "value": keys}
    given = {name: torch.randn(ROWS, n, LENGTH, WIDTH, generator=draw) for name, n in shapes.items()}
    wanted = torch.randn(ROWS, LENGTH, heads, WIDTH, generator=draw)

    def own(values: torch.Tensor, dim: int) -> torch.Tensor:
        return values.tensor_split(group.size, dim)[group.rank]

    whole = {name: values.clone().requires_grad_() for name, values in given.items()}
    mask = CU_SEQLENS[None, None, None]
    result, _ = attention._attend(module, **whole, attention_mask=mask, sliding_window=window)
    (result * wanted).sum().backward()
    part = {name: own(values, 2).clone().requires_grad_() for name, values in given.items()}
    mask = CU_SEQLENS.expand(group.size, -1)[None, None]
    found, _ = attention._attend(module, **part, attention_mask=mask, sliding_window=window)
    (found * own(wanted, 1)).sum().backward()
    pairs = [(found, own(result, 1)), *((part[name].grad, own(whole[name].grad, 2)) for name in given)]
    return [(one - other).abs().max().item() for one, other in pairs]


if __name__ == "__main__":
    torch_private.start_gloo_with_one_worker()
    distributed.init_process_group("gloo")
    group = Group(distributed.get_world_size(), distributed.get_rank(), None)
    found: dict[str, Any] = {case: differences(case, group) for case in CASES}
    try:
        gather_rows(torch.zeros(1, 6, 4, WIDTH), RowGroup(group))
    except Exception as error:
        found["refused"] = str(error)
    (Path(sys.argv[1]) / str(distributed.get_rank())).write_text(json.dumps(found))
