"""Attaches LoRA adapters to a network, and says how they are written. The only module that imports peft.

peft is imported where it is used: that takes a second, which a run without adapters need not wait.
"""

import difflib
import re
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import RecipeError
from finetune.recipe import LoraSection, Recipe

if TYPE_CHECKING:
    from peft import PeftConfig

Head = Literal["causal_lm", "sequence_classification"]
_TASK_TYPES = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS", None: None}
# GPT-2's linear layers are of a class of transformers' own.
_LINEAR = ("Linear", "Conv1D")


def transformer(network: nn.Module) -> PreTrainedModel | None:
    """The transformers network itself, inside its adapters if it has any; None for any other network."""
    inner: Any = network
    inner = inner.get_base_model() if hasattr(network, "peft_config") else network
    return inner if isinstance(inner, PreTrainedModel) else None


def attach(network: nn.Module, recipe: Recipe, head: Head | None = None) -> nn.Module:
    """Freezes a network and puts the recipe's adapters around its linear modules; without `lora` returns it as it is.

    The adapters are fp32 and drawn from `recipe.seed`: the same on every rank and backend. A head that a task adds
    (the classes of a classifier) is new, and so trained whole.

    Args:
        head: What the network is for; written into the adapter's configuration.

    Raises:
        RecipeError: If the section does not fit the network.
    """
    section = recipe.lora
    if section is None:
        return network
    if not isinstance(network, PreTrainedModel):
        raise RecipeError(
            f"lora: adapters go around the linear modules of transformers networks, and the task "
            f"'{recipe.task.name}' builds a {type(network).__name__}. Remove the section, or build a PreTrainedModel."
        )
    from peft import LoraConfig, get_peft_model

    saved = [*_saved(network, section), *(_new_parts(network) if head == "sequence_classification" else [])]
    targets = _targets(network, section, saved)
    config = LoraConfig(
        task_type=_TASK_TYPES[head],
        r=section.rank,
        lora_alpha=int(section.alpha) if section.alpha.is_integer() else section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets,
        modules_to_save=saved or None,
        use_rslora=section.rslora,
        use_dora=section.dora,
        init_lora_weights=True if section.init == "default" else section.init,
        revision=recipe.model.revision,
    )
    # Anew: loading may have drawn any number before, differently where a network is sharded as it loads.
    torch.manual_seed(recipe.seed)
    adapted: nn.Module = get_peft_model(network, config)
    return adapted


def adapter_config(network: nn.Module) -> "PeftConfig | None":
    """The configuration of a network's adapters, which `save_pretrained` writes; None if it has none."""
    if not hasattr(network, "peft_config"):
        return None
    known: Any = network
    return known.peft_config["default"]


def adapter_keys(network: nn.Module) -> dict[str, str]:
    """The names of what an adapter file holds, as the network has them, to their keys in `adapter_model.safetensors`.

    `PeftModel.from_pretrained` reads a file with these keys.
    """
    from peft import get_peft_model_state_dict

    # peft's own rules, run over names in place of tensors: nothing has to be gathered.
    names = {name: name for name in network.state_dict()}
    kept: dict[str, str] = get_peft_model_state_dict(network, state_dict=names, save_embedding_layers=False)
    return {name: key for key, name in kept.items()}


def adapter_key(network: nn.Module, name: str) -> str:
    """The key in `adapter_model.safetensors` of one of `adapter_keys`' names."""
    return adapter_keys(network)[name]


def _linear(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if type(module).__name__ in _LINEAR]


def _new_parts(network: PreTrainedModel) -> list[str]:
    """What a task's head adds to the pretrained body."""
    body = network.base_model
    return [
        name for name, part in network.named_children() if part is not body and any(True for _ in part.parameters())
    ]


def _under(name: str, parents: list[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def _ends(name: str, word: str) -> bool:
    return name == word or name.endswith(f".{word}")


def _targets(network: PreTrainedModel, section: LoraSection, saved: list[str]) -> list[str]:
    """Full names of the linear modules that get an adapter."""
    linear = _linear(network)
    output = network.get_output_embeddings()
    outputs = [name for name, module in network.named_modules() if module is output]
    wanted = section.targets
    if wanted == "all-linear":
        found = [name for name in linear if name not in outputs]
    elif isinstance(wanted, str):
        found = [name for name in linear if re.fullmatch(wanted, name)]
        if not found:
            words = _hint(wanted, ["all-linear"]) or _hint(wanted, _words(linear), "[{}]")
            raise RecipeError(
                f"lora.targets: the regular expression '{wanted}' matches the whole name of none of the {len(linear)} "
                f"linear modules of {type(network).__name__}{words}. Their names are like {', '.join(linear[:2])}."
            )
    else:
        found = [name for name in linear if any(_ends(name, word) for word in wanted)]
        for word in wanted:
            if not any(_ends(name, word) for name in linear):
                raise RecipeError(
                    f"lora.targets: '{word}' is no linear module of {type(network).__name__}"
                    f"{_hint(word, _words(linear))}. Its linear modules are {', '.join(_words(linear))}."
                )
    if _tied(network) and any(name in outputs for name in found):
        raise RecipeError(
            f"lora.targets: {outputs[-1]} shares its weight with the input embedding, which an adapter on it would "
            "leave behind. Leave it out."
        )
    found = [name for name in found if not _under(name, saved)]
    if not found:
        raise RecipeError("lora.targets: every module that is named is trained whole (lora.save_modules). Name others.")
    return found


def _saved(network: PreTrainedModel, section: LoraSection) -> list[str]:
    """Full names of the modules that are trained whole."""
    names = [name for name, module in network.named_modules() if name and any(True for _ in module.parameters())]
    found: list[str] = []
    for word in section.save_modules:
        fits = [name for name in names if _ends(name, word)]
        if not fits:
            raise RecipeError(
                f"lora.save_modules: {type(network).__name__} has no module '{word}'{_hint(word, _words(names))}. "
                f"It has {', '.join(_words(names))}."
            )
        found += fits
    if _tied(network):
        ends = (network.get_input_embeddings(), network.get_output_embeddings())
        for name in found:
            if any(network.get_submodule(name) is end for end in ends):
                raise RecipeError(
                    f"lora.save_modules: {name} shares its weight with the model's other end (tie_word_embeddings), "
                    "which a copy of its own would part from it. Leave it out."
                )
    return found


def _tied(network: PreTrainedModel) -> bool:
    one, other = network.get_input_embeddings(), network.get_output_embeddings()
    return one is not None and other is not None and one.weight is other.weight


def _words(names: list[str]) -> list[str]:
    """The last parts of names that are words."""
    return sorted({parts[-1] for parts in (name.split(".") for name in names) if not parts[-1].isdecimal()})


def _hint(word: str, known: list[str], form: str = "'{}'") -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {form.format(close[0])}?" if close else ""
