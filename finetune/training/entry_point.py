"""Entry point of each process of a launch: `scripts/train.py`, from its arguments to its exit code."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from finetune.distributed.launch.launch_options import CONFIG_FLAGS
from finetune.utils import hub_access, orphan_watch, signals
from finetune.utils.errors import FinetuneError
from finetune.utils.exit_codes import REQUEUE, USER_ERROR, run_guarded, say_failure
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import quick_imports, silence_libraries
from finetune.utils.quoting import to_stdout
from finetune.utils.shipped_files import launch_file, recipe_file

if TYPE_CHECKING:
    from finetune.config.recipe_schema import Recipe

# How long a process that is asked to end before its first step may take to clean up.
_PATIENCE_S = 10.0

DRY_RUN_HELP = "check everything but data and weights, and exit"


def train_main(arguments: Sequence[str] | None = None) -> int:
    """Runs `scripts/train.py`, in each process of a launch; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/train.py",
        description="Train a recipe in each process that a launcher starts, or in one process without a launcher.",
        epilog="example: finetune launch --config_file accelerate_configs/ddp.yaml recipes/sample.yaml optim.lr=1e-3",
    )
    add_recipe_arguments(parser, optional=True)
    parser.add_argument("--dry-run", action="store_true", help=DRY_RUN_HELP)
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    text = "the launch file, by name or path, if torchrun or no launcher started this"
    parser.add_argument("--config_file", type=launch_file, metavar="FILE", help=text)
    # Given by launchers that are refused.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument(*CONFIG_FLAGS, dest="foreign_config", nargs="?", const="", help=argparse.SUPPRESS)
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.recipe is None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            parser.print_help(sys.stderr)
        return USER_ERROR
    signals.outlive_readers()
    if parsed.local_rank is not None or parsed.foreign_config is not None:
        from finetune.distributed.launch.launch_config import refuse_launcher

        return run_guarded(partial(refuse_launcher, parsed.recipe, parsed.foreign_config or ""))
    return run_guarded(partial(_work, parsed))


def _work(parsed: argparse.Namespace) -> int | None:
    if parsed.config_file is not None:
        from finetune.distributed.launch.launch_config import take_launch_file

        take_launch_file(parsed.config_file)
    if not parsed.dry_run:
        return _train(parsed)
    _dry_run(parsed)
    return None


def add_recipe_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "recipe",
        nargs="?" if optional else None,
        type=recipe_file,
        help="a recipe, by name or path: sample, my/recipe.yaml",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.key=value", help="a value that replaces the recipe's")


def load_checked(parsed: argparse.Namespace) -> "Recipe":
    """The recipe, once the models that it names can be had: this is known before the libraries are imported."""
    from finetune.config import recipe_paths
    from finetune.config.recipe import load_recipe
    from finetune.tasks.task_lookup import BUILT_IN

    quiet = getattr(parsed, "quiet", False) or orphan_watch.is_own_launcher()  # which has said it
    recipe = load_recipe(parsed.recipe, parsed.overrides, BUILT_IN, quiet=quiet)
    recipe_paths.check_paths(recipe)
    go_offline_if_unreachable()
    hub_access.require_model(recipe.model.name, "model.name")
    hub_access.require_model(recipe.tokenizer.name, "tokenizer.name")
    for key, section in recipe.frozen_models.items():
        hub_access.require_model(section.name, f"{key}.name")
    return recipe


def _train(parsed: argparse.Namespace) -> int:
    recipe = load_checked(parsed)
    with quick_imports():
        from finetune.monitoring.out_of_memory import explain_out_of_memory
        from finetune.training.build_run import build_run
        from finetune.training.loop import train

    silence_libraries()
    try:
        with orphan_watch.end_with_parent(128 + signal.SIGTERM), signals.ended_within(_PATIENCE_S):
            run = build_run(recipe, quiet=parsed.quiet)
        with run.shutdown.listening():
            results = train(run)
            run.backend.close()
            # Requests to stop reach the ranks one after the other: the last ones find all saved.
            run.shutdown.ignore()
    except FinetuneError:
        raise
    except KeyboardInterrupt as error:
        error.add_note("No step was taken yet: the same command starts again.")
        raise
    except Exception as error:
        if (explained := explain_out_of_memory(error)) is not None:
            raise explained from error
        return say_failure(error)
    return REQUEUE if "stopped" in results else 0


def _dry_run(parsed: argparse.Namespace) -> None:
    recipe = load_checked(parsed)
    silence_libraries()
    from finetune.training.dry_run import describe

    text = describe(recipe)
    if os.environ.get("RANK", "0") == "0":
        to_stdout(text)
