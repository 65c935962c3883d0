"""Reads finished runs, compares them step by step and tensor by tensor at the end, and reports the differences."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from finetune.checkpoint import row_ledger, run_facts
from finetune.data.class_labels import some
from finetune.utils.atomic_files import Lines
from finetune.utils.console import plain_table
from finetune.utils.errors import CheckpointError, RecipeError

# Steps that a table shows; of more, some that lie evenly between the first and the last.
_MOST_STEPS = 24

_NEEDED = ("length", "identity", "runs", "precision")  # of `run.json`
_COMPARED = {"loss", "lr", "grad_norm", "tokens", "step_s"}

# Learning rates are a pure function of the step; another machine's cosine may differ in its last digit.
_SAME_RATE = 1e-12

# A sum of losses of at least 8 that was rounded to bf16, which keeps 8 binary digits, is a multiple of 1/16.
_ROUNDED_TO = 1 / 16

# First steps that are this close differ by rounding alone, which grows by less than this factor from one logged step to
# the next (measured with one step in ten logged: 20). A fault is there at once.
_ROUNDING, _GROWS = 3e-6, 100

# At least this many sums rule out chance: an fp32 sum is such a multiple about once in a thousand times.
_FEWEST_SUMS = 3


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended."""

    name: str
    """Name in tables."""
    directory: Path
    facts: dict[str, Any]
    """`run.json`."""
    steps: dict[int, dict[str, Any]]
    """The logged steps, counted from 1."""
    rows: dict[int, int]
    """The checksum of the rows that each step read; empty without a ledger."""
    damaged: dict[str, int]
    """Lines that cannot be read, by file."""

    @property
    def last(self) -> int:
        return int(self.facts["length"]["num_steps"])

    @property
    def weights(self) -> list[Path]:
        """The files of the final weights; none if the recipe wrote no model."""
        return sorted((self.directory / "model").glob("*.safetensors"))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second over all steps but the first, which has one-time work; None if no others are logged."""
        lines = [self.steps[step] for step in sorted(self.steps)]
        seconds = sum(line["step_s"] * (line["step"] - before["step"]) for before, line in itertools.pairwise(lines))
        return (lines[-1]["tokens"] - lines[0]["tokens"]) / seconds if seconds > 0 else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Peak of training on the fullest rank; None if it was not measured."""
        measured = self.facts.get("peak_memory")
        return measured["measured"] / 2**30 if measured else None


def read_finished(directory: Path, name: str | None = None) -> FinishedRun:
    """Reads a run that has ended.

    Raises:
        RecipeError: If there is none, or it has not ended.
        CheckpointError: If its files cannot be read.
    """
    facts = run_facts.read_facts(directory)
    with CheckpointError.explaining(f"{directory}: metrics or ledger cannot be read", "", OSError):
        metrics = run_facts.read_metrics(directory)
        ledger = directory / row_ledger.LEDGER
        used = row_ledger.read_ledger(directory) if ledger.exists() else Lines([], {}, [])
    rows = {line["step"] + 1: line["rows"] for line in used.whole if "step" in line}
    lines = [line for line in metrics.whole if "grad_norm" in line]
    steps = {line["step"]: line for line in lines if line.keys() >= _COMPARED}
    if missing := [key for key in _NEEDED if key not in facts]:
        raise CheckpointError(f"{directory / run_facts.RUN} has no {', '.join(missing)}. Restore it from a copy.")
    if "finished" not in facts or not steps:
        raise RecipeError(
            f"{directory} holds a run that has not come to its end, or has trained nothing: only finished runs are "
            "compared. Start its command again, and it resumes."
        )
    lost = len(metrics.damaged) + len(lines) - len(steps)
    damaged = {run_facts.METRICS: lost, row_ledger.LEDGER: len(used.damaged)}
    return FinishedRun(name or directory.name, directory, facts, steps, rows, damaged)


@dataclass(frozen=True)
class PathTolerance:
    """Largest relative differences that are normal; see docs/parity.md."""

    kind: str
    loss: float
    first_norm: float
    """First gradient norm: nothing that was rounded before has grown in it."""
    norm: float
    weights: float


