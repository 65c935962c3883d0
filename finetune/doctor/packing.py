"""Packed weights and 8-bit optimisers: whether bitsandbytes computes on this machine."""

import subprocess
import sys
from collections.abc import Iterable

from finetune.backend.devices import of_torch
from finetune.doctor.finding import Asked, Finding, failure, ok, warning

LIMIT_S = 120

# In a process of its own: a native library that does not fit the machine may end it.
SCRIPT = """
import sys, torch, bitsandbytes
device = sys.argv[1]
weight = torch.linspace(-1, 1, 4096, device=device).reshape(64, 64)
packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4")
error = (bitsandbytes.functional.dequantize_4bit(packed, state) - weight).abs().max().item()
assert error < 0.2, f"packed weights come back with an error of {error}"
print(bitsandbytes.__version__)
"""


def kernels(asked: Asked) -> Iterable[Finding]:
    """Packs and unpacks a matrix."""
    version, problem = probe(SCRIPT, "cuda" if of_torch().gpus else "cpu", LIMIT_S)
    advice = "install it anew (`make setup`), or do without model.quantization and 8-bit optimisers"
    if version:
        yield ok("bitsandbytes", f"{version} packs in 4 bits here")
    elif asked.recipe is not None and asked.recipe.model.quantization is not None:
        yield failure("bitsandbytes", f"it does not work, and the recipe needs it: {problem}", advice)
    else:
        yield warning("bitsandbytes", f"it does not work: {problem}", advice)


def probe(script: str, device: str, limit_s: float) -> tuple[str, str]:
    """What the script prints, or the last line of what it complains of."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", script, device], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {limit_s:.0f} s"
    if ended.returncode == 0:
        return ended.stdout.strip(), ""
    lines = ended.stderr.strip().splitlines()
    return "", lines[-1] if lines else f"it ended with {ended.returncode}"
