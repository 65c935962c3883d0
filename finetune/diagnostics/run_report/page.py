"""The page of one run, or of several: charts, and what stands around them, in the templates of this folder."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from finetune.checkpoint.run_history import RunHistory
from finetune.diagnostics.run_report import figures, one_run
from finetune.diagnostics.run_report.charts import MOST_POINTS, Chart, charts_as_json, charts_of
from finetune.diagnostics.run_report.compare_runs import values_of_runs
from finetune.export import evaluate_harness

GENERATOR = "finetune report"
_HERE = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
)
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
_TEMPLATES.globals["one_run"] = one_run
_TEMPLATES.filters |= {
    "bytes": figures.format_bytes,
    "duration": figures.format_duration,
    "number": figures.format_number,
    "time": figures.format_time,
    "metric": evaluate_harness.metric_of,
    "sha256": lambda script: base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    "yaml": lambda recipe: yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).rstrip(),
}


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
        runs: Names and runs.
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
        title, template, values = f"{name} – finetune", "runs.html", values_of_runs(runs, price)
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


def page_of(shown: Content, *, refresh_s: float | None = None) -> str:
    """Returns the whole page as one file that needs no other, and no network.

    Args:
        refresh_s: Seconds between two refreshes of a live page.
    """
    from plotly.offline import get_plotlyjs

    return _TEMPLATES.get_template("page.html").render(
        shown=shown,
        generator=GENERATOR,
        refresh_s=refresh_s,
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        script=(_HERE / "report.js").read_text(encoding="utf-8"),
    )
