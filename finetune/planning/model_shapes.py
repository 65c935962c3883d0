"""The networks that a plan compares, without weights: full training, LoRA, QLoRA."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from finetune.config.recipe_schema import LoraSection, ModelSection, OptimSection, Recipe, TaskSection
from finetune.data.tokenization.tokenizer import load_tokenizer, num_ids
from finetune.distributed.parameter_info import DTYPES, held_whole, width_of
from finetune.distributed.split_parameters import UNSPLIT, Splits
from finetune.distributed.strategies.prediction import ParamSpec, ParamSpecs
from finetune.models import chunked_loss, frozen_weights, lora_adapters, pretrained_files, split_layers
from finetune.models.build_network import settle_parameters
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.model_config import read_pretrained_config
from finetune.models.quantization import BLOCK, kept_modules, packable_modules
from finetune.models.split_layers import Division
from finetune.monitoring.flops import flops_per_target
from finetune.optim import optimizers
from finetune.optim.parameter_groups import parameter_groups
from finetune.tasks.task_lookup import find_task, head_of
from finetune.utils.compat.accelerate_private import unsplit_classes
from finetune.utils.errors import BackendError, RecipeError

KINDS = ("full", "LoRA", "QLoRA")

Packable = list[tuple[Any, torch.Size]]
"""Linear modules, with the shapes of their weights."""

# Scales that share one. Source: Dettmers et al. 2023, section 3.
_BLOCK_OF_SCALES = 256


@dataclass(frozen=True)
class Variant:
    """One way to train the recipe's model."""

    kind: str
    """One of `KINDS`."""
    recipe: Recipe
    row_tokens: int
    """Tokens of a row."""
    specs: ParamSpecs
    flops_per_token: float
    forward_flops: float
    """A token, of a forward pass alone."""
    parameters: int
    """Weights that the network stands for, packed or not."""
    trained: int
    state_bytes: float
    """Bytes that the optimiser keeps for an element, on average."""
    linears: tuple[tuple[int, bool], ...]
    """Each linear module's input features, and True if these are kept for the backward pass."""
    adapters: str | None
    adapted: tuple[tuple[int, int], ...]
    """Input and output features of each module that has an adapter."""
    config: PretrainedConfig | None
    next_token: bool
    """True for a language model."""
    loss_by_head: bool
    """True if its head computes the loss, some tokens at a time."""
    norms_trained: bool
    names: frozenset[str]
    """Last parts of all modules' names."""
    division: Division | str
    """Division of its layers over ranks, or the reason why they cannot be split."""
    parts: int = 1
    """Ranks that its layers are split over."""


