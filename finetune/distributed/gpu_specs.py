"""GPUs as data sheets describe them, and user-defined ones."""

import re
from dataclasses import dataclass, replace
from typing import Any

from finetune.config.recipe import hint
from finetune.utils.errors import RecipeError


@dataclass(frozen=True)
class Gpu:
    """Facts about a device."""

    name: str
    part: str
    """Part of the name that torch calls it by."""
    memory_gib: float
    """Memory that programs can have: what is sold, less what error correction and the driver keep."""
    bf16_tflops: float
    """Dense matrix products in bf16, without sparsity."""
    link_gbs: float
    """Bandwidth to another GPU of the same machine, each way, in 10^9 bytes a second."""
    watts: float
    """Its thermal design power."""


# Makers' data sheets, which give links as the sum of both ways; memory as torch.cuda reports it, rounded down.
# H100, H200: https://www.nvidia.com/en-us/data-center/h100/, https://www.nvidia.com/en-us/data-center/h200/
# B200: https://www.nvidia.com/en-us/data-center/dgx-b200/ (figures of 8, divided)
# A100: https://www.nvidia.com/en-us/data-center/a100/
# A10G: https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
# L4, L40S: https://www.nvidia.com/en-us/data-center/l4/, https://www.nvidia.com/en-us/data-center/l40s/ (halved: the
# sheets count with sparsity)
# RTX: appendix A of https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (bf16 with
# fp32 sums)
# MI300X: https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
# Those without a link of their own talk over PCIe: generation 4 x16 is 32, generation 5 x16 is 64 GB/s each way.
_KNOWN = (
    Gpu("h100-80gb", "H100", 79.0, 989.0, 450.0, 700.0),
    Gpu("h100-pcie-80gb", "H100 PCIe", 79.0, 756.0, 64.0, 350.0),
    Gpu("h100-nvl-94gb", "H100 NVL", 93.0, 835.0, 300.0, 400.0),
    Gpu("h200-141gb", "H200", 139.0, 989.0, 450.0, 700.0),
    Gpu("b200-180gb", "B200", 178.0, 2250.0, 900.0, 1000.0),
    Gpu("a100-80gb", "A100", 79.0, 312.0, 300.0, 400.0),
    Gpu("a100-40gb", "A100", 39.0, 312.0, 300.0, 400.0),
    Gpu("a10g-24gb", "A10G", 22.0, 70.0, 32.0, 300.0),
    Gpu("l4-24gb", "L4", 22.0, 121.0, 32.0, 72.0),
    Gpu("l40s-48gb", "L40S", 44.0, 362.0, 32.0, 350.0),
    Gpu("rtx3090-24gb", "RTX 3090", 23.5, 71.0, 32.0, 350.0),
    Gpu("rtx4090-24gb", "RTX 4090", 23.5, 165.0, 32.0, 450.0),
    Gpu("mi300x-192gb", "MI300X", 191.0, 1307.0, 448.0, 750.0),
)
_OWN = {"memory": "memory_gib", "bf16": "bf16_tflops", "link": "link_gbs", "watts": "watts"}


def of_device(name: str, memory_gib: float | None = None) -> Gpu | None:
    """Returns the GPU that torch calls so, such as `NVIDIA H100 PCIe`; None if it is not known.

    Args:
        memory_gib: What it has, where torch calls several sizes the same.
    """
    found = [gpu for gpu in _KNOWN if re.search(rf"\b{gpu.part}\b", name)]
    apart = {gpu: abs(gpu.memory_gib - (memory_gib or gpu.memory_gib)) for gpu in found}
    return max(found, key=lambda gpu: (len(gpu.part), -apart[gpu]), default=None)


def find_gpu(text: str) -> Gpu:
    """Returns a GPU by name, such as `h100-80gb`, or of figures, such as `memory=24,bf16=70`; both may be given.

    Raises:
        RecipeError: If there is no such GPU, or a figure cannot be read.
    """
    first, *rest = text.split(",")
    named = "=" not in first
    known = {gpu.name: gpu for gpu in _KNOWN}
    if named and first not in known:
        near = hint(first, [*known], cutoff=0.4) or "."
        raise RecipeError(
            f"--gpu: there is no '{first}'{near} Known are {', '.join(known)}; of others give figures: "
            "memory=GIB,bf16=TFLOPS,link=GB/s,watts=W."
        )
    # What is not said: no fast links, and the power of a large card.
    gpu = known[first] if named else Gpu("your own", "", 0.0, 0.0, 32.0, 300.0)
    for word in rest if named else [first, *rest]:
        key, _, value = word.partition("=")
        try:
            number: Any = float(value)
        except ValueError:
            number = 0.0
        if key not in _OWN or not 0.0 < number < 1e9:
            raise RecipeError(
                f"--gpu: cannot read '{word}'. Figures are {', '.join(f'{k}=NUMBER' for k in _OWN)}, in GiB, TFLOP/s, "
                "GB/s each way and W, all above 0."
            )
        gpu = replace(gpu, **{_OWN[key]: number})
    if not (gpu.memory_gib and gpu.bf16_tflops):
        raise RecipeError(f"--gpu: '{text}' must say memory (GiB) and bf16 (TFLOP/s) at least: memory=24,bf16=70.")
    return gpu
