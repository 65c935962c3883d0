"""Facts of one run that need more than its template, `run.html`, can say, and figures as people read them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from textwrap import shorten
from typing import Any

import numpy as np
from rich.filesize import pick_unit_and_suffix

from finetune.checkpoint.best_evaluation import early_stop_sentence
from finetune.checkpoint.run_facts import EXAMPLES
from finetune.checkpoint.run_history import STATUSES, RunHistory, Sample, Series, loss_curves
from finetune.checkpoint.trusted_code import SHIPPED, check_code
from finetune.config.recipe import load_recipe
from finetune.config.recipe_schema import NAMES_OF_CODE
from finetune.data.data_report import COUNTED, COUNTED_OF_CHAT, WORDS, PairReport
from finetune.tasks.class_tables import classes_table, confusion_table
from finetune.utils import json_files
from finetune.utils.errors import CheckpointError, FinetuneError, RecipeError

_HELD = {
    "frozen": "frozen weights, rank 0",
    "trained": "trained weights, rank 0",
    "gradients": "gradients, rank 0",
    "optimizer": "optimiser state, rank 0",
}
_RATES = ("received_mib_s", "sent_mib_s", "disk_read_mib_s", "disk_written_mib_s")
# The curve has them all.
_EVALUATIONS = 8
_SAMPLES = 12


def status_line(run: RunHistory) -> str:
    """Returns status and how far it came, in words."""
    at = f"step {format_progress(run.step, run.num_steps, ' of ')}"
    if run.status == "running":
        if not len(run.training["step"]):
            return f"running, {at}: no step is logged yet"
        left = f", about {format_duration(run.seconds_left)} of training left" if run.seconds_left else ""
        return f"running, {at}{left}"
    if run.status == "stopped":
        why = run.facts.get("results", {}).get("stopped")
        return f"stopped at {at}" + (f" ({why})" if why else "")
    if run.status == "diverged":
        last = run.incidents[-1]
        at = format_progress(last.step, run.num_steps, " of ")
        return f"diverged at step {at}: {last.in_a_row} steps in a row were not finite"
    return early_stop_sentence(run.ended_early) if run.ended_early is not None else f"{run.status} at {at}"


def start_line(run: RunHistory) -> str:
    """Returns model, launch, precision and start."""
    runs, again = run.facts.get("runs", {}), len(run.starts) - 1
    size = runs.get("num_parameters")
    parts = (
        model_name(run),
        "" if size is None else f"{format_count(size)} parameters",
        f"{run.launch} on {runs['device']}" if runs.get("device") else run.launch,
        str(run.facts.get("precision", "")),
        *(f"started {format_time(start.time)} on {start.host}" for start in run.starts[:1]),
        f"{again:,} restart{'s' if again > 1 else ''}" if again > 0 else "",
    )
    sentences = [", ".join(filter(None, parts))]
    if run.status in ("lost", "diverged"):
        sentences.append(STATUSES[run.status].capitalize())
    if run.status in ("lost", "diverged", "stopped"):
        kept = f"The last checkpoint is that of step {run.checkpoints[-1].step:,}" if run.checkpoints else ""
        sentences.append(kept or "There is no checkpoint")
    return ". ".join(sentences) + "."


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
    (_, _, losses), _ = loss_curves(run)
    return float(losses[-1]) if len(losses) else None


def peak_memory(run: RunHistory) -> tuple[str, str]:
    """Returns the most memory that is known of, and what that is."""
    recorded = run.facts.get("peak_memory") or {}
    if (recorded.get("measured") or 0) > 0:
        more = ", over what its process held before" if recorded.get("of") == "resident" else ""
        return format_bytes(recorded["measured"]), f"peak memory of training, fullest rank{more}"
    seen = run.training["peak_memory_gib"]
    most = float(np.nanmax(seen)) * 2**30 if np.isfinite(seen).any() else None
    return format_bytes(most), f"peak memory of {whose_memory([run])}"


def whose_memory(runs: Sequence[RunHistory]) -> str:
    """Returns whose memory the metrics have: on a CPU all that the process holds, and not what training adds."""
    resident = any(run.facts.get("runs", {}).get("device") == "cpu" for run in runs)
    return "rank 0's process, with its libraries" if resident else "rank 0"


def run_cost(run: RunHistory, price: float | None) -> tuple[str, str]:
    """Returns the cost of a run at a price of a device and hour, or its hours without one, and a label."""
    what = "GPU" if run.facts.get("runs", {}).get("device", "") == "cuda" else "process"
    hours = run.process_hours
    if price is None:
        return f"{hours:,.2f} h" if hours >= 0.1 else format_duration(hours * 3600), f"{what} time held"
    return f"{price * hours:,.2f}", f"cost at {price:g} a {what} and hour"


def main_figures(run: RunHistory, price: float | None) -> list[tuple[str, str]]:
    """Returns the figures of the first screen, and what each is."""
    best, tokens = run.best_evaluation, run.training["tokens"]
    learned = f", {format_count(float(tokens[-1]))} learned" if len(tokens) else ""
    return [
        (format_number(last_loss(run)), "last training loss"),
        (format_number(best[1]), f"best {run.best_name}, step {best[0]:,}") if best else ("–", "no evaluation"),
        (format_number(run.tokens_per_s, 3), f"targets/s{learned}"),
        (
            format_duration(run.duration),
            f"{'so far' if run.status == 'running' else 'from start to end'}, pauses left out",
        ),
        run_cost(run, price),
        peak_memory(run),
    ]


def predict_peak(run: RunHistory) -> int | str:
    """Returns bytes of the peak on the fullest rank, as the run wrote them or a plan predicts now, or why not."""
    if written := (run.facts.get("peak_memory") or {}).get("predicted"):
        return int(written)
    launch = run.facts.get("launch")
    if not isinstance(launch, dict) or not launch.get("kind"):
        return "run.json does not say under what it was launched."
    try:
        recipe = load_recipe(run.directory / "recipe.yaml")
    except FinetuneError as error:
        return f"its recipe cannot be read: {shorten(str(error), 200, placeholder='…')}"
    try:
        check_code(run.directory, recipe, (SHIPPED, *NAMES_OF_CODE))
    except RecipeError:
        return (
            "its recipe leads to Python code, which is not run unasked, since no record says that this user started "
            f"the run on this machine. Where you trust it, `finetune plan {run.directory / 'recipe.yaml'}` predicts it."
        )
    micro = run.facts.get("micro_size")
    rows = micro.get("rows") if isinstance(micro, dict) else micro
    if not isinstance(rows, int):
        return "the size of its micro-batches is not known yet."
    # From here on torch is there, which takes seconds.
    from finetune.distributed.launch.launch_config import Launch
    from finetune.planning.planner import candidates_of
    from finetune.utils.library_imports import silence_libraries

    silence_libraries()
    if isinstance(run.facts.get("ds_config"), dict):
        launch = {**launch, "ds_config": run.facts["ds_config"]}
    known = {field.name for field in fields(Launch)}
    try:
        of = candidates_of(recipe, Launch(**{key: launch[key] for key in launch.keys() & known}), 1 << 50)
        candidate = of(rows) if of is not None else None
    except (FinetuneError, OSError, ValueError) as error:
        return f"the plan refuses it: {shorten(str(error), 200, placeholder='…')}"
    if candidate is None:
        return "its network cannot be counted without its weights."
    if candidate.parts is None or candidate.reason:
        return f"{candidate.reason or 'the plan does not count it'}."
    return candidate.peak + (candidate.host if run.facts.get("runs", {}).get("device") == "cpu" else 0)


def memory_sizes(run: RunHistory, prediction: str | int | None) -> tuple[dict[str, int], list[str]]:
    """Returns bytes by what they are, and notes on them; `prediction` is that of `predict_peak`."""
    held, recorded = run.facts.get("memory") or {}, run.facts.get("peak_memory") or {}
    sizes = {label: int(held[name]) for name, label in _HELD.items() if held.get(name)}
    if sizes:
        sizes["held from step to step, rank 0"] = sum(sizes.values())
    # A tiny run in a process that has freed more meanwhile takes less than nothing.
    measured = recorded.get("measured") if (recorded.get("measured") or 0) > 0 else None
    predicted = recorded.get("predicted") or (prediction if isinstance(prediction, int) else None)
    notes = []
    if measured:
        sizes[f"peak of the first steps, fullest rank ({recorded.get('of', 'measured')})"] = measured
    if predicted:
        sizes["peak that `finetune plan` predicts"] = predicted
    if measured and predicted:
        notes.append(f"Measured is {measured / predicted:.2f} of what was predicted.")
    elif isinstance(prediction, str):
        notes.append(f"No prediction: {prediction}")
    if recorded.get("of") == "resident":
        notes.append("On a CPU the peak is resident memory, over what the process held before.")
    return sizes, notes


def machines_table(run: RunHistory) -> tuple[list[str], list[list[str]]]:
    """Returns the head and a row for each machine: means of what it did, and the most that it held."""
    head = ["machine", "host", "CPU, mean", "memory, most", "of it the run's", "received", "sent", "read", "written"]
    head += ["disk, free"]
    gpus = ["GPU, mean", "GPU memory, most", "hottest GPU", "power, mean"]
    if any(machine.has_gpus for machine in run.machines):
        head += gpus
    rows = []
    for machine in run.machines:

        def figure(key: str, unit: str, of: Callable[[Series], Any] = np.mean, samples: Any = machine.samples) -> str:
            known = samples[key][np.isfinite(samples[key])]
            return f"{format_number(float(of(known)), 3)} {unit}" if len(known) else "–"

        cells = [str(machine.number), machine.host, figure("cpu_percent", "%")]
        cells.append(f"{figure('memory_used_gib', 'of', np.max)} {figure('memory_total_gib', 'GiB', np.max)}")
        cells.append(figure("processes_gib", "GiB", np.max))
        cells += [figure(key, "MiB/s") for key in _RATES]
        cells.append(figure("disk_free_gib", "GiB", np.min))
        cells += [figure("gpu_percent", "%"), figure("gpu_memory_used_gib", "GiB", np.max)]
        cells += [figure("gpu_temperature_c", "°C", np.max), figure("gpu_power_w", "W")]
        rows.append(cells[: len(head)])
    return head, rows


def machine_notes(run: RunHistory) -> list[str]:
    """Returns why GPUs were slower than they could be, and how often."""
    return [
        f"Machine {machine.name}: the clock of a GPU was held back in {count / len(machine.samples['time']):.0%} of "
        f"the samples ({reason})."
        for machine in run.machines
        for reason, count in machine.throttled.items()
    ]


def shown_samples(run: RunHistory) -> list[Sample]:
    """Returns the newest sample and then earlier ones: the first, in which most changes, and some of all others."""
    newest, earlier = run.samples[-1:], run.samples[:-1]
    if len(earlier) > _SAMPLES:
        chosen = np.unique(np.linspace(0, len(earlier) - 1, _SAMPLES).astype(int)).tolist()
        earlier = tuple(earlier[number] for number in chosen)
    return [*newest, *reversed(earlier)]


def evaluations_table(run: RunHistory) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the last evaluations, the newest first."""
    columns = {
        "validation_loss": "validation loss",
        "validation_perplexity": "perplexity",
        **{key: key.removeprefix("validation_").replace("_", " ") for key in run.metrics},
        "validation_targets": "targets",
    }
    there = {key: name for key, name in columns.items() if np.isfinite(run.evaluations[key]).any()}
    best, rows = run.best_evaluation, []
    for number, step in list(enumerate(run.evaluations["step"].astype(int).tolist()))[: -_EVALUATIONS - 1 : -1]:
        values = [format_number(float(run.evaluations[key][number])) for key in there]
        rows.append([f"{step:,}{' (best)' if best and best[0] == step else ''}", *values])
    return ["step", *there.values()], rows if there else []


