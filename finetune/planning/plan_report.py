"""The report of a plan, as text and as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from finetune.planning.launch_candidates import Candidate
from finetune.planning.model_shapes import KINDS, Variant
from finetune.planning.planner import Plan
from finetune.planning.step_time import CHINCHILLA
from finetune.planning.trace.trace_launches import Traced
from finetune.utils.console import plain_table

GIB = 2.0**30
_COLOURS = {"fits": "green", "tight": "yellow", "no": "red", "refused": "dim"}
# Below this, a step waits for kernels to start: some thousands of them, at 5 to 10 µs each.
_STARTS_S = 0.01


def print_plan(plan: Plan, console: Console, *, energy: bool = False) -> None:
    """Prints a plan: what fits, where the memory goes, what to launch, and what it takes."""
    machines, gpu, own = plan.machines, plan.machines.gpu, plan.variants[plan.kind]
    assert isinstance(own, Variant)
    title = plan.recipe.model.name or f"{(plan.recipe.model.config or {}).get('model_type', plan.recipe.task.name)}"
    console.print(
        f"{title}: {own.parameters:,} parameters, {own.trained:,} trained ({own.adapters or plan.kind}); "
        f"{machines.nodes} x {machines.gpus} {gpu.name}, {gpu.memory_gib:.4g} GiB each"
    )
    if machines.assumed is not None:
        console.print(machines.assumed)
    unit = _unit_of([candidate.peak for candidate in plan.candidates.values()])
    ways = [f"{kind} (the recipe)" if kind == plan.kind else kind for kind in KINDS]
    table = plain_table("launch file", "ranks", *ways, right=("ranks", *ways))
    for name, launch in plan.launches.items():
        cells = [_cell(plan.candidates[name, kind], unit) for kind in KINDS]
        table.add_row(name, str(launch.num_processes), *cells)
    console.print(table)
    console.print(
        f"{unit} a rank: from step to step (wherever it rests) > peak on the device. Fits: with a margin of "
        f"{max(c.margin for c in plan.candidates.values()):.0%} and 1 GiB for context and libraries; tight: without "
        "the margin."
    )
    own_micro = plan.recipe.batch.rows
    for micro in sorted({c.setting.micro for c in plan.candidates.values() if c.memory is not None} - {own_micro}):
        taking = [n for n in plan.launches if plan.candidates[n, plan.kind].setting.micro == micro]
        console.print(f"  {', '.join(taking)}: with {micro} rows a micro-batch; {own_micro} do not divide a rank's.")
    if plan.first_size is not None:
        console.print(
            "  batch.micro_size: auto: planned with 1 row, the least; under what is recommended trials begin with "
            f"{plan.first_size}."
        )
    candidates = [plan.candidates[name, plan.kind] for name in plan.launches]
    for reason, names in _by_reason((c.reason, c.name) for c in candidates):
        console.print(f"  {names}: {reason}")
    for candidate in candidates:
        if candidate.verdict in ("tight", "no"):
            console.print(f"  {candidate.name}: {candidate.verdict} ({_largest(candidate, unit)})")
    refused = {kind: variant for kind, variant in plan.variants.items() if isinstance(variant, str)}
    for name, reason in (refused | plan.unread).items():
        console.print(f"  {name}: {reason}")
    each = [candidate.name for candidate in candidates if candidate.launch.sync_each_batch]
    if each:
        console.print(
            f"  {', '.join(each)}: gradients are summed over ranks after each micro-batch, since whole ones do not fit"
        )
    _by_cost(plan, console, unit)
    advice = plan.advice
    if advice.candidate is None:
        console.print(f"\nRecommended: {advice.reason}")
    else:
        more = f" with {' '.join(advice.changes)}" if advice.changes else ""
        console.print(f"\nRecommended: {advice.candidate.launch.file}{more}: {advice.reason}.")
        console.print(f"Peak: {_size(advice.candidate.peak, unit)} {unit}, {_largest(advice.candidate, unit)}.")
    _work(plan, console, energy=energy)


def _by_reason(reasons: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Yields each reason once, with the names that have it; an empty reason is none."""
    by_reason: dict[str, list[str]] = {}
    for reason, name in reasons:
        by_reason.setdefault(reason, []).append(name)
    return ((reason, ", ".join(names)) for reason, names in by_reason.items() if reason)


