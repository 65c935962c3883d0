"""Verifies that written weights are those that were trained: opened by a fresh process, and tensor by tensor."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from finetune.export import fresh_process
from finetune.export.validate_files import tensors_of
from finetune.models import lora_adapters
from finetune.tasks.task import Task, TaskData
from finetune.utils import json_files
from finetune.utils.errors import CheckpointError
from finetune.utils.temporary_folders import temporary_folder

# Largest difference of a logit, as a share of the largest logit, and of the mean loss in nats. The fresh process
# computes in fp32 whatever the weights are stored in, so what is left is the rounding of weights, and in fp32 the
# other order in which a merged model adds. Measured: docs/export.md.
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.float16: (1e-2, 5e-3), torch.bfloat16: (5e-2, 2e-2)}
# Of one number, as a share of the largest in its tensor: rounding once is half of this.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

_PROBE = (2, 64)
_NUM_ROWS = 8


@dataclass(frozen=True)
class Probe:
    """Inputs of the trained and the opened network, and the trained one's logits."""

    tensors: dict[str, torch.Tensor]
    """`probe.*`, the inputs whose logits are `expected`, and `row0.*` and so on, rows of data."""
    rows: int
    options: dict[str, Any]
    loss: float | None
    moved: float | None = None
    """Largest difference that the adapters make to a logit of the base."""

    def inputs(self, prefix: str) -> dict[str, torch.Tensor]:
        return {n.partition(".")[2]: t for n, t in self.tensors.items() if n.startswith(f"{prefix}.")}


