"""Predicts what a forward pass keeps for the backward pass, for the table of a plan; `trace/` counts it exactly.

After Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198, section 4.1), who count what each operation saves, but
for what transformers' networks save as this toolkit trains them: weights, norms and the residual stream in fp32, and
under autocast a copy in 16 bit of each linear module's input. `test_plan_formulas.py` compares this with what autograd
saves.

Letters: `n` tokens of a micro-batch, `h` width, `f` width between an MLP's layers, `a` heads, `k` heads of keys and
values, `d` width of a head, `c` bytes that products are computed in (2 or 4), `V` vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

from finetune.config.recipe_schema import Recipe
from finetune.models import chunked_loss
from finetune.monitoring import flops
from finetune.planning.model_shapes import Variant, is_half

Device = Literal["cuda", "cpu"]
"""Plans are for GPUs, and are compared with runs on CPUs, where the loss is computed for fewer tokens at once."""

# What architectures call the dropout of what is added to the residual stream. Attention's keeps nothing on GPUs.
_DROPOUT = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "resid_dropout")

# Activations written out in elementary operations save their steps.
_COMPOSITE = ("gelu_new", "gelu_fast", "gelu_python", "quick_gelu", "mish")


@dataclass(frozen=True)
class StepSetting:
    """Values of a recipe that a plan may change, other than the way to train."""

    micro: int
    """Rows of a micro-batch."""
    checkpointed: bool
    """True if layers are recomputed in the backward pass."""

    def applied_to(self, recipe: Recipe) -> Recipe:
        """Returns a recipe in this setting."""
        # Of `selective` too little is recomputed to be planned.
        again = self.checkpointed or (recipe.model.gradient_checkpointing == "selective" and "selective")
        batch = recipe.batch.model_copy(update={"micro_size": self.micro})
        model = recipe.model.model_copy(update={"gradient_checkpointing": again})
        return recipe.model_copy(update={"batch": batch, "model": model})


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch on a rank."""

    kept: int = 0
    """Kept by all layers until the backward pass comes to them."""
    norm_and_head: int = 0
    """Kept by the last norm and the head."""
    layer: int = 0
    """Kept by one layer: recomputed, where activations are checkpointed."""
    working: int = 0
    """Beside that at a layer's fullest moment, in its MLP: outputs, or gradients of activations."""
    loss: int = 0
    """The head's output and the loss when the forward pass ends."""
    loss_gradient: int = 0
    """The same, with gradients, when the backward pass begins."""


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
    dropout: bool
    parts: int
    """Ranks that the layer is split over: `f`, `a` and `k` are a rank's."""