def _cell(candidate: Candidate, unit: str) -> Text:
    if candidate.memory is None:
        return Text("refused", style=_COLOURS["refused"])
    held = sum(asdict(candidate.memory).values())
    return Text(
        f"{_size(held, unit)} > {_size(candidate.peak, unit)} {candidate.verdict:<5}", style=_COLOURS[candidate.verdict]
    )


def _unit_of(sizes: list[int]) -> str:
    """Returns one unit for all sizes: of tiny networks GiB would show zero."""
    return "GiB" if max(sizes, default=0) >= GIB else "MiB"


def _size(size: float, unit: str) -> str:
    value = size / (GIB if unit == "GiB" else GIB / 1024)
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def _by_cost(plan: Plan, console: Console, unit: str) -> None:
    """Prints the cells that fit, the cheapest first; all run on the same GPUs, so that the fastest costs least."""
    if not plan.times:
        return
    hosts, price = [plan.candidates[key].host for key in plan.times], plan.machines.price
    figures = ["micro", "peak", *["host"] * any(hosts), "a step", "run", *["cost"] * (price is not None)]
    table = plain_table("fits", "way", *figures, right=tuple(figures))
    for key, time in plan.times.items():
        candidate = plan.candidates[key]
        table.add_row(
            *key,
            str(candidate.setting.micro),
            _size(candidate.peak, unit),
            *[_size(candidate.host, unit) if candidate.host else ""] * any(hosts),
            _time(time.step_s),
            "?" if time.hours is None else _time(3600 * time.hours),
            *["?" if time.cost is None else f"{time.cost:,.2f}"] * (price is not None),
        )
    console.print(f"\nThe cheapest first ({unit} a rank; host memory beside it):")
    console.print(table)


