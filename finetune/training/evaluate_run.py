"""Evaluates a model in training and has it write texts, where that is due, under any backend."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.config.recipe_schema import EvalSection, Recipe, SampleSection
from finetune.data.class_labels import some
from finetune.data.rows.feed import Rows
from finetune.distributed.backend import Backend
from finetune.models.forward_wrapper import unwrap, without_training
from finetune.models.prompts import prompt_tokens
from finetune.tasks import metrics
from finetune.tasks.causal_lm import next_token_logits
from finetune.tasks.class_tables import MOST_COUNTED
from finetune.tasks.evaluate_rows import evaluate_rows
from finetune.tasks.task import Figures, Task
from finetune.training.built_run import BuiltRun
from finetune.utils.atomic_files import write_text
from finetune.utils.errors import FinetuneError, RecipeError
from finetune.utils.to_device import batch_to_device

PREDICTIONS = "predictions.jsonl"


def evaluate_and_sample(run: BuiltRun) -> bool:
    """Evaluates and samples where that is due; False if a request to stop came in between."""
    recipe, step = run.recipe, run.state.step

    def due(section: EvalSection | SampleSection) -> bool:
        if step == run.length.num_steps or run.state.best.ends_run(recipe):
            return section.at_end
        return run.is_due(section.every_steps, getattr(section, "per_epoch", None))

    evaluates = run.data.validation is not None or run.prompts
    weights = partial(run.backend.evaluated_weights, unwrap(run.model))
    if evaluates and due(recipe.eval):
        run.timer.mark("aside")
        with weights():
            if not _evaluate(run):
                return False
    if recipe.sample is not None and due(recipe.sample):
        run.timer.mark("aside")
        with weights():
            text = sample_text(run.backend, run.model, run.task, recipe, run.data.tokenizer, run.data.ends)
        run.reporter.log({"step": step, "sample": text})
        run.reporter.say(f"step {step}: sample\n{text}\n")
        run.results["sample"] = text
    return True


def _evaluate(run: BuiltRun) -> bool:
    task, rows, step, names = run.task, run.data.validation, run.state.step, run.data.label_names
    evaluated = Figures({})
    if rows is not None:
        batch = run.recipe.batch
        result = evaluate_rows(
            run.backend,
            run.model,
            task,
            rows,
            run.recipe.eval.micro_size or batch.rows,
            names,
            window_size=batch.global_size,
            join=run.join,
            stopping=partial(_is_stopping, run),
        )
        if result is None:
            return False
        evaluated, of_rows = result
        if run.metrics and not task.rows.writes_text:
            if of_rows is None:
                raise RecipeError("eval.metrics: the task's `evaluation` gives no class of each row.")
            evaluated.whole.update(_score_classes(run, rows, of_rows))
    figures = evaluated.whole
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
    if by_class := evaluated.classes:
        confusions = evaluated.confusions if len(names) <= MOST_COUNTED else {}
        run.results |= {"classes": by_class, "confusions": confusions}
        # A share of all rows hides classes that have few.
        held = {name: c for name, c in by_class.items() if c["rows"]}
        recalls = [
            f"{name} {c['recall']:.1%} of {c['rows']:,} (predicted {c['predicted']:,})" for name, c in held.items()
        ]
        run.reporter.say(f"  recognised: {some(recalls)}")
        what = "span" if task.rows.labels == "tag" else "row"
        if never := [f"{name} ({c['rows']:,} {what}s)" for name, c in held.items() if not c["predicted"]]:
            run.reporter.warn(f"step {step}: no {what} is taken for the class {some(never)}.")
    return True


def _is_stopping(run: BuiltRun) -> bool:
    """Tells if the run is asked to stop, between batches of an evaluation, each of which is progress."""
    run.timer.mark("aside")
    return run.shutdown.requested


def _score_texts(run: BuiltRun) -> dict[str, float] | None:
    """Returns the metrics of texts that are generated for the recipe's prompts; None if a rank was asked to stop."""
    recipe, tokenizer = run.recipe, run.data.tokenizer
    assert tokenizer is not None
    # Compiled, layers would be compiled anew for lengths that no step has.
    with torch.compiler.set_stance("force_eager") if recipe.model.compile else nullcontext():
        tokens = generate_tokens(
            run.backend,
            run.model,
            run.task,
            [prompt.ids for prompt in run.prompts],
            longest=recipe.data.sequence_length,
            max_new_tokens=recipe.eval.max_new_tokens,
            ends={tokenizer.eos_token_id, *run.data.ends},
            stopping=partial(_is_stopping, run),
        )
    if tokens is None:
        return None
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    # Decoded behind its prompt: alone, the first word of some tokenizers loses its space.
    begins = [() if run.task.rows.reads_source else prompt.ids for prompt in run.prompts]
    texts = [decode([*begin, *ids])[len(decode(begin)) :].strip() for begin, ids in zip(begins, tokens, strict=True)]
    references = [prompt.references for prompt in run.prompts]
    return _score(run, texts, references, ({"prompt": prompt.text} for prompt in run.prompts))


