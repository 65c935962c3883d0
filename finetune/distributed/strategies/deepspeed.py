"""DeepSpeed's ZeRO: optimiser state (1), gradients (2) and weights (3) sharded, on the device, in memory or NVMe.

Predictions are read off the sources of deepspeed 0.19, and compared with launched runs on CPUs
(`docs/plan-accuracy.md`).
"""

import copy
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import InitProcessGroupKwargs
from torch import nn

from finetune.distributed.launch.launch_config import Launch, ResolvedConfig
from finetune.distributed.parameter_info import dtypes_of, held_bytes, off_share, short_dtype, width_of
from finetune.distributed.state import tensor_shards
from finetune.distributed.state.tensor_shards import Shard
from finetune.distributed.strategies import deepspeed_config, strategy
from finetune.distributed.strategies.prediction import (
    Flow,
    Gathered,
    ParamSpec,
    ParamSpecs,
    Share,
    Window,
    bytes_of,
    elements_of,
)
from finetune.distributed.strategies.strategy import TIMEOUT, Prepared, Runtime, Strategy
from finetune.utils.errors import BackendError

# DeepSpeed's defaults, in elements. Source: https://www.deepspeed.ai/docs/config-json/
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": deepspeed_config.PERSISTENCE_THRESHOLD,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}


def _accelerator_options(launch: Launch, settled: ResolvedConfig, reduced: torch.dtype, cpu: bool) -> dict[str, Any]:
    from accelerate.utils import DeepSpeedPlugin

    # Refuses a version that lacks what checkpoints need, before a step is taken.
    from finetune.utils.compat import deepspeed_private

    deepspeed_private.forget_autocast()
    plugin = DeepSpeedPlugin(hf_ds_config=settled.ds_config, zero3_init_flag=launch.sharded_init)
    # It warns of every optimiser but its own, and of settings that are `auto`.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return {
        "mixed_precision": "no",  # its config has its own say
        "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=TIMEOUT)],
        "deepspeed_plugin": plugin,
    }


def _loading(launch: Launch, pretrained: bool) -> AbstractContextManager[None]:
    """Shards weights as they load where the launch says so; random ones, drawn in shards, would be others."""
    if launch.kind != "zero3" or (pretrained and launch.sharded_init):
        return nullcontext()
    from finetune.utils.compat.transformers_private import hidden_deepspeed

    return hidden_deepspeed()


def _config(runtime: Runtime) -> dict[str, Any]:
    config: dict[str, Any] = runtime.accelerator.deepspeed_plugin.deepspeed_config
    return config


