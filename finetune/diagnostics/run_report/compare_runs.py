"""Values of `runs.html`, the page of several runs: final figures side by side, and the keys that differ."""

import json
import re
from collections.abc import Sequence
from typing import Any

from finetune.checkpoint.run_history import RunHistory
from finetune.config.provenance import flat
from finetune.diagnostics.run_report.figures import format_duration, format_number, format_progress
from finetune.diagnostics.run_report.one_run import last_loss, model_name, peak_memory, run_cost

# Keys that differ between any two runs and explain nothing.
_OWN = ("output.dir", "runs.output_dtypes", "launch.ds_place")
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?$")
_LAUNCH = ("launch", "runs", "precision", "micro_size", "gradients", "versions", "git_commit", "kernels", "base")


def values_of_runs(runs: Sequence[tuple[str, RunHistory]], price: float | None) -> dict[str, Any]:
    """Returns the values that the page shows.

    Args:
        price: Price of a GPU (or a process on CPUs) and hour.
    """
    best = {name: found for name, run in runs if (found := run.best("validation_loss")) is not None}
    lowest = min(best, key=lambda name: best[name][1]) if len(best) > 1 else ""
    rows = [
        [
            name,
            f"{run.status} {format_progress(run.step, run.num_steps)}",
            f"{format_number(best[name][1])} (step {best[name][0]:,})" if name in best else "–",
            format_number(last_loss(run)),
            format_number(run.tokens_per_s, 3),
            format_duration(run.duration),
            run_cost(run, price)[0],
            peak_memory(run)[0],
            run.launch,
            model_name(run),
        ]
        for name, run in runs
    ]
    return {
        "names": [name for name, _ in runs],
        "winner": f"{lowest} has the lowest validation loss, {format_number(best[lowest][1])}" if lowest else "",
        "rows": rows,
        "cost": run_cost(runs[-1][1], price)[1],
        "memory": " or ".join(dict.fromkeys(peak_memory(run)[1] for _, run in runs)),
        "recipe": differing_keys([run.recipe for _, run in runs]),
        "launch": differing_keys([{key: run.facts[key] for key in _LAUNCH if key in run.facts} for _, run in runs]),
        "samples": [(name, run.samples[-1]) for name, run in runs if run.samples],
    }


def differing_keys(trees: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns the keys, with dots, whose values are not the same in all trees, and these values."""
    flattened = [flat(tree) for tree in trees]
    keys = dict.fromkeys(key for values in flattened for key in values if not key.startswith(_OWN))
    found = {key: [_in_words(values.get(key)) for values in flattened] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _in_words(value: Any) -> str:
    if isinstance(value, str) and _COMMIT.match(value):
        return value[:10] + value[40:]
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
