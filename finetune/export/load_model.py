"""Loads a model from a run, a checkpoint, an adapter, an export, a model directory or the hub."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from finetune.checkpoint.trusted_code import SHIPPED
from finetune.config import recipe_paths
from finetune.config.preference_losses import base_problem
from finetune.config.recipe_schema import Recipe
from finetune.data.tokenization.tokenizer import num_ids, why_damaged
from finetune.export import find_weights, merge
from finetune.models import lora_adapters, pretrained_files, prompts
from finetune.models.heads import NEXT_TOKEN, Head
from finetune.models.model_config import longest_row
from finetune.tasks import causal_lm, classification, regression
from finetune.tasks.task import Batch, Task, TaskData
from finetune.tasks.task_lookup import built_in_task, named_task
from finetune.utils import json_files
from finetune.utils.compat.transformers_private import model_mapping
from finetune.utils.errors import CheckpointError, RecipeError
from finetune.utils.hub_access import require_model

_NEITHER = "is no language model and no classifier of documents or words: it cannot be opened here."


@dataclass(frozen=True)
class LoadedModel:
    """A language model or a classifier in evaluation mode, on the device that there is."""

    network: nn.Module
    task: Task
    """The run's, or the built-in one that such a network is for."""
    tokenizer: Any
    tokenizer_folder: str
    recipe: Recipe | None
    """The run's, if it is one."""
    ends: tuple[int, ...] = ()
    """Tokens at which it stops, besides those of its generation config and tokenizer."""
    lines: tuple[str, ...] = ()
    """Lines to report about its files."""
    home: Path | None = None
    """The folder of the run, or of the files; None for the hub's."""
    step: int | None = None
    """Step of a run that these weights are of."""
    open_reference: Callable[[], nn.Module] | None = None
    """Opens the network that a run compared with; None if that is this one without its adapters, or it had none."""

    @property
    def template_args(self) -> Mapping[str, Any]:
        """Variables that a run's recipe gives its chat template."""
        section = self.recipe.chat if self.recipe is not None else None
        return section.template_args if section is not None else {}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that a classifier tells apart, in order of their numbers."""
        config = lora_adapters.config_of(self.network)
        return tuple(str(config.id2label[number]) for number in range(config.num_labels))

    @property
    def writes_text(self) -> bool:
        """True if it continues a text, for it scores the next token of each token."""
        return self.task.head is not None and self.task.head.next_token

    def require_text(self) -> None:
        """Raises a `RecipeError` if it continues no text."""
        if not self.writes_text:
            other = "neither writes text nor has a perplexity. `finetune predict` gives the classes of documents."
            if self.task.rows.reads_source:
                other = "writes one text from another. `finetune generate` and `finetune predict` have it write."
            raise RecipeError(f"{self.home or self.tokenizer_folder} is no causal language model: it {other}")

    def require_predictions(self) -> None:
        """Raises a `RecipeError` if it gives a document neither a class, nor a number, nor a text."""
        if not (self.task.rows.reads_source or self.writes_text):
            self.require_labels()

    def require_labels(self) -> None:
        """Raises a `RecipeError` if it gives neither a document nor its words one of several classes or a number."""
        folder = self.home or self.tokenizer_folder
        if self.task.scores is None or not self.task.rows.gives_scores:
            raise RecipeError(
                f"{folder} is no classifier of documents or words, and has no classes to predict. `finetune generate` "
                "writes texts with a language model."
            )
        config = lora_adapters.config_of(self.network)
        if config.problem_type == "multi_label_classification" or (
            config.num_labels > 1 and self.task.rows.labels == "number"
        ):
            raise RecipeError(
                f"{folder} gives several classes or numbers for a document, as its config.json says (problem_type "
                f"{config.problem_type}, num_labels {config.num_labels}). Name a model that gives one, or train one "
                "from it, on documents with one class or number."
            )

    @property
    def longest(self) -> int | None:
        """Number of tokens that the network can place; None without a limit."""
        return longest_row(lora_adapters.config_of(self.network))

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def precision(self) -> str:
        """Precision that it computes in: `fp32`, or `bf16` for any 16 bits."""
        return "fp32" if next(self.network.parameters()).dtype == torch.float32 else "bf16"

    @torch.no_grad()
    def scores(self, batch: Batch, forward: Callable[[nn.Module, Batch], torch.Tensor]) -> torch.Tensor:
        """Returns the logits that a function of network and batch computes, in fp32."""
        return forward(self.network, batch).float()


def load_model(
    name: str, *, step: int | None = None, base: str | None = None, exact: bool = False, trust_remote_code: bool = False
) -> LoadedModel:
    """Opens a place; an adapter goes onto the base that it names.

    Args:
        step: Of a run, the checkpoint's step.
        base: The base, if it does not lie where the run or adapter says.
        exact: Computes in fp32, else in the type that the weights are stored in. Runs always compute in fp32.
        trust_remote_code: Whether Python code that ships with the model may run. That of a run which this user started
            on this machine does where its recipe says so.

    Raises:
        FinetuneError: If there is nothing to open, or it is neither a language model nor a classifier.
    """
    path = Path(name)
    if find_weights.is_run(path):
        return _load_run(path, step, base, trust_remote_code)
    if step is not None:
        raise CheckpointError(f"--step is for run directories, and {name} is none (it has no recipe.yaml).")
    dtype = torch.float32 if exact else "auto"
    causes = (OSError, ValueError, RecursionError, StrictDataclassError)
    with CheckpointError.explaining(f"{name} cannot be opened", "", *causes):
        pretrained_files.refuse_adapter(path)
        if (path / "adapter_config.json").is_file():
            return _load_adapter(path, base, dtype, trust_remote_code)
        if base is not None:
            raise CheckpointError(f"--base is for adapters, and {name} has no adapter_config.json.")
        if recipe_paths.kind_of(path) != "adapter" and (wrong := recipe_paths.why_not(path, "model")) is not None:
            raise CheckpointError(wrong)
        if path.is_dir() and not (path / "config.json").is_file():
            raise CheckpointError(
                f"{name} holds no network: it has no recipe.yaml (a run), manifest.json (a checkpoint), "
                "adapter_config.json or config.json. Name one that does."
            )
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        task = _task_of(config, name)
        model, lines = _load_plain(name, task, config, dtype=dtype, trust_remote_code=trust_remote_code)
        home = path if path.is_dir() else None
        return _ready(LoadedModel(model, task, _tokenizer(name, trust_remote_code), name, None, lines=lines, home=home))


def _load_run(place: Path, step: int | None, base: str | None, trusted: bool) -> LoadedModel:
    saved = find_weights.find_weights(place, step, runs=(SHIPPED, "task.name"), trusted=trusted)
    with saved.held:
        task = named_task(saved.recipe)
        if task.rows.taught:
            # Without its teacher it is a language model like any.
            task = built_in_task(lambda head: head.next_token) or task
        if task.head is None or not (task.rows.writes_text or task.scores is not None):
            raise RecipeError(
                f"{place} (task {saved.recipe.task.name}) is no causal language model: it neither writes text nor "
                "gives classes (`scores` of a custom task)."
            )
        folder = str(saved.weights)
        tokenizer = _tokenizer(folder, saved.recipe.model.trust_remote_code)
        recipe = merge.with_base(saved, base) if saved.recipe.lora is not None else saved.recipe
        names = saved.class_names
        ready = TaskData(train=None, tokenizer=tokenizer, num_labels=len(names) or None, label_names=names)
        model = merge.build_trained(saved, recipe, ready, quantised=True)
        stops, other = tuple(saved.learned_stop_tokens(tokenizer)), None
        if task.reference is not None and (saved.recipe.frozen_models or base_problem(saved.recipe)):
            other = partial(merge.build_reference, saved, recipe, ready)
        opened = LoadedModel(model, task, tokenizer, folder, saved.recipe, stops, home=saved.run, step=saved.step)
        return _ready(replace(opened, open_reference=other))


def _load_adapter(place: Path, base: str | None, dtype: torch.dtype | str, trusted: bool) -> LoadedModel:
    facts = recipe_paths.adapter_config(place)
    kind = facts.get("task_type") or NEXT_TOKEN.peft_type
    task = built_in_task(lambda head: head.peft_type == kind)
    if task is None:
        raise RecipeError(f"{place} (task {kind}) {_NEITHER}")
    name = base or facts.get("base_model_name_or_path")
    if not name:
        raise CheckpointError(f"{place / 'adapter_config.json'} names no base. Name it with --base.")
    if (wrong := recipe_paths.why_not(Path(name), "model")) is not None:
        raise CheckpointError(f"The adapter's base: {wrong}" if base is None else f"--base: {wrong}")
    try:
        require_model(name)
    except RecipeError as error:
        raise CheckpointError(f"The base of the adapter in {place}: {error} Name it with --base.") from error
    revision = facts.get("revision") if base is None else None
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trusted)
    if task.rows.labels:
        names = _adapter_classes(place)
        task = regression.REGRESSION if len(names) == 1 and task.rows.labels == "class" else task
        config.id2label, config.label2id = dict(enumerate(names)), {name: n for n, name in enumerate(names)}
    else:
        _task_of(config, name)
    options = {"revision": revision, "dtype": dtype, "trust_remote_code": trusted}
    model, lines = _load_plain(name, task, config, new_head=bool(task.rows.labels), **options)
    folder = str(place) if any(place.glob("tokenizer*")) else name
    adapted, tokenizer = lora_adapters.open_adapter(model, place), _tokenizer(folder, trusted)
    stops = tuple(prompts.read_stop_tokens(place))
    return _ready(LoadedModel(adapted, task, tokenizer, folder, None, stops, lines, home=place))


def _load_plain(
    name: str, task: Task, config: Any, *, new_head: bool = False, **options: Any
) -> tuple[nn.Module, tuple[str, ...]]:
    assert task.head is not None
    model, weights = pretrained_files.load_pretrained(task.head.auto, name, config, new_head=new_head, **options)
    weights.check_values()
    return model, () if new_head else weights.lines


def _task_of(config: Any, name: str) -> Task:
    kinds = config.architectures or []

    def fits(head: Head) -> bool:
        if head.encodes:
            # Each architecture has its own name for such networks.
            network = model_mapping(head.auto).get(type(config), None)
            return bool(getattr(config, "is_encoder_decoder", False)) and getattr(network, "__name__", None) in kinds
        return any(kind.endswith(head.auto_class.removeprefix("AutoModel")) for kind in kinds)

    task = built_in_task(fits)
    if task is None and any("Classification" in kind for kind in kinds):
        raise RecipeError(f"{name} ({', '.join(kinds)}) {_NEITHER}")
    if task is classification.SEQUENCE_CLASSIFICATION and (
        config.num_labels == 1 or config.problem_type == "regression"
    ):
        return regression.REGRESSION
    return task or causal_lm.CAUSAL_LM


def _adapter_classes(folder: Path) -> list[str]:
    """Names of the classes that an exported adapter tells apart; one without a meaning if it gives numbers."""
    try:
        names: list[str] = json_files.read(folder / "export.json", {"classes": [str]}).get("classes", ["LABEL_0"])
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is a classifier's adapter, and no export.json names its classes. Open the run that trained it, "
            "or what `finetune export RUN --as adapter` or `--as merged` writes."
        ) from error
    return names


def _tokenizer(folder: str, trusted: bool) -> Any:
    causes = (OSError, ValueError, KeyError, RecursionError)
    with CheckpointError.explaining(f"{folder} has no tokenizer that opens", "", *causes):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    if damage := why_damaged(tokenizer):
        raise CheckpointError(f"The tokenizer of {folder} {damage}. Copy them from the model that it was made from.")
    return tokenizer


def _ready(opened: LoadedModel) -> LoadedModel:
    network = opened.network.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
    kind = opened.task.rows
    if (kind.gives_scores and kind.labels != "tag") or kind.reads_source:
        classification.set_padding(lora_adapters.config_of(network), opened.tokenizer)
    if (size := num_ids(opened.tokenizer)) > (rows := lora_adapters.config_of(network).get_text_config().vocab_size):
        raise CheckpointError(
            f"The tokenizer of {opened.tokenizer_folder} numbers its tokens up to {size - 1}, but the model's "
            f"vocabulary holds {rows}. Copy the tokenizer's files from the model that it was made from."
        )
    inner = lora_adapters.transformer(network) if opened.writes_text else None
    if inner is not None:
        seen = causal_lm.sees_ahead(inner, opened.scores, opened.device).item()
        if seen > causal_lm.tolerances(opened.precision)[0]:
            raise RecipeError(
                f"{opened.tokenizer_folder} is no causal language model as it is configured "
                f"({inner.config.model_type}): tokens see those behind them, so that its texts and perplexity mean "
                "nothing. Set `is_decoder: true` in its config.json if it was trained so, or open another model."
            )
    return opened
