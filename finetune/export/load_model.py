"""Loads a model from a run, a checkpoint, an adapter, an export, a model directory or the hub."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from finetune.checkpoint.trusted_code import SHIPPED
from finetune.config import path_kinds
from finetune.config.recipe_schema import Recipe
from finetune.export import find_weights, merge
from finetune.models import lora_adapters, pretrained_files, prompts
from finetune.models.heads import NEXT_TOKEN
from finetune.tasks import causal_lm
from finetune.tasks.task import Batch, TaskData
from finetune.tasks.task_lookup import head_of
from finetune.utils.errors import CheckpointError, RecipeError


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode, on the device that there is."""

    network: nn.Module
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

    @property
    def template_args(self) -> Mapping[str, Any]:
        """Variables that a run's recipe gives its chat template."""
        section = self.recipe.chat if self.recipe is not None else None
        return section.template_args if section is not None else {}

    @property
    def longest(self) -> int | None:
        """Number of positions that the network knows."""
        return getattr(lora_adapters.config_of(self.network).get_text_config(), "max_position_embeddings", None)

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
        FinetuneError: If there is nothing to open, or it is no causal language model.
    """
    place = Path(name)
    if find_weights.is_run(place):
        return _load_run(place, step, base, trust_remote_code)
    if step is not None:
        raise CheckpointError(f"--step is for run directories, and {name} is none (it has no recipe.yaml).")
    dtype = torch.float32 if exact else "auto"
    try:
        pretrained_files.refuse_adapter(place)
        if (place / "adapter_config.json").is_file():
            return _load_adapter(place, base, dtype, trust_remote_code)
        if base is not None:
            raise CheckpointError(f"--base is for adapters, and {name} has no adapter_config.json.")
        if path_kinds.kind_of(place) != "adapter" and (wrong := path_kinds.why_not(place, "model")) is not None:
            raise CheckpointError(wrong)
        if place.is_dir() and not (place / "config.json").is_file():
            raise CheckpointError(
                f"{name} holds no network: it has no recipe.yaml (a run), manifest.json (a checkpoint), "
                "adapter_config.json or config.json. Name one that does."
            )
        model, lines = _load_plain(name, dtype, trust_remote_code)
        home = place if place.is_dir() else None
        return _ready(LoadedModel(model, _tokenizer(name, trust_remote_code), name, None, lines=lines, home=home))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, (CheckpointError, RecipeError)):
            raise
        raise CheckpointError(f"{name} cannot be opened: {' '.join(str(error).split())[:400]}") from error


def _load_run(place: Path, step: int | None, base: str | None, trusted: bool) -> LoadedModel:
    found = find_weights.find_weights(place, step, runs=(SHIPPED, "task.name"), trusted=trusted)
    with found.held:
        head = head_of(found.recipe)
        _check_head(head is not None and head.next_token, f"{place} (task {found.recipe.task.name})")
        folder = str(found.weights)
        tokenizer = _tokenizer(folder, found.recipe.model.trust_remote_code)
        recipe = merge.with_base(found, base) if found.recipe.lora is not None else found.recipe
        model = merge.build_trained(found, recipe, TaskData(train=None, tokenizer=tokenizer), quantised=True)
        stops = tuple(found.learned_stop_tokens(tokenizer))
        return _ready(LoadedModel(model, tokenizer, folder, found.recipe, stops, home=found.run, step=found.step))


def _load_adapter(place: Path, base: str | None, dtype: torch.dtype | str, trusted: bool) -> LoadedModel:
    facts = path_kinds.adapter_config(place)
    _check_head(facts.get("task_type") in (None, NEXT_TOKEN.peft_type), f"{place} (task {facts.get('task_type')})")
    name = base or facts.get("base_model_name_or_path")
    if not name:
        raise CheckpointError(f"{place / 'adapter_config.json'} names no base. Name it with --base.")
    if (wrong := path_kinds.why_not(Path(name), "model")) is not None:
        raise CheckpointError(f"The adapter's base: {wrong}" if base is None else f"--base: {wrong}")
    model, lines = _load_plain(name, dtype, trusted, facts.get("revision") if base is None else None)
    folder = str(place) if any(place.glob("tokenizer*")) else name
    adapted, tokenizer = lora_adapters.open_adapter(model, place), _tokenizer(folder, trusted)
    stops = tuple(prompts.read_stop_tokens(place))
    return _ready(LoadedModel(adapted, tokenizer, folder, None, stops, lines, home=place))


def _load_plain(
    name: str, dtype: torch.dtype | str, trusted: bool, revision: str | None = None
) -> tuple[nn.Module, tuple[str, ...]]:
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trusted)
    kinds = config.architectures or []
    _check_head(not any("Classification" in kind for kind in kinds), f"{name} ({', '.join(kinds)})")
    model, weights = pretrained_files.load_pretrained(
        NEXT_TOKEN.auto, name, config, revision=revision, dtype=dtype, trust_remote_code=trusted
    )
    weights.check_values()
    return model, weights.lines


def _check_head(fits: bool, what: str) -> None:
    if not fits:
        raise RecipeError(f"{what} is no causal language model: it neither writes text nor has a perplexity.")


def _tokenizer(folder: str, trusted: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{folder} has no tokenizer that opens: {' '.join(str(error).split())[:300]}") from error


def _ready(opened: LoadedModel) -> LoadedModel:
    network = opened.network.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
    inner = lora_adapters.transformer(network)
    if inner is not None:
        seen = causal_lm.sees_ahead(inner, opened.scores, opened.device).item()
        if seen > causal_lm.tolerances(opened.precision)[0]:
            raise RecipeError(
                f"{opened.tokenizer_folder} is no causal language model as it is configured "
                f"({inner.config.model_type}): tokens see those behind them, so that its texts and perplexity mean "
                "nothing. Set `is_decoder: true` in its config.json if it was trained so, or open another model."
            )
    return opened