def class_tables(run: RunHistory) -> list[list[list[str]]]:
    """Returns figures of each class of the last evaluation, and which is taken for which; each a head and rows."""
    results = run.facts.get("results") or {}
    counts, confusions = results.get("classes"), results.get("confusions")
    if not counts:
        return []
    return [classes_table(counts), *([confusion_table(confusions, [*counts])] if confusions else [])]


def asked_and_ran(run: RunHistory) -> list[tuple[str, str, str]]:
    """Returns names of settings, what was asked, and what ran."""
    launch, runs, recipe = run.facts.get("launch", {}), run.facts.get("runs", {}), run.recipe
    model, batch, kernels = recipe.get("model") or {}, recipe.get("batch") or {}, run.facts.get("kernels") or {}
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
        ("gradients are summed in", (recipe.get("optim") or {}).get("reduce_dtype"), runs.get("reduce_dtype")),
        ("attention", model.get("attention"), kernels.get("attention")),
        ("loss", model.get("loss"), kernels.get("loss")),
        ("CPU threads a process", launch.get("num_threads"), runs.get("num_threads")),
        ("device", None, runs.get("device")),
        ("communication", None, runs.get("communication")),
        ("wrapper", None, runs.get("wrapper")),
    ]
    return [(name, _in_words(asked), _in_words(ran)) for name, asked, ran in rows if not asked is ran is None]


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_in_words, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def data_examples(run: RunHistory) -> list[list[dict[str, Any]]]:
    """Returns lines about the first training examples, in parts, each with `text` and whether it is `learned`.

    Runs of earlier versions, and of rows without tokens, have none.

    Raises:
        CheckpointError: If the file is not what a run writes.
    """
    file = run.directory / EXAMPLES
    if not file.exists():
        return []
    with CheckpointError.explaining(f"{file} cannot be read", "Remove it; a report then has no examples."):
        lines: list[list[dict[str, Any]]] = json_files.read(file, [[{"text": str, "learned": bool}]])
    return [[{"text": span.get("text", ""), "learned": span.get("learned")} for span in line] for line in lines]


