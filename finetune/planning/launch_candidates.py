"""One candidate of a plan: a way to train under a launch file, with what a rank holds and whether that fits."""

import copy
from dataclasses import dataclass, replace
from typing import Literal

from finetune.config.recipe_schema import Recipe
from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.held_memory import Memory
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.resolve_config import derive_accumulation
from finetune.distributed.strategies.find_strategy import strategy_of
from finetune.distributed.strategies.refusals import check_split_layers, check_split_rows
from finetune.optim import optimizers
from finetune.planning.activation_memory import Activations, activations, shape_of
from finetune.planning.model_shapes import Variant, is_half, part_of, unpaged
from finetune.planning.rank_memory import (
    adds_on_device,
    casts_weights,
    keeps_gradients,
    places,
    state,
    steps_on_host,
)
from finetune.planning.transient_memory import (
    Device,
    early_gradients,
    keeps_inputs_whole,
    late_gradients,
    transient_memory,
)
from finetune.tasks.task_lookup import check_task_splits, head_of
from finetune.utils.errors import BackendError, RecipeError

Verdict = Literal["fits", "tight", "no", "refused"]

# What a prediction may be below the truth by: allocators round and leave gaps.
MARGIN = 0.10
# Of a network that is not built as Llama is, whose activations are counted more coarsely.
COARSE = 0.25
# Outside of what programs allocate: the device's context, its libraries' workspaces, buffers of the network.
OVERHEAD = 1 << 30


@dataclass(frozen=True)
class Setting:
    """What a change may change, other than the launch and the way to train."""

    micro: int
    checkpointed: bool


@dataclass(frozen=True)
class Candidate:
    """A way to train under a launch file."""

    name: str
    kind: str
    launch: Launch
    setting: Setting
    verdict: Verdict
    memory: Memory | None = None
    """From step to step, wherever it rests; None if it is refused."""
    parts: dict[str, int] | None = None
    """Of the peak on the device, by what it is for."""
    host: int = 0
    disk: int = 0
    accumulation: int = 0
    margin: float = MARGIN
    reason: str = ""
    """Why it is refused, or what is not counted."""

    @property
    def peak(self) -> int:
        return sum((self.parts or {}).values())

    @property
    def needed(self) -> int:
        """With the margin, and what lies outside of it."""
        return round(self.peak * (1 + self.margin)) + OVERHEAD


def setting_of(recipe: Recipe) -> Setting:
    return Setting(recipe.batch.rows, recipe.model.gradient_checkpointing is True)


def assess(
    name: str,
    launch: Launch,
    variant: Variant,
    setting: Setting,
    gpu: Gpu,
    *,
    device: Device = "cuda",
) -> Candidate:
    """What a rank holds of a candidate, and whether that fits.

    Args:
        device: What it runs on: predictions are compared with runs on CPUs.
    """
    recipe = _with(variant.recipe, setting)
    blank = Candidate(name, variant.kind, launch, setting, "refused")
    if casts_weights(launch):
        return replace(blank, reason="weights cast to 16 bit by the launch file are not planned")
    if setting.checkpointed and head_of(recipe) is None:
        return replace(blank, reason="model.gradient_checkpointing does not change a custom task's network")
    try:
        accumulation = derive_accumulation(recipe, launch.data_ranks, launch.num_processes)
        if launch.sequence > 1:
            check_split_rows(recipe, launch)
            check_task_splits(recipe, launch)
        if launch.tensor > 1:
            check_split_layers(recipe, launch, _precision(recipe))
            variant = part_of(variant, launch.tensor) if variant.parts == 1 else variant
        sizes = [weight.elements for weight in variant.outline.weights]
        strategy_of(launch).check_network(launch, copy.deepcopy(launch.ds_config), variant.outline.width, sizes)
        optimizers.check_optimizer(unpaged(recipe).optim, cut=launch.cuts_state, flat=launch.flattens)
        if steps_on_host(launch) and recipe.optim.name != "AdamW":
            raise RecipeError(f"optim.name: an offloaded optimiser is AdamW, and not {recipe.optim.name}.")
    except (RecipeError, BackendError) as error:
        return replace(blank, reason=str(error))
    shape = shape_of(variant)
    if shape is not None and shape.a % launch.sequence:
        return replace(blank, reason=f"its {shape.a} attention heads do not divide over {launch.sequence} ranks")
    if launch.defers(accumulation):
        # Whole gradients send less, so they are held where they fit.
        held, cut = (
            assess(name, replace(launch, sync_each_batch=each), variant, setting, gpu, device=device)
            for each in (False, True)
        )
        return held if held.verdict == "fits" else cut
    memory = state(launch, variant.outline, accumulation=accumulation, state_bytes=variant.state_bytes)
    resting = places(launch, memory, accumulation)
    parts, known = _peak(launch, variant, setting, memory, accumulation, device)
    made = replace(
        blank,
        memory=memory,
        parts=parts,
        host=resting["host"],
        disk=resting["disk"],
        accumulation=accumulation,
        margin=MARGIN if known and {"gate_proj", "q_proj"} <= variant.names else COARSE,
        reason="" if known else "activations are not counted: the network does not say that it is a transformer",
    )
    capacity = gpu.memory_gib * 2**30
    verdict: Verdict = "fits" if made.needed <= capacity else "tight" if made.peak + OVERHEAD <= capacity else "no"
    return replace(made, verdict=verdict)


