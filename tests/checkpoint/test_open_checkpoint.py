"""A checkpoint saved under ZeRO-3 on two ranks opens in a fresh process, by plain transformers or PEFT."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import RUN_S, Launcher, environment
from matrix import KINDS
from testdata import MODEL

pytestmark = [
    pytest.mark.xdist_group("zero3"),
]

# Opens folders, and says how the logits of each differ from those of the first, and that it was alone.
SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

kind, base, *folders = sys.argv[1:]
ids = torch.arange(3, 3 + 2 * 40).reshape(2, 40)
logits = []

def open_adapter(folder):
    from peft import PeftModel
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)

for folder in folders:
    if kind == "adamw":
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        network = open_adapter(folder)
    with torch.no_grad():
        logits.append(network.eval()(input_ids=ids).logits)
if kind == "dora":
    with torch.no_grad(), network.disable_adapter():
        logits.append(network(input_ids=ids).logits)
print(json.dumps({
    "finite": all(bool(torch.isfinite(part).all()) for part in logits),
    "differ": [float((part - logits[0]).abs().max()) for part in logits],
    "ours": sorted(name for name in sys.modules if name.split(".")[0] == "finetune"),
}))
"""


def opened(kind: str, *folders: Path) -> dict[str, Any]:
    """What a process says that knows nothing of this toolkit."""
    env = environment()
    del env["PYTHONPATH"]
    words = [sys.executable, "-c", SCRIPT, kind, MODEL, *map(str, folders)]
    done = subprocess.run(words, env=env, cwd=folders[0], capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


LAUNCHED_RUNS = {"zero3": {"adamw": KINDS["adamw"], "dora": KINDS["dora"]}}


@pytest.mark.parametrize("kind", list(LAUNCHED_RUNS["zero3"]))
def test_a_fresh_process_opens_it(launcher: Launcher, kind: str) -> None:
    """The last checkpoint's weights are those that the run ended with; the one in the middle has others."""
    run = launcher.many("zero3", LAUNCHED_RUNS["zero3"])[kind].check()
    assert (run.facts["runs"]["kind"], run.facts["runs"]["world_size"]) == ("zero3", 2)
    middle, last = (folder / "model" for folder in sorted((run.directory / "checkpoints").glob("step-*"))[-2:])
    assert not list(run.directory.rglob("*.bin")) + list(run.directory.rglob("*.pt"))
    if kind == "adamw":
        # One file a rank, and an index: that it opens is no accident of a single file.
        assert len(list(last.glob("model-*-of-00002.safetensors"))) == 2
    said = opened(kind, run.directory / "model", last, middle)
    assert said["finite"]
    assert said["ours"] == []
    # Bit-equal: fp32 weights, the same process, the same order of sums.
    assert said["differ"][:2] == [0.0, 0.0]
    assert all(difference > 1e-3 for difference in said["differ"][2:]), said
