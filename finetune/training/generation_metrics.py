"""Metrics of texts that a model in training generates for the recipe's prompts, and of predicted classes."""

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from finetune.data.rows.feed import Rows
from finetune.tasks import metrics
from finetune.training.build_run import Run
from finetune.training.generate_answers import decode_text, generate
from finetune.utils.atomic_files import write_text
from finetune.utils.errors import FinetuneError, RecipeError

PREDICTIONS = "predictions.jsonl"


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
    texts = [decode_text(tokenizer, prompt.ids, ids) for prompt, ids in zip(run.prompts, found, strict=True)]
    lines = (
        {"prompt": prompt.text, "prediction": text, "references": prompt.references}
        for prompt, text in zip(run.prompts, texts, strict=True)
    )
    return _scored(run, texts, [prompt.references for prompt in run.prompts], lines)


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