def _with(recipe: Recipe, setting: Setting) -> Recipe:
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_size": setting.micro})})


def _precision(recipe: Recipe) -> str:
    return recipe.precision if recipe.precision != "auto" else "bf16"


def _of_part(variant: Variant, launch: Launch) -> Variant:
    """A variant whose rows are the parts that a rank computes."""
    if launch.sequence == 1:
        return variant
    data = variant.recipe.data
    part = data.model_copy(update={"sequence_length": data.sequence_length // launch.sequence})
    return replace(variant, recipe=variant.recipe.model_copy(update={"data": part}))


def _peak(
    launch: Launch,
    variant: Variant,
    setting: Setting,
    memory: Memory,
    accumulation: int,
    device: Device,
) -> tuple[dict[str, int], bool]:
    """The fullest moment of a step on the device, by category; and whether activations are in it."""
    outline = variant.outline
    lent = transient_memory(launch, outline, accumulation=accumulation, device=device)
    weights = (memory.frozen + memory.trained) * (launch.offload_params == "none")
    optimizer = memory.optimizer * (launch.offload_optimizer == "none")
    gradients = memory.gradients * adds_on_device(launch, accumulation)
    resting = gradients if accumulation > 1 or keeps_gradients(launch) else 0
    copies = _copies(launch, variant, setting)
    early = max(resting, early_gradients(launch, outline, gradients))
    late = 0 if resting else min(gradients, late_gradients(launch, outline))
    counted = activations(
        _of_part(variant, launch),
        checkpointed=setting.checkpointed,
        micro=setting.micro,
        whole=keeps_inputs_whole(launch),
        device=device,
    )
    found = counted or Activations()
    kept, layer, attention = found.kept, found.layer, found.attention
    flowing, outputs = found.gradients, found.outputs

    def moment(name: str, gradients: int, activations: int, loss: int, gathered: int, buckets: int) -> dict[str, int]:
        return {
            "weights": weights,
            "optimizer": optimizer,
            "gradients": gradients,
            "activations": activations,
            "loss": loss,
            "copies": copies.get(name, 0),
            "gathered": gathered,
            "buckets": lent.kept + buckets,
        }

    again = layer if setting.checkpointed else 0
    moments = [
        moment("layer", resting, layer + outputs, 0, lent.begins, 0),
        moment("kept", resting, kept + outputs + (layer - attention) * setting.checkpointed, 0, lent.last_layer, 0),
        moment("scores", resting, kept + found.norm_and_head, found.scores_forward, lent.scores, 0),
        moment("returns", resting, kept + found.norm_and_head, found.scores, lent.returns, 0),
        # The last layer runs once more,
        moment("backward", early, kept + again + outputs, 0, lent.backward, lent.products),
        # its MLP runs backwards, then its attention; then the first layer's.
        moment("backward", early, kept + again + flowing, 0, lent.backward, lent.products),
        moment(
            "backward", early, kept - (0 if setting.checkpointed else layer) + attention, 0, lent.backward, lent.buckets
        ),
        moment("layer", gradients - late, layer + flowing, 0, lent.backward, lent.products),
        moment("layer", gradients, attention, 0, lent.backward, lent.buckets),
        # Gradients that do not stay are gone when new weights are gathered.
        moment("", resting, 0, 0, 0, lent.steps),
    ]
    return max(moments, key=lambda parts: sum(parts.values())), counted is not None


def _copies(launch: Launch, variant: Variant, setting: Setting) -> dict[str, int]:
    """Bytes of weights in another dtype, and of a gradient in 16 bit, by moment."""
    outline, half = variant.outline, is_half(variant.recipe)
    whole, fused = keeps_inputs_whole(launch), variant.loss_by_head
    # Quantized weights, and stored ones of 16 bit where products are fp32, are read up one at a time.
    read = max(
        (2 * w.packed if half else 4 * (w.packed or w.elements * (w.itemsize < 4)) for w in outline.weights), default=0
    )
    if not half:
        return dict.fromkeys(("layer", "kept", "backward"), read)
    cast = {
        name: 2 * sum(w.elements for w in unit if w.multiplied and w.itemsize == 4)
        for name, unit in outline.by_unit().items()
    }
    # A head that computes the loss casts its weight itself, and lets go of it.
    own = cast.pop(outline.head, 0) if fused else 0
    rest = [w for name, unit in outline.by_unit().items() if not (fused and name == outline.head) for w in unit]
    every, largest = sum(cast.values()), max(cast.values(), default=0)
    head = cast.get(outline.head, 0)
    if whole:
        # Cast for each product, and let go.
        every = largest = max((2 * w.elements for w in rest if w.multiplied and w.itemsize == 4), default=0)
        head = 0
    # Autocast keeps its copies of trained weights through a forward pass, unless layers are gathered and freed.
    cached = 0 if launch.sharded else 2 * sum(w.elements for w in rest if w.multiplied and w.group is not None)
    all_layers = largest if setting.checkpointed else every
    made = read + max((2 * w.elements for w in rest if w.multiplied and w.group is not None), default=0)
    return {
        "layer": largest + made,
        "kept": max(all_layers, cached) + read,
        "scores": max(head if setting.checkpointed else 0 if whole else every, cached) + own,
        "returns": head if setting.checkpointed else 0 if whole else every,
        "backward": all_layers + made,
    }
