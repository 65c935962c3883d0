"""What the page of one run says beside its charts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from finetune.checkpoint.best_evaluation import early_stop_sentence
from finetune.checkpoint.run_history import STATUSES, RunHistory
from finetune.data.data_report import WORDS
from finetune.diagnostics.run_report import figures
from finetune.diagnostics.run_report.html_parts import Html, facts, folded, join, section, table, tag
from finetune.export import harness_file

_HELD = {
    "frozen": ("frozen weights", "series-7"),
    "trained": ("trained weights", "series-0"),
    "gradients": ("gradients", "series-1"),
    "optimizer": ("optimiser state", "series-2"),
}
# The curve has them all.
_EVALUATIONS = 8
_COUNTED = {
    "duplicates": "duplicate documents",
    "empty": "empty documents",
    "over_long": "documents longer than a row",
    "truncated": "documents truncated",
    "dropped": "documents left out as too long",
    "remainder_rows": "incomplete rows left out",
    "overlap": "documents that are training documents too",
}


def summary(name: str, run: RunHistory, price: float | None, *, live: bool) -> Html:
    """The first screen: is it good, is it done, what did it cost."""
    note = tag("span", f"live, read at {figures.moment(run.read_at)}", id="live", class_="muted small") if live else ""
    head = tag("header", tag("h1", name), tag("span", status_line(run), class_=f"status {run.status}"), note)
    done = "" if not run.num_steps else _progress(run)
    return join((head, tag("p", _what(run), class_="muted"), done, _tiles(run, price)))


def status_line(run: RunHistory) -> str:
    """Status and how far it came, in words."""
    of = f" of {run.num_steps:,}" if run.num_steps is not None else ""
    at = f"step {run.step:,}{of}"
    if run.status == "running":
        if not len(run.training["step"]):
            return f"running, {at}: no step is logged yet"
        left = f", about {figures.duration(run.seconds_left)} of training left" if run.seconds_left else ""
        return f"running, {at}{left}"
    if run.status == "stopped":
        why = run.facts.get("results", {}).get("stopped")
        return f"stopped at {at}" + (f" ({why})" if why else "")
    if run.status == "diverged":
        last = run.incidents[-1]
        return f"diverged at step {last.step:,}{of}: {last.in_a_row} steps in a row were not finite"
    return early_stop_sentence(run.ended_early) if run.ended_early is not None else f"{run.status} at {at}"


def _what(run: RunHistory) -> str:
    """Model, launch, precision, start: one line."""
    parts = [model_name(run)]
    if (size := run.facts.get("runs", {}).get("num_parameters")) is not None:
        parts.append(f"{figures.count(size)} parameters")
    runs = run.facts.get("runs", {})
    on = f"{run.launch} on {runs['device']}" if runs.get("device") else run.launch
    parts += [on, str(run.facts.get("precision", ""))]
    if run.starts:
        parts.append(f"started {figures.moment(run.starts[0].time)} on {run.starts[0].host}")
    if len(run.starts) > 1:
        parts.append(_counted(len(run.starts) - 1, "restart"))
    more = f". {STATUSES[run.status].capitalize()}" if run.status in ("lost", "diverged") else ""
    if run.status in ("lost", "diverged", "stopped"):
        kept = f"step {run.checkpoints[-1].step:,}" if run.checkpoints else None
        more += f". The last checkpoint is that of {kept}" if kept else ". There is no checkpoint"
    return ", ".join(filter(None, parts)) + more + "."


def model_name(run: RunHistory) -> str:
    """What was trained, in a few words."""
    model = run.recipe.get("model") or {}
    name = model.get("name") or (model.get("config") or {}).get("model_type") or run.recipe.get("task", {}).get("name")
    lora = run.recipe.get("lora")
    if model.get("quantization") and lora:
        return f"QLoRA ({model['quantization']}) of {name}"
    return f"LoRA of {name}" if lora else str(name or "a network")


def _progress(run: RunHistory) -> Html:
    done = min(1.0, run.step / run.num_steps) if run.num_steps else 0.0
    return tag("div", tag("i", style=f"width:{done:.1%}"), class_="bar", title=f"{done:.1%} of the steps")


def last_loss(run: RunHistory) -> float | None:
    """Of the last logged step whose loss is a number."""
    losses = run.training["loss"]
    known = losses[np.isfinite(losses)]
    return float(known[-1]) if len(known) else None


def peak(run: RunHistory) -> tuple[str, str]:
    """The most memory that is known of, and what that is."""
    told = run.facts.get("peak_memory") or {}
    if (told.get("measured") or 0) > 0:
        more = ", over what its process held before" if told.get("of") == "resident" else ""
        return figures.memory(told["measured"]), f"peak memory of training, fullest rank{more}"
    seen = run.training["peak_memory_gib"]
    most = float(np.nanmax(seen)) * 2**30 if np.isfinite(seen).any() else None
    return figures.memory(most), f"peak memory of {memory_of([run])}"


def memory_of(runs: Sequence[RunHistory]) -> str:
    """Whose memory the metrics have: on a CPU it is all that the process holds, and not what training adds."""
    resident = any(run.facts.get("runs", {}).get("device") == "cpu" for run in runs)
    return "rank 0's process, with its libraries" if resident else "rank 0"


def _tiles(run: RunHistory, price: float | None) -> Html:
    best = run.best_evaluation
    validated = (figures.number(best[1]), f"best {run.best_name}, step {best[0]:,}") if best else ("–", "no evaluation")
    seconds = [tag("b", figures.duration(run.duration)), tag("span", "from start to end, pauses left out")]
    if run.status == "running":
        seconds = [tag("b", figures.duration(run.duration)), tag("span", "so far, pauses left out")]
    tokens = run.training["tokens"]
    spent, what = figures.cost(price, run.process_hours, run.facts.get("runs", {}).get("device", ""))
    learned = f"targets/s, {figures.count(float(tokens[-1]))} learned" if len(tokens) else "targets/s"
    tiles = [
        (figures.number(last_loss(run)), "last training loss"),
        validated,
        (figures.number(run.tokens_per_s, 3) if run.tokens_per_s else "–", learned),
    ]
    shown = [tag("div", tag("b", value), tag("span", name), class_="tile") for value, name in tiles]
    shown.append(tag("div", *seconds, class_="tile"))
    shown.append(tag("div", tag("b", spent), tag("span", what), class_="tile"))
    value, name = peak(run)
    shown.append(tag("div", tag("b", value), tag("span", name), class_="tile"))
    return tag("div", *shown, class_="tiles")


def sections(run: RunHistory, prediction: "str | int | None") -> list[Html]:
    """What follows the charts."""
    found = [_time_line(run), _memory(run, prediction), _samples(run), _evaluations(run), _harness(run)]
    found += [_incidents(run), _asked_and_ran(run), _data(run), _recipe(run)]
    return [part for part in found if part]


# ---------------------------------------------------------------- time line


def _time_line(run: RunHistory) -> Html:
    """Starts as bars on the clock, with the checkpoints that are there."""
    if not run.starts:
        return Html("")
    begin = run.starts[0].time
    end = max(start.end or run.read_at for start in run.starts)
    end = max([end, *(c.time for c in run.checkpoints if c.time < end + 60), begin + 1e-3])

    def place(seconds: float) -> float:
        return 1000 * (seconds - begin) / (end - begin)

    bars = []
    for number, start in enumerate(run.starts, start=1):
        left, right = place(start.time), place(start.end or run.read_at)
        label = (
            f"start {number}: steps {start.from_step:,} to {start.to_step:,}, {figures.moment(start.time)}, "
            f"{figures.duration(start.seconds(run.read_at))}, {start.processes} process(es) on {start.host}"
        )
        bars.append(
            tag(
                "rect",
                tag("title", label),
                x=f"{left:.1f}",
                y=14,
                width=f"{max(2.0, right - left):.1f}",
                height=22,
                fill=f"var(--series-{0 if number % 2 else 5})",
            )
        )
    for saved in run.checkpoints:
        label = f"checkpoint of step {saved.step:,}, {figures.moment(saved.time)}"
        x = f"{min(999.0, place(saved.time)):.1f}"
        bars.append(tag("rect", tag("title", label), x=x, y=6, width=3, height=38, fill="var(--series-1)"))
    drawn = tag(
        "svg",
        *bars,
        viewBox="0 0 1000 50",
        preserveAspectRatio="none",
        height=50,
        role="img",
        aria_label="starts and checkpoints over time",
    )
    rows = [
        (
            number,
            figures.moment(start.time),
            figures.duration(start.seconds(run.read_at)),
            f"{start.from_step:,} – {start.to_step:,}",
            start.processes,
            start.host,
            start.resumed_from or "",
        )
        for number, start in enumerate(run.starts, start=1)
    ]
    kept = [(f"{c.step:,}", figures.moment(c.time), str(c.path)) for c in run.checkpoints]
    key = tag(
        "div",
        _dot("series-0", "a start, until it ended"),
        _dot("series-1", "a checkpoint that is there"),
        class_="key small",
    )
    ends = tag("div", tag("span", figures.moment(begin)), tag("span", figures.moment(end)), class_="head muted small")
    starts = table(("start", "at", "for", "steps", "processes", "host", "resumed from"), rows)
    return section(
        "Starts and checkpoints",
        tag("div", drawn, ends, key, class_="card"),
        tag("div", starts, class_="card") if len(rows) > 1 else "",
        folded(_counted(len(kept), "checkpoint"), table(("step", "written", "folder"), kept), key="checkpoints")
        if kept
        else "",
        key="timeline",
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _dot(color: str, label: object) -> Html:
    return tag("span", tag("i", class_="dot", style=f"background:var(--{color})"), label)


# ---------------------------------------------------------------- memory


def _memory(run: RunHistory, prediction: "str | int | None") -> Html:
    held = run.facts.get("memory") or {}
    told = run.facts.get("peak_memory") or {}
    parts = {name: int(held[name]) for name in _HELD if held.get(name)}
    # Of a tiny run in a process that has freed more meanwhile, less than nothing.
    measured = told.get("measured") if (told.get("measured") or 0) > 0 else None
    predicted = told.get("predicted") or (prediction if isinstance(prediction, int) else None)
    bars = [("held from step to step, rank 0", [(parts[name], *_HELD[name]) for name in parts])] if parts else []
    if measured:
        bars.append(
            (
                f"peak of the first steps, fullest rank ({told.get('of', 'measured')})",
                [(measured, "measured", "series-4")],
            )
        )
    if predicted:
        bars.append(("peak that `finetune plan` predicts", [(predicted, "predicted", "series-5")]))
    if not bars:
        return Html("")
    most = max(sum(size for size, _, _ in found) for _, found in bars)
    rows: list[Html] = []
    for name, found in bars:
        total = sum(size for size, _, _ in found)
        stack = [
            tag(
                "i",
                title=f"{label}: {figures.memory(size)}",
                style=f"width:{size / most:.2%};background:var(--{color})",
            )
            for size, label, color in found
        ]
        label = tag("span", name, class_="small")
        rows.append(
            tag("div", label, tag("div", *stack, class_="stack"), tag("b", figures.memory(total)), class_="row")
        )
    key = [_dot(_HELD[name][1], f"{_HELD[name][0]} {figures.memory(size)}") for name, size in parts.items()]
    notes = []
    if measured and predicted:
        notes.append(f"Measured is {measured / predicted:.2f} of what was predicted.")
    elif isinstance(prediction, str):
        notes.append(f"No prediction: {prediction}")
    if told.get("of") == "resident":
        notes.append("On a CPU the peak is resident memory, over what the process held before.")
    return section(
        "Memory",
        tag(
            "div",
            tag("div", *rows, class_="rows"),
            tag("div", *key, class_="key small"),
            tag("p", " ".join(notes), class_="muted small") if notes else "",
            class_="card",
        ),
        key="memory",
    )


# ---------------------------------------------------------------- text


def _samples(run: RunHistory) -> Html:
    if not run.samples:
        return Html("")
    newest = run.samples[-1]
    shown = [tag("div", tag("h3", f"step {newest.step:,}"), tag("blockquote", newest.text), class_="card")]
    earlier = run.samples[:-1]
    if len(earlier) > 12:
        # The first ones, in which most changes, and some of all others.
        chosen = np.unique(np.linspace(0, len(earlier) - 1, 12).astype(int)).tolist()
        earlier = tuple(earlier[number] for number in chosen)
    for sample in reversed(earlier):
        text = tag("blockquote", sample.text)
        shown.append(
            tag(
                "div",
                folded(f"step {sample.step:,}", text, key=f"sample-{sample.step}", is_open=len(earlier) < 6),
                class_="card",
            )
        )
    left = len(run.samples) - 1 - len(earlier)
    note = tag("p", f"{left:,} more are in metrics.jsonl.", class_="muted small") if left else ""
    return section("Samples, the newest first", tag("div", *shown, class_="samples"), note, key="samples")


def _evaluations(run: RunHistory) -> Html:
    columns = {
        "validation_loss": "validation loss",
        "validation_perplexity": "perplexity",
        **{key: key.removeprefix("validation_").replace("_", " ") for key in run.metrics},
        "validation_targets": "targets",
    }
    there = [key for key in columns if np.isfinite(run.evaluations[key]).any()]
    if not there:
        return Html("")
    count = len(run.evaluations["step"])
    best = run.best_evaluation
    rows = []
    for number in range(max(0, count - _EVALUATIONS), count):
        step = int(run.evaluations["step"][number])
        mark = " (best)" if best and best[0] == step else ""
        values = [figures.number(float(run.evaluations[key][number])) for key in there]
        rows.append((f"{step:,}{mark}", *values))
    title = "Evaluations" if count <= _EVALUATIONS else f"Evaluations, the last {_EVALUATIONS} of {count:,}"
    shown = table(("step", *(columns[key] for key in there)), reversed(rows), numbers=range(1, len(there) + 1))
    return section(title, tag("div", shown, class_="card"), key="evaluations")


def _harness(run: RunHistory) -> Html:
    """What `finetune eval --harness` has found."""
    rows = [
        (
            row["task"] + (", chat" if row["chat"] else "") + (f", first {row['limit']:,}" if row["limit"] else ""),
            harness_file.metric_of(row),
            figures.number(row["value"]),
            figures.number(row["stderr"], 2),
            *(figures.number(row[key]) for key in ("samples", "num_fewshot", "step")),
        )
        for row in harness_file.read(run.directory)
    ]
    if not rows:
        return Html("")
    head = ("task", "metric", "value", "± error", "questions", "examples", "step")
    return section("Benchmarks", tag("div", table(head, rows, numbers=range(2, 7)), class_="card"), key="harness")


def _incidents(run: RunHistory) -> Html:
    if not run.incidents:
        return Html("")
    rows = [
        (
            f"{i.step:,}",
            i.kind,
            i.in_a_row,
            i.grad_norm,
            " ".join(map(str, i.rows[:16])) + (" …" if len(i.rows) > 16 else ""),
        )
        for i in reversed(run.incidents[-50:])
    ]
    title = f"Skipped steps: {len(run.incidents):,}"
    shown = table(("step", "kind", "in a row", "gradient norm", "rows read"), rows)
    note = tag("p", "They changed no weight, since a loss or gradient was not finite.", class_="muted small")
    return section(title, tag("div", note, shown, class_="card"), key="incidents")


# ---------------------------------------------------------------- what was asked, data, recipe


def _said(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_said, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _asked_and_ran(run: RunHistory) -> Html:
    launch, runs, recipe = run.facts.get("launch", {}), run.facts.get("runs", {}), run.recipe
    model, batch, kernels = recipe.get("model") or {}, recipe.get("batch") or {}, run.facts.get("kernels") or {}
    optim = recipe.get("optim") or {}
    micro = run.facts.get("micro_size")
    rows = [
        ("launch", launch.get("kind"), runs.get("kind")),
        ("processes", launch.get("num_processes"), runs.get("world_size")),
        ("precision", recipe.get("precision"), run.facts.get("precision")),
        ("rows a micro-batch", batch.get("micro_size"), micro.get("rows") if isinstance(micro, dict) else micro),
        ("rows a step", batch.get("global_size"), None),
        ("micro-batches a step and process", None, runs.get("accumulation")),
        ("parameters rest in", launch.get("offload_params"), runs.get("offload_params")),
        ("optimiser state rests in", launch.get("offload_optimizer"), runs.get("offload_optimizer")),
        ("share of parameters on rank 0", None, runs.get("parameter_fraction")),
        ("share of optimiser state on rank 0", None, runs.get("optimizer_fraction")),
        ("dtype of trained parameters", None, runs.get("parameter_dtypes")),
        ("dtype of the network's weights", None, runs.get("model_dtypes")),
        ("gradients are summed in", optim.get("reduce_dtype"), runs.get("reduce_dtype")),
        ("attention", model.get("attention"), kernels.get("attention")),
        ("loss", model.get("loss"), kernels.get("loss")),
        ("CPU threads a process", launch.get("num_threads"), runs.get("num_threads")),
        ("device", None, runs.get("device")),
        ("communication", None, runs.get("communication")),
        ("wrapper", None, runs.get("wrapper")),
    ]
    shown = [(name, _said(asked), _said(ran)) for name, asked, ran in rows if not asked is ran is None]
    launched = launch.get("file") or "no launch file"
    return section(
        "What was asked, and what ran",
        tag(
            "div",
            table(("", "asked", "ran"), shown),
            tag("p", f"Launch file: {launched}", class_="muted small"),
            class_="card",
        ),
        key="launch",
    )


def _data(run: RunHistory) -> Html:
    data = run.facts.get("data") or {}
    sides = {name: data[name] for name in ("train", "validation") if isinstance(data.get(name), dict)}
    if not any("rows" in side for side in sides.values()):
        return Html("")
    rows = [
        (
            name,
            *(figures.number(side.get(key)) for key in ("documents", "tokens", "rows", "targets")),
            figures.share(side.get("useful_share")),
        )
        for name, side in sides.items()
    ]
    shape = [
        ("rows", f"{data.get('packing')}, {figures.number(data.get('sequence_length'))} tokens"),
        ("token ids", figures.number(data.get("vocabulary"))),
    ]
    notes, sources = [], []
    for name, side in sides.items():
        counted = [(side.get(key), what) for key, what in _COUNTED.items()]
        counted += [(count, f"conversations left out ({kind})") for kind, count in (side.get("broken") or {}).items()]
        notes += [f"{name}: {count:,} {what}" for count, what in counted if count]
        notes += [
            f"{name}: {f['count']:,} of {f['of']:,} {WORDS.get(f['kind'], f['kind'])}"
            for f in side.get("findings") or ()
        ]
        sources += [
            (name, s.get("name"), s.get("format"), figures.number(s.get("documents")), figures.number(s.get("tokens")))
            for s in side.get("sources") or ()
        ]
        if side.get("chat"):
            chat = side["chat"]
            notes.append(
                f"{name}: {chat.get('answers', 0):,} answers are learned, "
                f"{figures.share(chat.get('supervised_share'))} of the tokens"
            )
    head = ("", "documents", "tokens", "rows", "targets", "useful share")
    content = [table(head, rows, numbers=range(1, 6)), facts(shape)]
    if notes:
        content.append(tag("ul", *[tag("li", note) for note in notes], class_="small"))
    content.append(
        folded(
            "sources", table(("", "source", "format", "documents", "tokens"), sources, numbers=(3, 4)), key="sources"
        )
    )
    return section("Data", tag("div", *content, class_="card"), key="data")


def _recipe(run: RunHistory) -> Html:
    import yaml

    parts = []
    if run.recipe:
        shown = tag("pre", yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True).rstrip())
        parts.append(folded("recipe.yaml, as it ran", shown, key="recipe-yaml"))
    versions = run.facts.get("versions") or {}
    rows = [
        ("command", tag("code", " ".join(map(str, run.facts.get("command", []))))),
        ("git", run.facts.get("git_commit") or "–"),
    ]
    rows += [(name, version) for name, version in versions.items() if version]
    parts.append(folded("command and versions", facts(rows), key="versions"))
    return section("Recipe", tag("div", *parts, class_="card"), key="recipe")
