"""What the page of several runs says: final figures side by side, and what differs."""

import json
import re
from collections.abc import Sequence
from typing import Any

from finetune.checkpoint.run_history import RunHistory
from finetune.diagnostics.run_report import figures
from finetune.diagnostics.run_report.html_parts import Html, join, section, table, tag
from finetune.diagnostics.run_report.one_run import last_loss, model_name, peak

# What differs between any two runs and explains nothing.
_OWN = ("output.dir", "runs.output_dtypes", "launch.ds_place")
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?$")
_LAUNCH = ("launch", "runs", "precision", "micro_size", "gradients", "versions", "git_commit", "kernels", "base")


def comparison(runs: Sequence[tuple[str, RunHistory]], price: float | None) -> tuple[Html, Html]:
    """What stands above the curves, and below them."""
    losses = {name: best[1] for name, run in runs if (best := run.best("validation_loss")) is not None}
    head = tag("header", tag("h1", f"{len(runs)} runs"), tag("span", _verdict(losses), class_="muted"))
    below = join((_differences(runs), _samples(runs)))
    return join((head, _figures(runs, price, losses))), below


def _verdict(losses: dict[str, float]) -> str:
    if len(losses) < 2:
        return ""
    best = min(losses, key=lambda name: losses[name])
    return f"{best} has the lowest validation loss, {figures.number(losses[best])}"


def _figures(runs: Sequence[tuple[str, RunHistory]], price: float | None, losses: dict[str, float]) -> Html:
    lowest = min(losses.values(), default=None)
    rows = []
    for number, (name, run) in enumerate(runs):
        best = run.best("validation_loss")
        loss = "–" if best is None else f"{figures.number(best[1])} (step {best[0]:,})"
        step = f"{run.step:,}/{run.num_steps:,}" if run.num_steps is not None else f"{run.step:,}"
        most, whose = peak(run)
        dot = tag("i", class_="dot", style=f"background:var(--series-{number % 8})")
        spent, _ = figures.cost(price, run.process_hours, run.facts.get("runs", {}).get("device", ""))
        rows.append(
            (
                tag("span", dot, tag("b", name), class_="keep"),
                tag("span", f"{run.status} {step}", class_=f"status {run.status} keep"),
                tag("b", loss) if best is not None and best[1] == lowest else loss,
                figures.number(last_loss(run)),
                figures.number(run.tokens_per_s, 3),
                figures.duration(run.duration),
                spent,
                tag("span", most, title=whose),
                tag("span", run.launch, class_="keep"),
                model_name(run),
            )
        )
    _, what = figures.cost(price, 0.0, runs[0][1].facts.get("runs", {}).get("device", ""))
    head = (
        "run",
        "status",
        "best validation loss",
        "last loss",
        "targets/s",
        "time",
        what,
        " or ".join(dict.fromkeys(peak(run)[1] for _, run in runs)),
        "launch",
        "model",
    )
    return tag("div", table(head, rows, numbers=range(2, 8)), class_="card", style="margin-top:14px")


def _differences(runs: Sequence[tuple[str, RunHistory]]) -> Html:
    recipes = differences([run.recipe for _, run in runs])
    launches = differences([{key: run.facts[key] for key in _LAUNCH if key in run.facts} for _, run in runs])
    names = [name for name, _ in runs]

    def shown(title: str, found: dict[str, list[str]], same: str) -> Html:
        rows = [(tag("code", key, class_="keep"), *values) for key, values in found.items()]
        inside = table(("", *names), rows) if rows else tag("p", same, class_="muted")
        return tag("div", tag("h3", title), inside, class_="card wide")

    return section(
        "What differs",
        tag(
            "div",
            shown("Recipe", recipes, "The recipes are the same, but for output.dir."),
            shown("Launch, and what ran", launches, "They ran alike."),
            class_="charts",
        ),
        key="differences",
    )


def differences(trees: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Keys, with dots, whose values are not the same in all trees, and these values."""
    flat = [dict(_flat(tree)) for tree in trees]
    keys = dict.fromkeys(key for values in flat for key in values if not key.startswith(_OWN))
    found = {}
    for key in keys:
        values = [_shown(values[key]) if key in values else "–" for values in flat]
        if len(set(values)) > 1:
            found[key] = values
    return found


def _flat(tree: Any, place: str = "") -> list[tuple[str, Any]]:
    """Keys and values; of a list of objects, such as `data.train`, each object's: `data.train[0].path`."""
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        return [pair for number, item in enumerate(tree) for pair in _flat(item, f"{place}[{number}]")]
    if not isinstance(tree, dict) or not tree:
        return [(place, tree)]
    return [pair for key, value in tree.items() for pair in _flat(value, f"{place}.{key}" if place else str(key))]


def _shown(value: Any) -> str:
    if isinstance(value, str) and _COMMIT.match(value):
        return value[:10] + value[40:]
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "–" if value is None else str(value)


def _samples(runs: Sequence[tuple[str, RunHistory]]) -> Html:
    last = [(name, run.samples[-1]) for name, run in runs if run.samples]
    if not last:
        return Html("")
    shown = [
        tag("div", tag("h3", f"{name}, step {sample.step:,}"), tag("blockquote", sample.text), class_="card")
        for name, sample in last
    ]
    return section("Last samples", tag("div", *shown, class_="charts"), key="samples")
