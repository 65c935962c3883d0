"""Predicts what a forward pass keeps for the backward pass.

After Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198, section 4.1), who count what each operation saves, but
for what transformers' networks save as this toolkit trains them: weights, norms and the residual stream in fp32, and
under autocast a copy in 16 bit of each linear module's input. `test_plan_formulas.py` compares this with what autograd
saves.

Letters: `n` tokens of a micro-batch, `h` width, `f` width between an MLP's layers, `a` heads, `k` heads of keys and
values, `d` width of a head, `c` bytes that products are computed in (2 or 4), `V` vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from finetune.models import chunked_loss
from finetune.monitoring import flops
from finetune.planning.model_shapes import Variant, is_half
from finetune.planning.transient_memory import Device

# What architectures call their dropout: of attention's weights, and of what is added to the residual stream.
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_DROPOUT = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "resid_dropout")

# Activations written out in elementary operations save their steps.
_COMPOSITE = ("gelu_new", "gelu_fast", "gelu_python", "quick_gelu", "mish")


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch on a rank."""

    kept: int = 0
    """What the layers keep until the backward pass comes to them."""
    norm_and_head: int = 0
    """What the last norm and the head keep, until the backward pass begins with these."""
    layer: int = 0
    """What one layer keeps: recomputed, where activations are checkpointed."""
    attention: int = 0
    """What attention and its norm keep of that, the last to run backwards."""
    gradients: int = 0
    """Gradients of activations at a layer's fullest moment in the backward pass, in its MLP."""
    outputs: int = 0
    """What a layer's last linear module is given, casts to and puts out, beside what it keeps."""
    scores: int = 0
    """The head's output and the loss when the backward pass begins, which is its largest moment."""
    scores_forward: int = 0
    """The same when the forward pass ends."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer."""

    h: int
    f: int
    a: int
    k: int
    d: int
    layers: int
    vocabulary: int
    gated: bool
    rms: bool
    head_norms: bool
    composite: bool
    parts: int
    """Ranks that the layer is split over: `f`, `a` and `k` are a rank's."""


