"""One candidate of a plan: a way to train under a launch file, with what a rank holds and whether that fits.

Bytes from step to step are exact: `memory_usage.py` reads the same back from what runs.
"""

from dataclasses import dataclass, replace
from typing import Literal

from finetune.config.recipe_schema import Recipe
from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.memory_usage import Memory
from finetune.distributed.resolve_config import resolve_for_devices
from finetune.distributed.strategies.prediction import Share
from finetune.distributed.strategies.strategy import strategy_of
from finetune.optim import optimizers
from finetune.planning.activation_memory import Activations, Device, StepSetting, predict_activations, shape_of
from finetune.planning.model_shapes import Variant, is_half, part_of, without_paging
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
class Candidate:
    """A way to train under a launch file."""

    name: str
    kind: str
    launch: Launch
    setting: StepSetting
    verdict: Verdict
    memory: Memory | None = None
    """Held from step to step, wherever it rests; None if it is refused."""
    parts: dict[str, int] | None = None
    """Bytes of the peak on the device, by what they are for."""
    host: int = 0
    disk: int = 0
    accumulation: int = 0
    margin: float = MARGIN
    reason: str = ""
    """Reason why it is refused, or part that is not counted."""

    @property
    def peak(self) -> int:
        return sum((self.parts or {}).values())

    @property
    def needed(self) -> int:
        """Peak with the margin, and what lies outside of it."""
        return round(self.peak * (1 + self.margin)) + OVERHEAD


def setting_of(recipe: Recipe) -> StepSetting:
    return StepSetting(recipe.batch.rows, recipe.model.gradient_checkpointing is True)


def assess_candidate(
    name: str, launch: Launch, variant: Variant, setting: StepSetting, gpu: Gpu, *, device: Device = "cuda"
) -> Candidate:
    """Predicts what a rank holds of a candidate, and whether that fits."""
    recipe = setting.applied_to(variant.recipe)
    blank, strategy = Candidate(name, variant.kind, launch, setting, "refused"), strategy_of(launch)
    lighter = [(launch.ds_config.get(dtype) or {}).get("enabled") is True for dtype in ("bf16", "fp16")]
    if launch.mixed_precision in ("bf16", "fp16") or any(lighter):
        return replace(blank, reason="weights cast to 16 bit by the launch file are not planned")
    if launch.units == "sized":
        return replace(blank, reason="units of SIZE_BASED_WRAP are not planned; TRANSFORMER_BASED_WRAP and NO_WRAP are")
    if setting.checkpointed and head_of(recipe) is None:
        return replace(blank, reason="model.gradient_checkpointing does not change a custom task's network")
    try:
        resolved = resolve_for_devices(recipe, launch, launch.num_processes, {})
        # As a run takes it.
        setting = replace(setting, micro=resolved.micro_size)
        blank = replace(blank, setting=setting)
        check_task_splits(recipe, launch)
        if launch.tensor > 1 and variant.parts == 1:
            variant = part_of(variant, launch.tensor)
        sizes = [param.elements for param in variant.specs.params]
        strategy.check_network(launch, resolved.ds_config, variant.specs.width, sizes)
        optimizers.check_optimizer(without_paging(recipe.optim), launch)
    except (RecipeError, BackendError) as error:
        return replace(blank, reason=str(error))
    shape, accumulation = shape_of(variant), resolved.accumulation
    if shape is not None and shape.a % launch.sequence:
        return replace(blank, reason=f"its {shape.a} attention heads do not divide over {launch.sequence} ranks")
    if launch.defers(accumulation):
        # Whole gradients send less, so they are held where they fit.
        held, cut = (
            assess_candidate(name, replace(launch, sync_each_batch=each), variant, setting, gpu, device=device)
            for each in (False, True)
        )
        return held if held.verdict == "fits" else cut
    share = strategy.predict_share(launch, variant.specs, accumulation)
    memory = state_memory(share, variant.state_bytes)
    resting = resting_places(launch, share, memory)
    parts, known = peak_memory(launch, variant, share, memory, setting, accumulation, device)
    uncounted = "the network does not say that it is a transformer"
    if getattr(variant.config, "is_encoder_decoder", False):
        uncounted = "the formulas are for one stack of layers; `--trace` counts those of an encoder-decoder"
    made = replace(
        blank,
        memory=memory,
        parts=parts,
        host=resting["host"],
        disk=resting["disk"],
        accumulation=accumulation,
        margin=MARGIN if known and {"gate_proj", "q_proj"} <= variant.names else COARSE,
        reason="" if known else f"activations are not counted: {uncounted}",
    )
    capacity = gpu.memory_gib * 2**30
    verdict: Verdict = "fits" if made.needed <= capacity else "tight" if made.peak + OVERHEAD <= capacity else "no"
    return replace(made, verdict=verdict)


