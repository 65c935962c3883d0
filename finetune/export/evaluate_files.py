"""Validation loss of an opened network on files; perplexity of a language model, and figures of each class."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.data import prepare
from finetune.data.class_labels import KnownClasses
from finetune.data.progress_bar import rows_bar
from finetune.export.load_model import LoadedModel
from finetune.models import lora_adapters
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.tasks import causal_lm, metrics
from finetune.tasks.build_task import check_counts
from finetune.tasks.evaluate_rows import OneProcess, evaluate_rows, join_scores
from finetune.utils.errors import DataError, RecipeError

_LONGEST = 1024

# How problems with data name what to change in a recipe, and what that is on the command line.
_FLAGS = {
    # Proposed values, quoted where a shell needs it.
    r"('?)(?:data\.(?:train|validation)\.\d+\.)?(text|pair|label)_field=": r"--\2-field \1",
    r"give the recipe a `chat` section if these are conversations: 'chat=\{\}'(?=\.)": (
        "add --chat if these are conversations"
    ),
    r"give the recipe a `chat` section if these are conversations: 'chat=\{\}' .*?(?=\.( |$))": (
        "write these as a list `messages` and add --chat if they are conversations"
    ),
    r"Name the fields in the source's `fields`, .*": "Name them by --field user=… --field assistant=….",
    r"name another field: the source's fields: \{(\w+): …\}": r"name another by --field \1=…",
    r"data\.(train|validation)(\.\d+\.path)?( (or|and) data\.(train|validation))?": "--data",
    r"(the source's )?`text_field`": "--text-field",
    r"(the source's )?`pair_field`": "--pair-field",
    r"(the source's )?`label_field`": "--label-field",
    r"Set chat\.template to [^.]*\.": "Open the run itself, which has one, or leave --chat out.",
}


def recipe_of(
    opened: LoadedModel, files: Sequence[str], *, fields: Mapping[str, Any] | None = None, chat: bool = False
) -> Recipe:
    """Returns a recipe that reads the files as the run reads its own data, or as packed documents if it is no run.

    Where the network, as it is opened, would let packed documents see each other, each gets a row of its own.

    Args:
        fields: Keys of a source, such as `text_field`, that replace the run's.
        chat: They hold conversations, though it is no run that says so.
    """
    longest = min(_LONGEST, opened.longest or _LONGEST)
    if opened.task.rows.one_document:
        # A row is as long as its document, and no longer.
        longest = min(opened.longest or _LONGEST, opened.tokenizer.model_max_length)
    tree: dict[str, Any] = {"data": {"sequence_length": longest}}
    origin: dict[str, Any] = {}
    if opened.recipe is not None:
        own = opened.recipe.model_dump(mode="json")
        tree = {"data": own["data"], "batch": {"global_size": own["batch"]["global_size"]}}
        if own["chat"] is not None:
            # The template was saved with the tokenizer; its file may be gone.
            tree["chat"] = {**own["chat"], "template": None}
        # Fields and formats are those that the run has learned from.
        origin = (tree["data"]["train"] or tree["data"]["validation"] or [{}])[0]
    about = dict.fromkeys(("sample", "hub", "hub_config", "revision", "split", "limit")) | {"weight": 1.0}
    origin = {**origin, **{key: value for key, value in about.items() if key in origin}}
    if chat:
        tree.setdefault("chat", {})
    origin |= fields or {}
    if "chat" not in tree and "fields" in (fields or {}):
        raise RecipeError("--field names fields of conversations. Add --chat if the file holds them, or leave it out.")
    if "chat" in tree and "text_field" in (fields or {}):
        origin |= {"format": "text", "fields": {}}
    tree["data"] |= {"train": [], "validation": [{**origin, "path": file} for file in files]}
    if opened.task.rows.one_document:
        tree["data"]["packing"] = "padded"
    elif tree["data"].get("packing", "documents") == "documents":
        network = lora_adapters.transformer(opened.network)
        distances = causal_lm.sees_documents(network, opened.scores, opened.device, longest)
        limits = causal_lm.tolerances(opened.precision)
        if not all(far.item() <= most for far, most in zip(distances, limits, strict=False)):
            tree["data"]["packing"] = "padded"
    # What is left out is said, and a file is evaluated whatever that is.
    tree["checks"] = {"max_left_out": 1.0}
    tree |= {"model": {"name": opened.tokenizer_folder}, "tokenizer": {"name": opened.tokenizer_folder}}
    return validate_recipe({**tree, "length": {"steps": 0}}, origin="--data")


@contextmanager
def told_in_flags() -> Iterator[None]:
    """Rewrites errors about data: in place of a recipe's keys they name the flags of the command."""
    try:
        yield
    except (DataError, RecipeError) as error:
        text = str(error)
        for key, flag in _FLAGS.items():
            text = re.sub(key, flag, text)
        raise (DataError if isinstance(error, DataError) else RecipeError)(text) from error


