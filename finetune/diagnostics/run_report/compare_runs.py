"""Texts and tables of the page of several runs: final figures side by side, and the keys that differ."""

import json
import re
from collections.abc import Sequence
from typing import Any

from finetune.checkpoint.run_history import RunHistory
from finetune.config.provenance import flat
from finetune.diagnostics.run_report import figures
from finetune.diagnostics.run_report.one_run import last_loss, model_name, peak
from finetune.diagnostics.run_report.page_parts import Section, Summary, Table, Text

# Keys that differ between any two runs and explain nothing.
_OWN = ("output.dir", "runs.output_dtypes", "launch.ds_place")
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?$")
_LAUNCH = ("launch", "runs", "precision", "micro_size", "gradients", "versions", "git_commit", "kernels", "base")


def summary_of_runs(runs: Sequence[tuple[str, RunHistory]], price: float | None) -> Summary:
    """Returns the final figures of the runs, a line each.

    Args:
        price: Price of a GPU (or a process on CPUs) and hour.
    """
    losses, rows = {}, []
    for name, run in runs:
        loss = "–"
        if (best := run.best("validation_loss")) is not None:
            losses[name] = best[1]
            loss = f"{figures.number(best[1])} (step {best[0]:,})"
        of = f"/{run.num_steps:,}" if run.num_steps is not None else ""
        spent, what = figures.cost(price, run.process_hours, run.facts.get("runs", {}).get("device", ""))
        rows.append(
            (
                name,
                f"{run.status} {run.step:,}{of}",
                loss,
                figures.number(last_loss(run)),
                figures.number(run.tokens_per_s, 3),
                figures.duration(run.duration),
                spent,
                peak(run)[0],
                run.launch,
                model_name(run),
            )
        )
    memory = " or ".join(dict.fromkeys(peak(run)[1] for _, run in runs))
    head = ("run", "status", "best validation loss", "last loss", "targets/s", "time", what, memory, "launch", "model")
    said = ""
    if len(losses) > 1:
        lowest = min(losses, key=lambda name: losses[name])
        said = f"{lowest} has the lowest validation loss, {figures.number(losses[lowest])}"
    return Summary(f"{len(runs)} runs", said=said, table=Table(head, rows, numbers=range(2, 8)))


def sections_of_runs(runs: Sequence[tuple[str, RunHistory]]) -> list[Section]:
    """Returns what follows the charts: the keys that differ, and the last samples."""
    launches = [{key: run.facts[key] for key in _LAUNCH if key in run.facts} for _, run in runs]
    parts, notes = [], []
    for title, trees, same in (
        ("Recipe", [run.recipe for _, run in runs], "The recipes are the same, but for output.dir."),
        ("Launch, and what ran", launches, "They ran alike."),
    ):
        if found := differences(trees):
            rows = [(key, *values) for key, values in found.items()]
            parts.append(Table(("", *(name for name, _ in runs)), rows, title=title))
        else:
            notes.append(same)
    last = [(name, run.samples[-1]) for name, run in runs if run.samples]
    samples = [Text(f"{name}, step {sample.step:,}", sample.text) for name, sample in last]
    found_sections = [Section("differences", "What differs", parts, notes)]
    return [*found_sections, Section("samples", "Last samples", samples)] if samples else found_sections


def differences(trees: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns the keys, with dots, whose values are not the same in all trees, and these values."""
    flattened = [flat(tree) for tree in trees]
    keys = dict.fromkeys(key for values in flattened for key in values if not key.startswith(_OWN))
    found = {}
    for key in keys:
        values = [_shown(values[key]) if key in values else "–" for values in flattened]
        if len(set(values)) > 1:
            found[key] = values
    return found


def _shown(value: Any) -> str:
    if isinstance(value, str) and _COMMIT.match(value):
        return value[:10] + value[40:]
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "–" if value is None else str(value)
