"""One candidate of a plan: a way to train under a launch file, with what a rank holds and whether that fits."""

from dataclasses import dataclass, replace
from typing import Literal

from finetune.config.recipe_schema import Recipe
from finetune.distributed.device_selection import Devices
from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.held_memory import Memory
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.resolve_config import resolve_for_devices
from finetune.distributed.strategies.find_strategy import strategy_of
from finetune.optim import optimizers
from finetune.planning.activation_memory import Device, StepSetting, shape_of
from finetune.planning.model_shapes import Variant, part_of, with_unpaged_optimizer
from finetune.planning.rank_memory import peak_memory, resting_places, state_memory
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
    name: str,
    launch: Launch,
    variant: Variant,
    setting: StepSetting,
    gpu: Gpu,
    *,
    device: Device = "cuda",
) -> Candidate:
    """Predicts what a rank holds of a candidate, and whether that fits."""
    recipe = setting.applied_to(variant.recipe)
    blank, strategy = Candidate(name, variant.kind, launch, setting, "refused"), strategy_of(launch)
    lighter = [(launch.ds_config.get(dtype) or {}).get("enabled") is True for dtype in ("bf16", "fp16")]
    if launch.mixed_precision in ("bf16", "fp16") or any(lighter):
        return replace(blank, reason="weights cast to 16 bit by the launch file are not planned")
    if setting.checkpointed and head_of(recipe) is None:
        return replace(blank, reason="model.gradient_checkpointing does not change a custom task's network")
    try:
        resolved = resolve_for_devices(recipe, launch, Devices(gpus=launch.num_processes), {})
        check_task_splits(recipe, launch)
        if launch.tensor > 1 and variant.parts == 1:
            variant = part_of(variant, launch.tensor)
        sizes = [param.elements for param in variant.specs.params]
        strategy.check_network(launch, resolved.ds_config, variant.specs.width, sizes)
        optimizers.check_optimizer(with_unpaged_optimizer(recipe).optim, cut=launch.cuts_state, flat=launch.flattens)
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
