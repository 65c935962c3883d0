"""Verifies that written weights are those that were trained.

Files are checked before anything opens them: names, sizes, finite numbers, ties. Then a fresh process opens them, and
they are compared tensor by tensor.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from finetune.export import fresh_process
from finetune.models import lora_adapters
from finetune.models.heads import Head
from finetune.models.model_config import longest_row
from finetune.tasks import classification
from finetune.tasks.task import TaskData
from finetune.utils import json_files
from finetune.utils.errors import CheckpointError
from finetune.utils.temporary_folders import temporary_folder

INDEX = "model.safetensors.index.json"

# Largest difference of a logit, as a share of the largest logit, and of the mean loss in nats; and of one number, as a
# share of the largest in its tensor, of which rounding once is half. The fresh process computes in fp32 whatever the
# weights are stored in, so what is left is the rounding of weights, and in fp32 the other order in which a merged model
# adds. Measured: docs/export.md.
TOLERANCE: dict[torch.dtype | str, tuple[float, float, float]] = {
    torch.float32: (1e-4, 1e-4, 1e-6),
    torch.float16: (1e-2, 5e-3, 2.0**-10),
    torch.bfloat16: (5e-2, 2e-2, 2.0**-7),
    "q8_0": (5e-2, 2e-2, 2.0**-7),
}

_PROBE = (2, 64)
_NUM_ROWS = 8


def tensors_of(path: Path, advice: str = "Export it again.") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor that lies in a folder or a file, mapped, one at a time.

    Raises:
        CheckpointError: If a file cannot be read, with `advice`, or one that the index names is not there.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if (path / INDEX).is_file():
        places = _read_index(path)["weight_map"]
        absent = sorted(set(places.values()) - {file.name for file in files})
        if absent:
            raise CheckpointError(f"{path} lacks {', '.join(absent)}, which its index names. Export it again.")
    for file in files:
        explaining = CheckpointError.explaining(f"{file} cannot be read", advice, OSError, SafetensorError)
        with explaining, safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


def _read_index(folder: Path) -> dict[str, Any]:
    shape: json_files.Shape = {"weight_map": dict, "metadata": {"total_size": int}}
    with CheckpointError.explaining(f"{folder / INDEX} cannot be read", "Export it again."):
        index: dict[str, Any] = json_files.read(folder / INDEX, shape, needed=["weight_map", "metadata"])
    return index


def check_files(
    folder: Path,
    expected: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    ties: Mapping[str, str] | None = None,
    infinite: Collection[str] = (),
) -> str:
    """Compares a folder's tensors with the expected ones, and says for people how many there are.

    Args:
        expected: Shapes by name; tied names may be missing.
        ties: Names that are one weight: the one that is not written, and the one that is.
        infinite: Buffers that may hold infinities, such as causal masks.

    Raises:
        CheckpointError: With the first thing that is wrong.
    """
    ties, shapes = ties or {}, dict[str, tuple[int, ...]]()
    twice: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors_of(folder):
        fits = tensor.isnan().logical_not() if name in infinite else tensor.isfinite()
        if tensor.is_floating_point() and not bool(fits.all()):
            raise CheckpointError(
                f"{folder}: {name} holds {int((~torch.isfinite(tensor)).sum()):,} numbers that are NaN or infinite"
                f"{', as fp16 ends at 65,504' if dtype == torch.float16 else ''}. Take an earlier step (--step)."
            )
        if tensor.numel() == 0:
            raise CheckpointError(f"{folder}: {name} is empty. What it was written from was never gathered.")
        shapes[name], size = tuple(tensor.shape), size + tensor.nbytes
        if name in ties or name in ties.values():
            twice[name] = tensor
    for name, other in ties.items():
        if name in twice and other in twice and not torch.equal(twice[name], twice[other]):
            raise CheckpointError(
                f"{folder}: {name} and {other} are one weight (tie_word_embeddings), but were written with different "
                "values, of which only one would be read. Export it again, or set tie_word_embeddings to false."
            )
    # A tied name may be missing.
    _check_listing(folder, shapes, {n: s for n, s in expected.items() if n in shapes or n not in ties}, size, dtype)
    return f"Written: {len(expected) - len(ties)} tensors of {str(dtype).removeprefix('torch.')}, {size:,} bytes."


def _check_listing(
    folder: Path,
    written: dict[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
    size: int,
    dtype: torch.dtype,
) -> None:
    """Compares names, shapes and sizes of what was written with what was to be."""
    missing, unexpected = sorted(expected.keys() - written.keys()), sorted(written.keys() - expected.keys())
    if not written:
        raise CheckpointError(f"{folder} holds no tensor: nothing was written. Take another step with --step.")
    if missing or unexpected:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing ({', '.join(missing[:3]) or 'none'}) and {len(unexpected)} "
            f"unexpected ({', '.join(unexpected[:3]) or 'none'}). Export it again."
        )
    for name, shape in written.items():
        if shape != expected[name]:
            raise CheckpointError(f"{folder}: {name} has shape {list(shape)}, not {list(expected[name])}.")
    wanted = sum(torch.Size(shape).numel() for shape in written.values()) * dtype.itemsize
    on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    indexed = _read_index(folder)["metadata"]["total_size"] if (folder / INDEX).is_file() else size
    # Headers take some hundred bytes a tensor.
    if size != wanted or indexed != size or not size < on_disk < size + 4096 * (len(written) + 8):
        raise CheckpointError(
            f"{folder}: the tensors take {size:,} bytes, the files {on_disk:,}, and the index says {indexed:,}, where "
            f"{len(written)} tensors of {str(dtype).removeprefix('torch.')} need {wanted:,}. Export it again."
        )


@dataclass(frozen=True)
class Probe:
    """Inputs of the trained and the opened network, and the trained one's logits."""

    tensors: dict[str, torch.Tensor]
    """`probe.*`, the inputs whose logits are `expected`, and `row0.*` and so on, rows of data."""
    options: dict[str, Any]
    loss: float | None
    """Mean loss of the trained network over the targets of the rows; None without any."""
    moved: float | None = None
    """Largest difference that the adapters make to a logit of the base."""


