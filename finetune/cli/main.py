"""The command line: `finetune <verb>`. A verb imports what it needs when it runs."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from finetune import __version__
from finetune.cli import commands
from finetune.config import recipe_paths
from finetune.config.recipe import dump_recipe, json_schema, load_recipe
from finetune.training.entry_point import DRY_RUN_HELP, add_recipe_arguments, load_checked
from finetune.utils import hub_access
from finetune.utils.exit_codes import guarded
from finetune.utils.hub_access import go_offline_if_unreachable

# The options of `accelerate launch` that can differ from the launch file, or from machine to machine.
_LAUNCH_OPTIONS = {
    "num_processes": "processes over all machines",
    "machine_rank": "this machine's number, from 0",
    "main_process_ip": "the first machine's address",
    "main_process_port": "a port that is free on it",
    "max_restarts": "how often to start again after a failure",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """`finetune <verb> …`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="finetune", description="Fine-tuning on every backend.")
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser("launch", help="train, as `accelerate launch` does, but check the recipe first")
    _launch_arguments(verb, required=True)
    add_recipe_arguments(verb)
    verb.add_argument("--dry-run", action="store_true", help=DRY_RUN_HELP)
    verb = verbs.add_parser("explain", help="say of every value who set it, what that overrode, and what it means")
    _launch_arguments(verb, required=False)
    verb.add_argument("recipe", help="a recipe, such as recipes/sample.yaml")
    verb.add_argument(
        "words", nargs="*", metavar="KEY | key.key=value", help="a key to explain; values to explain with"
    )
    verb.add_argument("--all", action="store_true", help="also what is default")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb = verbs.add_parser("doctor", help="check what a run would need on this machine, and say what to do")
    _launch_arguments(verb, required=False)
    verb.add_argument("--recipe", help="a recipe, such as recipes/sample.yaml")
    verb.add_argument("overrides", nargs="*", metavar="key.key=value", help="instead of the recipe's values")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb = verbs.add_parser("data", help="prepare a recipe's data and print its report")
    verb.add_argument("--show", type=int, metavar="N", help="also print N examples as tokens, the learned ones marked")
    add_recipe_arguments(verb)
    add_recipe_arguments(verbs.add_parser("show", help="print the whole recipe, defaults included"))
    verb = verbs.add_parser("audit", help="prove from a run's ledger that each row of each epoch was used exactly once")
    verb.add_argument("run", help="a run directory, such as runs/sample")
    verb.add_argument("--steps", metavar="A:B", help="also list the rows that steps A to B used, counted from 1")
    commands.add_model_commands(verbs)
    commands.add_run_commands(verbs)
    add_recipe_arguments(commands.add_plan_command(verbs))
    verbs.add_parser("schema", help="print the JSON schema of recipes, for editors")
    verbs.add_parser("ops", help="build native ops ahead of the first run that needs them")
    parsed = _parse(parser, arguments)
    run = {"launch": _launch, "data": _data, "show": _show, "audit": _audit, "schema": _schema, "ops": _ops}
    run |= {"explain": _explain, "doctor": _doctor}
    run["plan"] = _plan
    run["export"] = _artefacts(commands.export)
    run["generate"] = _artefacts(partial(commands.generate, say=_to_stderr), "run", "base")
    run["eval"] = _artefacts(partial(commands.evaluate, say=_to_stderr), "run", "base")
    run["parity"] = _artefacts(partial(commands.parity, say=_to_stderr))
    run |= {"replay": _artefacts(commands.replay), "comms": _artefacts(commands.comms)}
    return guarded(partial(run[parsed.verb], parsed))


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; a recipe's overrides may also come behind options, which argparse takes amiss."""
    parsed, left = parser.parse_known_args(arguments)
    if left and (not hasattr(parsed, "overrides") or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        parsed.overrides += left
    return parsed


def _launch_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--config_file", required=required, help="such as accelerate_configs/ddp.yaml")
    for option, what in _LAUNCH_OPTIONS.items():
        parser.add_argument(f"--{option}", help=f"{what}, instead of the launch file's")


def _launch_options(parsed: argparse.Namespace) -> dict[str, str]:
    return {option: value for option in _LAUNCH_OPTIONS if (value := getattr(parsed, option)) is not None}


def _data(parsed: argparse.Namespace) -> None:
    recipe = load_checked(parsed)
    from finetune.data.prepare import prepare_data

    prepared = prepare_data(recipe)
    print("\n".join(prepared.report.lines()))
    if parsed.show:
        from rich.console import Console

        from finetune.data.show_examples import examples

        console = Console(soft_wrap=True, highlight=False)
        for line in examples(prepared, parsed.show, coloured=console.is_terminal and not console.no_color):
            console.print(line)


def _show(parsed: argparse.Namespace) -> None:
    print(dump_recipe(load_recipe(parsed.recipe, parsed.overrides)), end="")


def _explain(parsed: argparse.Namespace) -> None:
    from finetune.diagnostics import explain
    from finetune.diagnostics.explain import explain_values, select_values

    overrides = [word for word in parsed.words if "=" in word]
    keys = [word for word in parsed.words if "=" not in word]
    values = explain_values(parsed.recipe, overrides, parsed.config_file, _launch_options(parsed), os.environ)
    chosen = [value for key in keys for value in select_values(values, key)]
    if not keys:
        chosen = [value for value in values if parsed.all or not value.is_default]
    if parsed.json:
        print(explain.as_json(chosen))
    elif len(chosen) == 1:
        print(explain.page(chosen[0]))
    else:
        print(explain.table(chosen))


def _doctor(parsed: argparse.Namespace) -> int:
    from finetune.diagnostics.doctor import doctor

    # As the user has it: checks change it for themselves.
    env = dict(os.environ)
    asked, findings = doctor.ask(parsed.recipe, parsed.overrides, parsed.config_file, _launch_options(parsed), env)
    findings = doctor.report(asked, findings, quiet=parsed.json)
    if parsed.json:
        print(doctor.as_json(findings))
    return 1 if any(finding.status == "failure" for finding in findings) else 0


def _audit(parsed: argparse.Namespace) -> int:
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


def _artefacts(
    verb: Callable[[argparse.Namespace, Callable[[str], None]], int | None], *models: str
) -> Callable[..., int | None]:
    """A verb that takes models.

    Args:
        models: The arguments that may be a model's name on the hub.
    """

    def run(parsed: argparse.Namespace) -> int | None:
        go_offline_if_unreachable()
        for name in models:
            hub_access.require(getattr(parsed, name), "--base" if name == "base" else None)
        from finetune.utils.silence_libraries import silence_libraries

        silence_libraries()
        return verb(parsed, lambda text: print(text, end="", flush=True))

    return run


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _plan(parsed: argparse.Namespace) -> None:
    recipe = load_recipe(parsed.recipe, parsed.overrides)
    go_offline_if_unreachable()
    from finetune.utils.silence_libraries import silence_libraries

    silence_libraries()
    commands.plan(parsed, recipe)


def _schema(parsed: argparse.Namespace) -> None:
    print(json.dumps(json_schema(), indent=2))


def _ops(parsed: argparse.Namespace) -> None:
    from finetune.distributed.native_ops.native_ops import build_all

    build_all()


def _launch(parsed: argparse.Namespace) -> None:
    recipe = load_recipe(parsed.recipe, parsed.overrides)
    recipe_paths.check(recipe)
    if parsed.dry_run:
        from finetune.distributed.launch.launch_environment import read_launch_environment
        from finetune.training.dry_run import describe

        go_offline_if_unreachable()
        print(describe(recipe, read_launch_environment(parsed.config_file, _launch_options(parsed), os.environ)))
        return
    from finetune.distributed.launch.launcher import launch

    options = [word for option, value in _launch_options(parsed).items() for word in (f"--{option}", value)]
    launch(parsed.config_file, options, [parsed.recipe, *parsed.overrides], grace_s=recipe.guard.grace_s)
