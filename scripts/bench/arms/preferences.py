"""DPO on the same pairs: by hand, with padded rows and whole logits; TRL's DPOTrainer; and the pairs as this toolkit
reads them, learned as texts.

The reference of each is the model as it begins, whose scores are computed before the first step.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer

from bench.arms.adapters import load
from bench.arms.bare import autocast
from bench.gate import Gate
from bench.spec import BETAS, CLIP, LR, Spec
from finetune.config.recipe_schema import Recipe
from finetune.data.rows.row_order import rows_at
from finetune.tasks import causal_lm
from finetune.tasks.preferences import pairs
from finetune.tasks.task import Task, Term

BETA = 0.1


def recipe_keys(spec: Spec) -> dict[str, Any]:
    """The sections of this toolkit's recipe in which it differs from that of texts."""
    data: dict[str, Any] = {"train": [{"path": spec.rows}], "validation_fraction": 0.0, "packing": "documents"}
    data |= {"sequence_length": spec.case.length, "add_bos": False, "cache_dir": f"{spec.folder}/cache"}
    return {"task": "dpo", "preference": {"beta": BETA}, "data": data}


def as_texts(recipe: Recipe) -> Task:
    """The task of the same rows that learns both answers as texts."""
    return replace(pairs.dpo(recipe), loss_sum=causal_lm.CAUSAL_LM.loss_sum, terms=(Term("loss"),), reference=None)


def _records(spec: Spec) -> list[dict[str, str]]:
    """The pairs in the order in which this toolkit reads them."""
    lines = Path(spec.rows).read_text(encoding="utf-8").splitlines()
    order = rows_at(torch.arange(len(lines)).numpy(), num_rows=len(lines), seed=0)
    return [json.loads(lines[row]) for row in order]


def run_trl(spec: Spec, gate: Gate) -> None:
    """Trains, turn by turn; `trl` in its defaults, but for what has to be equal."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from bench.arms.trainer import Boundary, shared_arguments, watch

    case = spec.case
    model = load(spec.model, case.kind, case.precision)
    best = {"gradient_checkpointing": False, "logging_steps": 500} if spec.arm == "trl-best" else {}
    settings = DPOConfig(
        **shared_arguments(spec), max_length=case.length, beta=BETA, precompute_ref_log_probs=True, **best
    )
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    trainer = DPOTrainer(
        model, args=settings, train_dataset=Dataset.from_list(_records(spec)), processing_class=tokenizer
    )
    trainer.add_callback(Boundary(gate))
    watch(trainer, gate, case.rows)
    trainer.train()


def run_bare(spec: Spec, gate: Gate) -> None:
    """Trains, turn by turn."""
    case = spec.case
    model = load(spec.model, case.kind, case.precision)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    batches = list(_batches(spec))
    with torch.no_grad(), autocast(case.precision):
        reference = [_sums(model, *batch) for batch in batches]
    for step in range(spec.steps + 1):
        gate.before_step()
        for number in range(step * case.accumulation, (step + 1) * case.accumulation):
            with autocast(case.precision):
                ratios = _sums(model, *batches[number]) - reference[number]
            chosen, rejected = ratios.chunk(2)
            loss = -logsigmoid(BETA * (chosen - rejected)).sum()
            (loss / case.rows).backward()
            gate.add(loss.detach(), case.micro)
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        gate.norm(norm)


def _batches(spec: Spec) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields tokens, attended tokens and learned tokens of micro-batches, (2P, T): chosen answers, then rejected."""
    tokenizer, micro, records = AutoTokenizer.from_pretrained(spec.model), spec.case.micro, _records(spec)
    for first in range(0, (spec.steps + 1) * spec.case.rows, micro):
        rows = []
        for half in ("chosen", "rejected"):
            for record in records[first : first + micro]:
                prompt = tokenizer(record["prompt"])["input_ids"]
                ids = [*tokenizer(record["prompt"] + record[half])["input_ids"], tokenizer.eos_token_id]
                assert ids[: len(prompt)] == prompt
                rows.append((len(prompt), ids))
        width = max(len(ids) for _, ids in rows)
        tokens, attended, learned = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
        for row, (begin, ids) in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
            attended[row, : len(ids)], learned[row, begin : len(ids)] = 1, 1
        yield tokens, attended, learned


def _sums(model: Any, tokens: torch.Tensor, attended: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, attention_mask=attended, use_cache=False).logits[:, :-1].float()
    each: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (each * learned[:, 1:]).sum(1)