_FP32 = PathTolerance("fp32", 1e-4, 1e-4, 1e-4, 1e-4)
_HALF = PathTolerance("16 bit", 1e-2, 1e-3, 1e-2, 1e-2)
# A matrix that begins at zero is all updates: what bf16 rounds otherwise is a large part of it.
_HALF_ADAPTERS = PathTolerance("adapters in 16 bit", 5e-3, 1e-3, 0.1, 0.2)


def tolerance_between(one: dict[str, Any], other: dict[str, Any]) -> PathTolerance:
    """Returns the tolerance for two runs of these `run.json`, by the coarser of their precisions."""
    if one["precision"] == other["precision"] == "fp32":
        return _FP32
    adapters = all(facts["identity"].get("lora.rank") is not None for facts in (one, other))
    return _HALF_ADAPTERS if adapters else _HALF


@dataclass(frozen=True)
class Comparison:
    """Differences between a run and the reference."""

    one: FinishedRun
    other: FinishedRun
    allowed: PathTolerance
    steps: dict[int, dict[str, float]]
    """Relative differences of `loss` and `grad_norm`, by step, counted from 1."""
    first: str | None
    """The first step that differs, and in what."""
    tensor: tuple[str, float] | None
    """The tensor that is farthest apart at the end, and how far; None where weights are not compared."""
    reasons: list[str]
    """Reasons why the two took different paths; none if they did not."""
    notes: list[str]
    """Other differences, and what was not compared."""

    @property
    def holds(self) -> bool:
        """True if the two took one path."""
        return not self.reasons

    def worst(self, key: str) -> float | None:
        """Returns the largest relative difference of `loss` or `grad_norm` at any step; None if no step is common."""
        return max((differences[key] for differences in self.steps.values()), default=None)


def compare_runs(one: FinishedRun, other: FinishedRun) -> Comparison:
    """Compares two runs at the steps that both have logged, and at the end."""
    allowed = tolerance_between(one.facts, other.facts)
    common = sorted(one.steps.keys() & other.steps.keys())
    steps = {
        step: {key: relative_difference(one.steps[step][key], other.steps[step][key]) for key in ("loss", "grad_norm")}
        for step in common
    }
    first = next((text for step in common for text in _differences(one, other, step, steps[step], allowed)), None)
    reasons = [first] if first is not None else []
    if not common:
        reasons.append("no step is logged in both; run them with log.every_steps=1")
    if one.last != other.last:
        reasons.append(f"{one.name} ended at step {one.last}, {other.name} at step {other.last}")
    if _rounded(other) and not _rounded(one):
        reasons.append(f"the losses of {other.name} are rounded: each sum is a whole number of sixteenths, as in bf16")
    notes = list(_notes(one, other))
    tensor: tuple[str, float] | None = None
    if not (one.weights and other.weights):
        notes.append("weights are not compared: one of the runs has no folder `model` with any")
    elif one.last == other.last:
        distances, lacking = _distances(one, other)
        if lacking:
            reasons.append(f"the models have other tensors, or of other shapes: {some(lacking)}")
        apart = {name: far for name, far in distances.items() if far > allowed.weights}
        if inert := _inert(one, other, apart):
            notes.append(_effect_of_eps(one, {name: apart[name] for name in inert}))
            distances = {name: far for name, far in distances.items() if name not in inert}
        tensor = max(distances.items(), key=itemgetter(1), default=None)
        if tensor is not None and tensor[1] > allowed.weights:
            reasons.append(f"tensor {tensor[0]} is {tensor[1]:.1e} apart at the end ({allowed.weights:.0e} allowed)")
    far = [max(differences.values()) for differences in steps.values()]
    over = next((index for index, value in enumerate(far) if not value <= allowed.norm), 0)
    # The first step that is too far apart follows from small differences that grew before it.
    if allowed is _FP32 and over > 0 and far[0] <= _ROUNDING and far[over] <= _GROWS * far[over - 1]:
        notes.append(
            "the runs begin alike and part slowly: rounding that grows over a long run looks like this; see "
            "`finetune docs parity`, long runs"
        )
    over_at = [at for at, d in steps.items() if d["loss"] > allowed.loss or d["grad_norm"] > allowed.norm]
    if allowed is not _FP32 and over_at and all(_is_spike(one, at) and steps[at]["loss"] <= 1e-3 for at in over_at):
        notes.append(
            "only gradient norms that stand out among their neighbours are apart, and no loss by more than 1e-3: "
            "what 16 bit rounds shows most there; compare in fp32 to be sure"
        )
    return Comparison(one, other, allowed, steps, first, tensor, reasons, notes)


