"""Tensors of the host to the device, without making the host wait."""

import torch


def batch_to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The batch on the device, sent as `tensor_to_device` does."""
    return {key: tensor_to_device(value, device) for key, value in batch.items()}


def tensor_to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device.

    To a GPU it goes from pinned memory and without waiting: a copy from other memory stops the host until the GPU has
    come to it. The caching allocator of pinned memory keeps what is sent until it has arrived.
    """
    if device.type == "cpu":
        return value
    return value.pin_memory().to(device, non_blocking=True)