def part_of(variant: Variant, size: int) -> Variant:
    """Returns what each of `size` ranks has of a variant whose layers they split; a `BackendError` if they cannot."""
    if isinstance(variant.division, str):
        raise BackendError(variant.division)
    variant.division.check(size)
    specs = variant.specs
    # The scales of what is split are no longer quantized themselves.
    double, packed = variant.recipe.model.double_quantization, [p.packed for p in specs.params if p.packed and p.split]
    more = sum(_scales(count // size, double=False) - _scales(count, double=double) for count in packed)
    split_specs = replace(specs, params=tuple(p.part(size) for p in specs.params), rest=specs.rest + more)
    return replace(variant, specs=split_specs, parts=size)


def read_variants(recipe: Recipe, stored: str | None = None, kinds: Sequence[str] = KINDS) -> dict[str, Variant | str]:
    """Reads the recipe's model, trained in each way; a reason stands in place of a way that is closed.

    Args:
        stored: The dtype of the weights as they are stored; None reads it off them.
        kinds: The ways, in the order of `KINDS`.

    Raises:
        RecipeError: If the network cannot be built without weights.
    """
    recipe = with_vocabulary_size(recipe)
    variants: dict[str, Variant | str] = {}
    ways = {kind: as_kind(recipe, kind) for kind in kinds}
    # QLoRA's network is LoRA's, packed: attaching adapters is most of the work of a plan.
    packed_later = None
    if {"LoRA", "QLoRA"} <= ways.keys() and head_of(recipe) is not None and ways["LoRA"].lora == ways["QLoRA"].lora:
        packed_later = ways["QLoRA"]
    adapted: tuple[nn.Module, Packable] | None = None
    for kind, wanted in ways.items():
        try:
            network, packable = adapted or build_skeleton(wanted, stored, packed_later if kind == "LoRA" else None)
            quantized = wanted.model.quantization is not None
            scales = sum(pack_linear(module, wanted, shape) for module, shape in packable) if quantized else 0
            variants[kind] = _with_teacher(_read_variant(network, kind, wanted, scales))
            adapted = (network, packable) if kind == "LoRA" and packable else None
        except RecipeError as error:
            if kind == kind_of(recipe):
                raise
            variants[kind] = str(error)
    return variants


def kind_of(recipe: Recipe) -> str:
    """Returns the way that a recipe itself asks for."""
    if recipe.lora is None:
        return "full"
    return "LoRA" if recipe.model.quantization is None else "QLoRA"


def as_kind(recipe: Recipe, kind: str) -> Recipe:
    """Returns a recipe that trains in another way, with all else equal."""
    if kind == kind_of(recipe):
        return recipe
    section = recipe.lora or LoraSection()
    model: dict[str, Any] = {"quantization": None}
    if kind != "full":
        model |= {"freeze": None, "fp8": False}
    if kind == "QLoRA":
        model["quantization"] = recipe.model.quantization or "nf4"
        if section.init == "pissa":
            section = section.model_copy(update={"init": "default"})
    changes: dict[str, Any] = {"lora": section, "model": recipe.model.model_copy(update=model)}
    if kind == "full":
        changes["lora"] = None
        if recipe.preference is not None and recipe.preference.reference == "adapters_off":
            changes["preference"] = recipe.preference.model_copy(update={"reference": "start"})
    return recipe.model_copy(update=changes)


def is_half(recipe: Recipe) -> bool:
    """True if products are computed in 16 bit; `auto` is bf16 on every GPU that plans know."""
    return recipe.precision != "fp32"


def without_paging(optim: OptimSection) -> OptimSection:
    """Returns an optimiser that is not paged. Paged ones are refused on a machine without a GPU, which may plan."""
    return optim.model_copy(update={"name": optim.name.removeprefix("Paged")})


def with_vocabulary_size(recipe: Recipe) -> Recipe:
    """Returns a recipe with the size of the vocabulary written out, where a tokenizer decides it."""
    config = recipe.model.config
    if recipe.tokenizer.name is None or config is None or "vocab_size" in config or head_of(recipe) is None:
        return recipe
    config = {**config, "vocab_size": num_ids(load_tokenizer(recipe))}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


def build_skeleton(recipe: Recipe, stored: str | None, packed_as: Recipe | None = None) -> tuple[nn.Module, Packable]:
    """Builds the network that `build_network.build_model` would, without storage.

    Returns it with its linear modules that are to be packed, for `packed_as` if that is given, and their weights'
    shapes.

    Raises:
        RecipeError: If it cannot be built without weights.
    """
    plain = recipe.model_copy(update={"lora": None})
    task = find_task(recipe)
    if task.build_skeleton is None:
        raise RecipeError(
            f"task '{recipe.task.name}' has no build_skeleton, which a plan needs to count its network without weights."
        )
    network = settle_parameters(task.build_skeleton(plain, None))
    # Before adapters hide what they wrap.
    section, head, packable = (packed_as or recipe).model, head_of(recipe), list[tuple[Any, torch.Size]]()
    if section.quantization is not None and isinstance(network, PreTrainedModel):
        kept = [] if head is None else kept_modules(network, section, head)
        packable = [(m, m.weight.shape) for _, m in packable_modules(network, section, kept)]
    if recipe.lora is not None:
        network.requires_grad_(False)
        with torch.device("meta"):
            network = lora_adapters.attach(network, recipe, head)
    if recipe.model.quantization is not None and not packable:
        raise RecipeError("model.quantization: the network has no linear modules that can be packed.")
    frozen_weights.cast_frozen(network, _stored_dtype(recipe, network, stored))
    return network, packable


def _read_variant(network: nn.Module, kind: str, recipe: Recipe, scales: int) -> Variant:
    caller = ForwardWrapper(network)
    known, shapes = lora_adapters.transformer(network), find_task(recipe).rows.shapes
    length, trained = recipe.data.sequence_length, [p for p in network.parameters() if p.requires_grad]
    division: Division | str
    config, head = known.config if known is not None else None, head_of(recipe)
    next_token = head is not None and head.next_token
    fits = next_token and config is not None and not chunked_loss.changes_logits(config)
    loss_by_head = fits and recipe.loss_by_head
    try:
        division = split_layers.divide(network, loss_by_head=loss_by_head)
    except BackendError as error:
        division = str(error)
    splits = division.splits if isinstance(division, Division) else UNSPLIT
    # The modules that put an adapter around another one.
    wrappers: list[Any] = [m for m in network.modules() if hasattr(m, "lora_A") and hasattr(m, "merge")]
    adapted = {id(wrapper.get_base_layer()) for wrapper in wrappers}
    named: list[tuple[str, Any]] = list(network.named_modules())
    linear = [m for n, m in named if type(m).__name__ in ("Linear", "StoredLinear", "Conv1D") and ".lora_" not in n]
    return Variant(
        kind=kind,
        recipe=recipe,
        row_tokens=length if shapes is None else math.prod(shapes(recipe)["input_ids"]) // recipe.batch.rows,
        specs=_param_specs(caller, recipe, scales, splits),
        flops_per_token=flops_per_target(network, length),
        forward_flops=flops_per_target(network, length, forward=True),
        parameters=sum(int(getattr(p, "packed_weights", p.numel())) for p in network.parameters()),
        trained=sum(p.numel() for p in trained),
        state_bytes=optimizers.state_bytes(without_paging(recipe.optim), parameter_groups(caller, recipe.optim)),
        linears=tuple(
            (int(m.nx if hasattr(m, "nx") else m.in_features), id(m) in adapted or m.weight.requires_grad)
            for m in linear
        ),
        adapters=lora_adapters.describe_adapters(network),
        adapted=tuple((m.in_features, m.out_features) for m in wrappers),
        config=config,
        next_token=next_token,
        loss_by_head=loss_by_head,
        norms_trained=any(p.requires_grad for n, p in network.named_parameters() if "norm" in n),
        names=frozenset(n.rpartition(".")[2] for n, _ in named),
        division=division,
    )


def _with_teacher(variant: Variant) -> Variant:
    """Returns a variant that holds a teacher in each step, too, if its recipe asks for one."""
    section = variant.recipe.distillation
    if section is None or section.top_k is not None:
        return variant
    own = variant.recipe.of_frozen(section.teacher)
    network, packable = build_skeleton(own.model_copy(update={"distillation": None, "task": TaskSection()}), None)
    frozen_weights.cast_frozen(network.requires_grad_(False), _written_dtype(own.model))
    scales = sum(pack_linear(module, own, shape) for module, shape in packable)
    held = _param_specs(ForwardWrapper(network), own, scales, UNSPLIT)
    params = (replace(p, unit=f"teacher {p.unit}") for p in held.params)
    specs = variant.specs
    return replace(variant, specs=replace(specs, params=(*specs.params, *params), rest=specs.rest + held.rest))


def _param_specs(model: nn.Module, recipe: Recipe, scales: int, splits: Splits) -> ParamSpecs:
    """Reads the parameters of a network on the meta device.

    Args:
        model: The `ForwardWrapper` around the network.
        scales: Bytes of the scales of quantized weights that are no buffers.
    """
    groups = parameter_groups(model, recipe.optim)
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    both, layers = lora_adapters.embeddings_and_head(model), unsplit_classes(model)
    unit_of: dict[int, str] = {}
    looked_up: set[int] = set()
    for name, module in model.named_modules():
        if type(module).__name__ in layers or module in both:
            for parameter in module.parameters():
                unit_of.setdefault(id(parameter), name)
        if isinstance(module, nn.Embedding):
            looked_up |= {id(p) for p in module.parameters(recurse=False)}
    head = both[1]
    looked_up -= {id(p) for p in head.parameters()} if head is not None else set()
    params = []
    for name, p in model.named_parameters():
        packed = int(getattr(p, "packed_weights", 0))
        params.append(
            ParamSpec(
                shape=tuple(p.shape),
                itemsize=p.element_size(),
                group=group_of.get(id(p)),
                unit=unit_of.get(id(p), ""),
                multiplied=p.ndim >= 2 and id(p) not in looked_up and not packed,
                whole=held_whole(p),
                packed=packed,
                split=splits.parameters.get(name.removeprefix("network.")),
                partial=name.removeprefix("network.") in splits.partial,
            )
        )
    # A head may be without weights of its own, such as one that a task adds.
    units = [unit_of.get(id(next(iter(end.parameters()), None)), "") if end is not None else "" for end in both]
    return ParamSpecs(tuple(params), scales + sum(b.nbytes for b in model.buffers()), width_of(model), *units)


def _stored_dtype(recipe: Recipe, network: nn.Module, stored: str | None) -> torch.dtype:
    """Finds it as `build_network.build_model` does, but without reading weights that are not there."""
    section, lora = recipe.model, recipe.lora
    changed = section.freeze is None if lora is None else lora.init == "pissa"
    if stored is not None and not changed:
        return DTYPES[stored]
    if changed or section.name is None:
        return torch.float32
    return _written_dtype(section)


def _written_dtype(section: ModelSection) -> torch.dtype:
    assert section.name is not None
    folder = pretrained_files.weights_folder(section.name, section.revision)
    if any(folder.glob("*.safetensors")):
        return pretrained_files.stored_dtype(folder)
    # Of the file: building the network has set it to what is built.
    written: Any = read_pretrained_config(section).get_text_config().dtype
    return written if written in (torch.bfloat16, torch.float16) else torch.float32


def pack_linear(module: Any, recipe: Recipe, shape: torch.Size, *, part: bool = False) -> int:
    """Gives a linear module a weight of the size that packing leaves; returns the bytes of scales beside it.

    If `shape` is a rank's `part` of a split weight, its scales are no longer quantized themselves.
    """
    out, inputs = shape
    count, bits = out * inputs, 8 if recipe.model.quantization == "int8" else 4
    numbers = math.ceil(count * bits / 32)
    held = torch.empty((out, inputs // 4) if bits == 8 else (numbers, 1), device="meta")
    weight: Any = nn.Parameter(held, requires_grad=False)
    weight.packed_weights = count
    module.weight = weight
    if bits == 8:
        return 4 * out
    return _scales(count, double=recipe.model.double_quantization and not part)


def _scales(count: int, *, double: bool) -> int:
    """Returns the bytes of the scales of so many weights of 4 bits."""
    blocks, code = math.ceil(count / BLOCK), 4 * 16
    if not double:
        return 4 * blocks + code
    # A byte a scale; their own scales, code and offset.
    return blocks + code + 4 * math.ceil(blocks / _BLOCK_OF_SCALES) + 4 * 256 + 4
