"""Arguments that several verbs take, and what several verbs do first."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from finetune.distributed.launch.launch_options import OPTIONS
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import silence_libraries
from finetune.utils.shipped_files import launch_file


def add_verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int | None], text: str
) -> argparse.ArgumentParser:
    """Adds a verb.

    Args:
        run: Does what the verb is for, and returns the exit code; None is 0.
        text: Describes it in `finetune --help`.
    """
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    verb.set_defaults(run_verb=run)
    return verb


def add_launch_arguments(verb: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the launch file, and the options that replace its values."""
    verb.add_argument(
        "--config_file", required=required, type=launch_file, help="a launch file, by name or path: ddp, my/launch.yaml"
    )
    for option, what in OPTIONS.items():
        verb.add_argument(f"--{option}", help=f"{what}, instead of the launch file's")


def launch_options(parsed: argparse.Namespace) -> dict[str, str]:
    """Returns the options of the launcher that were given."""
    return {option: value for option in OPTIONS if (value := getattr(parsed, option)) is not None}


def add_weights_arguments(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which weights of a run or adapter to take."""
    verb.add_argument("--step", type=int, help="of a run, the checkpoint's step; the last one if left out")
    verb.add_argument("--base", help="where the base lies now, if not where the run or adapter says")
    add_trust_argument(verb)


def add_trust_argument(verb: argparse.ArgumentParser) -> None:
    """Adds --trust-remote-code."""
    verb.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that ships with the model, or that the recipe of a run from elsewhere names",
    )


def prepare_libraries() -> None:
    """Tells libraries, before they are imported, to be silent and whether the hub can be reached."""
    go_offline_if_unreachable()
    silence_libraries()


def to_stderr(text: str) -> None:
    """Prints a line on stderr."""
    print(text, file=sys.stderr, flush=True)