def _prepare(runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    from finetune.utils.compat.deepspeed_private import viewing_scalars

    launch, config = runtime.launch, _config(runtime)
    _fit(config, model)
    with viewing_scalars():
        if launch.offload_params == "nvme" and not any(hasattr(p, "ds_id") for p in model.parameters()):
            import deepspeed

            # Shards a whole model before DeepSpeed does, so that NVMe holds it in its own dtype. Left to itself,
            # DeepSpeed 0.19 takes the dtype of what it swaps from the device instead of the model where fp16 is not
            # supported: fp32 parameters would go to disk, and come back, as bf16.
            # Source: `Init._set_dtype` in `runtime/zero/partition_parameters.py` (a conditional's precedence).
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
        wrapped, prepared = strategy.prepare(runtime, model, optimizer)
    if launch.kind == "zero3":
        _plan_gathers_by_training(wrapped)
    return wrapped, prepared


def _fit(config: dict[str, Any], model: nn.Module) -> None:
    """Completes a config for a network, in place."""
    sizes = [getattr(p, "ds_numel", p.numel()) for p in model.parameters()]
    deepspeed_config.fit_to_model(config, hidden_size=width_of(model), parameter_sizes=sizes)
    for parameter in model.parameters():
        # A network that was sharded as it was loaded: in the dtypes that its parameters have by now.
        shard: Any = getattr(parameter, "ds_tensor", None)
        if shard is not None and shard.dtype != parameter.dtype:
            shard.data = shard.data.to(parameter.dtype)


def _hold(runtime: Runtime, model: Any) -> nn.Module:
    """Holds a second network: under stage 3 sharded by an engine without an optimiser, else whole."""
    launch = runtime.launch
    if launch.kind != "zero3":
        held = strategy.hold(runtime, model)
        if _casts_weights(runtime):
            held.to(runtime.dtype)
            model.autocast = nullcontext
        return held
    if launch.offload_params == "nvme":
        raise BackendError(
            f"{launch.ds_place} offloads parameters to NVMe, where DeepSpeed holds one network: a second one deletes "
            "the files of the first. Offload them to the CPU (offload_param.device), or to nowhere."
        )
    import deepspeed

    from finetune.utils.compat.deepspeed_private import viewing_scalars

    # Sizes that fit the trained network are in the run's own config by now.
    config = copy.deepcopy({**_config(runtime), "zero_optimization": launch.ds_config["zero_optimization"]})
    _fit(config, model)
    with viewing_scalars():
        engine: nn.Module = deepspeed.initialize(model=model, config=config)[0]
    return engine


def _plan_gathers_by_training(engine: Any) -> None:
    """Has ZeRO-3 learn from the first training step, not from forward passes before it, what is needed when.

    DeepSpeed records the order of the first pass, and remembers for ever, by position in it, which weights are not
    needed again soon. Told by a forward pass alone, it would free all of them before the backward pass, which would
    gather them again one by one.
    Source: deepspeed 0.19, `__params_to_release` in `runtime/zero/partitioned_param_coordinator.py` (an `lru_cache`
    that outlives the order it was made for).
    """
    from finetune.utils.compat.deepspeed_private import invalidate_trace

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()

    def forget(module: nn.Module, arguments: Any) -> None:
        if not coordinator.is_invalid_trace():
            invalidate_trace(coordinator)
        if torch.is_grad_enabled():
            handle.remove()

    # Before DeepSpeed's own hook, which takes the order of the pass before as settled.
    handle = engine.module.register_forward_pre_hook(forget, prepend=True)


def _check_network(launch: Launch, ds_config: dict[str, Any], width: int, sizes: Sequence[int]) -> None:
    """Completes a config for a network, in place; refuses thresholds by which stage 3 keeps too much of it whole.

    Source: deepspeed 0.19, `mark_persistent_parameters` in `runtime/zero/parameter_offload.py`.
    """
    deepspeed_config.fit_to_model(ds_config, hidden_size=width, parameter_sizes=sizes)
    if launch.kind != "zero3":
        return
    section, ranks, whole = ds_config["zero_optimization"], launch.num_processes, 0
    written = section.get("stage3_param_persistence_threshold")
    threshold = deepspeed_config.PERSISTENCE_THRESHOLD if written is None else written
    most = section.get("stage3_model_persistence_threshold", sys.maxsize)
    for size in sizes:
        if size <= threshold and whole + size <= most:
            whole += size
    held = (whole + (sum(sizes) - whole) / ranks) / max(1, sum(sizes))
    if off_share(sum(sizes), 1 / ranks, held):
        description = (
            f"leaves stage3_param_persistence_threshold out, and DeepSpeed's default is {threshold:,} elements"
            if written is None
            else f"says stage3_param_persistence_threshold: {threshold:,} elements"
        )
        raise BackendError(
            f"{launch.ds_place} {description}: parameters that are no larger stay whole on every rank, which is "
            f"{whole / sum(sizes):.0%} of this network ({whole:,} of {sum(sizes):,} weights). Stage 3 would hold "
            f"{held:.0%} of it on each of {ranks} ranks, where {1 / ranks:.0%} is asked. Write "
            '"stage3_param_persistence_threshold": "auto" below "zero_optimization", which fits it to the network, '
            "or a smaller number; nothing was trained."
        )


def _casts_weights(runtime: Runtime) -> bool:
    config = _config(runtime)
    return bool(config["bf16"]["enabled"] or config["fp16"]["enabled"])


def _autocast(runtime: Runtime) -> AbstractContextManager[Any]:
    if not runtime.launch.sharded or _casts_weights(runtime):
        return nullcontext()
    return strategy.uncached_autocast(runtime)


def _check_gradients(runtime: Runtime, model: Any, last: bool) -> AbstractContextManager[Any]:
    """ZeRO takes missing gradients for zeros."""
    return strategy.expect_decayed(strategy.trained_leaves(model), runtime.optimizer)


def _grad_norm(runtime: Runtime, model: nn.Module) -> torch.Tensor:
    # Not accelerator.clip_grad_norm_, which reads the value to the host at once.
    norm = runtime.accelerator.deepspeed_engine_wrapped.engine.get_global_grad_norm()
    return torch.as_tensor(norm, dtype=torch.float32)


def _zero_state() -> Any:
    """Returns the module that reads and writes flat buffers; it imports DeepSpeed."""
    from finetune.distributed.state import zero_state

    return zero_state


def _read_frozen(runtime: Runtime, name: str, parameter: Any) -> Shard:
    if runtime.launch.kind != "zero3":
        return tensor_shards.whole_shard(parameter)
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return tensor_shards.whole_shard(parameter.detach().clone())


def _loss_scaler(accelerator: Any) -> Any:
    return accelerator.deepspeed_engine_wrapped.engine.optimizer.loss_scaler


def _scaler_state(accelerator: Any) -> dict[str, float | int] | None:
    """Returns `hysteresis` too, which other scalers do not know."""
    scaler = _loss_scaler(accelerator)
    if not scaler.dynamic:
        return None
    return {
        "scale": float(scaler.cur_scale),
        "good_steps": int(scaler.cur_iter - scaler.last_overflow_iter - 1),
        "hysteresis": int(scaler.cur_hysteresis),
    }


def _set_scaler_state(accelerator: Any, state: Mapping[str, float | int]) -> None:
    scaler = _loss_scaler(accelerator)
    scaler.cur_scale = float(state["scale"])
    scaler.last_overflow_iter = scaler.cur_iter - int(state["good_steps"]) - 1
    scaler.cur_hysteresis = int(state.get("hysteresis", scaler.delayed_shift))


def _held_weights(model: Any, trained: list[Any]) -> tuple[int, int]:
    """Returns the bytes of weights and of master weights apart, and the elements of the master weights here."""
    inner = model.optimizer
    # Stages 1 and 2 hold the weights of a group as views of one tensor, padded.
    padded = getattr(inner, "bit16_groups_flat", None)
    held = sum(map(held_bytes, trained)) if padded is None else sum(t.nbytes for t in padded)
    return held + 4 * _apart(inner), _masters(inner)


def _masters(inner: Any) -> int:
    """Returns the elements of the master weights here; those on NVMe are empty between steps."""
    sizes = getattr(inner, "fp16_partitioned_groups_flat_numel", None)
    return sum(sizes) if sizes is not None else sum(m.numel() for m in inner.single_partition_of_fp32_groups)


def _apart(inner: Any) -> int:
    """Returns the elements of the master weights that are not the weights themselves.

    Stage 3 means to step fp32 weights in place, but deepspeed 0.19 compares a device with its name
    (`_create_fp32_partitions` in `runtime/zero/stage3.py`), so that its masters are copies.
    """
    masters = getattr(inner, "fp32_partitioned_groups_flat", None)
    if masters is None:
        return _masters(inner)
    sizes, weights = inner.fp16_partitioned_groups_flat_numel, inner.fp16_partitioned_groups_flat
    return sum(n for n, master, held in zip(sizes, masters, weights, strict=True) if master is not held)


def _read_back(runtime: Runtime, engine: Any) -> dict[str, Any]:
    stage, inner = engine.zero_optimization_stage(), engine.optimizer
    parameters = list(engine.module.parameters())
    sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
    _check_network(runtime.launch, _config(runtime), width_of(engine), sizes)
    facts: dict[str, Any] = {}
    if stage == 3:
        # A persistent parameter stays whole on every rank although it also has a partition.
        held = [
            p.ds_numel if getattr(p, "ds_persist", False) else p.ds_tensor.ds_numel
            for p in parameters
            if hasattr(p, "ds_tensor")
        ]
        masters = inner.fp32_partitioned_groups_flat
        swaps = any(getattr(p, "nvme_swapper", None) is not None for p in parameters)
        facts["offload_params"] = _rests(swaps, inner.offload_param)
        facts["offload_optimizer"] = _rests(inner.swap_optimizer, inner.offload_optimizer)
        facts["on_disk"] = _on_disk(parameters, inner)
    else:
        held = sizes
        masters = inner.single_partition_of_fp32_groups
        facts["offload_optimizer"] = _rests(False, inner.cpu_offload)
    trainable = sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad)
    return {
        "kind": f"zero{stage}",
        "averaged": engine.dp_world_size,
        "parameter_fraction": sum(held) / max(1, sum(sizes)),
        "optimizer_fraction": _masters(inner) / max(1, trainable),
        "parameter_dtypes": dtypes_of(masters),
        "model_dtypes": dtypes_of(parameters),
        "reduce_dtype": short_dtype(engine.communication_data_type),
        "accumulation": engine.gradient_accumulation_steps(),
        **facts,
    }


