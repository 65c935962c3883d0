"""Predicted peaks beside those of launched runs, and the instrument that measures these."""

import subprocess
import sys
from pathlib import Path

import pytest
from forkserver import ForkServer
from harness import ROOT, RUN_S, environment

sys.path.insert(0, str(ROOT / "scripts"))

import plan_accuracy

from finetune.planning.launch_candidates import MARGIN

# Small, but neither state nor activations nor the loss are a trifle.
SMALL = {
    "model": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
    "tokens": 256,
    "rows": 2,
}


@pytest.mark.parametrize(
    "name",
    ["full:single:off", "qlora:single:on", "lora:ddp:off", "full:fsdp:on", "qlora:zero2:off", "lora:zero3:on"],
)
def test_peaks_are_as_predicted(name: str, tmp_path: Path, fork_server: ForkServer) -> None:
    found = plan_accuracy.compare(name, tmp_path, launch=fork_server.launch, **SMALL)
    rest = sum(found.parts[part] for part in ("weights", "gradients", "optimizer"))
    assert found.measured > 1.2 * rest, "no more than what is there between steps"
    assert abs(found.ratio - 1) <= 0.10, found
    assert found.predicted * (1 + MARGIN) >= found.measured, found


CHECK = """
import sys
sys.path.insert(0, "scripts")
import threading
import torch
import measure_peak
from torch.profiler import record_function

MIB = 2**20
torch.ones(1)
with measure_peak.watched() as profiler:
    base = torch.empty(10 * MIB, dtype=torch.uint8)
    with record_function(measure_peak.MARK):
        # Three matrices of 4 MiB beside what was there; the product of two, then released.
        left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
        left @ right
    del left, right
    with record_function(measure_peak.MARK):
        # Log-probabilities, and two gradients, of 8 MiB of scores.
        scores = torch.zeros(1024, 2048, requires_grad=True)
        torch.nn.functional.cross_entropy(scores, torch.zeros(1024, dtype=torch.long)).backward()
    del scores
    held = [torch.empty(6 * MIB, dtype=torch.uint8)]
    # Released by a thread that no profiler watches.
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    with record_function(measure_peak.MARK):
        torch.empty(MIB, dtype=torch.uint8)
print([round(peak.size / MIB - 10, 1) for peak in measure_peak.peaks(profiler)])
"""


def checked(program: str) -> str:
    """The last line that a program prints which uses the instrument."""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=RUN_S
    )
    assert ended.stdout, ended.stderr[-3000:]
    return ended.stdout.splitlines()[-1]


def test_the_instrument_counts() -> None:
    """What is known to be allocated, to a tenth of a MiB; nothing that another thread has released."""
    assert checked(CHECK) == "[12.0, 32.0, 1.0]"


PRODUCTS = """
import sys
sys.path.insert(0, "scripts")
import torch
import measure_peak

def products(dtype):
    draw = torch.Generator().manual_seed(0)
    of = lambda *shape: torch.randn(*shape, generator=draw).to(dtype)
    left, right, bias, many = of(5, 7), of(7, 3), of(3), of(2, 5, 7)
    transposed = of(3, 7).t()
    return [left @ right, left @ transposed, torch.addmm(bias, left, right), torch.bmm(many, of(2, 7, 3))]

expected = {dtype: products(dtype) for dtype in (torch.bfloat16, torch.float32)}
library = measure_peak.multiply_by_numpy()
for dtype, wanted in expected.items():
    for found, right in zip(products(dtype), wanted, strict=True):
        # To two neighbours in bf16: sums are taken in another order.
        assert found.dtype == dtype and torch.allclose(found, right, rtol=2**-7, atol=2**-7), (found, right)
print("alike")
"""


def test_the_instrument_multiplies() -> None:
    assert checked(PRODUCTS) == "alike"
