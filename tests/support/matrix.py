"""Resuming on every backend what any backend has saved: which runs to launch, and how far their paths lie apart.

`python tests/support/matrix.py FILE` runs all pairs and writes the table; `make test-resume` does that. The suite
runs a part of them.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import testdata
import torch
from forkserver import ForkServer
from harness import Launcher, Result, weight_difference
from recipes_for_tests import ADAPTERS, PARITY, SPLIT, base, keeping, own_network

# The launch files, and in brackets how many processes they start here.
BACKENDS = {
    "single": 1,
    "ddp": 2,
    "fsdp": 2,
    "hsdp": 4,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
    "zero3_offload": 2,
    "sp": 2,
    "fsdp_sp": 4,
    "tp": 2,
    "fsdp_tp": 4,
    "fsdp_tp_sp": 4,
}
TOLERANCE = 1e-4

# Runs that other tests read too, which keep checkpoints.
KINDS: dict[str, dict[str, Any]] = {"adamw": PARITY["adamw"], "dora": ADAPTERS["dora"], "lora": SPLIT["lora"]}
# And one whose parameters some backends hold whole.
KINDS["odd"] = own_network("odd", length={"steps": 4}, checkpoint=keeping(2))
# What is evaluated and written is an average, of weights that learn with several rates.
KINDS["averaged"] = base(
    optim={"ema_decay": 0.7, "layer_decay": 0.8, "lr_factors": {"lm_head": 2.0}},
    data={**base()["data"], "sequence_length": 64},
    length={"steps": 4},
    eval={"every_steps": 2},
    checkpoint=keeping(2),
)
SPLITTING = ("sp", "fsdp_sp", "tp", "fsdp_tp", "fsdp_tp_sp")


def kinds(backend: str) -> list[str]:
    """The recipes that run on a backend: in rows and layers that are split, other dropout masks are drawn."""
    return [
        "adamw",
        *(["lora"] if backend in SPLITTING else ["dora", "odd"]),
        *(["averaged"] if backend not in SPLITTING or backend == "tp" else []),
        *(["lora"] if backend == "single" else []),
    ]


def straight(launcher: Launcher, backend: str) -> dict[str, Result]:
    """All steps without a stop, one run a kind, with a checkpoint in the middle."""
    return launcher.many(backend, {kind: KINDS[kind] for kind in kinds(backend)})


def resumed(launcher: Launcher, target: str, sources: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The rest of each run on one backend, from the checkpoint in the middle of another's, as `KIND_from_SOURCE`."""
    jobs = {}
    for source, kind in itertools.product(sources, kinds(target)):
        if kind in kinds(source):
            directory = launcher.directory(source, kind, KINDS[kind])
            checkpoint = directory / "checkpoints" / f"step-{KINDS[kind]['checkpoint']['every_steps']:08d}"
            jobs[f"{kind}_from_{source}"] = {**KINDS[kind], "resume": {"mode": str(checkpoint)}}
    return jobs


@dataclass(frozen=True)
class Distance:
    """How far a resumed run lies from one that was never stopped."""

    loss: float
    """Largest relative difference of a step's loss."""
    weights: float
    """Largest relative difference of a final tensor."""
    bits: bool
    """Whether losses, gradient norms, final weights and all that the last checkpoint holds are equal to the bit."""


def saved(run: Result) -> dict[str, str]:
    """Digests of the tensors' files of a run's last checkpoint: its optimiser's state too, which ends in no model."""
    last = max((run.directory / "checkpoints").glob("step-*"))
    manifest = json.loads((last / "manifest.json").read_text())
    return {name: facts["xxh3_128"] for name, facts in manifest["files"].items() if name.endswith(".safetensors")}


def distance(whole: Result, part: Result) -> Distance:
    """Compares the steps that both took, and the final weights."""
    assert 0 < len(part.steps) < len(whole.steps)
    second_half = whole.steps[-len(part.steps) :]
    assert [step["step"] for step in part.steps] == [step["step"] for step in second_half]
    losses, others = (np.array([step["loss"] for step in steps]) for steps in (second_half, part.steps))
    norms, other_norms = (np.array([step["grad_norm"] for step in steps]) for steps in (second_half, part.steps))
    same = bool((losses == others).all() and (norms == other_norms).all())
    same = same and all(torch.equal(tensor, part.weights[name]) for name, tensor in whole.weights.items())
    same = same and saved(whole) == saved(part)
    return Distance(float((np.abs(losses - others) / losses).max()), weight_difference(whole, part), same)


def main(file: str) -> None:
    """Runs all pairs, and writes what was found as a table of a Markdown page."""
    lines = [
        "# Resume on another backend",
        "",
        "Start the same command under another launch file: the run resumes. A cell is the largest relative difference "
        "of any loss and any final tensor to a run on one process that was never stopped; `=` marks bit-equality with "
        "the unstopped run of the same backend.",
        "",
        "Written by `make test-resume`: up to 14 steps on generated stories, saved in the middle on the backend of the "
        "row, resumed on the backend of the column.",
    ]
    worst = 0.0
    testdata.ensure()
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder), ForkServer().launch)
        cells: dict[tuple[str, str, str], Distance] = {}
        equal: set[tuple[str, str]] = set()
        whole = {backend: straight(launcher, backend) for backend in BACKENDS}
        for target in BACKENDS:
            print(f"{target} …", flush=True)
            for name, run in launcher.many(target, resumed(launcher, target, BACKENDS)).items():
                kind, _, source = name.partition("_from_")
                cells[kind, source, target] = distance(whole["single"][kind].check(), run.check())
                if source == target and distance(whole[target][kind], run).bits:
                    equal.add((kind, target))
        for kind in KINDS:
            some = [backend for backend in BACKENDS if kind in kinds(backend)]
            names = [f"{name} x{BACKENDS[name]}" for name in some]
            lines += ["", f"## {kind}", "", "| saved on | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
            for source, name in zip(some, names, strict=True):
                row = [cells[kind, source, target] for target in some]
                # numpy's hands NaN on; Python's may pass it over.
                worst = float(np.max([worst, *(figure for cell in row for figure in (cell.loss, cell.weights))]))
                texts = []
                for target, cell in zip(some, row, strict=True):
                    mark = " =" if source == target and (kind, target) in equal else ""
                    texts.append(f"{max(cell.loss, cell.weights):.1e}{mark}")
                lines.append(f"| {name} | " + " | ".join(texts) + " |")
    lines += ["", f"Largest difference: {worst:.1e}; allowed: {TOLERANCE:.0e}.", ""]
    Path(file).write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))
    missing = {(kind, name) for kind in KINDS for name in BACKENDS if kind in kinds(name)} - equal
    if not worst <= TOLERANCE or missing:
        sys.exit(f"Not as promised: worst {worst:.1e}, not bit-equal on {sorted(missing)}")


if __name__ == "__main__":
    main(sys.argv[1])
