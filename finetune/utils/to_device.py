"""Copies of tensors from host to device that do not make the host wait."""

import torch


def batch_to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns a batch on the device, copied as `tensor_to_device` does."""
    return {key: tensor_to_device(value, device) for key, value in batch.items()}


def tensor_to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the host on the device.

    A copy to a GPU is asynchronous, from pinned memory: one from other memory would block the host until the GPU
    reaches it. The caching allocator of pinned memory keeps the source until the copy is done.
    """
    if device.type in ("cpu", value.device.type):
        return value
    return value.pin_memory().to(device, non_blocking=True)
