"""What each command does. A command imports what it needs when it runs."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config import recipe_paths
from finetune.config.recipe import SCHEMA_FILE, dump_recipe, hint, json_schema, load_recipe
from finetune.distributed.launch.launch_key_docs import OPTIONS
from finetune.training.entry_point import load_checked
from finetune.utils import hub_access
from finetune.utils.compat.library_versions import untried
from finetune.utils.console import plain_console
from finetune.utils.errors import RecipeError
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import quick_imports, silence_libraries
from finetune.utils.shipped_files import launch_file

if TYPE_CHECKING:
    from finetune.export.load_model import LoadedModel


def launch(parsed: argparse.Namespace) -> None:
    """`finetune launch`: the workers' launcher, once both files are checked."""
    recipe = load_recipe(parsed.recipe, parsed.overrides)
    recipe_paths.check(recipe)
    if parsed.dry_run:
        from finetune.distributed.launch.launch_environment import read_launch_environment
        from finetune.training.dry_run import describe

        go_offline_if_unreachable()
        print(describe(recipe, read_launch_environment(parsed.config_file, launch_options(parsed), os.environ)))
        return
    from finetune.distributed.launch.launcher import launch as run

    options = [word for option, value in launch_options(parsed).items() for word in (f"--{option}", value)]
    quiet = ["--quiet"] if parsed.quiet else []
    run(parsed.config_file, options, [*quiet, parsed.recipe, *parsed.overrides], grace_s=recipe.guard.grace_s)


def init(parsed: argparse.Namespace) -> None:
    """`finetune init`."""
    _prepare_libraries()
    hub_access.require(parsed.model, "--model")
    from finetune.planning.new_project import Project, write_project

    project = Project(parsed.task, parsed.model, parsed.data, parsed.adapters)
    print("\n".join(write_project(Path(parsed.folder), project)))


def explain(parsed: argparse.Namespace) -> None:
    """`finetune explain`."""
    from finetune.diagnostics.explain import as_json, explain_values, page, select_values, table

    overrides = [word for word in parsed.words if "=" in word]
    keys = [word for word in parsed.words if "=" not in word]
    values = explain_values(parsed.recipe, overrides, parsed.config_file, launch_options(parsed), os.environ)
    chosen = [value for key in keys for value in select_values(values, key)]
    if not keys:
        chosen = [value for value in values if parsed.all or not value.is_default]
    if parsed.json:
        print(as_json(chosen))
    else:
        console = plain_console()
        console.print(page(chosen[0]) if len(chosen) == 1 else table(chosen, console.width))


def doctor(parsed: argparse.Namespace) -> int:
    """`finetune doctor`; returns 1 if a check fails."""
    from finetune.diagnostics.doctor.doctor import as_json, ask, report

    # As the user has it: checks change it for themselves.
    env = dict(os.environ)
    asked, findings = ask(parsed.recipe, parsed.overrides, parsed.config_file, launch_options(parsed), env)
    findings = report(asked, findings, quiet=parsed.json)
    if parsed.json:
        print(as_json(findings))
    return 1 if any(finding.status == "failure" for finding in findings) else 0


def data(parsed: argparse.Namespace) -> None:
    """`finetune data`."""
    recipe = load_checked(parsed)
    from finetune.tasks.task_data import build_task_data, prepare_task_data, without_validation
    from finetune.tasks.task_lookup import find_task

    silence_libraries()
    task = find_task(recipe)
    prepared: Any
    if task.build_data is build_task_data:
        prepared = prepare_task_data(recipe)
        lines = prepared.report.lines()
    else:
        prepared = task.build_data(recipe, False)
        sides = {"train": prepared.train, "validation": prepared.validation}
        rows = [f"{name}: {len(rows):,} rows" for name, rows in sides.items() if rows is not None]
        lines = list(prepared.report_lines) or rows
    print("\n".join([*lines, *without_validation(recipe, prepared)]))
    if parsed.show and (prepared.train is not None or prepared.validation is not None):
        from finetune.data.show_examples import examples

        console = plain_console()
        for line in examples(prepared, parsed.show, coloured=console.is_terminal and not console.no_color):
            console.print(line)


def show(parsed: argparse.Namespace) -> None:
    """`finetune show`."""
    print(dump_recipe(load_recipe(parsed.recipe, parsed.overrides)), end="")


