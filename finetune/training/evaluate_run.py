"""Evaluates and samples a model in training, where that is due."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from finetune.data.class_labels import some
from finetune.data.rows.feed import Rows
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import Reporter
from finetune.monitoring.shutdown import ShutdownHandler
from finetune.tasks import metrics
from finetune.tasks.metrics import ClassCounts
from finetune.training import sampling
from finetune.training.evaluation import evaluate
from finetune.training.generate_answers import decode_text, generate
from finetune.training.run import BuiltRun
from finetune.utils.atomic_files import write_text
from finetune.utils.errors import FinetuneError, RecipeError

PREDICTIONS = "predictions.jsonl"


def evaluate_and_sample(run: BuiltRun) -> bool:
    """Evaluates and samples where that is due; False if a request to stop came in between."""
    recipe, step = run.recipe, run.state.step

    def due(every: int | None, at_end: bool) -> bool:
        if step == run.length.num_steps or run.state.best.ends_run(recipe):
            return at_end
        return every is not None and step % every == 0

    evaluates = run.data.validation is not None or run.prompts
    if evaluates and due(recipe.eval.every_steps, recipe.eval.at_end) and not _evaluate(run):
        return False
    if recipe.sample is not None and due(recipe.sample.every_steps, recipe.sample.at_end):
        run.timer.mark("aside")
        text = sampling.sample_text(run.backend, run.model, recipe, run.data.tokenizer, run.data.ends)
        run.reporter.log({"step": step, "sample": text})
        run.reporter.say(f"step {step}: sample\n{text}\n")
        run.results["sample"] = text
    return True


def _evaluate(run: BuiltRun) -> bool:
    run.timer.mark("aside")
    recipe, rows, step = run.recipe, run.data.validation, run.state.step
    figures: dict[str, float] = {}
    counts: ClassCounts | None = None
    if rows is not None:
        counted = run.task.labelled and run.task.loss_and_correct is not None
        classes = None
        if counted or (run.metrics and not run.task.text):
            classes = torch.zeros(2, len(rows), dtype=torch.int64, device=run.backend.device)
        micro = recipe.eval.micro_size or recipe.batch.rows
        stopped = partial(_stop_requested, run.backend, run.shutdown)
        found = evaluate(run.backend, run.model, run.task, rows, micro, stopped=stopped, classes=classes)
        if found is None:
            return False
        figures |= found
        if classes is not None and counted:
            counts = ClassCounts.of(classes, len(run.data.label_names))
            figures["recall_macro"] = counts.recall_macro
        if classes is not None and run.metrics:
            figures |= _score_classes(run, rows, classes)
    if run.prompts:
        scores = _score_texts(run)
        if scores is None:
            return False
        figures |= scores
    values = {f"validation_{key}": value for key, value in figures.items()}
    run.reporter.log({"step": step, **values})
    run.results |= values
    run.state.last_evaluation = {"step": step, **values}
    run.state.best.note(step, values)
    shown = ", ".join(
        f"{key} {value:,.4f}" if abs(value) < 1e9 else f"{key} {value:.3g}"
        for key, value in figures.items()
        if key != "targets"
    )
    over = f" over {figures['targets']:,.0f} targets" if rows is not None else ""
    run.reporter.say(f"step {step}: validation {shown}{over}")
    if counts is not None:
        run.results["classes"] = counts.by_name(run.data.label_names)
        _say_classes(run.reporter, step, run.results["classes"])
    return True


def _stop_requested(backend: Backend, shutdown: ShutdownHandler) -> bool:
    requested = torch.tensor([float(shutdown.requested)], device=backend.device)
    return backend.all_reduce_sum(requested).item() > 0


def _say_classes(reporter: Reporter, step: int, found: dict[str, dict[str, Any]]) -> None:
    """Says what became of each class: a share of all rows hides those that have few."""
    held = {name: class_ for name, class_ in found.items() if class_["rows"]}
    shown = [f"{name} {c['recall']:.1%} of {c['rows']:,} (predicted {c['predicted']:,})" for name, c in held.items()]
    reporter.say(f"  recognised: {some(shown)}")
    never = [f"{name} ({class_['rows']:,} rows)" for name, class_ in held.items() if not class_["predicted"]]
    if never:
        reporter.warn(f"step {step}: no row is taken for the class {some(never)}.")


def _score_texts(run: BuiltRun) -> dict[str, float] | None:
    """Returns the metrics of texts that are generated for the recipe's prompts; None if a rank was asked to stop.

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
    references = [prompt.references for prompt in run.prompts]
    return _score(run, texts, references, ({"prompt": prompt.text} for prompt in run.prompts))


def _score_classes(run: BuiltRun, rows: Rows, classes: torch.Tensor) -> dict[str, float]:
    """Returns the metrics of predicted classes.

    Args:
        classes: (2, rows): predicted and true class of each.

    Raises:
        RecipeError: On every rank, if one's own function fails.
    """
    names, tokenizer = run.data.label_names, run.data.tokenizer
    predicted, true = ([names[n] if n < len(names) else str(n) for n in side] for side in classes.tolist())

    def described() -> Iterable[dict[str, Any]]:
        for row in range(len(true)):
            about: dict[str, Any] = {"row": row}
            ids = rows.batch(np.array([row])).get("input_ids")
            if ids is not None and tokenizer is not None:
                about["prompt"] = tokenizer.decode(ids[0], skip_special_tokens=True)
            yield about

    return _score(run, predicted, true, described())


def _score(
    run: BuiltRun, predictions: Sequence[str], references: Sequence[Any], described: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """Computes metrics once, on rank 0, of the whole set in its order; all ranks hear the outcome.

    Args:
        described: Of each prediction, what it was made of, for `predictions.jsonl`.
    """
    told: dict[str, Any] = {}
    if run.backend.is_main:
        try:
            told = {"values": metrics.score_predictions(run.metrics, predictions, references)}
        except FinetuneError as error:
            told = {"problem": str(error)}
        lines = (
            {"step": run.state.step, **about, "prediction": one, "references": [ref] if isinstance(ref, str) else ref}
            for about, one, ref in zip(described, predictions, references, strict=True)
        )
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            write_text(run.directory.path / PREDICTIONS, text)
        except (OSError, UnicodeError) as error:
            run.reporter.warn(f"Cannot write {PREDICTIONS}: {getattr(error, 'strerror', None) or error}.")
    told = run.backend.broadcast_object(told)
    if "problem" in told:
        raise RecipeError(told["problem"])
    values: dict[str, float] = told["values"]
    return values
