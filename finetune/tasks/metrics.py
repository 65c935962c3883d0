"""Metrics of what a model puts out: built-in ones, and one's own."""

import re
import string
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from finetune.config.recipe_schema import Recipe
from finetune.tasks.prompt_set import Prompt
from finetune.tasks.task import Figures, Task, TaskData, Term
from finetune.utils.errors import RecipeError
from finetune.utils.import_object import import_object

Metric = Callable[[list[str], Any], float | Mapping[str, float]]
"""A function of all predictions and all references (of each text a list, of each row the name of its class) to a
number, or to numbers by name."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TAKEN = ("loss", "perplexity", "targets")
# Of torchmetrics.
_ROUGE = ("rouge1", "rouge2", "rougeL")


def check_metrics(names: Sequence[str]) -> None:
    """Raises a `RecipeError` for metrics whose library is not installed, with what to install."""
    needing = [name for name in names if name in _ROUGE]
    if needing and find_spec("torchmetrics") is None:
        raise RecipeError(
            f"eval.metrics: {', '.join(needing)} cannot be computed without torchmetrics, which is not installed. "
            "Install it with `pip install 'finetune[metrics]'`, or take them out."
        )


def build_metrics(recipe: Recipe, task: Task, data: TaskData, prompts: Sequence[Prompt]) -> dict[str, Metric]:
    """The functions of `eval.metrics` by name, each tried on one example: what fails is refused before the first step.

    Raises:
        RecipeError: If a metric fails, or `checkpoint.keep_best_by` names nothing that evaluations have.
    """
    metrics = find_metrics(recipe.eval.metrics)
    best_by = recipe.checkpoint.keep_best_by
    # Their library takes seconds to load, and they do not fail.
    rouge = [name for name in metrics if name in _ROUGE]
    tried = {name: metric for name, metric in metrics.items() if name not in rouge}
    known: list[str] = []
    if data.validation is not None:
        terms = (*task.terms[: 0 if len(task.terms) == 1 else None], *task.evaluated.terms)
        names = (term.name for term in terms)
        known = [*dict.fromkeys(("loss", *["perplexity"] * task.text, *names, *task.evaluated.figures))]
    if metrics and task.text:
        if not prompts:
            raise RecipeError("eval.metrics: name a source in `eval.prompts`, for which texts are generated.")
        known += [*rouge, *score_predictions(tried, [prompts[0].references[0]], [prompts[0].references])]
    elif metrics:
        if data.validation is None:
            raise RecipeError("eval.metrics: there are no validation rows to compute them of. Name data.validation.")
        if task.evaluation is None:
            raise RecipeError("eval.metrics: the task neither writes text nor tells classes (`evaluation`).")
        label = data.label_names[0] if data.label_names else "0"
        known += score_predictions(tried, [label], [label])
    keys = [f"validation_{name}" for name in known]
    # The default may name what a run without validation rows has not; nothing is kept by it then.
    need = ["eval.patience"] * (recipe.eval.patience is not None) + ["output.model"] * (recipe.output.model == "best")
    default = best_by == "validation_loss" and not need
    if best_by is not None and not default and (key := best_by.removeprefix("-")) not in keys:
        if not keys:
            also = f", and take out {' and '.join(need)}" if need else ""
            raise RecipeError(
                f"checkpoint.keep_best_by is '{best_by}', and nothing is evaluated: there are no validation rows. Hold "
                "some out (data.validation_fraction), name data.validation, or set checkpoint.keep_best_by to null"
                f"{also}."
            )
        raise RecipeError(
            f"checkpoint.keep_best_by: evaluations of this recipe have no '{key}'; they have {', '.join(keys)}. Name "
            "one of these."
        )
    return metrics


HITS = Term("accuracy", weight=0.0)
"""Targets that are predicted right."""


def figures_of_classes(_: Sequence[float], values: torch.Tensor | None, names: Sequence[str]) -> Figures:
    """Returns the mean recall, figures of each class, and which is taken for which.

    Args:
        values: The predicted and the true class of each row, (R, 2).
    """
    assert values is not None
    classes = values.T.long()
    counts = count_classes(classes, names)
    return Figures({"recall_macro": mean_of_classes(counts, "recall")}, counts, count_confusions(classes, names))


def figures_of_numbers(_: Sequence[float], values: torch.Tensor | None, names: Sequence[str]) -> Figures:
    """Returns what `compare_numbers` does of the predicted and the true number of each row, (R, 2)."""
    assert values is not None
    return Figures(compare_numbers(values.T.contiguous()))


def count_classes(classes: torch.Tensor, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Counts, by class, its rows and those that were taken for it, with precision, recall and F1.

    Precision is None where nothing was taken for a class, recall where it has no rows, and F1 where both are so.

    Args:
        classes: (2, rows): predicted and true class of each.
    """
    predicted, true = classes.cpu()
    parts = (true, predicted, true[predicted == true])
    counts = [torch.bincount(labels, minlength=len(names)).tolist() for labels in parts]
    return {name: class_figures(*totals) for name, *totals in zip(names, *reversed(counts), strict=True)}


def class_figures(hits: float, taken: float, rows: float) -> dict[str, Any]:
    """Returns figures of a class that `taken` were taken for, `hits` of them rightly, and that has `rows`."""
    return {
        "rows": int(rows),
        "predicted": int(taken),
        "precision": hits / taken if taken else None,
        "recall": hits / rows if rows else None,
        "f1": 2 * hits / (rows + taken) if rows + taken else None,
    }


