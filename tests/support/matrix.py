"""Resuming on every backend what any backend has saved: which runs to launch, and how far their paths lie apart.

`python tests/support/matrix.py FILE` runs all pairs and writes the table; `make test-resume` does that. The suite
runs a part of them.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import testdata
import torch
from forkserver import ForkServer
from harness import Launcher, Result, weight_difference
from recipes_for_tests import MODEL, PARITY, base, stories

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
STEPS, STOP = 4, 2
TOLERANCE = 1e-4

_DATA = {**base()["data"], "validation": stories("validation", limit=4)}
_KEEP = {
    "data": _DATA,
    "checkpoint": {"every_steps": STOP, "every_minutes": None, "keep": 9},
    "length": {"steps": STEPS},
}
_LORA = base(model={"name": MODEL, "config": None}, tokenizer={}, **_KEEP)
# Of a module whose outputs tensor parallelism splits, and one whose inputs.
_ADAPTERS = {"rank": 8, "targets": ["q_proj", "down_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "full": base(**_KEEP),
    "lora": {**_LORA, "lora": _ADAPTERS},
    "lora_dropout": {**_LORA, "lora": {**_ADAPTERS, "dropout": 0.1}},
}
# In rows and layers that are split, other dropout masks are drawn.
_SPLIT = ("sp", "fsdp_sp", "tp", "fsdp_tp", "fsdp_tp_sp")


Kinds = Callable[[str], dict[str, dict[str, Any]]]


def kinds(backend: str) -> dict[str, dict[str, Any]]:
    """The recipes that run on a backend."""
    return {kind: recipe for kind, recipe in KINDS.items() if kind != "lora_dropout" or backend not in _SPLIT}


def most_telling(backend: str) -> dict[str, dict[str, Any]]:
    """The recipes that the suite runs on a backend: LoRA with dropout, where that can run, stands for LoRA without.

    Beside backends that split rows or layers, which know no dropout, both run.
    """
    found = kinds(backend)
    if "lora_dropout" in found and backend not in ("single", "zero3_offload"):
        del found["lora"]
    return found


def backends(kind: str) -> list[str]:
    """The backends that a recipe runs on."""
    return [backend for backend in BACKENDS if kind in kinds(backend)]


def checkpoint_of(run: Result) -> Path:
    """The checkpoint in the middle of a run."""
    return run.directory / "checkpoints" / f"step-{STOP:08d}"


# At a large rate, and without clipping.
KEPT = {**PARITY["sgd"], "length": {"steps": 6}, "checkpoint": {"every_steps": 3, "every_minutes": None, "keep": 9}}


def straight(launcher: Launcher, backend: str, some: Kinds = kinds) -> dict[str, Result]:
    """All steps without a stop, one run a kind, with a checkpoint in the middle."""
    return launcher.many(backend, some(backend))


def resumed(launcher: Launcher, target: str, sources: list[str], some: Kinds = kinds) -> dict[tuple[str, str], Result]:
    """The second half on one backend, from the checkpoint of each source that takes its kind; by source and kind."""
    both = [(source, kind) for source in sources for kind in some(source) if kind in some(target)]
    jobs = {
        f"{kind}_from_{source}": {
            **KINDS[kind],
            "resume": {"mode": str(checkpoint_of(straight(launcher, source, some)[kind].check()))},
        }
        for source, kind in both
    }
    found = launcher.many(target, jobs)
    return {(source, kind): found[f"{kind}_from_{source}"].check() for source, kind in both}


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
    manifest = json.loads((run.directory / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text())
    return {name: facts["xxh3_128"] for name, facts in manifest["files"].items() if name.endswith(".safetensors")}


def distance(whole: Result, part: Result) -> Distance:
    """Compares the steps that both took, and the final weights."""
    second_half = [step for step in whole.steps if step["step"] > STOP]
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
        f"Written by `make test-resume`: {STEPS} steps on generated stories, saved after {STOP} on the backend of the "
        "row, resumed on the backend of the column.",
    ]
    worst = 0.0
    testdata.ensure()
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder), ForkServer().launch)
        cells: dict[tuple[str, str, str], Distance] = {}
        equal: set[tuple[str, str]] = set()
        reference = straight(launcher, "single")
        for target in BACKENDS:
            print(f"{target} …", flush=True)
            for (source, kind), run in resumed(launcher, target, list(BACKENDS)).items():
                cells[kind, source, target] = distance(reference[kind].check(), run)
                if source == target and distance(straight(launcher, target)[kind], run).bits:
                    equal.add((kind, target))
        for kind in KINDS:
            some = backends(kind)
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
    missing = {(kind, name) for kind in KINDS for name in backends(kind)} - equal
    if not worst <= TOLERANCE or missing:
        sys.exit(f"Not as promised: worst {worst:.1e}, not bit-equal on {sorted(missing)}")


if __name__ == "__main__":
    main(sys.argv[1])
