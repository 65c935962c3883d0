"""RoPE scaling: a pretrained model's rotary positions, stretched for rows that are longer than those it was trained on.

Frequencies are computed by transformers, from what is written into the model's configuration here.
"""

from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.config.recipe_schema import RopeScalingSection
from finetune.utils.errors import RecipeError
from finetune.utils.exact import exact_product


def stretch_positions(config: PretrainedConfig, section: RopeScalingSection) -> int:
    """Writes a scaling into a model's configuration, and returns the number of positions that the model has then.

    Where kinds of layers have frequencies of their own, those that see whole rows are stretched.

    Raises:
        RecipeError: If the model has no rotary positions, or stretched ones already.
    """
    text: Any = config.get_text_config()
    whole: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = "full_attention" in whole
    parameters: dict[str, Any] = whole["full_attention"] if nested else whole
    if not parameters or not getattr(text, "max_position_embeddings", None):
        raise RecipeError(
            f"model.rope_scaling: {config.model_type} has no rotary positions that could be stretched. Remove the "
            "section, and set data.sequence_length to at most what the model knows."
        )
    if parameters.get("rope_type", "default") != "default":
        raise RecipeError(
            f"model.rope_scaling: this {config.model_type} model has positions that are stretched already "
            f"({parameters['rope_type']}, rope_parameters in its config.json). Remove the section, or take its base "
            "model."
        )
    if nested and section.type == "dynamic":
        raise RecipeError(
            f"model.rope_scaling: layers of {config.model_type} have frequencies of several kinds, for which `dynamic` "
            "is not offered. Set model.rope_scaling.type to `yarn` or `linear`."
        )
    known = text.max_position_embeddings
    defaults = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if section.type == "llama3" else {}
    given = section.model_dump(exclude={"type"}, exclude_none=True)
    changed = {**parameters, "rope_type": section.type, **defaults, **given}
    if section.type in ("llama3", "yarn"):
        changed["original_max_position_embeddings"] = known
    text.rope_parameters = {**whole, "full_attention": changed} if nested else changed
    longest = int(exact_product(section.factor, known))
    if section.type != "dynamic":
        # From which `dynamic` reads how far rows go beyond what the model was trained on.
        text.max_position_embeddings = longest
    return longest


def fix_dynamic(network: nn.Module, length: int) -> None:
    """Fixes `dynamic` frequencies to those of rows of a length, in place, whatever a batch holds.

    By itself transformers takes those of the longest row so far, so that training would depend on which rows share a
    micro-batch, and on those before.

    Source: transformers 5.23, `dynamic_rope_update` in `modeling_rope_utils.py`.
    """
    module: Any
    for module in network.modules():
        if getattr(module, "rope_type", None) == "dynamic" and length > module.original_max_seq_len:
            fixed, module.attention_scaling = ROPE_INIT_FUNCTIONS["dynamic"](
                module.config, module.inv_freq.device, seq_len=length
            )
            module.inv_freq.copy_(fixed)
            module.max_seq_len_cached, module.original_max_seq_len = length, 0
