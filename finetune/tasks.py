"""What a model is trained to do. The loop knows only a module and a `loss_sum`.

A task is four functions. The built-in ones are causal language modelling and sequence classification; your
own is named in the recipe as `package.module:object`, a `Task` or a function of `task.args` that returns one.

Letters: `B` rows, `T` tokens, `V` vocabulary, `C` classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from finetune import adapters, attention, data, loss, models, pretrained
from finetune.errors import RecipeError
from finetune.optim import import_object
from finetune.recipe import Recipe

Batch = Mapping[str, torch.Tensor]


class Rows(Protocol):
    """Training rows, read by position."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The given rows as CPU tensors, first dimension `B`."""
        ...

    def num_targets(self, rows: np.ndarray) -> int:
        """How many targets `loss_sum` sums over for these rows; must be known before the forward pass."""
        ...

    # Rows may also have `num_computed(rows)`: how many tokens the network computes, learned or not, without padding.


@dataclass(frozen=True)
class TaskData:
    """What a task learns from and is evaluated on."""

    train: Rows | None
    validation: Rows | None = None
    tokenizer: Any | None = None
    report: dict[str, Any] = field(default_factory=dict)
    """What is written into `run.json`."""
    report_lines: tuple[str, ...] = ()
    """What people read at the start."""
    num_labels: int | None = None
    label_names: tuple[str, ...] = ()
    digest: str = ""
    """Changes whenever the training rows do."""
    ends: tuple[int, ...] = ()
    """The tokens that learned answers end in, if they are conversations."""


@dataclass(frozen=True)
class Task:
    """What the loop needs to know of a job."""

    build_data: Callable[[Recipe, bool], TaskData]
    """`(recipe, quiet)` to data. Runs before any process group exists, on every process."""
    build_model: Callable[[Recipe, TaskData], nn.Module]
    """To a network with the same weights on every process; it may be on the meta device."""
    loss_sum: Callable[[nn.Module, Batch], torch.Tensor]
    """The loss summed over the batch's targets, a scalar in fp32."""
    loss_and_correct: Callable[[nn.Module, Batch], torch.Tensor] | None = None
    """What `loss_sum` returns and how many targets were predicted right, (2,) in fp32, by one forward pass: evaluation
    then reports `accuracy`."""
    build_skeleton: Callable[[Recipe, TaskData | None], nn.Module] | None = None
    """The network on the meta device, for dry runs and for writing it."""
    text: bool = False
    """Whether the network writes text, token by token."""


def find(recipe: Recipe) -> Task:
    """The task that the recipe names.

    Raises:
        RecipeError: If there is none, or it is not a `Task`.
    """
    name = recipe.task.name
    if name == "causal_lm":
        return CAUSAL_LM
    if name == "sequence_classification":
        return SEQUENCE_CLASSIFICATION
    found = import_object(name, "task.name")
    if not isinstance(found, Task) and callable(found):
        try:
            found = found(**recipe.task.args)
        except TypeError as error:
            raise RecipeError(f"task.args: '{name}' refuses {recipe.task.args}: {error}.") from error
    if not isinstance(found, Task):
        raise RecipeError(
            f"task.name: '{name}' is {type(found).__name__}, not a finetune.tasks.Task or a function that returns one."
        )
    return found if recipe.lora is None else _adapted(found)


def _adapted(task: Task) -> Task:
    """A task of one's own whose networks get adapters; the built-in ones ask for theirs when they build."""
    build_skeleton = task.build_skeleton

    def model(recipe: Recipe, ready: TaskData) -> nn.Module:
        # With weights first: adapters may be computed from them.
        return adapters.attach(models.materialise(task.build_model(recipe, ready), recipe.seed), recipe)

    def skeleton(recipe: Recipe, ready: TaskData | None) -> nn.Module:
        assert build_skeleton is not None
        network = build_skeleton(recipe, ready)
        with torch.device("meta"):
            return adapters.attach(network, recipe)

    return replace(task, build_model=model, build_skeleton=skeleton if build_skeleton is not None else None)


def _build_data(recipe: Recipe, quiet: bool) -> TaskData:
    prepared = data.prepare(recipe, quiet=quiet)
    if prepared.num_labels is not None and prepared.tokenizer.pad_token_id is None:
        # It fills the rows already. Decoders classify at the last token that is another one, and so do whoever opens
        # the model and pads by its tokenizer.
        prepared.tokenizer.pad_token = prepared.tokenizer.eos_token
    return TaskData(
        train=prepared.train,
        validation=prepared.validation,
        tokenizer=prepared.tokenizer,
        report=prepared.report.to_dict(),
        report_lines=tuple(prepared.report.lines()),
        num_labels=prepared.num_labels,
        label_names=prepared.label_names,
        digest=prepared.digest,
        ends=_ends(prepared),
    )


def _ends(prepared: data.PreparedData) -> tuple[int, ...]:
    train = prepared.report.train
    names = train.chat.ends if train is not None and train.chat is not None else {}
    return tuple(int(prepared.tokenizer.convert_tokens_to_ids(name)) for name in names)


def _causal_lm_skeleton(recipe: Recipe, ready: TaskData | None) -> nn.Module:
    config = models.resolve_config(
        recipe,
        tokenizer=ready.tokenizer if ready else None,
        vocab_size=recipe.tokenizer.vocab_size,
    )
    return models.skeleton(config, "causal_lm", recipe)