def state_memory(share: Share, state_bytes: float) -> Memory:
    """Returns the bytes that a rank holds from step to step, with the optimiser's `state_bytes` an element."""
    # Gradients are summed in fp32.
    return Memory(share.frozen, share.trained, 4 * share.summed, round(state_bytes * share.stepped))


def resting_places(launch: Launch, share: Share, memory: Memory) -> dict[str, int]:
    """Returns where that rests: bytes on the device, in host memory and on disk."""
    sizes = {"none": 0, "cpu": 0, "nvme": 0}
    sizes[launch.offload_params] += memory.frozen + memory.trained - share.masters
    sizes[launch.offload_optimizer] += memory.optimizer + share.masters
    sizes[share.gradients_rest] += memory.gradients
    return {"device": sizes["none"], "host": sizes["cpu"], "disk": sizes["nvme"]}


def peak_memory(
    launch: Launch,
    variant: Variant,
    share: Share,
    memory: Memory,
    setting: StepSetting,
    accumulation: int,
    device: Device,
) -> tuple[dict[str, int], bool]:
    """Predicts the fullest moment of a step on the device.

    Returns:
        Bytes by what they are for; and True if activations are counted, which takes a transformer.
    """
    part = replace(variant, row_tokens=variant.row_tokens // launch.sequence)
    counted = predict_activations(part, setting, whole=share.keeps_inputs, device=device)
    sizes = counted or Activations()
    weights = (memory.frozen + memory.trained - share.masters) * (launch.offload_params == "none")
    weights += share.masters * (launch.offload_optimizer == "none")
    optimizer = memory.optimizer * (launch.offload_optimizer == "none")
    added = memory.gradients * (share.gradients_rest == "none")
    resting = added if accumulation > 1 or share.gradients_from == "step" else 0
    early = resting if share.gradients_from == "layers" else added
    forward, loss, loss_gradient, backward, end = _copies(launch, variant, share, setting)
    gathered, with_head = share.gathered, sizes.kept + sizes.norm_and_head
    again, in_flight = sizes.layer * setting.checkpointed, share.buckets + share.in_flight
    changing = ("gradients", "activations", "loss", "copies", "gathered", "buckets")
    moments = [
        (resting, sizes.kept + sizes.working, 0, forward, gathered.forward, share.buckets),
        (resting, with_head, sizes.loss, loss, gathered.loss, share.buckets),
        (resting, with_head, sizes.loss_gradient, loss_gradient, gathered.loss_gradient, share.buckets),
        # The last layer runs backwards; then the first.
        (early, sizes.kept + again + sizes.working, 0, backward, gathered.backward, in_flight),
        (added, sizes.layer, 0, end, gathered.backward, in_flight),
    ]
    fullest = dict(zip(changing, max(moments, key=sum), strict=True))
    return {"weights": weights, "optimizer": optimizer, **fullest}, counted is not None


def _copies(launch: Launch, variant: Variant, share: Share, setting: StepSetting) -> tuple[int, int, int, int, int]:
    """Returns bytes of 16-bit copies of weights: forward, at the loss and its gradient, backward, and at the end."""
    specs = variant.specs
    fused = specs.head if variant.loss_by_head else None
    cast = {
        name: [2 * p.elements for p in unit if p.multiplied and p.itemsize == 4 and is_half(variant.recipe)]
        for name, unit in specs.units.items()
    }
    head, layers = sum(cast.pop(specs.head, [])), [*map(sum, cast.values())]
    # Autograd keeps copies until the backward pass, unless they are made anew for each product or with their layer.
    kept = 0 if setting.checkpointed or share.keeps_inputs else sum(layers)
    used = max(map(max, filter(None, cast.values())), default=0) if share.keeps_inputs else max(layers, default=0)
    # Autocast keeps its copies of trained weights through a forward pass, unless layers are gathered and freed.
    trained = [2 * p.elements for p in specs.trained if p.multiplied and p.unit != fused]
    cached = max(kept, 0 if launch.sharded or not is_half(variant.recipe) else sum(trained))
    # A head that computes the loss lets go of its copy.
    return max(cached, used), cached + head, kept + (head if fused is None else 0), max(kept, used), used
