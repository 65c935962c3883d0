"""The page of one run, or of several: charts, and what stands around them, in the templates of this folder."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from finetune.checkpoint.run_history import RunHistory
from finetune.diagnostics.run_report import charts, figures
from finetune.diagnostics.run_report.charts import MOST_POINTS, Chart
from finetune.diagnostics.run_report.compare_runs import sections_of_runs, summary_of_runs
from finetune.diagnostics.run_report.one_run import sections_of_run, summary_of_run

GENERATOR = "finetune report"
_HERE = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
)


@dataclass(frozen=True)
class Content:
    """Content of a page; a live page gets it anew again and again."""

    title: str
    body: str
    """HTML of `main`."""
    charts: list[Chart]
    data: dict[str, object]
    """Charts for `report.js`."""


def content_of(
    runs: Sequence[tuple[str, RunHistory]],
    *,
    price: float | None = None,
    prediction: "str | int | None" = None,
    live: bool = False,
) -> Content:
    """Returns the content of the page of these runs.

    Args:
        runs: Names and runs.
        price: Price of a GPU (or a process on CPUs) and hour.
        prediction: Of a single run, bytes of the peak that a plan predicts, or why there are none.
        live: True if the page refreshes by itself.
    """
    drawn = charts.charts_of(runs)
    if len(runs) == 1:
        name, run = runs[0]
        title, summary, sections = (
            f"{name} – finetune run",
            summary_of_run(name, run, price),
            sections_of_run(run, prediction),
        )
    else:
        title, summary, sections = f"{len(runs)} runs – finetune", summary_of_runs(runs, price), sections_of_runs(runs)
    logged = any(len(run.training["step"]) for _, run in runs)
    body = _TEMPLATES.get_template("body.html").render(
        summary=summary,
        charts=drawn,
        sections=sections,
        read_at=figures.moment(runs[0][1].read_at) if live else "",
        no_loss="No logged step has a loss that is a number." if logged else "No step is logged yet.",
        footer=" ".join(_footnotes(runs)),
    )
    return Content(title, body, drawn, charts.to_json(drawn, runs))


def page_of(shown: Content, *, refresh_s: float | None = None) -> str:
    """Returns the whole page as one file that needs no other, and no network.

    Args:
        refresh_s: Seconds between two refreshes of a live page.
    """
    plotly, script = plotly_script(), (_HERE / "report.js").read_text(encoding="utf-8")
    connect = "'none'" if refresh_s is None else "'self'"
    # Scripts other than these two do not run, wherever they come from.
    scripts = " ".join(f"'sha256-{_sha256(code)}'" for code in (plotly, script))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return _TEMPLATES.get_template("page.html").render(
        shown=shown,
        generator=GENERATOR,
        refresh_s=refresh_s,
        policy=policy,
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        data=json_in_html(shown.data),
        plotly=plotly,
        script=script,
    )


def plotly_script() -> str:
    """Returns Plotly's JavaScript, from its Python package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def json_in_html(value: object) -> str:
    """Returns JSON that can stand in a script element: no text in it can end that."""
    said = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return said.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sha256(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def _footnotes(runs: Sequence[tuple[str, RunHistory]]) -> Iterator[str]:
    yield (
        "Training time leaves out evaluations, samples, checkpoints that a step waited for, and steps that a restart "
        "took again."
    )
    if any(len(run.training["step"]) > MOST_POINTS for _, run in runs):
        yield f"Curves have at most {MOST_POINTS:,} points here: of each stretch the lowest and the highest value."
    for name, run in runs:
        if run.damaged_lines:
            yield f"{run.damaged_lines:,} lines of {name} could not be read, and are left out."
