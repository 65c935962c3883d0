"""Verbs that take run directories: audit, parity, replay, report, watch, runs."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from finetune.cli.arguments import add_trust_argument, add_verb, prepare_libraries, to_stderr
from finetune.utils.errors import RecipeError
from finetune.utils.shipped_files import recipe_file


def add_run_verbs(verbs: Any) -> None:
    """Adds the verbs of this file."""
    verb = add_verb(verbs, "audit", audit, "verify that each row of each epoch was used exactly once")
    verb.add_argument("run", help="a run directory, such as runs/sample")
    verb.add_argument("--steps", metavar="A:B", help="also list the rows that steps A to B used, counted from 1")

    text = "train a recipe under several launch configs, or take two finished runs, and compare them step by step"
    verb = add_verb(verbs, "parity", parity, text)
    verb.add_argument("recipe", type=recipe_file, help="a recipe, by name or path, or the directory of a finished run")
    verb.add_argument("overrides", nargs="*", metavar="key.key=value", help="for a recipe; else a second run")
    verb.add_argument(
        "--on", metavar="A,B,…", help="names of accelerate_configs/, or files; the first is the reference"
    )
    verb.add_argument("--steps", type=int, default=20, help="optimiser steps of each run; 20 if left out")
    verb.add_argument("--shrink", action="store_true", help="a small random network of the same architecture")
    verb.add_argument("--inject", metavar="FAULT", help="break the last one on purpose, to see that it is caught")
    verb.add_argument("--to", metavar="DIR", help="keep the runs there; else they are kept only where they differ")
    verb.add_argument("--json", action="store_true", help="print the result as JSON")

    text = "repeat a step of a run exactly, and show its batch, loss and gradient norm"
    verb = add_verb(verbs, "replay", replay, text)
    verb.add_argument("run", help="a run directory, such as runs/sample; nothing in it changes")
    verb.add_argument("--step", type=int, required=True, metavar="N", help="counted from 1, as in metrics.jsonl")
    add_trust_argument(verb)

    text = "write a page of one run, or of several over each other, that opens offline"
    verb = add_verb(verbs, "report", report, text)
    verb.add_argument("run", nargs="+", help="run directories, such as runs/sample; finished or under way")
    verb.add_argument(
        "--to",
        metavar="FILE",
        help="the page; RUN/report/report.html, or report-A-B/report.html for several runs",
    )
    verb.add_argument("--price", type=float, metavar="MONEY", help="of a GPU (or a process on CPUs) and hour")
    verb.add_argument("--live", action="store_true", help="serve the page on this machine instead, kept up to date")
    verb.add_argument("--host", help="with --live: the address to serve on, instead of 127.0.0.1")
    verb.add_argument("--port", type=int, help="with --live: the port, instead of one that is free")

    verb = add_verb(verbs, "watch", watch, "watch a run in the terminal: progress, losses, time left, last sample")
    verb.add_argument("run", help="a run directory, here or mounted from another machine")
    verb.add_argument("--once", action="store_true", help="show it once, and end")

    verb = add_verb(verbs, "runs", runs, "list runs: status, step, best validation loss, launch, duration")
    verb.add_argument("directory", nargs="?", default="runs", help="where to look for runs, at any depth (runs)")
    verb.add_argument("--json", action="store_true", help="for programs")


def audit(parsed: argparse.Namespace) -> int:
    """`finetune audit`; returns 1 if a row was not used exactly once."""
    from finetune.checkpoint import row_ledger

    directory = Path(parsed.run)
    first, last = row_ledger.parse_steps(parsed.steps) if parsed.steps else (0, -1)
    found = row_ledger.audit_ledger(directory)
    for line in found.lines():
        print(line)
    for entry in row_ledger.used_rows(directory):
        if first <= entry.step + 1 <= last:
            print(f"step {entry.step + 1}: position {entry.position}, rows {' '.join(map(str, entry.rows.tolist()))}")
    return 0 if found.holds else 1


def parity(parsed: argparse.Namespace) -> int:
    """`finetune parity`; returns 1 if the runs are not on one path."""
    prepare_libraries()
    if not Path(parsed.recipe).is_dir():
        return _compare_launches(parsed)
    if len(parsed.overrides) != 1 or parsed.on or parsed.inject or parsed.shrink or parsed.to:
        raise RecipeError(
            f"{parsed.recipe} is a directory: finished runs are compared as `finetune parity RUN_A RUN_B`, with no "
            "option but --json. To launch, give a recipe and `--on single,ddp`."
        )
    from finetune.diagnostics.parity.compare import compare_runs
    from finetune.diagnostics.parity.finished_run import read_finished

    places = [Path(parsed.recipe), Path(parsed.overrides[0]).expanduser()]
    names = [place.name for place in places]
    if names[0] == names[1]:
        names = [str(place) for place in places]
    runs = [read_finished(place, name) for place, name in zip(places, names, strict=True)]
    return _print_comparisons(parsed, [compare_runs(*runs)])


def _compare_launches(parsed: argparse.Namespace) -> int:
    from finetune.config.recipe import hint, load_recipe
    from finetune.tasks.task_lookup import BUILT_IN

    if not parsed.on:
        raise RecipeError(
            "finetune parity RECIPE needs --on, such as `--on single,ddp`. (To compare two runs that have ended, give "
            f"their directories; {parsed.recipe} is none.)"
        )
    if given := [word for word in parsed.overrides if word.partition("=")[0].partition(".")[0] == "length"]:
        raise RecipeError(f"{' '.join(given)}: parity gives all runs the same few steps. Say how many with --steps.")
    recipe = load_recipe(parsed.recipe, parsed.overrides, BUILT_IN)
    from finetune.diagnostics.parity import launch_runs
    from finetune.diagnostics.parity.compare import compare_runs

    if parsed.inject is not None:
        from finetune.diagnostics.fault_injection import FAULTS

        if parsed.inject not in FAULTS:
            known = list(FAULTS)
            raise RecipeError(
                f"--inject: there is no fault '{parsed.inject}'{hint(parsed.inject, known)}; there are "
                f"{', '.join(known)}."
            )
    launches = launch_runs.find_launches(parsed.on)
    *_, last = launches
    folder = Path(parsed.to) if parsed.to else Path(tempfile.mkdtemp(prefix="finetune-parity-"))
    holds = False
    try:
        written = launch_runs.write_recipes(recipe, launches, folder, steps=parsed.steps, shrink=parsed.shrink)
        runs = []
        for name, launch in launches.items():
            fault = parsed.inject if name == last else None
            runs.append(launch_runs.launch_run(launch, written[name], folder / name, fault=fault, say=to_stderr))
        comparisons = [compare_runs(runs[0], other) for other in runs[1:]]
        code = _print_comparisons(parsed, comparisons)
        holds = code == 0
        if parsed.inject is not None:
            seen = "caught" if not comparisons[-1].holds else "NOT caught: it changes nothing in this recipe"
            to_stderr(f"{last} was broken on purpose by {parsed.inject}, which was {seen}")
        return code
    finally:
        if parsed.to is None and (holds or not any((folder / name).exists() for name in launches)):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            to_stderr(f"the runs are in {folder}")


def _print_comparisons(parsed: argparse.Namespace, comparisons: list[Any]) -> int:
    from finetune.diagnostics.parity import parity_report
    from finetune.utils.console import plain_console

    if parsed.json:
        print(json.dumps(parity_report.report_as_json(comparisons), indent=2))
    else:
        parity_report.print_report(comparisons, plain_console())
    return 0 if all(comparison.holds for comparison in comparisons) else 1


def replay(parsed: argparse.Namespace) -> int:
    """`finetune replay`; returns 1 if the step is not what the run has written down."""
    from finetune.utils.console import plain_console

    prepare_libraries()
    from finetune.diagnostics.replay import replay_step

    found = replay_step(Path(parsed.run), parsed.step, trust_remote_code=parsed.trust_remote_code)
    found.print_to(plain_console())
    return 0 if found.holds else 1


def report(parsed: argparse.Namespace) -> None:
    """`finetune report`."""
    runs = [Path(run) for run in parsed.run]
    if parsed.live:
        from finetune.diagnostics.run_report.live_server import serve_live

        if parsed.to is not None:
            raise RecipeError("--live serves the page and writes none. Take --to out, or --live.")
        serve_live(runs, to_stderr, price=parsed.price, host=parsed.host, port=parsed.port)
        return
    if parsed.host is not None or parsed.port is not None:
        raise RecipeError("--host and --port say where --live serves the page. Add --live, or take them out.")
    from finetune.diagnostics.run_report.write_report import write_report

    files = write_report(runs, Path(parsed.to) if parsed.to else None, price=parsed.price)
    print("\n".join(f"Written: {file}" for file in files))


def watch(parsed: argparse.Namespace) -> None:
    """`finetune watch`."""
    from rich.console import Console

    from finetune.diagnostics.watch import watch_run

    watch_run(Path(parsed.run), Console(highlight=False), once=parsed.once)


def runs(parsed: argparse.Namespace) -> None:
    """`finetune runs`."""
    from rich.console import Console

    from finetune.diagnostics.list_runs import list_runs, runs_table

    found = list_runs(Path(parsed.directory))
    if parsed.json:
        print(json.dumps([vars(one) for one in found], indent=2))
        return
    if not found:
        print(f"No run below {parsed.directory}.")
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(runs_table(found))
    for one in found:
        if one.problem is not None:
            console.print(f"{one.run}: {one.problem}", markup=False)
        elif one.damaged_lines:
            console.print(f"{one.run}: {one.damaged_lines:,} damaged lines of its metrics are left out", markup=False)
