"""LoRA adapters, by peft: attached, saved, merged.

peft is imported where it is used: that takes a second, which a run without adapters need not wait.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from finetune.config import recipe_paths
from finetune.config.recipe import hint
from finetune.config.recipe_schema import LoraSection, ModelSection, Recipe
from finetune.models.heads import Head
from finetune.models.pretrained_files import added_modules
from finetune.utils.compat.peft_private import without_bitsandbytes
from finetune.utils.errors import CheckpointError, RecipeError

# Conv1D is the linear layer of GPT-2, a class of transformers' own.
_LINEAR = ("Linear", "StoredLinear", "Conv1D", "Linear4bit", "Linear8bit")


def transformer(network: nn.Module) -> PreTrainedModel | None:
    """Returns the transformers network itself, inside its adapters if it has any; None for any other network."""
    adapted: Any = network
    inner = adapted.get_base_model() if _is_adapted(network) else network
    return inner if isinstance(inner, PreTrainedModel) else None


def embeddings_and_head(network: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns the input embedding and the output head of one of transformers' networks, as far as it has them."""
    return network.get_input_embeddings(), network.get_output_embeddings()


def attach(network: nn.Module, recipe: Recipe, head: Head | None = None) -> nn.Module:
    """Freezes a network and puts the recipe's adapters around its linear modules.

    The adapters are fp32 and drawn from `recipe.seed`: the same on every rank and backend. What a classifier adds to
    the pretrained network is new, and trained whole. Without a `lora` section the network is returned as it is, and
    so is one that has its adapters. `head` is written into the adapter's configuration.

    Raises:
        RecipeError: If the section does not fit the network.
    """
    section = recipe.lora
    if section is None or _is_adapted(network):
        return network
    if not isinstance(network, PreTrainedModel):
        raise RecipeError(
            f"lora: adapters go into networks of transformers, and task '{recipe.task.name}' builds a "
            f"{type(network).__name__}. Remove the section, or build a PreTrainedModel."
        )
    targets, saved = _choose_modules(network, section, recipe.model, head)
    with without_bitsandbytes(), warnings.catch_warnings():
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type=head.peft_type if head is not None else None,
            r=section.rank,
            lora_alpha=int(section.alpha) if section.alpha.is_integer() else section.alpha,
            lora_dropout=section.dropout,
            target_modules=targets,
            modules_to_save=saved or None,
            fan_in_fan_out=any(type(network.get_submodule(name)).__name__ == "Conv1D" for name in targets),
            use_rslora=section.rslora,
            use_dora=section.dora,
            init_lora_weights=True if section.init == "default" else section.init,
            revision=recipe.model.revision,
        )
        # Anew: where a network is sharded as it loads, loading draws other numbers than elsewhere.
        torch.manual_seed(recipe.seed)
        # Said of networks that have linear layers of both classes; peft then does what is right.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        adapted: nn.Module = get_peft_model(network, config)
        if recipe.model.name is not None:
            config.base_model_name_or_path = recipe_paths.place_of_model(recipe.model.name)
    return adapted


def describe_adapters(network: nn.Module) -> str | None:
    """Describes the adapters in a few words for people; None if there are none."""
    config = adapter_config(network)
    if config is None:
        return None
    count = sum(hasattr(module, "lora_A") for module in network.modules())
    parts = [f"{'DoRA' if config.use_dora else 'LoRA'} of rank {config.r} on {count} modules"]
    # peft adds the usual names of a classifier's head to those that it was given.
    names = [f".{name}" for name, _ in network.named_modules()]
    whole = [key for key in sorted({*(config.modules_to_save or ())}) if any(n.endswith(f".{key}") for n in names)]
    if whole:
        parts.append(f"trained whole: {', '.join(whole)}")
    return ", ".join(parts)


def adapter_config(network: nn.Module) -> Any:
    """Returns the `PeftConfig` of a network's adapters, which `save_pretrained` writes; None if it has none."""
    adapted: Any = network
    return adapted.peft_config["default"] if _is_adapted(network) else None


