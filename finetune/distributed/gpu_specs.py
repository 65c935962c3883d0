"""GPUs as data sheets describe them (`gpus.yaml`), and user-defined ones."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

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
    host_gbs: float = 32.0
    """Bandwidth to host memory, each way, in 10^9 bytes a second."""


_KNOWN = tuple(Gpu(**row) for row in yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text("utf-8")))
_OWN = {"memory": "memory_gib", "bf16": "bf16_tflops", "link": "link_gbs", "watts": "watts"}


def of_device(name: str, memory_gib: float | None = None) -> Gpu | None:
    """Returns the GPU that torch calls so, such as `NVIDIA H100 PCIe`; None if it is not known.

    Args:
        memory_gib: What it has, where torch calls several sizes the same.
    """
    matches = [gpu for gpu in _KNOWN if re.search(rf"\b{gpu.part}\b", name)]
    apart = {gpu: abs(gpu.memory_gib - (memory_gib or gpu.memory_gib)) for gpu in matches}
    return max(matches, key=lambda gpu: (len(gpu.part), -apart[gpu]), default=None)


def find_gpu(text: str) -> Gpu:
    """Returns a GPU by name, such as `h100-80gb`, or of figures, such as `memory=24,bf16=70`; both may be given.

    Raises:
        RecipeError: If there is no such GPU, or a figure cannot be read.
    """
    first, *rest = text.split(",")
    named = "=" not in first
    known = {gpu.name: gpu for gpu in _KNOWN}
    meant = [name for name in known if re.fullmatch(rf"{re.escape(first.lower())}(-\d+gb)?", name)]
    if len(meant) == 1:
        first = meant[0]
    if named and first not in known:
        near = f": {' or '.join(meant)}?" if meant else hint(first, [*known], cutoff=0.4) or "."
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
    if not gpu.memory_gib:
        raise RecipeError(f"--gpu: '{text}' must say memory (GiB) at least: memory=24.")
    return gpu
