"""Private names of torch for tracing a step under fake tensors; a module of its own because of what it imports.

Functions that replace those of torch are for a process that does nothing else.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import Reducer
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._tools import mem_tracker
from torch.distributed._tools.mem_tracker import MemTracker, _UpdateType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed import fake_pg
from torch.utils.hooks import RemovableHandle

from finetune.utils.compat.library_versions import require

require("torch", fake_tensor, "FakeTensorMode", "unset_fake_temporarily")
require("torch", mem_tracker, "_MemRefType", "_UpdateType")
require(
    "torch",
    MemTracker,
    *("_WINFO", "_curr_mem_snap", "_in_opt", "_mod_tracker", "_param_to_grad_hook_handles"),
    *("_track_module_params_and_buffers", "_update_peak_stats", "_update_snap"),
)
require("torch", fake_pg, "FakeStore")
require("torch", Reducer, "_rebuild_buckets")
require("torch", ddp, "_verify_param_shape_across_processes", "_sync_module_states")
require("torch", _fsdp_init, "init_device_mesh")

FakeTensorMode = fake_tensor.FakeTensorMode
MemoryKind = mem_tracker._MemRefType

# What the kinds of memory are called here.
_PARTS = {
    "parameters": MemoryKind.PARAM,
    "buffers": MemoryKind.BUFFER,
    "gradients": MemoryKind.GRAD,
    "optimizer": MemoryKind.OPT,
    "activations": MemoryKind.ACT,
    "temporary": MemoryKind.TEMP,
    "batch": MemoryKind.OTH,
}


class MemoryTracker(MemTracker):  # type: ignore[no-untyped-call]
    """torch's tracker, for one peak of the CPU instead of one a module, which takes a fraction of the time.

    Source: torch 2.13, `distributed/_tools/mem_tracker.py`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Forgets the peak so far."""
        self.peak: dict[str, int] = {}
        """Bytes by part, when there were most."""
        self.moment = ""
        """Time of that: forward, backward or optimizer."""
        self.batch = 0
        """The most bytes that came with the micro-batch at a time: activations and what is temporary."""
        self._most = 0

    def now(self) -> dict[str, int]:
        """Returns bytes by part."""
        snapshot = self._curr_mem_snap.get(torch.device("cpu"), {})
        return {name: snapshot.get(kind, 0) for name, kind in _PARTS.items()}

    def relabel(self, old: MemoryKind, new: MemoryKind) -> None:
        """Counts memory of one kind as another from now on."""
        known: Any = self._WINFO
        for info, _ in list(known.values()):
            if info.reftype == old:
                info.reftype = new
                self._update_snap(_UpdateType.REF, info, old_reftype=old)

    def _update_peak_stats(self, peak_state: Any) -> None:
        if (snapshot := self._curr_mem_snap.get(torch.device("cpu"))) is None:
            return
        self.batch = max(self.batch, snapshot[MemoryKind.ACT] + snapshot[MemoryKind.TEMP])
        if snapshot["Total"] > self._most:
            self._most, self.peak = snapshot["Total"], self.now()
            self.moment = "optimizer" if self._in_opt else "backward" if self._mod_tracker.is_bw else "forward"

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                # As if it had its hooks, which frozen parameters do not take.
                none = RemovableHandle(OrderedDict())
                self._param_to_grad_hook_handles[parameter] = (none, none)
        return super()._track_module_params_and_buffers(module, install_grad_hooks)


def start_fake_process_group(world_size: int) -> None:
    """Starts a process group as rank 0, whose collectives return at once without the other ranks."""
    store: Any = fake_pg.FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=world_size)


def let_fake_tensors_pass() -> None:
    """Replaces functions that read values while a model is wrapped.

    Source: torch 2.13: `_verify_param_shape_across_processes` and `_sync_module_states` in `nn/parallel/distributed.py`
    compare and send; meshes of ranks are tensors themselves.
    """
    parallel: Any = ddp
    parallel._verify_param_shape_across_processes = lambda *_, **__: True
    parallel._sync_module_states = lambda *_, **__: None

    def really(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return init_device_mesh(*arguments, **options)

    fsdp: Any = _fsdp_init
    fsdp.init_device_mesh = really


def keep_buckets(model: nn.parallel.DistributedDataParallel) -> None:
    """Makes DDP keep its first buckets, which it would rebuild once, as large as before, from values."""
    wrapped: Any = model
    wrapped.reducer = _FixedReducer(model.reducer)


class _FixedReducer:
    """A reducer whose buckets stay as they are.

    Source: torch 2.13, `Reducer::rebuild_buckets` in `csrc/distributed/c10d/reducer.cpp`.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def replace_functional(**functions: Callable[..., Any]) -> None:
    """Replaces functions of `torch.nn.functional`, by name."""
    for name, function in functions.items():
        require("torch", nn.functional, name)
        setattr(nn.functional, name, function)