def audit(parsed: argparse.Namespace) -> int:
    """`finetune audit`; returns 1 if a row was not used exactly once."""
    from finetune.checkpoint import row_ledger

    directory = Path(parsed.run)
    first, last = row_ledger.span(parsed.steps) if parsed.steps else (0, -1)
    found = row_ledger.audit(directory)
    for line in found.lines():
        print(line)
    for entry in row_ledger.used(directory):
        if first <= entry.step + 1 <= last:
            print(f"step {entry.step + 1}: position {entry.position}, rows {' '.join(map(str, entry.rows.tolist()))}")
    return 0 if found.holds else 1


def parity(parsed: argparse.Namespace) -> int:
    """`finetune parity`; returns 1 if the runs are not on one path."""
    _prepare_libraries()
    if not Path(parsed.recipe).is_dir():
        return _launched(parsed)
    if len(parsed.overrides) != 1 or parsed.on or parsed.inject or parsed.shrink or parsed.to:
        raise RecipeError(
            f"{parsed.recipe} is a directory: finished runs are compared as `finetune parity RUN_A RUN_B`, with no "
            "option but --json. To launch, give a recipe and `--on single,ddp`."
        )
    from finetune.diagnostics.parity.compare import compare
    from finetune.diagnostics.parity.finished_run import read

    places = [Path(parsed.recipe), Path(parsed.overrides[0]).expanduser()]
    names = [place.name for place in places]
    runs = [
        read(place, name if len(set(names)) == 2 else str(place)) for place, name in zip(places, names, strict=True)
    ]
    return _result(parsed, [compare(*runs)])


def _launched(parsed: argparse.Namespace) -> int:
    if not parsed.on:
        raise RecipeError(
            "finetune parity RECIPE needs --on, such as `--on single,ddp`. (To compare two runs that have ended, give "
            f"their directories; {parsed.recipe} is none.)"
        )
    if given := [word for word in parsed.overrides if word.partition("=")[0].partition(".")[0] == "length"]:
        raise RecipeError(f"{' '.join(given)}: parity gives all runs the same few steps. Say how many with --steps.")
    recipe = load_recipe(parsed.recipe, parsed.overrides)
    from finetune.diagnostics.parity import launch_runs
    from finetune.diagnostics.parity.compare import compare

    if parsed.inject is not None and parsed.inject not in launch_runs.FAULTS:
        known = list(launch_runs.FAULTS)
        raise RecipeError(
            f"--inject: there is no fault '{parsed.inject}'{hint(parsed.inject, known)}; there are {', '.join(known)}."
        )
    configs = launch_runs.find(parsed.on)
    folder = Path(parsed.to) if parsed.to else Path(tempfile.mkdtemp(prefix="finetune-parity-"))
    holds = False
    try:
        written = launch_runs.prepare(recipe, configs, folder, steps=parsed.steps, shrink=parsed.shrink)
        runs = []
        for config in configs:
            fault = parsed.inject if config is configs[-1] else None
            place = folder / config.name
            runs.append(launch_runs.run(config, written[config.name], place, fault=fault, say=_to_stderr))
        comparisons = [compare(runs[0], other) for other in runs[1:]]
        code = _result(parsed, comparisons)
        holds = code == 0
        if parsed.inject is not None:
            seen = "caught" if not comparisons[-1].holds else "NOT caught: it changes nothing in this recipe"
            _to_stderr(f"{configs[-1].name} was broken on purpose by {parsed.inject}, which was {seen}")
        return code
    finally:
        if parsed.to is None and (holds or not any((folder / config.name).exists() for config in configs)):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _to_stderr(f"the runs are in {folder}")


def _result(parsed: argparse.Namespace, comparisons: list[Any]) -> int:
    from finetune.diagnostics.parity import parity_report

    if parsed.json:
        print(json.dumps(parity_report.to_json(comparisons), indent=2))
    else:
        parity_report.print_report(comparisons, plain_console())
    return 0 if all(comparison.holds for comparison in comparisons) else 1


def replay(parsed: argparse.Namespace) -> int:
    """`finetune replay`; returns 1 if the step is not what the run has written down."""
    _prepare_libraries()
    from finetune.diagnostics.replay import replay as run

    found = run(Path(parsed.run), parsed.step, trust_remote_code=parsed.trust_remote_code)
    found.print_to(plain_console())
    return 0 if found.holds else 1


def report(parsed: argparse.Namespace) -> None:
    """`finetune report`."""
    runs = [Path(run) for run in parsed.run]
    if parsed.live:
        from finetune.diagnostics.run_report.live_server import serve_live

        if parsed.to is not None:
            raise RecipeError("--live serves the page and writes none. Take --to out, or --live.")
        serve_live(runs, _to_stderr, price=parsed.price, host=parsed.host, port=parsed.port)
        return
    if parsed.host is not None or parsed.port is not None:
        raise RecipeError("--host and --port say where --live serves the page. Add --live, or take them out.")
    from finetune.diagnostics.run_report.write_report import write_report

    files = write_report(runs, Path(parsed.to) if parsed.to else None, price=parsed.price)
    print("\n".join(f"Written: {file}" for file in files))