def _build_causal_lm(recipe: Recipe, ready: TaskData) -> nn.Module:
    config = models.resolve_config(recipe, tokenizer=ready.tokenizer)
    return models.build(recipe, config, "causal_lm")


def causal_lm_logits(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Scores of the next token, (B, T, V), in the dtype that the network computes in.

    No attention mask, and no cache: transformers tells packed documents apart by their restarting positions,
    and only if it is given neither. Attention that takes one document at a time is told where they begin.
    """
    return _outputs(network, batch).logits  # type: ignore[no-any-return]


def _outputs(network: nn.Module, batch: Batch) -> Any:
    positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    told = attention.told_by(adapters.transformer(network), batch)
    return network(input_ids=batch["input_ids"], use_cache=False, **positions, **told)


def _causal_lm_loss(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Targets are shifted already."""
    inner = adapters.transformer(network)
    fused = loss.of_network(inner)
    if fused is None:
        return loss.plain(causal_lm_logits(network, batch), batch["targets"])
    fused.targets = batch["targets"].flatten()
    try:
        outputs = _outputs(network, batch)
    finally:
        fused.targets = None
    # A copy, not a view: wrappers that shard warn of views that leave a module.
    return outputs.logits.reshape(()).clone()  # type: ignore[no-any-return]


def _num_labels(recipe: Recipe, ready: TaskData | None) -> int:
    counted = ready.num_labels if ready is not None else None
    asked = recipe.task.num_labels
    if counted is not None and asked is not None and counted > asked:
        raise RecipeError(f"task.num_labels is {asked}, but the data has {counted} classes. Set it to {counted}.")
    found = asked or counted
    if found is None:
        raise RecipeError("task.num_labels: how many classes there are is not known before the data is read; give it.")
    return found


def _classifier_config(recipe: Recipe, ready: TaskData | None) -> Any:
    tokenizer = ready.tokenizer if ready else None
    config = models.resolve_config(
        recipe,
        tokenizer=tokenizer,
        vocab_size=recipe.tokenizer.vocab_size,
        num_labels=_num_labels(recipe, ready),
        label_names=ready.label_names if ready and len(ready.label_names) == _num_labels(recipe, ready) else (),
    )
    if tokenizer is not None and tokenizer.pad_token_id is not None:
        # What fills the rows, and not what a model's config may say.
        config.pad_token_id = tokenizer.pad_token_id
    elif tokenizer is not None and config.pad_token_id is None:
        raise RecipeError(
            f"tokenizer: the tokenizer has neither a padding token nor an end of text, and a {config.model_type} "
            "classifies at the last token that is no padding. Name a tokenizer with one of them as tokenizer.name."
        )
    return config


def _build_classifier(recipe: Recipe, ready: TaskData) -> nn.Module:
    return models.build(recipe, _classifier_config(recipe, ready), "sequence_classification")


def _classifier_skeleton(recipe: Recipe, ready: TaskData | None) -> nn.Module:
    return models.skeleton(_classifier_config(recipe, ready), "sequence_classification", recipe)


def _class_scores(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Scores of the classes, (B, C)."""
    return network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits  # type: ignore[no-any-return]


def _classifier_loss(network: nn.Module, batch: Batch) -> torch.Tensor:
    return _class_loss(_class_scores(network, batch), batch)


def _class_loss(scores: torch.Tensor, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(scores.float(), batch["targets"], reduction="sum")


def _classifier_loss_and_correct(network: nn.Module, batch: Batch) -> torch.Tensor:
    scores = _class_scores(network, batch)
    return torch.stack((_class_loss(scores, batch), (scores.argmax(-1) == batch["targets"]).sum().float()))


def head_of(recipe: Recipe) -> adapters.Head | None:
    """What a built-in task's network puts out; None for a task of one's own."""
    found: dict[str, adapters.Head] = {
        "causal_lm": "causal_lm",
        "sequence_classification": "sequence_classification",
    }
    return found.get(recipe.task.name)


def check_weights(recipe: Recipe, ready: TaskData) -> pretrained.Weights | None:
    """The files that a built-in task's network starts from, looked at; see `models.check_weights`.

    Raises:
        RecipeError: If they do not hold all of it.
    """
    head = head_of(recipe)
    return None if head is None else models.check_weights(recipe, config_of(recipe, ready), head)


def config_of(recipe: Recipe, ready: TaskData) -> Any:
    """The configuration of the network that a built-in task builds."""
    if head_of(recipe) == "sequence_classification":
        return _classifier_config(recipe, ready)
    return models.resolve_config(recipe, tokenizer=ready.tokenizer)


CAUSAL_LM = Task(
    build_data=_build_data,
    build_model=_build_causal_lm,
    loss_sum=_causal_lm_loss,
    build_skeleton=_causal_lm_skeleton,
    text=True,
)
SEQUENCE_CLASSIFICATION = Task(
    build_data=_build_data,
    build_model=_build_classifier,
    loss_sum=_classifier_loss,
    loss_and_correct=_classifier_loss_and_correct,
    build_skeleton=_classifier_skeleton,
)