def adapter_keys(network: nn.Module) -> dict[str, str]:
    """Returns the keys of trained parameters in `adapter_model.safetensors`, by their names in the network."""
    from peft import get_peft_model_state_dict

    # peft's own rules, run over names instead of tensors: nothing needs to be gathered.
    names = {name: name for name in network.state_dict()}
    kept: dict[str, str] = get_peft_model_state_dict(network, state_dict=names, save_embedding_layers=False)
    return {name: key for key, name in kept.items()}


def fill_adapters(network: nn.Module, tensors: Mapping[str, torch.Tensor], place: str) -> None:
    """Gives a network's adapters the values of an adapter file.

    Args:
        tensors: Tensors by their keys in the file.
        place: The file, for the message.

    Raises:
        CheckpointError: If a tensor is missing, unexpected or of another shape.
    """
    keys = adapter_keys(network)
    missing, unexpected = sorted(set(keys.values()) - set(tensors)), sorted(set(tensors) - set(keys.values()))
    if missing or unexpected:
        raise CheckpointError(
            f"{place} is of other adapters: {len(missing)} tensors are missing ({', '.join(missing[:3]) or 'none'}), "
            f"{len(unexpected)} are unexpected ({', '.join(unexpected[:3]) or 'none'}). Take those of the recipe's run."
        )
    state = network.state_dict()
    for name, key in keys.items():
        if state[name].shape != tensors[key].shape:
            raise CheckpointError(
                f"{place}: {key} has shape {list(tensors[key].shape)}, where the model has {list(state[name].shape)}. "
                "Take the model that the adapter was trained on."
            )
        state[name].copy_(tensors[key])