def data_notes(sides: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields what was found in the training and validation documents."""
    for name, side in sides.items():
        if pairs := side.get("pairs"):
            yield f"{name}: {PairReport(**pairs).line()}"
        counted = [(side.get(key), what) for key, what in COUNTED.items()]
        counted += [((side.get("chat") or {}).get(key), what) for key, what in COUNTED_OF_CHAT.items()]
        counted += [(count, f"conversations left out ({kind})") for kind, count in (side.get("broken") or {}).items()]
        yield from (f"{name}: {count:,} {what}" for count, what in counted if count)
        for finding in side.get("findings") or ():
            yield f"{name}: {finding['count']:,} of {finding['of']:,} {WORDS.get(finding['kind'], finding['kind'])}"
        if chat := side.get("chat"):
            share = chat.get("supervised_share", math.nan)
            yield f"{name}: {chat.get('answers', 0):,} answers are learned, {share:.1%} of the tokens"


def format_duration(seconds: float | None) -> str:
    """`3 h 20 min`, `4 min 5 s`, `12 s`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    for large, small, size, unit in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // unit
            return f"{whole // size:,} {large}" + (f" {rest} {small}" if rest else "")
    return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{whole} s"


def format_number(value: object, digits: int = 4) -> str:
    """Returns a figure with so many significant digits; a dash for what is not there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–" if value is None or isinstance(value, float) else str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def format_count(value: float) -> str:
    """`935 K`, `1.23 M`, `7.0 B`; a dash for what is not finite."""
    if not math.isfinite(value):
        return "–"
    unit, suffix = pick_unit_and_suffix(int(value), ["", " K", " M", " B", " T"], 1000)
    return f"{value / unit:.3g}{suffix}"


def format_bytes(value: float | None) -> str:
    """Returns bytes as GiB, or as MiB or KiB where they are few."""
    if value is None:
        return "–"
    unit, suffix = pick_unit_and_suffix(int(value), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{value / unit:,.{0 if unit == 1 else 2}f} {suffix}"


def format_time(seconds: float | None) -> str:
    """Returns local date and time."""
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def format_progress(step: int, num_steps: int | None, between: str = "/") -> str:
    """`5/60`."""
    return f"{step:,}" if num_steps is None else f"{step:,}{between}{num_steps:,}"