def shape_of(variant: Variant) -> Shape | None:
    """Returns the sizes of a variant's network; None if it is no stack of a transformer's layers, or of two kinds."""
    config: Any = variant.config.get_text_config() if variant.config is not None else None
    if getattr(variant.config, "is_encoder_decoder", False):
        return None
    each = flops.layers_of(config)
    heads = max((int(getattr(layer, "num_attention_heads", None) or 0) for layer in each), default=0)
    if not heads:
        return None
    # Some plans split MLPs only.
    split = [] if isinstance(variant.division, str) else variant.division.splits.parameters
    parts = variant.parts if any("att" in name for name in split) else 1
    width = int(config.hidden_size)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    kind = str(getattr(config, "hidden_act", None) or getattr(config, "activation_function", ""))
    return Shape(
        h=width,
        f=max(_inner(layer, width) for layer in each) * experts // variant.parts,
        a=heads // parts,
        k=max(int(getattr(layer, "num_key_value_heads", None) or heads) for layer in each) // parts,
        d=max(int(getattr(layer, "head_dim", None) or width // heads) for layer in each),
        layers=len(each),
        vocabulary=int(config.vocab_size),
        gated="gate_proj" in variant.names or experts > 1,
        rms=hasattr(config, "rms_norm_eps"),
        head_norms="q_norm" in variant.names,
        composite=kind in _COMPOSITE,
        dropout=any(getattr(config, name, None) for name in _DROPOUT),
        parts=variant.parts,
    )


def _inner(config: Any, width: int) -> int:
    """Returns the width between an MLP's layers, or one expert's. Gemma 3n lists it for each layer."""
    one = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    return max(one) if isinstance(one, list | tuple) else int(one or getattr(config, "n_inner", None) or 4 * width)


def predict_activations(
    variant: Variant, setting: StepSetting, *, whole: bool = False, device: Device = "cuda"
) -> Activations | None:
    """Predicts what a micro-batch keeps; None if the network does not say that it is a transformer of one stack.

    `whole` says that linear modules keep their inputs as they are given; see `Share.keeps_inputs`.
    """
    recipe, s = variant.recipe, shape_of(variant)
    if s is None:
        return None
    half, length = is_half(recipe), variant.row_tokens
    tokens, c = setting.micro * length, 2 if half else 4
    # True if the inputs of MLPs' last modules are kept.
    last = any(inputs == s.f * s.parts and kept for inputs, kept in variant.linears)
    pairs = _pairs(variant, s, c) * setting.micro * length**2
    layer = pairs + tokens * (
        _norms(variant, s, half, whole)
        + _attention(variant, s, half, whole)
        + _mlp(variant, s, half, whole, last)
        + _adapted(variant, s, c)
    )
    if s.dropout:
        layer += 2 * tokens * s.h
    # The residual stream; what a norm's own weight needs; what the head is given.
    norm_and_head = 4 + (4 if variant.norms_trained else 0)
    head_trained = bool(variant.linears and variant.linears[-1][1])
    if not variant.loss_by_head:
        norm_and_head += 4 if whole else c * head_trained
    # Of the residual stream, also in 16 bit.
    stream = (6 if half else 4) * s.h
    # Of both factors of a gated product; an adapter's are made in fp32.
    cast = half and last and variant.adapters is not None
    inner = c + 4 if cast else 2 * c if s.gated else c
    if cast and recipe.lora is not None and recipe.lora.dropout:
        # Where its inputs were dropped, that gradient is there before and after.
        inner += 4
    loss, loss_gradient = _loss(variant, s, tokens, c, head_trained, device)
    return Activations(
        kept=(4 * tokens * s.h if setting.checkpointed else layer) * s.layers,
        norm_and_head=norm_and_head * tokens * s.h,
        layer=layer,
        working=tokens * (inner * s.f + stream) + _norms_of_dora(variant, c),
        loss=loss,
        loss_gradient=loss_gradient,
    )


def _loss(variant: Variant, s: Shape, tokens: int, c: int, head_trained: bool, device: Device) -> tuple[int, int]:
    """Returns bytes of head and loss when the forward pass ends, and when the backward pass begins."""
    if not variant.next_token:
        return 0, 0
    half = c < 4
    if not variant.loss_by_head:
        # Logits, their fp32 copy, log-probabilities; then these, and their gradient and that of their copy.
        return (10 if half else 8) * tokens * s.vocabulary, 12 * tokens * s.vocabulary
    # A chunk's products and logits; what the head is given, and its gradient; the weight's, and a chunk's part of it.
    # Ranks that share layers compute the loss of a part of the tokens each.
    tokens = -(-tokens // s.parts)
    rows = chunked_loss.rows_of_chunk(tokens, s.vocabulary)
    chunk = s.vocabulary * (c * rows + (4 * chunked_loss.rows_in_cache(rows, s.vocabulary, device) if half else 0))
    inputs, weight = tokens * s.h, s.vocabulary * s.h * head_trained
    parts = (10 if rows < tokens else 6) if half else 4
    return chunk + (2 * c if half else c) * inputs + parts * weight, 4 * (inputs + weight)


def _norms(variant: Variant, s: Shape, half: bool, whole: bool) -> int:
    """Counts the residual stream before each norm, in fp32, and RMS norms' outputs before and after their weight."""
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
    if not half:
        return core
    # And 16-bit copies of linear modules' inputs, but for those that an MLP's product puts out in 16 bit anyway. An
    # adapter has a copy of the output projection's input; the projection itself saves the output.
    inside = [inputs for inputs, kept in variant.linears if kept and inputs != s.f * s.parts]
    head = s.h if variant.linears and variant.linears[-1][1] else 0
    return core + 2 * (sum(inside) - head) // s.layers - (0 if variant.adapters else c * s.a * s.d)


def _mlp(variant: Variant, s: Shape, half: bool, whole: bool, last: bool) -> int:
    """Counts inputs of the activation and of the product, and the product's output, if `last` says that it is kept."""
    c = 2 if half else 4
    out = c * s.f if last else 0
    if whole and half:
        # A frozen module keeps it as well, unless it is packed; an adapter is given it in fp32.
        out = (0 if variant.recipe.model.quantization else c * s.f) + (4 * s.f if last and variant.adapters else 0)
    return (3 if s.gated else 4 if s.composite else 1) * c * s.f + out


def _adapted(variant: Variant, s: Shape, c: int) -> int:
    """Counts what adapters keep beside their inputs, a token and layer: these after dropout, and DoRA's factors.

    Source: peft's `DoraLinearLayer.forward`: the frozen module's output and the adapter's are both factors.
    """
    section, kept = variant.recipe.lora, 0
    if section is None:
        return 0
    if section.dropout:
        inputs = kept = sum(inputs for inputs, _ in variant.adapted) // s.layers
        if c == 4:
            # Without it, modules that are given the same keep it once.
            kept += 4 * max(0, inputs - 2 * s.h - s.a * s.d - s.f)
    if section.dora:
        kept += 2 * c * sum(outputs for _, outputs in variant.adapted) // s.layers
    return kept


def _norms_of_dora(variant: Variant, c: int) -> int:
    """Counts DoRA's temporary tensors, from which it takes the length of a weight's columns.

    Source: peft's `get_lora_weight`: both matrices are multiplied with an identity of fp32, and its 16-bit copy.
    """
    if variant.recipe.lora is None or not variant.recipe.lora.dora:
        return 0
    return max((4 + c % 4) * inputs**2 + c * inputs * outputs for inputs, outputs in variant.adapted)


def _pairs(variant: Variant, s: Shape, c: int) -> int:
    """Counts bytes of a layer for a pair of tokens: scores, where attention writes them out, or a mask."""
    recipe = variant.recipe
    if recipe.model.attention == "eager":
        return s.a * (4 + (c if c < 4 else 0))
    packed = recipe.data.packing == "documents" and recipe.model.attention == "sdpa"
    return c if packed or (not variant.next_token and recipe.model.attention in ("auto", "sdpa")) else 0