def watch(parsed: argparse.Namespace) -> None:
    """`finetune watch`."""
    from rich.console import Console

    from finetune.diagnostics.watch import watch as run

    run(Path(parsed.run), Console(highlight=False), once=parsed.once)


def runs(parsed: argparse.Namespace) -> None:
    """`finetune runs`."""
    from rich.console import Console

    from finetune.diagnostics.list_runs import as_json, list_runs, table

    found = list_runs(Path(parsed.directory))
    if parsed.json:
        print(as_json(found))
        return
    if not found:
        print(f"No run below {parsed.directory}.")
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table(found))
    for one in found:
        if one.problem is not None:
            console.print(f"{one.run}: {one.problem}", markup=False)
        elif one.damaged_lines:
            console.print(f"{one.run}: {one.damaged_lines:,} damaged lines of its metrics are left out", markup=False)


def comms(parsed: argparse.Namespace) -> None:
    """`finetune comms`: in a process that a launcher started it measures; in any other it launches itself."""
    _prepare_libraries()
    if "WORLD_SIZE" not in os.environ:
        from finetune.distributed.launch.launcher import launch

        if parsed.processes is not None and parsed.processes < 2:
            raise RecipeError(f"--processes {parsed.processes}: one alone has nobody to talk to. Take two at least.")
        if parsed.json is not None and not Path(parsed.json).absolute().parent.is_dir():
            raise RecipeError(f"--json {parsed.json}: there is no folder {Path(parsed.json).parent}. Make it first.")
        if parsed.config_file is None and parsed.processes is None:
            parsed.processes = 2
        options = [] if parsed.processes is None else ["--num_processes", str(parsed.processes)]
        given = {"--min-bytes": parsed.min_bytes, "--max-bytes": parsed.max_bytes, "--factor": parsed.factor}
        words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        file = [] if parsed.json is None else ["--json", parsed.json]
        launch(parsed.config_file or launch_file("ddp"), options, ["comms", *words, *file], module="finetune")
    from finetune.distributed import measure_bandwidth

    sizes = (parsed.min_bytes, parsed.max_bytes, parsed.factor)
    said = measure_bandwidth.run(sizes, Path(parsed.json) if parsed.json else None)
    if said is not None:
        print("\n".join(said))


def plan(parsed: argparse.Namespace) -> None:
    """`finetune plan`."""
    recipe = load_recipe(parsed.recipe, parsed.overrides)
    go_offline_if_unreachable()
    with quick_imports():
        from finetune.planning import plan_report
        from finetune.planning.planner import machines_of, make, write

        silence_libraries()

    plan = make(recipe, machines_of(parsed), Path(parsed.configs) if parsed.configs else None, parsed.stored)
    console, found = plain_console(), None
    if parsed.trace:
        from finetune.planning.trace import trace_launches

        say = _to_stderr if sys.stderr.isatty() else lambda _: None
        found = trace_launches.trace(plan, trace_launches.wanted(plan, parsed.trace), parsed.stored, say)
    if parsed.json:
        print(plan_report.as_json(plan, found))
    else:
        plan_report.print_plan(plan, console, energy=parsed.energy)
        if found is not None:
            plan_report.print_traced(found, console)
    if parsed.write:
        write(plan, Path(parsed.write))
        if not parsed.json:
            print(f"Written: {parsed.write}")


def export(parsed: argparse.Namespace) -> None:
    """`finetune export`."""
    _prepare_libraries()
    from finetune.export import push_to_hub
    from finetune.export.write import export as run

    if parsed.push_to is not None:
        push_to_hub.check(parsed.push_to)  # before the work, not after it
    to = Path(parsed.to) if parsed.to else None
    options = {"to": to, "step": parsed.step, "base": parsed.base, "shard_size": parsed.shard_size}
    options["trust_remote_code"] = parsed.trust_remote_code
    folder = run(Path(parsed.run), parsed.kind, print, **options)
    if parsed.push_to is not None:
        print(f"Uploaded: {push_to_hub.push(folder, parsed.push_to)}")


