"""Measures the peak memory of training, and compares it with the prediction."""

from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.config.recipe_schema import Recipe
from finetune.distributed import device_selection
from finetune.distributed.backend import Backend
from finetune.monitoring.metrics import warn
from finetune.planning.model_shapes import kind_of
from finetune.planning.planner import Peak, add_peak, candidates_of
from finetune.utils.platforms import peak_bytes

# By then the optimiser's state is there as well. Later steps take the same, and checkpoints and evaluations come in.
_STEPS = 2


class PeakMemoryMonitor:
    """Looks at the first steps. Resident memory is all that a CPU has, so what was held before them is taken off."""

    def __init__(self, backend: Backend, held: int) -> None:
        """
        Args:
            held: Bytes of the weights that this rank holds by now.
        """
        self._backend, self._left, self._peak = backend, _STEPS, 0
        self._base = 0
        if backend.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(backend.device)
            return
        self._base = psutil.Process().memory_info().rss - held
        try:
            # The peak is counted from here. Source: the kernel's documentation of /proc/PID/clear_refs.
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._left = 0  # not on this system: nothing can be said

    def step_taken(self) -> None:
        """A step was taken."""
        if not self._left:
            return
        self._left -= 1
        if self._backend.device.type == "cuda":
            self._peak = torch.cuda.max_memory_allocated(self._backend.device)
        else:
            self._peak = peak_bytes() - self._base

    def compare(self, recipe: Recipe) -> dict[str, Any] | None:
        """Compares the peak of the rank that held the most with what a plan predicts; every rank must call it.

        Rank 0 also writes both down for the plans to come.

        Returns:
            On rank 0 the figures for `run.json`; None elsewhere, or if nothing was measured.
        """
        backend = self._backend
        seen = torch.tensor([float(self._peak)], dtype=torch.float64, device=backend.device)
        measured = int(backend.all_reduce_max(seen).item())
        if not (measured and backend.is_main):
            return None
        resident = backend.device.type != "cuda"
        what, predicted = "resident" if resident else "allocated", None
        # Networks are counted here alone: none may be shared out among the ranks while it is built.
        with backend.loading(pretrained=False):
            candidate_of = candidates_of(recipe, backend.launch, device_selection.available_memory())
            found = candidate_of(recipe.batch.rows) if candidate_of is not None else None
        if found is not None and found.parts is not None and not found.reason:
            # A CPU has no other place for what is kept in host memory.
            predicted = found.peak + (found.host if resident else 0)
            peak = Peak(
                device=device_selection.device_identity()["device"],
                of=what,
                launch=backend.launch.kind,
                kind=kind_of(recipe),
                processes=backend.world_size,
                predicted=predicted,
                measured=measured,
            )
            try:
                add_peak(Path(recipe.data.cache_dir), peak)
            except OSError as error:
                warn(f"The measured peak is not kept for later plans: {recipe.data.cache_dir}: {error.strerror}.")
        return {"of": what, "measured": measured, "predicted": predicted}