def _on_disk(parameters: list[Any], inner: Any) -> tuple[float, float]:
    """Returns the shares of parameters and optimiser state on NVMe; DeepSpeed keeps shards under 1 MiB in memory."""
    shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    marks = [(s.ds_numel, getattr(s.final_location, "value", s.final_location)) for s in shards]
    held = sum(size for size, mark in marks if mark == "nvme")
    from finetune.utils.compat.deepspeed_private import is_swapped

    groups = list(enumerate(inner.fp16_partitioned_groups_flat_numel))
    swapped = sum(size for index, size in groups if is_swapped(inner, index))
    return held / max(1, sum(size for size, _ in marks)), swapped / max(1, sum(size for _, size in groups))


def _rests(on_disk: bool, offloaded: bool) -> str:
    return "nvme" if on_disk else "cpu" if offloaded else "none"


def _zero_section(launch: Launch, specs: ParamSpecs) -> dict[str, Any]:
    """Returns the section `zero_optimization` with defaults, and the sizes that depend on the network."""
    section: dict[str, Any] = _DEFAULTS | copy.deepcopy(launch.ds_config["zero_optimization"])
    sizes = [p.elements for p in specs.params]
    deepspeed_config.fit_to_model({"zero_optimization": section}, hidden_size=specs.width, parameter_sizes=sizes)
    return section


