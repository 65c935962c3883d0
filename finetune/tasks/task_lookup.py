"""The task that a recipe names. Imports no torch before it is asked for one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.recipe import source_conflicts, task_conflicts
from finetune.config.recipe_schema import Recipe
from finetune.tasks.task import Task, TaskData
from finetune.utils.errors import BackendError, RecipeError
from finetune.utils.import_object import import_object

if TYPE_CHECKING:
    from finetune.data.rows.kinds.row_kind import RowKind
    from finetune.distributed.launch.launch_config import Launch
    from finetune.models.heads import Head


class BuiltIn(NamedTuple):
    """A task that ships, which is imported once it is asked for."""

    place: str
    """As `package.module:object`, a task or a function of the recipe that returns one."""
    kind: str
    """The module of its kind of rows, without torch."""

    @property
    def rows(self) -> "RowKind":
        """The kind of its rows, which recipes are checked for before the task is imported."""
        kind: RowKind = import_object(f"finetune.data.rows.kinds.{self.kind}:KIND", "task.name")
        return kind


# See `data.rows.packed_rows`.
_ROWS_GROW_BY = 8

BUILT_IN = {
    "causal_lm": BuiltIn("finetune.tasks.causal_lm:CAUSAL_LM", "documents"),
    "sequence_classification": BuiltIn("finetune.tasks.classification:SEQUENCE_CLASSIFICATION", "classes"),
    "regression": BuiltIn("finetune.tasks.regression:REGRESSION", "numbers"),
    "seq2seq_lm": BuiltIn("finetune.tasks.seq2seq:SEQ2SEQ_LM", "source_target"),
    "token_classification": BuiltIn("finetune.tasks.token_classification:TOKEN_CLASSIFICATION", "tags"),
    **{
        name: BuiltIn(f"finetune.tasks.preferences.pairs:{name}", "answer_pairs")
        for name in ("dpo", "cpo", "simpo", "orpo")
    },
    "kto": BuiltIn("finetune.tasks.preferences.answers:kto", "labelled_answers"),
    "reward": BuiltIn("finetune.tasks.preferences.reward:reward", "scored_pairs"),
    "embedding": BuiltIn("finetune.tasks.embedding:embedding", "embedded_texts"),
    "distill": BuiltIn("finetune.tasks.preferences.distill:distill", "taught_documents"),
}
"""The built-in tasks by name."""


def find_task(recipe: Recipe) -> Task:
    """The task that the recipe names, with the loss that it names.

    Raises:
        RecipeError: If there is none, it is not a `Task`, or the recipe asks for what it does not do.
    """
    task = named_task(recipe)
    problems = [*_unused_keys(recipe, task)]
    if task.head is not None:
        own = source_conflicts(recipe) if recipe.task.name not in BUILT_IN else ()
        problems += [*own, *task_conflicts(recipe, task.rows)]
    if problems:
        raise RecipeError.of("The recipe", problems)
    if task.head is None and recipe.lora is not None:
        from finetune.tasks.build_task import adapted_task

        task = adapted_task(task)
    if (share := recipe.task.label_smoothing) is not None:
        # What evaluations compute, and perplexities are made of, stays the plain loss.
        loss_sum: Any = task.loss_sum
        task = replace(task, loss_sum=partial(loss_sum, label_smoothing=share), evaluation=task.evaluated)
    if recipe.task.loss is None:
        return task
    loss = import_object(recipe.task.loss, "task.loss")
    if not callable(loss):
        raise RecipeError(f"task.loss: '{recipe.task.loss}' is {type(loss).__name__}, not a function.")
    from finetune.tasks.build_task import check_losses

    # What counts hits computes the task's own loss by the way.
    task = replace(task, loss_sum=loss, terms=Task.terms, evaluation=None, window=None, weighs=False)
    return check_losses(task, f"task.loss: '{recipe.task.loss}'")


def _unused_keys(recipe: Recipe, task: Task) -> Iterator[str]:
    """Yields a sentence for each key that is set and that the task has no use for."""
    unused: dict[str, str] = {}
    if recipe.task.name not in BUILT_IN:
        unused["task.label_smoothing"] = "has a loss of its own, which smooths labels itself; remove it"
    own_rows = not (task.rows.writes_text or task.rows.gives_scores)
    if own_rows:
        unused |= dict.fromkeys(("sample", "eval.prompts"), "writes no text; remove it")
        unused |= {"preference": "learns no preferences; remove it", "embedding": "learns no embeddings; remove it"}
    if task.head is None:
        keys = ("quantization", "freeze", "gradient_checkpointing", "compile", "neftune_alpha")
        why = "builds its own network, which this key does not change; remove it, or give the task a `head`"
        unused |= dict.fromkeys((f"model.{key}" for key in keys), why)
        unused["task.class_weights"] = "builds its own rows, and weighs classes in its own loss; remove it"
        if own_rows:
            unused |= dict.fromkeys(("data.packing", "chat"), "reads no documents; remove it")
    for key, why in unused.items():
        value_of = attrgetter(key)
        if value_of(recipe) != value_of(Recipe()):
            yield f"{key}: the task {recipe.task.name} {why}"


def named_task(recipe: Recipe) -> Task:
    """The task that the recipe names, as it is.

    Raises:
        RecipeError: If there is none, or it is not a `Task`.
    """
    name = recipe.task.name
    task = import_object(BUILT_IN[name].place if name in BUILT_IN else name, "task.name")
    if name in BUILT_IN and not isinstance(task, Task):
        task = task(recipe)
    elif not isinstance(task, Task) and callable(task):
        try:
            task = task(**recipe.task.args)
        except TypeError as error:
            raise RecipeError(f"task.args: '{name}' refuses {recipe.task.args}: {error}.") from error
    if not isinstance(task, Task):
        raise RecipeError(
            f"task.name: '{name}' is {type(task).__name__}, not a finetune.tasks.Task or a function that returns one."
        )
    from finetune.tasks.build_task import check_losses

    return task if name in BUILT_IN else check_losses(task)


def built_in_task(fits: Callable[["Head"], bool]) -> Task | None:
    """The built-in task whose head fits; None if there is none."""
    tasks = (import_object(one.place, "task.name") for one in BUILT_IN.values())
    return next((t for t in tasks if isinstance(t, Task) and t.head is not None and fits(t.head)), None)


def head_of(recipe: Recipe) -> "Head | None":
    """The head of the networks of the recipe's task; None if only the task can open them."""
    return named_task(recipe).head


def check_task_splits(recipe: Recipe, launch: "Launch") -> None:
    """Raises a `BackendError` if rows are to be split over ranks, and those of the recipe's task cannot be."""
    if launch.sequence == 1:
        return
    task = named_task(recipe)
    intro = f"{launch.place} splits each row over {launch.sequence} ranks (sp_size)"
    if not task.splits_rows:
        raise BackendError(
            f"{intro}, which is not offered with task.name {recipe.task.name}. Set task.name to causal_lm, or take a "
            "launch config without sequence parallelism."
        )
    if (task.rows.judged or recipe.data.packing == "padded") and _ROWS_GROW_BY % launch.sequence:
        raise BackendError(
            f"{intro}, but rows that are as long as a batch's longest grow in steps of {_ROWS_GROW_BY} tokens. Set "
            "sp_size to a divisor of that."
        )


def task_config(recipe: Recipe, ready: TaskData) -> Any:
    """The configuration of the network that a task with a head builds."""
    build_config = named_task(recipe).build_config
    assert build_config is not None
    return build_config(recipe, ready)
