"""Writes the trained network so that plain transformers opens it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from finetune.distributed.backend import Backend
from finetune.export.validate_files import tensors_of
from finetune.models.forward_wrapper import unwrap
from finetune.models.lora_adapters import adapter_config, adapter_keys, transformer
from finetune.models.pretrained_files import as_written
from finetune.utils.atomic_files import follow_umask, remove, sync
from finetune.utils.errors import CheckpointError


def describe(network: nn.Module, tokenizer: Any | None, folder: Path) -> None:
    """Writes what belongs beside a network's weights, so that `from_pretrained` opens the folder.

    Raises:
        OSError: If the folder cannot be written.
    """
    adapter = adapter_config(network)
    inner = transformer(network)
    if adapter is not None:
        adapter.save_pretrained(str(folder))
        if inner is not None and inner.can_generate():
            inner.generation_config.save_pretrained(folder)
    elif isinstance(network, PreTrainedModel):
        config = copy.deepcopy(network.config)
        config.architectures = [type(network).__name__]
        config.save_pretrained(folder)
        if network.can_generate():
            network.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def save_model(
    backend: Backend,
    model: nn.Module,
    skeleton: nn.Module | None,
    tokenizer: Any | None,
    directory: Path,
    add_card: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Gathers the weights on rank 0 and writes them as safetensors with what belongs to them.

    Every rank must call it. The folder appears whole or not at all, and only after its files have been read back and
    compared bit by bit with what was gathered. Of a network with adapters it is the adapter. One tensor at a time is
    gathered on the device; rank 0 has all of them in host memory (4 bytes a trained weight) until they are written.

    Args:
        skeleton: The same network on the meta device; it is filled and written with `save_pretrained`. None for a
            network that is no Hugging Face model: its tensors are written under their own names.
        add_card: Describes the model in the folder that it is given.

    Raises:
        CheckpointError: On every rank, if the folder cannot be written, or is not what was trained.
    """
    network = unwrap(model)
    adapted = adapter_config(network) is not None
    gathered = backend.full_parameters(network, trained_only=adapted)
    tensors = {name: tensor for name, tensor in gathered if tensor is not None}
    problem: str | None = None
    if backend.is_main:
        try:
            _write(network, tensors, skeleton, tokenizer, directory, add_card)
        except CheckpointError as error:
            problem = str(error)  # an OSError too, but it has said what is wrong
        except (OSError, SafetensorError) as error:
            problem = (
                f"The trained model cannot be written to {directory}: {error}. Free space or choose another output.dir."
            )
    problem = backend.tell(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _write(
    network: nn.Module,
    tensors: dict[str, torch.Tensor],
    skeleton: nn.Module | None,
    tokenizer: Any,
    directory: Path,
    add_card: Callable[[Path], None],
) -> None:
    staging = directory.with_name(directory.name + ".staging")
    remove(staging)
    staging.mkdir()  # not its parents: below a mount that has vanished, that would fill the wrong disk
    if adapter_config(network) is not None:
        keys = adapter_keys(network)
        named = {keys[name]: tensor for name, tensor in tensors.items()}
        save_file(named, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        describe(network, None, staging)
        check_written(staging, named)
    else:
        kept = set(network.state_dict())
        tensors |= {n: b.detach().cpu().clone() for n, b in network.named_buffers() if n in kept and n not in tensors}
        if isinstance(skeleton, PreTrainedModel):
            _fill(network, skeleton, tensors)
            skeleton.save_pretrained(staging)
            check_written(staging, as_written(skeleton, tensors))
        else:
            save_file(tensors, staging / "model.safetensors")
            check_written(staging, tensors)
    if tokenizer is not None:
        tokenizer.save_pretrained(staging)
    add_card(staging)
    sync_files(staging)
    remove(directory)
    staging.rename(directory)


def check_written(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Compares the tensors in a folder's files with those that were to be written, bit by bit.

    Raises:
        CheckpointError: If one is missing, unexpected, or another.
    """
    left = dict(expected)
    for name, tensor in tensors_of(folder):
        wanted = left.pop(name, None)
        if wanted is None:
            raise _not_trained(folder, f"it holds {name}, which the trained network does not have")
        if (
            tensor.shape != wanted.shape
            or tensor.dtype != wanted.dtype
            or not torch.equal(_bits(tensor), _bits(wanted))
        ):
            raise _not_trained(folder, f"{name} is not what the network has in memory")
    if left:
        raise _not_trained(folder, f"it lacks {min(left)}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _not_trained(folder: Path, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}, read back, is not the network that was trained: {difference}. It has not got its name. Where a "
        "checkpoint was saved, write the model from it with `finetune export`; if this happens again, look for a disk "
        "or memory that fails."
    )


def sync_files(folder: Path) -> None:
    """Returns once all files of a new folder are on the disk, with the mode that the umask asks for.

    Raises:
        OSError: If they cannot be written there.
    """
    follow_umask(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sync(path)


def _fill(network: nn.Module, skeleton: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Gives the trained weights to the network that is written."""
    assert isinstance(network, PreTrainedModel)
    missing, unexpected = skeleton.load_state_dict(tensors, strict=False, assign=True)
    skeleton.tie_weights()
    absent = [name for name in missing if skeleton.get_parameter_or_buffer(name).is_meta]
    if absent or unexpected:
        raise CheckpointError(
            f"The gathered weights do not fit the network: missing {absent}, unexpected {unexpected}. "
            "Nothing was written."
        )
    if skeleton.can_generate():
        skeleton.generation_config = network.generation_config
