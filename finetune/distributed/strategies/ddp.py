"""Data parallel: each rank, or group of ranks that share layers, holds all of the network; gradients are averaged."""

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from finetune.distributed.launch.launch_config import Launch, ResolvedConfig
from finetune.distributed.parameter_info import inner_name, master_weights, read_parameters
from finetune.distributed.strategies import strategy
from finetune.distributed.strategies.prediction import Flow, ParamSpecs, Share, elements_of, predict_whole_share
from finetune.distributed.strategies.strategy import Prepared, Runtime, Strategy
from finetune.utils.compat import torch_private
from finetune.utils.compat.torch_private import GradBucket

# DDP's default of bucket_cap_mb, in bytes.
_BUCKET = 25 * 2**20


def _accelerator_options(launch: Launch, settled: ResolvedConfig, reduced: torch.dtype, cpu: bool) -> dict[str, Any]:
    options = strategy.accelerator_options(launch, settled, reduced, cpu)
    options["kwargs_handlers"].append(DistributedDataParallelKwargs(gradient_as_bucket_view=True))
    return options


def _prepare(runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    accelerator = runtime.accelerator
    # Constants such as rotary frequencies are the same everywhere; only what is learned beside weights is sent.
    kept = model.state_dict().keys()
    accelerator.ddp_handler.broadcast_buffers = any(name in kept for name, _ in model.named_buffers())
    wrapped: Any
    if runtime.mesh.size("tp") > 1:
        # Over the ranks that hold the same part of each layer, which Accelerate cannot be told.
        moved: Any = accelerator.prepare_model(model, evaluation_mode=True)
        wrapped = DistributedDataParallel(
            moved,
            device_ids=None if accelerator.device.type == "cpu" else [accelerator.device.index],
            process_group=runtime.mesh.groups["average"].handle,
            **accelerator.ddp_handler.to_kwargs(),
        )
        prepared = accelerator.prepare_optimizer(optimizer)
    else:
        wrapped, prepared = strategy.prepare(runtime, model, optimizer)
    if runtime.reduce_dtype == "bf16":
        wrapped.register_comm_hook(wrapped.process_group, _sum_in_bf16)
    return wrapped, prepared


# DDP refuses a hook whose annotations are others than these.
def _sum_in_bf16(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sums a bucket of gradients over ranks in bf16, on gloo too, unlike torch's own hook."""
    rounded = bucket.buffer().to(torch.bfloat16).div_(torch.distributed.get_world_size(group))
    sent: Any = torch.distributed.all_reduce(rounded, group=group, async_op=True)
    summed: torch.futures.Future[torch.Tensor] = sent.get_future().then(
        lambda done: bucket.buffer().copy_(done.value()[0])
    )
    return summed


def _check_gradients(runtime: Runtime, model: Any, last: bool) -> AbstractContextManager[Any]:
    """DDP waits for the gradients of all, and fails in the next pass over those that are missing."""
    return strategy.expect_all(strategy.trained_leaves(model), "DDP waits for the gradients of all")


def _read_back(runtime: Runtime, model: Any) -> dict[str, Any]:
    facts, whole = read_parameters(model, runtime.optimizer, runtime.splits)
    named = [(inner_name(name), p) for name, p in model.named_parameters()]
    split = {id(p) for name, p in named if name in runtime.splits.parameters}

    def due(tensors: list[Any]) -> float:
        here = sum(whole[id(t)] // (facts["tensor"] if id(t) in split else 1) for t in tensors)
        return float(here / max(1, sum(whole[id(t)] for t in tensors)))

    halves = "bf16" in str(torch_private.ddp_logging_data(model).get("comm_hook", ""))
    return {
        "kind": "ddp",
        "averaged": model.process_group.size(),
        "due": (due([p for _, p in named]), due(master_weights(runtime.optimizer))),
        "reduce_dtype": "bfloat16" if halves else "float32",
        **facts,
    }


def _predict_share(launch: Launch, specs: ParamSpecs, accumulation: int) -> Share:
    share = predict_whole_share(launch, specs, accumulation)
    # Gradients are views of DDP's buckets, and new ones are copied there.
    return replace(share, gradients_from="step", in_flight=specs.largest_gradient)


def _predict_flows(launch: Launch, specs: ParamSpecs, accumulation: int) -> list[Flow]:
    ranks, gradients = launch.averaged_ranks, 4 * elements_of(specs.trained)
    sent, buckets = round(2 * (ranks - 1) / ranks * gradients), math.ceil(gradients / _BUCKET)
    return [Flow("all_reduce", "gradients", sent, ranks, "last backward", buckets, launch.tensor)]


STRATEGY = Strategy(
    holds=lambda model: isinstance(model, DistributedDataParallel),
    accelerator_options=_accelerator_options,
    prepare=_prepare,
    check_gradients=_check_gradients,
    # As views of buckets that are there anyway: made anew where micro-batches add up, they would be there twice until
    # the last micro-batch.
    keeps_gradients=lambda runtime: runtime.accumulation > 1,
    predict_share=_predict_share,
    predict_flows=_predict_flows,
    read_back=_read_back,
)
