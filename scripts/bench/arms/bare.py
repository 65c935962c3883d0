"""The limit: a loop that someone who knows PyTorch writes by hand for this one job.

`bare` has a plain cross-entropy over all logits; `bare+` the same loop around this toolkit's forward pass and loss,
so that what is left between it and `ours` is the loop, and what a backend is told.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional

from bench.arms.adapters import adapted, load
from bench.cases import LIMIT_OURS
from bench.gate import Gate
from bench.spec import BETAS, CLIP, LR, Spec


def run(spec: Spec, gate: Gate) -> None:
    """Trains, turn by turn."""
    case = spec.case
    model = load(spec.model, case.kind, case.precision)
    model = (adapted(model) if case.kind != "full" else model).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    rows = torch.from_numpy(spec.load_rows())
    loss_sum = loss_sum_of(spec, model)
    targets = case.rows * (case.length - 1)
    for step in range(spec.steps + 1):
        gate.before_step()
        for part in spec.window(step, 0):
            with autocast(case.precision):
                loss = loss_sum(model, rows[part])
            (loss / targets).backward()
            gate.add(loss.detach(), targets // case.accumulation)
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        gate.norm(norm)


def loss_sum_of(spec: Spec, model: Any) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """How an arm computes the summed loss of rows (B, T); for `bare+` the network's head is changed."""
    if not spec.arm.startswith(LIMIT_OURS):
        return _plain_loss_sum
    from finetune.models.chunked_loss import fuse_loss, loss_head

    fuse_loss(model)
    head = loss_head(model)
    assert head is not None

    def loss_sum(wrapped: Any, rows: torch.Tensor) -> torch.Tensor:
        targets = torch.full_like(rows, -100)
        targets[:, :-1] = rows[:, 1:]
        head.targets = targets.flatten()
        found: torch.Tensor = wrapped(input_ids=rows, use_cache=False).logits.reshape(())
        return found

    return loss_sum


def autocast(precision: str) -> AbstractContextManager[Any]:
    """What the network computes in."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def _plain_loss_sum(model: Any, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