@dataclass(frozen=True)
class Figures:
    """Results of the verification."""

    distance: float
    """Largest difference of a logit, as a share of the largest logit."""
    loss: float | None
    trained_loss: float | None
    worst: tuple[str, float]
    """The tensor that differs most, and by how much, as a share of its largest number."""
    dtype: torch.dtype
    notes: tuple[str, ...] = ()

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of distance and loss."""
        return TOLERANCE[self.dtype]

    def lines(self) -> list[str]:
        """Returns the results for people."""
        kind = str(self.dtype).removeprefix("torch.")
        found = (
            f"Proved in a fresh process: logits differ by {self.distance:.1e} of the largest (allowed for {kind}: "
            f"{self.limits[0]:.0e})"
        )
        if self.loss is not None and self.trained_loss is not None:
            away = abs(self.loss - self.trained_loss)
            found += f", the loss {self.loss:.5f} by {away:.1e} (allowed: {self.limits[1]:.0e})"
        return [f"{found}, no tensor by more than {self.worst[1]:.1e}.", *self.notes]


def probe_network(network: nn.Module, task: Task, ready: TaskData, vocabulary: int, longest: int) -> Probe:
    """Runs the trained network on fixed tokens and on some validation rows."""
    generator = torch.Generator().manual_seed(0)
    # Without padding tokens, classifiers of some architectures take single rows only.
    shape = (_PROBE[0] if task.text else 1, min(_PROBE[1], longest))
    tensors = {"probe.input_ids": torch.randint(0, vocabulary, shape, generator=generator)}
    if not task.text:
        tensors["probe.attention_mask"] = torch.ones(shape, dtype=torch.int64)
    rows = ready.validation if ready.validation is not None else ready.train
    count = min(_NUM_ROWS, len(rows)) if rows is not None else 0
    for row in range(count):
        assert rows is not None
        tensors |= {f"row{row}.{name}": t.contiguous() for name, t in rows.batch(np.array([row])).items()}
    probe = Probe(tensors, count, {"use_cache": False} if task.text else {}, None)
    logits = _logits(network, probe)
    moved = None
    adapted: Any = network
    if lora_adapters.adapter_config(network) is not None:
        with adapted.disable_adapter():
            moved = float((_logits(network, probe) - logits).abs().max())
    tensors["expected"] = logits
    return replace(probe, loss=_loss(network, probe, task), moved=moved)


@torch.no_grad()
def _logits(network: nn.Module, probe: Probe) -> torch.Tensor:
    found: torch.Tensor = network(**probe.inputs("probe"), **probe.options).logits.float().contiguous()
    return found


@torch.no_grad()
def _loss(network: nn.Module, probe: Probe, task: Task) -> float | None:
    """The mean loss over the targets of the rows; None without any."""
    loss, targets = 0.0, 0
    for row in range(probe.rows):
        batch = probe.inputs(f"row{row}")
        loss += float(task.loss_sum(network, batch).double())
        targets += int((batch["targets"] != -100).sum())
    return loss / targets if targets else None


def quantization_note(network: nn.Module, probe: Probe, task: Task, kind: str) -> str:
    """Says how far the network on its quantised base, as it was trained, is from the one that was probed."""
    expected = probe.tensors["expected"]
    away = float((_logits(network, probe) - expected).abs().max() / expected.abs().max())
    text = f"In training the base was quantised ({kind}): with it, logits differ by {away:.1e} of the largest"
    loss = _loss(network, probe, task)
    if loss is not None and probe.loss is not None:
        text += f", and the loss is {loss:.5f} instead of {probe.loss:.5f}"
    return f"{text}. That is the quantisation's distance, not the export's."


def open_in_fresh_process(folder: Path, probe: Probe, about: dict[str, Any]) -> dict[str, Any]:
    """Opens the folder in a new process with transformers and peft only, and returns what that reports.

    Args:
        about: `auto`, `base` and more that `finetune.export.fresh_process` needs.

    Raises:
        CheckpointError: If it cannot open it.
    """
    with temporary_folder() as place:
        save_file(probe.tensors, place / "tensors.safetensors")
        question = {
            "folder": str(folder.resolve()),
            "tensors": str(place / "tensors.safetensors"),
            "answer": str(place / "answer.json"),
            "rows": probe.rows,
            "options": probe.options,
            **about,
        }
        (place / "ask.json").write_text(json.dumps(question), encoding="utf-8")
        # As a file and without its folder on the path: nothing of this toolkit can help.
        words = [sys.executable, "-P", str(fresh_process.__file__), str(place / "ask.json")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode or not (place / "answer.json").is_file():
            last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
            raise CheckpointError(f"A fresh process cannot open what was written to {folder}: {last}.")
        answer: dict[str, Any] = json_files.read(place / "answer.json")
    return answer


def worst_tensor(folder: Path, expected: dict[str, torch.Tensor]) -> tuple[str, float]:
    """Returns the tensor in a folder that differs most, and by how much, as a share of its largest number."""
    worst = ("none", 0.0)
    for name, tensor in tensors_of(folder):
        if name not in expected:
            continue
        wanted = expected[name].float()
        if tensor.shape != wanted.shape:
            return name, math.inf
        away = float((tensor.float() - wanted).abs().max()) / (float(wanted.abs().max()) or 1.0)
        if not math.isfinite(away):
            return name, math.inf
        worst = max(worst, (name, away), key=lambda pair: pair[1])
    return worst


def check_figures(folder: Path, answer: dict[str, Any], probe: Probe, figures: Figures) -> None:
    """Compares the figures with what is allowed.

    Raises:
        CheckpointError: Naming the tensor that differs most.
    """
    strange = {key: answer[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if answer[key]}
    if strange:
        listing = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in strange.items())
        raise CheckpointError(f"Opening {folder} in a fresh process, transformers finds {listing}.")
    if probe.moved == 0:
        raise CheckpointError(
            f"{folder}: the adapter changes no logit of its base: nothing was trained, or it was lost as it was saved. "
            "Take another step with --step."
        )
    name, away = figures.worst
    far = not figures.distance <= figures.limits[0]
    if figures.loss is not None and figures.trained_loss is not None:
        far = far or not abs(figures.loss - figures.trained_loss) <= figures.limits[1]
    if far or not answer["finite"] or not away <= _ROUNDING[figures.dtype]:
        loss = (
            "" if figures.loss is None else f" and a loss of {figures.loss:.5f} instead of {figures.trained_loss:.5f}"
        )
        what = f"{name}, by {away:.1e} of its largest number" if away else "none, so the configuration does"
        raise CheckpointError(
            f"Opened in a fresh process, {folder} gives logits that differ by {figures.distance:.1e} of the largest "
            f"(allowed: {figures.limits[0]:.0e}){loss} (allowed: {figures.limits[1]:.0e}). The tensor that differs "
            f"most is {what} (allowed: {_ROUNDING[figures.dtype]:.0e})."
        )
