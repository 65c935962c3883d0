"""How much memory tensors take at a time, by purpose."""

from typing import Any

from finetune.utils.compat.torch_tracing_private import MemoryKind, MemoryTracker

_PARTS = {
    "parameters": MemoryKind.PARAM,
    "buffers": MemoryKind.BUFFER,
    "gradients": MemoryKind.GRAD,
    "optimizer": MemoryKind.OPT,
    "activations": MemoryKind.ACT,
    "temporary": MemoryKind.TEMP,
    "batch": MemoryKind.OTH,
}


class Tracker(MemoryTracker):  # type: ignore[no-untyped-call]
    """torch's tracker, for one peak instead of one a module, which takes a fraction of the time."""

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
        return self._parts(self.snapshot())

    def lend(self) -> None:
        """Counts what a backend has made beside the weights as gradients: buckets that these land in."""
        self.relabel(MemoryKind.ACT, MemoryKind.GRAD)

    def changed(self, snapshot: dict[Any, int]) -> None:
        """Takes note of a new peak."""
        self.batch = max(self.batch, snapshot[MemoryKind.ACT] + snapshot[MemoryKind.TEMP])
        if snapshot["Total"] > self._most:
            self._most, self.peak, self.moment = snapshot["Total"], self._parts(snapshot), self.phase

    @staticmethod
    def _parts(snapshot: dict[Any, int]) -> dict[str, int]:
        return {name: snapshot.get(part, 0) for name, part in _PARTS.items()}