def _is_spike(run: FinishedRun, step: int) -> bool:
    """True if the gradient norm of a step is half again as large as those of the steps beside it."""
    beside = [run.steps[other]["grad_norm"] for other in (step - 1, step + 1) if other in run.steps]
    return bool(beside) and float(run.steps[step]["grad_norm"]) > 1.5 * max(beside)


def _notes(one: FinishedRun, other: FinishedRun) -> Iterator[str]:
    """Yields what differs without parting the paths, or is left out."""
    for run in (one, other):
        for file, lines in run.damaged.items():
            if lines:
                yield f"{lines:,} damaged line(s) of {run.directory / file} are left out"
    identity, identity_of_other = one.facts["identity"], other.facts["identity"]
    keys = sorted(identity.keys() | identity_of_other.keys())
    if changed := [key for key in keys if identity.get(key) != identity_of_other.get(key)]:
        yield f"the recipes differ in {', '.join(changed)}"
    for key in ("parameter_dtypes", "model_dtypes", "reduce_dtype", "output_dtypes"):
        left, right = (run.facts["runs"][key] for run in (one, other))
        # One process sums nothing over processes.
        if left != right and None not in (left, right):
            left, right = (", ".join(dtypes) if isinstance(dtypes, list) else dtypes for dtypes in (left, right))
            yield f"{key}: {left} in {one.name}, {right} in {other.name}"


def _effect_of_eps(run: FinishedRun, apart: dict[str, float]) -> str:
    facts, worst = run.facts["identity"], max(apart, key=lambda name: apart[name])
    more = f" (the farthest of {len(apart)} such biases)" if len(apart) > 1 else ""
    eps = f"eps {facts['optim.args.eps']:g}" if "optim.args.eps" in facts else "its default eps"
    return (
        f"tensor {worst} is {apart[worst]:.1e} apart at the end{more}, which is no drift: the network computes the "
        "same with any value in between and far beyond. Its gradient is 0 but for rounding, and "
        f"{facts.get('optim.name')} with {eps} divides rounding by rounding. With optim.args.eps=1e-6 it stays"
    )


def relative_difference(left: float | None, right: float | None) -> float:
    """Returns the difference as a share of the first value; infinite if just one is None, which is not finite."""
    if left is None or right is None:
        return 0.0 if left is right else math.inf
    return abs(left - right) / max(abs(left), 1e-30)


def _differences(
    one: FinishedRun, other: FinishedRun, step: int, apart: dict[str, float], allowed: PathTolerance
) -> Iterator[str]:
    """Yields the differences in a step, causes before their effects."""
    left, right = one.steps[step], other.steps[step]

    def said(what: str, of: str, to: str) -> str:
        return f"step {step}: {what} {of} in {one.name}, {to} in {other.name}"

    if step in one.rows and step in other.rows and one.rows[step] != other.rows[step]:
        yield said("the checksum of the rows read is", f"{one.rows[step]}", f"{other.rows[step]}")
    if left["tokens"] != right["tokens"]:
        yield said("targets so far are", f"{left['tokens']:,}", f"{right['tokens']:,}")
    if relative_difference(left["lr"], right["lr"]) > _SAME_RATE:
        yield said("the learning rate is", f"{left['lr']:.6g}", f"{right['lr']:.6g}")
    for key, limit in {"loss": allowed.loss, "grad_norm": allowed.first_norm if step == 1 else allowed.norm}.items():
        if not apart[key] <= limit:
            values = (str(value) if value is None else f"{value:.7g}" for value in (left[key], right[key]))
            yield f"{said(f'{key} is', *values)}: {apart[key]:.1e} apart ({limit:.0e} allowed)"