def probe_network(network: nn.Module, ready: TaskData, head: Head) -> Probe:
    """Runs the trained network on fixed tokens and on some validation rows."""
    text = head.next_token
    generator = torch.Generator().manual_seed(0)
    # Without padding tokens, classifiers of some architectures take single rows only.
    config = lora_adapters.config_of(network).get_text_config()
    longest = longest_row(config) or _PROBE[1]
    shape = (_PROBE[0] if text else 1, min(_PROBE[1], longest))
    inputs = {"input_ids": torch.randint(0, config.vocab_size, shape, generator=generator)}
    if not text:
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.int64)
    if head.encodes:
        # transformers itself makes the decoder's inputs of them.
        inputs["labels"] = torch.randint(0, config.vocab_size, shape, generator=generator)
    rows = ready.validation if ready.validation is not None else ready.train
    options = {"use_cache": False} if text else {}
    logits = fresh_process.compute_logits(network, inputs, options)
    tensors = {f"probe.{name}": tensor for name, tensor in inputs.items()} | {"expected": logits}
    for row in range(min(_NUM_ROWS, len(rows)) if rows is not None else 0):
        assert rows is not None
        batch = rows.batch(np.array([row]))
        if not text:
            # The loss that is compared is without weights.
            targets = {name: batch[name] for name in ("targets",) if name in batch}
            batch = classification.network_inputs(network, batch) | targets
        if head.encodes:
            batch["labels"] = batch["targets"].clone()
        tensors |= {f"row{row}.{name}": t.contiguous() for name, t in batch.items()}
    moved = None
    adapted: Any = network
    if lora_adapters.adapter_config(network) is not None:
        with adapted.disable_adapter():
            moved = float((fresh_process.compute_logits(network, inputs, options) - logits).abs().max())
    return Probe(tensors, options, fresh_process.mean_loss(network, tensors, options), moved)


