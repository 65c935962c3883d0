"""Verbs that take run directories: audit, parity, replay, report, watch, runs."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from finetune.cli import arguments
from finetune.utils.errors import RecipeError
from finetune.utils.quoting import to_stderr, to_stdout
from finetune.utils.shipped_files import recipe_file


def add_verbs(verbs: Any) -> None:
    """Adds the verbs of this file."""
    verb = arguments.add_verb(verbs, audit)
    verb.add_argument("run", help="a run directory, such as runs/sample")
    verb.add_argument("--steps", metavar="A:B", help="also list the rows that steps A to B used, counted from 1")

    verb = arguments.add_verb(verbs, parity)
    verb.add_argument("recipe", type=recipe_file, help="a recipe, by name or path, or the directory of a finished run")
    text = "a value that replaces the recipe's; or the directory of another run, as many as there are"
    verb.add_argument("overrides", nargs="*", metavar="key.key=value", help=text)
    verb.add_argument("--on", metavar="A,B,…", help="launch files, by name or path; the first is the reference")
    text = "processes of each run, instead of its launch file's: 1 on a machine with one GPU"
    verb.add_argument("--num_processes", type=int, metavar="N", help=text)
    verb.add_argument("--steps", type=int, default=20, metavar="N", help="optimiser steps of each run (default: 20)")
    verb.add_argument("--shrink", action="store_true", help="use a small random network of the same architecture")
    verb.add_argument("--inject", metavar="FAULT", help="break the last run on purpose, to see that it is caught")
    verb.add_argument("--to", metavar="DIR", help="keep the runs in this folder (default: only runs that differ stay)")
    arguments.add_json_argument(verb)

    verb = arguments.add_verb(verbs, replay)
    verb.add_argument("run", help="a run directory, such as runs/sample; nothing in it changes")
    verb.add_argument("--step", type=int, required=True, metavar="N", help="counted from 1, as in metrics.jsonl")
    arguments.add_trust_argument(verb)

    verb = arguments.add_verb(verbs, report)
    verb.add_argument("run", nargs="+", help="run directories, such as runs/sample; finished or still running")
    text = "the page (default: RUN/report/report.html, or report-A-B/report.html for several runs)"
    verb.add_argument("--to", metavar="FILE", help=text)
    verb.add_argument("--price", type=float, metavar="MONEY", help="price of a GPU (or a process on CPUs) for an hour")
    verb.add_argument("--live", action="store_true", help="serve the page on this machine instead, and keep it current")
    verb.add_argument("--host", help="with --live: the address to serve on (default: 127.0.0.1)")
    verb.add_argument("--port", type=int, help="with --live: the port (default: a free one)")

    verb = arguments.add_verb(verbs, watch)
    verb.add_argument("run", help="a run directory, on this machine or mounted from another")
    verb.add_argument("--once", action="store_true", help="print the current state once, and exit")

    verb = arguments.add_verb(verbs, runs)
    verb.add_argument("directory", nargs="?", default="runs", help="where to look, at any depth (default: runs)")
    arguments.add_json_argument(verb)


def audit(parsed: argparse.Namespace) -> int:
    """Verify that each row of each epoch was used exactly once."""
    from finetune.checkpoint import row_ledger

    directory = Path(parsed.run)
    first, _, last = (parsed.steps or "0:-1").partition(":")
    try:
        listed = range(int(first), int(last or first) + 1)
    except ValueError as error:
        raise RecipeError(f"--steps {parsed.steps}: give A:B, such as 100:120, or one step.") from error
    result = row_ledger.audit_ledger(directory)
    to_stdout("\n".join(result.lines()))
    for entry in row_ledger.used_rows(directory):
        if entry.step + 1 in listed:
            print(f"step {entry.step + 1}: position {entry.position}, rows {' '.join(map(str, entry.rows.tolist()))}")
    return 0 if result.holds else 1


def parity(parsed: argparse.Namespace) -> int:
    """Compare a recipe under several launch files, or finished runs with the first of them, step by step."""
    arguments.prepare_libraries()
    if not Path(parsed.recipe).is_dir():
        return _compare_launches(parsed)
    if not parsed.overrides or parsed.on or parsed.inject or parsed.shrink or parsed.to:
        raise RecipeError(
            f"{parsed.recipe} is a directory: finished runs are compared as `finetune parity RUN_A RUN_B …`, with no "
            "option but --json. To launch, give a recipe and `--on single,ddp`."
        )
    from finetune.diagnostics.parity.compare import compare_runs, read_finished

    places = [Path(parsed.recipe), *(Path(other).expanduser() for other in parsed.overrides)]
    alike = len({directory.name for directory in places}) < len(places)
    first, *others = (read_finished(directory, str(directory) if alike else directory.name) for directory in places)
    return _print_comparisons(parsed, [compare_runs(first, other) for other in others])


def _compare_launches(parsed: argparse.Namespace) -> int:
    from finetune.config.recipe import hint

    if not parsed.on:
        raise RecipeError(
            "finetune parity RECIPE needs --on, such as `--on single,ddp`. (To compare two finished runs, give "
            f"their directories; {parsed.recipe} is not one.)"
        )
    if given := [word for word in parsed.overrides if word.partition("=")[0].partition(".")[0] == "length"]:
        raise RecipeError(f"{' '.join(given)}: parity gives all runs the same few steps. Set how many with --steps.")
    recipe = arguments.load_named_recipe(parsed)
    from finetune.diagnostics.parity import launch_runs
    from finetune.diagnostics.parity.compare import compare_runs

    if parsed.inject is not None:
        from finetune.diagnostics.fault_injection import FAULTS

        if parsed.inject not in FAULTS:
            near = hint(parsed.inject, list(FAULTS))
            raise RecipeError(f"--inject: there is no fault '{parsed.inject}'{near}; there are {', '.join(FAULTS)}.")
    launches = launch_runs.find_launches(parsed.on, parsed.num_processes)
    *_, last = launches
    folder = Path(parsed.to) if parsed.to else Path(tempfile.mkdtemp(prefix="finetune-parity-"))
    code = 1
    try:
        written = launch_runs.write_recipes(recipe, launches, folder, steps=parsed.steps, shrink=parsed.shrink)
        runs = []
        for name, launch in launches.items():
            fault = parsed.inject if name == last else None
            broken = f", with {fault}" if fault else ""
            to_stderr(f"\n{name}: {launch.num_processes} process(es), {launch.file}{broken}")
            runs.append(launch_runs.launch_run(launch, written[name], folder / name, fault))
        comparisons = [compare_runs(runs[0], other) for other in runs[1:]]
        code = _print_comparisons(parsed, comparisons)
        if parsed.inject is not None:
            seen = "caught" if not comparisons[-1].holds else "NOT caught: it changes nothing in this recipe"
            to_stderr(f"{last} was broken on purpose by {parsed.inject}, which was {seen}")
        return code
    finally:
        if parsed.to is None and (code == 0 or not any((folder / name).exists() for name in launches)):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            to_stderr(f"the runs are in {folder}")


def _print_comparisons(parsed: argparse.Namespace, comparisons: list[Any]) -> int:
    from finetune.diagnostics.parity import compare
    from finetune.utils.console import plain_console

    if parsed.json:
        print(json.dumps(compare.report_as_json(comparisons), indent=2))
    else:
        compare.print_report(comparisons, plain_console())
    return 0 if all(comparison.holds for comparison in comparisons) else 1


def replay(parsed: argparse.Namespace) -> int:
    """Repeat a step of a run exactly, and show its batch, loss and gradient norm."""
    from finetune.utils.console import plain_console

    arguments.prepare_libraries()
    from finetune.diagnostics.replay import replay_step

    replayed = replay_step(Path(parsed.run), parsed.step, trust_remote_code=parsed.trust_remote_code)
    replayed.print_to(plain_console())
    return 0 if replayed.holds else 1


def report(parsed: argparse.Namespace) -> None:
    """Write an HTML report of a run, or of several runs side by side, that opens offline."""
    from finetune.diagnostics.run_report.write_and_serve import serve_live, write_report

    runs = [Path(run) for run in parsed.run]
    if parsed.live:
        if parsed.to is not None:
            raise RecipeError("--live serves the page, and writes no file. Remove --to or --live.")
        serve_live(runs, to_stderr, price=parsed.price, host=parsed.host, port=parsed.port)
        return
    if parsed.host is not None or parsed.port is not None:
        raise RecipeError("--host and --port are for --live. Add --live, or remove them.")
    files = write_report(runs, Path(parsed.to) if parsed.to else None, price=parsed.price)
    to_stdout("\n".join(f"Written: {file}" for file in files))


def watch(parsed: argparse.Namespace) -> None:
    """Watch a run in the terminal: progress, losses, time left, last sample."""
    from finetune.diagnostics.watch_and_list import watch_run
    from finetune.utils.console import plain_console

    watch_run(Path(parsed.run), plain_console(soft_wrap=False), once=parsed.once)


def runs(parsed: argparse.Namespace) -> None:
    """List runs: status, step, best validation loss, launch, duration."""
    from finetune.diagnostics.watch_and_list import list_runs, runs_table
    from finetune.utils.console import plain_console

    summaries = list_runs(Path(parsed.directory))
    if parsed.json:
        print(json.dumps([vars(one) for one in summaries], indent=2))
        return
    if not summaries:
        print(f"There are no runs below {parsed.directory}.")
        return
    console = plain_console(soft_wrap=False)
    if not console.is_terminal:
        console.width = 160
    console.print(runs_table(summaries))
    for one in summaries:
        if one.problem is not None:
            console.print(f"{one.run}: {one.problem}")
        elif one.damaged_lines:
            console.print(f"{one.run}: {one.damaged_lines:,} damaged lines of its metrics are ignored")