def _score_classes(run: BuiltRun, rows: Rows, values: torch.Tensor) -> dict[str, float]:
    """Returns the metrics of predicted classes; `values` begin with the predicted and the true class of each row."""
    names, tokenizer = run.data.label_names, run.data.tokenizer
    predicted, true = (
        [names[n] if n < len(names) else str(n) for n in side] for side in values[:, :2].T.long().tolist()
    )

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
    """Computes metrics on rank 0, of the whole set in its order; every rank gets the values, or raises the error.

    Predictions, with what describes the input of each, are written into `predictions.jsonl`.
    """
    outcome: dict[str, Any] = {}
    if run.backend.is_main:
        try:
            outcome = {"values": metrics.score_predictions(run.metrics, predictions, references)}
        except FinetuneError as error:
            outcome = {"problem": str(error)}
        lines = (
            {"step": run.state.step, **about, "prediction": one, "references": [ref] if isinstance(ref, str) else ref}
            for about, one, ref in zip(described, predictions, references, strict=True)
        )
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            write_text(run.directory.path / PREDICTIONS, text)
        except (OSError, UnicodeError) as error:
            run.reporter.warn(f"Cannot write {PREDICTIONS}: {getattr(error, 'strerror', None) or error}.")
    outcome = run.backend.broadcast_object(outcome)
    if "problem" in outcome:
        raise RecipeError(outcome["problem"])
    values: dict[str, float] = outcome["values"]
    return values


def generate_tokens(
    backend: Backend,
    model: nn.Module,
    task: Task,
    prompts: Sequence[Sequence[int]],
    *,
    longest: int,
    max_new_tokens: int,
    ends: Collection[int],
    stopping: Callable[[], bool] = lambda: False,
    pick: Callable[[torch.Tensor], int] = lambda logits: int(logits.argmax()),
    slides: bool = False,
) -> list[list[int]] | None:
    """Returns the tokens picked behind each prompt, one after the other, without the token that ends a text.

    Every rank must call it; each runs the same number of forward passes, since sharded backends gather weights in them.
    A pass has one prompt: so no text depends on what is computed beside it, nor on the number of ranks.

    Args:
        longest: Most tokens of a prompt and its text together, of which the network sees as many; of each of both,
            where prompts are read by an encoder.
        ends: Tokens that end a text.
        stopping: Returns True if this rank was asked to stop.
        pick: Chooses a token by the logits behind a row, (V,); the likeliest by default.
        slides: Goes on behind `longest` tokens, of which the first fall out of view.

    Returns:
        Tokens by prompt, the same on every rank; None if a rank was asked to stop.
    """
    # One more than each token, and 0 where there is none.
    written = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64)
    first, scores = backend.mesh.average_rank, task.next_token or next_token_logits
    backend.share_buffers(unwrap(model))
    with without_training(model):
        for number in range(first, len(prompts) + first, backend.mesh.average_size):
            row = list(prompts[number]) if number < len(prompts) else []
            taken = len(row)
            most = longest + taken if task.rows.reads_source else longest
            kept: dict[str, Any] = {}
            while True:
                flags = torch.tensor([float(bool(row)), float(stopping())], device=backend.device)
                unfinished, stop = backend.all_reduce_sum(flags).tolist()
                if stop:
                    return None
                if not unfinished:
                    break
                # Who has finished goes along with the others, whose encoder runs once.
                parts = {"input_ids": row[-longest:] or prompts[0][:1]}
                if task.rows.reads_source:
                    parts = {"input_ids": row[:taken] or prompts[0][:1], "written": row[taken:]}
                ids = {name: torch.tensor([tokens], dtype=torch.int64) for name, tokens in parts.items()}
                score = partial(scores, kept=kept if task.rows.reads_source or 0 < len(row) <= longest else {})
                (logits,) = backend.evaluate_batches(model, score, [batch_to_device(ids, backend.device)])
                if not row:
                    continue
                token, index = pick(logits[0]), len(row) - taken
                row.append(token)
                if token not in ends and backend.mesh.counts_loss:
                    written[number, index] = token + 1
                if (
                    token in ends
                    or index + 1 == max_new_tokens
                    or (len(row) == most and not (slides and not task.rows.reads_source))
                ):
                    row = []
    gathered: list[list[int]] = backend.all_reduce_sum(written.to(backend.device)).tolist()
    return [[token - 1 for token in row if token] for row in gathered]


def sample_text(
    backend: Backend, model: nn.Module, task: Task, recipe: Recipe, tokenizer: Any, taught: Sequence[int]
) -> str:
    """Writes one text after the prompt of the recipe's `sample` section; every rank must call it.

    Args:
        taught: The tokens that learned answers end in.
    """
    section = recipe.sample
    assert section is not None
    variables = recipe.chat.template_args if recipe.chat is not None else None
    ids = prompt_tokens(tokenizer, section.prompt, encoded=task.rows.reads_source, variables=variables)
    generator = torch.Generator().manual_seed(recipe.seed)

    def pick(logits: torch.Tensor) -> int:
        if section.temperature == 0:
            return int(logits.argmax())
        logits = logits.cpu() / section.temperature
        if section.top_k is not None and section.top_k < logits.numel():
            logits[logits < logits.topk(section.top_k).values[-1]] = -torch.inf
        return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))

    generated = generate_tokens(
        backend,
        model,
        task,
        [ids],
        longest=recipe.data.sequence_length,
        max_new_tokens=section.max_new_tokens,
        ends={tokenizer.eos_token_id, *taught},
        pick=pick,
        slides=True,
    )
    assert generated is not None
    begin = [] if task.rows.reads_source else ids
    return str(tokenizer.decode([*begin, *generated[0]], skip_special_tokens=True)).strip()