def quantization_note(network: nn.Module, probe: Probe, kind: str) -> str:
    """Says how far the network on its quantised base, as it was trained, is from the one that was probed."""
    inputs, expected = fresh_process.select_inputs(probe.tensors, "probe"), probe.tensors["expected"]
    logits = fresh_process.compute_logits(network, inputs, probe.options)
    away = float((logits - expected).abs().max() / expected.abs().max())
    text = f"In training the base was quantised ({kind}): with it, logits differ by {away:.1e} of the largest"
    loss = fresh_process.mean_loss(network, probe.tensors, probe.options)
    if loss is not None and probe.loss is not None:
        text += f", and the loss is {loss:.5f} instead of {probe.loss:.5f}"
    return f"{text}. That is the quantisation's distance, not the export's."


def open_in_fresh_process(folder: Path, probe: Probe, about: dict[str, Any]) -> dict[str, Any]:
    """Opens the folder in a new process with transformers and peft only, and returns what that reports.

    `about` has `auto`, `base` and more that `fresh_process` needs. A `CheckpointError` says that it cannot open it.
    """
    with temporary_folder() as scratch:
        save_file(probe.tensors, scratch / "tensors.safetensors")
        question = {"folder": str(folder.resolve()), "place": str(scratch), "options": probe.options, **about}
        # As a file and without its folder on the path: nothing of this toolkit can help.
        words = [sys.executable, "-P", str(fresh_process.__file__), json.dumps(question)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode or not (scratch / "answer.json").is_file():
            last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
            raise CheckpointError(f"A fresh process cannot open what was written to {folder}: {last}.")
        answer: dict[str, Any] = json_files.read(scratch / "answer.json")
    return answer


def worst_tensor(
    folder: Path,
    expected: dict[str, torch.Tensor],
    read: Callable[[Path], Iterator[tuple[str, torch.Tensor]]] = tensors_of,
) -> tuple[str, float]:
    """Returns the tensor in a folder that differs most, and by how much, as a share of its largest number."""
    worst = ("none", 0.0)
    for name, tensor in read(folder):
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


def check_figures(
    folder: Path, answer: dict[str, Any], probe: Probe, worst: tuple[str, float], dtype: torch.dtype | str
) -> str:
    """Compares what a fresh process answered with what is allowed, and describes it for people.

    Args:
        worst: The tensor that differs most, and by how much, as a share of its largest number.
        dtype: Of the weights that were written; ggml's name for it in lower case, if torch has none.

    Raises:
        CheckpointError: Naming the tensor that differs most.
    """
    strange = {key: answer[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if answer[key]}
    if strange:
        listing = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in strange.items())
        raise CheckpointError(f"Opening {folder} in a fresh process, transformers finds {listing}.")
    if probe.moved == 0:
        raise CheckpointError(
            f"{folder}: the adapter changes no logit of its base: nothing was trained. Take another step with --step."
        )
    (name, away), distance, loss = worst, answer["distance"], answer["loss"]
    most, most_loss, most_rounded = TOLERANCE[dtype]
    loss_away, wrong_loss, right_loss = 0.0, "", ""
    if loss is not None and probe.loss is not None:
        loss_away = abs(loss - probe.loss)
        wrong_loss = f" and a loss of {loss:.5f} instead of {probe.loss:.5f} (allowed: {most_loss:.0e})"
        right_loss = f", the loss {loss:.5f} by {loss_away:.1e} (allowed: {most_loss:.0e})"
    if not (answer["finite"] and distance <= most and loss_away <= most_loss and away <= most_rounded):
        what = f"{name}, by {away:.1e} of its largest number" if away else "none, so the configuration does"
        raise CheckpointError(
            f"Opened in a fresh process, {folder} gives logits that differ by {distance:.1e} of the largest "
            f"(allowed: {most:.0e}){wrong_loss}. The tensor that differs most is {what} (allowed: "
            f"{most_rounded:.0e})."
        )
    kind = str(dtype).removeprefix("torch.")
    summary = f"logits differ by {distance:.1e} of the largest (allowed for {kind}: {most:.0e}){right_loss}"
    return f"Proved in a fresh process: {summary}, no tensor by more than {away:.1e}."