def shape_of(variant: Variant) -> Shape | None:
    """The sizes of a variant's network; None if it does not say that it is a transformer."""
    config: Any = variant.config.get_text_config() if variant.config is not None else None
    each = flops.layers_of(config)
    heads = max((int(getattr(layer, "num_attention_heads", None) or 0) for layer in each), default=0)
    if not heads:
        return None
    h = int(config.hidden_size)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    kind = str(getattr(config, "hidden_act", None) or getattr(config, "activation_function", ""))
    return Shape(
        h=h,
        f=max(_inner(layer, h) for layer in each) * experts // variant.parts,
        a=heads // variant.attention_parts,
        k=max(int(getattr(layer, "num_key_value_heads", None) or heads) for layer in each) // variant.attention_parts,
        d=max(int(getattr(layer, "head_dim", None) or h // heads) for layer in each),
        layers=len(each),
        vocabulary=int(config.vocab_size),
        gated="gate_proj" in variant.names or experts > 1,
        rms=hasattr(config, "rms_norm_eps"),
        head_norms="q_norm" in variant.names,
        composite=kind in _COMPOSITE,
        parts=variant.parts,
    )


def _inner(config: Any, width: int) -> int:
    """The width between an MLP's layers; of a mixture, of one expert. Gemma 3n lists it for each layer."""
    one = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    return max(one) if isinstance(one, list | tuple) else int(one or getattr(config, "n_inner", None) or 4 * width)


def activations(
    variant: Variant,
    *,
    checkpointed: bool,
    micro: int,
    whole: bool = False,
    device: Device = "cuda",
) -> Activations | None:
    """What a micro-batch keeps; None if the network does not say that it is a transformer.

    Args:
        checkpointed: Whether layers are recomputed in the backward pass.
        micro: Rows.
        whole: Whether linear modules keep their inputs as they are given; see `transient_memory.keeps_inputs_whole`.
    """
    recipe, s = variant.recipe, shape_of(variant)
    if s is None:
        return None
    half = is_half(recipe)
    length = recipe.data.sequence_length
    tokens = micro * length
    c = 2 if half else 4
    norms = tokens * _norms(variant, s, half, whole)
    attention = tokens * _attention(variant, s, half, whole) + _pairs(variant, s, c) * micro * length**2
    if device == "cpu" and recipe.model.attention in ("auto", "packed", "sdpa") and _rate(variant, _ATTENTION_DROPOUT):
        # Without a fused kernel that has dropout: scores, mask and product, in fp32.
        attention += 12 * s.a * micro * length**2
    attention += tokens * _adapted(variant, s, c, device)
    layer = norms + attention + tokens * _mlp(variant, s, half, whole)
    if _rate(variant, _DROPOUT):
        # Masks of both sublayers' outputs: of a byte, or as CPUs make them.
        layer += 2 * tokens * s.h * (1 if device == "cuda" else c)
    # The residual stream; what a norm's own weight needs; what the head is given.
    norm_and_head = 4 + (4 if variant.norms_trained else 0)
    head_trained = bool(variant.linears and variant.linears[-1][1])
    fused = variant.loss_by_head
    if whole and not fused:
        norm_and_head += 4
    elif head_trained and not fused:
        norm_and_head += c
    kept = (4 * tokens * s.h if checkpointed else layer) * s.layers
    # Of both factors of a gated product, and of the residual stream, also in 16 bit. An adapter's is made in fp32.
    last = _keeps_last_inputs(variant, s)
    cast = half and last and variant.adapters is not None
    stream = (6 if half else 4) * s.h
    if s.parts > 1:
        # What is summed over ranks is copied for it in fp32; in 16 bit, part and sum are there beside that.
        stream += (6 if half else 4) * s.h
    # And where its inputs were dropped, that gradient is there before and after.
    dropped = cast and recipe.lora is not None and recipe.lora.dropout > 0
    gradients = tokens * (((2 if s.gated else 1) * c + (2 if cast else 0) + (4 if dropped else 0)) * s.f + stream)
    # Autograd keeps what is given to a module that is trained, but an adapter's 16-bit copy of an fp32 one.
    given = (c if whole else c + 4) if cast else 0 if last else c
    outputs = tokens * (given * s.f + stream) + _norms_of_dora(variant, c)
    forward, scores = _loss(variant, s, tokens, c, head_trained, fused, device)
    norm_and_head *= tokens * s.h
    return Activations(kept, norm_and_head, layer, norms // 2 + attention, gradients, outputs, scores, forward)


def _loss(
    variant: Variant, s: Shape, tokens: int, c: int, head_trained: bool, fused: bool, device: Device
) -> tuple[int, int]:
    """Bytes of head and loss when the forward pass ends, and when the backward pass begins."""
    if not variant.next_token:
        return 0, 0
    half = c < 4
    if not fused:
        # Logits, their fp32 copy, log-probabilities; then these, and their gradient and that of their copy.
        return (10 if half else 8) * tokens * s.vocabulary, 12 * tokens * s.vocabulary
    # A chunk's products and logits; what the head is given, and its gradient; the weight's, and a chunk's part of it.
    # Ranks that share layers compute the loss of a part of the tokens each, in a copy, and join its gradients.
    gathered = 4 * tokens * s.h if s.parts > 1 else 0
    tokens = -(-tokens // s.parts)
    rows = chunked_loss.rows_of_chunk(tokens, s.vocabulary)
    chunk = s.vocabulary * (c * rows + (4 * chunked_loss.rows_in_cache(rows, s.vocabulary, device) if half else 0))
    inputs, weight = tokens * s.h, s.vocabulary * s.h * head_trained
    copied = 4 * inputs if s.parts > 1 else 0
    parts = (10 if rows < tokens else 6) if half else 4
    return chunk + copied + (2 * c if half else c) * inputs + parts * weight, gathered + 4 * (inputs + weight)


def _norms(variant: Variant, s: Shape, half: bool, whole: bool) -> int:
    """The residual stream before each norm, in fp32; what comes out of an RMS norm, before and after its weight."""
    given = (whole or not half) and bool(variant.linears)
    each = 4 + (4 if s.rms and variant.norms_trained else 0) + (4 if given else 0)
    heads = 4 * (s.a + s.k) * s.d * (2 if variant.norms_trained else 1) if s.head_norms else 0
    return 2 * s.h * each + heads


def _attention(variant: Variant, s: Shape, half: bool, whole: bool) -> int:
    c = 2 if half else 4
    # Where a mask is given, transformers repeats keys and values for each head.
    keys = s.a if _pairs(variant, s, c) else s.k
    core = c * s.d * (s.a + 2 * keys + s.a) + 4 * s.a
    if whole:
        # An adapter is given the output in fp32.
        return core + (4 * s.a * s.d if half and variant.adapters else 0)
    # An adapter has a copy of the output projection's input; the projection itself saves the output.
    return core + (_inputs(variant, s) if half else 0) - (c * s.a * s.d if half and not variant.adapters else 0)


def _inputs(variant: Variant, s: Shape) -> int:
    """16-bit copies of linear modules' inputs, but for those that come out of an MLP's product in 16 bit anyway."""
    inside = [
        inputs // (s.parts if split else 1)
        for inputs, kept, split in variant.linears
        if kept and inputs != s.f * s.parts
    ]
    head = s.h if variant.linears and variant.linears[-1][1] else 0
    return 2 * (sum(inside) - head) // s.layers


def _keeps_last_inputs(variant: Variant, s: Shape) -> bool:
    """Whether what MLPs' last modules are given is kept."""
    return any(inputs == s.f * s.parts and kept for inputs, kept, _ in variant.linears)


def _mlp(variant: Variant, s: Shape, half: bool, whole: bool) -> int:
    """What goes into the activation and into the product, and what comes out."""
    c = 2 if half else 4
    kept = _keeps_last_inputs(variant, s)
    last = c * s.f if kept else 0
    if whole and half:
        # A frozen module keeps it as well, unless it is packed; an adapter is given it in fp32.
        last = (0 if variant.recipe.model.quantization else c * s.f) + (4 * s.f if kept and variant.adapters else 0)
    if s.gated:
        return 3 * c * s.f + last
    return (4 if s.composite else 1) * c * s.f + last


def _adapted(variant: Variant, s: Shape, c: int, device: Device) -> int:
    """What adapters keep beside their inputs, a token and layer: what dropout leaves of these, and what DoRA scales.

    Source: peft's `DoraLinearLayer.forward`: the frozen module's output and the adapter's are both factors.
    """
    section, found = variant.recipe.lora, 0
    if section is None:
        return 0
    if section.dropout:
        inputs = sum(inputs for inputs, _ in variant.adapted) // s.layers
        found += inputs * (1 if device == "cuda" else 4)
        if c == 4:
            # Without it, modules that are given the same keep it once.
            found += 4 * max(0, inputs - 2 * s.h - s.a * s.d - s.f)
    if section.dora:
        found += 2 * c * sum(outputs for _, outputs in variant.adapted) // s.layers
    return found


def _norms_of_dora(variant: Variant, c: int) -> int:
    """What DoRA takes for a while to know the length of a weight's columns.

    Source: peft's `get_lora_weight`: both matrices are multiplied with an identity of fp32, and its 16-bit copy.
    """
    if variant.recipe.lora is None or not variant.recipe.lora.dora:
        return 0
    return max((4 + c % 4) * inputs**2 + c * inputs * outputs for inputs, outputs in variant.adapted)


def _rate(variant: Variant, names: tuple[str, ...]) -> float:
    """The largest dropout of some names that a network's configuration has."""
    config = variant.config.get_text_config() if variant.config is not None else None
    return max((float(getattr(config, name, None) or 0.0) for name in names), default=0.0)


def _pairs(variant: Variant, s: Shape, c: int) -> int:
    """Bytes of a layer for a pair of tokens: scores, where attention writes them out, or a mask as kernels take it."""
    recipe = variant.recipe
    if recipe.model.attention == "eager":
        return s.a * (4 + (c if c < 4 else 0))
    packed = recipe.data.packing == "documents" and recipe.model.attention == "sdpa"
    return c if packed or (not variant.next_token and recipe.model.attention in ("auto", "sdpa")) else 0
