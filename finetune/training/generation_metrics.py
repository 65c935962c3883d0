"""Texts that a model in training generates for the recipe's prompts, and metrics of these or of classes."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.data.rows.feed import Rows
from finetune.distributed.backend import Backend
from finetune.tasks import metrics
from finetune.tasks.causal_lm import next_token
from finetune.training.build_run import Run
from finetune.training.evaluation import without_training
from finetune.utils.atomic_files import write_text
from finetune.utils.errors import FinetuneError, RecipeError
from finetune.utils.to_device import tensor_to_device

PREDICTIONS = "predictions.jsonl"


def generate(
    backend: Backend,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    longest: int,
    max_new_tokens: int,
    ends: Collection[int],
    stopping: Callable[[], bool],
) -> list[list[int]] | None:
    """The likeliest tokens behind each prompt, one after the other, without the token that ends a text.

    Every rank must call it; each runs the same number of forward passes, since sharded backends gather weights in them.
    A pass has one prompt: so no text depends on what is computed beside it, nor on the number of ranks.

    Args:
        longest: Tokens of a prompt and its text together, at most.
        ends: Tokens that end a text.
        stopping: Whether this rank was asked to stop.

    Returns:
        Tokens by prompt, the same on every rank; None if a rank was asked to stop.
    """
    # One more than each token, and 0 where there is none.
    written = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64)
    first = backend.mesh.average_rank
    with without_training(model):
        for number in range(first, len(prompts) + first, backend.mesh.average_size):
            row = list(prompts[number]) if number < len(prompts) else []
            kept: dict[str, Any] = {}
            while True:
                told = torch.tensor([float(bool(row)), float(stopping())], device=backend.device)
                unfinished, stop = backend.all_reduce_sum(told).tolist()
                if stop:
                    return None
                if not unfinished:
                    break
                # Who has finished goes along with the others.
                ids = tensor_to_device(torch.tensor([row or prompts[0][:1]]), backend.device)
                pick = partial(next_token, kept=kept if row else {})
                (picked,) = backend.evaluate_batches(model, pick, [{"input_ids": ids}])
                token = int(picked.item())
                if not row:
                    continue
                place = len(row) - len(prompts[number])
                row.append(token)
                if token not in ends and backend.mesh.counts_loss:
                    written[number, place] = token + 1
                if token in ends or place + 1 == max_new_tokens or len(row) == longest:
                    row = []
    gathered: list[list[int]] = backend.all_reduce_sum(written.to(backend.device)).tolist()
    return [[token - 1 for token in row if token] for row in gathered]


def of_texts(run: Run) -> dict[str, float] | None:
    """The metrics of texts that are generated for the recipe's prompts; None if a rank was asked to stop.

    Raises:
        RecipeError: On every rank, if one's own function fails.
    """
    recipe, tokenizer = run.recipe, run.data.tokenizer
    assert tokenizer is not None
    # Compiled, layers would be compiled anew for lengths that no step has.
    with torch.compiler.set_stance("force_eager") if recipe.model.compile else nullcontext():
        found = generate(
            run.backend,
            run.model,
            [prompt.ids for prompt in run.prompts],
            longest=recipe.data.sequence_length,
            max_new_tokens=recipe.eval.max_new_tokens,
            ends={tokenizer.eos_token_id, *run.data.ends},
            stopping=lambda: run.shutdown.requested,
        )
    if found is None:
        return None
    texts = [_text(tokenizer, prompt.ids, ids) for prompt, ids in zip(run.prompts, found, strict=True)]
    lines = (
        {"prompt": prompt.text, "prediction": text, "references": prompt.references}
        for prompt, text in zip(run.prompts, texts, strict=True)
    )
    return _scored(run, texts, [prompt.references for prompt in run.prompts], lines)


def _text(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Decoded behind its prompt: alone, the first word of some tokenizers loses its space."""
    start = tokenizer.decode(before, skip_special_tokens=True)
    return str(tokenizer.decode([*before, *ids], skip_special_tokens=True)[len(start) :].strip())


def of_classes(run: Run, rows: Rows, classes: torch.Tensor) -> dict[str, float]:
    """The metrics of predicted classes.

    Args:
        classes: (2, rows): predicted and true class of each.

    Raises:
        RecipeError: On every rank, if one's own function fails.
    """
    names = run.data.label_names
    predicted, true = ([names[n] if n < len(names) else str(n) for n in side] for side in classes.tolist())

    def lines() -> Iterable[dict[str, Any]]:
        for row, (one, other) in enumerate(zip(predicted, true, strict=True)):
            ids, tokenizer = rows.batch(np.array([row])).get("input_ids"), run.data.tokenizer
            told = (
                {}
                if ids is None or tokenizer is None
                else {"prompt": tokenizer.decode(ids[0], skip_special_tokens=True)}
            )
            yield {"row": row, **told, "prediction": one, "references": [other]}

    return _scored(run, predicted, true, lines())


def _scored(run: Run, predictions: Sequence[str], references: Any, lines: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Metrics are computed once, on rank 0, of the whole set in its order; all ranks hear the outcome."""
    told: dict[str, Any] = {}
    if run.backend.is_main:
        try:
            told = {"values": metrics.score_predictions(run.metrics, predictions, references)}
        except FinetuneError as error:
            told = {"problem": str(error)}
        text = "".join(json.dumps({"step": run.state.step, **line}, ensure_ascii=False) + "\n" for line in lines)
        try:
            write_text(run.directory.path / PREDICTIONS, text)
        except (OSError, UnicodeError) as error:
            run.reporter.warn(f"Cannot write {PREDICTIONS}: {getattr(error, 'strerror', None) or error}.")
    told = run.backend.broadcast_object(told)
    if "problem" in told:
        raise RecipeError(told["problem"])
    values: dict[str, float] = told["values"]
    return values
