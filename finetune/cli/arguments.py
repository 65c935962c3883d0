"""Arguments that several verbs take, and what several verbs do first."""

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from finetune.distributed.launch.launch_options import OPTIONS
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import silence_libraries
from finetune.utils.shipped_files import launch_file

if TYPE_CHECKING:
    from finetune.config.recipe_schema import Recipe


def add_verb(verbs: Any, run: Callable[[argparse.Namespace], int | None], name: str = "") -> argparse.ArgumentParser:
    """Adds a verb.

    Args:
        run: Function of the verb, whose docstring is its help; it returns the exit code, or None for 0.
        name: Name of the verb, if it is not the function's.
    """
    text = run.__doc__ or ""
    text_in_list = f"{text[:1].lower()}{text[1:]}".removesuffix(".")
    verb: argparse.ArgumentParser = verbs.add_parser(name or run.__name__, help=text_in_list, description=text)
    verb.set_defaults(run_verb=run)
    return verb


def add_launch_arguments(verb: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the launch file, and the options that replace its values."""
    add_config_file(verb, "a launch file, by name or path: ddp, my/launch.yaml", required=required)
    options = verb.add_argument_group("launch options", "They replace values of the launch file.")
    for option, text in OPTIONS.items():
        options.add_argument(f"--{option}", help=text)


def add_machine_arguments(verb: argparse.ArgumentParser) -> None:
    """Adds how long machines of one launch wait for each other."""
    waits = verb.add_argument_group("several machines")
    text = "seconds within which all machines must have started (default: 300)"
    waits.add_argument("--join-timeout", type=_seconds, metavar="S", help=text)
    text = "seconds after which a machine that does not answer is given up (default: 30)"
    waits.add_argument("--heartbeat-timeout", type=_seconds, metavar="S", help=text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"it takes a number of seconds from 1, got {text}")
    return seconds


def machine_timeouts(parsed: argparse.Namespace) -> dict[str, float]:
    """Returns the arguments of `add_machine_arguments` that were given."""
    names = ("join_timeout", "heartbeat_timeout")
    return {f"{name}_s": value for name in names if (value := getattr(parsed, name)) is not None}


def add_config_file(verb: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
    """Adds the launch file."""
    verb.add_argument("--config_file", required=required, type=launch_file, metavar="FILE", help=text)


def launch_options(parsed: argparse.Namespace) -> dict[str, str]:
    """Returns the options of the launcher that were given."""
    return {option: value for option in OPTIONS if (value := getattr(parsed, option)) is not None}


def add_weights_arguments(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which weights of a run or adapter to take."""
    verb.add_argument("--step", type=int, help="step of the checkpoint of a run (default: the last one)")
    verb.add_argument("--base", help="where the base model is now, if it was moved since the run or adapter was made")
    add_trust_argument(verb)


def add_trust_argument(verb: argparse.ArgumentParser) -> None:
    """Adds --trust-remote-code."""
    verb.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that ships with the model, or that the recipe of a run from elsewhere names",
    )


def add_json_argument(verb: argparse.ArgumentParser) -> None:
    """Adds --json."""
    verb.add_argument("--json", action="store_true", help="print the result as JSON")


def load_named_recipe(parsed: argparse.Namespace) -> "Recipe":
    """Returns the recipe that the command line names, with its overrides."""
    from finetune.config.recipe import load_recipe
    from finetune.tasks.task_lookup import BUILT_IN

    return load_recipe(parsed.recipe, parsed.overrides, BUILT_IN, quiet=getattr(parsed, "quiet", False))


def prepare_libraries() -> None:
    """Tells libraries, before they are imported, to be silent and whether the hub can be reached."""
    go_offline_if_unreachable()
    silence_libraries()
