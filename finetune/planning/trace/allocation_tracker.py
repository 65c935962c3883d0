"""How much memory tensors take at a time, and what for."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _UpdateType
from torch.utils.hooks import RemovableHandle

_PARTS = {
    "parameters": _MemRefType.PARAM,
    "buffers": _MemRefType.BUFFER,
    "gradients": _MemRefType.GRAD,
    "optimizer": _MemRefType.OPT,
    "activations": _MemRefType.ACT,
    "temporary": _MemRefType.TEMP,
    "batch": _MemRefType.OTH,
}


class Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """torch's tracker, for one peak instead of one a module, which takes a fraction of the time.

    Source: torch 2.13, `distributed/_tools/mem_tracker.py`, of which this changes private parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak: dict[str, int] = {}
        """Bytes by part, when there were most."""
        self.moment = ""
        """When that was: forward, backward or optimizer."""
        self.batch = 0
        """The most bytes that came with the micro-batch at a time: activations and what is temporary."""
        self._most = 0

    def begin(self) -> None:
        """Forgets the peak so far."""
        self.peak, self.moment, self.batch, self._most = {}, "", 0, 0

    def now(self) -> dict[str, int]:
        """Bytes by part."""
        return self._parts(self._curr_mem_snap.get(torch.device("cpu"), {}))

    def lend(self) -> None:
        """Counts what a backend has made beside the weights as gradients: buckets that these land in."""
        known: Any = self._WINFO
        for info, _ in list(known.values()):
            if info.reftype == _MemRefType.ACT:
                info.reftype = _MemRefType.GRAD
                self._update_snap(_UpdateType.REF, info, old_reftype=_MemRefType.ACT)

    def _update_peak_stats(self, peak_state: Any) -> None:
        snapshot = self._curr_mem_snap.get(torch.device("cpu"))
        if snapshot is None:
            return
        self.batch = max(self.batch, snapshot[_MemRefType.ACT] + snapshot[_MemRefType.TEMP])
        if snapshot["Total"] > self._most:
            self._most, self.peak = snapshot["Total"], self._parts(snapshot)
            self.moment = "optimizer" if self._in_opt else "backward" if self._mod_tracker.is_bw else "forward"

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                # As if it had its hooks, which what is frozen does not take.
                none = RemovableHandle(OrderedDict())
                self._param_to_grad_hook_handles[parameter] = (none, none)
        return super()._track_module_params_and_buffers(module, install_grad_hooks)

    @staticmethod
    def _parts(snapshot: dict[Any, int]) -> dict[str, int]:
        return {name: snapshot.get(part, 0) for name, part in _PARTS.items()}
