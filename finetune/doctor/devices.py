"""GPUs, and what can be computed in."""

from collections.abc import Iterable
from pathlib import Path

from finetune.backend.devices import of_torch, slow_precision
from finetune.backend.settle import check_devices
from finetune.doctor.finding import Asked, Finding, failure, ok, warning

# There where NVIDIA's kernel module is loaded.
DRIVER = Path("/proc/driver/nvidia/version")


def gpus(asked: Asked) -> Iterable[Finding]:
    """Whether torch sees the GPUs, and whether there is one for each process."""
    import torch

    here = of_torch()
    if here.gpus:
        yield ok("GPUs", f"{here.gpus} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    elif DRIVER.exists():
        yield warning(
            "GPUs",
            f"NVIDIA's driver is loaded, but torch {torch.__version__} sees no GPU",
            f"install a build of torch for GPUs (this one is for CUDA {torch.version.cuda}), and look at "
            f"CUDA_VISIBLE_DEVICES, which is {asked.env.get('CUDA_VISIBLE_DEVICES', 'not set')}",
        )
    else:
        yield ok("GPUs", f"none; processes compute on the CPU and talk by gloo (torch {torch.__version__})")
    if asked.launch is not None:
        check_devices(asked.launch, here, asked.local)


def dtypes(asked: Asked) -> Iterable[Finding]:
    """A product in every dtype that a run may compute in."""
    gpu = of_torch().gpus > 0
    sound = []
    for name in ("float32", "bfloat16", *(["float16"] if gpu else [])):
        if product(name, "cuda" if gpu else "cpu") == 8.0:
            sound.append(name)
        else:
            yield failure("dtypes", f"a product in {name} fails or is wrong", "install torch anew: `make setup`")
    yield ok("dtypes", f"{', '.join(sound)}{'' if gpu else '; float16 needs a GPU'}")
    slow = slow_precision(asked.recipe.precision) if asked.recipe is not None else ""
    if slow:
        yield warning("dtypes", slow, "`precision: fp32`, or `auto`, which is fp32 here")


def product(dtype: str, device: str) -> float:
    """An element of a product of two 8 x 8 matrices of ones; nan if torch cannot compute it."""
    import torch

    try:
        ones = torch.ones(8, 8, dtype=getattr(torch, dtype), device=device)
        return float((ones @ ones)[0, 0])
    except RuntimeError:
        return float("nan")
