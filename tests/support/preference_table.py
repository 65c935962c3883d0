"""Every loss of preferences under launch files: which runs to launch, and how far their paths lie from one process's.

`python tests/support/preference_table.py FILE` launches all of them and writes the table; `make preference-table` does
that. The suite launches a part, and compares its losses with the file's.
"""

import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import testdata
from forkserver import ForkServer
from harness import Launcher, Result, weight_difference
from recipes_for_tests import base

from finetune.config.preference_losses import LOSSES

# The launch files that run without a GPU, and how many processes they start here.
BACKENDS = {
    "single": 1,
    "ddp": 2,
    "fsdp": 2,
    "fsdp_grad_op": 2,
    "hsdp": 4,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
    "zero3_offload": 2,
    "zero3_nvme": 2,
    "sp": 2,
    "fsdp_sp": 4,
    "tp": 2,
    "fsdp_tp": 4,
    "fsdp_tp_sp": 4,
}
TOLERANCE = 5e-5
"""Most that any loss, and the norm of any tensor's difference, may be of its own."""

SPLITTING = ("sp", "fsdp_sp", "fsdp_tp_sp")
_LAYERS = ("tp", "fsdp_tp", "fsdp_tp_sp")
_ADAPTERS = {"rank": 4, "targets": "all-linear"}


def job(task: str, preference: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Five steps of eight rows of built-in answers."""
    rows = {"packing": "padded" if task == "reward" else "documents", "sequence_length": 512}
    model = {"name": testdata.MODEL, "config": None, **sections.pop("model", {})}
    return base(
        task={"name": task},
        model=model,
        tokenizer={"name": None},
        data={"train": [{"sample": 36}], "validation": [], "validation_fraction": 0.0, **rows},
        chat={"template": "plain"},
        preference={**preference},
        batch={"global_size": 8, "micro_size": 2},
        length={"steps": 5},
        # A larger eps than usual: an adapter's first gradients are zeros but for rounding, by which Adam would divide.
        optim={"name": "AdamW", "lr": 2e-3, "weight_decay": 0.0, "clip_norm": None, "args": {"eps": 1e-4}},
        schedule={"name": "constant", "warmup_steps": 0},
        eval={"at_end": False},
        **sections,
    )


def _one_of(task: str, name: str) -> dict[str, Any]:
    smoothed = {"label_smoothing": 0.1} if name in ("robust", "exo_pair") else {}
    return job(task, {"loss": [name], "beta": 0.3, **smoothed})


# Of each loss alone.
LOSS_RUNS = {
    **{f"{task}: {name}": _one_of(task, name) for task in ("dpo", "cpo", "kto") for name in LOSSES[task]},
    **{
        f"dpo: {name}": job("dpo", {"beta": 0.3, "f_divergence": name})
        for name in ("forward_kl", "js_divergence", "alpha_divergence")
    },
    "dpo: use_weighting": job("dpo", {"beta": 0.3, "use_weighting": True}),
    "dpo: ld_alpha": job("dpo", {"beta": 0.3, "ld_alpha": 0.5}),
    "simpo": job("simpo", {"beta": 2.0, "gamma": 1.0}),
    "orpo": job("orpo", {}),
    "reward": job("reward", {}),
    "reward: centering": job("reward", {"centering": 0.1}),
}

_METHODS = {
    "sigmoid": ("dpo", {"beta": 0.3}),
    "sigmoid + sft": ("dpo", {"beta": 0.3, "loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "kto": ("kto", {"beta": 0.3}),
    "reward": ("reward", {}),
}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": _ADAPTERS},
    "QLoRA": {"lora": _ADAPTERS, "model": {"quantization": "nf4"}},
}
# Of each kind of loss with each kind of weights.
METHOD_RUNS = {
    f"{method}, {weights}": job(task, keys, **sections)
    for method, (task, keys) in _METHODS.items()
    for weights, sections in _WEIGHTS.items()
}


def runs_on(backend: str) -> dict[str, dict[str, Any]]:
    """The recipes that run under a launch file: a classifier's rows are not split, and packed weights of so narrow
    layers are not either."""
    return {
        name: recipe
        for name, recipe in METHOD_RUNS.items()
        if not (backend in SPLITTING and recipe["task"]["name"] == "reward")
        and not (backend in _LAYERS and "QLoRA" in name)
    }


def distance(whole: Result, other: Result) -> float:
    """The largest relative difference of a step's loss, and of the norm of a final tensor's difference."""
    losses, others = whole.series("loss"), other.series("loss")
    apart = float(np.abs(losses - others).max() / np.abs(losses).max())
    return max(apart, weight_difference(whole, other))


def _run_all(launcher: Launcher, backend: str) -> dict[str, Result]:
    """Runs what is run under a launch file; three runs a launch with weights on NVMe, whose pinned buffers stay."""
    runs = runs_on(backend)
    each = 3 if backend == "zero3_nvme" else len(runs)
    some = (itertools.islice(runs.items(), first, first + each) for first in range(0, len(runs), each))
    return {name: run for part in some for name, run in launcher.many(backend, dict(part)).items()}


def _cell(figure: float) -> str:
    return f"{figure:.1e}" if figure else "0"


def main(file: str) -> None:
    """Launches all runs, and writes what was found as a page of Markdown."""
    testdata.ensure()
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder), ForkServer().launch)
        single = launcher.many("single", {**LOSS_RUNS, **METHOD_RUNS})
        wrapped = launcher.many("ddp", LOSS_RUNS)
        lines = [
            "# Losses of preferences on every backend",
            "",
            "Written by `make preference-table`: five steps of eight rows of built-in answers, micro-batches of two, "
            "fp32. A cell is the largest relative difference to one process, of any step's loss and of any final "
            "tensor (norm of the difference by its norm).",
            "",
            "| loss | step 1 | step 5 | ddp x2 |",
            "|---|---|---|---|",
        ]
        for name in LOSS_RUNS:
            losses = single[name].check().series("loss")
            worst[f"{name}, ddp"] = distance(single[name], wrapped[name].check())
            lines.append(f"| {name} | {losses[0]:.6f} | {losses[-1]:.6f} | {_cell(worst[f'{name}, ddp'])} |")
        names = list(METHOD_RUNS)
        lines += ["", "| launch file | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        steps = (f"{single[name].check().series('loss')[-1]:.6f}" for name in names)
        lines.append("| single x1, loss of step 5 | " + " | ".join(steps) + " |")
        for backend, processes in BACKENDS.items():
            if backend == "single":
                continue
            print(f"{backend} …", flush=True)
            done, cells = _run_all(launcher, backend), []
            for name in names:
                if name in done:
                    worst[f"{name}, {backend}"] = distance(single[name], done[name].check())
                cells.append(_cell(worst[f"{name}, {backend}"]) if name in done else "–")
            lines.append(f"| {backend} x{processes} | " + " | ".join(cells) + " |")
    most = max(worst, key=lambda name: worst[name])
    lines += [
        "",
        "`–`: rows of reward models are not split over ranks, and blocks of packed weights of layers as narrow as "
        "these do not divide over ranks.",
        "",
        f"Largest difference: {worst[most]:.1e} ({most}); allowed: {TOLERANCE:.0e}.",
        "",
    ]
    Path(file).write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))
    if not worst[most] <= TOLERANCE:
        sys.exit(f"Not as promised: {most} is {worst[most]:.1e} apart")


if __name__ == "__main__":
    main(sys.argv[1])