def count_confusions(classes: torch.Tensor, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Counts, by true class, the rows that were taken for each class; pairs without rows are left out.

    Args:
        classes: (2, rows): predicted and true class of each.
    """
    predicted, true = classes.cpu()
    codes, counts = torch.unique(true * len(names) + predicted, return_counts=True)
    confusions: dict[str, dict[str, int]] = {}
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        confusions.setdefault(names[code // len(names)], {})[names[code % len(names)]] = count
    return confusions


def mean_of_classes(counts: Mapping[str, Mapping[str, Any]], key: str) -> float:
    """Returns the mean of a figure of the classes that have it: those with rows, of F1 also those predicted."""
    values = [found[key] for found in counts.values() if found[key] is not None]
    return float(sum(values) / max(1, len(values)))


def compare_numbers(numbers: torch.Tensor) -> dict[str, float]:
    """Returns the root of the mean squared error, and Pearson's and Spearman's correlation: 0 where a side is constant.

    Args:
        numbers: (2, rows): predicted and true number of each.
    """
    predicted, true = numbers.double().cpu()
    ranks = [_ranks(side) for side in (predicted, true)]
    return {
        "rmse": float((predicted - true).square().mean().sqrt()),
        "pearson": _correlation(predicted, true),
        "spearman": _correlation(*ranks),
    }


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Returns ranks, of equal values their mean."""
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: torch.Tensor = (counts.cumsum(0) - (counts - 1) / 2)[places]
    return ranks


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    if bool((one == one[0]).all()) or bool((other == other[0]).all()):
        return 0.0
    return float(torch.corrcoef(torch.stack((one, other)))[0, 1])


def find_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """The functions that names of `eval.metrics` stand for.

    Raises:
        RecipeError: If one's own cannot be imported.
    """
    return {name: import_object(name, "eval.metrics") if ":" in name else _BUILT_IN[name] for name in names}


def score_predictions(
    metrics: Mapping[str, Metric],
    predictions: Sequence[str],
    references: Sequence[Sequence[str]] | Sequence[str],
) -> dict[str, float]:
    """The values of some metrics over a whole set, by name.

    Args:
        metrics: By their names in `eval.metrics`.
        predictions: Generated texts, or names of predicted classes.
        references: Of each text all references; or the names of the true classes.

    Raises:
        RecipeError: If one's own function fails, or returns what is no number.
    """
    scores: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            wanted: Any = [one if isinstance(one, str) else list(one) for one in references]
            value = metric(list(predictions), wanted)
            named = value if isinstance(value, Mapping) else {re.split(r"[:.]", name)[-1]: value}
            values = {str(key): float(number) for key, number in named.items()}
        except Exception as error:  # whatever a user's function does
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise RecipeError(
                f"eval.metrics: '{name}' ends in {type(error).__name__}: {' '.join(str(error).split())[:300]} "
                f"({Path(frame.filename).name}, line {frame.lineno}). It is called with lists of predictions and of "
                "references, and returns a number, or a dict of numbers."
            ) from error
        for key in values:
            if not _NAME.fullmatch(key) or key in (*scores, *_TAKEN):
                raise RecipeError(
                    f"eval.metrics: '{name}' calls a metric '{key}'. A name has at most 64 letters, digits, `_` and "
                    f"`-`, and is there once; {', '.join(_TAKEN)} are taken. Return a dict with other keys."
                )
        scores |= values
    return scores


def _words(text: str) -> list[str]:
    """Source: the evaluation script of SQuAD 1.1, `normalize_answer`."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _overlap(one: list[str], other: list[str]) -> float:
    """F1 of the words of two texts. Source: the evaluation script of SQuAD 2.0, `compute_f1`."""
    if not one or not other:
        return float(one == other)
    return 2 * (Counter(one) & Counter(other)).total() / (len(one) + len(other))


def _best_of_words(
    like: Callable[[list[str], list[str]], float], predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
    """Returns the mean, over texts, of how like a text is to the reference that it is most like."""
    best = [
        max(like(_words(text), _words(wanted)) for wanted in all_wanted)
        for text, all_wanted in zip(predictions, references, strict=True)
    ]
    return sum(best) / len(best)


def _rouge(name: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    from torchmetrics.functional.text import rouge_score

    scores = rouge_score(list(predictions), [list(wanted) for wanted in references], rouge_keys=name)
    return float(scores[f"{name}_fmeasure"])


def _accuracy(predictions: Sequence[str], references: Sequence[str]) -> float:
    return sum(map(str.__eq__, predictions, references)) / len(predictions)


def _f1_macro(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the mean over all classes that are predicted or true, as scikit-learn's `f1_score` has it."""
    hits = Counter(one for one, other in zip(predictions, references, strict=True) if one == other)
    sizes = Counter(predictions) + Counter(references)
    return sum(2 * hits[name] / size for name, size in sizes.items()) / len(sizes)


_BUILT_IN: dict[str, Callable[[Any, Any], float]] = {
    "exact_match": partial(_best_of_words, list.__eq__),
    "f1": partial(_best_of_words, _overlap),
    **{name: partial(_rouge, name) for name in _ROUGE},
    "accuracy": _accuracy,
    "f1_macro": _f1_macro,
}