def _rounded(run: FinishedRun) -> bool:
    """True if every loss looks as if its sum had gone through bf16, even within the tolerance."""
    tokens = {0: 0} | {step: line["tokens"] for step, line in run.steps.items()}
    sums = [
        line["loss"] * (tokens[step] - tokens[step - 1]) / _ROUNDED_TO
        for step, line in run.steps.items()
        if step - 1 in tokens and line["loss"] is not None
    ]
    return len(sums) >= _FEWEST_SUMS and all(abs(value - round(value)) < 1e-6 for value in sums)


def _distances(one: FinishedRun, other: FinishedRun) -> tuple[dict[str, float], list[str]]:
    """Returns the distance of each tensor, and the names of those without a counterpart. Reads a pair at a time."""
    with ExitStack() as opened:
        left, right = _files(one, opened), _files(other, opened)
        distances, lacking = {}, sorted(left.keys() ^ right.keys())
        for name in sorted(left.keys() & right.keys()):
            ours, theirs = left[name].get_tensor(name), right[name].get_tensor(name)
            if ours.shape != theirs.shape:
                lacking.append(name)
            else:
                distances[name] = tensor_distance(ours, theirs)
    return distances, lacking


def _files(run: FinishedRun, opened: ExitStack) -> dict[str, Any]:
    """Returns for each tensor of the final weights the file that holds it, open as long as `opened` is."""
    files = [opened.enter_context(safe_open(file, framework="pt")) for file in run.weights]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def tensor_distance(one: Any, other: Any) -> float:
    """Returns the norm of two tensors' difference by the first one's norm; infinite if a number is not finite.

    Elements below 1e-3 on average count as that large: biases whose gradient is zero but for rounding, such as
    those of attention's keys, hold nothing but noise.
    """
    one, other = one.double(), other.double()
    size = max(one.norm().item(), 1e-3 * one.numel() ** 0.5, 1e-30)
    apart = float((one - other).norm().item() / size)
    return apart if math.isfinite(apart) else math.inf


# Largest relative change of the scores if a bias without effect is moved by 1 on average. Rounding alone makes 1e-6.
_NOTHING = 1e-3


def _inert(one: FinishedRun, other: FinishedRun, names: Collection[str]) -> set[str]:
    """Returns the biases among these tensors that can be moved far towards the other run's value without effect.

    Far, so that even a small part of the difference shows its effect. None where the network cannot be opened.
    """
    biases = [name for name in names if name.endswith("bias")]
    folder = one.directory / "model"
    if not biases or not (folder / "config.json").is_file():
        return set()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    cls: Any = getattr(transformers, (config.architectures or ["none"])[0], None)
    if cls is None:
        return set()
    network = cls.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    parameters = dict(network.named_parameters())
    ids = (torch.arange(2 * 24).view(2, 24) * 5 + 1) % config.get_text_config().vocab_size
    inert = set()
    with torch.no_grad(), ExitStack() as opened:
        files, before = _files(other, opened), network(input_ids=ids)[0]
        for name in parameters.keys() & set(biases):
            away = files[name].get_tensor(name).float() - parameters[name]
            moved = {name: parameters[name] + away / away.square().mean().sqrt()}
            after = torch.func.functional_call(network, moved, kwargs={"input_ids": ids})[0]
            if (after - before).norm() / before.norm() <= _NOTHING:
                inert.add(name)
    return inert


def print_report(comparisons: Sequence[Comparison], console: Console) -> None:
    """Prints tables and a verdict. All comparisons have the same reference."""
    console.print(_runs_table(comparisons))
    console.print(
        "rank 0's shares of parameters and optimiser; the fullest rank's peak; the largest relative differences"
    )
    console.print()
    console.print(_steps_table(comparisons))
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


def _runs_table(comparisons: Sequence[Comparison]) -> Table:
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


def _steps_table(comparisons: Sequence[Comparison]) -> Table:
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