def generate(parsed: argparse.Namespace) -> None:
    """`finetune generate`."""
    _prepare_libraries(parsed)
    from finetune.export import generate_text

    manner = generate_text.SamplingOptions(
        parsed.max_new_tokens, parsed.temperature, parsed.top_k, parsed.top_p, parsed.seed
    )
    place = _open(parsed)
    if not parsed.chat:
        _write(parsed.prompt)
    generate_text.generate(place, parsed.prompt, manner, _write, chat=parsed.chat)
    _write("\n")


def evaluate(parsed: argparse.Namespace) -> None:
    """`finetune eval`."""
    if parsed.harness:
        _evaluate_harness(parsed)
        return
    for option in ("num_fewshot", "limit", "batch_size"):
        if getattr(parsed, option) is not None:
            raise RecipeError(f"--{option.replace('_', '-')} is for --harness. Leave it out.")
    _prepare_libraries(parsed)
    from finetune.export import evaluate_files

    place = _open(parsed, exact=True)
    with evaluate_files.told_in_flags():
        recipe = evaluate_files.recipe_of(place, parsed.data, text_field=parsed.text_field, chat=parsed.chat)
        found = evaluate_files.score(place, recipe, _to_stderr)
    if parsed.json:
        print(json.dumps(found))
        return
    print(
        f"validation loss {found['loss']:.5f}, perplexity {found['perplexity']:.7g}, over {found['targets']:,} targets "
        f"in rows of {recipe.data.sequence_length} tokens{', a document each' * (recipe.data.packing == 'padded')}"
    )


def _evaluate_harness(parsed: argparse.Namespace) -> None:
    if parsed.text_field is not None:
        raise RecipeError("--text-field is for --data. Leave it out.")
    for option, least in (("num_fewshot", 0), ("limit", 1), ("batch_size", 1)):
        value = getattr(parsed, option)
        if value is not None and value < least:
            raise RecipeError(f"--{option.replace('_', '-')} is {value}; give {least} or more.")
    _prepare_libraries(parsed)
    from finetune.export import evaluate_harness, harness_results

    evaluate_harness.check_extra()
    place = _open(parsed, exact=True)
    if place.home is not None:
        harness_results.read_results(place.home)  # before the work, not after it
    options = {"num_fewshot": parsed.num_fewshot, "limit": parsed.limit, "batch_size": parsed.batch_size}
    rows = evaluate_harness.score(place, parsed.harness, chat=parsed.chat, **options)
    if parsed.json:
        print(json.dumps(rows, indent=2))
    else:
        plain_console().print(evaluate_harness.table(rows))
    if place.home is not None:
        _to_stderr(f"Written: {harness_results.add_results(place.home, rows)}")


def _open(parsed: argparse.Namespace, *, exact: bool = False) -> "LoadedModel":
    from finetune.export.load_model import load_model

    trusted = parsed.trust_remote_code
    place = load_model(parsed.run, step=parsed.step, base=parsed.base, exact=exact, trust_remote_code=trusted)
    for line in place.lines:
        _to_stderr(line)
    return place


def launch_options(parsed: argparse.Namespace) -> dict[str, str]:
    """The options of the launcher that were given."""
    return {option: value for option in OPTIONS if (value := getattr(parsed, option)) is not None}


def schema(parsed: argparse.Namespace) -> None:
    """`finetune schema`."""
    print(SCHEMA_FILE if parsed.path else json.dumps(json_schema(), indent=2))


def completion(parsed: argparse.Namespace) -> None:
    """`finetune completion`."""
    from finetune.cli.completion import script

    print(script(parsed.shell))


def ops(parsed: argparse.Namespace) -> None:
    """`finetune ops`."""
    from finetune.distributed.native_ops.native_ops import build_all

    build_all()


def _prepare_libraries(parsed: argparse.Namespace | None = None) -> None:
    """Before the libraries are imported: whether the hub can be reached, and has what is named as a model.

    Args:
        parsed: Arguments of which `run` and `base` may be names on the hub; said, since opening takes a while.
    """
    go_offline_if_unreachable()
    if parsed is not None:
        if text := untried():
            _to_stderr(text)
        _to_stderr(f"Opening {parsed.run}.")
        hub_access.require(parsed.run, None)
        hub_access.require(parsed.base, "--base")
    silence_libraries()


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "init": init,
    "launch": launch,
    "explain": explain,
    "doctor": doctor,
    "data": data,
    "show": show,
    "audit": audit,
    "export": export,
    "generate": generate,
    "eval": evaluate,
    "parity": parity,
    "replay": replay,
    "report": report,
    "watch": watch,
    "runs": runs,
    "comms": comms,
    "plan": plan,
    "schema": schema,
    "completion": completion,
    "ops": ops,
}
