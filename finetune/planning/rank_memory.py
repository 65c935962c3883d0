"""Predicts what a rank holds: from step to step, to the byte, and at the fullest moment of a step.

`held_memory.py` reads the former back from what runs.
"""

from dataclasses import replace

from finetune.distributed.held_memory import Memory
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.strategies.prediction import Share
from finetune.planning.activation_memory import Activations, Device, StepSetting, predict_activations
from finetune.planning.model_shapes import Variant, is_half


def state_memory(share: Share, state_bytes: float) -> Memory:
    """Returns the bytes that a rank holds from step to step.

    Args:
        state_bytes: That the optimiser keeps for an element.
    """
    # Gradients are summed in fp32.
    return Memory(share.frozen, share.trained, 4 * share.summed, round(state_bytes * share.stepped))


def resting_places(launch: Launch, share: Share, memory: Memory) -> dict[str, int]:
    """Returns where that rests: bytes on the device, in host memory and on disk."""
    found = {"none": 0, "cpu": 0, "nvme": 0}
    found[launch.offload_params] += memory.frozen + memory.trained
    found[launch.offload_optimizer] += memory.optimizer
    found[share.gradients_rest] += memory.gradients
    return {"device": found["none"], "host": found["cpu"], "disk": found["nvme"]}


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

    Args:
        accumulation: Micro-batches a step and process.

    Returns:
        Bytes by what they are for; and True if activations are counted, which takes a transformer.
    """
    data = variant.recipe.data
    part = data.model_copy(update={"sequence_length": data.sequence_length // launch.sequence})
    rows = replace(variant, recipe=variant.recipe.model_copy(update={"data": part}))
    counted = predict_activations(rows, setting, whole=share.keeps_inputs, device=device)
    found = counted or Activations()
    weights = (memory.frozen + memory.trained) * (launch.offload_params == "none")
    optimizer = memory.optimizer * (launch.offload_optimizer == "none")
    added = memory.gradients * (share.gradients_rest == "none")
    resting = added if accumulation > 1 or share.gradients_from == "step" else 0
    early = resting if share.gradients_from == "layers" else added
    copies = _copies(launch, variant, share, setting)

    def moment(
        name: str, gradients: int, activations: int, gathered: int, loss: int = 0, in_flight: int = 0
    ) -> dict[str, int]:
        return {
            "weights": weights,
            "optimizer": optimizer,
            "gradients": gradients,
            "activations": activations,
            "loss": loss,
            "copies": copies[name],
            "gathered": gathered,
            "buckets": share.buckets + in_flight,
        }

    gathered, with_head = share.gathered, found.kept + found.norm_and_head
    again = found.layer * setting.checkpointed
    moments = [
        moment("forward", resting, found.kept + found.working, gathered.forward),
        moment("loss", resting, with_head, gathered.loss, loss=found.loss),
        moment("loss gradient", resting, with_head, gathered.loss_gradient, loss=found.loss_gradient),
        # The last layer runs backwards; then the first.
        moment("backward", early, found.kept + again + found.working, gathered.backward, in_flight=share.in_flight),
        moment("end", added, found.layer, gathered.backward, in_flight=share.in_flight),
    ]
    return max(moments, key=lambda parts: sum(parts.values())), counted is not None


def _copies(launch: Launch, variant: Variant, share: Share, setting: StepSetting) -> dict[str, int]:
    """Returns bytes of 16-bit copies of weights, by moment."""
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
    return {
        "forward": max(cached, used),
        # A head that computes the loss lets go of its copy.
        "loss": cached + head,
        "loss gradient": kept + (head if fused is None else 0),
        "backward": max(kept, used),
        "end": used,
    }
