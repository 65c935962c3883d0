"""Checks written files before anything opens them: names, sizes, finite numbers, ties."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune.utils import json_files
from finetune.utils.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor that lies in a folder, mapped, one at a time.

    Raises:
        CheckpointError: If a file cannot be read, or one that the index names is not there.
    """
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        places = _read_index(folder)["weight_map"]
        absent = sorted(set(places.values()) - {file.name for file in files})
        if absent:
            raise CheckpointError(f"{folder} lacks {', '.join(absent)}, which its index names. Export it again.")
    for file in files:
        yield from tensors_of_file(file)


def tensors_of_file(file: Path, advice: str = "Export it again.") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor of a file, mapped, one at a time.

    Args:
        advice: What to do if it cannot be read.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. {advice}") from error


def _read_index(folder: Path) -> dict[str, Any]:
    shape: json_files.Shape = {"weight_map": dict, "metadata": {"total_size": int}}
    try:
        found: dict[str, Any] = json_files.read(folder / INDEX, shape, needed=["weight_map", "metadata"])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error}. Export it again.") from error
    return found


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
    ties, found = ties or {}, dict[str, tuple[int, ...]]()
    twice: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors_of(folder):
        fits = tensor.isnan().logical_not() if name in infinite else tensor.isfinite()
        if tensor.is_floating_point() and not bool(fits.all()):
            raise CheckpointError(
                f"{folder}: {name} holds {int((~torch.isfinite(tensor)).sum()):,} numbers that are NaN or infinite"
                f"{', as fp16 ends at 65,504' if dtype == torch.float16 else ''}. Take a step before the weights broke "
                "(--step)."
            )
        if tensor.numel() == 0:
            raise CheckpointError(f"{folder}: {name} is empty. What it was written from was never gathered.")
        found[name], size = tuple(tensor.shape), size + tensor.nbytes
        if name in ties or name in ties.values():
            twice[name] = tensor
    _check_names(folder, found, expected, ties)
    for name, other in ties.items():
        if name in twice and other in twice and not torch.equal(twice[name], twice[other]):
            raise CheckpointError(
                f"{folder}: {name} and {other} are one weight (tie_word_embeddings), but were written with different "
                "values, of which only one would be read. Export it again, or set tie_word_embeddings to false."
            )
    _check_size(folder, found, size, dtype)
    return f"Written: {len(expected) - len(ties)} tensors of {str(dtype).removeprefix('torch.')}, {size:,} bytes."


def _check_names(
    folder: Path, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], ties: Mapping[str, str]
) -> None:
    if not found:
        raise CheckpointError(f"{folder} holds no tensor: nothing was written. Take another step with --step.")
    missing = sorted(set(expected) - set(found) - set(ties))
    unexpected = sorted(set(found) - set(expected))
    if missing or unexpected:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing ({', '.join(missing[:3]) or 'none'}) and {len(unexpected)} "
            f"unexpected ({', '.join(unexpected[:3]) or 'none'}). Export it again."
        )
    for name, shape in found.items():
        if shape != expected[name]:
            raise CheckpointError(f"{folder}: {name} has shape {list(shape)}, not {list(expected[name])}.")


def _check_size(folder: Path, found: dict[str, tuple[int, ...]], size: int, dtype: torch.dtype) -> None:
    wanted = sum(torch.Size(shape).numel() for shape in found.values()) * dtype.itemsize
    on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    told = _read_index(folder)["metadata"]["total_size"] if (folder / INDEX).is_file() else size
    # Headers take some hundred bytes a tensor.
    if size != wanted or told != size or not size < on_disk < size + 4096 * (len(found) + 8):
        raise CheckpointError(
            f"{folder}: the tensors take {size:,} bytes, the files {on_disk:,}, and the index says {told:,}, where "
            f"{len(found)} tensors of {str(dtype).removeprefix('torch.')} need {wanted:,}. Export it again."
        )
