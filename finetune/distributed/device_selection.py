"""Devices of this machine and their memory, as torch or, without loading it, the driver lists them."""

import ctypes
import os
import platform
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from finetune.utils.compat.library_versions import installed
from finetune.utils.platforms import peak_bytes

_LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed")


def visible_gpus() -> int:
    """Returns the number of GPUs that a run will use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def slow_precision(precision: str) -> str:
    """Returns why a run is slower in this precision than in fp32; "" if it is not, or not known to be.

    torch leaves products in bf16 to oneDNN, which needs AVX-512 on the CPUs of PCs; without, its own loops compute
    them, at up to 1/200 of the speed that fp32 has.
    Source: torch, `mkldnn_bf16_device_check` in `aten/src/ATen/native/mkldnn/Utils.h`.
    """
    import torch

    from finetune.utils.compat.torch_private import cpu_has_bf16

    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    known = precision == "bf16" and built and not torch.cuda.is_available()
    if not known or cpu_has_bf16():
        return ""
    return "This CPU has no instructions for bf16: its products take 4 to 200 times as long as those of fp32."


def available_memory() -> int:
    """Returns the bytes that this process may fill: its GPU's, or its share of the host's that are free now."""
    import torch

    if torch.cuda.is_available():
        # As Accelerate counts them: a scheduler may show each process a GPU of its own only.
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return int(torch.cuda.get_device_properties(index).total_memory)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    allowed = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    if (most := _of_container("max")) is not None and (now := _of_container("current")) is not None:
        allowed.append((most - now) // ranks)
    own = psutil.virtual_memory().available // ranks + psutil.Process().memory_info().rss
    return min([own, *allowed])


def total_memory() -> int:
    """Returns the bytes that a process can ever fill, whatever else runs: of its GPU, or its share of the host's."""
    import torch

    if torch.cuda.is_available():
        return available_memory()
    total = psutil.virtual_memory().total
    return int(min(total, _of_container("max") or total)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def peak_memory() -> int:
    """Returns the most bytes of it taken so far, reserved by allocators or outside of them."""
    import torch

    if not torch.cuda.is_available():
        return peak_bytes()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_reserved() + total - free - torch.cuda.memory_reserved()


def matmul_workspaces() -> int:
    """Returns the bytes of this GPU that torch sets aside for products: a workspace each for the thread of forward
    passes and that of backward passes, which count as allocated.

    Source: torch, `parseChosenWorkspaceSize` in `aten/src/ATen/cuda/CublasHandlePool.cpp`; measured on an H200.
    """
    import torch

    big = torch.cuda.get_device_capability() in ((9, 0), (10, 0))
    return 2 * ((32 << 20) if big else (8 << 20) + (128 << 10))


def device_identity() -> dict[str, Any]:
    """Returns the device and the versions of libraries, on which memory depends beside recipe and launch."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {platform.machine()}"
    return {"device": device, **{name: installed(name) for name in _LIBRARIES}}


def _of_container(figure: str) -> int | None:
    """Returns a figure of the container's memory in bytes; None where it has no limit.

    Source: the kernel's documentation of cgroup v2, memory.
    """
    with suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup", f"memory.{figure}").read_text())
    return None


def driver_gpus() -> int:
    """Returns the number of GPUs that NVIDIA's driver lists, if torch was built to use it; in milliseconds.

    The driver itself heeds CUDA_VISIBLE_DEVICES.
    """
    if "+cpu" in (installed("torch") or ""):
        return 0
    count = ctypes.c_int(0)
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value