def _largest(candidate: Candidate, unit: str) -> str:
    parts = sorted((candidate.parts or {}).items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {_size(size, unit)}" for name, size in parts if size)


def _work(plan: Plan, console: Console, *, energy: bool) -> None:
    work, machines = plan.work, plan.machines
    rows, how = plan.rows
    if rows is not None:
        console.print(f"Length: {plan.recipe.length.epochs:g} epochs of {rows:,} rows, {how}.")
    if work.tokens is None or work.flops is None or work.flops_6nd is None:
        missing = "and its cost " if machines.price is not None else ""
        console.print(
            f"Length: in epochs, so the run's time {missing}take the number of rows: {how}. Give length.tokens here."
        )
    else:
        console.print(
            f"Work: {work.steps:,} steps, {work.tokens:,} tokens, {work.tokens_per_parameter:.2f} a parameter "
            f"(Chinchilla: {CHINCHILLA:g}, for training from nothing); {work.flops:.3g} FLOPs, "
            f"6ND {work.flops_6nd:.3g}"
        )
    time = plan.time
    if time is None:
        if plan.advice.candidate is not None:
            what = "Time: not planned" if machines.price is None else "Time and cost: not planned"
            why = "in fp32, whose rate is not in the table of GPUs"
            console.print(f"{what} {why if machines.gpu.bf16_tflops else 'without a rate; add bf16=TFLOP/s to --gpu'}.")
        return
    line = (
        f"Step: {_time(time.step_s)}, of which arithmetic {_time(time.compute_s)} at {machines.utilisation:.0%} of peak"
    )
    if time.hours is not None and time.gpu_hours is not None:
        line += f"; run: {_time(3600 * time.hours)}"
        line += f", {time.gpu_hours:.3g} GPU hours" if time.gpu_hours >= 1e-3 else ""
    if time.cost is not None:
        line += f", costs {time.cost:,.2f}"
    if energy and time.energy_kwh is not None:
        line += f", {time.energy_kwh:.3g} kWh at {machines.gpu.watts:g} W a GPU"
    console.print(line)
    if time.step_s < _STARTS_S:
        console.print("  Not counted: starting kernels, which can be most of a step of so small a network.")
    for moved in time.moved:
        where = "between machines" if moved.between_machines else "within a machine"
        where += ", measured" if moved.measured else ""
        over = f" over {moved.flow.ranks} ranks, {where}" if moved.flow.ranks > 1 else ""
        console.print(
            f"  {moved.flow.what}{over}: {moved.flow.nbytes / 1e9:.3g} GB a step and rank, {_time(moved.seconds)}, "
            f"{'hidden' if moved.hidden else 'not hidden'} by arithmetic"
        )


def _time(seconds: float) -> str:
    """Formats with three digits, in a unit that needs no exponent."""
    for unit, size in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def print_traced(traced: list[Traced], console: Console) -> None:
    """Prints what was traced, beside what the formulas predict for it."""
    unit = _unit_of([*(trace.peak for trace in traced), *(trace.candidate.peak for trace in traced)])
    console.print(
        f"\nTraced: one step under fake tensors, as a CPU computes it, beside what is predicted above, in {unit}"
    )
    figures = ("micro", "traced", "predicted", "", "CPU s")
    table = plain_table("launch file", *figures, "when", "of which", right=figures)
    for trace in traced:
        candidate, off = trace.candidate, trace.difference
        if off is None:
            continue
        sizes = {name: _size(held, unit) for name, held in trace.parts.items()}
        table.add_row(
            f"{candidate.name} ({candidate.kind}{', recomputed' if candidate.setting.checkpointed else ''})",
            str(candidate.setting.micro),
            _size(trace.peak, unit),
            _size(candidate.peak, unit),
            f"{off:+.1%}",
            f"{trace.cpu_s:.0f}",
            trace.moment,
            ", ".join(f"{name} {size}" for name, size in sizes.items() if size != "0.00"),
        )
    if table.rows:
        console.print(table)
    for reason, names in _by_reason((trace.reason, trace.candidate.name) for trace in traced):
        console.print(f"  {names}: {reason}.")


def as_json(plan: Plan, traced: list[Traced] | None = None) -> str:
    """Returns a plan as JSON, with sizes in bytes."""
    chosen = plan.advice.candidate
    report: dict[str, Any] = {
        "kind": plan.kind,
        "machines": asdict(plan.machines),
        "variants": {
            kind: {"refused": v} if isinstance(v, str) else {"parameters": v.parameters, "trained": v.trained}
            for kind, v in plan.variants.items()
        },
        "cells": [
            {**_facts(entry), "time": asdict(plan.times[key]) if key in plan.times else None}
            for key, entry in plan.candidates.items()
        ],
        "advice": {
            "launch_file": chosen.launch.file if chosen is not None else None,
            "changes": list(plan.advice.changes),
            "reason": plan.advice.reason,
            "cell": _facts(chosen) if chosen is not None else None,
        },
        "work": {**asdict(plan.work), "tokens_per_parameter": plan.work.tokens_per_parameter, "chinchilla": CHINCHILLA},
        "time": asdict(plan.time) if plan.time is not None else None,
        "first_size": plan.first_size,
        "rows": plan.rows,
        "unread": plan.unread,
    }
    if traced is not None:
        report["traced"] = [_traced(entry) for entry in traced]
    return json.dumps(report, indent=2)


def _traced(traced: Traced) -> dict[str, Any]:
    facts = vars(traced).copy()
    candidate = facts.pop("candidate")
    return {
        "launch": candidate.name,
        "kind": candidate.kind,
        **asdict(candidate.setting),
        "peak": traced.peak if traced.parts else None,
        "predicted": candidate.peak,
        "difference": traced.difference,
        **facts,
    }


def _facts(candidate: Candidate) -> dict[str, Any]:
    facts = {key: value for key, value in vars(candidate).items() if key not in ("name", "setting")}
    launch = candidate.launch
    return {
        **facts,
        "launch": candidate.name,
        "ranks": launch.num_processes,
        "memory": asdict(candidate.memory) if candidate.memory is not None else None,
        "peak": candidate.peak,
        "needed": candidate.needed,
        "sync_each_batch": launch.sync_each_batch,
    }
