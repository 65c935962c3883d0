"""The page of one run, or of several: charts, and what stands around them, in the templates of this folder."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from finetune.checkpoint.run_history import RunHistory
from finetune.config.provenance import flat
from finetune.diagnostics.run_report import run_summary
from finetune.diagnostics.run_report.charts import MOST_POINTS, Chart, charts_as_json, charts_of
from finetune.export import evaluate_harness

GENERATOR = "finetune report"
_HERE = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
)
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
_TEMPLATES.globals["run_summary"] = run_summary
_TEMPLATES.filters |= {
    "bytes": run_summary.format_bytes,
    "duration": run_summary.format_duration,
    "number": run_summary.format_number,
    "time": run_summary.format_time,
    "metric": evaluate_harness.metric_of,
    "sha256": lambda script: base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    "yaml": lambda recipe: yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).rstrip(),
}

# Keys that differ between any two runs and explain nothing.
_OWN = ("output.dir", "runs.output_dtypes", "launch.ds_place")
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?$")
_LAUNCH = ("launch", "runs", "precision", "micro_size", "gradients", "versions", "git_commit", "kernels", "base")


@dataclass(frozen=True)
class Content:
    """Content of a page; a live page gets it anew again and again."""

    title: str
    body: str
    """HTML of `main`."""
    charts: list[Chart]
    data: dict[str, Any]
    """Charts for `report.js`."""


def content_of(
    runs: Sequence[tuple[str, RunHistory]],
    *,
    price: float | None = None,
    prediction: str | int | None = None,
    live: bool = False,
) -> Content:
    """Returns the content of the page of these runs.

    Args:
        price: Price of a GPU (or a process on CPUs) and hour.
        prediction: Of a single run, bytes of the peak that a plan predicts, or why there are none.
        live: True if the page refreshes by itself.
    """
    if len(runs) == 1:
        name, run = runs[0]
        title, template = f"{name} – finetune run", "run.html"
        data = run.facts.get("data") or {}
        values = {
            "run": run,
            "price": price,
            "prediction": prediction,
            "benchmarks": evaluate_harness.read_results(run.directory),
            "data": data,
            "sides": {side: data[side] for side in ("train", "validation") if isinstance(data.get(side), dict)},
        }
    else:
        name = f"{len(runs)} runs"
        title, template, values = f"{name} – finetune", "runs.html", _values_of_runs(runs, price)
    charts = charts_of(runs)
    body = _TEMPLATES.get_template(template).render(
        title=name,
        runs=runs,
        charts=charts,
        live=live,
        most_logged=max(len(run.training["step"]) for _, run in runs),
        most_points=MOST_POINTS,
        **values,
    )
    return Content(title, body, charts, charts_as_json(charts, runs))


def _values_of_runs(runs: Sequence[tuple[str, RunHistory]], price: float | None) -> dict[str, Any]:
    """Returns the values of `runs.html`: final figures side by side, and the keys that differ."""
    best = {name: evaluation for name, run in runs if (evaluation := run.best("validation_loss")) is not None}
    rows = [
        [
            name,
            f"{run.status} {run_summary.format_progress(run.step, run.num_steps)}",
            f"{run_summary.format_number(best[name][1])} (step {best[name][0]:,})" if name in best else "–",
            run_summary.format_number(run_summary.last_loss(run)),
            run_summary.format_number(run.tokens_per_s, 3),
            run_summary.format_duration(run.duration),
            run_summary.run_cost(run, price)[0],
            run_summary.peak_memory(run)[0],
            run.launch,
            run_summary.model_name(run),
        ]
        for name, run in runs
    ]
    return {
        "names": [name for name, _ in runs],
        "winner": _winner({name: loss for name, (_, loss) in best.items()}),
        "rows": rows,
        "cost": run_summary.run_cost(runs[-1][1], price)[1],
        "memory": " or ".join(dict.fromkeys(run_summary.peak_memory(run)[1] for _, run in runs)),
        "recipe": differing_keys([run.recipe for _, run in runs]),
        "launch": differing_keys([{key: run.facts[key] for key in _LAUNCH if key in run.facts} for _, run in runs]),
        "samples": [(name, run.samples[-1]) for name, run in runs if run.samples],
    }


def _winner(losses: Mapping[str, float]) -> str:
    """Returns which of several runs has the lowest loss, or which have it alike to the digits that are shown."""
    if len(losses) < 2:
        return ""
    figure = run_summary.format_number(min(losses.values()))
    *first, last = (name for name, loss in losses.items() if run_summary.format_number(loss) == figure)
    if not first:
        return f"{last} has the lowest validation loss, {figure}"
    which = "lowest" if len(first) + 1 < len(losses) else "same"
    return f"{', '.join(first)} and {last} have the {which} validation loss, {figure}"


def differing_keys(trees: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns the keys, with dots, whose values are not the same in all trees, and these values."""
    flattened = [flat(tree) for tree in trees]
    keys = dict.fromkeys(key for values in flattened for key in values if not key.startswith(_OWN))
    by_key = {key: [_in_words(values.get(key)) for values in flattened] for key in keys}
    return {key: values for key, values in by_key.items() if len(set(values)) > 1}


def _in_words(value: Any) -> str:
    if isinstance(value, str) and _COMMIT.match(value):
        return value[:10] + value[40:]
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def page_of(shown: Content, *, refresh_s: float | None = None) -> str:
    """Returns the page as one file that needs no other, and no network; a live one refreshes each `refresh_s`."""
    from plotly.offline import get_plotlyjs

    return _TEMPLATES.get_template("page.html").render(
        shown=shown,
        generator=GENERATOR,
        refresh_s=refresh_s,
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        script=(_HERE / "report.js").read_text(encoding="utf-8"),
    )
