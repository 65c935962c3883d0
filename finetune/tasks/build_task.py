"""Parts that tasks are made of: data of documents, networks of transformers, and adapters for any other network."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PretrainedConfig

from finetune.config.recipe_schema import Recipe
from finetune.data import prepare
from finetune.data.class_labels import some
from finetune.data.prepare import PreparedData
from finetune.data.rows.feed import Rows, counts_of
from finetune.data.rows.kinds.row_kind import RowKind
from finetune.data.tokenization.encoded import WEIGHTS
from finetune.models import lora_adapters
from finetune.models.build_network import build_meta_model, build_model, init_weights
from finetune.models.heads import Head
from finetune.models.model_config import longest_row, resolve_model_config
from finetune.models.pretrained_classes import pretrained_classes
from finetune.tasks.task import Batch, Task, TaskData
from finetune.utils.errors import FinetuneError, RecipeError


def transformers_task(
    head: Head, build_config: Callable[[Recipe, TaskData | None], PretrainedConfig], rows: RowKind, **fields: Any
) -> Task:
    """A task that trains the recipe's model with a head.

    Args:
        build_config: To the network's configuration.
        rows: What is learned of documents.
        fields: Those of `Task` that are left: loss, and what it says of itself; data, if not by `build_task_data`.
    """
    return Task(
        **{"build_data": partial(build_task_data, head=head, rows=rows), **fields},
        rows=rows,
        build_model=lambda recipe, ready: build_model(recipe, build_config(recipe, ready), head),
        build_skeleton=lambda recipe, ready: build_meta_model(build_config(recipe, ready), head, recipe),
        head=head,
        build_config=build_config,
    )


def adapted_task(task: Task) -> Task:
    """A task without a head whose networks get adapters; those with one ask for theirs when they build."""
    build_skeleton = task.build_skeleton

    def model(recipe: Recipe, ready: TaskData) -> nn.Module:
        # With weights first: adapters may be computed from them.
        return lora_adapters.attach(init_weights(task.build_model(recipe, ready), recipe.seed), recipe)

    def skeleton(recipe: Recipe, ready: TaskData | None) -> nn.Module:
        assert build_skeleton is not None
        network = build_skeleton(recipe, ready)
        with torch.device("meta"):
            return lora_adapters.attach(network, recipe)

    return replace(task, build_model=model, build_skeleton=skeleton if build_skeleton is not None else None)


def check_losses(task: Task, loss: str = "task.name: the task's loss_sum") -> Task:
    """Returns a task of a user's own that refuses what its functions should not return, which torch would misread.

    Args:
        loss: What messages call its `loss_sum`.

    Raises:
        RecipeError: If its terms have names that metrics cannot have, or none is learned.
    """
    terms, learned = task.terms, tuple(term for term in task.terms if term.weight)
    names, alone = {term.name for term in terms}, [(term.name, term.weight) for term in learned] == [("loss", 1.0)]
    unordered = terms[: len(learned)] != learned or len(names) < len(terms) or {t.less for t in terms} - {"", *names}
    if not learned or unordered or ("loss" in names and not alone):
        raise RecipeError(
            f"task.name: the task's terms are {', '.join(f'{t.name} (weight {t.weight:g})' for t in terms)}. Give each "
            "a name of its own, first those with a weight and then those of weight 0; `loss` is the name of their sum, "
            "and of a term only if it alone has a weight, which is 1. `less` is the name of one of them."
        )
    sums = _SUM
    if len(terms) > 1:
        sums = f"the sums of its terms, a float32 tensor of shape ({len(terms)},) with gradients, such as {_STACK}"
    checked: dict[str, Any] = {"loss_sum": _checked(task.loss_sum, loss, sums, (len(terms),) if len(terms) > 1 else ())}
    if task.evaluation is not None:
        compute = _checked(task.evaluation.compute, "task.name: the task's evaluation", _PAIR)
        checked["evaluation"] = task.evaluation._replace(compute=compute)
    if task.window is not None:
        checked["window"] = _checked(task.window, "task.name: the task's window", _VALUES)
    return replace(task, **checked)


_STACK = "torch.stack([loss, correct.float()])"
_SUM = (
    "the loss summed over the batch's targets, a float32 tensor of shape () with gradients, such as "
    "functional.cross_entropy(logits.float(), targets, reduction='sum')"
)
_PAIR = f"a pair of sums, a float32 tensor such as {_STACK}, and values of rows, (rows, any), or None"
_VALUES = "values of each row, a float32 tensor of shape (rows, any)"


def _checked(
    function: Callable[..., Any], name: str, wanted: str, shape: tuple[int, ...] | None = None
) -> Callable[..., Any]:
    """`shape`: of a tensor that has to have gradients."""
    pair, dimensions = wanted == _PAIR, 2 if wanted == _VALUES else 1

    @wraps(function)
    def checked(network: nn.Module, batch: Batch) -> Any:
        given = function(network, batch)
        returned = given[0] if pair and isinstance(given, tuple) and len(given) == 2 else None if pair else given
        if not isinstance(returned, torch.Tensor):
            got = f"{type(given).__name__}, not a {'pair' if pair else 'tensor'}"
        elif returned.shape != shape if shape is not None else returned.ndim != dimensions:
            got = f"a tensor of shape {tuple(returned.shape)}"
        elif returned.dtype != torch.float32:
            got = f"a tensor in {str(returned.dtype).removeprefix('torch.')}"
        elif shape is not None and torch.is_grad_enabled() and not returned.requires_grad:
            got = "a tensor without gradients (detached, or computed of nothing that is trained)"
        else:
            return given
        raise RecipeError(f"{name} returned {got}. It has to return {wanted} (`finetune docs tasks`).")

    return checked


def check_counts(task: Task, *given: Rows | None) -> None:
    """Raises a `RecipeError` if rows do not count what a term is divided by, or have weights that the loss ignores."""
    terms = (*task.terms, *task.evaluated.terms)
    for rows in filter(None, given):
        if not task.weighs and WEIGHTS in getattr(rows, "columns", {}):
            raise RecipeError(
                "task: the data has weights other than 0 and 1, and a loss of your own does not multiply by them. Take "
                "them out of the records; or name a `Task` whose loss does, by batch['weights'], with `weighs=True` "
                "(`finetune docs tasks`)."
            )
        known = counts_of(rows, np.arange(1))
        if missing := [term for term in terms if term.counts not in known]:
            raise RecipeError(
                f"task.name: the task's term '{missing[0].name}' is divided by '{missing[0].counts}', and its rows "
                f"count {', '.join(known)}. Return it from their `counts(rows)` (`finetune docs tasks`)."
            )


def build_task_data(recipe: Recipe, quiet: bool, head: Head, rows: RowKind) -> TaskData:
    """The recipe's data; classes are numbered as in the model that it starts from.

    Args:
        rows: What is learned of documents.

    Raises:
        DataError: If data or tokenizer cannot be used as the recipe says.
        RecipeError: If that model's classes cannot be read.
    """
    known = pretrained_classes(recipe, head) if rows.labels in ("class", "tag") else None

    def longest() -> int | None:
        with suppress(FinetuneError):  # what is wrong with the model is said where it is built
            return longest_row(resolve_model_config(recipe, head))
        return None

    prepared = prepare.prepare_data(recipe, rows, known=known, longest=longest, quiet=quiet)
    if (rows.one_document or rows.gives_scores) and prepared.tokenizer.pad_token_id is None:
        # It fills the rows already. Decoders classify at the last token that is another one, and so do whoever opens
        # the model and pads by its tokenizer.
        prepared.tokenizer.pad_token = prepared.tokenizer.eos_token
    train = prepared.report.train
    learned, weights = prepared.train, _class_weights(recipe, prepared)
    if learned is not None and weights is not None:
        learned = replace(learned, class_weights=weights)
    lines = prepared.report.start_lines()
    if weights is not None:
        texts = (f"{name} {weight:.4g}" for name, weight in zip(prepared.label_names, weights.tolist(), strict=True))
        lines.append(f"class weights: {some([*texts])}")
    names = train.chat.ends if train is not None and train.chat is not None else {}
    return TaskData(
        train=learned,
        validation=prepared.validation,
        tokenizer=prepared.tokenizer,
        report=asdict(prepared.report),
        report_lines=tuple(lines),
        full_report=tuple(prepared.report.lines()),
        num_labels=prepared.num_labels,
        label_names=prepared.label_names,
        digest=prepared.digest,
        contents=prepared.contents,
        ends=tuple(int(prepared.tokenizer.convert_tokens_to_ids(name)) for name in names),
    )


def _class_weights(recipe: Recipe, prepared: PreparedData) -> npt.NDArray[np.float32] | None:
    """Returns the factor of each class's losses, (C,); None if the recipe weighs none.

    Source of `balanced`: scikit-learn's `compute_class_weight`, which leaves out classes without rows as well.
    """
    asked, train = recipe.task.class_weights, prepared.report.train
    if asked is None or train is None:
        return None
    names = prepared.label_names
    if asked == "balanced":
        counts = np.array([*train.classes.values()])
        shares: npt.NDArray[np.float64] = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return shares.astype(np.float32)
    if len(asked) != len(names):
        raise RecipeError(
            f"task.class_weights: got {len(asked)} weights for {len(names)} classes. Give one for each class, in this "
            f"order: {some(names)}."
        )
    return np.array(asked, np.float32)


def without_validation(recipe: Recipe, data: TaskData) -> list[str]:
    """Returns the lines that say why nothing is evaluated; none if something is, or the recipe asks for nothing."""
    if data.validation is not None or data.train is None:
        return []
    if "train" not in data.report:
        return ["no validation rows, so nothing is evaluated: the task's build_data returns none"]
    fraction = recipe.data.validation_fraction
    if not fraction:
        return []
    if data.report["validation"] is not None:
        why = f"what is held out fills no row of {recipe.data.sequence_length} tokens"
    else:
        documents = data.report["train"]["documents"]
        why = f"none of {documents:,} documents is held out (data.validation_fraction {fraction:g})"
    return [f"no validation rows, so nothing is evaluated: {why}", "Raise it, or name files in data.validation."]
