"""FLOPs of training a token, and peak FLOP/s of a device."""

from typing import Any

import torch
from torch import nn

from finetune.distributed import gpu_specs
from finetune.models.quantization import num_weights

# How configurations call the number of experts that a token goes through.
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak rate in FLOP/s where it is known, else None."""
    if device.type != "cuda" or precision == "fp32":
        return None
    gpu = gpu_specs.of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.bf16_tflops * 1e12


def flops_per_target(network: nn.Module, sequence_length: int, *, forward: bool = False) -> float:
    """Training FLOPs a token: 6 a weight in a matrix product (4 if it is frozen), and attention's scores.

    A forward pass alone has 2 a weight, and a third of the scores.
    Of a mixture's experts those count that a token goes through. A head's width is its own, which heads x width need
    not make the hidden size.

    Source: Kaplan et al. 2020, Chowdhery et al. 2022 (PaLM, appendix B): 6N + 12 layers x heads x width x T. Of the 6,
    2 are for the weight's own gradient.
    """
    config = getattr(network, "config", None)
    text = None if config is None else config.get_text_config()
    looked_up = {id(p) for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    # A tied embedding is also the head, and multiplied as such.
    head = getattr(network, "get_output_embeddings", lambda: None)()
    looked_up -= {id(p) for p in head.parameters()} if head is not None else set()
    shares = _shares_of_experts(network, text)
    products = sum(
        (2.0 if forward else 6.0 if p.requires_grad else 4.0) * num_weights(p) * shares.get(id(p), 1.0)
        for name, p in network.named_parameters()
        # The frozen one beside a module that is trained whole, which runs in its place.
        if id(p) not in looked_up and ".original_module." not in name
    )
    return products + (2.0 if forward else 6.0) * attention_width(text) * sequence_length


def _shares_of_experts(network: nn.Module, text: Any) -> dict[int, float]:
    """Returns the share that a token goes through of each weight that experts have, stacked or one by one."""
    used = next((int(getattr(text, name)) for name in _EXPERTS_A_TOKEN if getattr(text, name, None)), 0)
    shares: dict[int, float] = {}
    for name, module in network.named_modules() if used else ():
        one_by_one = isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts"
        count = len(module) if one_by_one else int(getattr(module, "num_experts", None) or 0)
        for parameter in module.parameters(recurse=one_by_one) if count else ():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if one_by_one or (len(shape) == 3 and shape[0] == count):
                shares[id(parameter)] = used / count
    return shares


def attention_width(text: Any) -> int:
    """Products of attention for each pair of tokens, over all layers: of queries with keys, and with values."""
    layers = layers_of(text)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    width = 0
    for layer, kind in zip(layers, kinds, strict=False):
        heads = getattr(layer, "num_attention_heads", None)
        if isinstance(heads, int) and kind.endswith("attention") and not kind.startswith("linear"):
            keys = getattr(layer, "head_dim", None) or layer.hidden_size // heads
            # DeepSeek-V4's `head_dim` has its rotated part in it, and nothing says the rest.
            if apart := getattr(layer, "qk_nope_head_dim", None):
                keys = apart + layer.qk_rope_head_dim
            width += heads * (keys + (getattr(layer, "v_head_dim", None) or keys))
    return width


def layers_of(text: Any) -> list[Any]:
    """A configuration for each layer: Gemma 4's have heads of several widths, which cannot be read off the whole."""
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * (getattr(text, "num_hidden_layers", None) or 0)
