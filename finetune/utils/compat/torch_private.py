"""Private names of torch, except for sharding and tracing, whose imports take more than a second."""

import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm, dropout

from finetune.utils.compat.library_versions import require

# Not `torch.distributed.rendezvous`, which is a function of that name.
_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

GROWTH_TRACKER = "_growth_tracker"
"""The key of `GradScaler.state_dict()` for the steps since the scale last changed."""

require("torch", batchnorm, "_BatchNorm")
require("torch", dropout, "_DropoutNd")
require("torch", distributed_c10d, "_get_default_store", "_world")
require("torch", _rendezvous, "_create_c10d_store")
require("torch", nn.parallel.DistributedDataParallel, "_get_ddp_logging_data")
require("torch", torch.optim.Adam, "_step_supports_amp_scaling")
require("torch", torch.amp.GradScaler, GROWTH_TRACKER)

BatchNorm = batchnorm._BatchNorm
Dropout = dropout._DropoutNd
GradBucket = _distributed_c10d.GradBucket
default_store = distributed_c10d._get_default_store
ddp_logging_data: Any = nn.parallel.DistributedDataParallel._get_ddp_logging_data
"""Returns what a `DistributedDataParallel` module reports about itself, such as `comm_hook`."""
ProcessGroupGloo: Any = distributed_c10d.ProcessGroupGloo

require("torch", _distributed_c10d, "_dump_fr_trace_json")
require("torch", ProcessGroupGloo, "_Options", "create_device", "create_default_device")
require("torch", ProcessGroupGloo._Options, "_threads", "_timeout", "_devices")


def recorded_collectives() -> bytes:
    """Returns the last collectives of this process by torch's flight recorder, as its JSON: of NCCL if it has any."""
    recorder: Any = _distributed_c10d
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # A build for CPUs has no NCCL.
    return bytes(recorder._dump_nccl_trace_json() if on_gpu else recorder._dump_fr_trace_json())


def last_collective() -> tuple[int, str]:
    """Returns how many collectives this process has begun, and the last of them in words."""
    entries = json.loads(recorded_collectives() or b"{}").get("entries", [])
    if not entries:
        return 0, ""
    last = max(entries, key=lambda entry: entry["record_id"])
    of = f"of {last['process_group'][1]}, {last['profiling_name']} of {last['input_sizes']}"
    return last["record_id"] + 1, f"{last['collective_seq_id']} {of}"


@functools.cache
def varlen_takes_groups() -> bool:
    """Tells if variable-length attention takes fewer key heads than query heads; that of torch 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def reduces_unused_gradients() -> bool:
    """Tells if FSDP2 can reduce gradients of weights that a micro-batch did not use; that of torch 2.11 cannot."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def start_gloo_with_one_worker() -> None:
    """Makes each new gloo group run its collectives on one thread, since the two that torch starts race.

    Both assign a collective's name to a string that they share, without a lock, and may free its old buffer twice. See
    docs/reports/gloo-worker-threads.md.

    `init_process_group` and `new_group` take no options for gloo. All groups go through this constructor: theirs, those
    of device meshes, Accelerate and DeepSpeed, and the one beside a group that is being debugged. Callbacks of
    `get_future().then` run on that thread, and so must not wait for another collective of the same group.

    Source: `ProcessGroupGloo::runLoop`. pytorch#152614 brought the assignment into torch 2.8; pytorch#190738 moves it
    out of the threads, into no release up to 2.14.1.
    """
    start = ProcessGroupGloo.__init__
    if hasattr(start, "__wrapped__"):
        return

    @functools.wraps(start)
    def with_one_worker(
        self: Any,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = distributed_c10d.default_pg_timeout,
        **more: Any,
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._threads, options._timeout, options._devices = 1, timeout, _gloo_devices()
        for name, value in more.items():
            # torch 2.14 names `enable_reconfigure`, which its options have as well.
            setattr(options, name, value)
        start(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = with_one_worker


def _gloo_devices() -> list[Any]:
    """Returns the devices that gloo listens on. Source: torch 2.13, `ProcessGroupGloo::Options::create_default`."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(interfaces) > 1:
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    return [ProcessGroupGloo.create_default_device()]


def gloo_worker_threads() -> int:
    """Returns the largest number of worker threads of a gloo group of this process; 0 without such groups."""
    threads = [0]
    for group in distributed_c10d._world.pg_map:
        if "gloo" in torch.distributed.get_backend_config(group):
            backend: Any = group._get_backend(torch.device("cpu"))
            # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
            threads.append(getattr(backend, "wrapped_pg", backend).options._threads)
    return max(threads)


def prefixed_rendezvous(prefix: str) -> AbstractContextManager[Any]:
    """Makes process groups that are started inside keep their keys in the store under a prefix."""
    create = _rendezvous._create_c10d_store

    def prefixed(*arguments: Any, **options: Any) -> Store:
        return PrefixStore(prefix, create(*arguments, **options))

    return patch.object(_rendezvous, "_create_c10d_store", prefixed)


def rendezvous_state(handler: Any) -> Any:
    """Returns the state of an elastic rendezvous as this machine last saw it: its `round` and its `participants`."""
    return handler._state_holder.state


def leave_rendezvous(handler: Any) -> None:
    """Takes this machine out of an elastic rendezvous, so that others do not wait for it to time out."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

    handler._stop_heartbeats()
    handler._op_executor.run(_RendezvousExitOp(), handler._get_deadline(handler.settings.timeout.close))


def no_failure(code: int, tell: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Has elastic agents not count workers that end with an exit code as failed; each is told of by its rendezvous."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    monitor = LocalElasticAgent._monitor_workers

    def monitored(agent: Any, group: Any) -> Any:
        result = monitor(agent, group)
        if result.failures and all(failure.exitcode == code for failure in result.failures.values()):
            agent._remaining_restarts += 1  # of which the agent takes one
            tell(group.spec.rdzv_handler)
        return result

    return patch.object(LocalElasticAgent, "_monitor_workers", monitored)


def skips_nonfinite_steps(optimizer: Any) -> bool:
    """Tells if the kernel of an optimiser reads `found_inf` and skips the step itself, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def never_skip_steps(optimizer: Any) -> None:
    """Leaves the decision to skip a step to the host.

    Kernels on the host get `found_inf` from the device by an asynchronous copy, and read the value before it.
    Source: torch, `_fused_adam` in `optim/adam.py`.
    """
    optimizer._step_supports_amp_scaling = False


def cpu_has_bf16() -> bool:
    """Tells if oneDNN multiplies bf16 matrices on this CPU; torch must be built with it."""
    require("torch", torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def num_compiled_graphs() -> int:
    """Returns the number of graphs that `torch.compile` has compiled in this process."""
    # Not above: a second of imports that only runs with model.compile need.
    from torch._dynamo import utils

    require("torch", utils, "counters")
    return int(utils.counters["stats"]["unique_graphs"])


def build_directory(name: str) -> str:
    """Returns the folder that torch compiles an extension in, and creates it if needed."""
    # Not above: it imports setuptools.
    from torch.utils import cpp_extension

    require("torch", cpp_extension, "_get_build_directory")
    return cpp_extension._get_build_directory(name, False)


def builds_under_flock() -> bool:
    """Tells if torch holds a kernel lock while it compiles an extension, which ends with its process.

    Before 2.14 it creates a file, which a process that is killed leaves behind.
    """
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileLock")