def merge_adapters(network: nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the network with its adapters merged into the weights, and the weights in `dtype`.

    Computed in fp32, one module at a time, and rounded once.
    """
    adapted: Any = network
    with torch.no_grad(), warnings.catch_warnings():
        # peft says of each module that it was merged already.
        warnings.simplefilter("ignore")
        module: Any
        for module in network.modules():
            if hasattr(module, "lora_A") and hasattr(module, "merge"):
                weight = module.get_base_layer().weight
                weight.data = weight.data.float()
                module.merge()
                weight.data = weight.data.to(dtype)
        merged: PreTrainedModel = adapted.merge_and_unload() if _is_adapted(network) else adapted
        for parameter in merged.parameters():
            parameter.data = parameter.data.to(dtype)
    return merged.requires_grad_(False)


def open_adapter(network: nn.Module, folder: Path) -> nn.Module:
    """Returns a network with the adapter that lies in a folder.

    Raises:
        CheckpointError: If the adapter does not fit, or lacks tensors.
    """
    from peft import PeftModel

    file = folder / "adapter_model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            stored_keys = set(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read, it is absent, damaged or incomplete ({error}). Copy the adapter again; one that "
            "is stored as a pickle (adapter_model.bin) has to be written anew by peft."
        ) from error
    causes = (OSError, ValueError, RuntimeError, KeyError)
    with CheckpointError.explaining(f"The adapter in {folder} does not fit its base", "", *causes):
        adapted: nn.Module = PeftModel.from_pretrained(network, str(folder))
    missing = sorted(set(adapter_keys(adapted).values()) - stored_keys)
    if missing:
        # By itself peft fills them with random values.
        raise CheckpointError(
            f"{file} lacks {len(missing)} of the adapter's tensors, such as {missing[0]}. Take a complete copy of it."
        )
    return adapted


def config_of(network: nn.Module) -> Any:
    """Returns the configuration of the transformers network inside."""
    inner = transformer(network)
    assert inner is not None
    return inner.config


def match_names(
    key: str, wanted: str | Sequence[str], names: Sequence[str], *, kind: str, of: str, also: str = ""
) -> list[str]:
    """Returns the full names that are meant, in the order of `names`.

    Args:
        key: The recipe's key, for messages; likewise `kind` (of the named things) and `of` (their owner).
        wanted: One regular expression, which is compared with whole names, or last parts of names.
        names: Full dotted names to choose from.
        also: A word that would be allowed as well.

    Raises:
        RecipeError: If nothing is meant by the expression, or by one of the parts.
    """
    words = sorted({name.rsplit(".", 1)[-1] for name in names if not name.rsplit(".", 1)[-1].isdecimal()})
    if isinstance(wanted, str):
        matches = [name for name in names if re.fullmatch(wanted, name)]
        if not matches:
            meant = hint(wanted, [also, *(f"[{word}]" for word in words)])
            raise RecipeError(
                f"{key}: the regular expression '{wanted}' matches none of the {len(names)} {kind}s of "
                f"{of}{meant or '.'} It is compared with whole names, such as {' and '.join(names[:2])}."
            )
        return matches
    matches = []
    for word in wanted:
        named = [name for name in names if f".{name}".endswith(f".{word}")]
        if not named:
            raise RecipeError(
                f"{key}: '{word}' is no {kind} of {of}{hint(word, words) or '.'} Its {kind}s are {', '.join(words)}."
            )
        matches += named
    return sorted(set(matches), key=names.index)


def _is_adapted(network: nn.Module) -> bool:
    return hasattr(network, "get_base_model")


def _choose_modules(
    network: PreTrainedModel, section: LoraSection, base: ModelSection, head: Head | None
) -> tuple[list[str], list[str]]:
    """Returns full names of the linear modules that get an adapter, and of the modules that are trained whole."""
    kind = type(network).__name__
    both = embeddings_and_head(network)
    ends = [name for end in both for name, module in network.named_modules() if module is end]
    weights = [getattr(end, "weight", end) for end in both]
    tied, outputs = weights[1] is not None and weights[0] is weights[1], ends[1:]

    modules = {name: child for name, child in network.named_modules() if name and any(True for _ in child.parameters())}
    saved = match_names("lora.save_modules", section.save_modules, list(modules), kind="module", of=kind)
    if tied and any(f"{end}.".startswith(f"{name}.") for name in saved for end in ends):
        # peft's ensure_weight_tying keeps them one weight, but opens no file that holds it once.
        raise RecipeError(
            f"lora.save_modules: {' and '.join(ends)} of this {kind} are one weight (tie_word_embeddings), which a "
            "copy of one of them would part. Leave them out, or train all weights (no lora section)."
        )
    if head is not None:
        saved += [name for name in added_modules(network, base, head) if name not in saved]

    unused = () if head is None else tuple(f"{name}." for name in head.unused_modules(network))
    named = [(name, module) for name, module in network.named_modules() if not f"{name}.".startswith(unused)]
    linear = [name for name, module in named if type(module).__name__ in _LINEAR]
    if not linear:
        raise RecipeError(
            f"lora: {kind} has no linear modules, which adapters are put beside. Remove the section to train all of it."
        )
    if section.targets == "all-linear":
        targets = [name for name in linear if name not in outputs]
    else:
        targets = match_names("lora.targets", section.targets, linear, kind="linear module", of=kind, also="all-linear")
    if tied and any(name in outputs for name in targets):
        raise RecipeError(
            f"lora.targets: {outputs[0]} and the input embedding of this {kind} are one weight "
            "(tie_word_embeddings), which an adapter for one of them would part. Leave it out."
        )
    targets = [name for name in targets if not any(f"{name}.".startswith(f"{whole}.") for whole in saved)]
    if not targets:
        raise RecipeError(
            f"lora.targets: every linear module that is meant is trained whole already ({', '.join(saved)}). Name "
            "others, or leave some out of lora.save_modules."
        )
    # Not read off the weights, of which a rank may hold shards only.
    chosen: list[Any] = [network.get_submodule(name) for name in targets]
    smallest = min(min(m.nx, m.nf) if hasattr(m, "nx") else min(m.in_features, m.out_features) for m in chosen)
    if section.init == "pissa" and section.rank > smallest:
        raise RecipeError(
            f"lora.rank is {section.rank}, but `pissa` takes singular vectors, of which the smallest of the modules "
            f"has {smallest}. Set lora.rank to at most {smallest}, or another lora.init."
        )
    return targets, saved
