"""Reports a comparison of runs, as text and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from finetune.diagnostics.parity.compare import Comparison, FinishedRun
from finetune.utils.console import plain_table

# Steps that a table shows; of more, some that lie evenly between the first and the last.
_MOST_STEPS = 24


def print_report(comparisons: Sequence[Comparison], console: Console) -> None:
    """Prints tables and a verdict. All comparisons have the same reference."""
    console.print(_runs(comparisons))
    console.print(
        "rank 0's shares of parameters and optimiser; the fullest rank's peak; the largest relative differences"
    )
    console.print()
    console.print(_steps(comparisons))
    console.print()
    for comparison in comparisons:
        name, allowed = comparison.other.name, comparison.allowed
        for note in comparison.notes:
            console.print(f"note: {name}: {note}")
        if comparison.holds:
            console.print(f"{name}: the path of {comparison.one.name} (within what is normal in {allowed.kind})")
        for reason in comparison.reasons:
            console.print(f"DRIFT: {name}: {reason}")


def report_as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Returns the report as plain values; docs/parity.md explains them."""
    runs = [comparisons[0].one, *(comparison.other for comparison in comparisons)]
    return {
        "holds": all(comparison.holds for comparison in comparisons),
        "reference": comparisons[0].one.name,
        "runs": {
            run.name: {
                "directory": str(run.directory),
                "precision": run.facts["precision"],
                "runs": run.facts["runs"],
                "tokens_per_s": run.tokens_per_s,
                "peak_memory_gib": run.peak_memory_gib,
                "steps": [
                    {key: line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")}
                    for line in run.steps.values()
                ],
            }
            for run in runs
        },
        "comparisons": {
            comparison.other.name: {
                "holds": comparison.holds,
                "allowed": vars(comparison.allowed),
                "loss": _finite(comparison.worst("loss")),
                "grad_norm": _finite(comparison.worst("grad_norm")),
                "tensor": comparison.tensor
                and {"name": comparison.tensor[0], "difference": _finite(comparison.tensor[1])},
                "first": comparison.first,
                "reasons": comparison.reasons,
                "notes": comparison.notes,
            }
            for comparison in comparisons
        },
    }


def _finite(difference: float | None) -> float | None:
    """Returns None for an infinite difference, which JSON cannot hold: just one of two values was finite."""
    return difference if difference is not None and math.isfinite(difference) else None


def _runs(comparisons: Sequence[Comparison]) -> Table:
    dtypes = "masters/weights/sums/products/loss"
    table = plain_table("", "what runs", "shares", dtypes, "targets/s", "GiB", "loss", "norm", "weights", "verdict")
    table.add_row(*_facts(comparisons[0].one), "", "", "", "reference")
    for comparison in comparisons:
        tensor = comparison.tensor and comparison.tensor[1]
        worst = [_short(value) for value in (comparison.worst("loss"), comparison.worst("grad_norm"), tensor)]
        table.add_row(*_facts(comparison.other), *worst, "same path" if comparison.holds else "DRIFT")
    return table


def _facts(run: FinishedRun) -> list[str]:
    runs = run.facts["runs"]
    outputs = runs["output_dtypes"]
    product = outputs.get("Linear") or outputs.get("Conv1D")
    dtypes = (runs["parameter_dtypes"], runs["model_dtypes"], runs["reduce_dtype"], product, outputs.get("loss"))
    rate, memory = run.tokens_per_s, run.peak_memory_gib
    return [
        run.name,
        f"{runs['kind']} x{runs['world_size']}, {runs['communication'] or runs['device']}",
        f"{runs['parameter_fraction']:.0%} {runs['optimizer_fraction']:.0%}",
        "/".join(map(_dtype, dtypes)),
        "–" if rate is None else f"{rate:,.0f}",
        "–" if memory is None else f"{memory:.2f}",
    ]


def _dtype(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_dtype, value))
    return "–" if value is None else str(value).replace("bfloat", "bf").replace("float", "fp")


def _steps(comparisons: Sequence[Comparison]) -> Table:
    """Shows the reference at each step, and how far the others are from it."""
    one = comparisons[0].one
    names = [f"{comparison.other.name} {what}" for comparison in comparisons for what in ("loss", "norm")]
    table = plain_table("step", "lr", "tokens", "loss", "grad norm", *names)
    logged = sorted(one.steps)
    for index in np.unique(np.linspace(0, len(logged) - 1, _MOST_STEPS).round().astype(int)):
        step = logged[index]
        line = one.steps[step]
        figures = ["not finite" if line[key] is None else f"{line[key]:.5f}" for key in ("loss", "grad_norm")]
        away = [
            _short(comparison.steps.get(step, {}).get(key))
            for comparison in comparisons
            for key in ("loss", "grad_norm")
        ]
        table.add_row(str(step), f"{line['lr']:.3g}", f"{line['tokens']:,}", *figures, *away)
    return table


def _short(difference: float | None) -> str:
    if difference is None:
        return "–"
    return "0" if difference == 0 else f"{difference:.0e}"
