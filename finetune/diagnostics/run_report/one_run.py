"""Texts and tables of the page of one run, beside its charts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml

from finetune.checkpoint.best_evaluation import early_stop_sentence
from finetune.checkpoint.run_history import STATUSES, RunHistory
from finetune.data.data_report import WORDS
from finetune.diagnostics.run_report import figures
from finetune.diagnostics.run_report.page_parts import Section, Summary, Table, Text
from finetune.export import harness_results

_HELD = {
    "frozen": "frozen weights, rank 0",
    "trained": "trained weights, rank 0",
    "gradients": "gradients, rank 0",
    "optimizer": "optimiser state, rank 0",
}
# The curve has them all.
_EVALUATIONS = 8
_SAMPLES = 12
_COUNTED = {
    "duplicates": "duplicate documents",
    "empty": "empty documents",
    "over_long": "documents longer than a row",
    "truncated": "documents truncated",
    "dropped": "documents left out as too long",
    "remainder_rows": "incomplete rows left out",
    "overlap": "documents that are training documents too",
}


def summary_of_run(name: str, run: RunHistory, price: float | None) -> Summary:
    """Returns the first screen: is it good, is it done, what did it cost.

    Args:
        price: Price of a GPU (or a process on CPUs) and hour.
    """
    done = min(1.0, run.step / run.num_steps) if run.num_steps else None
    return Summary(name, run.status, status_line(run), _about(run), done, _tiles(run, price))


def status_line(run: RunHistory) -> str:
    """Returns status and how far it came, in words."""
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


def _about(run: RunHistory) -> str:
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
    """Returns a name for what was trained."""
    model = run.recipe.get("model") or {}
    name = model.get("name") or (model.get("config") or {}).get("model_type") or run.recipe.get("task", {}).get("name")
    lora = run.recipe.get("lora")
    if model.get("quantization") and lora:
        return f"QLoRA ({model['quantization']}) of {name}"
    return f"LoRA of {name}" if lora else str(name or "a network")


def last_loss(run: RunHistory) -> float | None:
    """Returns the loss of the last logged step that has one."""
    losses = run.training["loss"]
    known = losses[np.isfinite(losses)]
    return float(known[-1]) if len(known) else None


def peak(run: RunHistory) -> tuple[str, str]:
    """Returns the most memory that is known of, and what that is."""
    told = run.facts.get("peak_memory") or {}
    if (told.get("measured") or 0) > 0:
        more = ", over what its process held before" if told.get("of") == "resident" else ""
        return figures.memory(told["measured"]), f"peak memory of training, fullest rank{more}"
    seen = run.training["peak_memory_gib"]
    most = float(np.nanmax(seen)) * 2**30 if np.isfinite(seen).any() else None
    return figures.memory(most), f"peak memory of {memory_of([run])}"


def memory_of(runs: Sequence[RunHistory]) -> str:
    """Returns whose memory the metrics have: on a CPU all that the process holds, and not what training adds."""
    resident = any(run.facts.get("runs", {}).get("device") == "cpu" for run in runs)
    return "rank 0's process, with its libraries" if resident else "rank 0"


def _tiles(run: RunHistory, price: float | None) -> list[tuple[str, str]]:
    best, tokens = run.best_evaluation, run.training["tokens"]
    spent, what = figures.cost(price, run.process_hours, run.facts.get("runs", {}).get("device", ""))
    return [
        (figures.number(last_loss(run)), "last training loss"),
        (figures.number(best[1]), f"best {run.best_name}, step {best[0]:,}") if best else ("–", "no evaluation"),
        (
            figures.number(run.tokens_per_s, 3),
            f"targets/s, {figures.count(float(tokens[-1]))} learned" if len(tokens) else "targets/s",
        ),
        (
            figures.duration(run.duration),
            f"{'so far' if run.status == 'running' else 'from start to end'}, pauses left out",
        ),
        (spent, what),
        peak(run),
    ]


def sections_of_run(run: RunHistory, prediction: "str | int | None") -> list[Section]:
    """Returns what follows the charts.

    Args:
        prediction: Bytes of the peak that a plan predicts, or why there are none.
    """
    found = [_starts(run), _memory(run, prediction), _samples(run), _evaluations(run), _benchmarks(run)]
    found += [_incidents(run), _asked_and_ran(run), _data(run), _recipe(run)]
    return [section for section in found if section.parts]


def _starts(run: RunHistory) -> Section:
    starts = [
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
    parts = [Table(("start", "at", "for", "steps", "processes", "host", "resumed from"), starts)] if starts else []
    if run.checkpoints:
        kept = [(f"{saved.step:,}", figures.moment(saved.time), saved.path) for saved in run.checkpoints]
        parts.append(Table(("step", "written", "folder"), kept, title="checkpoints", folded=True))
    return Section("starts", "Starts and checkpoints", parts)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _memory(run: RunHistory, prediction: "str | int | None") -> Section:
    held, told = run.facts.get("memory") or {}, run.facts.get("peak_memory") or {}
    sizes = {label: int(held[name]) for name, label in _HELD.items() if held.get(name)}
    if sizes:
        sizes["held from step to step, rank 0"] = sum(sizes.values())
    # A tiny run in a process that has freed more meanwhile takes less than nothing.
    measured = told.get("measured") if (told.get("measured") or 0) > 0 else None
    predicted = told.get("predicted") or (prediction if isinstance(prediction, int) else None)
    if measured:
        sizes[f"peak of the first steps, fullest rank ({told.get('of', 'measured')})"] = measured
    if predicted:
        sizes["peak that `finetune plan` predicts"] = predicted
    notes = []
    if measured and predicted:
        notes.append(f"Measured is {measured / predicted:.2f} of what was predicted.")
    elif isinstance(prediction, str):
        notes.append(f"No prediction: {prediction}")
    if told.get("of") == "resident":
        notes.append("On a CPU the peak is resident memory, over what the process held before.")
    rows = [(name, figures.memory(size)) for name, size in sizes.items()]
    return Section("memory", "Memory", [Table((), rows, numbers=[1])] if rows else [], notes)


def _samples(run: RunHistory) -> Section:
    newest, earlier = run.samples[-1:], run.samples[:-1]
    if len(earlier) > _SAMPLES:
        # The first ones, in which most changes, and some of all others.
        chosen = np.unique(np.linspace(0, len(earlier) - 1, _SAMPLES).astype(int)).tolist()
        earlier = tuple(earlier[number] for number in chosen)
    parts = [Text(f"step {sample.step:,}", sample.text) for sample in newest]
    parts += [Text(f"step {sample.step:,}", sample.text, folded=True) for sample in reversed(earlier)]
    left = len(run.samples) - len(parts)
    notes = [f"{left:,} more are in metrics.jsonl."] if left else []
    return Section("samples", "Samples, the newest first", parts, notes)


def _evaluations(run: RunHistory) -> Section:
    columns = {
        "validation_loss": "validation loss",
        "validation_perplexity": "perplexity",
        **{key: key.removeprefix("validation_").replace("_", " ") for key in run.metrics},
        "validation_targets": "targets",
    }
    there = [key for key in columns if np.isfinite(run.evaluations[key]).any()]
    count, best = len(run.evaluations["step"]), run.best_evaluation
    rows = []
    for number in reversed(range(max(0, count - _EVALUATIONS), count)):
        step = int(run.evaluations["step"][number])
        values = [figures.number(float(run.evaluations[key][number])) for key in there]
        rows.append((f"{step:,}{' (best)' if best and best[0] == step else ''}", *values))
    title = "Evaluations" if count <= _EVALUATIONS else f"Evaluations, the last {_EVALUATIONS} of {count:,}"
    shown = Table(("step", *(columns[key] for key in there)), rows, numbers=range(1, len(there) + 1))
    return Section("evaluations", title, [shown] if there else [])


def _benchmarks(run: RunHistory) -> Section:
    """Figures of `finetune eval --harness`."""
    rows = [
        (
            row["task"] + (", chat" if row["chat"] else "") + (f", first {row['limit']:,}" if row["limit"] else ""),
            harness_results.metric_of(row),
            figures.number(row["value"]),
            figures.number(row["stderr"], 2),
            *(figures.number(row[key]) for key in ("samples", "num_fewshot", "step")),
        )
        for row in harness_results.read_results(run.directory)
    ]
    head = ("task", "metric", "value", "± error", "questions", "examples", "step")
    return Section("benchmarks", "Benchmarks", [Table(head, rows, numbers=range(2, 7))] if rows else [])


def _incidents(run: RunHistory) -> Section:
    rows = [
        (
            f"{incident.step:,}",
            incident.kind,
            incident.in_a_row,
            incident.grad_norm,
            " ".join(map(str, incident.rows[:16])) + (" …" if len(incident.rows) > 16 else ""),
        )
        for incident in reversed(run.incidents[-50:])
    ]
    shown = Table(("step", "kind", "in a row", "gradient norm", "rows read"), rows)
    notes = ["They changed no weight, since a loss or gradient was not finite."]
    return Section("incidents", f"Skipped steps: {len(run.incidents):,}", [shown] if rows else [], notes)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_said, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def _asked_and_ran(run: RunHistory) -> Section:
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
    notes = [f"Launch file: {launch.get('file') or 'no launch file'}"]
    return Section("launch", "What was asked, and what ran", [Table(("", "asked", "ran"), shown)], notes)


def _data(run: RunHistory) -> Section:
    data = run.facts.get("data") or {}
    sides = {name: data[name] for name in ("train", "validation") if isinstance(data.get(name), dict)}
    rows, sources, notes = [], [], []
    for name, side in sides.items():
        counts = (figures.number(side.get(key)) for key in ("documents", "tokens", "rows", "targets"))
        rows.append((name, *counts, figures.share(side.get("useful_share"))))
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
    shape = [
        ("rows", f"{data.get('packing')}, {figures.number(data.get('sequence_length'))} tokens"),
        ("token ids", figures.number(data.get("vocabulary"))),
    ]
    parts = [
        Table(("", "documents", "tokens", "rows", "targets", "useful share"), rows, numbers=range(1, 6)),
        Table((), shape),
        Table(("", "source", "format", "documents", "tokens"), sources, numbers=(3, 4), title="sources", folded=True),
    ]
    return Section("data", "Data", parts if any("rows" in side for side in sides.values()) else [], notes)


def _recipe(run: RunHistory) -> Section:
    facts = [
        ("command", " ".join(map(str, run.facts.get("command", [])))),
        ("git", run.facts.get("git_commit") or "–"),
        *((name, version) for name, version in (run.facts.get("versions") or {}).items() if version),
    ]
    parts: list[Table | Text] = []
    if run.recipe:
        text = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True).rstrip()
        parts.append(Text("recipe.yaml, as it ran", text, folded=True))
    return Section("recipe", "Recipe", [*parts, Table((), facts, title="command and versions", folded=True)])
