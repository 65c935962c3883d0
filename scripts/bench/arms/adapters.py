"""Low-rank adapters with the same first weights in every arm."""

import math
import zlib
from typing import Any

import torch
from torch import nn

from bench.cases import DPO


def equal_adapters(network: nn.Module) -> None:
    """Draws each adapter's first matrix from a seed that its name gives; the second is zero already."""
    for name, parameter in network.named_parameters():
        if "lora_A" in name:
            known = name[name.index("layers.") :]
            generator = torch.Generator().manual_seed(zlib.crc32(known.encode()))
            bound = 1 / math.sqrt(parameter.shape[1])
            with torch.no_grad():
                parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)


def lora_config() -> Any:
    """As `recipe_of` asks of this toolkit."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def load(model: str, kind: str, precision: str) -> Any:
    """A case's network as its arms other than ours open it, with adapters if it has any."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    frozen = torch.bfloat16 if precision == "bf16" else torch.float32
    if kind in ("full", DPO):
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    options: dict[str, Any] = {}
    if kind == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=frozen
        )
    return AutoModelForCausalLM.from_pretrained(model, dtype=frozen, **options)


def adapted(network: Any) -> Any:
    """The network with adapters on all linear modules."""
    from peft import get_peft_model

    whole = get_peft_model(network, lora_config())
    equal_adapters(whole)
    return whole