def evaluate_files(
    opened: LoadedModel, recipe: Recipe, say: Callable[[str], None], micro_size: int = 4
) -> dict[str, Any]:
    """Returns mean loss per target (nats) and number of targets of the recipe's validation files.

    Of a language model `perplexity` is added, and of an encoder-decoder `accuracy` of its targets; of a classifier
    `accuracy`, `recall_macro`, `f1_macro`, and `classes` and `confusions` as `metrics.count_classes` and
    `metrics.count_confusions` give them; of tagged words `accuracy` and what the task makes of its counts; of
    regression the figures of `metrics.compare_numbers`.

    Args:
        say: Hears what is evaluated, before that begins; a bar on a terminal shows how far it is.

    Raises:
        DataError: If the files cannot be read or hold nothing.
    """
    task, known = opened.task, None
    if task.rows.labels:
        opened.require_labels()
    if task.rows.labels and task.rows.labels != "number":
        known = KnownClasses(opened.class_names, f"the classifier {opened.home or opened.tokenizer_folder}")
    network, joined = ForwardWrapper(opened.network), dict[str, Any]()
    if task.reference is not None:
        # None: this network without its adapters.
        other = None if opened.open_reference is None else opened.open_reference().to(opened.device)
        base = network if other is None else ForwardWrapper(other)
        joined["join"] = partial(join_scores, base, task.reference, adapters=other is not None)
    prepared = prepare.prepare_data(recipe, task.rows, known=known)
    rows, report = prepared.validation, prepared.report.validation
    if rows is None or report is None:
        raise DataError("The files of --data hold no text to evaluate. Name others.")
    if task.rows.labels and task.evaluation is None:
        raise RecipeError("--data: the run's task gives no class of each row (`evaluation`), and no number.")
    check_counts(task, rows)
    targets = rows.num_targets(np.arange(len(rows)))
    say(f"Evaluating {len(rows):,} rows of {recipe.data.sequence_length} tokens, {targets:,} targets.")
    if left_out := report.left_out():
        skipped = ", ".join(f"{what} {count:,}" for what, count in left_out.items())
        say(f"Not evaluated: {skipped}.")
    names, size = opened.class_names if task.rows.labels else (), recipe.batch.global_size
    with rows_bar("evaluating", len(rows)) as advance:
        ranks = OneProcess(opened.device)
        evaluated = evaluate_rows(
            ranks, network, task, rows, micro_size, names, window_size=size, advance=advance, **joined
        )
    assert evaluated is not None
    figures, _ = evaluated
    stats: dict[str, Any] = {**figures.whole, "targets": targets}
    if figures.classes:
        stats["classes"] = figures.classes
    if figures.confusions:
        f1_macro = metrics.mean_of_classes(figures.classes, "f1")
        stats |= {"f1_macro": f1_macro, "confusions": figures.confusions}
    return stats
