"""Predicts what DeepSpeed's stages hold and send.

Read off the sources of deepspeed 0.19, and compared with launched runs on CPUs (`docs/plan-accuracy.md`).
"""

import copy
import math
from typing import Any

from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.param_specs import ParamSpec, ParamSpecs, bytes_of, elements_of
from finetune.distributed.strategies.deepspeed_config import PERSISTENCE_THRESHOLD, fit_to_model
from finetune.distributed.strategies.prediction import Flow, Gathered, Share, Window

# DeepSpeed's defaults, in elements. Source: https://www.deepspeed.ai/docs/config-json/
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}


def _zero_section(launch: Launch, specs: ParamSpecs) -> dict[str, Any]:
    """Returns the section `zero_optimization` with defaults, and the sizes that depend on the network."""
    section: dict[str, Any] = _DEFAULTS | copy.deepcopy(launch.ds_config["zero_optimization"])
    sizes = [p.elements for p in specs.params]
    fit_to_model({"zero_optimization": section}, hidden_size=specs.width, parameter_sizes=sizes)
    return section


def predict_share(launch: Launch, specs: ParamSpecs, accumulation: int) -> Share:
    """Returns the fullest rank's share.

    Stages 1 and 2 hold the weights of an optimiser's group as views of one tensor, padded to two elements a rank.
    Source: `nccl_start_alignment_factor` in `runtime/zero/stage_1_and_2.py`.
    """
    section, ranks = _zero_section(launch, specs), launch.averaged_ranks
    if launch.kind == "zero3":
        return _stage3_share(launch, specs, section)
    groups: dict[int | None, list[ParamSpec]] = {}
    for param in specs.trained:
        groups.setdefault(param.group, []).append(param)
    parts = [2 * math.ceil(elements_of(group) / (2 * ranks)) for group in groups.values()]
    padded = [part * ranks * group[0].itemsize for part, group in zip(parts, groups.values(), strict=True)]
    whole = launch.holds_whole_gradients(accumulation)
    buckets = 4 * int(section["reduce_bucket_size"]) * (2 if section.get("overlap_comm") else 1)
    return Share(
        frozen=bytes_of(specs.frozen) + specs.rest,
        trained=sum(padded) + 4 * sum(parts),
        stepped=sum(parts),
        summed=elements_of(specs.trained) if whole else sum(parts),
        gradients_from="backward",
        gradients_rest=launch.offload_optimizer,
        # A gradient is made whole before it is copied to a bucket, which is there for the backward pass only.
        in_flight=buckets + specs.largest_gradient,
    )


def _stage3_share(launch: Launch, specs: ParamSpecs, section: dict[str, Any]) -> Share:
    """Returns the share under stage 3, which runs ahead as the forward pass begins, at every module by another bucket.

    It frees what has run, but for what the backward pass needs again within a distance, counted in elements that are
    used between. In the backward pass other weights are gathered as they are needed.
    Source: `_fetch_sub_module_impl` and `__params_to_release` in `partitioned_param_coordinator.py`;
    `reduce_scatter_coalesced` in `stage3.py`.
    """
    bucket, threshold = 4 * int(section["reduce_bucket_size"]), int(section["stage3_param_persistence_threshold"])

    def held(params: list[ParamSpec]) -> int:
        # Small ones are held whole as well.
        persistent = [p for p in params if p.elements <= threshold]
        return sum(math.ceil(p.elements / ranks) * p.itemsize for p in params) + bytes_of(persistent)

    ranks, whole, elements = launch.averaged_ranks, bytes_of(specs.params), elements_of(specs.params)
    live = round(whole * min(1.0, int(section["stage3_max_live_parameters"]) / elements))
    again = round(whole * min(1.0, int(section["stage3_max_reuse_distance"]) / 2 / elements))
    ahead = bytes_of(specs.units.get(specs.head, [])) + 4 * int(section["stage3_prefetch_bucket_size"])
    loss, largest = max(again, min(live, ahead)), max(p.nbytes for p in specs.params)
    stepped = sum(math.ceil(p.elements / ranks) for p in specs.trained)
    return Share(
        frozen=held(specs.frozen) + specs.rest,
        trained=held(specs.trained) + 4 * stepped,
        stepped=stepped,
        summed=stepped,
        gradients_from="step",
        gradients_rest=launch.offload_optimizer,
        gathered=Gathered(
            forward=live,
            loss=loss,
            loss_gradient=loss,
            # A head that looks no tokens up is first to run backwards, and freed.
            backward=max(again - specs.head_alone, min(live, whole - specs.head_alone, loss + largest)),
        ),
        # A bucket goes when it is full: all of an adapter's may fit in one.
        in_flight=max(min(bucket, 4 * elements_of(specs.trained)), specs.largest_gradient),
        buckets=bucket,
        # Its own linear function casts again in the backward pass (`LinearFunctionForZeroStage3`, `zero/linear.py`).
        keeps_inputs=section.get("memory_efficient_linear", True),
    )


def predict_flows(launch: Launch, specs: ParamSpecs, accumulation: int) -> list[Flow]:
    """Returns the flows of a step. Buckets are counted in elements."""
    section, ranks, elements = _zero_section(launch, specs), launch.averaged_ranks, elements_of(specs.trained)
    ring = (ranks - 1) / ranks
    reduced, sent = math.ceil(elements / int(section["reduce_bucket_size"])), round(ring * 4 * elements)
    if launch.kind == "zero3":
        gathers = 2 * accumulation
        moved = round(gathers * ring * bytes_of(specs.params))
        return [
            Flow("all_gather", "weights", moved, ranks, "all", gathers * len(specs.units)),
            Flow("reduce_scatter", "gradients", accumulation * sent, ranks, "backward", accumulation * reduced),
        ]
    # Stage 2 keeps shards of gradients only, so it reduces after each micro-batch.
    times: int = 1 if launch.kind == "zero1" else accumulation
    window: Window = "none" if launch.kind == "zero1" else "backward"
    back = math.ceil(elements / int(section["allgather_bucket_size"]))
    return [
        Flow("reduce_scatter", "gradients", times * sent, ranks, window, times * reduced),
        Flow("all_gather", "weights", sent, ranks, "none", back),
    ]
