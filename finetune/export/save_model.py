"""Writes the trained network so that plain transformers opens it."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from finetune.distributed.backend import Backend
from finetune.export.verify_export import INDEX, tensors_of
from finetune.models.forward_wrapper import unwrap
from finetune.models.lora_adapters import adapter_config, adapter_keys, transformer
from finetune.models.pretrained_files import as_written, write_beside, written_one_by_one
from finetune.utils.atomic_files import remove_path, sync_files, write_json
from finetune.utils.errors import CheckpointError

_FILE_BYTES = 5 * 10**9
"""Most that a file of weights takes, unless one tensor is larger."""


def describe_model(network: nn.Module, tokenizer: Any | None, folder: Path, beside: Mapping[str, bytes]) -> None:
    """Writes the files that belong beside a network's weights, so that `from_pretrained` opens the folder.

    `beside` are those of its base that neither network nor tokenizer writes.
    """
    adapter = adapter_config(network)
    inner = transformer(network)
    if adapter is not None:
        adapter.save_pretrained(str(folder))
    elif inner is not None:
        config = copy.deepcopy(inner.config)
        config.architectures = [type(inner).__name__]
        config.save_pretrained(folder)
    if inner is not None and inner.can_generate():
        inner.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_beside(folder, beside)


def save_model(
    backend: Backend,
    model: nn.Module,
    skeleton: nn.Module | None,
    tokenizer: Any | None,
    directory: Path,
    add_rest: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Gathers the weights on rank 0 and writes them as safetensors with what belongs to them.

    Every rank must call it. The folder appears whole or not at all, and only after its files have been read back and
    compared bit by bit with what was gathered. Of a network with adapters it is the adapter. One tensor at a time is
    gathered, and rank 0 has a file of 5 GB of them in memory until it is written. All of them are in its memory at once
    only for a network that is no Hugging Face model, and for one whose files hold tensors that are made of several.

    Args:
        skeleton: The same network on the meta device, which knows what is written by which names. None for a network
            that is no Hugging Face model: its tensors are written under their own names.
        add_rest: Writes what belongs to the model, besides what network and tokenizer write, into a folder.

    Raises:
        CheckpointError: On every rank, if the folder cannot be written, or is not what was trained.
    """
    network = unwrap(model)
    adapted = adapter_config(network) is not None
    gathered = iter(backend.full_parameters(network, trained_only=adapted))
    problem: str | None = None
    if backend.is_main:
        tensors = ((name, tensor) for name, tensor in gathered if tensor is not None)
        staging = directory.with_name(directory.name + ".staging")
        advice = "Free space or choose another output.dir."
        what = f"The trained model cannot be written to {directory}"
        try:
            with CheckpointError.explaining(what, advice, OSError, SafetensorError):
                remove_path(staging)
                staging.mkdir()  # not its parents: below a mount that has vanished, that would fill the wrong disk
                _write(network, tensors, skeleton, staging)
                if tokenizer is not None:
                    tokenizer.save_pretrained(staging)
                add_rest(staging)
                sync_files(staging)
                remove_path(directory)
                staging.rename(directory)
        except CheckpointError as error:
            problem = str(error)
    for _ in gathered:
        pass  # Gathering takes every rank: those that write nothing, and all of them after a failure.
    problem = backend.broadcast_object(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _write(
    network: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], skeleton: nn.Module | None, staging: Path
) -> None:
    if adapter_config(network) is not None:
        keys = adapter_keys(network)
        named = {keys[name]: tensor for name, tensor in tensors}
        save_file(named, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        describe_model(network, None, staging, {})
        check_written(staging, named)
    else:
        kept = network.state_dict().keys()
        buffers = ((name, buffer.detach().cpu().clone()) for name, buffer in network.named_buffers() if name in kept)
        every = itertools.chain(tensors, buffers)
        if isinstance(skeleton, PreTrainedModel):
            _write_pretrained(network, skeleton, every, staging)
        else:
            own = dict(every)
            save_file(own, staging / "model.safetensors")
            check_written(staging, own)


def _write_pretrained(
    network: nn.Module, skeleton: PreTrainedModel, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path
) -> None:
    """Writes what `save_pretrained` of the whole network would, file by file.

    Raises:
        CheckpointError: If the tensors are not those of the skeleton.
    """
    assert isinstance(network, PreTrainedModel)
    blanks: dict[str, torch.Tensor] = {}
    groups: Iterable[dict[str, torch.Tensor]] = ({name: tensor} for name, tensor in tensors)
    if not written_one_by_one(skeleton):
        groups = [dict(tensors)]

    def convert() -> Iterator[tuple[str, torch.Tensor]]:
        for group in groups:
            blanks.update((name, torch.empty_like(tensor, device="meta")) for name, tensor in group.items())
            yield from as_written(skeleton, group).items()

    parts = _write_parts(folder, convert())
    tied = skeleton.all_tied_weights_keys
    missing, unexpected = skeleton.load_state_dict(blanks, strict=False, assign=True)
    absent = [name for name in missing if tied.get(name) not in blanks]
    if absent or unexpected:
        raise CheckpointError(
            f"The gathered weights do not fit the network: missing {absent}, unexpected {unexpected}."
        )
    if twice := sorted(tied.keys() & blanks.keys()):
        raise _not_trained(
            folder, f"{twice[0]} is a tensor of its own, and its configuration ties it to {tied[twice[0]]}"
        )
    if skeleton.can_generate():
        skeleton.generation_config = network.generation_config
    # All that it writes beside weights; it would delete files of weights that have their names already.
    skeleton.save_pretrained(folder, state_dict={})
    names = ["model.safetensors"]
    if (count := len(parts)) > 1:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        total = sum(size for sizes in parts.values() for size in sizes.values())
        places = {tensor: name for name, sizes in zip(names, parts.values(), strict=True) for tensor in sizes}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    for file, name in zip(parts, names, strict=True):
        file.rename(folder / name)


def _write_parts(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[Path, dict[str, int]]:
    """Writes files of at most `_FILE_BYTES`, each read back at once; returns them with the bytes of their tensors."""
    parts: dict[Path, dict[str, int]] = {}
    held: dict[str, torch.Tensor] = {}

    def write() -> None:
        file = folder / f"part-{len(parts)}.safetensors"
        save_file(held, file, metadata={"format": "pt"})
        check_written(file, held)
        parts[file] = {name: tensor.nbytes for name, tensor in held.items()}
        held.clear()

    for name, tensor in tensors:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > _FILE_BYTES:
            write()
        held[name] = tensor.contiguous()
    write()
    return parts


def check_written(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Raises a `CheckpointError` unless a file, or a folder, holds these tensors and no others, bit by bit."""
    left = dict(expected)
    for name, tensor in tensors_of(path):
        wanted = left.pop(name, None)
        if wanted is None:
            raise _not_trained(path, f"it holds {name}, which the trained network does not have")
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, wanted))
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype) or not torch.equal(one, other):
            raise _not_trained(path, f"{name} is not what the network has in memory")
    if left:
        raise _not_trained(path, f"it lacks {min(left)}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""))


def _not_trained(folder: Path, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}, read back, is not the network that was trained: {difference}. Write the model from a checkpoint "
        "with `finetune export`; if this happens again, look for a disk or memory that fails."
    )