def _predict_share(launch: Launch, specs: ParamSpecs, accumulation: int) -> Share:
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
    sizes = [2 * math.ceil(elements_of(group) / (2 * ranks)) for group in groups.values()]
    padded = [size * ranks * group[0].itemsize for size, group in zip(sizes, groups.values(), strict=True)]
    whole = launch.holds_whole_gradients(accumulation)
    buckets = 4 * int(section["reduce_bucket_size"]) * (2 if section.get("overlap_comm") else 1)
    return Share(
        frozen=bytes_of(specs.frozen) + specs.rest,
        trained=sum(padded) + 4 * sum(sizes),
        masters=4 * sum(sizes),
        stepped=sum(sizes),
        summed=elements_of(specs.trained) if whole else sum(sizes),
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
        masters=4 * stepped,
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


def _predict_flows(launch: Launch, specs: ParamSpecs, accumulation: int) -> list[Flow]:
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


STRATEGY = Strategy(
    holds=lambda model: hasattr(model, "zero_optimization_stage"),
    accelerator_options=_accelerator_options,
    loading=_loading,
    check_network=_check_network,
    prepare=_prepare,
    hold=_hold,
    casts_weights=_casts_weights,
    autocast=_autocast,
    check_gradients=_check_gradients,
    backward=lambda runtime, loss: runtime.accelerator.backward(loss),
    grad_norm=_grad_norm,
    clip_gradients=lambda model, norm, max_norm: None,  # it has clipped by then
    step=lambda runtime, optimizer, norm: optimizer.step(),  # in the backward pass, which has looked at the norm
    steps_in_backward=True,
    read_state=lambda runtime, network, optimizer, **options: _zero_state().read_state(optimizer, network, **options),
    write_state=lambda runtime, network, optimizer, *state: _zero_state().write_state(optimizer, network, *state),
    each_master=lambda *arguments: _zero_state().each_master(*arguments),
    read_frozen=_read_frozen,
    scaler_state=_scaler_state,
    set_scaler_state=_set_scaler_state,
    held_weights=_held_weights,
    copies_masters=lambda launch: launch.kind != "zero3",
    predict_share=_predict_share,
    predict_flows=_predict_flows,
    read_back=_read_back,
)
