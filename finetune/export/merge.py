"""Builds the network that was trained, and the merged one that is written."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.checkpoint import trusted_code
from finetune.checkpoint.run_fingerprint import base_of
from finetune.config.recipe_schema import Recipe
from finetune.export.find_weights import WeightSource
from finetune.export.verify_export import tensors_of
from finetune.models import lora_adapters
from finetune.models.build_network import base_dtype, build_base_model, build_model, loading_config
from finetune.models.heads import Head
from finetune.models.model_config import resolve_model_config
from finetune.models.pretrained_files import stored_dtype
from finetune.tasks.task import TaskData
from finetune.tasks.task_lookup import BUILT_IN, head_of, task_config
from finetune.utils.compat import transformers_private
from finetune.utils.errors import CheckpointError, RecipeError
from finetune.utils.hub_access import require_model

ADAPTER = "adapter_model.safetensors"


def source_head(source: WeightSource) -> Head:
    """Returns the head of the network that a run trained.

    Raises:
        RecipeError: If the task is one of the user's own, whose networks only it can open.
    """
    head = head_of(source.recipe)
    if head is None:
        raise RecipeError(
            f"task.name is '{source.recipe.task.name}', a custom task, and nothing but its code can open its "
            f"network in a fresh process. Exports are for {', '.join(BUILT_IN)}; the weights lie in "
            f"{source.weights}."
        )
    return head


def with_base(source: WeightSource, base: str | None) -> Recipe:
    """Returns the run's recipe, with its base at another place if that holds the same model.

    Raises:
        RecipeError: If it is another model than the run began with.
    """
    recipe = source.recipe
    if recipe.model.name is None or recipe.lora is None:
        if base is not None:
            why = "trained all weights" if recipe.lora is None else "began from random weights, which its recipe draws"
            raise RecipeError(f"--base is {base}, but {source.run} {why}, and needs no base. Leave --base out.")
        return recipe
    if base is not None:
        recipe = _with_model(recipe, name=base, revision=None)
        if not source.trusted:  # its weights are compared below, its code is not
            trusted_code.check_code(source.run, recipe, [trusted_code.SHIPPED])
    recorded = source.facts.get("base")
    if recorded is None:
        raise CheckpointError(
            f"{source.run / 'run.json'} does not say which base the run began with. Restore the file from a copy."
        )
    try:
        require_model(recipe.model.name)
        actual = base_of(recipe)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"The base of {source.run} cannot be read: {reason} Name it with --base.") from error
    assert actual is not None
    # A folder of the hub's cache is named after the commit that it holds.
    if recorded["digest"] not in (actual["digest"], Path(actual["name"]).resolve().name):
        raise RecipeError(
            f"{source.run} was trained on {recorded['name']} (digest {recorded['digest'][:16]}), but {actual['name']} "
            f"has other content (digest {actual['digest'][:16]}): merged onto another base, an adapter says nothing "
            "that training said. Name the one that it was trained on with --base."
        )
    return recipe


def build_reference(source: WeightSource, recipe: Recipe, ready: TaskData) -> nn.Module:
    """Returns the network that a run compared with, frozen: a second one, or the one that it began with.

    Raises:
        RecipeError: If it is not there, or is another one by now.
    """
    second = [(key, recipe.of_frozen(section)) for key, section in recipe.frozen_models.items()]
    key, own = [("model", recipe.model_copy(update={"lora": None})), *second][-1]
    try:
        if own.model.name is not None:
            require_model(own.model.name)
            if source.facts.get("identity", {}).get(f"{key}.name") != (base_of(own) or {})["digest"]:
                raise RecipeError("it has other content than when the run began.")
        own = _with_model(own, loss="plain")  # as in `build_trained`
        return build_model(own, task_config(own, ready), source_head(source), trained=False).eval()
    except (RecipeError, OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(
            f"{source.run} compares answers with {own.model.name or 'its model as training began'} ({key}.name), which "
            f"cannot be opened: {reason} Bring that model back, or name the file as validation data in the recipe."
        ) from error


def build_trained(
    source: WeightSource, recipe: Recipe, ready: TaskData, *, quantised: bool, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Returns the network as it was trained, from the checkpoint and the base.

    Args:
        recipe: The run's, with the base to take.
        quantised: Keeps a base quantised that was so in training.
        dtype: Type that weights are read in; those of adapters, and of a quantised base, are fp32.
    """
    head = source_head(source)
    network: nn.Module
    if recipe.lora is None:
        recipe = opened_recipe(source, recipe)
        try:
            network = build_base_model(recipe, resolve_model_config(recipe, head), head, dtype=dtype)
        except RecipeError as error:
            # The folder is the run's, and no name in a recipe.
            reason = str(error).removeprefix("model.name: ")
            raise CheckpointError(f"{reason} Restore it, or take another step (--step).") from error
        # Written back by the names of a checkpoint, experts would lie in one tensor, which only transformers opens.
        transformers_private.forget_weight_conversions(network)
        return network.eval()
    # That a head's own loss is the network's is verified where a run starts, and not here.
    recipe = _with_model(recipe, loss="plain")
    config = task_config(recipe, ready)
    if quantised:
        network = build_model(recipe, config, head)
    else:
        plain = _with_model(recipe, quantization=None)
        # Of a base that is stored quantized, for what its files lack.
        base: Any = build_base_model(plain, config, head, dtype=dtype, loading=loading_config(plain, config, head))
        if getattr(base.config, "quantization_config", None) is not None:
            base = base.dequantize()
            if hasattr(base.config, "quantization_config"):
                del base.config.quantization_config
            # How quantized weights were read; written back by it, plain ones would not be.
            transformers_private.forget_weight_conversions(base)
        network = lora_adapters.attach(base, recipe, head)
    file = source.weights / ADAPTER
    lora_adapters.fill_adapters(network, dict(tensors_of(file, "Restore it, or take another step.")), str(file))
    return network.eval()


def build_merged(source: WeightSource, recipe: Recipe, ready: TaskData, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the network with whatever was trained in its weights, in `dtype`.

    Weights are mapped from the files that they lie in, and replaced one at a time: what is written is the only copy.
    """
    stored = stored_dtype(source.weights) if recipe.lora is None else base_dtype(recipe)
    return lora_adapters.merge_adapters(build_trained(source, recipe, ready, quantised=False, dtype=stored), dtype)


def config_of(source: WeightSource, recipe: Recipe, ready: TaskData) -> Any:
    """Returns the configuration of the network that is written."""
    if recipe.lora is not None:
        return task_config(recipe, ready)
    return resolve_model_config(opened_recipe(source, recipe), source_head(source))


def opened_recipe(source: WeightSource, recipe: Recipe) -> Recipe:
    """Returns a recipe with the model that holds what was trained: a run's weights, or with adapters its base."""
    if recipe.lora is not None:
        return recipe
    return _with_model(recipe, name=str(source.weights), revision=None, config=None)


def _with_model(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})
