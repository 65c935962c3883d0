"""Verifies that written weights are those that were trained: opened by a fresh process, and tensor by tensor."""

import json
import math
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from finetune.utils.errors import CheckpointError

# Largest difference of a logit, as a share of the largest logit, and of the mean loss in nats. The fresh process
# computes in fp32 whatever the weights are stored in, so what is left is the rounding of weights, and in fp32 the
# other order in which a merged model adds. Measured: docs/export.md.
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.float16: (1e-2, 5e-3), torch.bfloat16: (5e-2, 2e-2)}
# Of one number, as a share of the largest in its tensor: rounding once is half of this.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

_PROBE = (2, 64)
_NUM_ROWS = 8
_AUTO = {"causal_lm": "AutoModelForCausalLM", "sequence_classification": "AutoModelForSequenceClassification"}


@dataclass(frozen=True)
class Probe:
    """What the trained and the opened network are asked, and what the trained one answers."""

    tensors: dict[str, torch.Tensor]
    rows: int
    options: dict[str, Any]
    loss: float | None
    moved: float | None = None
    """How far the adapters move the logits of the base."""

    @property
    def expected(self) -> torch.Tensor:
        return self.tensors["expected"]


@dataclass(frozen=True)
class Figures:
    """What the proof found."""

    distance: float
    """Largest difference of a logit, as a share of the largest logit."""
    loss: float | None
    trained_loss: float | None
    limits: tuple[float, float]
    worst: tuple[str, float]
    """The tensor that differs most, and by how much, as a share of its largest number."""
    dtype: torch.dtype
    notes: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """For people."""
        kind = str(self.dtype).removeprefix("torch.")
        found = [
            f"Proved in a fresh process: logits differ by {self.distance:.1e} of the largest (allowed for {kind}: "
            f"{self.limits[0]:.0e})"
        ]
        if self.loss is not None and self.trained_loss is not None:
            away = abs(self.loss - self.trained_loss)
            found[0] += f", the loss {self.loss:.5f} by {away:.1e} (allowed: {self.limits[1]:.0e})"
        found[0] += f", no tensor by more than {self.worst[1]:.1e}."
        return [*found, *self.notes]


def ask(network: nn.Module, task: Task, ready: TaskData, vocabulary: int, longest: int) -> Probe:
    """Runs the trained network on fixed tokens and on some validation rows."""
    generator = torch.Generator().manual_seed(0)
    # Without padding tokens, classifiers of some architectures take single rows only.
    shape = (_PROBE[0] if task.text else 1, min(_PROBE[1], longest))
    tensors = {"probe.input_ids": torch.randint(0, vocabulary, shape, generator=generator)}
    options: dict[str, Any] = {"use_cache": False} if task.text else {}
    if not task.text:
        tensors["probe.attention_mask"] = torch.ones(shape, dtype=torch.int64)
    rows = ready.validation if ready.validation is not None else ready.train
    count = min(_NUM_ROWS, len(rows)) if rows is not None else 0
    loss, targets, moved = 0.0, 0, None
    with torch.no_grad():
        inputs = {"input_ids": tensors["probe.input_ids"], **options}
        if not task.text:
            inputs["attention_mask"] = tensors["probe.attention_mask"]
        tensors["expected"] = network(**inputs).logits.float().contiguous()
        if lora_adapters.adapter_config(network) is not None:
            with lora_adapters.switched_off(network):
                moved = float((network(**inputs).logits.float() - tensors["expected"]).abs().max())
        for row in range(count):
            assert rows is not None
            batch = rows.batch(np.array([row]))
            tensors |= {f"row{row}.{name}": tensor.contiguous() for name, tensor in batch.items()}
            loss += float(task.loss_sum(network, batch).double())
            targets += rows.num_targets(np.array([row]))
    return Probe(tensors, count, options, loss / targets if targets else None, moved)


def distance(network: nn.Module, probe: Probe, task: Task) -> tuple[float, float | None]:
    """How far another network is from the one that was asked: share of the largest logit, and loss."""
    found, loss = probe.expected, 0.0
    with torch.no_grad():
        inputs = {name[6:]: tensor for name, tensor in probe.tensors.items() if name.startswith("probe.")}
        away = (network(**inputs, **probe.options).logits.float() - found).abs().max() / found.abs().max()
        targets = 0
        for row in range(probe.rows):
            prefix = f"row{row}."
            batch = {n.removeprefix(prefix): t for n, t in probe.tensors.items() if n.startswith(prefix)}
            loss += float(task.loss_sum(network, batch).double())
            targets += int((batch["targets"] != -100).sum())
    return float(away), loss / targets if targets else None


def fresh(folder: Path, probe: Probe, about: dict[str, Any]) -> dict[str, Any]:
    """What a new process says that opens the folder with transformers and peft only.

    Args:
        about: `head`, `base` and what else `finetune.export.fresh_process` is to know.

    Raises:
        CheckpointError: If it cannot open it.
    """
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_file(probe.tensors, place / "tensors.safetensors")
        question = {
            "folder": str(folder.resolve()),
            "tensors": str(place / "tensors.safetensors"),
            "answer": str(place / "answer.json"),
            "auto": _AUTO[about["head"]],
            "rows": probe.rows,
            "options": probe.options,
            **{key: value for key, value in about.items() if key != "head"},
        }
        (place / "ask.json").write_text(json.dumps(question), encoding="utf-8")
        # As a file and without its folder on the path: nothing of this toolkit can help.
        words = [sys.executable, "-P", str(fresh_process.__file__), str(place / "ask.json")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode or not (place / "answer.json").is_file():
            last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
            raise CheckpointError(f"A fresh process cannot open what was written to {folder}: {last}.")
        answer: dict[str, Any] = json.loads((place / "answer.json").read_text(encoding="utf-8"))
    return answer


def worst_of(folder: Path, expected: dict[str, torch.Tensor]) -> tuple[str, float]:
    """The tensor in a folder that differs most from what it has to be, as a share of its largest number."""
    worst = ("none", 0.0)
    for name, tensor in tensors_of(folder):
        if name not in expected:
            continue
        wanted = expected[name].float()
        scale = float(wanted.abs().max()) or 1.0
        if tensor.shape != wanted.shape:
            return name, float("inf")
        away = float((tensor.float() - wanted).abs().max()) / scale
        if not math.isfinite(away):
            return name, math.inf
        if away > worst[1]:
            worst = (name, away)
    return worst


def judge(folder: Path, answer: dict[str, Any], probe: Probe, figures: Figures) -> None:
    """Compares what was found with what is allowed.

    Raises:
        CheckpointError: Naming the tensor that differs most.
    """
    strange = {key: answer[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if answer[key]}
    if strange:
        listing = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in strange.items())
        raise CheckpointError(f"Opening {folder} in a fresh process, transformers finds {listing}.")
    if answer["untied"]:
        raise CheckpointError(
            f"Opened in a fresh process, {folder} has input embeddings and output head apart, though its config says "
            "tie_word_embeddings."
        )
    if probe.moved == 0:
        raise CheckpointError(
            f"The adapter does not move a logit of its base: what {folder} was written from is not what was trained."
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
