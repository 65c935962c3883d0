"""The data of the built-in tasks."""

from finetune.config.recipe_schema import Recipe
from finetune.data import prepare
from finetune.models.head_classes import head_classes
from finetune.tasks.task import TaskData


def prepare_task_data(recipe: Recipe, *, quiet: bool = False) -> prepare.PreparedData:
    """The recipe's data, with classes numbered as the model has them that it starts from."""
    head = head_classes(recipe) if recipe.task.name == "sequence_classification" else None
    return prepare.prepare_data(recipe, head=head, quiet=quiet)


def build_task_data(recipe: Recipe, quiet: bool) -> TaskData:
    prepared = prepare_task_data(recipe, quiet=quiet)
    if prepared.num_labels is not None and prepared.tokenizer.pad_token_id is None:
        # It fills the rows already. Decoders classify at the last token that is another one, and so do whoever opens
        # the model and pads by its tokenizer.
        prepared.tokenizer.pad_token = prepared.tokenizer.eos_token
    return TaskData(
        train=prepared.train,
        validation=prepared.validation,
        tokenizer=prepared.tokenizer,
        report=prepared.report.to_dict(),
        report_lines=tuple(prepared.report.start_lines()),
        num_labels=prepared.num_labels,
        label_names=prepared.label_names,
        digest=prepared.digest,
        ends=_ends(prepared),
    )


def without_validation(recipe: Recipe, data: prepare.PreparedData | TaskData) -> list[str]:
    """What to say where training has nothing to be evaluated on that the recipe did not leave out itself."""
    if data.validation is not None or data.train is None:
        return []
    report = data.report if isinstance(data.report, dict) else data.report.to_dict()
    if "train" not in report:
        return ["no validation rows, so nothing is evaluated: the task's build_data returns none"]
    fraction = recipe.data.validation_fraction
    if not fraction:
        return []
    if report["validation"] is not None:
        why = f"what is held out fills no row of {recipe.data.sequence_length} tokens"
    else:
        why = f"none of {report['train']['documents']:,} documents is held out (data.validation_fraction {fraction:g})"
    return [f"no validation rows, so nothing is evaluated: {why}", "Raise it, or name files in data.validation."]


def _ends(prepared: prepare.PreparedData) -> tuple[int, ...]:
    train = prepared.report.train
    names = train.chat.ends if train is not None and train.chat is not None else {}
    return tuple(int(prepared.tokenizer.convert_tokens_to_ids(name)) for name in names)
