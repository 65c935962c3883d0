"""The page of one run, or of several: what is written around the charts."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.checkpoint.run_history import RunHistory
from finetune.diagnostics.run_report import charts
from finetune.diagnostics.run_report.charts import MOST_POINTS, Chart
from finetune.diagnostics.run_report.compare_runs import comparison
from finetune.diagnostics.run_report.html_parts import Html, join, section, tag, text
from finetune.diagnostics.run_report.one_run import sections, summary

GENERATOR = "finetune report"
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Content:
    """What a page shows; a live page gets it anew again and again."""

    title: str
    body: Html
    """Of `main`."""
    charts: list[Chart]
    data: dict[str, object]
    """For `report.js`."""


def content(
    runs: Sequence[tuple[str, RunHistory]],
    *,
    price: float | None = None,
    predictions: Sequence["str | int | None"] = (),
    live: bool = False,
) -> Content:
    """What the page of these runs shows.

    Args:
        runs: Each with its name.
        price: Of a GPU (or a process on CPUs) and hour.
        predictions: For each run the peak that a plan predicts in bytes, or why there is none.
        live: Whether the page refreshes by itself.
    """
    drawn = charts.charts_of(runs)
    first, rest = [c for c in drawn if c.wide], [c for c in drawn if not c.wide]
    shown = join([_card(chart) for chart in first]) if first else tag("p", _no_loss(runs), class_="muted")
    top = tag("div", shown, class_="charts")
    small = section("Over the run", tag("div", *[_card(chart) for chart in rest], class_="charts")) if rest else ""
    if len(runs) == 1:
        name, run = runs[0]
        prediction = predictions[0] if predictions else None
        title = f"{name} – finetune run"
        parts = [summary(name, run, price, live=live), _tools(), top, small, *sections(run, prediction)]
    else:
        title = f"{len(runs)} runs – finetune"
        head, tail = comparison(runs, price)
        parts = [head, _tools(), top, tail, small]
    return Content(title, join([*parts, _footer(runs)]), drawn, charts.to_json(drawn, runs))


def page(shown: Content, *, refresh_s: float | None = None) -> str:
    """The whole page as one file that needs no other, and no network.

    Args:
        refresh_s: Seconds between two refreshes of a live page.
    """
    plotly, script = plotly_script(), (_HERE / "report.js").read_text(encoding="utf-8")
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    live = "" if refresh_s is None else f' data-refresh="{refresh_s:g}"'
    connect = "'none'" if refresh_s is None else "'self'"
    # Scripts other than these two do not run, wherever they come from.
    scripts = " ".join(f"'sha256-{_sha256(code)}'" for code in (plotly, script))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en"{live}>
<head>
<meta charset="utf-8">
<meta name="generator" content="{GENERATOR}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{text(shown.title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<button id="theme" type="button" title="Switch between dark and light">dark / light</button>
<main>
{shown.body}
</main>
<script id="report-data" type="application/json">{json_in_html(shown.data)}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def plotly_script() -> str:
    """Plotly's JavaScript, from its Python package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def json_in_html(value: object) -> str:
    """JSON that can stand in a script element: no text in it can end that."""
    said = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return said.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sha256(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def _no_loss(runs: Sequence[tuple[str, RunHistory]]) -> str:
    logged = any(len(run.training["step"]) for _, run in runs)
    return "No logged step has a loss that is a number." if logged else "No step is logged yet."


def _tools() -> Html:
    buttons = [
        tag("button", name, type="button", data_axis=key, aria_pressed="true" if key == "step" else "false")
        for key, name in {"step": "steps", "tokens": "tokens", "time": "time"}.items()
    ]
    return tag("div", tag("span", "Curves over", class_="muted small"), *buttons, class_="tools")


def _card(chart: Chart) -> Html:
    button = ""
    if chart.logarithmic:
        button = tag("button", "log", type="button", data_log=chart.key, aria_pressed="false", title="Logarithmic")
    head = tag("div", tag("h3", chart.title), button, class_="head")
    drawn = tag("div", class_="chart", data_chart=chart.key, role="img", aria_label=chart.title)
    return tag("div", head, drawn, class_="card wide" if chart.wide else "card")


def _footer(runs: Sequence[tuple[str, RunHistory]]) -> Html:
    notes = [
        "Training time leaves out evaluations, samples, checkpoints that a step waited for, and steps that a restart "
        "took again."
    ]
    if any(len(run.training["step"]) > MOST_POINTS for _, run in runs):
        notes.append(
            f"Curves have at most {MOST_POINTS:,} points here: of each stretch the lowest and the highest value."
        )
    for name, run in runs:
        if run.damaged_lines:
            notes.append(f"{run.damaged_lines:,} lines of {name} could not be read, and are left out.")
    return tag("p", " ".join(notes), class_="muted small")
